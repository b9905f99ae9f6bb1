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


def chemistry_rows() -> list[dict[str, Any]]:
    """Every row of the chemistry set that has choices."""
    names = sorted(path.name for path in (FOLDER / "sciknoweval_chemistry").glob("*.jsonl"))
    found = [row for name in names for row in rows(f"sciknoweval_chemistry/{name}") if row["choices"]["label"]]
    return found or pytest.skip("sciknoweval_chemistry is not in ../shared/data")


def equations() -> list[tuple[str, str]]:
    """The unbalanced and the balanced equation of every row of that kind."""
    name = "sciknoweval_chemistry/L3_balancing_chemical_equation.jsonl"
    return [(row["question"].split("\n")[1], row["answer"]) for row in rows(name)]
