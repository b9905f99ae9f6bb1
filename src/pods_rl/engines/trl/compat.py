"""Everything that PODSTrainer relies on in TRL, transformers and accelerate: the list to work through when one moves.

- `check_overrides`: compares the methods that PODSTrainer overrides with those of the installed versions.
- `TRLTrainer`: what else is read, written or called on the trainer, one line each; it types the rest of the engine.
- the imports below: names that are not public.
- the context managers: every patch of TRL and accelerate, undone at its end. Two changes stay: `use_fsdp2`
  sets accelerate's state, and `prefix_tree.attention` wraps the attention functions of transformers.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import transformers
import trl
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerControl, TrainerState
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer import TRAINER_STATE_NAME  # noqa: F401  (the engine imports private names from here)
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation  # gathers ZeRO-3's weights
from trl.trainer import grpo_trainer  # its VLLMGeneration and logger are patched below
from trl.trainer.grpo_trainer import disable_gradient_checkpointing, use_adapter  # noqa: F401
from trl.trainer.utils import get_callable_name, get_config_model_id, is_async_callable, nanstd, pad  # noqa: F401

from ...errors import UserError
from ...text import change_text, plain_text
from .config import PODSConfig

TESTED = {"trl": "1.16.0", "transformers": "5.23.0"}

Batch = dict[str, Any]
Completions = tuple[list[list[int]], Any]  # token ids; log-probabilities, None if the sampler returns none


class TRLTrainer:
    """The attributes of TRL's trainer that the engine uses, next to the methods that PODSTrainer overrides."""

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
    mask_truncated_completions: bool
    eos_token_ids: list[int]  # the tokens that end a completion; without one it is truncated
    beta: float
    loss_type: str
    top_entropy_quantile: float
    current_gradient_accumulation_steps: int  # micro-batches of the step; fewer in an epoch's last one
    aux_loss_enabled: bool
    _entropy_bonus_enabled: bool
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

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any, Any]: ...
    def is_world_process_zero(self) -> bool: ...


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


@cache
def check_overrides(trainer_class: type) -> None:
    """Check that the methods that a class marks with `override` exist in TRL's trainer, with the same parameters.

    An override that takes `*args` or `**kwargs` has to have the first parameters in common.

    Raises:
        UserError: the method, its parameters here and those expected, and the versions to install.
    """
    for name, method in vars(trainer_class).items():
        if not getattr(method, "__override__", False):
            continue
        parameters = inspect.signature(method).parameters.values()
        expected = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        theirs = getattr(GRPOTrainer, name, None)
        found = [] if theirs is None else list(inspect.signature(theirs).parameters)
        if found[: len(expected)] != expected or (len(found) > len(expected) == len(parameters)):
            is_here = f"it is {name}({', '.join(found)})" if found else "that method does not exist"
            pins = " ".join(f"'{package}=={version}'" for package, version in TESTED.items())
            raise UserError(
                f"PODSTrainer overrides GRPOTrainer.{name}({', '.join(expected)}), but in the installed trl "
                f"{trl.__version__} and transformers {transformers.__version__} {is_here}: pip install {pins}"
            )


def is_overridden(trainer: TRLTrainer, base: type, names: Iterable[str]) -> bool:
    """Return whether a subclass of `base`, or the trainer itself, replaces one of these methods."""
    for name in names:
        if name in vars(trainer):
            return True
        if getattr(type(trainer), name) is not getattr(base, name):
            return True
    return False


