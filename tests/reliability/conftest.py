"""The trainer over a small random model that the engine's own tests use; the figures at the end of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ..engines.conftest import dataset, make_trainer, random_model, tokenizer

__all__ = ["dataset", "make_trainer", "random_model", "tokenizer"]

FIGURE = re.compile(r"[A-Za-z][\w ,()-]*: .*\d.*")  # what a test prints of a promise: `resume: 48 of 48 identical`


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder as slow: they start processes, kill them and fill disks."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the figure of each promise that was kept."""
    passed = [report for report in terminalreporter.stats.get("passed", []) if "tests/reliability/" in report.nodeid]
    figures = [line for report in passed for line in report.capstdout.splitlines() if FIGURE.fullmatch(line)]
    if figures:
        terminalreporter.section("figures (docs/reliability.md)")
        terminalreporter.write_line("\n".join(figures))
