"""Everything that PODSTrainer relies on in TRL, transformers and accelerate: the list to work through when one moves.

- `Overridden`: the methods that PODSTrainer overrides, with the parameters that it was written for.
- `TRLTrainer`: what else is read, written or called on the trainer, one line each; it types the rest of the engine.
- the imports below: names that are not public.
- the context managers: every patch of TRL and accelerate, undone at its end, but for `shard_with`. `packing` wraps the
  attention functions of transformers, which stays.

`check_overrides` and `check_names` compare the lists with the installed versions when a trainer is built.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import transformers
import trl
from accelerate import Accelerator, PartialState
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainerControl, TrainerState
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOTrainer

from ...errors import UserError
from .config import PODSConfig

TESTED = {"trl": "1.16.0", "transformers": "5.23.0"}


def _refusal(needs: str, found: object) -> UserError:
    here = f"trl {trl.__version__} and transformers {transformers.__version__}"
    pins = " ".join(f"'{package}=={version}'" for package, version in TESTED.items())
    return UserError(
        f"PODSTrainer {needs}, but in {here}, which are installed, {found}. PODSTrainer is tested with trl "
        f"{TESTED['trl']} and transformers {TESTED['transformers']}: pip install {pins}"
    )


try:  # names that are not public; the engine imports them from here
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from transformers.trainer import TRAINER_STATE_NAME  # noqa: F401
    from trl.models import unwrap_model_for_generation  # gathers ZeRO-3's weights
    from trl.trainer import grpo_trainer  # its VLLMGeneration and logger are patched below
    from trl.trainer.utils import get_callable_name, get_config_model_id, is_async_callable, nanstd, pad  # noqa: F401
except ImportError as error:
    raise _refusal("imports names of trl and transformers that are not public", error) from error

Batch = dict[str, Any]
Completions = tuple[list[list[int]], Any]  # token ids; log-probabilities, None if the sampler returns none


class Overridden:
    """The methods that PODSTrainer overrides: parameters in GRPOTrainer's order, types as far as we use them."""

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any: ...
    def _run_epoch(
        self, model: Any, epoch: int, train_dataloader: Any, steps_in_epoch: int, num_update_steps_per_epoch: int,
        trial: Any, ignore_keys_for_eval: Any, start_time: float, resume_from_checkpoint: str | None,
        epochs_trained: int, steps_trained_in_current_epoch: int,
    ) -> None: ...  # fmt: skip
    def _prepare_inputs(self, generation_batch: Any) -> Batch: ...
    def _generate_and_score_completions(self, inputs: list[Batch]) -> Batch: ...
    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]: ...
    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> Completions: ...  # fmt: skip
    def _calculate_rewards(
        self, inputs: list[Batch], prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Tensor: ...
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor: ...
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor: ...
    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, batch_size: int | None = None,
        compute_entropy: bool = False, compute_aux_loss: bool = False, pixel_values: Any = None,
        image_grid_thw: Any = None, num_images: Any = None, pixel_attention_mask: Any = None,
        spatial_shapes: Any = None, num_tiles: Any = None, image_sizes: Any = None, token_type_ids: Any = None,
        mm_token_type_ids: Any = None, image_position_ids: Any = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]: ...  # fmt: skip
    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any: ...
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None: ...
    def _save_rng_state(self, output_dir: str) -> None: ...
    def _load_rng_state(self, checkpoint: str | None) -> None: ...


