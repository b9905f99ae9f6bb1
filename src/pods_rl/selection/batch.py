"""Rules over a batch: which R of all P * N rollouts of an optimizer step to train on.

Each is a pure function of a `RolloutBatch` on the rewards' own device (which must support float64). Rollouts that are
unscored (NaN), or whose prompt's rewards are all equal (`is_constant`), are never kept: if a batch has fewer than R
others, fewer are kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import raised
from ..text import find
from . import rules
from .objective import is_constant
from .types import (
    BatchRule,
    BatchSelection,
    RolloutBatch,
    Rule,
    RuleError,
    check_generator,
    check_rows,
    checked_rewards,
    kind_of,
)

TIE = 1e-9  # of the worth of the last row: gains that differ by less count as equal, so that rounding decides nothing
EXACT = 2**18  # numbers in the largest table of a dynamic program over all rows
WINDOW = 8  # in a larger batch: the rows that a part of the prompts may gain or lose


def max_variance(batch: RolloutBatch) -> BatchSelection:
    """Keep the R rollouts for which the squared deviations from each prompt's mean add up to the largest sum.

    Source: the objective of PODS (arXiv 2504.13818), section 3.3, summed over prompts. For one prompt it is the
    paper's rule. Each prompt keeps none or at least two of its rollouts, and of those it keeps the paper's
    max-variance subset of that size: the highest and the lowest.

    The sizes come from the upper hulls of the prompts' gains g(k), the largest sum of squared deviations of k
    rollouts: the steps of all hulls are taken in order of their worth per row, until the next does not fit. A dynamic
    program then moves rows between prompts, so that all R are used. The sum is the largest possible if the steps fit
    exactly, or if P (2 R + 1)^2 is at most 2^18. Otherwise the program considers few rows at once, and the sum is less
    than the largest by at most the worth of one step.

    Ties: sums that differ by less than 1e-9 of the last row's worth are equal. Then the sizes are as even as possible
    (least sum of squares), and of equal ones the lower prompt keeps more. Within a prompt: as `rules.max_variance`.

    Edges: if R is odd and every live prompt has two scored rollouts, R - 1 are kept.

    >>> kept = max_variance(RolloutBatch(torch.tensor([[1.0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]]), rows=6))
    >>> kept.sizes, kept.indices
    (tensor([4, 0, 2]), tensor([ 0,  1,  2,  3,  8, 11]))
    """
    return keep_sizes(batch, best_sizes(batch.rewards, batch.rows), rules.max_variance)


def random(batch: RolloutBatch) -> BatchSelection:
    """Keep as many of each prompt's rollouts as `max_variance`, chosen at random: what the sizes alone contribute.

    >>> rewards = torch.tensor([[1.0, 0, 0, 1], [1, 1, 1, 1]])
    >>> random(RolloutBatch(rewards, rows=2, generator=torch.Generator().manual_seed(0))).sizes
    tensor([2, 0])
    """
    return keep_sizes(batch, best_sizes(batch.rewards, batch.rows), rules.random)


BATCH_RULES: dict[str, BatchRule] = {"max_variance": max_variance, "random": random}


def select_batch(
    rewards_PN: Tensor,
    rows: int,
    rule: str | BatchRule = "max_variance",
    *,
    generator: torch.Generator | None = None,
    tolerance: float = 0.0,
) -> BatchSelection:
    """Keep R of the rollouts of a batch, different numbers of different prompts.

    Args:
        rewards_PN: `[P, N]`, any real dtype; NaN where unscored, finite elsewhere. Prompts of several generations may
            be concatenated, and prompts with fewer rollouts filled up with NaN.
        rows: R, the number of rollouts to keep, 2 to P * N.
        rule: a name or import path as `get_batch_rule` takes, or the function itself. A rule of your own receives
            copies, which it may change.
        generator: for rules that draw.
        tolerance: of `is_constant`, in units of reward. The rule receives the prompts whose rewards differ by no more
            as unscored.

    Returns:
        At most R rollouts. There are fewer if fewer are live: scored, of a prompt whose rewards are not all equal.

    Raises:
        TypeError, ValueError: bad rewards, rows, generator or tolerance.
        UserError: an unknown rule, or one that raises or does not return at most R different rollouts.

    >>> select_batch(torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]]), 2).indices
    tensor([0, 1])
    """
    function = as_batch_function(rule)
    check_generator(generator)
    checked_PN, _ = checked_rewards(rewards_PN)
    is_within_P = is_constant(rewards_PN, tolerance)
    prompts, n = rewards_PN.shape
    check_rows(rows, prompts, n)
    if tolerance:
        rewards_PN = checked_PN.masked_fill(is_within_P[:, None], math.nan)
    batch = RolloutBatch(rewards_PN.detach().clone(), rows, generator)
    name = rule if isinstance(rule, str) else getattr(rule, "__name__", repr(rule))
    expected = f"at most {rows} different int64 numbers p * {n} + i on {rewards_PN.device}, or a BatchSelection of them"
    try:
        returned = function(batch)
        if isinstance(returned, Tensor) and returned.ndim == 1:
            returned = BatchSelection(returned.sort().values, prompts, n)
    except (Exception, SystemExit) as error:
        raise RuleError(
            f"the rule '{name}' failed: {raised(error)}, for {prompts} groups of {n} rewards and rows = {rows}. Fix "
            f"the rule: it returns {expected}."
        ) from error
    if not isinstance(returned, BatchSelection):
        raise RuleError(f"the rule '{name}' must return {expected}; it returned {kind_of(returned)}.")
    is_of_batch = (returned.num_prompts, returned.num_rollouts) == (prompts, n)
    if not is_of_batch or returned.indices.device != rewards_PN.device or len(returned.indices) > rows:
        raise RuleError(
            f"the rule '{name}' must return {expected}; it returned {len(returned.indices)} of "
            f"{returned.num_prompts} x {returned.num_rollouts} on {returned.indices.device}."
        )
    return returned


def get_batch_rule(name: str) -> BatchRule:
    """Return the rule of that name in `BATCH_RULES`, or at that import path.

    >>> get_batch_rule("max_variance").__name__
    'max_variance'
    """
    return find("batch rule", name, BATCH_RULES)


def as_batch_function(rule: str | BatchRule) -> BatchRule:
    """Return the function of a rule over the batch; raise a UserError unless `select_batch` can call it."""
    function: BatchRule = rules.function_of("batch rule", rule, BATCH_RULES, "(batch)")
    expected = "(batch), a RolloutBatch, that returns a BatchSelection or the flat numbers of the rollouts to keep"
    rules.check_takes("batch rule", rule, function, expected, None)
    return function


def keep_sizes(batch: RolloutBatch, sizes_P: Tensor, rule: Rule) -> BatchSelection:
    """Return the selection that keeps a number of each prompt's rollouts, 0 or 2 to N, chosen by a rule of a prompt."""
    rewards_PN, _ = checked_rewards(batch.rewards)
    prompts, n = rewards_PN.shape
    kept_PN = torch.zeros_like(rewards_PN, dtype=torch.bool)
    for size in sizes_P.unique().tolist():
        if size == 0:
            continue
        same_Q = (sizes_P == size).nonzero().squeeze(1)
        indices_QM = rule(rewards_PN[same_Q], size, generator=batch.generator)
        kept_PN[same_Q[:, None], indices_QM] = True
    return BatchSelection(kept_PN.view(-1).nonzero().squeeze(1), prompts, n)


