"""The count of launches and reads equals one by hand, and that of a step stays below its bar."""

import pytest
import torch

from . import module

launches = module("launches")


def test_operations_that_compute_and_numbers_that_the_host_reads_are_counted():
    numbers = torch.tensor([[1.0, -2.0], [3.0, -4.0]])
    counts = launches.Counts()
    with launches.CountOperations(counts), launches.CountReads(counts):
        numbers * 2  # outside of a phase
        with counts.within("update"):
            doubled = numbers * 2  # 1 launch
            flat = doubled.view(-1).unsqueeze(0)[0]  # views
            positive = flat[flat > 0]  # 2 launches; 1 read, of how many there are
            with counts.within("generation"):
                total = flat.sum()  # 1 launch
            assert total.item() == -4.0  # 1 read
            assert positive.tolist() == [2.0, 6.0]  # 1 read
            assert flat.cpu().numpy().shape == (4,)  # 1 read
            assert flat.tolist() == [2.0, -4.0, 6.0, -8.0]  # 1 read
    assert counts.launches == {"update": 3, "generation": 1}
    assert counts.reads == {"update": 5}


TRL = launches.TRL_ARM
OURS = launches.Arm("ours", launches.M, {})  # n = m: the update has as many rows, and less is generated
WITH_BUDGET = launches.Arm("ours, 16,000 tokens", launches.M, {"max_tokens_per_microbatch": 16_000})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "bars"),
    [
        (launches.Row(1, 16), {OURS.name: 1.4}),
        (launches.Row(4, 8), {OURS.name: 0.65, WITH_BUDGET.name: 0.40}),
    ],
    ids=["one of 16", "eight of 8"],
)
def test_the_update_has_fewer_launches_than_its_bar(row, bars):
    """With short completions: the number of operations does not depend on their length."""
    case = row.case(completion=8)
    base = launches.count_step(TRL, case).launches["update"]
    for arm in (OURS, WITH_BUDGET):
        if arm.name in bars:
            assert launches.count_step(arm, case).launches["update"] <= bars[arm.name] * base
