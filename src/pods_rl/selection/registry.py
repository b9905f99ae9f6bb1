"""Find a rule by name or import path, and run it with its input and output checked."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from ..errors import UserError
from ..text import find
from .rules import RULES
from .types import Rule, Selection, check_rewards, check_size, describe


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
    """Return a rule's name: as given, its key in `RULES`, or its import path.

    >>> rule_name("random"), rule_name(RULES["random"]), rule_name(get_rule)
    ('random', 'random', 'pods_rl.selection.registry:get_rule')
    """
    if isinstance(rule, str):
        return rule
    named = rule if hasattr(rule, "__qualname__") else type(rule)
    path = f"{named.__module__}:{named.__qualname__}"
    return next((name for name, function in RULES.items() if function is rule), path)


def check_rule(rule: str | Rule) -> None:
    """Raise unless `select` can call this rule.

    Raises:
        UserError: an unknown name, a value that is not a function, or a function that takes other arguments.

    >>> check_rule(lambda rewards, m: rewards)
    Traceback (most recent call last):
    pods_rl.errors.UserError: the rule 'pods_rl.selection.registry:<lambda>' takes (rewards, m); ...
    """
    function = rule if callable(rule) and not isinstance(rule, type) else get_rule(rule)  # type: ignore[arg-type]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin may have none
        return
    try:
        signature.bind(None, 1, generator=None)
    except TypeError as error:
        raise UserError(
            f"the rule {rule_name(rule)!r} takes {signature}; expected a function of (rewards, m, *, generator=None) "
            "that returns the indices of the m rollouts to keep."
        ) from error


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
        rule: a name or import path as `get_rule` takes, or the function itself.
        generator: passed to the rule.

    Raises:
        TypeError, ValueError: bad rewards or m; a rule that does not return m different rollouts per prompt.

    >>> select(torch.tensor([[0.0, 1.0, 0.0, 0.0]]), 2).indices
    tensor([[0, 1]])
    """
    function = get_rule(rule) if isinstance(rule, str) else rule
    if function in RULES.values():  # they check their input themselves
        return Selection(function(rewards_PN, m, generator=generator))
    check_rewards(rewards_PN)
    check_size(m, rewards_PN.shape[1])
    indices_PM = function(rewards_PN, m, generator=generator)
    _check_indices(indices_PM, rewards_PN, m, rule)
    return Selection(indices_PM)


def _check_indices(indices_PM: Tensor, rewards_PN: Tensor, m: int, rule: str | Rule) -> None:
    name = rule if isinstance(rule, str) else getattr(rule, "__name__", repr(rule))
    prompts, n = rewards_PN.shape
    wanted = f"int64 indices of shape {[prompts, m]} on {rewards_PN.device}"
    if not isinstance(indices_PM, Tensor) or indices_PM.dtype != torch.int64:
        raise TypeError(f"the rule '{name}' must return {wanted}; it returned {describe(indices_PM)}.")
    if indices_PM.shape != (prompts, m) or indices_PM.device != rewards_PN.device:
        returned = f"{describe(indices_PM)} on {indices_PM.device}"
        raise ValueError(f"the rule '{name}' must return {wanted}; it returned {returned}.")
    ascending_PM = indices_PM.sort(dim=1).values
    bad_P = ((ascending_PM < 0) | (ascending_PM >= n)).any(dim=1) | (ascending_PM.diff(dim=1) == 0).any(dim=1)
    if bad_P.any():
        group = int(bad_P.nonzero()[0])
        raise ValueError(
            f"the rule '{name}' must return {m} different rollouts between 0 and {n - 1} for each prompt; "
            f"for group {group} it returned {indices_PM[group].tolist()}."
        )
