"""The rewards of PODSTrainer: each function watched, and what cannot be trained on taken out before anything sees it.

What is overridden of TRL:

- `_calculate_rewards`: count rows that a function did not score, and mark rollouts with unusable rewards as unscored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from .config import PODSConfig
from .reward_calls import Faults, watched
from .rollouts import refuse_unusable

logger = logging.getLogger(__name__)

# TRL's warning of an unscored rollout, which prints its prompt and completion as they are.
UNSCORED_WARNING = "All reward functions returned None"


class RewardsMixin(GRPOTrainer):
    """What PODSTrainer changes of TRL's rewards; those that can be trained on stay TRL's to the last bit."""

    args: PODSConfig
    reward_funcs: list[Any]

    def _watch_rewards(self) -> None:
        """Count the faults of reward functions from here on; called once, when TRL has read them."""
        self._faults = Faults()
        self._said: set[str] = set()

    @contextmanager
    def _watched_rewards(self) -> Iterator[None]:
        """Inside, TRL calls every reward function under watch; outside, `reward_funcs` holds the user's own objects."""
        own = self.reward_funcs
        self.reward_funcs = [
            watched(function, name, self.args.reward_errors, self._faults)
            for function, name in zip(own, self.reward_func_names, strict=True)
        ]
        try:
            yield
        finally:
            self.reward_funcs = own

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        self._faults.clear()
        with _without_trl_warning(), self._watched_rewards():
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        rewards, spoiled = refuse_unusable(rewards, self.reward_weights)
        unscored = rewards.isnan().all(dim=1).sum()
        *spoilt, alone = torch.cat([spoiled, unscored.unsqueeze(0)]).tolist()
        errors, timeouts = self._all_faults()
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["pods/unusable_rewards"].append(float(sum(spoilt)))
        metrics["pods/unscored_rollouts"].append(float(alone))
        metrics["pods/reward_errors"].append(float(errors))
        metrics["pods/reward_timeouts"].append(float(timeouts))
        self._warn(dict(zip(self.reward_func_names, spoilt, strict=True)), alone, len(rewards))
        return rewards

    def _all_faults(self) -> tuple[int, int]:
        """Errors and timeouts of this generation over all processes; the first of each function is said once."""
        faults = self._faults
        counts = torch.tensor([faults.errors, faults.timeouts], device=self.accelerator.device)
        errors, timeouts = self.accelerator.reduce(counts, reduction="sum").tolist()
        if errors or timeouts:
            for name, message in gather_object(list(faults.first.items())):
                self._say_once(f"errors of {name}", f"{message}. Said once; see pods/reward_errors and _timeouts.")
        return errors, timeouts

    def _warn(self, spoiled: dict[str, int], unscored: int, rows: int) -> None:
        for name, count in spoiled.items():
            if count:
                self._say_once(
                    name,
                    f"reward function {name!r} gave no usable reward for {count} of {rows} rollouts (infinite, beyond "
                    "1e15, NaN in a recipe, or dropped after an error); they count as unscored: never selected while "
                    "scored ones remain, advantage 0. Said once; see pods/unusable_rewards.",
                )
        if unscored and not any(spoiled.values()):
            self._say_once(
                "",
                f"no reward function scored {unscored} of {rows} rollouts (each gave None or NaN): never selected "
                "while scored ones remain, advantage 0. Said once; see pods/unscored_rollouts.",
            )

    def _say_once(self, what: str, message: str) -> None:
        if what not in self._said and self.accelerator.is_main_process:
            self._said.add(what)
            logger.warning("%s", message)


@contextmanager
def _without_trl_warning() -> Iterator[None]:
    """Inside, TRL does not print the first unscored rollout: a model wrote it, and a terminal would obey it."""

    def quiet(record: logging.LogRecord) -> bool:
        return UNSCORED_WARNING not in record.getMessage()

    log = grpo_trainer.logger.logger
    log.addFilter(quiet)
    try:
        yield
    finally:
        log.removeFilter(quiet)
