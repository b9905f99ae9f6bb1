"""PODSTrainer: TRL's GRPOTrainer that generates n rollouts a prompt and trains on m of them.

No method of TRL is copied. This class holds every override; each delegates to an object or function that
does the work. `compat.py` lists every other name of TRL, transformers and accelerate in use, and every patch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ...text import plain_text
from . import compat
from .checkpoints import Checkpoints, cache_on, load_renamed
from .compat import Batch, Completions, TypedGRPOTrainer
from .config import PAPER, PODSConfig
from .generation import Key, TurnInputs, check_completions, each_prompt_once, sequences_at_once
from .guard import Guard
from .packing import LogProbs
from .refusals import lossy_cast, refuse_unsupported
from .rewards import CheckedRewards
from .rollouts import Rollouts, escape_table
from .round import RolloutRound
from .sharding import parallelism, use_fsdp2, whole_weights
from .state import ExactResume
from .tools import Tools
from .update import StepCallback, Update
from .waves import RoundPlan

if TYPE_CHECKING:
    import datasets
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig, PreTrainedModel, ProcessorMixin, TrainerCallback
    from transformers import PreTrainedTokenizerBase as Tokenizer

    Data: TypeAlias = datasets.Dataset | datasets.IterableDataset
    EvalData: TypeAlias = Data | datasets.DatasetDict | datasets.IterableDatasetDict | dict[str, Data]
    RewardFunc: TypeAlias = str | PreTrainedModel | Callable[..., list[float | None]]


class PODSTrainer(TypedGRPOTrainer):
    """GRPO with down-sampling (paper Algorithm 1): generate n, keep m by a rule, train on those.

    Takes the arguments of TRL's `GRPOTrainer`, with `args` a `PODSConfig`. Only selected rows reach a log-probability,
    reference or update pass; each rollout is scored once; evaluation never down-samples. With `num_rollouts` equal to
    `num_generations` and `exact_trl` it is TRL's trainer to the last bit; by default it draws its own random numbers,
    and its gradient differs by rounding (`docs/engines.md`). After each generation `trainer.rollouts` holds what was
    generated, kept and why.

    Groups may be spread over processes: every process then generates its share of a prompt's rollouts, and kept rows
    move to the process that trains them.

    Raises:
        UserError: versions of TRL or transformers that lack what this trainer uses of them; in training, a rule that
            keeps other rollouts on one process than on another, a rollout function whose result has another number of
            rows than it was asked for, and memory that runs out.
        TypeError: `args` is a GRPOConfig and not a PODSConfig.
    """

    _tag_names = ["trl", "grpo", "pods"]  # noqa: RUF012  (TRL's own form)
    _name = "PODS"
    _paper = PAPER

    rollouts: Rollouts | None = None  # of the latest generation
    recipe_keys: Mapping[str, Any] = MappingProxyType({})  # of the recipe, for manifests of checkpoints
    checked_checkpoint: Path | None = None  # one whose hashes the caller has compared already
    _round: RolloutRound | None = None  # during a generation

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
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        compat.check_overrides()
        if args is None:
            name = model if isinstance(model, str) else compat.get_config_model_id(model.config)
            given["args"] = args = PODSConfig(f"{name.split('/')[-1]}-PODS")
        refuse_unsupported(given)
        with compat.vllm_sequences(sequences_at_once(args)):
            super().__init__(**given)
        compat.check_names(self)
        if doubt := lossy_cast(self):
            warnings.warn(doubt, UserWarning, stacklevel=2)
        self._rewards, self._guard, self._update = CheckedRewards(self), Guard(self), Update(self)
        self._checkpoints, self._plan, self._tools = Checkpoints(self), RoundPlan(self), Tools(self)
        self._resume = ExactResume(self, self._plan)
        self.add_callback(StepCallback(self, self._update, self._guard))

    # -- generation: n rollouts a prompt are generated and scored, TRL builds its batch of the m that are kept --------

    def _generate_and_score_completions(self, inputs: list[Batch]) -> Batch:
        build = super()._generate_and_score_completions
        with self._tools.open():
            if not self.model.training:
                return build(inputs)
            current = RolloutRound(self, self._update, self._plan, self._tools, build, inputs)
            with compat.standing_in(self, _round=current):
                output = current.batch()
                self.rollouts = current.finish(output)
            return output

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if not hasattr(self, "_tools"):  # a trainer without its constructor, as TRL's own tests make one
            return super()._generate(prompts)
        self._tools.limit()
        # FSDP2: gather the weights, so that no process waits for another's tokens. TRL gathers those of ZeRO-3.
        if self.use_vllm or not self._dist.is_fsdp:
            return super()._generate(prompts)
        with self.whole_weights():
            return super()._generate(prompts)

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, *args: Any, **kwargs: Any
    ) -> Completions:
        # Generate in parts of `rollout_batch_size` rows, each prompt once, and check that all have a completion.
        sample, inputs = super()._generate_single_turn, TurnInputs(self, prompt_ids, images, multimodal_fields)

        def generate(rows: slice, keys: Sequence[Key] = ()) -> Completions:
            given, more = inputs.of(rows, kwargs)
            with self._guard.explaining_sampling(), each_prompt_once(self, keys):
                completion_ids, logprobs = sample(*given, *args, **more)
            check_completions(len(given[0]), completion_ids)
            return completion_ids, logprobs

        turns = self._round and self._round.turns
        return turns.generate(prompt_ids, generate) if turns else generate(slice(None))

    def _calculate_rewards(
        self, inputs: list[Batch], prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Tensor:
        # Check return values and exceptions of reward functions; unusable rewards become NaN.
        with self._rewards.watching():
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards.settle(rewards)

    # -- the update: without repeats, rows and steps without a gradient, or steps that are not finite ---

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training or self._buffered_inputs is None or self._buffered_inputs is before:
            return inputs
        # Mark the rows and steps of a new generation that have no gradient.
        self._buffered_inputs = self._update.arrange(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        # Skip the passes of a step without signal; its optimizer step then has no gradients.
        compute = super().compute_loss
        return self._update.loss(inputs, lambda: compute(model, inputs, *args, **kwargs))

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int,
        batch_size: int | None = None, *args: Any, **kwargs: Any,
    ) -> LogProbs:  # fmt: skip
        # Compute each prompt once, and only rows with a gradient.
        compute = super()._get_per_token_logps_and_entropies
        given = (model, input_ids, attention_mask, logits_to_keep, batch_size)
        # TRL gives all else by keyword.
        return compute(*given, *args, **kwargs) if args else self._update.log_probs(compute, *given, kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        # Read the loss before transformers' filter turns NaN into 0.
        return self._guard.take_loss(super().training_step(model, inputs, num_items_in_batch))

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # Only here is the norm of every step known.
        self._guard.gradient_norm = super()._get_grad_norm(model, grad_norm)
        return self._guard.gradient_norm

    # -- resume: a complete and exact checkpoint resumes bit for bit, any other is refused ----------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; resume only from a complete checkpoint.

        Args:
            resume_from_checkpoint: a folder that a PODSTrainer saved; True: the newest complete one in `output_dir`.
            args: as TRL's, like `kwargs`.

        Raises:
            UserError: the checkpoint is damaged, missing or of another trainer; memory ran out.
            UnstableTrainingError: three steps in a row had a loss or gradient that is not finite.
        """
        self._guard.reset()
        resumed = self._resume.checkpoint(resume_from_checkpoint, self.checked_checkpoint)
        with self._guard.explaining_memory(lambda: self._update.clock.phase), resumed as path, self._tools.closing():
            output = super().train(path, *args, **kwargs)
        self._guard.raise_if_unstable()
        return output

    def _get_train_sampler(self, dataset: Any = None) -> Sampler[int] | None:
        # A resumed run restores the sampler's state after earlier epochs.
        self._resume.sampler = super()._get_train_sampler(dataset)
        return self._resume.sampler

    def _run_epoch(self, **kwargs: Any) -> None:  # type: ignore[override]  # transformers calls it by keyword
        first = (kwargs["epoch"], kwargs["epochs_trained"], kwargs["resume_from_checkpoint"])
        if not self._resume.begins_finished(*first):
            super()._run_epoch(**kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        # Save each process's state together with its random state.
        super()._save_rng_state(output_dir)
        self._resume.save(Path(output_dir), self.rollouts)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self.rollouts = self._resume.load(Path(checkpoint)) or self.rollouts

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # Load weights that were saved under other names than the model's too.
        if not load_renamed(self, model or self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        # As above.
        if not load_renamed(self, self.model, str(self.state.best_model_checkpoint)):
            super()._load_best_model()

    # -- checkpoints: staged, published with a manifest, pruned here, without transformers' pickle ------

    def publish_folder(self, target: Path, write: Callable[[Path], None]) -> None:
        """Have every process write its part of a folder, then publish it; see `Checkpoints.publish`."""
        self._checkpoints.publish(target, write, self.recipe_keys)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        save = super()._save_checkpoint
        target = self._checkpoints.save(trial, lambda: save(model, trial), self.recipe_keys)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        # transformers' rotation at the end would delete folders that are not checkpoints of this run.
        finalize = super()._finalize_training
        return self._checkpoints.finalize(trial, lambda: finalize(trial, num_train_samples, start_time))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # Nothing reads `training_args.bin`; config.yaml has the settings.
        with (
            compat.without_pickle(output_dir or self.args.output_dir),
            cache_on(self.accelerator.unwrap_model(self.model)),
        ):
            super()._save(output_dir, state_dict)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # Pushing also writes the pickle.
        with compat.without_pickle(self.args.output_dir):
            super()._push_from_checkpoint(checkpoint_folder)

    # -- sharded weights ----------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        # accelerate would silently use DDP for FSDP2 on the CPU.
        super().create_accelerator_and_postprocess()
        use_fsdp2(self)

    @property
    def layout(self) -> str:
        """How the processes share the model: `FSDP2`, `ZeRO-3`, `DDP`, or `single` for one process."""
        return parallelism(self)

    def whole_weights(self) -> AbstractContextManager[None]:
        """Give every process the whole policy inside, to run but not to train. Collective."""
        return whole_weights(self)

    # -- logs and model card -------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Log the original loss, and escape model output, which TRL prints to the terminal.
        self._guard.restore_loss(logs)
        if self.log_completions:
            escape_table(self._logs)
        super().log(logs, start_time)

    def create_model_card(self, model_name: str | None = None, *args: Any, **kwargs: Any) -> None:
        # The folder's name need not be UTF-8.
        super().create_model_card(model_name and plain_text(model_name), *args, **kwargs)
