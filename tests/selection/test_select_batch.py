"""select_batch: worked values, all subsets, and what holds for every batch."""

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pods_rl.errors import UserError
from pods_rl.selection import BATCH_RULES, BatchSelection, RolloutBatch, is_constant, select, select_batch
from pods_rl.selection.batch import best_sizes

NAN = math.nan
every_rule = pytest.mark.parametrize("rule", BATCH_RULES)


def squares(values: list[float]) -> Fraction:
    """The sum of squared deviations from the mean, exactly."""
    exact = [Fraction(value) for value in values]
    mean = sum(exact, Fraction(0)) / max(len(exact), 1)
    return sum(((value - mean) ** 2 for value in exact), Fraction(0))


def largest_sums(rewards_N: list[float]) -> dict[int, Fraction]:
    """Of a prompt, the largest sum of squares of each size that is possible, over all subsets."""
    constant = is_constant(torch.tensor([rewards_N], dtype=torch.float64)).item()
    scored = [] if constant else [reward for reward in rewards_N if not math.isnan(reward)]
    sizes = [0, *range(2, len(scored) + 1)]
    return {size: max(map(squares, itertools.combinations(scored, size))) for size in sizes}


def stated_sizes(rewards_PN: Tensor, rows: int) -> list[int]:
    """The sizes as the docstring states them: most rows, largest sum, most even, more for the lower prompts."""
    sums = [largest_sums(row) for row in rewards_PN.tolist()]

    def rank(sizes: tuple[int, ...]) -> tuple:
        total = sum(sums[prompt][size] for prompt, size in enumerate(sizes))
        return sum(sizes), total, -sum(size**2 for size in sizes), sizes

    return list(max((sizes for sizes in itertools.product(*sums) if sum(sizes) <= rows), key=rank))


def kept_squares(rewards_PN: Tensor, kept: BatchSelection) -> Fraction:
    rows = zip(rewards_PN.tolist(), kept.mask().tolist(), strict=True)
    return sum((squares([r for r, is_kept in zip(*row, strict=True) if is_kept]) for row in rows), Fraction(0))


# -- worked values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "rows", "indices"),
    [
        # equal prompts share
        ([[1, 0, 0, 1], [0, 1, 0, 1]], 4, [0, 1, 4, 5]),
        # a range of 2 is worth 2, one of 1 is worth 1/2
        ([[1, 0, 0.5], [2, 0, 1]], 2, [3, 4]),
        # five of one prompt (6/5) are worth more than three and two (2/3 + 1/2)
        ([[1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]], 5, [0, 1, 2, 3, 4]),
        # four and none are worth 1.44 of 1.2^2, two and two 0.5 + 0.72, and a fifth row 0.17 of either
        ([[1, 0, 0, 0], [1.2, 0, 0, 1.2]], 4, [4, 5, 6, 7]),
        # fewer are live than wanted
        ([[1, 0, NAN], [NAN, 1, NAN], [3, 3, 3]], 8, [0, 1]),
        ([[NAN, NAN], [2, 2]], 4, []),
        # two prompts of two: an odd row stays empty
        ([[1, 0], [2, 0]], 3, [2, 3]),
    ],
)
def test_worked_batches(rewards: list, rows: int, indices: list[int]) -> None:
    assert select_batch(torch.tensor(rewards), rows).indices.tolist() == indices


# -- against all subsets ----------------------------------------------------------------------------------------------


def example(seed: int) -> tuple[Tensor, int]:
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    prompts = draw.randint(1, 4)
    n = draw.randint(2, 6)
    values = draw.choice([[0.0, 1.0], [0.0, 0.125, 0.25, 1.0, 1.25], [-3.0, 0.0, 0.5]])
    if draw.random() < 0.4:
        rewards_PN = torch.randn(prompts, n, generator=generator, dtype=torch.float64)
    else:
        places_PN = torch.randint(0, len(values), (prompts, n), generator=generator)
        rewards_PN = torch.tensor(values, dtype=torch.float64)[places_PN]
    if draw.random() < 0.4:
        rewards_PN[torch.rand(prompts, n, generator=generator) < 0.3] = NAN
    if draw.random() < 0.2:
        rewards_PN[0] = 0.7
    if draw.random() < 0.2:
        rewards_PN[-1] *= 2.0**20
    return rewards_PN, draw.randint(2, prompts * n)


