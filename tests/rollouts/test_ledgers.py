"""Replays of groups that trainings generated whole: waves keep the same rollouts as all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pods_rl.rollouts.stopping import Status, Stopping, wave_sizes
from pods_rl.selection.rules import max_variance

from ..benchmarks import BENCHMARKS, module
from .test_stopping import kept_when_stopped

WAVES = ([16, 8], [16], [16, 1], [24, 8, 16])


@pytest.fixture(scope="module")
def totals() -> Tensor:
    """The groups of the study's arm pods-64-16 (benchmarks/stopping.py): graded totals of two whole trainings."""
    return module("stopping").read_groups().flatten(0, 1)


@pytest.mark.parametrize("waves", WAVES)
@pytest.mark.parametrize("m", [16, 15, 4, 1])
def test_the_study_s_groups_keep_the_same_rollouts(totals: Tensor, waves: list[int], m: int) -> None:
    right_PN = (totals >= 1).double()
    for rewards_PN, high in ((right_PN, 1.0), (totals, 1.2)):
        generated_P, status_P = Stopping(m, 64, low=0.0, high=high).replay(rewards_PN, wave_sizes(waves, 64, m))
        kept_PM = kept_when_stopped(rewards_PN, generated_P, m)
        assert int((kept_PM != max_variance(rewards_PN, m)).any(dim=1).sum()) == 0
        if rewards_PN is right_PN:
            assert (status_P == Status.DECIDED).float().mean() > 0.3
            assert generated_P.double().mean() < 56


def test_a_share_is_kept_by_every_group_of_the_study(totals: Tensor) -> None:
    right_PN = (totals >= 1).double()
    for share in (0.9, 0.75):
        stopping = Stopping(16, 64, share, 0.0, 1.0)
        generated_P, _ = stopping.replay(right_PN, wave_sizes([16, 8], 64, 16))
        kept, whole = kept_when_stopped(right_PN, generated_P, 16), max_variance(right_PN, 16)
        variances = [right_PN.gather(1, chosen).var(dim=1, correction=0) for chosen in (kept, whole)]
        assert (variances[0] >= share * variances[1] - 1e-12).all()
        assert (variances[0] < variances[1] - 1e-3).any()


def test_the_stored_runs_groups_keep_the_same_rollouts() -> None:
    """Ledgers of runs in tests/stored, of 6 rollouts, with shaped rewards whose range is 0 to 1.5."""
    import pyarrow.parquet as pq

    groups: list[list[float]] = []
    for path in sorted((BENCHMARKS.parent / "tests" / "stored").glob("*/rollouts/*.parquet")):
        rewards = pq.read_table(path)["reward"].to_pylist()
        groups += [rewards[start : start + 6] for start in range(0, len(rewards), 6)]
    rewards_PN = torch.tensor(groups)
    assert len(rewards_PN) == 12
    ends = {"low": float(rewards_PN.min()), "high": float(rewards_PN.max())}
    generated_P, _ = Stopping(2, 6, **ends).replay(rewards_PN, wave_sizes([2, 1], 6, 2))
    assert torch.equal(kept_when_stopped(rewards_PN, generated_P, 2), max_variance(rewards_PN, 2))
    assert generated_P.min() < 6


def test_the_tables_of_the_page_are_made_by_the_same_rule(tmp_path: Path) -> None:
    benchmark = module("stopping")
    middle = benchmark.mean(list(benchmark.simulated(100, rates=(0.2, 0.4, 0.8)).values()))
    assert middle["fixed 64"].n == 64
    assert middle["waves, lossless"].n < 0.6 * 64
    assert middle["waves, lossless"].v == middle["fixed 64"].v
    assert middle["waves, lossless"].mismatches == 0
    assert middle["waves, 0.9"].n < middle["waves, lossless"].n
    benchmark.write_csv(tmp_path / "waves.csv", {"all": middle})
    assert (tmp_path / "waves.csv").read_text().count("\n") == 1 + len(benchmark.ARMS)
