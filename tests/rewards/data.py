"""Real data sets beside the repository; tests that need them are skipped where there are none."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2].parent / "shared" / "data"


@cache
def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{name} is not in ../shared/data")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
