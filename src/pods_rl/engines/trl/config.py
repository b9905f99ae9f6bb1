"""PODSConfig: TRL's GRPOConfig and the few fields that PODS adds."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import GRPOConfig

from ...batching import check_batch
from ...errors import UserError
from ...selection import get_rule
from .reward_calls import REWARD_ERRORS


@dataclass
class PODSConfig(GRPOConfig):
    """GRPOConfig plus down-sampling; everything TRL accepts is accepted here with TRL's meaning.

    ``num_generations`` is m, the rows trained per prompt (TRL's own meaning); ``num_rollouts`` is n, the rollouts
    generated per prompt. ``num_rollouts=None`` means n = m: plain GRPO. The loss defaults to the paper's
    (section 3.1): ``loss_type="grpo"`` (TRL: ``"dapo"``), ``beta=0.0``, ``epsilon=0.2``.

    Raises:
        UserError: n < m, an unknown rule, advantage order or `reward_errors`, a batch that cannot hold whole groups.

    Example:
        >>> config = PODSConfig(
        ...     "out", num_generations=4, num_rollouts=16, per_device_train_batch_size=4, use_cpu=True, bf16=False
        ... )
        >>> config.num_rollouts, config.rule, config.loss_type
        (16, 'max_variance', 'grpo')
    """

    loss_type: str = field(
        default="grpo",
        metadata={"help": "Loss formulation. PODS default `grpo`: mean over sequences of the token mean (paper 3.1)."},
    )
    num_rollouts: int | None = field(
        default=None,
        metadata={"help": "n: rollouts generated per prompt, at least num_generations (m). None: n = m, plain GRPO."},
    )
    rule: str = field(
        default="max_variance",
        metadata={"help": "Which m of the n rollouts to keep: a name in pods_rl.selection.RULES or a dotted path."},
    )
    advantages: str = field(
        default="after",
        metadata={"help": "Normalise advantages `after` selection (the paper, section 3.2) or `before`."},
    )
    reward_errors: str = field(
        default="raise",
        metadata={
            "help": "What becomes of a rollout whose reward function raises or hangs: `raise` ends the run, `zero` "
            "scores it 0, `drop` leaves it unscored."
        },
    )
    rollout_batch_size: int | None = field(
        default=None,
        metadata={"help": "Most rows generated at once on each process without vLLM. None: all of them."},
    )
    skip_zero_advantage_steps: bool = field(
        default=True,
        metadata={"help": "Skip the optimizer step when every advantage of it is zero. False: TRL's behaviour."},
    )
    trim_padding: bool = field(
        default=True,
        metadata={"help": "Cut each forward pass to its own longest row instead of the generation batch's."},
    )
    sort_by_length: bool = field(
        default=True,
        metadata={"help": "Split an optimizer step into micro-batches of similar length (the gradient is the same)."},
    )

    def __post_init__(self) -> None:
        check_batch(
            num_generations=self.num_generations,
            num_rollouts=self.num_rollouts,
            per_device_train_batch_size=self.per_device_train_batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            steps_per_generation=self.steps_per_generation,
            generation_batch_size=self.generation_batch_size,
            rollout_batch_size=self.rollout_batch_size,
            use_vllm=self.use_vllm,
        )
        super().__post_init__()
        if self.num_rollouts is None:
            self.num_rollouts = self.num_generations
        if self.advantages not in ("after", "before"):
            raise UserError(f"advantages: expected 'after' (the paper) or 'before', got {self.advantages!r}")
        if self.reward_errors not in REWARD_ERRORS:
            raise UserError(f"reward_errors: expected 'raise', 'zero' or 'drop', got {self.reward_errors!r}")
        if self.advantages == "before" and self.multi_objective_aggregation != "sum_then_normalize":
            raise UserError(
                "advantages='before' normalises the summed reward over all n rollouts, so it needs "
                f"multi_objective_aggregation='sum_then_normalize', got {self.multi_objective_aggregation!r}"
            )
        get_rule(self.rule)
