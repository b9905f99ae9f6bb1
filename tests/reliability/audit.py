"""Run Python under the audit of `audited/sitecustomize.py`, and read what it and its children did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pods_rl

from .. import DEADLINE

AUDITED = Path(__file__).parent / "audited"
SOURCE = Path(pods_rl.__file__).parents[1]
Event = dict[str, Any]


class Audited(NamedTuple):
    """How an audited process ended, and every event of it and its children."""

    code: int
    output: str
    events: list[Event]


def run_audited(words: Sequence[str], folder: Path) -> Audited:
    """Run `python WORDS` in a folder, with a home and a place for temporary files next to it: `home`, `temporary`."""
    log = folder.parent / f"{folder.name}.audit.jsonl"
    home, temporary = folder.parent / "home", folder.parent / "temporary"
    for path in (folder, home, temporary):
        path.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_", "MPL", "TORCH"))},
        "PYTHONPATH": os.pathsep.join([str(AUDITED), str(SOURCE), os.environ.get("PYTHONPATH", "")]),
        "PODS_AUDIT": str(log),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
        timeout=DEADLINE,
        check=False,
    )
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return Audited(done.returncode, done.stdout, [json.loads(line) for line in lines])


def files_below(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*") if not path.is_dir()}