def best_sizes(rewards_PN: Tensor, rows: int) -> Tensor:
    """Return how many rollouts of each prompt to keep, int64 `[P]`: the sizes of `max_variance`."""
    rewards_PN, _ = checked_rewards(rewards_PN)
    gains_PK, live_P = _gains(rewards_PN)
    size_K = torch.arange(gains_PK.shape[1], device=gains_PK.device)
    # A size is possible if the prompt has that number of live rollouts, and two can be compared.
    is_possible_PK = (size_K <= live_P[:, None]) & (size_K != 1)
    sizes_P, worth, left, longest = _whole_steps(gains_PK, is_possible_PK, rows)
    is_exact = len(live_P) * (2 * rows + 1) ** 2 <= EXACT
    window = rows if is_exact else max(WINDOW, 2 * longest)
    return _move_rows(gains_PK, is_possible_PK, sizes_P, worth, left, window)


def _gains(rewards_PN: Tensor) -> tuple[Tensor, Tensor]:
    """Return g(k), the largest sum of squared deviations of k rollouts of each prompt, `[P, N + 1]`, and the live ones.

    The best k + 1 are the best k with the next lowest or the next highest reward, whichever is farther from their
    mean. Why: let c be the mean of a lowest and b highest rewards, x the next lowest and y the next highest. Adding x
    gives the larger sum if c > (x + y) / 2. With a + b fixed, a larger b raises c and lowers x + y, so the sum over b
    has one peak. One more x (or y) moves that peak by at most one. So one pass finds all k, in O(N) per prompt.

    Gains are in units of the largest squared half-range of a live prompt; beyond the live rollouts they are not
    meaningful. Live rollouts, int64 `[P]`: the scored ones of a prompt that is not constant.
    """
    prompts, n = rewards_PN.shape
    scored_P = (~rewards_PN.isnan()).sum(dim=1)
    live_P = scored_P.masked_fill(is_constant(rewards_PN), 0)
    is_live_P = live_P > 0
    # Columns are contiguous: each step reads one value of every prompt.
    sorted_PN = rewards_PN.double().nan_to_num(nan=math.inf).sort(dim=1).values
    prompt_P = torch.arange(prompts, device=rewards_PN.device)
    low_P = sorted_PN[:, 0]
    high_P = sorted_PN[prompt_P, (live_P - 1).clamp(min=0)]
    half_P = (high_P / 2 - low_P / 2).masked_fill(~is_live_P, 1.0)  # halves do not overflow
    middle_P = low_P + half_P
    values = ((sorted_PN - middle_P[:, None]) / half_P[:, None]).reshape(-1)  # from -1 to 1

    gains = [torch.zeros_like(half_P), torch.zeros_like(half_P), torch.full_like(half_P, 2.0)]
    mean_P = torch.zeros_like(half_P)
    start_P = prompt_P * n
    next_low_P = start_P + 1
    next_high_P = start_P + live_P - 2
    for k in range(2, n):
        below_P = mean_P - values[next_low_P.clamp(max=prompts * n - 1)]
        above_P = values[next_high_P.clamp(min=0)] - mean_P
        is_low_P = below_P > above_P
        distance_P = torch.where(is_low_P, -below_P, above_P)
        gains.append(gains[-1] + distance_P.square() * (k / (k + 1)))
        mean_P = mean_P + distance_P / (k + 1)
        next_low_P = next_low_P + is_low_P.long()
        next_high_P = next_high_P - (~is_low_P).long()
    largest = half_P.masked_fill(~is_live_P, 0.0).amax() if prompts else half_P.sum()
    scale_P = (half_P / largest).square().masked_fill(~is_live_P, 0.0)
    gains_PK = torch.stack(gains[: n + 1], dim=1) * scale_P[:, None]
    return gains_PK.masked_fill(~is_live_P[:, None], 0.0), live_P


