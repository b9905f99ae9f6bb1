"""The settings of PODS under SkyRL, and their checks before an inference engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UserError
from ...selection import Rule, get_rule
from ...text import suggest

_KEYS = ("num_rollouts", "rule", "seed", "ledger", "ledger_every")
_M = "generator.n_samples_per_prompt"

# SkyRL's estimators whose baseline is the group's other trajectories.
GROUP_ESTIMATORS = ("grpo", "rloo", "maxrl")


@dataclass(frozen=True)
class PODSSettings:
    """n, m and the rule of a run under SkyRL.

    Args:
        num_rollouts: n, trajectories generated per training prompt (`pods.num_rollouts`).
        num_generations: m, trajectories trained per prompt (`generator.n_samples_per_prompt`).
        rule: the rule function (`pods.rule`: a name or an import path; default max_variance).
        seed: of rules that draw (`pods.seed`; default 0).
        step_wise: whether a trajectory has a row for each of its turns (`generator.step_wise_trajectories`).
        ledger: the folder of the rollout ledger (`pods.ledger`). If None, no ledger is written.
        ledger_every: the ledger is written at step 1 and at every multiple of this number (`pods.ledger_every`).
    """

    num_rollouts: int
    num_generations: int
    rule: Rule
    seed: int = 0
    step_wise: bool = False
    ledger: str | None = None
    ledger_every: int = 10


def read_settings(config: Any, options: Mapping[str, Any]) -> PODSSettings:
    """Read the settings.

    Args:
        config: SkyRL's full configuration, which holds m.
        options: `num_rollouts`, and optionally `rule`, `seed`, `ledger` and `ledger_every`.

    Raises:
        UserError: an unknown key or rule, a number that is not one, n below m, or m = 1 with an estimator that
            compares the trajectories of a prompt.
    """
    for key in options:
        if key not in _KEYS:
            raise UserError(f"pods: unknown key {key!r}, expected {', '.join(_KEYS)}.{suggest(str(key), _KEYS)}")
    kept = _count(_M, config.generator.n_samples_per_prompt)
    generated = _count("pods.num_rollouts", options.get("num_rollouts"))
    if generated < kept:
        raise UserError(
            f"pods.num_rollouts (n, generated per prompt) must be at least {_M} (m, trained per prompt); got "
            f"n = {generated} and m = {kept}. Generate more or keep fewer."
        )
    _check_estimator(config.trainer.algorithm.advantage_estimator, kept)
    return PODSSettings(
        num_rollouts=generated,
        num_generations=kept,
        rule=get_rule(options.get("rule", "max_variance")),
        seed=_count("pods.seed", options.get("seed", 0), least=0),
        step_wise=bool(config.generator.step_wise_trajectories),
        ledger=_folder(options.get("ledger")),
        ledger_every=_count("pods.ledger_every", options.get("ledger_every", 10)),
    )


def _count(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name} must be a whole number of at least {least}; got {value!r}.")
    return value


def _folder(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise UserError(f"pods.ledger must be the path of a folder; got {value!r}.")
    return value


def _check_estimator(estimator: str, m: int) -> None:
    if m == 1 and estimator in GROUP_ESTIMATORS:
        raise UserError(
            f"{_M} (m, trained per prompt) is 1, and trainer.algorithm.advantage_estimator={estimator} compares the "
            "kept trajectories of a prompt with each other: there is nothing to compare. Set it to at least 2."
        )
