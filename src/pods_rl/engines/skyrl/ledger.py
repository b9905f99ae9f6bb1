"""A trajectory under SkyRL as a row of the rollout ledger (docs/architecture.md). Does not import SkyRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .batches import total


def ledger_row(
    output: Mapping[str, Any],
    rows: Sequence[int],
    *,
    rollout: int,
    is_kept: bool,
    extras: Mapping[str, Any] | None,
    tokenizer: Any,
) -> dict[str, Any]:
    """Return a trajectory's text and numbers by column; prompt and completion are those of its last row."""
    last = rows[-1]
    turn_rewards = [total(output["rewards"][row]) for row in rows] if len(rows) > 1 else None
    specification = (extras or {}).get("reward_spec")  # a data set may hold anything under this name
    answer = str(specification.get("ground_truth", "")) if isinstance(specification, Mapping) else ""
    return {
        "rollout": rollout,
        "prompt": tokenizer.decode(output["prompt_token_ids"][last], skip_special_tokens=True),
        "completion": tokenizer.decode(output["response_ids"][last], skip_special_tokens=True),
        "answer": answer,
        "reward": total(output["rewards"][last]),
        "selected": is_kept,
        "advantage": None,  # SkyRL computes it later
        "completion_tokens": sum(len(output["response_ids"][row]) for row in rows),
        "turn_rewards": turn_rewards,
    }