def _whole_steps(gains_PK: Tensor, is_possible_PK: Tensor, rows: int) -> tuple[Tensor, Tensor, int, int]:
    """Take the steps of the upper hulls, best first, until one does not fit in `rows`.

    Returns:
        The sizes, `[P]`; the worth per row of the first step that is not taken (0 if all are), a scalar; the number of
        rows left; the number of rows of the longest step.
    """
    size_K = torch.arange(gains_PK.shape[1], device=gains_PK.device)
    on_hull_PK = _upper_hull(gains_PK, is_possible_PK)
    before_PK = _last_before(on_hull_PK)
    length_PK = size_K - before_PK
    worth_PK = (gains_PK - gains_PK.gather(1, before_PK)) / length_PK.clamp(min=1)
    # Along a hull the worth falls; rounding must not reverse two steps.
    worth_PK = worth_PK.masked_fill(~on_hull_PK | (size_K == 0), math.inf).cummin(dim=1).values

    step_S = (on_hull_PK & (size_K > 0)).view(-1).nonzero().squeeze(1)  # of all prompts, the lower prompts first
    worth_S = worth_PK.view(-1)[step_S]
    size_S = step_S % gains_PK.shape[1]
    descending_S = worth_S.argsort(descending=True, stable=True)
    ordered_S = worth_S[descending_S]
    is_lower_S = torch.cat([ordered_S[:1] < -math.inf, ordered_S[1:] < ordered_S[:-1] * (1 - TIE)])
    rank_S = torch.empty_like(step_S)
    rank_S[descending_S] = is_lower_S.long().cumsum(0)
    # Of steps with equal worth those of the smaller groups first, so that sizes are even; then the lower prompt.
    order_S = (rank_S * gains_PK.shape[1] + size_S).argsort(stable=True)
    used_S = length_PK.view(-1)[step_S][order_S].cumsum(0)
    taken = int((used_S <= rows).sum())
    is_taken_PK = torch.zeros_like(on_hull_PK)
    is_taken_PK.view(-1)[step_S[order_S[:taken]]] = True
    sizes_P = (is_taken_PK * size_K).amax(dim=1)
    worth = worth_S[order_S[taken]] if taken < len(step_S) else worth_S.new_zeros(())
    longest = int((length_PK * on_hull_PK).amax()) if len(step_S) else 0
    return sizes_P, worth, rows - int(sizes_P.sum()), longest


