"""The plain PyTorch loop in examples/ runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.numeric import assert_near

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plain_loop.py"


@pytest.fixture(scope="module")
def loop() -> str:
    return EXAMPLE.read_text("utf-8")


def test_it_fits_on_two_screens(loop):
    assert len(loop.splitlines()) <= 60


def test_it_trains_on_the_kept_rows_alone(loop, capsys):
    two_steps = loop.replace("STEPS, P, N, M, T = 10, 2, 32, 8, 56", "STEPS, P, N, M, T = 2, 2, 6, 2, 40")
    assert two_steps != loop
    names: dict = {}
    exec(compile(two_steps, str(EXAMPLE), "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2"]
    assert re.search(r"\b12, .*\b4 rows$", lines[0])
    assert names["logps"].shape[:2] == names["advantage"].shape == (2, 2)
    assert torch.isfinite(names["loss"])


@pytest.mark.numeric
def test_its_log_probabilities_are_the_policys(loop, capsys):
    """Against each row alone, without padding."""
    names: dict = {}
    exec(
        compile(loop.split("for step in")[0].replace("10, 2, 32, 8, 56", "0, 2, 3, 2, 30"), str(EXAMPLE), "exec"), names
    )
    policy, tokenizer = names["policy"], names["tokenizer"]
    with torch.no_grad():
        rows, length, _ = names["generate"](["1+2=", "10+20+30="])
        logps, mask = names["log_probs"](rows, length)
        for row, found, kept in zip(rows, logps, mask.bool(), strict=True):
            bare = row[row != tokenizer.pad_token_id][None]
            alone = policy(bare).logits[:, :-1].log_softmax(-1).gather(-1, bare[:, 1:, None])[0, :, 0]
            assert_near(found[kept], alone[-int(kept.sum()) :], 1e-4)
