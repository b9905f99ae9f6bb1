"""AsyncPODSTrainer: TRL's asynchronous GRPO trainer, fed with the m kept of n rollouts, and its configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from ...errors import UserError
from ...selection import RuleOrName
from ...selection.rules import check_rule, rule_name
from ..bounds import check_bounds
from ..sizes import check_sizes
from .worker import LostRolloutsError, PODSRolloutWorker


@dataclass
class AsyncPODSConfig(AsyncGRPOConfig):
    """AsyncGRPOConfig plus down-sampling: every field of TRL's has TRL's default and meaning.

    An automatic `max_inflight_tasks` (-1) is n / m times TRL's. A number that you set stays.

    Args:
        num_rollouts: n, the rollouts requested for each prompt; at least m = num_generations, the rollouts trained of
            each prompt. If None, n = m, with TRL's advantages.
        selection: prompt: m rollouts of each prompt. The worker queues each group as soon as it is scored, so no batch
            exists from which `batch` could select.
        rule: which m of the n rollouts are kept: max_variance (the paper, section 3.1), max_reward, random,
            percentile, or your own as a function of a module or as package.module:function.
        advantages: normalise advantages over the m kept rollouts (after; the paper, section 3.2) or over all n
            (before).
        dynamic_sampling: drop groups whose advantages are all zero (DAPO, arXiv 2503.14476). Another prompt
            replaces a dropped one. Epochs and checkpoints count dropped prompts as used.

    Raises:
        UserError: n < m, m < 2, an unknown choice, `selection: batch`, or a rule without an importable name.

    Example:
        >>> config = AsyncPODSConfig("out", num_generations=4, num_rollouts=16, use_cpu=True, bf16=False)
        >>> config.num_rollouts, config.rule, config.advantages
        (16, 'max_variance', 'after')
    """

    num_rollouts: int | None = None
    selection: str = "prompt"
    rule: RuleOrName = "max_variance"
    advantages: str = "after"
    dynamic_sampling: bool = False

    def __post_init__(self) -> None:
        check_bounds(vars(self), fields(self))
        super().__post_init__()
        if self.num_rollouts is None:
            self.num_rollouts = self.num_generations
        check_sizes(self.num_rollouts, self.num_generations, least=2)
        if not isinstance(self.dynamic_sampling, bool):
            raise UserError(f"dynamic_sampling = {self.dynamic_sampling!r}: expected True or False.")
        if self.selection != "prompt":
            raise UserError(
                f"selection = {self.selection!r}: the asynchronous trainer queues each group as soon as it is scored, "
                "so it can only select within a prompt. Set it to prompt, or select over the batch with PODSTrainer."
            )
        check_rule(self.rule)
        name = rule_name(self.rule)
        if "<" in name:  # a lambda, or a function within another
            raise UserError(f"the rule {name!r} is sent to another process: define it with def at the top of a module.")

    def to_dict(self) -> dict[str, Any]:
        """Return TRL's dictionary, with a rule function replaced by its import path, so that it is plain data."""
        return super().to_dict() | {"rule": rule_name(self.rule)}


class AsyncPODSTrainer(AsyncGRPOTrainer):
    """TRL's AsyncGRPOTrainer that requests n rollouts of each prompt and trains on m of them.

    Source: PODS (arXiv 2504.13818), Algorithm 1. The worker's process scores and selects, so rollouts that are not
    kept never reach the trainer. Rewards in the log are means over all n.

    Args:
        model, reward_funcs, args and all others: as TRL's. `args` is an AsyncPODSConfig.

    Raises:
        TypeError: `args` is not an AsyncPODSConfig.
        UserError: a `rollout_worker` is passed.
        LostRolloutsError: in training, if the worker or the vLLM server ends.
    """

    rollout_worker: Any
    _tag_names = ["trl", "async-grpo", "pods"]  # noqa: RUF012  (as TRL declares it)
    _name = "AsyncPODS"

    def __init__(
        self, model: str, reward_funcs: Any = None, args: AsyncPODSConfig | None = None, *rest: Any, **options: Any
    ) -> None:
        if args is None:
            args = AsyncPODSConfig(f"{model.split('/')[-1]}-AsyncPODS")
        if not isinstance(args, AsyncPODSConfig):
            raise TypeError(
                f"AsyncPODSTrainer needs args of type AsyncPODSConfig, got {type(args).__name__}: it takes the same "
                "fields, plus num_rollouts"
            )
        is_automatic = args.max_inflight_tasks < 0
        super().__init__(model, reward_funcs, args, *rest, **options)
        if is_automatic:
            # TRL has counted m requests for each prompt. Rounded up.
            requests = self.args.max_inflight_tasks * args.num_rollouts
            self.args.max_inflight_tasks = -(-requests // args.num_generations)
        if not self.accelerator.is_main_process:
            return
        # Replace TRL's worker, which was not started, by ours with the same settings.
        if type(self.rollout_worker) is not AsyncRolloutWorker:
            raise UserError("AsyncPODSTrainer has a rollout worker of its own: pass no rollout_worker.")
        settings = {
            **self.rollout_worker._loop_kwargs,
            "num_generations": args.num_rollouts,
            "num_kept": args.num_generations,
            "max_inflight_tasks": self.args.max_inflight_tasks,
            "rule": args.rule,
            "advantages": args.advantages,
            "dynamic_sampling": args.dynamic_sampling,
            "seed": args.seed,
        }
        self.rollout_worker = PODSRolloutWorker(**settings)
        self.rollout_worker.finished_groups = self._trained_groups
        self.rollout_queue = self.rollout_worker

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        except Exception:
            # Lost rollouts can fail the step in many ways. They are the reason that the user reads, in one line.
            if self.rollout_worker is not None and self.rollout_worker.lost:
                raise LostRolloutsError(f"No more rollouts: {self.rollout_worker.lost}") from None
            raise