@pytest.mark.parametrize("seed", range(120))
def test_no_subset_has_a_larger_sum_and_ties_are_broken_as_stated(seed: int) -> None:
    rewards_PN, rows = example(seed)
    kept = select_batch(rewards_PN, rows)
    expected = stated_sizes(rewards_PN, rows)
    assert kept.sizes.tolist() == expected
    sums = [largest_sums(row) for row in rewards_PN.tolist()]
    best = sum(sums[prompt][size] for prompt, size in enumerate(expected))
    assert float(kept_squares(rewards_PN, kept)) == pytest.approx(float(best), rel=1e-12)


def by_dynamic_program(rewards_PN: Tensor, rows: int) -> float:
    """The largest sum of squares of `rows` rows, by a program over one prompt after the other."""
    best = [0.0] + [-math.inf] * rows
    for row in rewards_PN.double():
        sorted_N = row.sort().values
        gains = {0: 0.0}
        for size in range(2, len(row) + 1):
            subsets = [torch.cat([sorted_N[: size - k], sorted_N[len(row) - k :]]) for k in range(size + 1)]
            gains[size] = max(float((subset - subset.mean()).square().sum()) for subset in subsets)
        best = [max(best[r - k] + gain for k, gain in gains.items() if k <= r) for r in range(rows + 1)]
    return best[rows]


@pytest.mark.parametrize(
    ("kind", "prompts", "n", "rows"), [("normal", 64, 16, 257), ("binary", 96, 6, 301), ("graded", 40, 32, 641)]
)
def test_larger_batches_lose_less_than_a_thousandth(kind: str, prompts: int, n: int, rows: int) -> None:
    """These are larger than the exact program's limit; seen: nothing is lost."""
    generator = torch.Generator().manual_seed(rows)
    normal_PN = torch.randn(prompts, n, generator=generator, dtype=torch.float64)
    right_PN = (torch.rand(prompts, n, generator=generator) < torch.rand(prompts, 1, generator=generator)).double()
    format_PN = 0.2 * (torch.rand(prompts, n, generator=generator) < 0.9)
    rewards_PN = {"normal": normal_PN, "binary": right_PN, "graded": right_PN + format_PN}[kind]
    live_PN = rewards_PN[~is_constant(rewards_PN)]
    rows = min(rows, live_PN.numel())
    kept = select_batch(rewards_PN, rows)
    assert len(kept.indices) == rows
    best = by_dynamic_program(live_PN, rows)
    assert best * 0.999 <= float(kept_squares(rewards_PN, kept)) <= best * (1 + 1e-9)


# -- what holds for every batch ---------------------------------------------------------------------------------------

grid = st.integers(-40, 40).map(float) | st.sampled_from([0.0, 1.0]) | st.just(NAN)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, int]:
    prompts = draw(st.integers(1, 6))
    n = draw(st.integers(2, 10))
    rewards = draw(st.lists(st.lists(grid, min_size=n, max_size=n), min_size=prompts, max_size=prompts))
    return torch.tensor(rewards, dtype=torch.float64), draw(st.integers(2, prompts * n))


