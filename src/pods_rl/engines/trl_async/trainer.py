"""AsyncPODSTrainer: TRL's asynchronous GRPO trainer, fed with the m kept of n rollouts."""

from __future__ import annotations

from typing import Any

from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from ...errors import UserError
from . import check_version
from .config import AsyncPODSConfig
from .worker import LostRolloutsError, PODSRolloutWorker


class AsyncPODSTrainer(AsyncGRPOTrainer):
    """TRL's AsyncGRPOTrainer that requests n rollouts of each prompt and trains on m of them.

    Source: PODS (arXiv 2504.13818), Algorithm 1. The worker's process scores and selects, so rollouts that are not
    kept never reach the trainer. Rewards in the log are means over all n.

    Args:
        model, reward_funcs, args and all others: as TRL's. `args` is an AsyncPODSConfig.

    Raises:
        TypeError, UserError: `args` of another type; a `rollout_worker`.
        LostRolloutsError: in training, if the worker or the vLLM server ends.
    """

    rollout_worker: Any
    _tag_names = ["trl", "async-grpo", "pods"]  # noqa: RUF012  (as TRL declares it)
    _name = "AsyncPODS"

    def __init__(
        self, model: str, reward_funcs: Any = None, args: AsyncPODSConfig | None = None, *others: Any, **named: Any
    ) -> None:
        check_version()
        if args is None:
            args = AsyncPODSConfig(f"{model.split('/')[-1]}-AsyncPODS")
        if not isinstance(args, AsyncPODSConfig):
            raise TypeError(
                f"AsyncPODSTrainer needs args of type AsyncPODSConfig, got {type(args).__name__}: it takes the same "
                "fields, plus num_rollouts"
            )
        automatic = args.max_inflight_tasks < 0
        super().__init__(model, reward_funcs, args, *others, **named)
        if automatic:
            self.args.max_inflight_tasks = -(-self.args.max_inflight_tasks * args.num_rollouts // args.num_generations)
        if self.accelerator.is_main_process:
            if type(self.rollout_worker) is not AsyncRolloutWorker:
                raise UserError("AsyncPODSTrainer has a rollout worker of its own: pass no rollout_worker.")
            ours = {
                "num_generations": args.num_rollouts,
                "num_kept": args.num_generations,
                "max_inflight_tasks": self.args.max_inflight_tasks,
                **{name: getattr(args, name) for name in ("rule", "advantages", "dynamic_sampling", "seed")},
            }
            # TRL's worker was not started: ours has its settings.
            self.rollout_worker = PODSRolloutWorker(**self.rollout_worker._loop_kwargs | ours)
            self.rollout_worker.passed = self._trained_groups
            self.rollout_queue = self.rollout_worker

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        except Exception:
            # Whatever failed first: if the rollouts are lost, that is the reason, in one line.
            if self.rollout_worker is not None and self.rollout_worker.lost:
                raise LostRolloutsError(self.rollout_worker.lost) from None
            raise
