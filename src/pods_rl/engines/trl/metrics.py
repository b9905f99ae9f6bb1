"""Metrics of one generation: rewards of all rollouts and of the kept ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...rollouts.record import Rollouts
from ...selection import is_constant, spread
from ...text import plain_text
from .compat import TRLTrainer, nanstd
from .config import group_sizes
from .rollout import total_reward

Metrics = dict[str, list[float]]

# Numbers of rollouts, rows or steps: they add up within a step, and are not logged while they are zero.
COUNTERS = (
    "pods/unusable_rewards", "pods/unscored_rollouts", "pods/reward_errors", "pods/reward_timeouts",
    "pods/verifier_timeouts", "pods/verifier_crashes", "pods/rows_moved", "pods/rows/left_out", "pods/rows/merged",
    "pods/skipped_step", "pods/bad_loss", "pods/bad_gradient", "pods/zero_variance_groups",
)  # fmt: skip


def drop_zero_counters(metrics: Metrics) -> None:
    """Remove counters that were zero in every step since the last line of the log.

    >>> metrics = {"pods/bad_loss": [0.0, 0.0], "reward": [0.0]}
    >>> drop_zero_counters(metrics); metrics
    {'reward': [0.0]}
    """
    for name in COUNTERS:
        if name in metrics and not any(metrics[name]):
            del metrics[name]


def add_up_counters(metrics: Metrics, before: Mapping[str, int]) -> None:
    """Add up what several generations of one step counted: TRL logs the mean of the entries.

    Args:
        before: the number of entries before the first of them.
    """
    for name in COUNTERS:
        start = before.get(name, 0)
        if len(metrics.get(name, ())) > start + 1:
            metrics[name][start:] = [sum(metrics[name][start:])]


def log_selection(metrics: Metrics, record: Rollouts) -> None:
    """Log the kept rollouts' rewards and the groups without spread, over all processes."""
    kept_PM = record.kept_rewards()
    constant_P = is_constant(kept_PM)
    metrics["pods/selected/reward_mean"].append(kept_PM.nanmean().item())
    metrics["pods/selected/reward_std"].append(spread(kept_PM).mean().item())
    metrics["pods/zero_variance_groups"].append(float(constant_P.sum()))
    metrics["pods/zero_variance_share"].append(constant_P.float().mean().item())


def log_all_rollouts(trainer: TRLTrainer, scores: Tensor, before: Mapping[str, int]) -> None:
    """Log reward statistics of all rollouts instead of those that TRL logged of the kept rows.

    Args:
        scores: `[G * n, F]` of the reward functions.
        before: the number of entries of each metric before TRL's method ran.
    """
    metrics = trainer._metrics["train"]
    totals_GN = total_reward(scores, trainer.reward_weights, group_sizes(trainer.args)[0], "sum_then_normalize")
    found = {
        "reward": totals_GN.nanmean(),
        "reward_std": nanstd(totals_GN.flatten()),
        "frac_reward_zero_std": is_constant(totals_GN).float().mean(),
    }
    for i, name in enumerate(trainer.reward_func_names):
        found |= {f"rewards/{name}/mean": scores[:, i].nanmean(), f"rewards/{name}/std": nanstd(scores[:, i])}
    for name, value in found.items():
        metrics[name][before.get(name, 0) :] = [value.item()]


def entries(metrics: Mapping[str, list[float]]) -> dict[str, int]:
    """Return the number of entries of each metric since the last line of the log."""
    return {name: len(values) for name, values in metrics.items()}


def show_advantages(logged: Any, record: Rollouts) -> None:
    """Put the advantages of the batch into TRL's table of completions, which has those that TRL computed."""
    assert record.advantages is not None
    if len(record.rewards) != len(record.groups):  # dynamic sampling: the table has rows that were replaced
        return
    rows = record.advantages.flatten().tolist()
    for _ in range(min(len(logged), len(rows))):
        logged.pop()
    logged.extend(rows)


def escape_table(logs: Mapping[str, Any]) -> None:
    """Escape TRL's table of completions in place, which it prints to the terminal."""
    for rows in (logs["prompt"], logs["completion"], *logs["extra"].values()):
        escaped = [escape(entry) for entry in rows]
        rows.clear()
        rows.extend(escaped)


def escape(entry: Any) -> Any:
    """Return a text, or a chat's messages, with terminal control characters escaped.

    >>> escape([{"role": "user", "content": "\\x1b[2J"}])
    [{'role': 'user', 'content': '\\\\x1b[2J'}]
    """
    if isinstance(entry, str):
        return plain_text(entry)
    if isinstance(entry, Mapping):
        return {escape(key): escape(value) for key, value in entry.items()}
    return [escape(part) for part in entry] if isinstance(entry, list) else entry