@given(batches(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_prompts_and_rollouts_does_not_matter(batch, draw: random.Random) -> None:
    """Sizes up to a tie, which the lower prompt wins; the kept rewards of each prompt."""
    rewards_PN, rows = batch
    prompts, n = rewards_PN.shape
    rollouts = draw.sample(range(n), n)
    before = select_batch(rewards_PN, rows)
    mixed = select_batch(rewards_PN[:, rollouts], rows)
    assert torch.equal(mixed.sizes, before.sizes)
    for row in range(prompts):
        kept = before.take(rewards_PN)[before.groups == row].sort().values
        assert torch.equal(mixed.take(rewards_PN[:, rollouts])[mixed.groups == row].sort().values, kept)
    order = draw.sample(range(prompts), prompts)
    turned = select_batch(rewards_PN[order], rows)
    assert turned.sizes.sort().values.tolist() == before.sizes.sort().values.tolist()
    assert kept_squares(rewards_PN[order], turned) == pytest.approx(kept_squares(rewards_PN, before), rel=1e-9)


@given(batches(), st.lists(st.integers(-(10**6), 10**6), min_size=6, max_size=6), st.integers(-40, 40))
@settings(max_examples=100, deadline=None)
def test_a_shift_of_each_prompt_and_a_scale_of_all_do_not_matter(batch, shifts: list[int], exponent: int) -> None:
    rewards_PN, rows = batch
    shift_P1 = torch.tensor(shifts[: len(rewards_PN)], dtype=torch.float64)[:, None]
    # A shift must leave a prompt live: its spread is compared with the size of its rewards.
    live_PN = rewards_PN[is_constant(rewards_PN) == is_constant(rewards_PN + shift_P1)]
    shift_P1 = shift_P1[is_constant(rewards_PN) == is_constant(rewards_PN + shift_P1)]
    rows = min(rows, live_PN.numel())
    if rows >= 2:
        moved = select_batch((live_PN + shift_P1) * 2.0**exponent, rows)
        if torch.equal(is_constant(live_PN), is_constant((live_PN + shift_P1) * 2.0**exponent)):
            assert torch.equal(moved.indices, select_batch(live_PN, rows).indices)


@given(batches())
@settings(max_examples=100, deadline=None)
def test_one_prompt_is_the_papers_rule(batch) -> None:
    rewards_1N = batch[0][:1]
    for rows in range(2, rewards_1N.shape[1] + 1):
        kept = select_batch(rewards_1N, rows).indices
        if is_constant(rewards_1N):
            assert len(kept) == 0
            continue
        papers_M = select(rewards_1N, rows).indices[0]
        assert torch.equal(kept, papers_M[~rewards_1N[0, papers_M].isnan()])


@given(batches())
@settings(max_examples=50, deadline=None)
def test_what_is_kept_is_live_and_never_alone(batch) -> None:
    rewards_PN, rows = batch
    for rule in BATCH_RULES:
        kept = select_batch(rewards_PN, rows, rule, generator=torch.Generator().manual_seed(0))
        assert len(kept.indices) <= rows
        assert not kept.take(rewards_PN).isnan().any()
        assert not is_constant(rewards_PN)[kept.groups].any()
        assert torch.equal(kept.sizes, best_sizes(rewards_PN, rows))


@pytest.mark.parametrize(("dtype", "huge"), [(torch.float32, 1e38), (torch.float64, 1e300), (torch.float64, 1.7e308)])
def test_huge_rewards_do_not_overflow(dtype: torch.dtype, huge: float) -> None:
    shape_PN = torch.tensor([[0.0, 1.0, -1.0, 0.25], [-1.0, -1.0, 1.0, 0.9], [0.5, 0.0, 0.0, 0.5]], dtype=dtype)
    for rows in range(2, 13):
        assert torch.equal(select_batch(shape_PN * huge, rows).indices, select_batch(shape_PN, rows).indices)


def test_one_huge_prompt_does_not_hide_the_differences_of_the_others() -> None:
    rewards_PN = torch.tensor([[1e9, 0, 0, 0], [1, 0, 0, 0], [1.5, 0, 0, 0]], dtype=torch.float64)
    assert select_batch(rewards_PN, 6).sizes.tolist() == [4, 0, 2]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32])
def test_every_real_dtype_selects_alike_and_leaves_the_graph(dtype: torch.dtype) -> None:
    rewards_PN = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 0]]).to(dtype)
    if dtype.is_floating_point:
        rewards_PN.requires_grad_()
    assert select_batch(rewards_PN, 6).indices.tolist() == [0, 1, 2, 3, 4, 7]


def test_random_keeps_the_same_sizes_and_is_repeatable() -> None:
    rewards_PN = torch.randint(0, 2, (8, 16), generator=torch.Generator().manual_seed(3)).float()

    def draw(seed: int) -> BatchSelection:
        return select_batch(rewards_PN, 32, "random", generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1).indices, draw(1).indices)
    assert not torch.equal(draw(1).indices, draw(2).indices)
    assert torch.equal(draw(1).sizes, select_batch(rewards_PN, 32).sizes)


# -- what is refused --------------------------------------------------------------------------------------------------