class TRLTrainer(Overridden):
    """The other attributes of TRL's trainer that the engine uses."""

    args: PODSConfig
    accelerator: Accelerator
    state: TrainerState
    control: TrainerControl
    model: Any
    model_wrapped: Any  # DDP's, FSDP's or DeepSpeed's, whose gradients a skipped step clears
    ref_model: Any  # saved and loaded if sync_ref_model changes it
    processing_class: Any
    _tokenizer: Any
    train_dataset: Any
    tools: list[Callable[..., Any]]  # of the prompts; an environment's `close` is taken out
    rollout_func: Callable[..., Any] | None  # replaced by one whose result is checked
    environment_factories: dict[str | None, Callable[[], Any]] | None
    environments: list[Any] | None  # of the rows of the latest `_generate`; shortened to the kept rows
    _batch_environments: list[str | None]  # their names; shortened too
    _environment_pool: dict[str | None, list[Any]]  # closed ones are taken out
    _env_tools: dict[str | None, list[Callable[..., Any]]]
    _sync_tool_dicts: list[dict[str, Callable[..., Any]]]  # of each row: limits are put on them
    _async_tool_dicts: list[dict[str, Callable[..., Any]]]
    async_loop: Any  # with coroutines: evaluations run theirs in it too
    reward_funcs: list[Any]  # replaced by checked ones during a call
    reward_func_names: list[str]
    reward_weights: Tensor
    multi_objective_aggregation: str
    scale_rewards: Any
    num_generations: int
    num_iterations: int
    beta: float
    loss_type: str
    top_entropy_quantile: float
    aux_loss_enabled: bool
    _entropy_bonus_enabled: bool
    pad_to_multiple_of: int | None
    log_completions: bool
    use_vllm: bool
    use_transformers_continuous_batching: bool
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    _dist: Any  # how the weights are sharded
    _step: int  # micro-batches trained; decides what a checkpoint must keep
    _buffered_inputs: list[Batch] | None  # a generation's micro-batches: arranged, and kept in checkpoints
    _metrics: dict[str, dict[str, list[float]]]  # averaged into the next line of the log
    _logs: dict[str, Any]  # the table of completions
    _pending_extra_logs: dict[str, list[Any]]  # columns that reward functions logged about all n
    _tr_loss: Tensor  # loss since the last log line, which transformers does not save
    _globalstep_last_logged: int  # as _tr_loss
    _last_loaded_step: int  # with vLLM: the step of the generator's weights
    vllm_generation: Any  # with vLLM: what asks it

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor: ...  # a subclass may replace it
    def is_world_process_zero(self) -> bool: ...


# Attributes that do not exist when the trainer is built, and the method that sets each.
_SET_LATER: dict[str, Callable[..., Any]] = {
    "_tr_loss": Trainer._inner_training_loop,
    "_globalstep_last_logged": Trainer._inner_training_loop,
    "_last_loaded_step": GRPOTrainer.__init__,
    "vllm_generation": GRPOTrainer.__init__,
    "_environment_pool": GRPOTrainer.__init__,
    "_batch_environments": GRPOTrainer._generate_and_score_completions,
    "_env_tools": GRPOTrainer.__init__,
    "_sync_tool_dicts": GRPOTrainer._generate_and_score_completions,
    "async_loop": GRPOTrainer.__init__,
    "_async_tool_dicts": GRPOTrainer._generate_and_score_completions,
}

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel

    Data: TypeAlias = datasets.Dataset | datasets.IterableDataset
    EvalData: TypeAlias = Data | datasets.DatasetDict | datasets.IterableDatasetDict | dict[str, Data]
    RewardFunc: TypeAlias = str | PreTrainedModel | Callable[..., list[float | None]]

    class TypedGRPOTrainer(GRPOTrainer, TRLTrainer):
        """TRL's trainer with the types of this module."""
else:
    TypedGRPOTrainer = GRPOTrainer


def _methods(owner: type) -> dict[str, str]:
    """Return the parameters of each method that a class defines, as one string."""
    functions = {name: value for name, value in vars(owner).items() if inspect.isfunction(value)}
    return {name: ", ".join(inspect.signature(value).parameters) for name, value in functions.items()}


SIGNATURES = _methods(Overridden)


