"""The sessions of a batch under verl as rows of the rollout ledger (docs/architecture.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any

import transfer_queue as tq

FIELDS = ["prompts", "responses", "reward_model", "extra_fields"]  # what is read of each session, with verl's names
VERLS_SCORES = ("score", "acc")  # numbers that verl adds or expects; they are not parts of the reward


def session_rows(
    keys: Sequence[str],
    rewards: Sequence[Sequence[float]],
    kept: Collection[str],
    *,
    partition_id: str,
    tokenizer: Any,
) -> list[list[dict[str, Any]]]:
    """Return a row for each session of each group, for `LedgerWriter`; `keys` are their last trajectories."""
    data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=FIELDS)
    prompts = list(data["prompts"])
    responses = list(data["responses"])
    reward_models = list(data["reward_model"])
    extra_fields = list(data["extra_fields"])
    session = 0
    rows_of_groups: list[list[dict[str, Any]]] = []
    for group_rewards in rewards:
        rows: list[dict[str, Any]] = []
        for reward in group_rewards:
            key = keys[session]
            extra = _mapping(extra_fields[session])
            turn_rewards = extra.get("turn_scores")  # of verl's tool agent loop
            parts: dict[str, float] = {}
            for name, value in extra.get("reward_extra_info", {}).items():
                if name not in VERLS_SCORES and isinstance(value, Real):
                    parts[f"reward/{name}"] = float(value)
            row = {
                "rollout": int(key.rsplit("_", 2)[1]),
                "prompt": tokenizer.decode(prompts[session].tolist(), skip_special_tokens=True),
                "completion": tokenizer.decode(responses[session].tolist(), skip_special_tokens=True),
                "answer": str(_mapping(reward_models[session]).get("ground_truth", "")),
                "reward": reward,
                **parts,
                "selected": key in kept,
                "advantage": None,  # verl computes it later
                "completion_tokens": len(responses[session]),
                "turn_rewards": [float(score) for score in turn_rewards] if turn_rewards else None,
            }
            rows.append(row)
            session += 1
        rows_of_groups.append(rows)
    return rows_of_groups


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return a row's mapping out of the queue's wrapper; an empty one if it is none."""
    value = getattr(value, "data", value)
    return value if isinstance(value, Mapping) else {}
