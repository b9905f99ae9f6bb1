"""The rollout ledger under verl: every session of a step, in the columns of `pods train` (docs/architecture.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import transfer_queue as tq

from ...runs import write_parquet
from .groups import Group, last_keys

FIELDS = ["prompts", "responses", "reward_model", "extra_fields"]  # what is read of each session, with verl's names
VERLS_SCORES = ("score", "acc")  # numbers that verl adds or expects; they are not parts of the reward


class Ledger:
    """Writes one file for each step of which the ledger keeps the sessions: step 1 and every `every`-th.

    verl may sample several batches a step (`parameter_sync_step`). Group numbers continue from batch to batch, and
    each batch writes the step's file again, with all sessions so far.

    Args:
        folder: of the files `step-000001.parquet`.
        every: the steps to keep.
        tokenizer: of the policy.
    """

    def __init__(self, folder: Path, every: int, tokenizer: Any) -> None:
        self._folder = folder
        self._every = every
        self._tokenizer = tokenizer
        self._step = 0
        self._groups = 0  # of the step so far
        self._rows: list[dict[str, Any]] = []  # of the step so far, a row for each session

    def add(
        self,
        step: int,
        groups: Sequence[Group],
        rewards: Sequence[Sequence[float]],
        kept: Collection[str],
        partition_id: str,
    ) -> None:
        """Write a batch's sessions if the ledger keeps this step.

        Args:
            step: verl's global step.
            groups: of the batch.
            rewards: of each group's sessions.
            kept: the keys of the rows to train on.
            partition_id: of verl's queue.
        """
        if step != 1 and step % self._every != 0:
            return
        if step != self._step:
            self._step = step
            self._groups = 0
            self._rows = []
        self._rows += self._batch_rows(groups, rewards, kept, partition_id)
        self._groups += len(groups)
        write_parquet(self._folder / f"step-{step:06d}.parquet", to_columns(self._rows))

    def _batch_rows(
        self,
        groups: Sequence[Group],
        rewards: Sequence[Sequence[float]],
        kept: Collection[str],
        partition_id: str,
    ) -> list[dict[str, Any]]:
        """Return a row for each session, from its last trajectory."""
        keys = last_keys(groups)
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=FIELDS)
        prompts = list(data["prompts"])
        responses = list(data["responses"])
        reward_models = list(data["reward_model"])
        extra_fields = list(data["extra_fields"])
        rows: list[dict[str, Any]] = []
        for number, group_rewards in enumerate(rewards):
            for reward in group_rewards:
                session = len(rows)
                key = keys[session]
                extra = _mapping(extra_fields[session])
                row = {
                    "step": self._step,
                    "group": self._groups + number,
                    "rollout": int(key.rsplit("_", 2)[1]),
                    "prompt": self._text(prompts[session]),
                    "completion": self._text(responses[session]),
                    "answer": str(_mapping(reward_models[session]).get("ground_truth", "")),
                    "reward": reward,
                    "selected": key in kept,
                    "advantage": None,  # verl computes it later
                    "completion_tokens": len(responses[session]),
                    "turn_rewards": _turn_rewards(extra),
                }
                rows.append(row | _parts_of_reward(extra))
        return rows

    def _text(self, ids: Any) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)


def to_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the ledger's columns. The parts of the reward follow it, NaN where a session has no such part.

    >>> parts = [{"reward": 1.0, "reward/format": 1.0, "selected": True, "turn_rewards": None}]
    >>> to_columns([*parts, {"reward": 0.0, "selected": False, "turn_rewards": None}])
    {'reward': [1.0, 0.0], 'reward/format': [1.0, nan], 'selected': [True, False]}
    """
    parts: dict[str, None] = {}  # a set that keeps its order
    with_turns = False
    for row in rows:
        for name in row:
            if name.startswith("reward/"):
                parts[name] = None
        if row["turn_rewards"]:
            with_turns = True
    columns: dict[str, list[Any]] = {}
    for name in rows[0]:
        if name.startswith("reward/"):
            continue
        if name == "turn_rewards" and not with_turns:
            continue
        columns[name] = [row[name] for row in rows]
        if name == "reward":
            for part in parts:
                columns[part] = [row.get(part, float("nan")) for row in rows]
    return columns


def _parts_of_reward(extra: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that the reward function returned, by column."""
    parts: dict[str, float] = {}
    for name, value in extra.get("reward_extra_info", {}).items():
        if name not in VERLS_SCORES and isinstance(value, Real):
            parts[f"reward/{name}"] = float(value)
    return parts


def _turn_rewards(extra: Mapping[str, Any]) -> list[float] | None:
    """Return the rewards of a session's turns, which verl's tool agent loop calls `turn_scores`; None without any."""
    scores = extra.get("turn_scores")
    if not scores:
        return None
    return [float(score) for score in scores]


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return a row's mapping out of the queue's wrapper; an empty one if it is none."""
    value = getattr(value, "data", value)
    return value if isinstance(value, Mapping) else {}