@cache
def check_overrides() -> None:
    """Check that each method that PODSTrainer overrides or calls has the expected parameters.

    Raises:
        UserError: the method, its parameters here and those expected, and the versions to install.
    """
    for name, expected in (SIGNATURES | _methods(TRLTrainer)).items():
        method = getattr(GRPOTrainer, name, None)
        found = None if method is None else ", ".join(inspect.signature(method).parameters)
        if found != expected:
            verb = "overrides" if name in SIGNATURES else "calls"
            is_here = "that method does not exist" if found is None else f"it is {name}({found})"
            raise _refusal(f"{verb} GRPOTrainer.{name}({expected})", is_here)


def check_names(trainer: TRLTrainer) -> None:
    """Check that a newly built trainer has every attribute of `TRLTrainer`; raise UserError if one is missing."""
    for name in TRLTrainer.__annotations__:
        setter = _SET_LATER.get(name)
        there = hasattr(trainer, name) if setter is None else name in inspect.unwrap(setter).__code__.co_names
        if not there:
            raise _refusal(f"uses GRPOTrainer.{name}", "that attribute does not exist")
    for name in ("VLLMGeneration", "logger", "split_pixel_values_by_grid", "unsplit_pixel_values_by_grid"):
        if not hasattr(grpo_trainer, name):
            raise _refusal(f"patches or calls trl.trainer.grpo_trainer.{name}", "that name does not exist")


