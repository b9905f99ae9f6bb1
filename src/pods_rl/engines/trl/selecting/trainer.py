"""Selecting: TRL's GRPOTrainer that generates n rollouts a prompt and trains on m of them. This is PODS.

No method of TRL is copied. Its method that generates and scores runs once, on n rows a prompt; `_generate` shortens its
lists to the m kept rows of each before TRL computes a log-probability. `compat.py` lists what is used of TRL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import broadcast
from torch import Tensor
from typing_extensions import override

from ....errors import UserError
from ....selection import select
from ...seeds import StepCounter, seeded_generator
from .. import compat
from ..batching import BatchPlan, Shares, batch_plan
from ..compat import Batch, Completions, Generated, Layer
from ..config import PAPER, PODSConfig, group_sizes
from .advantages import gather_advantages, log_generation, set_advantages
from .dynamic_sampling import DynamicSampling
from .generation import Built, Generation, Selected, copies, move_rows, named, output_of, record_of
from .modes import Evaluating, Generating, Measuring, Mode, Redrawing, Resting
from .record import Rollouts, show_advantages, show_scores


class Selecting(Layer):
    """GRPO with down-sampling (paper Algorithm 1): generate n, keep m by a rule, train on those.

    A layer of PODSTrainer that is complete by itself. Takes the arguments of TRL's `GRPOTrainer`, with `args` a
    `PODSConfig`. Evaluation never down-samples. After each generation `trainer.rollouts` holds all n rollouts, which
    were kept, and their rewards.

    Raises:
        UserError: versions of TRL or transformers whose methods take other arguments.
        TypeError: `args` is not a PODSConfig.
    """

    _tag_names = ["trl", "grpo", "pods"]  # noqa: RUF012  (TRL's own form)
    _name = "PODS"
    _paper = PAPER
    _selects = True
    _mode: Mode = Resting()
    rollouts: Rollouts | None = None  # of the latest generation

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: PODSConfig | None = None, *others: Any, **named: Any
    ) -> None:
        compat.check_overrides(Selecting)
        compat.check_row_lists()
        compat.check_config(args)
        super().__init__(model, reward_funcs, args, *others, **named)  # type: ignore[call-arg]
        self._selections = StepCounter()
        self._dynamic = DynamicSampling(self)

    # -- Algorithm 1 of the paper, inside TRL's `_generate_and_score_completions` --------------------------------------

    @override
    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        mode = self._mode
        if not isinstance(mode, Generating):
            return super()._generate(prompts)
        generation = mode.generation
        results = super()._generate(prompts)  # n rollouts of each prompt
        output = Generated.of(results)
        scores = self._score(generation, prompts, output)
        record = record_of(generation, self, prompts, output, scores)
        record.kept = self._select(generation, record.scored_rewards())
        generation.selected = Selected.of(record, scores)
        return self._shorten(generation, record, prompts, output)

    @override
    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int,
        has_tool_images: bool = False,
    ) -> Completions:  # fmt: skip
        if isinstance(self._mode, Generating) and num_generations == self.num_generations:
            num_generations = group_sizes(self.args)[0]  # vLLM returns this many for each prompt
        options = {"has_tool_images": True} if has_tool_images else {}
        return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, **options)

    def _score(self, generation: Generation, prompts: list[Any], output: Generated) -> Tensor:
        """Return the scores of all n rollouts of all processes, `[P * n, F]`."""
        self._enter_phase("reward")
        generation.add_fields(output)
        # Copies: a reward function may change what it reads, and TRL trains on the originals.
        columns = (
            generation.rollouts,
            copies(prompts),
            copies(output.completions),
            [list(ids) for ids in output.completion_ids],
        )
        with compat.group_size_of(self, generation.shares.num_rollouts):
            return generation.calculate_rewards(*columns)

    def _select(self, generation: Generation, rewards_PN: Tensor) -> Tensor:
        """Return which m rollouts of each prompt the rule keeps, int64 `[P, M]`; the first process decides for all."""
        self._enter_phase("selection")
        n, m = group_sizes(self.args)
        if n > m:
            selection = select(rewards_PN, m, self.args.rule, generator=seeded_generator(*generation.key))
            kept_PM = selection.indices.sort(dim=1).values
        else:
            kept_PM = torch.arange(n).repeat(len(rewards_PN), 1)  # [N] -> [P, N]
        return broadcast(kept_PM.to(self.accelerator.device)).cpu()

    def _shorten(self, generation: Generation, record: Rollouts, prompts: list[Any], output: Generated) -> Generated:
        """Shorten TRL's lists of rows to those that this process trains, in place; return their results."""
        kept = record.kept_numbers().tolist()
        moves = generation.moves(kept)
        columns = generation.columns(prompts, output, self._pending_extra_logs)
        lists = [generation.rollouts, *compat.row_lists(self, len(prompts))]
        columns = move_rows(columns, moves, self.accelerator)
        prompts[:] = columns["prompt"]
        self._pending_extra_logs.update(named(columns, "logged"))
        # A row received from another process replaces a rollout of the same prompt.
        indices = [generation.index_here(kept[row]) for row in generation.rows]
        for values in lists:
            values[:] = [values[index] for index in indices]
        if generation.shares.processes > 1:
            self._metrics["train"]["pods/rows_moved"].append(float(moves.changing()))
        self._enter_phase("update")
        return output_of(columns)

    @override
    def _generate_and_score_completions(self, inputs: list[Batch]) -> Batch:
        if not self.model.training:
            with self._in(Evaluating()):
                return super()._generate_and_score_completions(inputs)
        mode = self._mode
        if isinstance(mode, Redrawing):
            return self._redraw(inputs, mode)
        if isinstance(mode, Measuring):
            inputs = self._measured_rows(mode.plan, inputs[0])
        before = {name: len(values) for name, values in self._metrics["train"].items()}
        built = self._one_generation(inputs)
        self._dynamic.fill(built, self._generation_of_new_prompts)
        return self._finish(built, before)

    @contextmanager
    def _in(self, mode: Mode) -> Iterator[None]:
        before = self._mode
        self._mode = mode
        try:
            yield
        finally:
            self._mode = before

    def _generation_of_new_prompts(self, rows: list[Batch]) -> Built:
        """Generate for rows that dynamic sampling drew, which pass through a subclass's method as all rows do.

        Only what that method does before it calls ours has an effect: it does the rest on the joined batch.
        """
        if not compat.is_overridden(self, ["_generate_and_score_completions"]):
            return self._one_generation(rows)
        redrawing = Redrawing()
        with self._in(redrawing):
            self._generate_and_score_completions(rows)
        if len(redrawing.results) != 1:
            raise UserError(
                f"{type(self).__name__}._generate_and_score_completions called super() {len(redrawing.results)} times "
                "for the rows that dynamic_sampling drew: call it once, or set dynamic_sampling: false."
            )
        return redrawing.results[0]

    def _redraw(self, rows: list[Batch], redrawing: Redrawing) -> Batch:
        """Generate for rows of new prompts; return a copy of the batch for a subclass's method to change."""
        built = self._one_generation(rows)
        redrawing.results.append(built)
        self.rollouts = built.selected.record
        self.rollouts.advantages = gather_advantages(built.batch, self)
        # A copy, because the batch itself is joined with another, to which the subclass's method does the rest.
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in built.batch.items()}

    def _one_generation(self, inputs: list[Batch]) -> Built:
        """Run TRL's method on n rows of each prompt; return its batch of the m kept rows of each."""
        self._enter_phase("rollout")
        n, m = group_sizes(self.args)
        processes = self.accelerator.num_processes
        shares = Shares(len(inputs) * processes // m, n, m, processes)
        step = self.state.global_step
        key = (self.args.seed, step, self._selections.number(step))
        generation = Generation(shares, self.accelerator.process_index, inputs, key, self._calculate_rewards)
        # TRL scores after `_generate`, which has scored and selected by then.
        with self._in(Generating(generation)), compat.scoring_by(self, generation.scores_of_kept_rows):
            batch = super()._generate_and_score_completions(generation.rollouts)
        selected = generation.result_of(batch, type(self).__name__)
        show_scores(self._logs["rewards"], selected.record, selected.scores)
        return Built(batch, generation, selected)

    def _finish(self, built: Built, before: Mapping[str, int]) -> Batch:
        """Put our advantages into the batch, and log the statistics of all n rollouts.

        Args:
            before: the number of entries of each metric before the generation.
        """
        batch = built.batch
        record = built.selected.record
        advantages_of_trl = batch["advantages"]
        set_advantages(built, self)
        record.advantages = gather_advantages(batch, self)
        if batch["advantages"] is not advantages_of_trl:
            show_advantages(self._logs["advantages"], record)
        log_generation(self, record, built.selected.scores, before)
        self.rollouts = record
        return batch

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

    def measure(self, num_rollouts: int, num_generations: int) -> None:
        """Train with other group sizes from the next generation on, until the next call, to measure what they cost.

        The number of rows stays. Each generation has rows / m new prompts, drawn as dynamic sampling draws them;
        `trainer.rollouts` then holds their rollouts.

        Args:
            num_rollouts: n, the rollouts generated for each prompt.
            num_generations: m, the rows trained of each prompt.

        Raises:
            UserError: sizes that the batch or the processes cannot hold, or prompts from a stream.
        """
        if not isinstance(self.train_dataset, Sized):
            raise UserError(
                "measure draws new prompts by their index, and a stream (IterableDataset) has none: pass a Dataset."
            )
        settings = {
            **vars(self.args),
            "num_rollouts": num_rollouts,
            "num_generations": num_generations,
            "generation_batch_size": None,  # TRL derives it from the steps
        }
        self._mode = Measuring(batch_plan(settings, self.accelerator.num_processes))

    def _measured_rows(self, plan: BatchPlan, example: Batch) -> list[Batch]:
        """Set the group sizes of `measure`, and return rows of new prompts instead of TRL's."""
        self.num_generations = plan.num_generations
        self.args.num_generations = plan.num_generations
        self.args.num_rollouts = plan.num_rollouts
        return self._dynamic.new_rows(plan.prompts_per_generation, example)
