"""From a recipe to its task, its checks, and a trainer that is ready to train and publishes its checkpoints."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch.utils.data import DataLoader, TensorDataset
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, get_scheduler
from transformers.generation import logits_process as processors
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils import is_liger_kernel_available
from trl import ModelConfig, get_peft_config

from ..distributed.processes import quiet_libraries
from ..engines.trl import PODSTrainer
from ..engines.trl.compat import standing_in
from ..engines.trl.config import PODSConfig, check_prompts
from ..engines.trl.stability import is_out_of_memory
from ..errors import UserError
from ..policies import policy_path
from ..policies.loading import (
    check_policy,
    encode,
    has_bf16,
    load_options,
    load_tokenizer,
    render,
    template_options,
    tool_options,
)
from ..policies.turns import TurnReader
from ..recipe import Recipe
from ..recipe.recipe import DATA_KEYS, checkpoint_keys
from ..rewards import Reward
from ..rewards import score as score_texts
from ..rewards.verifier import default_pool
from ..runs.checkpoints import clean, prepare, prune, publish, staging
from ..sandbox import Scores
from ..tasks import Fitted, Task, fit_prompts, last_turn, load_task
from ..text import counted, describe, short, suggest

RewardFunction = Callable[..., Scores]

_NO_PICKLE = {"use_safetensors": True}
# A run writes its own files; TRL writes only what the recipe sets.
_QUIET = {"report_to": "none", "disable_tqdm": True}
_STEPS = 100  # of a schedule without a number of steps
_SAMPLING = {  # what `generate` makes of each setting, and the value that turns it off
    "temperature": (processors.TemperatureLogitsWarper, 1.0),
    "top_k": (processors.TopKLogitsWarper, 0),
    "top_p": (processors.TopPLogitsWarper, 1.0),
    "min_p": (processors.MinPLogitsWarper, None),
    "repetition_penalty": (processors.RepetitionPenaltyLogitsProcessor, 1.0),
}


def fitted_task(recipe: Recipe) -> tuple[Task, Fitted | None]:
    """Return the recipe's task as its policy reads it (`fit_prompts`): plain text if there is no chat template,
    and without training prompts that are too long.

    Raises UserError if the task cannot be made, has no training prompts, or has tools that the policy cannot call.
    """
    settings = recipe.task_settings()
    model = recipe.model_arguments()
    task = training_task(recipe)
    where = policy_path(str(model["model_name_or_path"])), model.get("model_revision") or "main"
    check_policy(*where)
    tokenizer = load_tokenizer(*where)
    options = {**template_options(recipe), **tool_options(tokenizer, task)}
    return fit_prompts(
        task,
        chat=tokenizer.chat_template is not None,
        limit=settings["max_prompt_length"],
        count_tokens=lambda prompt: len(encode(tokenizer, prompt, render(tokenizer, prompt, **options))),
        render=lambda prompt: render(tokenizer, prompt, **options),
    )


def training_task(recipe: Recipe) -> Task:
    """Return the recipe's task; raise UserError if it cannot be made, or has no training prompts."""
    settings = recipe.task_settings()
    task = load_task(settings, reward_errors=recipe.values["reward_errors"])
    if len(task.train) == 0:
        raise UserError(
            f"task {task.name} has {counted(len(task.test), 'prompt')} to test and none to train on: data_dir = "
            f"{settings['data_dir']} holds no training file. Put its train.jsonl there, or remove data_dir from the "
            "recipe"
        )
    return task


