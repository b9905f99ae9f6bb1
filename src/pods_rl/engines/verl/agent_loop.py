"""The agent-loop manager that requests n sessions of each training prompt while `rollout.n` is m."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from tensordict import NonTensorData, TensorDict
from verl.trainer.ppo.v1 import AgentLoopManagerTQ

from .settings import read_settings

# verl's name for the number of sessions per prompt; a data set may have it as a column.
ROLLOUT_N = "__rollout_n__"


class PODSAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager, with `sampler_kwargs.num_rollouts` sessions per training prompt.

    `rollout.n`, from which verl computes mini-batches, padding and loss denominators, stays the number that is trained.
    Validation batches, and prompts whose data set sets its own number, do not change.

    Raises:
        UserError: see `settings.read_settings`.
    """

    requests_num_rollouts = True  # `settings` refuses managers without it

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        self.pods = read_settings(config)
        super().__init__(config, *args, **kwargs)

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Dispatch a batch to the workers as verl does, with n added to training batches."""
        is_validation = "validate" in prompts and bool(prompts["validate"])
        if not is_validation and ROLLOUT_N not in prompts:
            prompts = prompts.copy()
            prompts[ROLLOUT_N] = NonTensorData(self.pods.num_rollouts)
        super().generate_sequences(prompts)
