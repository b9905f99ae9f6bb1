"""PODSTrainer: TRL's GRPOTrainer that generates n rollouts a prompt and trains on m of them.

No method of TRL is copied. Its method that generates and scores runs once, on n rows a prompt; `_generate` shortens its
lists to the m kept rows of each before TRL computes a log-probability. `compat.py` lists what is used of TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast
from datasets import Dataset
from torch import Tensor
from typing_extensions import override

from ...errors import UserError
from ...prefix_tree.positions import Positions, positions_of, with_longest_text
from ...prefix_tree.tree import distinct_share
from ...selection import select
from ..arguments import check_arguments
from ..seeds import seeded_generator
from . import compat
from .batching import BatchPlan, Shares, batch_plan
from .compat import Batch, Completions, Generated, LogProbs, Tokenized, TypedGRPOTrainer
from .config import PAPER, PODSConfig, check_prompts, group_sizes
from .guarded.checkpoints import OPTIMIZER, WEIGHTS, ExactResume, check_output_dir, load_renamed, restoring
from .guarded.rewards import CheckedRewards
from .guarded.stability import Stability
from .selecting.advantages import drop_zero_counters, gather_advantages, log_generation, set_advantages
from .selecting.dynamic_sampling import DynamicSampling
from .selecting.generation import Built, Generation, Selected, copies, move_rows, named, output_of, record_of
from .selecting.modes import Generating, Measuring, Mode, Redrawing, Resting, Sampling
from .selecting.record import Rollouts, make_table_storable, show_advantages, show_scores
from .step.turns import Tools, Turns, check_completions, over_prefix_tree, sequences_at_once
from .step.update import StepCallback, Update

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig, PreTrainedModel, ProcessorMixin, TrainerCallback
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from .compat import Data, EvalData, RewardFunc


class PODSTrainer(TypedGRPOTrainer):
    """GRPO with down-sampling (paper Algorithm 1): generate n, keep m by a rule, train on those.

    Takes the arguments of TRL's `GRPOTrainer`, with `args` a `PODSConfig`. Evaluation never down-samples. With
    `num_rollouts` equal to `num_generations` and `exact_trl` it is TRL's trainer to the last bit; by default it draws
    its own random numbers, and its gradient differs by rounding (`docs/trl.md`). After each generation
    `trainer.rollouts` holds all n rollouts, which were kept, and their rewards.

    Raises:
        UserError: versions of TRL or transformers whose methods take other arguments; prompts and completions that
            are longer than the policy's learned positions; in training, memory that runs out.
        TypeError: `args` is a GRPOConfig and not a PODSConfig, or another argument has a wrong type.
        ValueError: `train_dataset` has no column `prompt`; what TRL refuses.
    """

    _tag_names = ["trl", "grpo", "pods"]  # noqa: RUF012  (TRL's own form)
    _name = "PODS"
    _paper = PAPER
    _mode: Mode = Resting()
    _last_key: tuple[int, int] = (-1, 0)  # the step of the latest generation, and the generations before it
    _positions: Positions | None = None  # of the policy, if it has a table of them
    rollouts: Rollouts | None = None  # of the latest generation

    # -- Algorithm 1 of the paper, inside TRL's `_generate_and_score_completions` --------------------------------------

    @override
    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        mode = self._mode
        if not isinstance(mode, Generating):  # an evaluation
            with self._ready_to_sample():
                return super()._generate(prompts)
        generation = mode.generation
        with self._ready_to_sample(), self._in(Sampling(Turns(self, generation.rollout_keys))):
            results = super()._generate(prompts)  # n rollouts of each prompt
        output = Generated.of(results)
        scores = self._score(generation, prompts, output)
        record = record_of(generation, self, prompts, output, scores)
        record.kept = self._select(generation, record.scored_rewards())
        generation.selected = Selected.of(record, scores)
        return self._shorten(generation, record, prompts, output)

    def _score(self, generation: Generation, prompts: list[Any], output: Generated) -> Tensor:
        """Return the scores of all n rollouts of all processes, `[P * n, F]`."""
        self._update.clock.enter("reward")
        self._update.tokens["generated"] += sum(output.policy_tokens())
        distinct = distinct_share(output.completion_ids, generation.groups)
        self._metrics["train"]["pods/distinct_tokens"].append(distinct)
        generation.add_fields(output)
        # Copies: a reward function may change what it reads, and TRL trains on the originals.
        columns = (
            generation.rollouts,
            copies(prompts),
            copies(output.completions),
            [list(ids) for ids in output.completion_ids],
        )
        with compat.group_size_of(self, generation.shares.num_rollouts):
            return self._rewards.score(generation.calculate_rewards, *columns)

    def _select(self, generation: Generation, rewards_PN: Tensor) -> Tensor:
        """Return which m rollouts of each prompt the rule keeps, int64 `[P, M]`; the first process decides for all."""
        self._update.clock.enter("selection")
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
        self._update.clock.enter("update")
        return output_of(columns)

    @override
    def _calculate_rewards(
        self, inputs: list[Batch], prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Tensor:
        with self._rewards.watching():
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards.clean(rewards)

    @override
    def _generate_and_score_completions(self, inputs: list[Batch]) -> Batch:
        if not self.model.training:
            return self._evaluate_rows(inputs)
        mode = self._mode
        if isinstance(mode, Redrawing):
            return self._redraw(inputs, mode)
        if isinstance(mode, Measuring):
            inputs = self._measured_rows(mode.plan, inputs[0])
        before = {name: len(values) for name, values in self._metrics["train"].items()}
        built = self._one_generation(inputs)
        self._dynamic.fill(built, self._generation_of_new_prompts)
        return self._finish(built, before)

    def _evaluate_rows(self, inputs: list[Batch]) -> Batch:
        """Run TRL's method on rows of an evaluation, with checked rewards."""
        return self._run_trl(inputs, partial(self._rewards.score, self._calculate_rewards))

    def _run_trl(self, rows: list[Batch], score: Callable[..., Tensor]) -> Batch:
        """Run TRL's method, which asks `score` for the rewards."""
        with compat.scoring_by(self, score), self._tools.reading_anything():
            return super()._generate_and_score_completions(rows)

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
        if not compat.is_overridden(self, PODSTrainer, ["_generate_and_score_completions"]):
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
        self._update.clock.enter("rollout")
        n, m = group_sizes(self.args)
        processes = self.accelerator.num_processes
        shares = Shares(len(inputs) * processes // m, n, m, processes)
        key = self._next_key()
        generation = Generation(shares, self.accelerator.process_index, inputs, key, self._calculate_rewards)
        with self._in(Generating(generation)):
            # TRL scores after `_generate`, which has scored and selected by then.
            batch = self._run_trl(generation.rollouts, generation.scores_of_kept_rows)
        selected = generation.result_of(batch, type(self).__name__)
        show_scores(self._logs["rewards"], selected.record, selected.scores)
        return Built(batch, generation, selected)

    def _next_key(self) -> tuple[int, int, int]:
        """Return the key of the next generation's draws: seed, step, and the step's generations before it."""
        step = self.state.global_step
        last_step, number = self._last_key
        number = number + 1 if step == last_step else 0
        self._last_key = (step, number)
        return (self.args.seed, step, number)

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

    @contextmanager
    def _ready_to_sample(self) -> Iterator[None]:
        """Inside, tools have limits and weights are gathered."""
        if not hasattr(self, "_tools"):  # a trainer without its constructor, as TRL's own tests make one
            yield
            return
        self._tools.limit()
        # FSDP2: gather the weights, so that no process waits for another's tokens. TRL gathers those of ZeRO-3.
        gathers = self._dist.is_fsdp and not self.use_vllm
        with self.whole_weights() if gathers else nullcontext():
            yield

    @override
    def _tokenize_prompts(self, prompts: list[Any]) -> Tokenized:
        # Tokenize the n copies of a prompt once.
        tokenize = super()._tokenize_prompts
        mode = self._mode
        return mode.turns.tokenize(tokenize, prompts) if isinstance(mode, Sampling) else tokenize(prompts)

    @override
    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int,
        has_tool_images: bool = False,
    ) -> Completions:  # fmt: skip
        # Generate in parts of `rollout_batch_size` rows, each prefix once, and check that all have a completion.
        sample = super()._generate_single_turn
        mode = self._mode
        self._check_length(max(map(len, prompt_ids), default=0))
        # Without pixels TRL would add token types of images, which few models take.
        has_pixels = "pixel_values" in multimodal_fields
        options = {"has_tool_images": True} if has_tool_images and has_pixels else {}
        if isinstance(mode, Sampling) and num_generations == self.num_generations:
            num_generations = self.args.num_rollouts or num_generations  # vLLM returns this many for each prompt

        def generate(rows: slice, keys: Sequence[tuple[int, ...]] = ()) -> Completions:
            ids = prompt_ids[rows]
            fields = {name: values[rows] for name, values in multimodal_fields.items()}
            with self._stability.explaining_sampling(), over_prefix_tree(self, keys):
                completion_ids, logprobs = sample(ids, images, fields, num_generations, **options)
            check_completions(len(ids), completion_ids)
            return completion_ids, logprobs

        if isinstance(mode, Sampling):
            return mode.turns.generate(prompt_ids, has_pixels, generate)
        return generate(slice(None))  # an evaluation

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

    # -- the constructor ---------------------------------------------------------------------------------------------

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: PODSConfig | None = None,
        train_dataset: Data | None = None,
        eval_dataset: EvalData | None = None,
        processing_class: Tokenizer | ProcessorMixin | None = None,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., dict[str, Any]] | None = None,
        environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        compat.check_overrides(PODSTrainer)
        compat.check_row_lists()
        check_arguments(arguments)
        if args is None:
            name = model if isinstance(model, str) else compat.get_config_model_id(model.config)
            args = PODSConfig(f"{name.split('/')[-1]}-PODS")
            arguments["args"] = args
        compat.refuse_unsupported(arguments)
        if args.output_dir is not None:
            check_output_dir(args.output_dir)
        with compat.room_in_vllm(sequences_at_once(args)):
            super().__init__(**arguments)
        compat.warn_of_lossy_cast(self)
        self._check_positions()
        self._rewards = CheckedRewards(self)
        self._stability = Stability(self)
        self._update = Update(self, PODSTrainer)
        self._tools = Tools(self)
        self._dynamic = DynamicSampling(self)
        self._resume = ExactResume(self, self._dynamic)
        self.add_callback(StepCallback(self, self._update, self._stability))

    def _check_positions(self) -> None:
        """Raise UserError if the policy's table of positions is too short for its prompts, as far as these are known.

        Each generation repeats the check for its own prompts.
        """
        positions = positions_of(self.model)
        if positions is None or not positions.end:
            return
        self._positions = positions
        self._check_length(1, which="The shortest possible prompt")
        # With environments, TRL reads the tools of a prompt from lists that it fills when it generates.
        if not isinstance(self.train_dataset, Dataset) or self.environment_factories is not None:
            return
        prompts = with_longest_text(row["prompt"] for row in self.train_dataset.select_columns("prompt"))
        prompt_ids, _, _ = self._tokenize_prompts(prompts)
        self._check_length(max(map(len, prompt_ids), default=1))

    def _check_length(self, prompt: int, which: str = "The longest prompt") -> None:
        """Raise UserError if the policy's table of positions is too short for a prompt of this length."""
        if self._positions is not None:
            self._positions.check(
                prompt,
                self.args.max_completion_length or 0,
                which=which,
                advice="remove the longest prompts",
            )

    @override
    def create_accelerator_and_postprocess(self) -> None:
        # Here, since the constructors of transformers and TRL prepare models next.
        super().create_accelerator_and_postprocess()
        compat.use_fsdp2(self)

    # -- the update: without repeats, passes without a gradient, or steps that are not finite -------------------------

    @override
    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        # TRL shuffles the rows of a new generation over its micro-batches: those of a step are packed into few passes.
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        if self._buffered_inputs is not None and self._buffered_inputs is not before:
            self._buffered_inputs = self._update.pack_rows(self._buffered_inputs)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        self._update.count_trained(inputs)
        return inputs

    @override
    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        # Skip rows and passes without a gradient, by the advantages that a subclass gives to TRL's loss.
        compute = super()._compute_loss
        return self._update.loss(inputs, lambda: compute(model, inputs))

    @override
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        # Read the loss before transformers' filter turns NaN into 0.
        return self._stability.take_loss(super().training_step(model, inputs, num_items_in_batch))

    @override
    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int,
        batch_size: int | None = None, *args: Any, **kwargs: Any,
    ) -> LogProbs:  # fmt: skip
        # Compute each prompt once, and only rows with a gradient.
        compute = super()._get_per_token_logps_and_entropies
        positional = (model, input_ids, attention_mask, logits_to_keep, batch_size)
        if args:  # not from TRL, which passes all else by keyword
            return compute(*positional, *args, **kwargs)
        return self._update.log_probs(compute, *positional, kwargs)

    @override
    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # Only here is the norm of every step known.
        self._stability.gradient_norm = super()._get_grad_norm(model, grad_norm)
        return self._stability.gradient_norm

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Log the original loss and no zero counters. TRL prints model output to the terminal, and saves it.
        self._stability.restore_loss(logs)
        drop_zero_counters(self._metrics["train"])
        drop_zero_counters(self._metrics["eval"])
        if self.log_completions:
            make_table_storable(self._logs)
        with compat.printing_escaped():
            super().log(logs, start_time)

    # -- resume (checkpoints.py) and sharded weights (compat.py) -------------------------------------------------------

    @override
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; resume exactly from a checkpoint of this trainer, and as TRL does from one of TRL's.

        On a CPU the resumed run is the same bit for bit. On a GPU it can differ by rounding, as any two runs do there.

        Args:
            resume_from_checkpoint: a folder that this trainer or TRL's saved. If True, the newest complete one in
                `output_dir`. Its hashes are compared where it has a manifest.
            args: as TRL's, like `kwargs`.

        Raises:
            UserError: the checkpoint is damaged, missing or of another number of processes; there are fewer prompts
                than one generation needs; memory ran out.
            UnstableTrainingError: three steps in a row had a loss or gradient that is not finite.
        """
        if isinstance(self.train_dataset, Sized):  # a stream has no length
            check_prompts(self.args, len(self.train_dataset))
        self._stability.reset()
        checkpoint = self._resume.find(resume_from_checkpoint)
        explaining_memory = self._stability.explaining_memory(lambda: self._update.clock.phase)
        with self._reporting_errors(), explaining_memory, self._tools.closing():
            output = super().train(checkpoint, *args, **kwargs)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            load_renamed(self, self.state.best_model_checkpoint)
        self._stability.raise_if_unstable()
        return output

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """Inside, an exception is passed to callbacks with `on_train_error`: transformers has no such event.

        That of a full disk becomes a UserError.
        """
        try:
            yield
        except BaseException as error:
            for callback in self.callback_handler.callbacks:
                if hasattr(callback, "on_train_error"):
                    callback.on_train_error(error, self.state)
            from ...runs.files import write_failure

            full = write_failure(error)
            if full is None or isinstance(error, UserError):
                raise
            raise UserError(
                f"Cannot write to {getattr(error, 'filename', None) or self.args.output_dir}: {full}. Free some space, "
                "then continue from the last checkpoint with resume_from_checkpoint=True."
            ) from error

    @override
    def _run_epoch(self, **kwargs: Any) -> None:  # transformers calls it by keyword
        if not self._resume.begins_finished(kwargs["epoch"], kwargs["epochs_trained"], kwargs["train_dataloader"]):
            super()._run_epoch(**kwargs)

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with restoring(resume_from_checkpoint, WEIGHTS):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with restoring(checkpoint, OPTIMIZER):
            super()._load_optimizer_and_scheduler(checkpoint)

    @override
    def _save_rng_state(self, output_dir: str) -> None:
        # Save each process's state together with its random state.
        super()._save_rng_state(output_dir)
        self._resume.save(Path(output_dir), self.rollouts)

    @override
    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self.rollouts = self._resume.load(Path(checkpoint)) or self.rollouts

    layout = property(compat.layout)
    whole_weights = compat.whole_weights
