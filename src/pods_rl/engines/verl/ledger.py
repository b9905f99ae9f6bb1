"""The rollout ledger under verl: the columns that `pods report` reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import transfer_queue as tq

from .groups import Group


def ledger_columns(
    groups: Sequence[Group],
    rewards: Sequence[Sequence[float]],
    kept: Collection[str],
    partition_id: str,
    tokenizer: Any,
) -> dict[str, list[Any]]:
    """Return a value per session in each column, from the last trajectory of each.

    `reward/<name>` are the numbers that the reward function returned, without verl's `score` and `acc`. `advantage` is
    empty: verl computes it later. `turn_rewards` are the `turn_scores` of verl's tool agent loop, where there are any.

    Args:
        groups: of the batch.
        rewards: of each group's sessions.
        kept: the keys of the rows to train on.
        partition_id: of verl's queue.
        tokenizer: of the policy.
    """
    keys = [session[-1] for group in groups for session in group.sessions]
    names = ["prompts", "responses", "reward_model", "extra_fields"]
    data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=names)
    prompts, responses, models, extras = (list(data[name]) for name in names)
    parts = [_plain(extra).get("reward_extra_info", {}) for extra in extras]
    shown = [
        name for name, value in parts[0].items() if name not in ("score", "acc") and isinstance(value, int | float)
    ]
    turns = [_plain(extra).get("turn_scores") for extra in extras]
    columns: dict[str, list[Any]] = {
        "group": [number for number, group in enumerate(groups) for _ in group.sessions],
        "rollout": [int(key.rsplit("_", 2)[1]) for key in keys],
        "prompt": [tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in prompts],
        "completion": [tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in responses],
        "answer": [str(_plain(model).get("ground_truth", "")) for model in models],
        "reward": [reward for group in rewards for reward in group],
        **{f"reward/{name}": [float(part.get(name, "nan")) for part in parts] for name in shown},
        "selected": [key in kept for key in keys],
        "advantage": [None] * len(keys),
        "completion_tokens": [len(ids) for ids in responses],
    }
    if any(turns):
        columns["turn_rewards"] = [[float(score) for score in scores] if scores else None for scores in turns]
    return columns


def _plain(value: Any) -> dict[str, Any]:
    """Return a row's mapping out of the queue's wrapper."""
    value = getattr(value, "data", value)
    return value if isinstance(value, dict) else {}
