"""Prompt groups in verl's queue, and which of their sessions to keep: needs only torch, not verl.

A row of the queue is named `{uid}_{session}_{index}`: a prompt, one of its n sessions (rollouts), and one of the
session's trajectories (several if an agent's context was cut). The last trajectory holds the session's reward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...selection import BatchRule, Rule, select, select_batch


@dataclass(frozen=True)
class Group:
    """A prompt's sessions: for each the keys of its rows, in the order of their index."""

    uid: str
    sessions: tuple[tuple[str, ...], ...]


def group_keys(keys: Iterable[str]) -> list[Group]:
    """Group the rows of a queue by prompt, in order of first appearance, and by session, in order of their number.

    >>> group_keys(["a_0_0", "b_0_0", "a_1_1", "a_1_0"])[0]
    Group(uid='a', sessions=(('a_0_0',), ('a_1_0', 'a_1_1')))
    """
    rows: dict[str, dict[int, list[tuple[int, str]]]] = {}  # uid -> session -> (index, key) of each row
    for key in keys:
        uid, session, index = key.rsplit("_", 2)
        sessions_of_uid = rows.setdefault(uid, {})
        sessions_of_uid.setdefault(int(session), []).append((int(index), key))
    groups: list[Group] = []
    for uid, sessions in rows.items():
        ordered = tuple(tuple(key for _, key in sorted(sessions[number])) for number in sorted(sessions))
        groups.append(Group(uid, ordered))
    return groups


def kept_keys(groups: Iterable[Group], kept_PN: Tensor) -> set[str]:
    """Return the keys of all rows of the kept sessions.

    >>> sorted(kept_keys([Group("a", (("a_0_0",), ("a_1_0", "a_1_1")))], torch.tensor([[False, True]])))
    ['a_1_0', 'a_1_1']
    """
    keys: set[str] = set()
    for group, kept_N in zip(groups, kept_PN.tolist(), strict=True):
        # A row of the mask is padded to the size of the largest group.
        for session, is_kept in zip(group.sessions, kept_N, strict=False):
            if is_kept:
                keys.update(session)
    return keys


def choose(
    rewards_PN: Tensor,
    m: int,
    rule: str | Rule,
    generator: torch.Generator | None = None,
    batch_rule: str | BatchRule | None = None,
) -> Tensor:
    """Return which sessions to train on, bool `[P, N]`: at most m of each group's scored sessions, or P m of all.

    Args:
        rewards_PN: `[P, N]`, NaN where a session is missing or unscored.
        m: sessions to keep of each group, or their mean over the groups.
        rule: as in `selection.select`.
        generator: passed to the rule.
        batch_rule: as in `selection.select_batch`; it decides instead of `rule`, if a group has a signal.

    Edges: NaN is never kept, because verl's advantages would turn all of its group into NaN. So a group may keep fewer
    than m sessions, or none. A group with a single scored session keeps none, unless m is 1 or no other group keeps
    any. A batch without a group to compare keeps what `rule` does, because verl cannot train zero rows. The advantages
    of equal rewards are 0, but verl trains a session that is alone with its raw reward.

    >>> choose(torch.tensor([[0.0, 1.0, 0.0, 0.5], [1.0, 0.0, torch.nan, torch.nan]]), 2, "max_variance")
    tensor([[ True,  True, False, False],
            [ True,  True, False, False]])
    >>> choose(torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]), 2, "max_variance", None, "max_variance")
    tensor([[ True,  True,  True,  True],
            [False, False, False, False]])
    >>> choose(torch.tensor([[1.0, torch.nan, torch.nan]]), 2, "max_variance")
    tensor([[ True, False, False]])
    """
    scored_PN = ~rewards_PN.isnan()
    kept_PN = torch.zeros_like(scored_PN)
    rows = min(m * len(rewards_PN), rewards_PN.numel())
    if batch_rule is not None:
        if rows >= 2:
            kept_PN = select_batch(rewards_PN, rows, batch_rule, generator=generator).mask() & scored_PN
        m = max(m, 2)  # a mean until here; fewer sessions of a prompt cannot be compared
    if not kept_PN.any():
        kept_PN = scored_PN.clone()
        crowded_P = scored_PN.sum(dim=1) > m
        if crowded_P.any():
            selection = select(rewards_PN[crowded_P], m, rule, generator)
            kept_PN[crowded_P] &= selection.mask(rewards_PN.shape[1])
    # Nothing is left to compare a single session with, and verl would train it with its raw reward.
    compared_PN = kept_PN & (kept_PN.sum(dim=1, keepdim=True) > 1)
    if m > 1 and compared_PN.any():
        return compared_PN
    return kept_PN
