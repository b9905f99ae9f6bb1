"""Everything that PODSTrainer relies on in TRL, transformers and accelerate: the list to work through when one moves.

- `check_overrides`: compares the methods that PODSTrainer overrides with those of the installed versions.
- `Generated`: the results of TRL's `_generate`, by name.
- `ROW_LISTS`: the lists of TRL that are shortened to the kept rows.
- `TRLTrainer`: what else is read, written or called on the trainer, one line each; it types the rest of the engine.
- `ENTROPY` to `IMAGE_INPUTS`: names in TRL's metrics and batches.
- the imports below: names that are not public.
- `replacing`: its callers replace something of TRL, the policy or the processor for a time. Two changes stay:
  `sharding.use_fsdp2` sets accelerate's state, and `prefix_tree.attention` wraps attention functions of transformers.

TRL 1.17 is not supported: pip refuses it. What it breaks shows as an error of `Generated.of`, `check_overrides` or
`check_row_lists`, or not at all: a new list of rows would keep n entries, a new metric of the loss would be averaged
over micro-batches of grouped rows. `make upstream` reads the sources of a coming version for these names.

Every error ends with the versions to install. Changes without an error fail in `tests/engines/test_drift.py`, which
compares these names with TRL's source both ways. `test_contract.py` finds what TRL no longer has.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import transformers
import trl
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer import TRAINER_STATE_NAME  # noqa: F401  (the engine imports private names from here)
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation  # noqa: F401  (gathers ZeRO-3's weights)
from trl.trainer import grpo_trainer  # some of its functions are replaced below
from trl.trainer import utils as trl_utils
from trl.trainer.utils import (  # noqa: F401
    add_fused_lm_head,
    get_callable_name,
    get_config_model_id,
    is_async_callable,
    nanstd,
)

from ...errors import UserError
from ...text import change_text, plain_text
from .. import TESTED
from .config import PODSConfig

_OURS = f"{__package__}."  # how the names of our modules begin
Batch = dict[str, Any]
LogProbs = tuple[Tensor, Tensor | None, Tensor | None]  # log-probabilities, entropies, auxiliary loss
Completions = tuple[list[list[int]], Any]  # token ids; log-probabilities, None if the sampler returns none
Tokenized = tuple[list[list[int]], Any, dict[str, Any]]  # of prompts: token ids; images or None; a processor's fields

# TRL's metrics of a micro-batch: its loss appends one entry to each, and `StepMetrics` makes one value of a step's.
ENTROPY = "entropy"
PHI = "vespo/phi_seq_mean"  # the weight of each row in VESPO's loss
CLIP_RATIO = "clip_ratio"  # part of the name of each share of clipped tokens
EXTREMES = {"clip_ratio/low_min": min, "clip_ratio/high_max": max}  # of the shares of each row
LOSS_METRICS = {
    ENTROPY, "kl", PHI, *EXTREMES, "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
    "cispo_clip_ratio",
}  # fmt: skip

# Our metrics that count rollouts, rows or steps: they add up within a step, and are not logged while they are zero.
COUNTERS = (
    "pods/unusable_rewards", "pods/unscored_rollouts", "pods/reward_errors", "pods/reward_timeouts",
    "pods/masked_rollouts", "pods/verifier_timeouts", "pods/verifier_crashes", "pods/rows_moved",
    "pods/rows/left_out", "pods/rows/empty", "pods/skipped_step", "pods/bad_loss", "pods/bad_gradient",
)  # fmt: skip

# What TRL's batch has of images.
IMAGE_INPUTS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


class Generated(NamedTuple):
    """The results of TRL's `_generate`, in its order; TRL unpacks them.

    Each list has an entry for each row. A field of a rollout function is a list too, or one value for all rows.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None  # 1: written by the policy, 0: by a tool; None without tools
    completions: list[Any]
    logprobs: list[Any] | None
    extra_fields: dict[str, Any]  # of a rollout function, by name
    images: list[Any] | None
    tool_images: list[Any]

    @classmethod
    def of(cls, results: Sequence[Any]) -> Generated:
        """Name what TRL's `_generate` returned.

        Raises:
            UserError: another number of results.
        """
        if len(results) != len(cls._fields):
            raise UserError(
                f"`_generate` returned {len(results)} results, expected {len(cls._fields)}: {', '.join(cls._fields)}. "
                f"A subclass must return all of them. With the installed trl {trl.__version__}: {_install_tested()}"
            )
        return cls(*results)

    def policy_tokens(self) -> list[int]:
        """Return how many tokens of each row the policy wrote, without those of tools and environments."""
        if self.tool_mask is None:
            return list(map(len, self.completion_ids))
        return list(map(sum, self.tool_mask))


