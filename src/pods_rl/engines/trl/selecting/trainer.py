"""Selecting: TRL's GRPOTrainer that generates n rollouts a prompt and trains on some of them. This is PODS.

No method of TRL is copied. Its method that generates and scores runs once, on n rows a prompt; `_generate` shortens its
lists to the kept rows before TRL computes a log-probability. `compat.py` lists what is used of TRL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from accelerate.utils import broadcast
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from ....errors import UserError
from ....selection import is_constant, select, select_batch
from ...seeds import StepCounter, seeded_generator
from .. import compat
from ..batching import BatchPlan, Shares, batch_plan
from ..compat import Batch, Completions, Generated, Layer
from ..config import PAPER, PODSConfig, group_sizes
from .advantages import log_generation, set_advantages
from .dynamic_sampling import DynamicSampling
from .generation import Generation, Round, copies
from .record import Rollouts, replace_last


class _RoundIsScored(BaseException):
    """Ends TRL's method for further prompts of a generation, once they are generated and scored.

    A BaseException, so that no `except Exception` on its way handles it.
    """


class Selecting(Layer):
    """GRPO with down-sampling (paper Algorithm 1): generate n, keep m by a rule, train on those.

    A layer of PODSTrainer that is complete by itself. Takes the arguments of TRL's `GRPOTrainer`, with `args` a
    `PODSConfig`. Evaluation never down-samples. After each generation `trainer.rollouts` holds all n rollouts, which
    were kept, and their rewards.

    Raises:
        UserError: versions of TRL or transformers whose methods take other arguments.
    """

    _tag_names = ["trl", "grpo", "pods"]  # noqa: RUF012  (TRL's own form)
    _name = "PODS"
    _paper = PAPER
    _selects = True
    _generation: Generation | None = None  # the running one
    _plan: BatchPlan | None = None  # of `measure`: the next generations have new prompts, and other group sizes
    rollouts: Rollouts | None = None  # of the latest generation

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: PODSConfig | None = None, *others: Any, **named: Any
    ) -> None:
        compat.check_overrides(Selecting)
        compat.check_row_lists()
        super().__init__(model, reward_funcs, args, *others, **named)  # type: ignore[call-arg]
        self._selections = StepCounter()
        self._dynamic = DynamicSampling(self)

    # -- Algorithm 1 of the paper, inside TRL's `_generate_and_score_completions` --------------------------------------

    @override
    def _generate_and_score_completions(self, inputs: list[Batch]) -> Batch:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        if self._generation is not None:  # new prompts: their rollouts join those of the running generation
            round_ = self._begin_round(self._generation, inputs)
            return super()._generate_and_score_completions(round_.rollouts)  # raises _RoundIsScored
        # What is added to these lists from here on is of this generation.
        before = {name: len(values) for name, values in self._metrics["train"].items()}
        plan = self._plan
        if plan is not None:  # of `measure`
            self.num_generations = plan.num_generations
            self.args.num_generations = plan.num_generations
            self.args.num_rollouts = plan.num_rollouts
            self.args.num_prompts = plan.num_prompts
            self.args.selection = "prompt" if plan.num_prompts is None else "batch"
            inputs = self._dynamic.new_rows(plan.prompts_per_generation, inputs[0])
        self._enter_phase("rollout")
        # R, the rows of a generation that are trained, over all processes.
        processes = self.accelerator.num_processes
        rows = self.args.generation_batch_size if self.args.num_prompts else len(inputs) * processes
        assert rows is not None
        generation = Generation(rows, self._calculate_rewards)
        round_ = self._begin_round(generation, inputs)
        # TRL scores after `_generate`, which has scored and selected by then.
        scores_of_kept_rows = partial(generation.scores_of_kept_rows, self)
        with compat.replacing(self, _generation=generation, _calculate_rewards=scores_of_kept_rows):
            batch = super()._generate_and_score_completions(round_.rollouts)
        record = generation.record
        generation.empty_rows(batch, self)
        set_advantages(batch, generation, self)
        of_all_processes = self.accelerator.gather(batch["advantages"]).cpu()
        record.advantages = of_all_processes[: len(record.kept)]  # [B] -> [R]
        # TRL's table of completions has its own advantages, and NaN as the scores of rows that are masked out.
        empty_rows = rows - len(record.kept)
        replace_last(self._logs["advantages"], record.advantages.tolist() + [0.0] * empty_rows)
        if record.masked is not None:
            kept_scores = generation.scores[record.kept]
            for i, name in enumerate(record.reward_names):
                replace_last(self._logs["rewards"][name], kept_scores[:, i].tolist() + [math.nan] * empty_rows)
        log_generation(self, generation, before)
        self.rollouts = record
        return batch

    def _begin_round(self, generation: Generation, inputs: list[Batch]) -> Round:
        n, _ = group_sizes(self.args)
        processes = self.accelerator.num_processes
        prompts = len(inputs) * processes // self.args.sampler_rows
        shares = Shares(prompts, n, processes)
        step = self.state.global_step
        # Of the rule's draws. It depends on these alone, so a resumed run makes the same ones.
        key = (self.args.seed, step, self._selections.number(step))
        rounds = generation.rounds
        first_group = sum(round_.shares.prompts for round_ in rounds)
        offset = sum(round_.shares.rollouts_each for round_ in rounds)
        rounds.append(Round(shares, self.accelerator.process_index, inputs, key, first_group, offset))
        return rounds[-1]

    @override
    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        generation = self._generation
        if generation is None or not self.model.training:
            return super()._generate(prompts)
        round_ = generation.rounds[-1]
        n = round_.shares.num_rollouts
        output = Generated.of(super()._generate(prompts))  # n rollouts of each prompt
        self._enter_phase("reward")
        # TRL passes the fields of a rollout function to reward functions as columns of the rows.
        for name, values in output.extra_fields.items():
            for i, row in enumerate(round_.rollouts):
                row[name] = values[i] if isinstance(values, list) else values
        # Copies: a reward function may change what it reads, and TRL trains on the originals.
        columns = (
            round_.rollouts,
            copies(prompts),
            copies(output.completions),
            [list(ids) for ids in output.completion_ids],
        )
        # A subclass may compare the rollouts of a prompt.
        with compat.replacing(self, num_generations=n):
            scores = generation.calculate_rewards(*columns)
        self._enter_phase("selection")
        round_.take(self, prompts, output, scores)
        if len(generation.rounds) > 1:
            raise _RoundIsScored
        if self.args.selection == "batch":
            self._select_batch(generation)
        else:
            self._select_of_prompts(generation)
        results, moved = generation.shorten(self, prompts)
        if self.accelerator.num_processes > 1:
            self._metrics["train"]["pods/rows_moved"].append(float(moved))
        self._enter_phase("update")
        return results

    @override
    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int,
        *others: Any, **named: Any,
    ) -> Completions:  # fmt: skip
        if self._generation is not None and self.model.training and num_generations == self.num_generations:
            num_generations = group_sizes(self.args)[0]  # vLLM returns this many for each prompt
        return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, *others, **named)

    def _add_rounds(self, generation: Generation, missing: Callable[[], int]) -> None:
        """Generate rollouts of new prompts, in each round of dynamic sampling for as many prompts as `missing` returns.

        Their rows go through `self._generate_and_score_completions`: a subclass may change rows before it calls ours.
        """
        dynamic = self._dynamic
        drawn_before = dynamic.drawn
        for _ in range(dynamic.rounds):
            count = missing()
            if not count:
                break
            inputs = dynamic.new_rows(count, generation.rounds[0].inputs[0])
            self._enter_phase("rollout")
            with suppress(_RoundIsScored):
                self._generate_and_score_completions(inputs)  # ends with _RoundIsScored
                raise UserError(
                    f"{type(self).__name__}._generate_and_score_completions did not call super() for the rows that "
                    "dynamic_sampling drew: call it, or set dynamic_sampling: false."
                )
        if dynamic.rounds:
            drawn = float(dynamic.drawn - drawn_before)
            self._metrics["train"]["pods/dynamic_sampling/prompts_drawn"].append(drawn)

    def _select_of_prompts(self, generation: Generation) -> None:
        """Keep m rollouts of each prompt; dynamic sampling replaces prompts whose rewards are equal."""
        rounds = generation.rounds
        prompts = rounds[0].shares.prompts
        dynamic = self._dynamic

        def missing() -> int:
            live = sum(int((~dynamic.is_dead(round_)).sum()) for round_ in rounds)
            return max(0, prompts - live)

        self._add_rounds(generation, missing)
        n, m = group_sizes(self.args)
        kept_of_rounds: list[Tensor] = []
        for round_ in rounds:
            if n == m:
                kept_of_rounds.append(torch.arange(n).repeat(round_.shares.prompts, 1))  # [N] -> [P, N]
                continue
            rewards_PN = round_.record.scored_rewards()
            selection = select(rewards_PN, m, self.args.rule, generator=seeded_generator(*round_.key))
            kept_of_rounds.append(selection.indices.sort(dim=1).values)  # [P, M]
        kept_PM = broadcast(torch.cat(kept_of_rounds).to(self.accelerator.device)).cpu()  # the first process decides
        trained_Q = torch.arange(prompts)
        if dynamic.rounds:
            is_dead_P = torch.cat([dynamic.is_dead(round_) for round_ in rounds])
            dead_slots = is_dead_P[:prompts].nonzero().flatten()
            live_groups = prompts + (~is_dead_P[prompts:]).nonzero().flatten()
            count = min(len(dead_slots), len(live_groups))
            trained_Q[dead_slots[:count]] = live_groups[:count]
            live_share = 1 - (len(dead_slots) - count) / prompts
            self._metrics["train"]["pods/dynamic_sampling/live_share"].append(live_share)
        kept = (trained_Q[:, None] * n + kept_PM[trained_Q]).flatten()  # [Q, M] -> [R]
        generation.keep(kept, is_ragged=False)

    def _select_batch(self, generation: Generation) -> None:
        """Keep R rollouts of all prompts; dynamic sampling adds prompts while fewer than R are live."""
        rounds = generation.rounds
        rows = generation.rows
        tolerance = self.args.reward_tolerance

        def live_rewards() -> Tensor:
            rewards_PN = torch.cat([round_.record.scored_rewards() for round_ in rounds])
            return rewards_PN.masked_fill(is_constant(rewards_PN, tolerance)[:, None], torch.nan)

        def missing() -> int:
            live_rollouts = int((~live_rewards().isnan()).sum())
            return rounds[0].shares.prompts if live_rollouts < rows else 0

        self._add_rounds(generation, missing)
        rewards_PN = live_rewards()
        generator = seeded_generator(*rounds[0].key)
        rule: Any = self.args.rule
        selection = select_batch(
            rewards_PN, min(rows, rewards_PN.numel()), rule, generator=generator, tolerance=tolerance
        )
        # The first process decides for all: its numbers, filled up to R.
        numbers = torch.full((rows,), -1)
        numbers[: len(selection.indices)] = selection.indices
        numbers = broadcast(numbers.to(self.accelerator.device)).cpu()
        is_kept = numbers >= 0
        if self._dynamic.rounds:
            self._metrics["train"]["pods/dynamic_sampling/live_share"].append(is_kept.double().mean().item())
        generation.keep(numbers[is_kept], is_ragged=True)

    # -- prompts of a generation that do not follow from its rows ------------------------------------------------------

    @override
    def get_train_dataloader(self) -> DataLoader[Any]:
        prompts = self.args.num_prompts
        if prompts is None:
            return super().get_train_dataloader()
        # TRL's sampler repeats each prompt `num_generations` times, and takes the prompts of `generation_batch_size`.
        each = self.args.sampler_rows
        group = compat.replacing(self, num_generations=each)
        with group, compat.replacing(self.args, generation_batch_size=prompts * each):
            return super().get_train_dataloader()

    @override
    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:  # fmt: skip
        prompts = self.args.num_prompts
        if is_training and prompts is not None:
            batch_size = prompts * self.args.sampler_rows // self.accelerator.num_processes
        return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)

    # -- resume --------------------------------------------------------------------------------------------------------

    @override
    def _saved_values(self) -> dict[str, Any]:
        return {**super()._saved_values(), "prompts_drawn": self._dynamic.drawn}

    @override
    def _restore_values(self, values: Mapping[str, Any], rollouts: Mapping[str, Any] | None) -> None:
        super()._restore_values(values, rollouts)
        self._dynamic.drawn = values["prompts_drawn"]
        if rollouts is not None:
            self.rollouts = Rollouts(**rollouts)

    # -- other group sizes, for `pods plan` ----------------------------------------------------------------------------

    def measure(self, num_rollouts: int, num_generations: int, num_prompts: int | None = None) -> None:
        """Train with other group sizes from the next generation on, until the next call, to measure what they cost.

        The number of rows stays. Each generation has new prompts, drawn as dynamic sampling draws them;
        `trainer.rollouts` then holds their rollouts.

        Args:
            num_rollouts: n, the rollouts generated for each prompt.
            num_generations: m, the rows trained of each prompt.
            num_prompts: of a generation, whose rows are selected over the batch. If None, rows / m prompts, and m rows
                of each.

        Raises:
            UserError: sizes that the batch or the processes cannot hold.
        """
        settings = {
            **vars(self.args),
            "num_rollouts": num_rollouts,
            "num_generations": num_generations,
            "generation_batch_size": None,  # TRL derives it from the steps
            "num_prompts": num_prompts,
        }
        self._plan = batch_plan(settings, self.accelerator.num_processes)