def _upper_hull(gains_PK: Tensor, is_possible_PK: Tensor) -> Tensor:
    """Return which points (k, g(k)) are on the upper hull of a prompt's possible ones, those on an edge too.

    A point below the line between its neighbours is not on the hull. Points are removed until none is below.
    """
    size_K = torch.arange(gains_PK.shape[1], device=gains_PK.device)
    on_hull_PK = is_possible_PK
    while True:
        before_PK = _last_before(on_hull_PK)
        after_PK = size_K[-1] - _last_before(on_hull_PK.flip(1)).flip(1)
        has_both_PK = on_hull_PK & (before_PK < size_K) & (after_PK > size_K)
        has_both_PK &= on_hull_PK.gather(1, after_PK)
        low_PK = gains_PK.gather(1, before_PK)
        high_PK = gains_PK.gather(1, after_PK)
        share_PK = (size_K - before_PK) / (after_PK - before_PK).clamp(min=1)
        line_PK = low_PK + share_PK * (high_PK - low_PK)
        is_below_PK = has_both_PK & (gains_PK < line_PK * (1 - 1e-12))
        if not is_below_PK.any():
            return on_hull_PK
        on_hull_PK = on_hull_PK & ~is_below_PK


def _last_before(marked_PK: Tensor) -> Tensor:
    """Return the column of the last mark before each column, int64 `[P, K]`; 0 if there is none."""
    column_K = torch.arange(marked_PK.shape[1], device=marked_PK.device)
    up_to_PK = (marked_PK * column_K).cummax(dim=1).values
    return torch.cat([up_to_PK.new_zeros((len(up_to_PK), 1)), up_to_PK[:, :-1]], dim=1)


def _move_rows(
    gains_PK: Tensor, is_possible_PK: Tensor, sizes_P: Tensor, worth: Tensor, left: int, window: int
) -> Tensor:
    """Return the sizes after the best moves of rows between prompts that use the rows that are left, `[P]`.

    A dynamic program over pairs of prompts, pairs of pairs, and so on: for each change of their rows from -window to
    window the smallest loss, compared with the hulls, of which the larger half keeps the choice to go back.
    """
    prompts, sizes = gains_PK.shape
    change_W = torch.arange(-window, window + 1, device=gains_PK.device)
    size_PW = sizes_P[:, None] + change_W
    inside_PW = size_PW.clamp(0, sizes - 1)
    is_possible_PW = (size_PW == inside_PW) & is_possible_PK.gather(1, inside_PW)
    # What the hulls promise for the rows, less what the size yields.
    loss_PW = gains_PK.gather(1, sizes_P[:, None]) - gains_PK.gather(1, inside_PW) + worth * change_W
    loss_PW = loss_PW.clamp(min=0).masked_fill(~is_possible_PW, math.inf)
    squares_PW = inside_PW.square()

    index_W = torch.arange(2 * window + 1, device=gains_PK.device)  # of the changes
    second_WW = index_W[:, None] + window - index_W  # of a sum (row) and the first change (column)
    fits_WW = (second_WW >= 0) & (second_WW <= 2 * window)
    second_WW = second_WW.clamp(0, 2 * window)
    choices = []
    while len(loss_PW) > 1:
        if len(loss_PW) % 2 == 1:  # a prompt that changes nothing
            loss_PW = torch.cat([loss_PW, torch.where(change_W == 0, 0.0, math.inf)[None].to(loss_PW)])
            squares_PW = torch.cat([squares_PW, squares_PW.new_zeros((1, len(change_W)))])
        loss_QWW = loss_PW[0::2, None] + loss_PW[1::2][:, second_WW]
        loss_QWW = loss_QWW.masked_fill(~fits_WW, math.inf)
        squares_QWW = squares_PW[0::2, None] + squares_PW[1::2][:, second_WW]
        is_tied_QWW = loss_QWW <= loss_QWW.amin(dim=2, keepdim=True) + TIE * worth
        # The most even sizes, and of those more rows for the first: no two keys are equal.
        key_QWW = squares_QWW * len(change_W) + (2 * window - index_W)
        choice_QW1 = key_QWW.masked_fill(~is_tied_QWW, torch.iinfo(torch.int64).max).argmin(dim=2, keepdim=True)
        choices.append(choice_QW1.squeeze(2))
        loss_PW = loss_QWW.gather(2, choice_QW1).squeeze(2)
        squares_PW = squares_QWW.gather(2, choice_QW1).squeeze(2)

    is_reached_W = loss_PW[0].isfinite() & (change_W <= left)
    chosen_P = index_W[is_reached_W][-1:]
    for choice_QW in reversed(choices):
        chosen_P = chosen_P[: len(choice_QW)]  # without the prompt that was added to an odd number
        first_Q = choice_QW.gather(1, chosen_P[:, None]).squeeze(1)
        chosen_P = torch.stack([first_Q, chosen_P + window - first_Q], dim=1).view(-1)
    return sizes_P + chosen_P[:prompts] - window
