"""The agent-loop manager that requests n sessions of each training prompt while `rollout.n` is m, and its workers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import ray  # type: ignore[import-not-found]
from omegaconf import DictConfig
from tensordict import NonTensorData, TensorDict
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from ...errors import UserError
from ...rollouts.stopping import Status
from .servers import cancellable
from .sessions import Sessions
from .settings import read_settings

# verl's name for the number of sessions per prompt; a data set may have it as a column.
ROLLOUT_N = "__rollout_n__"


class PODSAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager, with `sampler_kwargs.num_rollouts` sessions per training prompt.

    `rollout.n`, from which verl computes mini-batches, padding and loss denominators, stays the number that is trained.
    Validation batches, and prompts whose data set sets its own number, do not change. With `rollout_waves` its workers
    are `PODSAgentLoopWorker`.

    Raises:
        UserError: see `settings.read_settings`.
    """

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        self.pods = read_settings(config)
        super().__init__(config, *args, **kwargs)
        if self.pods.stopping is not None:
            self.agent_loop_workers_class = ray.remote(PODSAgentLoopWorker)

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Dispatch a batch to the workers as verl does, with n added to training batches."""
        validation = "validate" in prompts and bool(prompts["validate"])
        if not validation and ROLLOUT_N not in prompts:
            prompts = prompts.copy()
            prompts[ROLLOUT_N] = NonTensorData(self.pods.num_rollouts)
        super().generate_sequences(prompts)


class PODSAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__):
    """verl's worker, in which a training prompt's sessions start in waves and stop once its group is decided.

    Each prompt goes its own way. Validation, and prompts with another number of sessions, run as in verl.
    """

    def __init__(self, config: DictConfig, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, llm_client and cancellable(llm_client), *args, **kwargs)
        self.pods = read_settings(config)
        self._groups: dict[str, Sessions] = {}

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        uid = prompt["uid"]
        if not trajectory["validate"] and prompt.get(ROLLOUT_N) == self.pods.num_rollouts:
            self._groups[uid] = Sessions(self.pods.waves, self._stops)
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
        finally:
            self._groups.pop(uid, None)

    async def _run_agent_loop(self, sampling_params: dict, trajectory: dict, **kwargs: Any) -> Any:
        session = partial(super()._run_agent_loop, sampling_params, trajectory, **kwargs)
        group = self._groups.get(kwargs["uid"])
        return await session() if group is None else await group.run(kwargs["session_id"], session)

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict[str, Any]) -> None:
        """Score a session as verl does, and hold its rows back until all earlier sessions are scored."""
        await super()._compute_score(outputs, kwargs)
        group = self._groups.get(kwargs["uid"])
        if group is None:
            return
        if outputs[-1].reward_score is None:
            raise UserError(
                "rollout_waves needs each session's reward as soon as it ends, and this one has none. Use a reward "
                "function or a reward model with GPUs of its own, or unset rollout_waves."
            )
        await group.commit(kwargs["session_id"], outputs[-1].reward_score)

    def _stops(self, rewards: Sequence[float]) -> bool:
        try:
            return self.pods.status(rewards) != Status.OPEN
        except UserError:  # a reward outside reward_range: the replay buffer raises it where it ends the run
            return True