def build_trainer(recipe: Recipe, task: Task, output_dir: Path) -> RunTrainer:
    """Build the trainer of a recipe, with policy, tokenizer, rewards and data; it does not start training.

    Args:
        recipe: a checked recipe.
        task: the task to train on.
        output_dir: the folder for TRL's checkpoints.
    """
    with as_recipe_errors(recipe):
        arguments = engine_arguments(recipe)
        model = ModelConfig(**recipe.model_arguments())
        path = policy_path(str(model.model_name_or_path))
        options = load_options(recipe)
        quantization = options.pop("quantization_config", None)  # TRL expects it separately
        arguments["model_init_kwargs"] = dict(arguments.get("model_init_kwargs") or {}) | options | _NO_PICKLE
        config = PODSConfig(str(output_dir), **arguments, reward_weights=list(task.rewards.values()))
        check_prompts(config, len(task.train))  # again in the trainer, but here before a model loads
        tokenizer = load_tokenizer(path, model.model_revision)
        turns = TurnReader(tokenizer, template_options(recipe))
        trainer = RunTrainer(
            model=path,
            reward_funcs=reward_functions(recipe, task, turns),
            args=config,
            train_dataset=task.train,
            processing_class=tokenizer,
            quantization_config=quantization,
            peft_config=get_peft_config(model),
            tools=list(task.tools) or None,
            environment_factory=task.environment_factory,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.recipe_keys = checkpoint_keys(recipe.values)
        return trainer


_WRONG_VALUE = (ValueError, TypeError, AttributeError, LookupError, ImportError, NotImplementedError)


@contextmanager
def as_recipe_errors(recipe: Recipe, kinds: tuple[type[Exception], ...] = _WRONG_VALUE) -> Iterator[None]:
    """Turn an error of TRL, transformers or peft about a value into a UserError of one line, with the cause.

    The line names the keys that are wrong, if they can be found (`_wrong_keys`).

    Args:
        recipe: a loaded recipe.
        kinds: the exceptions that mean a wrong value.
    """
    try:
        yield
    except UserError as error:
        raise error if str(error).startswith(recipe.source) else UserError(f"{recipe.source}: {error}") from error
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        if is_out_of_memory(error):
            raise UserError(
                f"{recipe.source}: out of memory while the policy loads ({short(said, 200)}). Use a smaller model, "
                "dtype: bfloat16, or an adapter (use_peft: true) with a lower lora_r."
            ) from error
        if not isinstance(error, kinds):
            raise
        settings = [f"{key} = {_as_written(recipe.given[key])}" for key in _wrong_keys(recipe, said)]
        rejected = " with ".join(settings) or "this recipe"
        raise UserError(f"{recipe.source}: the trainer rejects {rejected}: {short(said, 400)}") from error


def _as_written(value: object) -> str:
    return short(value) if isinstance(value, str) else describe(value)


def _wrong_keys(recipe: Recipe, reason: str) -> list[str]:
    """Return the keys of a recipe that an error is about; empty if they cannot be found.

    A key counts if the recipe is accepted without it. If no single key decides, these are the keys that the error
    names, or whose value it quotes.

    Args:
        recipe: a recipe that was rejected.
        reason: the error's text.
    """
    if _is_rejected(recipe):
        keys = [key for key in recipe.given if not _is_rejected(recipe.without(key))]
        if keys:
            return keys
    words = reason.lower().replace(" ", "_")
    keys = [key for key in recipe.given if re.search(rf"(?<![a-z_]){key}(?![a-z_])", words)]
    return keys or [key for key, value in recipe.given.items() if _quotes(reason, value)]


def _is_rejected(recipe: Recipe) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            _construct(recipe, processes=1)
    except Exception:
        return True
    return False


def _quotes(reason: str, value: object) -> bool:
    """Return whether an error quotes a text of a recipe, or an entry of a list of texts."""
    entries = value if isinstance(value, list) else [value]
    return any(isinstance(entry, str) and len(entry) > 1 and entry in reason for entry in entries)


def engine_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return PODSConfig's keywords, with those that depend on the machine: use_cpu and bf16."""
    saves = "save_steps" in recipe.given or "save_strategy" in recipe.given
    arguments = _QUIET | ({} if saves else {"save_strategy": "no"}) | recipe.engine_arguments()
    arguments["push_to_hub"] = False  # the run pushes its final policy itself, after training
    # Every parameter is used in each pass, so DDP need not search the graph for unused ones.
    arguments.setdefault("ddp_find_unused_parameters", False)
    if not torch.cuda.is_available():
        arguments.setdefault("use_cpu", True)
    if arguments.get("bf16") is None:
        # With continuous batching TRL would permanently convert float32 weights to bf16.
        kept = not arguments.get("use_transformers_continuous_batching") or recipe.values.get("dtype") == "bfloat16"
        arguments["bf16"] = kept and not arguments.get("fp16") and has_bf16(bool(arguments.get("use_cpu")))
    return arguments


def check_task(
    recipe: Recipe, config: PODSConfig | None, loaded: dict[str, tuple[Task, Fitted | None]] | None = None
) -> tuple[str, ...]:
    """Load the prompts, gold answers, rewards and tokenizer of a recipe as a run does; return what the run would note.

    What is on a hub that cannot be reached is not checked, and a note says so.

    Args:
        recipe: a loaded recipe.
        config: from `check_engine`. If None, the number of prompts is not compared with the batch.
        loaded: tasks that earlier calls have loaded, to which this one adds its own; arms mostly share theirs.

    Raises:
        UserError: what a run would raise before its first step.
    """
    quiet_libraries()
    data_problem = recipe.hub_problem(DATA_KEYS)
    if data_problem:
        return (f"The data are not checked: {data_problem}",)
    policy_problem = recipe.hub_problem(("model_name_or_path",))
    loaded = {} if loaded is None else loaded
    key = repr((recipe.task_settings(), recipe.model_arguments(), recipe.values.get("chat_template_kwargs")))
    if key not in loaded:
        loaded[key] = (training_task(recipe), None) if policy_problem else fitted_task(recipe)
    task, skipped = loaded[key]
    if config is not None:
        with as_recipe_errors(recipe):
            check_prompts(config, len(task.train))
    notes = list(task.notes)
    if skipped:
        notes.append(str(skipped))
    if policy_problem:
        notes.append(f"The policy is not checked: {policy_problem}")
    return tuple(notes)


def check_engine(recipe: Recipe, processes: int = 1) -> PODSConfig:
    """Construct the configurations, sampling, optimizer, schedule and trackers of a recipe, without its policy.

    Returns the configuration, for one process that trains the rows of all.

    Args:
        recipe: a loaded recipe.
        processes: the number of processes that train it.

    Raises:
        UserError: whatever one of them raises, as one line.
    """
    # the trainer shows the warnings again
    with warnings.catch_warnings(action="ignore"), as_recipe_errors(recipe, (Exception,)):
        return _construct(recipe, processes)


def _construct(recipe: Recipe, processes: int) -> PODSConfig:
    """Construct what the settings of a recipe configure, without its policy; raise what rejects them."""
    arguments = engine_arguments(recipe)
    arguments["per_device_train_batch_size"] *= processes  # the batch of all of them, in this one
    for key in ("model_init_kwargs", "generation_kwargs"):  # JSON, as on TRL's command line
        if isinstance(arguments.get(key), str):
            arguments[key] = json.loads(arguments[key])
        if not isinstance(arguments.get(key), (dict, type(None))):
            raise UserError(f"{key}: expected a mapping, as in {{a: 1}}, or its JSON.")
    model = ModelConfig(**recipe.model_arguments())
    get_peft_config(model)
    config = PODSConfig("unused", **arguments)
    _check_sampling(config)
    _check_optimizer(config)
    _check_packages(config)
    _check_attention(model.attn_implementation)
    DataLoader(
        TensorDataset(torch.zeros(1)),
        num_workers=config.dataloader_num_workers,
        prefetch_factor=config.dataloader_prefetch_factor,
        persistent_workers=config.dataloader_persistent_workers,
    )
    for callback in get_reporting_integration_callbacks(recipe.values.get("report_to") or []):
        callback()
    return config


def _check_optimizer(config: PODSConfig) -> None:
    layer = torch.nn.Linear(1, 1)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(config, layer)
    optimizer = kind(**{"params": layer.parameters(), **options})
    steps = config.max_steps if config.max_steps > 0 else _STEPS
    get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs or {}),
    )