# Lists with an entry for each row, which TRL fills just before `_generate` and reads until the batch is built. Each is
# shortened to the kept rows. By name, the attribute without which TRL does not fill the list.
ROW_LISTS = {
    "environments": "environment_factories",
    "_batch_environments": "environment_factories",  # their names
    "_sync_tool_dicts": "tools",  # limits are put on them
    "_async_tool_dicts": "tools",
}


def check_row_lists() -> None:
    """Raise UserError unless TRL still fills the lists of `ROW_LISTS` where it generates."""
    method = inspect.unwrap(GRPOTrainer._generate_and_score_completions)
    for name in ROW_LISTS:
        if name not in method.__code__.co_names:
            raise UserError(
                f"PODSTrainer shortens GRPOTrainer.{name} to the kept rows, but the installed trl {trl.__version__} "
                f"has no such list: {_install_tested()}"
            )


def row_lists(trainer: TRLTrainer, rows: int | None) -> list[list[Any]]:
    """Return this trainer's lists of `ROW_LISTS`; raise UserError unless each has `rows` entries, if given."""
    lists: list[list[Any]] = []
    for name, needs in ROW_LISTS.items():
        if not getattr(trainer, needs):
            continue
        values = getattr(trainer, name, None)
        if not isinstance(values, list) or (rows is not None and len(values) != rows):
            raise UserError(
                f"GRPOTrainer.{name} must be a list with an entry for each of the {rows} rows that are generated. With "
                f"the installed trl {trl.__version__} it is not: {_install_tested()}"
            )
        lists.append(values)
    return lists


def _install_tested() -> str:
    """Return the command that installs the versions that this engine is written for."""
    pins = [f"'{package}=={version}'" for package, version in TESTED.items()]
    return f"pip install {' '.join(pins)}"


