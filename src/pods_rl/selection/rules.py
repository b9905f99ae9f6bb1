"""The rules: which m of a prompt's n rollouts to train on.

Each is a pure function of rewards `[P, N]`, batched over prompts, on the rewards' own device (which must support
float64). Each returns int64 `[P, M]`, distinct and ascending within a row: m = n keeps every row in place.

Common to all: NaN marks an unscored rollout. It is kept only if a group has fewer than m scored rollouts, the
lowest rollout index first. Infinite rewards raise a ValueError. Among equal rewards the lower rollout index is
kept first, at both ends.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import raised
from ..sums import running_sums
from ..text import find
from .types import Rule, RuleError, Selection, check_generator, check_size, checked_rewards, kind_of

# Variances within this share of the largest count as equal, so that rounding never decides how many to keep on top.
VARIANCE_TOLERANCE = 1e-9
_TAKES = "(rewards, m, *, generator=None)"  # the arguments of a rule


def max_variance(rewards_PN: Tensor, m: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Keep the m rollouts whose rewards have the largest variance: the k highest and the m - k lowest.

    Source: PODS (arXiv 2504.13818), section 3.3, Lemma 3.1 and Algorithm 2, with the prefix sums of
    the remark on Theorem 1: O(n log n + m) per group.

    Args:
        rewards_PN: `[P, N]`, any real dtype, finite or NaN.
        m: rollouts to keep of each prompt, 1 to n.
        generator: unused here; every rule takes one.

    Returns:
        int64 `[P, M]`, ascending rollout index.

    Ties: among k of equal variance (relative 1e-9) the most balanced, then the one with more high rewards. So
    binary rewards with both outcomes plentiful give m/2 : m/2 (odd m: one more high), m = 1 keeps the highest
    reward, and a constant group keeps its first m rollouts.

    Raises:
        TypeError, ValueError: shape, dtype, m or an infinite reward. Huge finite rewards do not overflow.

    >>> max_variance(torch.tensor([[0.0, 1.0, 0.5, 1.0, 0.0, 0.4]]), 4)
    tensor([[0, 1, 3, 4]])
    """
    sorted_PN, order_PN, scored_P1 = _checked_and_sorted(rewards_PN, m)
    k_P1 = _best_split(sorted_PN, scored_P1, m)
    return _pick(order_PN, _ends(sorted_PN, scored_P1, k_P1, m))


