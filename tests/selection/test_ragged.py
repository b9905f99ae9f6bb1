"""Advantages and the loss of groups of different sizes, against one group at a time."""

import math

import pytest
import torch
from tests.numeric import FLOAT64, assert_near
from torch import Tensor

from pods_rl.selection import BatchSelection, advantages, pods_objective, select

NAN = math.nan
times = pytest.mark.parametrize("when", ["after", "before"])
scales = pytest.mark.parametrize(
    ("scale", "baseline"),
    [("group", "mean"), ("batch", "mean"), ("none", "mean"), ("batch", "leave_one_out"), ("none", "leave_one_out")],
)


def example(seed: int = 0) -> tuple[Tensor, BatchSelection]:
    """Kept groups of 0, 2, 3, 5 and 6 rollouts, some unscored, one with equal rewards."""
    generator = torch.Generator().manual_seed(seed)
    rewards_PN = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    rewards_PN[1, 2] = NAN
    rewards_PN[5] = 0.3
    indices = torch.tensor([0, 3, 6, 8, 11, 18, 19, 20, 21, 23, 24, 25, 26, 27, 28, 29, 31, 35])
    return rewards_PN, BatchSelection(indices, 6, 6)


def one_at_a_time(rewards_PN: Tensor, kept: BatchSelection, when: str, scale: str, baseline: str) -> Tensor:
    """As the docstring of `advantages` says, with lists."""
    rows_of_prompts = [rewards_N[mask_N].tolist() for rewards_N, mask_N in zip(rewards_PN, kept.mask(), strict=True)]
    references = rows_of_prompts if when == "after" else rewards_PN.tolist()
    centred = []
    centred_references = []
    for rows, reference in zip(rows_of_prompts, references, strict=True):
        scored = [reward for reward in reference if not math.isnan(reward)]

        def against(reward: float, scored: list[float] = scored) -> float:
            if baseline == "leave_one_out":
                return reward - (sum(scored) - reward) / (len(scored) - 1)
            return reward - sum(scored) / len(scored)

        centred.append([against(reward) for reward in rows])
        centred_references.append([against(reward) for reward in scored])
    every = [reward for reference in references for reward in reference if not math.isnan(reward)]
    every_centred = torch.tensor([value for values in centred_references for value in values], dtype=torch.float64)
    result = []
    for rows, reference in zip(centred, references, strict=True):
        scored = [reward for reward in reference if not math.isnan(reward)]
        is_constant = len(set(scored)) <= 1
        for value in rows:
            if scale == "group":
                value /= torch.tensor(scored, dtype=torch.float64).std().item() + 0.01
            elif scale == "batch" and baseline == "leave_one_out":
                value = (value - every_centred.mean().item()) / (every_centred.std().item() + 0.01)
            elif scale == "batch":
                value /= torch.tensor(every, dtype=torch.float64).std().item() + 0.01
            result.append(0.0 if is_constant or math.isnan(value) else value)
    return torch.tensor(result, dtype=torch.float64)


@times
@scales
@pytest.mark.parametrize("seed", range(3))
def test_ragged_advantages_are_those_of_one_group_at_a_time(seed: int, when: str, scale: str, baseline: str) -> None:
    rewards_PN, kept = example(seed)
    ours_R = advantages(rewards_PN, kept, when=when, scale=scale, baseline=baseline, epsilon=0.01)
    assert ours_R.shape == kept.indices.shape
    assert_near(ours_R, one_at_a_time(rewards_PN, kept, when, scale, baseline), FLOAT64)


def test_worked_ragged_advantages() -> None:
    rewards_PN = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 3.0]])
    kept = BatchSelection(torch.tensor([0, 1, 8, 9, 11]), 3, 4)
    assert advantages(rewards_PN, kept, scale="none").tolist() == [0.5, -0.5, -1.0, -1.0, 2.0]
    assert advantages(rewards_PN, kept, scale="none", when="before").tolist() == [0.5, -0.5, -0.75, -0.75, 2.25]
    assert advantages(rewards_PN, kept, scale="none", baseline="leave_one_out").tolist() == [1, -1, -1.5, -1.5, 3]


@times
@scales
def test_groups_of_equal_sizes_are_a_selection_to_the_last_bit(when: str, scale: str, baseline: str) -> None:
    rewards_PN = torch.randn(8, 12, generator=torch.Generator().manual_seed(5))
    selection = select(rewards_PN, 4)
    flat = (selection.indices + 12 * torch.arange(8)[:, None]).flatten()
    ways = {"when": when, "scale": scale, "baseline": baseline}
    ragged_R = advantages(rewards_PN, BatchSelection(flat, 8, 12), **ways)
    assert torch.equal(ragged_R, advantages(rewards_PN, selection, **ways).flatten())


def test_an_empty_selection_has_no_advantages() -> None:
    nothing = BatchSelection(torch.zeros(0, dtype=torch.int64), 2, 4)
    assert advantages(torch.zeros(2, 4), nothing).shape == (0,)


def test_the_loss_of_rows_is_that_of_groups() -> None:
    generator = torch.Generator().manual_seed(7)
    logps_PMT, old_PMT, ref_PMT = torch.randn(3, 2, 4, 5, generator=generator, dtype=torch.float64) - 2
    advantages_PM = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    mask_PMT = torch.rand(2, 4, 5, generator=generator) < 0.7
    options = {"epsilon_high": 0.3, "beta": 0.1}
    of_groups = pods_objective(logps_PMT, old_PMT, advantages_PM, mask_PMT, ref_logps=ref_PMT, **options)
    rows = [tensor.flatten(0, 1) for tensor in (logps_PMT, old_PMT, advantages_PM, mask_PMT)]
    assert torch.equal(pods_objective(*rows, ref_logps=ref_PMT.flatten(0, 1), **options), of_groups)
