"""PODSConfig: TRL's GRPOConfig with the fields that PODS adds."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import GenerationConfig
from trl import GRPOConfig

from ...errors import UserError, first_line
from ...selection import RuleOrName
from ...selection.batch import as_batch_function
from ...selection.rules import check_rule, rule_name
from ...text import counted, describe, documented_arguments, short, suggest
from ..bounds import INTERVALS, check_bounds, check_mappings, check_number
from ..sizes import whole_number
from .batching import batch_plan

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

    The paper's loss (section 3.1) is ``loss_type="grpo"``; TRL's default is ``"dapo"``.

    Args:
        num_rollouts: number of rollouts generated for each prompt, n. At least m = num_generations, the rows trained of
            each prompt (TRL's own meaning). If None, n = m, which is plain GRPO. `pods plan` measures what
            more rollouts cost.
        selection: choose rollouts of each prompt by itself, m of each (prompt, the paper), or of all prompts of a
            generation together (batch): prompts then have different numbers of rows, and those whose rewards are all
            equal have none. The rule is then max_variance, random, or your own as a function of a RolloutBatch.
        num_prompts: with selection batch, the number of prompts of a generation, P. If None, P is the rows divided by
            num_generations, as in TRL. If set, m is the mean, rows / P, and num_generations must still divide the rows.
        rule: the rule that keeps m of the n rollouts: max_variance (the paper, section 3.1), max_reward, random,
            percentile, or your own as a function or as package.module:function.
        advantages: normalise advantages over the m kept rollouts (after; the paper, section 3.2) or over all n
            (before).
        clock: the time that the training clock and the phases of a step count: wall (seconds), or cpu (seconds of
            processor time of this process, which other work on the machine hardly changes). cpu needs a CPU and one
            process.
        reward_errors: what happens to a rollout whose reward function raises or exceeds its timeout. raise ends the run
            with an error, zero gives the rollout a reward of 0, and drop leaves it unscored: it is selected only if too
            few others are scored, with advantage 0.
        tool_timeout: seconds that one call of a tool may take. After that the policy reads an error instead of a
            result. None sets no limit. A plain function is stopped on the main thread only, and not within
            compiled code.
        rollout_batch_size: the number of rollouts generated at once on each process. If None, all of them. Lower it if
            generation runs out of memory. With colocated vLLM it sets max_num_seqs; a vLLM server has a setting of its
            own.
        skip_zero_advantage_steps: skip the update in a step whose advantages are all zero, if nothing else has a
            gradient (a KL term, an entropy bonus). If False, momentum and weight decay still move the weights in such a
            step, as in TRL. If None, skip if n > m.
        prefix_tree: compute each distinct prefix of a prompt's rollouts once, in generation (without vLLM) and in the
            update, and skip rows that have no gradient. The rows of an optimizer step then share as few passes as have
            room (max_tokens_per_microbatch). If False, generate and update as TRL does.
        max_tokens_per_microbatch: the most distinct tokens that one pass of the update computes, on each process: a
            prefix that rows share counts once, and a longer row is alone in its pass. If None, the tokens of a
            micro-batch of TRL, its rows times its padded length, so a pass takes no more memory than TRL's. A larger
            number means fewer passes and more memory, a smaller one less memory. If auto, the first step measures what
            a GPU has room for; one process also repeats a step that ran out of memory, in smaller passes.
        exact_trl: turn off everything that changes rounding or random draws. With n = m the run then equals TRL's to
            the last bit.
        dynamic_sampling: replace groups whose rewards are all equal, up to `reward_tolerance`, by groups of new prompts
            (DAPO, arXiv 2503.14476). Groups that cannot be replaced have advantage 0.
        dynamic_sampling_rounds: the most times that new prompts are generated for a batch.
        mask_constant_groups: leave groups whose advantages are all 0 out of the loss, whose means are then over the
            tokens or rows of the other groups of a generation. If False, they count in its denominators, as in TRL.
            Not with loss_type bnpo, an entropy bonus or an auxiliary loss, which are means over a micro-batch.
        reward_tolerance: the difference between the highest and the lowest reward of a group up to which they count as
            equal, in units of reward. Such a group has advantage 0, and dynamic_sampling replaces it. If 0, they
            may differ by rounding alone.

    Raises:
        UserError: n < m, an unknown rule or choice, a value of a wrong type or out of bounds, a batch that cannot hold
            whole groups, settings that contradict each other or TRL's, or settings with which nothing is trained
            (num_iterations, max_steps or num_train_epochs of 0; reward_weights of 0).

    Example:
        >>> config = PODSConfig(
        ...     "out", num_generations=4, num_rollouts=16, per_device_train_batch_size=4, use_cpu=True, bf16=False
        ... )
        >>> config.num_rollouts, config.rule, config.loss_type, config.skip_zero_advantage_steps
        (16, 'max_variance', 'dapo', True)
    """

    # A recipe's keys are read from these lines, and their help from the docstring (`recipe.schema`).
    num_rollouts: int | None = None
    selection: str = "prompt"
    num_prompts: int | None = None
    rule: RuleOrName = "max_variance"
    advantages: str = "after"
    clock: str = "wall"
    reward_errors: str = "raise"
    tool_timeout: float | None = 120.0
    rollout_batch_size: int | None = None
    skip_zero_advantage_steps: bool | None = None
    prefix_tree: bool = True
    max_tokens_per_microbatch: int | str | None = None
    exact_trl: bool = False
    dynamic_sampling: bool = False
    dynamic_sampling_rounds: int = 3
    mask_constant_groups: bool = False
    reward_tolerance: float = 0.0

    def __post_init__(self) -> None:
        given = self._unwrapped_values()
        # Before TRL's own checks, which know nothing of n and name other keys.
        batch_plan(vars(self))
        check_bounds(vars(self), fields(self))
        check_values(self)
        check_contradictions(self)
        check_mappings(vars(self))
        super().__post_init__()  # reads mappings that are JSON
        self._check_generation()
        # After it, since it starts the processes and chooses the device.
        if self.clock == "cpu" and (self.world_size > 1 or self.device.type != "cpu"):
            raise UserError(
                f"clock = cpu counts the processor time of one process that trains on a CPU: got {self.world_size} "
                f"process(es) on {self.device.type}. Set clock: wall."
            )
        if self.exact_trl:
            self.prefix_tree = False
            self.skip_zero_advantage_steps = False
        if self.num_rollouts is None:
            self.num_rollouts = self.num_generations
        if self.skip_zero_advantage_steps is None:
            self.skip_zero_advantage_steps = not self.keeps_all
        if self.selection == "batch":
            as_batch_function(self.rule)  # type: ignore[arg-type]
        else:
            check_rule(self.rule)
        if self.output_dir is not None:  # a reward may change the working directory
            self.output_dir = str(Path(self.output_dir).absolute())
        self._replaced = {}
        for name, value in given.items():
            if getattr(self, name) is not value:
                self._replaced[name] = (value, getattr(self, name))

    def _unwrapped_values(self) -> dict[str, Any]:
        """Return the values of all fields. Those of numpy and torch become Python's: checkpoints hold them as JSON."""
        budget = self.max_tokens_per_microbatch
        if isinstance(budget, str) and budget.isdecimal():  # TRL's parser of arguments gives text
            self.max_tokens_per_microbatch = int(budget)
        values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if hasattr(value, "tolist") and not isinstance(value, type):
                value = value.tolist()
                setattr(self, field.name, value)
            values[field.name] = value
        return values

    def replaced(self) -> dict[str, Any]:
        """Return what the user gave for each argument that the constructor has replaced, such as None.

        One that the user has changed since is not in it.

        >>> PODSConfig("out", num_rollouts=16, use_cpu=True, bf16=False).replaced()["skip_zero_advantage_steps"]
        """
        return {name: given for name, (given, value) in self._replaced.items() if getattr(self, name) is value}

    @property
    def keeps_all(self) -> bool:
        """Whether every rollout is trained: plain GRPO."""
        return self.selection == "prompt" and self.num_rollouts == self.num_generations

    @property
    def sampler_rows(self) -> int:
        """How many rows of the data TRL's sampler gives for each prompt of a generation."""
        assert self.num_generations is not None
        if self.num_prompts is None:
            return self.num_generations
        return self.world_size // math.gcd(self.world_size, self.num_prompts)  # so that processes have equally many

    def _check_generation(self) -> None:
        """Raise UserError for arguments that `generate` does not have, or that its own check refuses."""
        arguments = self.generation_kwargs or {}
        known_arguments = GenerationConfig().to_dict()
        for name, value in arguments.items():
            if name not in known_arguments and not self.use_vllm:
                hint = suggest(str(name), known_arguments)
                raise UserError(f"generation_kwargs: {short(str(name))}: `generate` has no such argument.{hint}")
            if name in INTERVALS and value is not None:
                check_number(name, value, within="generation_kwargs: ")
        if arguments.get("num_return_sequences", 1) != 1:
            raise UserError(
                "generation_kwargs: num_return_sequences must be 1: num_rollouts sets how many are generated."
            )
        if not self.use_vllm:
            settings = {"do_sample": True, "cache_implementation": self.cache_implementation, **arguments}
            try:
                GenerationConfig(**settings).validate()
            except Exception as error:  # also a TypeError of Python's own
                key = "generation_kwargs" if arguments else "cache_implementation"
                raise UserError(f"{key} = {describe(getattr(self, key))}: {first_line(error)}") from error

    def __getstate__(self) -> dict[str, Any]:
        """Return what TRL pickles into a checkpoint: a rule that is a function, which may be a lambda, by its name."""
        return vars(self) | {"rule": rule_name(self.rule)}

    def to_dict(self) -> dict[str, Any]:
        """Return TRL's dictionary, with a rule function replaced by its import path, so that it is plain data."""
        return super().to_dict() | {"rule": rule_name(self.rule)}


