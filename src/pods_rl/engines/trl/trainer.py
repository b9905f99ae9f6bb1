"""PODSTrainer: TRL's GRPOTrainer that generates n rollouts a prompt and trains on m of them.

An overlay: nothing of TRL's methods is copied. What is overridden here, in the order in which a generation meets it:

- `_generate_and_score_completions`: expand each prompt to n, generate, score and select; TRL then gets the m kept rows,
  and their scores, in place of what it would generate and score. Where groups are spread over processes, each
  generates its share and the kept rows move (`exchange.py`). Afterwards log over all n.
- `_generate_single_turn`: ask the generator for n, in parts of `rollout_batch_size` rows.
- `rewarding.py` has what is overridden of the rewards, `update.py` of the update, `guard.py` against bad losses,
  `saving.py` of checkpoints, `resuming.py` of resuming, `output.py` of printing, `sharding.py` for sharded
  weights, `memory_guard.py` of what is said where memory runs out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from ...distributed import busy
from ...planning.batching import Shares
from ...selection import Selection, advantages, select
from ...selection.registry import rule_name
from .compat import check_signatures, standing_in
from .config import PODSConfig
from .exchange import bring_rows, check_agreement, own_rows, rows_moved, uneven_gathers
from .generators import check_completions, lossy_cast, room_for_rollouts
from .guard import GuardMixin
from .memory_guard import MemoryGuardMixin
from .metrics import is_constant, log_all_rollouts, log_selection
from .output import OutputMixin
from .phases import PhaseClock
from .refusals import refuse_images, refuse_unsupported
from .resume import ResumeMixin
from .rewarding import RewardsMixin
from .rollouts import Rollouts, apart, total_reward
from .saving import SavingMixin
from .sharding import ShardingMixin
from .step import StepCallback
from .update import UpdateMixin

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
    from peft import PeftConfig, PeftModel
    from transformers import (
        BitsAndBytesConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
        TrainerCallback,
    )

    RewardFunc: TypeAlias = str | PreTrainedModel | Callable[..., list[float | None]]


@dataclass
class _Round:
    """What one training generation hands from override to override."""

    inputs: list[dict[str, Any]]
    shares: Shares
    kept_rewards: Tensor | None = None  # [P * M, F] over all processes
    all_rewards: Tensor | None = None  # [P * N, F] over all processes
    advantages: Tensor | None = None  # [P, M] over all processes, where they are not TRL's own arithmetic
    rollouts: Rollouts | None = None


class PODSTrainer(
    MemoryGuardMixin,
    OutputMixin,
    GuardMixin,
    RewardsMixin,
    SavingMixin,
    ResumeMixin,
    UpdateMixin,
    ShardingMixin,
    GRPOTrainer,
):
    """GRPO with down-sampling (paper Algorithm 1): generate n, keep m by a rule, train on those.

    Takes what TRL's `GRPOTrainer` takes, with a `PODSConfig` as `args`. Only selected rows reach a log-probability,
    reference or update pass; each rollout is scored once; evaluation never down-samples. With `num_rollouts` equal to
    `num_generations` it is TRL's trainer up to rounding, and with `trim_padding` and `sort_by_length` off to the last
    bit (`docs/engines.md` has the size of the rounding, and what is left). After each generation `trainer.rollouts`
    holds what was generated, kept and why.

    Groups may be spread over processes: every process then generates its share of a prompt's n rollouts, and kept rows
    move to the process that trains them.

    Raises:
        UserError: tools, environments, a rollout function or images (not supported yet); versions of TRL or
            transformers in which an overridden method takes other arguments; in training, a rule that keeps other
            rollouts on one process than on another, and memory that runs out.
        TypeError: `args` is a GRPOConfig and not a PODSConfig.
    """

    _tag_names = ["trl", "grpo", "pods"]  # noqa: RUF012  (TRL's own form)
    _name = "PODS"
    _paper = {  # noqa: RUF012
        "title": "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM Reinforcement Learning",
        "id": "2504.13818",
        "citation": "@article{xu2025rollouts, title={Not All Rollouts are Useful: Down-Sampling Rollouts in LLM "
        "Reinforcement Learning}, author={Xu, Yixuan Even and Savani, Yash and Fang, Fei and Kolter, J. Zico}, "
        "journal={arXiv preprint arXiv:2504.13818}, year={2025}}",
    }

    args: PODSConfig

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: PODSConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | DatasetDict
        | IterableDatasetDict
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., dict[str, Any]] | None = None,
        environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_signatures()
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            given["args"] = args = PODSConfig(f"{name.split('/')[-1]}-PODS")
        refuse_unsupported(given)
        self._round: _Round | None = None
        self.rollouts: Rollouts | None = None
        self._generations_done = (-1, 0)  # (global step, generations in it), seeds the random rule
        self.clock = PhaseClock(device=None)
        self.step_tokens = {"generated": 0, "trained": 0}
        self.step_has_signal = False
        with room_for_rollouts(args):
            super().__init__(**given)
        refuse_unsupported({"args": args, "processing_class": self.processing_class})  # TRL may have loaded it
        if doubt := lossy_cast(self):
            warnings.warn(doubt, UserWarning, stacklevel=2)
        self._watch_rewards()
        self._watch_steps()
        self.clock = PhaseClock(self.accelerator.device)
        self.add_callback(StepCallback(self))

    # -- generation and selection -------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        refuse_images(inputs)
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        processes = self.accelerator.num_processes
        n, m = self._group_sizes()
        self._round = _Round(inputs, Shares(len(inputs) * processes // m, n, m, processes))
        try:
            trained = self._generate_and_select(self._round)
            kept_rewards = self._round.kept_rewards
            with standing_in(self, _generate=lambda *_: trained, _calculate_rewards=lambda *_: kept_rewards):
                output = super()._generate_and_score_completions(inputs)
            self._finish_round(self._round, output)
        finally:
            self._round = None
        return output

    def _generate_and_select(self, current: _Round) -> tuple[Any, ...]:
        """Generate n rollouts a prompt, score and select; what TRL's `_generate` would return, of the kept rows."""
        shares = current.shares
        here, rows = (share(self.accelerator.process_index) for share in (shares.rollouts, shares.rows))
        # The first of our rows that belongs to a rollout's prompt stands for it.
        of_row = [max(r // shares.num_rollouts * shares.num_generations, rows.start) - rows.start for r in here]
        inputs = [current.inputs[i] for i in of_row]
        prompts = [row["prompt"] for row in inputs]
        with uneven_gathers(self.accelerator, shares.counts):
            self.clock.enter("rollout")
            with standing_in(self, num_generations=shares.num_rollouts):
                generated = self._generate(prompts)
            completion_ids, completions = generated[1], generated[3]
            self.step_tokens["generated"] += sum(len(ids) for ids in completion_ids)
            self.clock.enter("reward")
            # Each rollout has objects of its own, as TRL's rows have: a reward may change what it is given.
            ids = [list(ids) for ids in completion_ids]
            scores = self._calculate_rewards(apart(inputs), apart(prompts), apart(completions), ids)
        self.clock.enter("selection")
        rewards, kept = self._select(scores)
        current.rollouts = Rollouts(
            step=self.state.global_step + 1,
            inputs=inputs,
            prompts=prompts,
            completions=completions,
            completion_tokens=[len(ids) for ids in completion_ids],
            reward_names=list(self.reward_func_names),
            rewards_per_func=scores[here.start : here.stop],
            first=here.start,
            rewards=rewards,
            kept=kept,
        )
        trained = self._trained_rows(generated, kept)
        self.clock.enter("update")
        return trained

    def _trained_rows(self, generated: tuple[Any, ...], kept_PM: Tensor) -> tuple[Any, ...]:
        """What TRL's `_generate` returned for our rollouts, for the rows that we train instead."""
        assert self._round is not None
        prompt_ids, completion_ids, tool_mask, completions, logprobs, *rest = generated
        shares, process = self._round.shares, self.accelerator.process_index
        here, rows = shares.rollouts(process), shares.rows(process)
        kept = (torch.arange(shares.prompts).unsqueeze(1) * shares.num_rollouts + kept_PM).flatten().tolist()
        # TRL's completions table holds the trained rows only, so columns logged by reward functions must match them.
        columns = {name: values for name, values in self._pending_extra_logs.items() if len(values) == len(here)}
        own = own_rows(kept, here, completion_ids, completions, logprobs, columns)
        mine = bring_rows(shares, process, kept, own, self.accelerator.device)
        for name in {*columns, *(name for row in mine for name in row.extra)}:
            self._pending_extra_logs[name] = [row.extra.get(name) for row in mine]
        if shares.processes > 1:
            self._metrics["train"]["pods/rows_moved"].append(float(rows_moved(shares, kept)))
        # Every prompt of our rows has a rollout here, and its tokens with it.
        of_rollout = [max(row // shares.num_generations * shares.num_rollouts, here.start) - here.start for row in rows]
        return (
            [prompt_ids[i] for i in of_rollout],
            [row.completion_ids for row in mine],
            tool_mask,
            [row.completion for row in mine],
            logprobs and [row.logprobs for row in mine],
            *rest,
        )

    def _generate_single_turn(
        self,
        prompt_ids: Any,
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        sample = super()._generate_single_turn

        def generate(chunk: Any) -> Any:
            completion_ids, logprobs = sample(chunk, images, multimodal_fields, num_generations, *args, **kwargs)
            check_completions(len(chunk), completion_ids)
            return completion_ids, logprobs

        if self._round is None:
            return generate(prompt_ids)
        most = max(self._round.shares.counts)
        rows = self.args.rollout_batch_size or most
        completion_ids: list[Any] = []
        with busy("generation"):
            if self.use_vllm or rows >= most:
                return generate(prompt_ids)
            for start in range(0, most, rows):
                # As many calls on every process, for sharded weights are gathered in each: one without rows repeats.
                completion_ids.extend(generate(prompt_ids[start : start + rows] or prompt_ids[-1:])[0])
        return completion_ids[: len(prompt_ids)], None  # these generators have no sampling log-probabilities

    def _select(self, rewards_per_func: Tensor) -> tuple[Tensor, Tensor]:
        """The reward of every rollout `[P, N]` and the kept ones' indices `[P, M]`, over all processes, on the CPU."""
        assert self._round is not None
        n, m = self._group_sizes()
        # On the CPU: a few hundred numbers, and their indices are needed there anyway.
        rewards = total_reward(rewards_per_func, self.reward_weights, n, self.multi_objective_aggregation).cpu()
        if n == m:
            kept = torch.arange(n).repeat(len(rewards), 1)
        else:
            with busy(f"rule {rule_name(self.args.rule)}"):
                chosen = select(rewards, m, self.args.rule, generator=self._selection_generator())
            kept = chosen.indices.sort(dim=1).values
            check_agreement(kept, rule_name(self.args.rule), self.accelerator)
        flat = (torch.arange(len(kept)).unsqueeze(1) * n + kept).flatten()
        self._round.all_rewards = rewards_per_func
        self._round.kept_rewards = rewards_per_func[flat.to(rewards_per_func.device)]
        how: dict[str, Any] = {"when": self.args.advantages, "baseline": self.args.advantage_baseline}
        if (how["when"] == "before" and n != m) or how["baseline"] != "mean":
            self._round.advantages = advantages(rewards, Selection(kept), scale=self.scale_rewards, **how).float()
        log_selection(self._metrics["train"], rewards, kept)
        return rewards, kept

    def _finish_round(self, current: _Round, output: dict[str, Any]) -> None:
        """Put our advantages in place, correct the statistics to all n, publish the record."""
        n, m = self._group_sizes()
        assert current.rollouts is not None
        rows = current.shares.rows(self.accelerator.process_index)
        if current.advantages is not None:
            everyone = current.advantages.flatten()
            logged = self._logs["advantages"]
            for _ in range(min(len(logged), len(everyone))):
                logged.pop()
            logged.extend(everyone.tolist())
            output["advantages"] = everyone[rows.start : rows.stop].to(output["advantages"].device)
        elif self.args.skip_zero_advantage_steps and self.multi_objective_aggregation == "sum_then_normalize":
            # The mean of equal float32 rewards can differ from them: TRL's advantages are then noise, not zero.
            kept = current.rollouts.rewards.gather(1, current.rollouts.kept)
            constant = is_constant(kept).repeat_interleave(m)[rows.start : rows.stop].to(output["advantages"].device)
            output["advantages"] = output["advantages"].masked_fill(constant, 0.0)
        if n != m:
            assert current.all_rewards is not None
            log_all_rollouts(
                self._metrics["train"],
                current.all_rewards,
                total_reward(current.all_rewards, self.reward_weights, n, "sum_then_normalize"),
                self.reward_func_names,
            )
        current.rollouts.advantages = self.accelerator.gather(output["advantages"]).view(-1, m).cpu()
        self.rollouts = current.rollouts

    def _selection_generator(self) -> torch.Generator:
        # From (seed, step, generation in step): the same on every process and after a resume.
        step, count = self._generations_done
        count = count + 1 if step == self.state.global_step else 0
        self._generations_done = (self.state.global_step, count)
        return torch.Generator().manual_seed(hash((self.args.seed, self.state.global_step, count)) % 2**63)

    def _group_sizes(self) -> tuple[int, int]:
        assert self.args.num_rollouts is not None
        return self.args.num_rollouts, self.num_generations