def refuse_unsupported(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of TRL's constructor that down-sampling does not support.

    Raises:
        TypeError: `args` is not a PODSConfig.
        UserError: DeepSpeed without a GPU; tools or environments with ZeRO-3, unless vLLM generates.
    """
    config = arguments["args"]
    if not isinstance(config, PODSConfig):
        raise TypeError(
            f"PODSTrainer needs args of type PODSConfig, got {type(config).__name__}: "
            "PODSConfig takes the same fields, plus num_rollouts"
        )
    if config.use_cpu and os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise UserError(
            "The accelerate configuration asks for DeepSpeed, and this runs on the CPU, where accelerate silently uses "
            "DDP: choose --accelerate_config fsdp2 or ddp."
        )
    turns = [name for name in ("tools", "environment_factory") if arguments.get(name)]
    if turns and not config.use_vllm and is_deepspeed_zero3_enabled():
        raise UserError(
            f"{turns[0]} cannot be used with DeepSpeed's ZeRO-3 without vLLM: every turn gathers the weights on all "
            "processes, and some have more turns than others, so the run would hang. Use use_vllm, ZeRO-2 or FSDP2."
        )


def lossy_cast(trainer: TRLTrainer) -> str | None:
    """Return a warning if continuous batching makes TRL round the policy's weights, else None."""
    args = trainer.args
    if not (trainer.use_transformers_continuous_batching and (args.bf16 or args.fp16)):
        return None
    if torch.float32 not in {p.dtype for p in trainer.model.parameters() if p.requires_grad}:
        return None
    flag, to = ("bf16", "bfloat16") if args.bf16 else ("fp16", "float16")
    return (
        f"use_transformers_continuous_batching with {flag} = true: before each generation TRL turns the trained "
        f"float32 weights into {to}, permanently, and small updates are then rounded away. Set {flag}: false, or load "
        f"the policy in {to} on purpose (dtype: {to})."
    )


# -- patches: each holds inside its context and is undone at the end, but for `shard_with` ---------------------------


@contextmanager
def standing_in(instance: Any, **values: Any) -> Iterator[None]:
    """Replace attributes and methods of an instance: the trainer, or the policy (`generate`)."""
    own = {name: vars(instance)[name] for name in values if name in vars(instance)}
    vars(instance).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(instance)[name]
        vars(instance).update(own)


@contextmanager
def after_accelerator(trainer: Any, change: Callable[[Any], None]) -> Iterator[None]:
    """While a trainer is built: call `change` once transformers has made its accelerator."""

    def create() -> None:
        GRPOTrainer.create_accelerator_and_postprocess(trainer)
        change(trainer)

    with standing_in(trainer, create_accelerator_and_postprocess=create):
        yield


@contextmanager
def vllm_sequences(at_once: int) -> Iterator[None]:
    """While a trainer is built: give colocated vLLM this `max_num_seqs`; TRL would give it the rows of the update."""
    build = grpo_trainer.VLLMGeneration
    grpo_trainer.VLLMGeneration = lambda **settings: build(**settings | {"max_num_seqs": at_once})
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = build


UNSCORED_WARNING = "All reward functions returned None"


@contextmanager
def without_unscored_warning() -> Iterator[None]:
    """Drop TRL's warning of an unscored rollout: it prints model output to the terminal, control codes included."""

    def quiet(record: Any) -> bool:
        return UNSCORED_WARNING not in record.getMessage()

    log = grpo_trainer.logger.logger
    log.addFilter(quiet)
    try:
        yield
    finally:
        log.removeFilter(quiet)


def shard_with(trainer: TRLTrainer, plugin: FullyShardedDataParallelPlugin) -> None:
    """Put FSDP's plugin back into accelerate's state, which drops it on the CPU; not undone."""
    state = trainer.accelerator.state
    PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = plugin
    trainer.is_fsdp_enabled = True


# -- sharded weights: FSDP2 and ZeRO-3 ---------------------------------------------------------------------------------


def use_fsdp2(trainer: TRLTrainer) -> None:
    """Shard on the CPU too, where accelerate would silently fall back to DDP; called once accelerate is set up.

    Raises:
        UserError: FSDP1, or FSDP2 on the CPU of a machine with GPUs.
    """
    state = trainer.accelerator.state
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is None and state.distributed_type == DistributedType.MULTI_CPU:
        if torch.cuda.is_available():
            raise UserError(
                "use_cpu = true, but FSDP2 shards on the GPUs of this machine: remove use_cpu, or hide the GPUs "
                "(CUDA_VISIBLE_DEVICES= pods train ...)."
            )
        # The plugin that accelerate makes from the launcher's environment.
        plugin = FullyShardedDataParallelPlugin(**(trainer.args.fsdp_plugin_args or {}))
        if state.mixed_precision != "no":
            plugin.set_mixed_precision(state.mixed_precision)
        shard_with(trainer, plugin)
    if plugin is not None and plugin.fsdp_version != 2:
        raise UserError(f"FSDP{plugin.fsdp_version} is not supported: set fsdp_version: 2 (FSDP2).")


def parallelism(trainer: TRLTrainer) -> str:
    """Return what the processes do with the model: `FSDP2`, `ZeRO-3`, `DDP`, or `single` for one process."""
    if trainer._dist.is_fsdp:
        return f"FSDP{trainer._dist.fsdp_version}"
    if trainer.is_deepspeed_enabled:
        return f"ZeRO-{trainer._dist.zero_stage}"
    return "DDP" if trainer.accelerator.num_processes > 1 else "single"


@contextmanager
def whole_weights(trainer: TRLTrainer) -> Iterator[None]:
    """Give every process the full policy inside, to run but not to train. Call this on every process.

    Nothing happens if the weights are not sharded.
    """
    if trainer._dist.is_fsdp:
        with _gathered(trainer.model_wrapped, trainer.accelerator.state.fsdp_plugin.reshard_after_forward):
            yield
    elif trainer._dist.is_zero3:
        kwargs = trainer.args.gradient_checkpointing_kwargs
        with unwrap_model_for_generation(
            trainer.model_wrapped, trainer.accelerator, gradient_checkpointing_kwargs=kwargs
        ):
            yield
    else:
        yield


@contextmanager
def _gathered(model: Any, reshard: bool) -> Iterator[None]:
    """Gather all parameters of an FSDP2 model; the resharding behaviour of each module is restored at the end."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.set_reshard_after_forward(reshard, recurse=False)
            module.reshard()
        # As accelerate shards: the last modules of a forward pass are the first of the backward pass.
        for module in sharded:
            if module in (model, model.get_output_embeddings()):
                module.set_reshard_after_forward(False, recurse=False)