def _check_packages(config: PODSConfig) -> None:
    """Raise for what transformers and accelerate look up only when training begins."""
    if config.use_liger_kernel and not is_liger_kernel_available():
        raise UserError("use_liger_kernel needs liger-kernel, not installed here: pip install liger-kernel")
    if config.torch_compile:
        plugin = TorchDynamoPlugin(backend=config.torch_compile_backend or "inductor")
        mode = config.torch_compile_mode
        if mode is not None and plugin.backend == DynamoBackend.INDUCTOR:
            modes = list(torch._inductor.list_mode_options())
            if mode not in modes:
                raise UserError(f"torch_compile_mode: got {mode!r}, expected one of {', '.join(modes)}.")


def _check_attention(name: str | None) -> None:
    """Raise what transformers raises for an unknown attention, or one whose package is missing.

    A model of one small layer stands for the policy.
    """
    if name is None:
        return
    if "/" in name and find_spec("kernels") is None:
        raise UserError(f"attn_implementation: {name} needs kernels, not installed here: pip install kernels")
    if "/" not in name:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
        with torch.device("meta"):
            LlamaForCausalLM._from_config(LlamaConfig(num_hidden_layers=1, **sizes), attn_implementation=name)


def _check_sampling(config: PODSConfig) -> None:
    own = dict(config.generation_kwargs or {})
    known = GenerationConfig().to_dict()
    for name in own:
        if name not in known and not config.use_vllm:
            raise UserError(f"generation_kwargs: {name}: `generate` has no such argument.{suggest(name, known)}")
    settings = {name: own.get(name, getattr(config, name)) for name in _SAMPLING}
    for name, (processor, off) in _SAMPLING.items():
        if settings[name] != off and settings[name] is not None:
            processor(settings[name])
    lengths = {"max_new_tokens": config.max_completion_length, "cache_implementation": config.cache_implementation}
    GenerationConfig(do_sample=True, **lengths | settings | own).validate()


