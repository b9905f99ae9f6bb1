"""The settings of PODS under SkyRL, and their checks before an inference engine starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import UserError
from ..settings import SelectionSettings, read_selection

_M = "generator.n_samples_per_prompt"

_NO_BATCH = (
    "SkyRL counts its mini-batches in prompts and expects rows of every prompt, the same number of each "
    "(compute_prompt_mini_batch_boundaries), and its asynchronous trainer generates one prompt at a time."
)

# SkyRL's estimators whose baseline is the group's other trajectories.
GROUP_ESTIMATORS = ("grpo", "rloo", "maxrl")


@dataclass(frozen=True, kw_only=True)
class SkyRLSettings(SelectionSettings):
    """The settings of a run under SkyRL: those of `pods`, with m from `generator.n_samples_per_prompt`.

    Args:
        step_wise: whether a trajectory has a row for each of its turns (`generator.step_wise_trajectories`).
    """

    step_wise: bool = False


def read_settings(config: Any, options: Any) -> SkyRLSettings:
    """Read the settings from SkyRL's full configuration, which holds m, and the options `pods`.

    Raises:
        UserError: see `engines.settings.read_selection`; m = 1 with an estimator that compares trajectories.
    """
    m = config.generator.n_samples_per_prompt
    selection = read_selection(options, m, prefix="pods", m_key=_M, no_batch=_NO_BATCH)
    estimator = config.trainer.algorithm.advantage_estimator
    if selection["num_generations"] == 1 and estimator in GROUP_ESTIMATORS:
        raise UserError(
            f"{_M} (m, trained per prompt) is 1, and trainer.algorithm.advantage_estimator={estimator} compares the "
            "kept trajectories of a prompt with each other: there is nothing to compare. Set it to at least 2."
        )
    return SkyRLSettings(**selection, step_wise=bool(config.generator.step_wise_trajectories))
