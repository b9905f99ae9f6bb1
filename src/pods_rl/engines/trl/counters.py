"""Metrics that count rollouts, rows or steps: they add up within a step, and are not logged while they are zero."""

from __future__ import annotations

from collections.abc import Mapping

Metrics = dict[str, list[float]]

COUNTERS = (
    "pods/unusable_rewards", "pods/unscored_rollouts", "pods/reward_errors", "pods/reward_timeouts",
    "pods/masked_rollouts", "pods/verifier_timeouts", "pods/verifier_crashes", "pods/rows_moved",
    "pods/rows/left_out", "pods/skipped_step", "pods/bad_loss", "pods/bad_gradient",
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
        before: the number of entries of each metric before them.
    """
    for name in COUNTERS:
        start = before.get(name, 0)
        if len(metrics.get(name, ())) > start + 1:
            metrics[name][start:] = [sum(metrics[name][start:])]