def refuse_unsupported(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of TRL's constructor that down-sampling does not support.

    Raises:
        TypeError: `args` is not a PODSConfig.
        UserError: tools or environments with ZeRO-3, unless vLLM generates.
    """
    config = arguments["args"]
    if not isinstance(config, PODSConfig):
        raise TypeError(
            f"PODSTrainer needs args of type PODSConfig, got {type(config).__name__}: "
            "PODSConfig takes the same fields, plus num_rollouts"
        )
    turns = [name for name in ("tools", "environment_factory") if arguments.get(name)]
    if turns and not config.use_vllm and is_deepspeed_zero3_enabled():
        raise UserError(
            f"{turns[0]} cannot be used with DeepSpeed's ZeRO-3 without vLLM: every turn gathers the weights on all "
            "processes, and some have more turns than others, so the run would hang. Use use_vllm, ZeRO-2 or FSDP2."
        )


def warn_of_lossy_cast(trainer: TRLTrainer) -> None:
    """Warn if continuous batching makes TRL round the policy's weights."""
    args = trainer.args
    if not (trainer.use_transformers_continuous_batching and (args.bf16 or args.fp16)):
        return
    if torch.float32 in {p.dtype for p in trainer.model.parameters() if p.requires_grad}:
        flag, to = ("bf16", "bfloat16") if args.bf16 else ("fp16", "float16")
        warnings.warn(
            f"use_transformers_continuous_batching with {flag} = true: before each generation TRL turns the trained "
            f"float32 weights into {to}, permanently, and small updates are then rounded away. Set {flag}: false, or "
            f"load the policy in {to} on purpose (dtype: {to}).",
            UserWarning,
            stacklevel=3,
        )


# -- patches: each holds inside its context and is undone at the end ---------------------------------------------------


@contextmanager
def standing_in(instance: Any, **values: Any) -> Iterator[None]:
    """Replace attributes and methods of the trainer, the policy (`generate`) or TRL's module."""
    own = {name: vars(instance)[name] for name in values if name in vars(instance)}
    vars(instance).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(instance)[name]
        vars(instance).update(own)


@contextmanager
def escaping_printed_table() -> Iterator[None]:
    """Inside, TRL prints its table of completions escaped, since text of a policy can steer a terminal.

    What TRL writes to files and trackers stays as it is.
    """
    show = grpo_trainer.print_prompt_completions_sample

    def escaped(values: Sequence[Any]) -> list[Any]:
        return [change_text(value, plain_text) for value in values]

    def show_escaped(
        prompts: Sequence[Any], completions: Sequence[Any], *others: Any, extra: Mapping[str, Sequence[Any]]
    ) -> None:
        columns = {plain_text(name): escaped(values) for name, values in extra.items()}
        show(escaped(prompts), escaped(completions), *others, extra=columns)

    with standing_in(grpo_trainer, print_prompt_completions_sample=show_escaped):
        yield


@contextmanager
def building(trainer: TRLTrainer, at_once: int) -> Iterator[None]:
    """While a trainer is built: shard as `use_fsdp2` says, and give colocated vLLM `at_once` as its `max_num_seqs`.

    TRL would give vLLM the rows of the update.
    """
    build = grpo_trainer.VLLMGeneration

    def create() -> None:
        GRPOTrainer.create_accelerator_and_postprocess(trainer)
        use_fsdp2(trainer)

    def with_room(**settings: Any) -> Any:
        return build(**settings | {"max_num_seqs": at_once})

    shards, has_room = {"create_accelerator_and_postprocess": create}, {"VLLMGeneration": with_room}
    with standing_in(trainer, **shards), standing_in(grpo_trainer, **has_room):
        yield


# -- sharded weights: FSDP2 and ZeRO-3 ---------------------------------------------------------------------------------


def use_fsdp2(trainer: TRLTrainer) -> None:
    """Shard on the CPU too, where accelerate would silently fall back to DDP; called once accelerate is set up.

    Raises:
        UserError: FSDP1.
    """
    state = trainer.accelerator.state
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is None and state.distributed_type == DistributedType.MULTI_CPU:
        # The plugin that accelerate makes from the launcher's environment.
        state.fsdp_plugin = plugin = FullyShardedDataParallelPlugin(**(trainer.args.fsdp_plugin_args or {}))
        if state.mixed_precision != "no":
            plugin.set_mixed_precision(state.mixed_precision)
        PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
        trainer.is_fsdp_enabled = True
    if plugin is not None and plugin.fsdp_version != 2:
        raise UserError(f"FSDP{plugin.fsdp_version} is not supported: set fsdp_version: 2 (FSDP2).")


def layout(trainer: TRLTrainer) -> str:
    """How the processes share the model: `FSDP2`, `ZeRO-3`, `DDP`, or `single` for one process."""
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
