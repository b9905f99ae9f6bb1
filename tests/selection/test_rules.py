"""What all rules share, and the three simple ones."""

import doctest
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.numeric import FLOAT32, assert_near

from pods_rl.selection import RULES
from pods_rl.sums import running_sums, sums_by_doubling

NAN = math.nan
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@every_rule
@pytest.mark.parametrize(("n", "m"), [(1, 1), (5, 1), (5, 5), (12, 7), (64, 16)])
def test_indices_are_distinct_ascending_int64(rule, n: int, m: int) -> None:
    rewards_PN = torch.randint(0, 3, (30, n), generator=seeded(n)).float()
    rewards_PN[20:].masked_fill_(torch.rand(10, n, generator=seeded(m)) < 0.5, NAN)
    indices_PM = rule(rewards_PN, m, generator=seeded())
    assert indices_PM.shape == (30, m)
    assert indices_PM.dtype == torch.int64
    assert indices_PM.min() >= 0
    assert indices_PM.max() < n
    assert (indices_PM.diff(dim=1) > 0).all()
    if m == n:
        assert torch.equal(indices_PM, torch.arange(n).expand(30, n))
    assert rule(rewards_PN[:0], m).shape == (0, m)


@every_rule
def test_unscored_rollouts_only_fill_up_lowest_index_first(rule) -> None:
    rewards_PN = torch.tensor(
        [
            [NAN, 0.0, NAN, 1.0, 0.5, NAN],  # three scored: no more and no fewer than m
            [NAN, NAN, NAN, 0.2, NAN, NAN],  # one scored
            [NAN, NAN, NAN, NAN, NAN, NAN],
        ]
    )
    assert rule(rewards_PN, 3, generator=seeded()).tolist() == [[1, 3, 4], [0, 1, 3], [0, 1, 2]]
    assert not rewards_PN[0, rule(rewards_PN, 2, generator=seeded())[0]].isnan().any()


@every_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_every_real_dtype_gives_the_same_indices(rule, dtype: torch.dtype) -> None:
    rewards_PN = torch.randint(-2, 3, (10, 9), generator=seeded())
    expected = rule(rewards_PN.double(), 4, generator=seeded())
    assert torch.equal(rule(rewards_PN.to(dtype), 4, generator=seeded()), expected)
    binary_PN = rewards_PN > 0
    assert torch.equal(rule(binary_PN, 4, generator=seeded()), rule(binary_PN.double(), 4, generator=seeded()))


@every_rule
@pytest.mark.parametrize(
    ("rewards", "m", "error", "message"),
    [
        ([[0.0, 1.0]], 1, TypeError, "list"),
        (torch.zeros(6), 1, ValueError, r"float32.*\[6\].*rewards\[None\]"),
        (torch.zeros(2, 0), 1, ValueError, r"shape \[2, 0\]"),
        (torch.zeros(2, 4), 5, ValueError, "m = 5"),
        (torch.zeros(2, 4), True, TypeError, "True"),
        (torch.tensor([[NAN], [-math.inf]]), 1, ValueError, "1 of 2 .*group 1.*rollout 0"),
    ],
)
def test_bad_input_is_refused(rule, rewards, m, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rule(rewards, m)


@pytest.mark.parametrize(("n", "m"), [(7, 3), (64, 16), (12, 11)])
def test_max_reward_agrees_with_a_sort(n: int, m: int) -> None:
    """Of equal rewards it keeps the first."""
    rewards_PN = torch.randint(0, 5, (40, n), generator=seeded(n)).float()
    expected = [sorted(np.argsort(-row, kind="stable")[:m].tolist()) for row in rewards_PN.numpy()]
    assert RULES["max_reward"](rewards_PN, m).tolist() == expected


def test_percentile_keeps_evenly_spaced_ranks() -> None:
    ranks_N = torch.arange(64.0)
    assert RULES["percentile"](ranks_N[None], 16)[0].tolist() == list(range(2, 64, 4))
    assert RULES["percentile"](ranks_N[None].flip(1), 16)[0].tolist() == list(range(1, 64, 4))
    rewards_PN = torch.tensor([[NAN, 4.0, 1.0, NAN, 3.0, 2.0, NAN]])  # of scored rollouts only
    assert RULES["percentile"](rewards_PN, 2).tolist() == [[1, 5]]


def test_percentile_ranks_are_distinct_for_every_m_up_to_n() -> None:
    for n in range(1, 30):
        for m in range(1, n + 1):
            indices_M = RULES["percentile"](torch.arange(n).float()[None], m)[0]
            assert (indices_M.diff() > 0).all(), (n, m)
            quantiles_M = (torch.arange(m) + 0.5) / m * n
            assert (indices_M - quantiles_M).abs().max() <= 1, (n, m)


def test_random_is_repeatable_and_looks_at_no_reward() -> None:
    high, low = torch.full((5, 20), 9.0), torch.zeros(5, 20)
    first = RULES["random"](high, 6, generator=seeded(7))
    assert torch.equal(RULES["random"](low, 6, generator=seeded(7)), first)
    assert not torch.equal(RULES["random"](low, 6, generator=seeded(8)), first)
    torch.manual_seed(1)
    drawn = RULES["random"](low, 6)
    torch.manual_seed(1)
    assert torch.equal(RULES["random"](low, 6), drawn)


def test_random_keeps_each_scored_rollout_equally_often() -> None:
    unscored_PN = torch.full((2, 100), NAN)
    unscored_PN[:, 50:52] = 0.0
    assert RULES["random"](unscored_PN, 40).tolist() == [[*range(38), 50, 51]] * 2
    rewards_PN = torch.zeros(20000, 6)
    rewards_PN[:, 2] = NAN
    counts_N = RULES["random"](rewards_PN, 2, generator=seeded()).flatten().bincount(minlength=6)
    assert counts_N[2] == 0
    # A count is binomial(20000, 2/5) with a deviation of 69: 5 of them
    assert (counts_N[[0, 1, 3, 4, 5]] - 8000).abs().max() < 350


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_rules_use_no_cumsum_on_a_gpu(monkeypatch, deterministic) -> None:
    """There torch raises at a `cumsum` of floating-point numbers; here tensors without values stand in."""
    devices = []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setattr(torch.Tensor, "cumsum_", lambda values, dim: devices.append(values.device.type))
    running_sums(torch.empty(2, 5, device="meta"))
    running_sums(torch.empty(2, 5))
    assert devices == (["cpu"] if deterministic else ["meta", "cpu"])


@pytest.mark.parametrize("columns", [1, 2, 7, 64, 1000])
def test_sums_by_doubling_are_the_running_sums(columns):
    values = torch.rand(3, columns, generator=torch.Generator().manual_seed(columns))
    assert_near(sums_by_doubling(values), values.double().cumsum(1), FLOAT32)


PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"


def test_the_examples_of_the_page_run() -> None:
    results = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert results.attempted > 5
    assert results.failed == 0


def test_the_worked_table_of_the_page_holds() -> None:
    rows = re.findall(r"^\| \**(\d)\** \| \**([\d., ]+?)\** \| \**([\d.]+)\** \|$", PAGE.read_text(), re.MULTILINE)
    assert [row[0] for row in rows] == list("01234")
    rewards = sorted([1.1, 0.0, 0.1, 1.1, 0.05, 0.0, 1.0, 0.1])
    for k, kept, variance in ((int(k), [float(r) for r in kept.split(",")], float(v)) for k, kept, v in rows):
        assert kept == rewards[: 4 - k] + rewards[8 - k :]
        assert torch.tensor(kept).var(correction=0).item() == pytest.approx(variance, abs=6e-5)
