"""PODSConfig: TRL's GRPOConfig with the fields that PODS adds."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trl import GRPOConfig

from ...errors import UserError
from ...selection import Rule
from ...selection.registry import check_rule, rule_name
from .batching import batch_plan
from .settings import LEVERS, check_rollouts, loss_doubts, refuse_impossible

if TYPE_CHECKING:
    RuleOrName = str | Rule
else:
    RuleOrName = str  # a command line can give a name alone


PAPER = {  # as TRL's trainers name theirs, for the model card
    "title": "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM Reinforcement Learning",
    "id": "2504.13818",
    "citation": "@article{xu2025rollouts, title={Not All Rollouts are Useful: Down-Sampling Rollouts in LLM "
    "Reinforcement Learning}, author={Xu, Yixuan Even and Savani, Yash and Fang, Fei and Kolter, J. Zico}, "
    "journal={arXiv preprint arXiv:2504.13818}, year={2025}}",
}


@dataclass
class PODSConfig(GRPOConfig):
    """GRPOConfig plus down-sampling: every field of TRL's has TRL's default and meaning.

    ``num_generations`` is m, the rows trained per prompt (TRL's own meaning); ``num_rollouts`` is n, the rollouts
    generated per prompt. ``num_rollouts=None`` means n = m: plain GRPO. The paper's loss (section 3.1) is
    ``loss_type="grpo"``; TRL's default is ``"dapo"``.

    Raises:
        UserError: n < m, an unknown rule or `reward_errors`, a batch that cannot hold whole groups, `advantages` or
            `advantage_baseline` that contradict TRL's settings, waves in which nothing could stop a group.

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
            "plain GRPO. pods plan measures which n and m have the most signal a second."
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
    clock: str = field(
        default="wall",
        metadata={
            "help": "What the training clock and the phases of a step count: wall, seconds; cpu, seconds of processor "
            "time of this process, which other work on the machine hardly changes (on a CPU, with one process; the "
            "work of reward processes is not in it)."
        },
    )
    reward_errors: str = field(
        default="raise",
        metadata={
            "help": "What to do with a rollout whose reward raises or hangs: raise (the run ends and names it), zero "
            "(it scores 0), drop (it is unscored: not selected while others are, advantage 0)."
        },
    )
    tool_timeout: float | None = field(
        default=120.0,
        metadata={
            "help": "Seconds that one call of a tool may take before the policy reads an error in place of its result; "
            "null: no limit. A plain function is stopped on the main thread only, and not within compiled code."
        },
    )
    max_tool_calls: int | None = field(
        default=None,
        metadata={"help": "Calls of tools that one rollout may make, in all its turns; null: no limit."},
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
    prompt_once: bool = field(
        default=True,
        metadata={
            "help": "Compute each prompt once for all its rollouts, in generation (without vLLM) and in the update, "
            "and skip what has no gradient or equals another row. false: generate and update as TRL does."
        },
    )
    exact_trl: bool = field(
        default=False,
        metadata={
            "help": "Turn off everything that changes rounding or draws: with num_rollouts = num_generations the run "
            "is then TRL's to the last bit."
        },
    )
    rollout_waves: list[int] | None = field(
        default=None,
        metadata={
            "help": "Generate in waves of these sizes, at least m first and n in all (a last wave repeats), and stop "
            "a group once it is decided. null: all at once."
        },
    )
    stop_variance: float = field(
        default=1.0,
        metadata={
            "help": "With waves, a group is decided once the best m so far have this share of the greatest variance "
            "that the rest could still bring; 1.0 keeps the same rollouts as all n."
        },
    )
    reward_range: list[float] | None = field(
        default=None,
        metadata={
            "help": "With waves, the least and greatest total reward: a group is then decided by the total. null: by "
            "answer_reward, whose range is its attribute range, or 0 to 1."
        },
    )
    answer_reward: str | None = field(
        default=None,
        metadata={
            "help": "The reward function that tells right answers from wrong ones: it decides which groups stop "
            "(without a reward_range) and which are dead. null: the task's; without a task the total reward."
        },
    )
    give_up_after: int | None = field(
        default=None,
        metadata={"help": "With waves, stop a group whose first rollouts, so many, all have the same reward."},
    )
    give_up_probability: float = field(
        default=1.0,
        metadata={
            "help": "Give such a group up only with this probability, and weight those that continue by 1 / (1 - it), "
            "so that the expected gradient stays the same; 1.0: always, without weights."
        },
    )
    dead_groups: str = field(
        default="keep",
        metadata={
            "help": "Places of groups whose rewards are all equal: keep, share (more rows of the batch's other groups) "
            "or refill (draw further prompts, as DAPO does)."
        },
    )
    refill_limit: int = field(
        default=3, metadata={"help": "With dead_groups: refill, how often the places are drawn again at most."}
    )
    rows_per_group: str = field(
        default="fixed",
        metadata={
            "help": "fixed: m rows of each prompt. auto: the rows of the rarer reward and majority_rows times as many "
            "of the others; further rows are left out of the update."
        },
    )
    majority_rows: float = field(
        default=1.0, metadata={"help": "With rows_per_group: auto, rows of the commoner reward for each rarer one."}
    )
    prefer_distinct: bool = field(
        default=False,
        metadata={
            "help": "Among rollouts of equal reward keep those whose tokens differ first. Biased towards rare texts "
            "(docs/rollouts.md)."
        },
    )

    dynamic_sampling: bool | str = field(
        default=False,
        metadata={
            "help": "Replace groups whose rewards are all equal by groups of further prompts (DAPO, arXiv 2503.14476). "
            "true: the total reward decides; or the name of the reward function that does."
        },
    )
    dynamic_sampling_rounds: int = field(
        default=3,
        metadata={"help": "With dynamic_sampling, how often further prompts are generated for a batch at most."},
    )

    def __post_init__(self) -> None:
        batch_plan(vars(self))
        refuse_impossible(vars(self))
        check_rollouts(vars(self) | {"rule": rule_name(self.rule)})
        for doubt in loss_doubts(vars(self)):
            warnings.warn(doubt, UserWarning, stacklevel=3)
        super().__post_init__()
        if self.clock == "cpu" and (self.world_size > 1 or self.device.type != "cpu"):
            raise UserError(
                f"clock = cpu counts the processor time of one process that trains on a CPU: got {self.world_size} "
                f"process(es) on {self.device.type}. Set clock: wall."
            )
        if self.exact_trl:
            for lever in LEVERS:
                setattr(self, lever, False)
        if self.num_rollouts is None:
            self.num_rollouts = self.num_generations
        if self.skip_zero_advantage_steps is None:
            self.skip_zero_advantage_steps = self.num_rollouts > self.num_generations
        check_rule(self.rule)

    def to_dict(self) -> dict[str, Any]:
        """Return TRL's dictionary, with a rule function replaced by its import path, so that it is plain data."""
        return super().to_dict() | {"rule": rule_name(self.rule)}


def group_sizes(args: PODSConfig) -> tuple[int, int]:
    """Return n and m, which PODSConfig sets when it is built."""
    assert args.num_rollouts is not None
    assert args.num_generations is not None
    return args.num_rollouts, args.num_generations