def max_reward(rewards_PN: Tensor, m: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Keep the m highest rewards.

    Source: PODS (arXiv 2504.13818), section 3.2, the max-reward rule.

    Args, returns, raises: as `max_variance`. Ties: the lower rollout index first.

    >>> max_reward(torch.tensor([[0.2, 0.9, float("nan"), 0.9, 0.9]]), 2)
    tensor([[1, 3]])
    """
    sorted_PN, order_PN, scored_P1 = _checked_and_sorted(rewards_PN, m)
    k_P1 = torch.where(scored_P1 > m, m, 0)
    return _pick(order_PN, _ends(sorted_PN, scored_P1, k_P1, m))


def random(rewards_PN: Tensor, m: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Keep m rollouts uniformly at random: GRPO on m rollouts at the cost of n.

    Source: PODS (arXiv 2504.13818), section 3.2, the random rule.

    Args, returns, raises: as `max_variance`, except for
        generator: source of the draw. If None, PyTorch's global one. It may be on another device than the
            rewards. The draw depends on the generator, the shape and the positions of NaN, not on any reward.

    >>> random(torch.zeros(1, 8), 3, generator=torch.Generator().manual_seed(0))
    tensor([[2, 6, 7]])
    """
    rewards_PN, _ = checked_rewards(rewards_PN)
    check_size(m, rewards_PN.shape[1])
    check_generator(generator)
    device = rewards_PN.device if generator is None else generator.device
    keys_PN = torch.rand(rewards_PN.shape, generator=generator, device=device, dtype=torch.float64)
    # Unscored rollouts come last, so that they are kept only if there are too few others.
    keys_PN = keys_PN.to(rewards_PN.device).masked_fill(rewards_PN.isnan(), math.inf)
    return keys_PN.argsort(dim=1, stable=True)[:, :m].sort(dim=1).values


def percentile(rewards_PN: Tensor, m: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Keep the rewards at the quantiles (i - 1/2) / m, i = 1..m, of a group's scored rewards.

    Source: PODS (arXiv 2504.13818), the percentile rule. Of s scored rollouts, sorted, it keeps those at
    positions floor(s (i - 1/2) / m), counted from 0. They are at least 1 apart, so all m differ.

    Args, returns, raises: as `max_variance`. Ties: equal rewards are sorted by rollout index, lower first.

    >>> percentile(torch.tensor([[0.7, 0.1, 0.5, 0.3, 0.2, 0.6]]), 3)
    tensor([[0, 2, 4]])
    """
    _, order_PN, scored_P1 = _checked_and_sorted(rewards_PN, m)
    rank_M = torch.arange(m, device=order_PN.device)
    quantile_PM = (2 * rank_M + 1) * scored_P1 // (2 * m)  # floor(s (i - 1/2) / m) for i = rank + 1
    return _pick(order_PN, torch.where(scored_P1 > m, quantile_PM, rank_M))


RULES: dict[str, Rule] = {
    "max_variance": max_variance,
    "max_reward": max_reward,
    "random": random,
    "percentile": percentile,
}


def _checked_and_sorted(rewards_PN: Tensor, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards ascending with NaN (as inf) last, the rollout at each rank, and how many are scored, `[P, 1]`."""
    rewards_PN, all_scored = checked_rewards(rewards_PN)
    check_size(m, rewards_PN.shape[1])
    if not all_scored:
        rewards_PN = rewards_PN.masked_fill(rewards_PN.isnan(), math.inf)
    sorted_PN, order_PN = rewards_PN.contiguous().sort(dim=1, stable=True)
    end_P1 = sorted_PN.new_full((len(sorted_PN), 1), math.inf)
    scored_P1 = torch.searchsorted(sorted_PN, end_P1)
    return sorted_PN, order_PN, scored_P1


def _best_split(sorted_PN: Tensor, scored_P1: Tensor, m: int) -> Tensor:
    """Return how many of the m to keep from the high end, `[P, 1]`; 0 if at most m rollouts are scored."""
    rank_M = torch.arange(m, device=sorted_PN.device)
    lowest_PM = sorted_PN[:, :m].flip(1)
    highest_PM = sorted_PN.gather(1, (scored_P1 - 1 - rank_M).clamp_(min=0))
    low_P1 = lowest_PM[:, -1:].double()
    high_P1 = highest_PM[:, :1].double()
    # The midrange, unlike a rounded mean, does not depend on the rollouts' order; halves do not overflow.
    # A constant group becomes NaN here, which is harmless: every k keeps the same set.
    half_range_P1 = high_P1 / 2 - low_P1 / 2
    midrange_P1 = low_P1 + half_range_P1
    lowest_PM = (lowest_PM - midrange_P1).div_(half_range_P1)  # from -1 to 1
    highest_PM = (highest_PM - midrange_P1).div_(half_range_P1)

    # Each k takes one more from the high end and one less from the low end: running sums cover all k at once.
    change_PM = highest_PM - lowest_PM
    sum_PK = running_sums(torch.cat([lowest_PM.sum(dim=1, keepdim=True), change_PM], dim=1))
    change_PM.mul_(highest_PM.add_(lowest_PM))
    square_PK = running_sums(torch.cat([lowest_PM.square_().sum(dim=1, keepdim=True), change_PM], dim=1))
    variance_PK = square_PK.sub_(sum_PK.square_().div_(m))

    # Of the k that tie, argmax takes the one with the greatest balance: nearest to m / 2, then the larger one.
    k_K = torch.arange(m + 1, device=sorted_PN.device)
    balance_K = 2 * (m - (2 * k_K - m).abs()) + (2 * k_K > m) + 1
    most_P1 = variance_PK.amax(dim=1, keepdim=True)
    tied_PK = variance_PK >= most_P1 - VARIANCE_TOLERANCE * (most_P1 + 1)
    k_P1 = (tied_PK * balance_K).argmax(dim=1, keepdim=True)
    return torch.where(scored_P1 > m, k_P1, 0)


def _ends(sorted_PN: Tensor, scored_P1: Tensor, k_P1: Tensor, m: int) -> Tensor:
    """Return the ranks of the m - k lowest and the k highest scored rewards, `[P, M]`.

    If the high end begins inside a run of equal rewards, it takes the run's first rollouts (after those that the
    low end has taken), not its last as a plain stable sort would.
    """
    rank_M = torch.arange(m, device=sorted_PN.device)
    low_P1 = m - k_P1  # how many the low end takes
    top_P1 = scored_P1 - k_P1  # the rank at which the high end begins
    threshold_P1 = sorted_PN.gather(1, top_P1.clamp(max=sorted_PN.shape[1] - 1))
    run_start_P1 = torch.searchsorted(sorted_PN, threshold_P1)
    run_end_P1 = torch.searchsorted(sorted_PN, threshold_P1, right=True)
    high_PM = rank_M + (top_P1 - low_P1)
    shift_P1 = torch.maximum(run_start_P1, low_P1) - top_P1
    high_PM += shift_P1 * (high_PM < run_end_P1)
    return torch.where(rank_M < low_P1, rank_M, high_PM)


def _pick(order_PN: Tensor, ranks_PM: Tensor) -> Tensor:
    """Return the rollouts at these ranks, ascending."""
    return order_PN.gather(1, ranks_PM).sort(dim=1).values


def get_rule(name: str) -> Rule:
    """Return the rule of that name in `RULES`, or at that import path.

    Args:
        name: a key of `RULES`, or a function's path, `package.module:function` or `package.module.function`.

    Raises:
        UserError: an unknown name (the message suggests the nearest), or a path that does not lead to a function.

    >>> get_rule("max_variance").__name__
    'max_variance'
    >>> get_rule("max_varience")
    Traceback (most recent call last):
    pods_rl.errors.UserError: unknown rule 'max_varience'. Did you mean max_variance? ...
    """
    return find("rule", name, RULES)


def rule_name(rule: str | Rule) -> str:
    """Return a rule's name: unchanged if it is a name, else its key in `RULES`, or its import path.

    >>> rule_name("random"), rule_name(RULES["random"]), rule_name(get_rule)
    ('random', 'random', 'pods_rl.selection.rules:get_rule')
    """
    if isinstance(rule, str):
        return rule
    for name, function in RULES.items():
        if function is rule:
            return name
    named = rule if hasattr(rule, "__qualname__") else type(rule)
    return f"{named.__module__}:{named.__qualname__}"


def function_of(kind: str, rule: Any, table: Mapping[str, Any], takes: str) -> Any:
    """Return the function of a rule of a table, or raise a UserError; `takes` names its arguments."""
    if not isinstance(rule, str) and not callable(rule):
        raise RuleError(
            f"{kind} must be a rule's name or a function; got {kind_of(rule)}. Choose one of {', '.join(table)}, or "
            f"give a function of {takes}."
        )
    function = find(kind, rule, table) if isinstance(rule, str) else rule
    if isinstance(function, type):
        raise RuleError(
            f"the {kind} {rule_name(rule)!r} is a class; expected a function of {takes}, or an object of the class "
            "that can be called like one."
        )
    return function


def check_takes(kind: str, rule: Any, function: Any, expected: str, *arguments: Any, **keywords: Any) -> None:
    """Raise a UserError unless a rule's function takes these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin may have none
        return
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        raise RuleError(
            f"the {kind} {rule_name(rule)!r} takes {signature}; expected a function of {expected}."
        ) from error


def check_rule(rule: str | Rule) -> None:
    """Raise a UserError unless `select` can call this rule."""
    function = function_of("rule", rule, RULES, _TAKES)
    expected = f"{_TAKES} that returns the indices of the m rollouts to keep"
    check_takes("rule", rule, function, expected, None, 1, generator=None)


def select(
    rewards_PN: Tensor,
    m: int,
    rule: str | Rule = "max_variance",
    generator: torch.Generator | None = None,
) -> Selection:
    """Keep m of each prompt's rollouts.

    Source: PODS (arXiv 2504.13818), Algorithm 1, S = D(o, r; m).

    Args:
        rewards_PN: `[P, N]`, any real dtype; NaN where unscored, finite elsewhere.
        m: rollouts to keep of each prompt, 1 to n.
        rule: a name or import path as `get_rule` takes, or the function itself. A rule of your own receives a copy of
            the rewards, which it may change.
        generator: passed to the rule.

    Raises:
        TypeError, ValueError: bad rewards, m or generator.
        UserError: an unknown rule, or one that raises or does not return m different rollouts of each prompt.

    >>> select(torch.tensor([[0.0, 1.0, 0.0, 0.0]]), 2).indices
    tensor([[0, 1]])
    """
    function = function_of("rule", rule, RULES, _TAKES)
    check_generator(generator)
    if function in RULES.values():  # they check their input themselves
        return Selection(function(rewards_PN, m, generator=generator))
    checked_rewards(rewards_PN)  # raises
    check_size(m, rewards_PN.shape[1])
    name = rule if isinstance(rule, str) else getattr(rule, "__name__", repr(rule))
    try:
        # The caller computes advantages of these rewards: a rule must not change them.
        indices_PM = function(rewards_PN.detach().clone(), m, generator=generator)
    except (Exception, SystemExit) as error:
        raise RuleError(
            f"the rule '{name}' raised {raised(error)} for {len(rewards_PN)} groups of {rewards_PN.shape[1]} rewards "
            f"and m = {m}. Fix the rule: it returns int64 indices [{len(rewards_PN)}, {m}] of the rollouts to keep."
        ) from error
    prompts, n = rewards_PN.shape
    expected = f"int64 indices of shape {[prompts, m]} on {rewards_PN.device}"
    is_dense = isinstance(indices_PM, Tensor) and indices_PM.layout == torch.strided
    if not is_dense or indices_PM.dtype != torch.int64:
        raise RuleError(f"the rule '{name}' must return {expected}; it returned {kind_of(indices_PM)}.")
    if indices_PM.shape != (prompts, m) or indices_PM.device != rewards_PN.device:
        returned = f"{kind_of(indices_PM)} on {indices_PM.device}"
        raise RuleError(f"the rule '{name}' must return {expected}; it returned {returned}.")
    ascending_PM = indices_PM.sort(dim=1).values
    outside_P = ((ascending_PM < 0) | (ascending_PM >= n)).any(dim=1)
    repeated_P = (ascending_PM.diff(dim=1) == 0).any(dim=1)
    bad_P = outside_P | repeated_P
    if bad_P.any():
        group = int(bad_P.nonzero()[0])
        raise RuleError(
            f"the rule '{name}' must return {m} different rollouts between 0 and {n - 1} for each prompt; "
            f"for group {group} it returned {indices_PM[group].tolist()}."
        )
    return Selection(indices_PM)
