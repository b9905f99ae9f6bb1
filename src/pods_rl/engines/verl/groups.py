"""Prompt groups as verl's queue holds them, and which of their sessions to keep: torch alone, no verl.

A row of the queue is `{uid}_{session}_{index}`: a prompt, one of its n sessions (rollouts), and one of the
trajectories that the session left (several where an agent's context was cut). The last one holds the session's reward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...selection import REWARD_LIMIT, Rule, is_constant, select, spread


@dataclass(frozen=True)
class Group:
    """A prompt's sessions: of each the keys of its rows, in the order of their index."""

    uid: str
    sessions: tuple[tuple[str, ...], ...]

    @property
    def last_keys(self) -> list[str]:
        """The rows that hold the sessions' rewards, one of each session."""
        return [keys[-1] for keys in self.sessions]


def group_keys(keys: Iterable[str]) -> list[Group]:
    """The groups that the rows of a queue belong to, groups in the order they appear, sessions in that of their number.

    Args:
        keys: `{uid}_{session}_{index}`, in any order.

    Raises:
        ValueError: a key of another form.

    >>> group_keys(["a_0_0", "b_0_0", "a_1_1", "a_1_0"])[0]
    Group(uid='a', sessions=(('a_0_0',), ('a_1_0', 'a_1_1')))
    """
    rows: dict[str, dict[int, list[tuple[int, str]]]] = {}
    for key in keys:
        uid, session, index = _split(key)
        rows.setdefault(uid, {}).setdefault(session, []).append((index, key))
    return [
        Group(uid, tuple(tuple(key for _, key in sorted(sessions[number])) for number in sorted(sessions)))
        for uid, sessions in rows.items()
    ]


def pad_rewards(rewards: Sequence[Sequence[float]]) -> Tensor:
    """Groups of different sizes as one float64 tensor `[P, N]`.

    Args:
        rewards: of each group the rewards of its sessions.

    Returns:
        NaN where a group has no such session, and for a reward that is infinite or beyond 1e15 in size.

    >>> pad_rewards([[1.0, 0.0], [float("inf")]])
    tensor([[1., 0.],
            [nan, nan]], dtype=torch.float64)
    """
    rewards_PN = torch.full((len(rewards), max(map(len, rewards), default=0)), math.nan, dtype=torch.float64)
    for row, group in enumerate(rewards):
        rewards_PN[row, : len(group)] = torch.tensor(group, dtype=torch.float64)
    return rewards_PN.masked_fill(rewards_PN.abs() > REWARD_LIMIT, math.nan)


def choose(rewards_PN: Tensor, m: int, rule: str | Rule, generator: torch.Generator | None = None) -> Tensor:
    """Which sessions to train on: bool `[P, N]`, m of a group that has more scored ones, else all scored ones.

    Args:
        rewards_PN: `[P, N]`, NaN where there is no session or nobody could score it.
        m: sessions to keep of each group.
        rule: as `selection.select` takes it.
        generator: handed to the rule.

    Edges: NaN is never kept, so a group may end with fewer than m sessions, or none: verl's own advantages turn a
    group with a NaN into NaN altogether.

    >>> choose(torch.tensor([[0.0, 1.0, 0.0, 0.5], [1.0, 0.0, torch.nan, torch.nan]]), 2, "max_variance")
    tensor([[ True,  True, False, False],
            [ True,  True, False, False]])
    """
    scored_PN = ~rewards_PN.isnan()
    kept_PN = scored_PN.clone()
    crowded_P = scored_PN.sum(dim=1) > m
    if crowded_P.any():
        chosen = select(rewards_PN[crowded_P], m, rule, generator)
        kept_PN[crowded_P] &= chosen.mask(rewards_PN.shape[1])
    return kept_PN


def describe_selection(rewards_PN: Tensor, kept_PN: Tensor) -> dict[str, float]:
    """What a step logs about rewards, before and after selection (docs/metrics.md); empty without a scored session.

    >>> rewards = torch.tensor([[0.0, 1.0, 0.0, 0.5]])
    >>> describe_selection(rewards, torch.tensor([[True, True, False, False]]))["pods/selected/reward_mean"]
    0.5
    """
    scored_PN = ~rewards_PN.isnan()
    if not scored_PN.any():
        return {}
    selected_PN = rewards_PN.masked_fill(~kept_PN, math.nan)
    flat_P = is_constant(selected_PN)
    return {
        "pods/all/reward_mean": rewards_PN.nanmean().item(),
        "pods/all/reward_std": spread(rewards_PN.reshape(1, -1)).item(),
        "pods/all/zero_variance_share": is_constant(rewards_PN).double().mean().item(),
        "pods/selected/reward_mean": selected_PN.nanmean().item(),
        "pods/selected/reward_std": spread(selected_PN).mean().item(),
        "pods/zero_variance_groups": float(flat_P.sum()),
        "pods/zero_variance_share": flat_P.double().mean().item(),
    }


def _split(key: str) -> tuple[str, int, int]:
    uid, session, index = ([""] * 3 + key.rsplit("_", 2))[-3:]
    if not (uid and session.isdecimal() and index.isdecimal()):
        raise ValueError(f"a row of verl's queue is named uid_session_index, two numbers at the end; got {key!r}.")
    return uid, int(session), int(index)