def check_values(config: PODSConfig) -> None:
    """Refuse values of our fields of a wrong type or out of bounds, and values of TRL's with which nothing is trained.

    Raises:
        UserError: what was given, and what to set.

    >>> PODSConfig("out", exact_trl="false")
    Traceback (most recent call last):
    ...
    pods_rl.errors.UserError: exact_trl = 'false': expected True or False, and not a text.
    """
    switches = ("prefix_tree", "exact_trl", "dynamic_sampling", "mask_constant_groups", "skip_zero_advantage_steps")
    for key in switches:
        value = getattr(config, key)
        is_optional = key == "skip_zero_advantage_steps"
        if not isinstance(value, bool) and not (is_optional and value is None):
            expected = "True, False or None" if is_optional else "True or False"
            hint = ", and not a text" if isinstance(value, str) else ""
            raise UserError(f"{key} = {value!r}: expected {expected}{hint}.")
    rounds = config.dynamic_sampling_rounds
    whole_number("dynamic_sampling_rounds", rounds, why="set dynamic_sampling: false to draw no new prompts")
    budget = config.max_tokens_per_microbatch
    if budget not in (None, "auto"):
        whole_number("max_tokens_per_microbatch", budget, why="unset it for those of TRL's, or set auto")
    # With these numbers of steps and epochs, TRL's `train` would return at once, without an error.
    steps: Any = config.max_steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps == 0:
        raise UserError(
            f"max_steps = {steps!r}: expected a whole number of at least 1, or -1 for no limit (num_train_epochs then "
            "decides)."
        )
    epochs: Any = config.num_train_epochs
    if steps < 0 and (not _is_number(epochs) or not epochs > 0):
        raise UserError(f"num_train_epochs = {epochs!r}: expected a number above 0, or set max_steps.")
    weights: Any = config.reward_weights
    if isinstance(weights, (list, tuple)) and weights:
        usable = all(_is_number(weight) and math.isfinite(weight) for weight in weights)
        if not usable or not any(weights):
            raise UserError(
                f"reward_weights = {weights!r}: expected finite numbers, at least one of them not 0. With these no "
                "rollout is better than another, and nothing is trained."
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_contradictions(config: PODSConfig) -> None:
    """Refuse settings that contradict each other or TRL's.

    Raises:
        UserError: what was given, the reason, and what to set.

    >>> PODSConfig("out", num_prompts=4)
    Traceback (most recent call last):
    ...
    pods_rl.errors.UserError: num_prompts = 4 needs selection = batch: ...
    """
    aggregation = config.multi_objective_aggregation
    over_batch = config.selection == "batch"
    needs_a_sum = {
        "advantages = before": config.advantages == "before",
        "dynamic_sampling": config.dynamic_sampling,
        "reward_tolerance": config.reward_tolerance > 0,
        "selection = batch": over_batch,
    }
    for name, is_set in needs_a_sum.items():
        if not is_set or aggregation == "sum_then_normalize":
            continue
        raise UserError(
            f"{name} works on the summed reward: got multi_objective_aggregation = {aggregation}. Set "
            "multi_objective_aggregation: sum_then_normalize."
        )
    if config.mask_constant_groups and config.loss_type == "bnpo":
        raise UserError("loss_type = bnpo divides by a micro-batch: set dapo, or mask_constant_groups: false.")
    if over_batch and config.exact_trl and config.num_rollouts in (None, config.num_generations):
        raise UserError(
            "exact_trl with num_rollouts = num_generations trains TRL's rows, and selection = batch chooses others. "
            "Set selection: prompt, or exact_trl: false."
        )
    if config.num_prompts is not None and not over_batch:
        raise UserError(
            f"num_prompts = {config.num_prompts!r} needs selection = batch: with selection = prompt the rows "
            "divided by num_generations are the prompts. Set selection: batch, or num_prompts: null."
        )
    if over_batch and config.mask_constant_groups:
        raise UserError(
            "mask_constant_groups masks groups of num_generations rows, and selection = batch gives groups with equal "
            "rewards no row. Set mask_constant_groups: false."
        )


for _name, _help in documented_arguments(PODSConfig.__doc__ or "").items():
    PODSConfig.__dataclass_fields__[_name].metadata = MappingProxyType({"help": _help})  # for TRL's command line


def complete_config(args: Any) -> None:
    """Give a GRPOConfig the fields of PODSConfig, with their defaults, for a layer that reads some of them."""
    if isinstance(args, PODSConfig):
        return
    for own in fields(PODSConfig):
        if not hasattr(args, own.name):
            setattr(args, own.name, own.default)
    if args.num_rollouts is None:
        args.num_rollouts = args.num_generations


def group_sizes(args: PODSConfig) -> tuple[int, int]:
    """Return n and m, which PODSConfig sets when it is built."""
    assert args.num_rollouts is not None
    assert args.num_generations is not None
    return args.num_rollouts, args.num_generations


def check_prompts(args: PODSConfig, prompts: int) -> None:
    """Raise UserError for fewer training prompts than one generation needs: TRL would end without a step."""
    assert args.generation_batch_size is not None
    needed = args.num_prompts or args.generation_batch_size // group_sizes(args)[1]
    if prompts < needed:
        raise UserError(
            f"The data hold {counted(prompts, 'training prompt')}, and one generation needs {needed} different ones: "
            "nothing would be trained. Give more prompts, or lower per_device_train_batch_size or "
            "gradient_accumulation_steps."
        )
