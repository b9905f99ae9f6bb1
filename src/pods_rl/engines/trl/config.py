"""PODSConfig: TRL's GRPOConfig with the fields that PODS adds."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trl import GRPOConfig

from ...planning.losses import loss_doubts, refuse_impossible
from ...recipe.checks import batch_plan
from ...selection import Rule
from ...selection.registry import check_rule, rule_name

if TYPE_CHECKING:
    RuleOrName = str | Rule
else:
    RuleOrName = str  # a command line can give a name alone


@dataclass
class PODSConfig(GRPOConfig):
    """GRPOConfig plus down-sampling: every field of TRL's has TRL's default and meaning.

    ``num_generations`` is m, the rows trained per prompt (TRL's own meaning); ``num_rollouts`` is n, the rollouts
    generated per prompt. ``num_rollouts=None`` means n = m: plain GRPO. The paper's loss (section 3.1) is
    ``loss_type="grpo"``; TRL's default is ``"dapo"``.

    Raises:
        UserError: n < m, an unknown rule or `reward_errors`, a batch that cannot hold whole groups, `advantages` or
            `advantage_baseline` that contradict TRL's settings.

    Example:
        >>> config = PODSConfig(
        ...     "out", num_generations=4, num_rollouts=16, per_device_train_batch_size=4, use_cpu=True, bf16=False
        ... )
        >>> config.num_rollouts, config.rule, config.loss_type, config.skip_zero_advantage_steps
        (16, 'max_variance', 'dapo', True)
    """

    # A recipe's keys, types and help texts are read from these lines (`recipe.trl_source`).
    num_rollouts: int | None = field(
        default=None,
        metadata={
            "help": "n: rollouts generated per prompt, at least m = num_generations, the rows trained on. null: n = m, "
            "plain GRPO."
        },
    )
    rule: RuleOrName = field(
        default="max_variance",
        metadata={
            "help": "Which m of the n rollouts to keep: max_variance (the paper, section 3.1), max_reward, random, "
            "percentile, or your own as package.module:function."
        },
    )
    advantages: str = field(
        default="after",
        metadata={
            "help": "Normalise advantages over the m kept rollouts (after; the paper, section 3.2) or over all n "
            "(before)."
        },
    )
    advantage_baseline: str = field(
        default="mean",
        metadata={
            "help": "What is subtracted from each reward: the mean of its group (GRPO), or leave_one_out, the mean of "
            "the others (RLOO; with scale_rewards: none or batch)."
        },
    )
    reward_errors: str = field(
        default="raise",
        metadata={
            "help": "What to do with a rollout whose reward raises or hangs: raise (the run ends and names it), zero "
            "(it scores 0), drop (it is unscored: not selected while others are, advantage 0)."
        },
    )
    rollout_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Most rollouts generated at once on each process; null: all. Lower it if generation runs out of "
            "memory. With colocated vLLM its max_num_seqs; a vLLM server has a setting of its own."
        },
    )
    skip_zero_advantage_steps: bool | None = field(
        default=None,
        metadata={
            "help": "Skip the update in a step whose advantages are all zero, if nothing else has a gradient (a KL "
            "term, an entropy bonus). false: as in TRL, momentum and decay still move the weights. null: skip if "
            "num_rollouts > num_generations."
        },
    )
    trim_padding: bool = field(default=True, metadata={"help": "Cut each micro-batch to its own longest row."})
    sort_by_length: bool = field(
        default=True,
        metadata={"help": "Put rows of similar length into one micro-batch; the gradient of the step stays the same."},
    )

    def __post_init__(self) -> None:
        batch_plan(vars(self))
        refuse_impossible(vars(self))
        for doubt in loss_doubts(vars(self)):
            warnings.warn(doubt, UserWarning, stacklevel=3)
        super().__post_init__()
        if self.num_rollouts is None:
            self.num_rollouts = self.num_generations
        if self.skip_zero_advantage_steps is None:
            self.skip_zero_advantage_steps = self.num_rollouts > self.num_generations
        check_rule(self.rule)

    def to_dict(self) -> dict[str, Any]:
        """Return TRL's dictionary, with a rule function replaced by its import path, so that it is plain data."""
        return super().to_dict() | {"rule": rule_name(self.rule)}