@every_rule
@pytest.mark.parametrize(
    ("rewards", "rows", "error", "message"),
    [
        ([[0.0, 1.0]], 2, TypeError, "^rewards "),
        (torch.zeros(6), 2, ValueError, "^rewards "),
        (torch.zeros(0, 4), 2, ValueError, "^rows .*0 prompts"),
        (torch.zeros(2, 4), 9, ValueError, "^rows .*rows = 9"),
        (torch.zeros(2, 4), 1, ValueError, "^rows .*rows = 1"),
        (torch.zeros(2, 4), True, TypeError, "^rows, "),
        (torch.tensor([[NAN, 1.0], [-math.inf, 0.0]]), 2, ValueError, "^1 of 4 .*group 1.*rollout 0"),
    ],
)
def test_bad_input_is_refused(rule: str, rewards, rows, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        select_batch(rewards, rows, rule)


def test_a_bad_generator_is_named() -> None:
    with pytest.raises(TypeError, match=r"^generator "):
        select_batch(torch.zeros(2, 4), 2, generator=3)


# -- rules of a user's ------------------------------------------------------------------------------------------------


def lowest(batch: RolloutBatch) -> Tensor:
    """Keep the rows with the lowest rewards, as flat numbers in any order; it may change what it receives."""
    numbers = batch.rewards.view(-1).argsort()[: batch.rows]
    batch.rewards.fill_(7.0)
    return numbers


def first_two(batch: RolloutBatch) -> BatchSelection:
    prompts, n = batch.rewards.shape
    return BatchSelection(torch.tensor([0, 1]), prompts, n)


def test_a_users_rule_returns_flat_numbers_or_a_selection() -> None:
    rewards_PN = torch.tensor([[0.5, 0.9, 0.4], [0.9, 0.3, 0.2]])
    before_PN = rewards_PN.clone()
    assert select_batch(rewards_PN, 4, lowest).indices.tolist() == [0, 2, 4, 5]
    assert torch.equal(rewards_PN, before_PN)
    assert select_batch(rewards_PN, 4, first_two).indices.tolist() == [0, 1]


@pytest.mark.parametrize(
    "returned",
    [
        [[0, 1]],
        None,
        torch.tensor([[0, 1], [4, 5]]),
        torch.tensor([0, 1, 2, 3, 4]),  # five of four
        torch.tensor([0, 1, 1, 2]),
        torch.tensor([0, 8]),
        torch.tensor([0, 1, 4]),  # a single rollout of the second prompt
        BatchSelection(torch.tensor([0, 1]), 1, 4),
        KeyError("a key\nof mine"),
        SystemExit(0),
    ],
)
def test_a_users_rule_is_checked(returned) -> None:
    """An exception is raised."""

    def mine(batch):
        if isinstance(returned, BaseException):
            raise returned
        return returned

    with pytest.raises(UserError, match="'mine'") as caught:
        select_batch(torch.zeros(2, 4), 4, mine)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (None, "None"),
        (RolloutBatch, "class"),
        (lambda rewards_PN, m, *, generator=None: rewards_PN, r"takes \(rewards_PN, m"),
        ("percentile", "unknown batch rule 'percentile'"),
        ("max_varience", "max_variance[?]"),
    ],
)
def test_a_value_that_is_not_a_batch_rule_is_refused(rule, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        select_batch(torch.zeros(1, 4), 2, rule=rule)
    assert "\n" not in str(caught.value)


# -- BatchSelection ---------------------------------------------------------------------------------------------------


def test_a_batch_selection_marks_counts_and_takes_its_rows() -> None:
    kept = BatchSelection(torch.tensor([1, 2, 8, 9, 11]), 3, 4)
    assert kept.sizes.tolist() == [2, 0, 3]
    assert kept.groups.tolist() == [0, 0, 2, 2, 2]
    assert kept.slots.tolist() == [0, 1, 0, 1, 2]
    assert kept.take(torch.arange(12).view(3, 4)).tolist() == [1, 2, 8, 9, 11]
    assert kept.mask().tolist() == [[False, True, True, False], [False] * 4, [True, True, False, True]]
    empty = BatchSelection(torch.zeros(0, dtype=torch.int64), 2, 4)
    assert empty.sizes.tolist() == [0, 0]
    assert empty.take(torch.zeros(2, 4)).shape == (0,)
    with pytest.raises(ValueError, match=r"\[2, 4\].*\[4, 2\]"):
        empty.take(torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([0, 1], 1, 4), TypeError, "indices"),
        ((torch.tensor([1, 0]), 1, 4), ValueError, "indices.*ascending"),
        ((torch.tensor([-1, 0]), 1, 4), ValueError, "0 to 3"),
        ((torch.tensor([0, 1, 4]), 2, 4), ValueError, "prompt 1"),
        ((torch.tensor([0, 1]), 1.0, 4), TypeError, "num_prompts"),
        ((torch.tensor([0, 1]), 1, -4), ValueError, "num_rollouts"),
    ],
)
def test_a_batch_selection_checks_its_rows(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BatchSelection(*arguments)


@pytest.mark.parametrize(
    "rule", [*BATCH_RULES, lambda batch: (~batch.rewards.isnan()).flatten().nonzero().squeeze(1)[:4]]
)
def test_prompts_within_the_tolerance_are_not_kept(rule) -> None:
    rewards_PN = torch.tensor([[0.0, 0.1, 0.1, 0.0], [0.0, 0.2, 0.0, 0.2], [1.0, 1.0, 1.1, 1.0]])
    generator = torch.Generator().manual_seed(0)
    kept = select_batch(rewards_PN, 4, rule, tolerance=0.1, generator=generator)
    assert kept.indices.tolist() == [4, 5, 6, 7]
    assert len(select_batch(torch.tensor([[0, 1], [1, 2]]), 2, rule, tolerance=1, generator=generator).indices) == 0
    assert set(select_batch(rewards_PN, 12, generator=generator).groups.tolist()) == {0, 1, 2}
