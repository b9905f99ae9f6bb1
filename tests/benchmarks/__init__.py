"""The small forms of what is in benchmarks/: they run, and what is not a time in them is right."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import DEADLINE

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def module(name: str) -> ModuleType:
    """A benchmark as a module; those beside it can be imported from it, as when it is run."""
    specification = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    loaded = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = loaded  # dataclasses look their module up
    sys.path.insert(0, str(BENCHMARKS))
    try:
        specification.loader.exec_module(loaded)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return loaded


def run(name: str, *words: str, folder: Path, limit: float = DEADLINE) -> tuple[str, Any]:
    """What a benchmark prints, and what it writes with `--json`."""
    figures = folder / f"{name}.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *words, "--json", str(figures)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout, json.loads(figures.read_text())