def reward_functions(recipe: Recipe, task: Task, turns: TurnReader | None = None) -> list[RewardFunction]:
    """Return the task's rewards in TRL's signature, in the task's order; raise UserError for an unknown reward.

    `turns` reads completions as `trl_reward` says.
    """
    limit = recipe.values["max_completion_length"]
    seconds = recipe.values["reward_seconds"]
    return [trl_reward(task.reward(name), limit=limit, seconds=seconds, turns=turns) for name in task.rewards]


def trl_reward(
    reward: Reward, *, limit: int, seconds: float | None = None, turns: TurnReader | None = None
) -> RewardFunction:
    """Return a reward in TRL's signature: it takes completions and the `answer` column and returns a list of floats.

    A reward that uses verifier processes logs the answers whose verification timed out or crashed. A user's reward
    scores each completion separately; an error or timeout gives a RewardFailure, handled as `reward_errors` says.

    Args:
        limit: most tokens of a completion, for `overlong`.
        seconds: limit of a user's reward for one completion, in a process that is then killed. If None, there is no
            limit, and the reward runs in this process.
        turns: reads a completion with the thought that its prompt opens. If None, prompts open none.
    """

    def score(
        completions: list[Any],
        answer: list[str],
        completion_ids: list[list[int]],
        prompts: Sequence[Any] = (),
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> Scores:
        pool = default_pool()
        before = pool.timeouts, pool.crashes
        scores: Scores
        if reward.reads == "tokens":
            scores = reward.of_lengths([len(ids) for ids in completion_ids], limit)
        else:
            if turns is None:
                texts = [last_turn(completion) for completion in completions]
            else:
                texts = turns.texts(prompts, completions, completion_ids)
            scores = score_texts(reward, texts, answer, seconds)
        if reward.verifies and log_metric is not None:
            processes = PartialState().num_processes  # TRL averages over them, so this is the sum
            for name, earlier in zip(("timeouts", "crashes"), before, strict=True):
                log_metric(f"pods/verifier_{name}", float((getattr(pool, name) - earlier) * processes))
        # To TRL, NaN is None, "does not apply"; here the whole rollout cannot be scored, which inf marks.
        return [math.inf if isinstance(x, float) and math.isnan(x) else x for x in scores]

    score.__name__ = reward.name
    score.range = reward.range  # type: ignore[attr-defined]
    return score


# -- checkpoints, published at once ------------------------------------------------------------------------------------


class RunTrainer(PODSTrainer):
    """The trainer of a run: its checkpoints appear at once and complete, with a manifest of hashes.

    All processes write under ``.saving/``, the first publishes the folder, then the older ones are pruned. TRL decides
    their content.
    """

    recipe_keys: Mapping[str, Any] = MappingProxyType({})  # of the recipe, for manifests

    def publish_folder(self, target: Path, write: Callable[[Path], None]) -> None:
        """Have every process write its part of a folder, then publish the complete folder with a manifest.

        If a process cannot write, the error is raised there and ``target`` is unchanged.

        Args:
            target: ``checkpoints/checkpoint-4``, ``checkpoints/final``.
            write: writes the process's part into the given folder, which exists.
        """
        accelerator, publishes = self.accelerator, self.args.should_save
        recipe = {"keys": dict(self.recipe_keys)}
        about = {"step": self.state.global_step, "processes": accelerator.num_processes, "recipe": recipe}
        try:
            if publishes:
                prepare(target)
            accelerator.wait_for_everyone()
            write(staging(target))
            accelerator.wait_for_everyone()
            if publishes:
                publish(target, about)
        except BaseException:
            if publishes:
                clean(target.parent)  # free the space of a half-written folder
            raise
        accelerator.wait_for_everyone()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        save = super()._save_checkpoint
        target = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")

        def write(folder: Path) -> None:
            # TRL writes in the output folder, which is replaced by .saving/.
            with (
                standing_in(self, _get_output_dir=lambda trial: str(folder.parent)),
                cache_on(self.accelerator.unwrap_model(self.model)),
            ):
                save(model, trial)
            if self.args.should_save:  # a pickle, which nothing reads: config.yaml has the settings
                (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)

        self.publish_folder(target, write)
        if self.args.should_save:
            prune(target.parent, self.args.save_total_limit or 0)


def save_policy(trainer: PODSTrainer, folder: Path) -> None:
    """Write policy and tokenizer as safetensors and JSON. Call it on every process; the first one writes.

    Sharded weights (FSDP2, ZeRO-3) are gathered in the first process's memory. For LoRA, only the adapter is written.

    Args:
        folder: made if missing; files of the same names are replaced.
    """
    sharded = trainer._dist.is_fsdp or trainer._dist.is_zero3
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None
    if trainer.is_world_process_zero():
        policy = trainer.accelerator.unwrap_model(trainer.model)
        if weights:  # tied weights were gathered as separate tensors
            for tied in getattr(policy, "all_tied_weights_keys", ()):
                weights.pop(tied, None)
        with cache_on(policy):
            policy.save_pretrained(folder, state_dict=weights)
        trainer.processing_class.save_pretrained(folder)


@contextmanager
def cache_on(policy: Any) -> Iterator[None]:
    """Save `use_cache` as the policy generates: transformers' trainer turns it off in the configuration to train."""
    as_loaded = getattr(getattr(policy, "generation_config", None), "use_cache", True)
    with standing_in(policy.config, use_cache=as_loaded):
        yield