class TRLTrainer:
    """The attributes of TRL's trainer that the engine uses, next to the methods that PODSTrainer overrides."""

    args: PODSConfig
    accelerator: Accelerator
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    model: Any
    model_wrapped: Any  # DDP's, FSDP's or DeepSpeed's, whose gradients a skipped step clears
    ref_model: Any  # saved and loaded if sync_ref_model changes it
    processing_class: Any
    _tokenizer: Any
    train_dataset: Any
    tools: list[Callable[..., Any]]  # of the prompts; an environment's `close` is taken out
    rollout_func: Callable[..., Any] | None  # replaced by one whose result is checked
    environment_factories: dict[str | None, Callable[[], Any]] | None
    environments: list[Any] | None  # `ROW_LISTS` says how long this list and the next ones hold
    _batch_environments: list[str | None]
    _environment_pool: dict[str | None, list[Any]]  # closed ones are taken out
    _env_tools: dict[str | None, list[Callable[..., Any]]]
    _sync_tool_dicts: list[dict[str, Callable[..., Any]]]
    _async_tool_dicts: list[dict[str, Callable[..., Any]]]
    async_loop: Any  # with coroutines: evaluations run theirs in it too
    reward_funcs: list[Any]  # replaced by checked ones during a call
    reward_func_names: list[str]
    reward_weights: Tensor
    multi_objective_aggregation: str
    scale_rewards: str
    num_generations: int
    num_iterations: int
    mask_truncated_completions: bool
    eos_token_ids: list[int]  # the tokens that end a completion; without one it is truncated
    beta: float
    loss_type: str
    importance_sampling_level: str
    top_entropy_quantile: float
    aux_loss_enabled: bool
    _entropy_bonus_enabled: bool
    log_completions: bool
    use_vllm: bool
    use_transformers_continuous_batching: bool
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    _dist: DistributedBackend  # how the weights are sharded
    _step: int  # micro-batches trained; decides what a checkpoint must keep
    _current_train_step_time: float  # of the step so far
    _buffered_inputs: list[Any] | None  # a generation's micro-batches: packed into passes, and kept in checkpoints
    _metrics: dict[str, dict[str, list[float]]]  # averaged into the next line of the log
    _logs: dict[str, Any]  # the table of completions
    _pending_extra_logs: dict[str, list[Any]]  # columns that reward functions logged about all n
    _tr_loss: Tensor  # loss since the last log line, which transformers does not save
    _globalstep_last_logged: int  # as _tr_loss
    _last_loaded_step: int  # with vLLM: the step of the generator's weights

    # Methods that we call.
    def is_world_process_zero(self) -> bool: ...
    def add_callback(self, callback: TrainerCallback) -> None: ...
    def remove_callback(self, callback: type[TrainerCallback]) -> None: ...
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]: ...

    # Methods that we override, and call with `super()`.
    def create_accelerator_and_postprocess(self) -> None: ...
    def get_train_dataloader(self) -> Any: ...
    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any: ...
    def _generate_and_score_completions(self, inputs: list[Batch]) -> Batch: ...
    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]: ...
    def _tokenize_prompts(self, prompts: list[Any]) -> Tokenized: ...
    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: dict[str, Any],
        num_generations: int,
        has_tool_images: bool = False,
    ) -> Completions: ...
    def _calculate_rewards(
        self, inputs: list[Batch], prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Tensor: ...
    def _prepare_inputs(self, generation_batch: Any) -> Batch: ...
    def _compute_loss(self, model: nn.Module, inputs: Batch) -> Tensor: ...
    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> LogProbs: ...
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor: ...
    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any: ...
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None: ...
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any: ...
    def _run_epoch(self, **kwargs: Any) -> None: ...
    def _save_rng_state(self, output_dir: str) -> None: ...
    def _load_rng_state(self, checkpoint: str | None) -> None: ...
    # `training.trainer` overrides the first of these, and calls the second.
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None: ...
    def _get_output_dir(self, trial: Any) -> str: ...


if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel, TrainerCallback
    from transformers.trainer_callback import CallbackHandler
    from trl.distributed import DistributedBackend

    Data: TypeAlias = datasets.Dataset | datasets.IterableDataset
    EvalData: TypeAlias = Data | datasets.DatasetDict | datasets.IterableDatasetDict | dict[str, Data]
    RewardFunc: TypeAlias = str | PreTrainedModel | Callable[..., list[float | None]]

    class TypedGRPOTrainer(GRPOTrainer, TRLTrainer):
        """TRL's trainer with the types of this module; for mypy, `GRPOTrainer` itself has none (`stubs/`)."""
else:
    TypedGRPOTrainer = GRPOTrainer


class Layer(TypedGRPOTrainer):
    """The methods by which the layers of PODSTrainer work together. Here each of them does nothing."""

    rollouts: Any = None  # the record of the latest generation
    _selects = False  # whether a layer keeps m of n rollouts

    def _enter_phase(self, phase: str) -> None:
        """Called when a phase of a step begins (`PHASES`)."""

    def _running_phase(self) -> str | None:
        """Return the phase that runs, None between steps and where no layer counts them."""

    def _saved_values(self) -> dict[str, Any]:
        """Return what a checkpoint needs of a layer, as plain data and tensors."""
        return {}

    def _restore_values(self, values: Mapping[str, Any], rollouts: Mapping[str, Any] | None) -> None:
        """Restore what `_saved_values` returned, and the saved record of a generation that is still to be trained."""


@cache
def check_overrides(trainer_class: type) -> None:
    """Check that the methods that a layer marks with `override` exist in TRL's trainer, with the same parameters.

    An override that takes `*args` or `**kwargs` has to have the first parameters in common.

    Raises:
        UserError: the method, its parameters here and those expected, and the versions to install; or who has replaced
            TRL's trainer by one of its own.
    """
    owner = GRPOTrainer.__module__
    if not owner.startswith("trl."):
        raise UserError(
            f"{owner} had replaced TRL's GRPOTrainer when PODSTrainer was imported, which cannot be built on it. Begin "
            "the script with: from pods_rl import PODSConfig, PODSTrainer"
        )
    for name, method in vars(trainer_class).items():
        if not getattr(method, "__override__", False) or name in vars(Layer):
            continue
        parameters = inspect.signature(method).parameters.values()
        expected = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        takes_others = len(parameters) > len(expected)  # *args or **kwargs
        trl_method = getattr(GRPOTrainer, name, None)
        if trl_method is None:
            installed: list[str] = []
            difference = "that method does not exist"
        else:
            installed = list(inspect.signature(trl_method).parameters)
            difference = f"it is {name}({', '.join(installed)})"
        if takes_others:
            installed = installed[: len(expected)]
        if installed != expected:
            raise UserError(
                f"PODSTrainer overrides GRPOTrainer.{name}({', '.join(expected)}), but in the installed trl "
                f"{trl.__version__} and transformers {transformers.__version__} {difference}: {_install_tested()}"
            )


def check_kernel(*, on_cpu: bool) -> None:
    """Raise UserError if TRL cannot compute log-probabilities on the device of a trainer."""
    kernel = trl_utils._ChunkedLogProbFunction  # of TRL 1.15 None where Triton is not installed
    needs_triton = not hasattr(trl_utils, "_use_triton")  # by which TRL 1.16 chooses between Triton and torch
    needs_gpu = kernel is not None and needs_triton and kernel.__module__.startswith("trl.")
    if kernel is None or (needs_gpu and (on_cpu or not torch.accelerator.is_available())):
        raise UserError(
            f"trl {trl.__version__} computes log-probabilities with Triton, which needs a GPU and its own package. "
            "From 1.16 on TRL does it without: pip install 'trl>=1.16,<1.17'"
        )


def is_overridden(trainer: TRLTrainer, names: Iterable[str]) -> bool:
    """Return whether a user's subclass, or the trainer itself, replaces one of these methods."""
    for name in names:
        if name in vars(trainer):
            return True
        owner = next(cls for cls in type(trainer).__mro__ if name in vars(cls))
        if owner not in GRPOTrainer.__mro__ and not owner.__module__.startswith(_OURS):
            return True
    return False


def refuse_unsupported(arguments: Mapping[str, Any]) -> None:
    """Raise for arguments of TRL's constructor that PODSTrainer does not support.

    Raises:
        TypeError: `args` is not a PODSConfig.
        UserError: tools with ZeRO-3.
    """
    config = arguments["args"]
    if not isinstance(config, PODSConfig):
        raise TypeError(
            f"PODSTrainer needs args of type PODSConfig, got {type(config).__name__}: "
            "PODSConfig takes the same fields, plus num_rollouts"
        )
    if config.use_vllm or not is_deepspeed_zero3_enabled():
        return
    for name in ("tools", "environment_factory"):
        if not arguments.get(name):
            continue
        raise UserError(
            f"{name} cannot be used with DeepSpeed's ZeRO-3 without vLLM: every turn gathers the weights on all "
            "processes, and some have more turns than others, so the run would hang. Use use_vllm, ZeRO-2 or FSDP2."
        )


# -- what is replaced for a time, and put back at the end --------------------------------------------------------------


@contextmanager
def replacing(holder: Any, **values: Any) -> Iterator[None]:
    """Replace attributes or methods of an object or a module while the context is open."""
    # Its own, and not those of its class: afterwards a method is again the one of the class.
    attributes = vars(holder)
    replaced = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(replaced)


def parsing_by(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[None]:
    """Let TRL read turns of the policy with its `parse_response` as `change` returns it."""
    return replacing(grpo_trainer, parse_response=change(grpo_trainer.parse_response))


def printing_escaped() -> AbstractContextManager[None]:
    """Let TRL print its table of completions escaped, since text of a policy can steer a terminal."""
    show: Callable[..., None] = grpo_trainer.print_prompt_completions_sample

    def escaped(values: Sequence[Any]) -> list[Any]:
        return [change_text(value, plain_text) for value in values]

    def show_escaped(
        prompts: Sequence[Any], completions: Sequence[Any], *numbers: Any, extra: Mapping[str, Sequence[Any]]
    ) -> None:
        columns = {plain_text(name): escaped(values) for name, values in extra.items()}
        show(escaped(prompts), escaped(completions), *numbers, extra=columns)

    return replacing(grpo_trainer, print_prompt_completions_sample=show_escaped)


def room_in_vllm(at_once: int) -> AbstractContextManager[None]:
    """Give colocated vLLM `at_once` as its `max_num_seqs`: TRL would give it the rows of the update."""
    build = grpo_trainer.VLLMGeneration

    def with_room(**settings: Any) -> Any:
        return build(**settings | {"max_num_seqs": at_once})

    return replacing(grpo_trainer, VLLMGeneration=with_room)
