"""The examples and the worked table of docs/how-it-works.md."""

import doctest
import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"


def test_examples_run() -> None:
    results = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert results.attempted > 5
    assert results.failed == 0


def test_the_worked_table_holds() -> None:
    rows = re.findall(r"^\| \**(\d)\** \| \**([\d., ]+?)\** \| \**([\d.]+)\** \|$", PAGE.read_text(), re.MULTILINE)
    assert [row[0] for row in rows] == list("01234")
    rewards = sorted([1.1, 0.0, 0.1, 1.1, 0.05, 0.0, 1.0, 0.1])
    for k, kept, variance in ((int(k), [float(r) for r in kept.split(",")], float(v)) for k, kept, v in rows):
        assert kept == rewards[: 4 - k] + rewards[8 - k :]
        assert torch.tensor(kept).var(correction=0).item() == pytest.approx(variance, abs=6e-5)
