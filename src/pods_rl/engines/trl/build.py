"""From a recipe and a task to a trainer that is ready to train."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, inject_adapter_in_model
from torch.nn import Linear
from transformers import AutoConfig, AutoModelForCausalLM
from trl import ModelConfig, get_peft_config

from ...errors import UserError
from ...policies.files import policy_path
from ...policies.loading import has_bf16, load_options, load_tokenizer
from ...recipe import Recipe
from ...recipe.reading import short
from ...recipe.recipe import checkpoint_keys
from ...tasks import Task
from .config import PODSConfig
from .refusals import lossy_cast
from .scoring import reward_functions
from .trainer import PODSTrainer

# A run keeps its own files; TRL writes what it is asked for and nothing else.
_NO_PICKLE = {"use_safetensors": True}
_QUIET = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}


def build_trainer(recipe: Recipe, task: Task, output_dir: Path) -> PODSTrainer:
    """The trainer a recipe describes: policy, tokenizer, rewards and data; nothing is trained yet.

    Args:
        recipe: checked already.
        task: what to train on.
        output_dir: where TRL's checkpoints go.
    """
    with _refusals_told(recipe):
        return _build(recipe, task, output_dir)


def _build(recipe: Recipe, task: Task, output_dir: Path) -> PODSTrainer:
    arguments = engine_arguments(recipe)
    model = ModelConfig(**recipe.model_arguments())
    path = policy_path(str(model.model_name_or_path))
    options = load_options(recipe)
    quantization = options.pop("quantization_config", None)  # TRL takes it apart
    arguments["model_init_kwargs"] = dict(arguments.get("model_init_kwargs") or {}) | options | _NO_PICKLE
    adapter = get_peft_config(model)
    if adapter is not None:
        check_adapter(adapter, path, model.model_revision)
    trainer = PODSTrainer(
        model=path,
        reward_funcs=reward_functions(recipe, task),
        args=PODSConfig(str(output_dir), **arguments, reward_weights=list(task.rewards.values())),
        train_dataset=task.train,
        processing_class=load_tokenizer(path, model.model_revision),
        quantization_config=quantization,
        peft_config=adapter,
    )
    if doubt := lossy_cast(trainer):
        raise UserError(doubt)
    trainer.recipe_keys = checkpoint_keys(recipe.values)
    return trainer


@contextmanager
def _refusals_told(recipe: Recipe) -> Iterator[None]:
    """Inside, a value that TRL, transformers or peft refuses is a mistake in the recipe: one line, the cause kept."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, ImportError, NotImplementedError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        keys = [key for key in recipe.given if re.search(rf"\b{key}\b", said)] or list(recipe.given)
        raise UserError(
            f"{recipe.source}: the trainer refuses this recipe: {short(said, 400)} Look at {', '.join(keys[:20])}."
        ) from error


def check_adapter(adapter: PeftConfig, path: str, revision: str = "main") -> None:
    """Raises UserError where an adapter names layers that the policy does not have; no weights are loaded."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, revision=revision))
    layers = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, Linear)}
    try:
        inject_adapter_in_model(adapter, model)
    except ValueError as error:
        raise UserError(
            f"lora_target_modules = {adapter.target_modules}: {short(str(error), 200)} Expected some of "
            f"{', '.join(sorted(layers - {'lm_head'}))}, or all-linear."
        ) from error


def engine_arguments(recipe: Recipe) -> dict[str, Any]:
    """PODSConfig's keywords with what the machine decides: CPU or not, bf16 or not."""
    arguments = recipe.engine_arguments()
    if save_wanted(recipe):
        arguments = {k: v for k, v in _QUIET.items() if k != "save_strategy"} | arguments
    else:
        arguments = _QUIET | arguments
    # Every weight takes part in each pass; looking for those that do not would cost a walk through the graph.
    arguments.setdefault("ddp_find_unused_parameters", False)
    if not torch.cuda.is_available():
        arguments.setdefault("use_cpu", True)
    if arguments.get("bf16") is None:
        # With continuous batching TRL would turn float32 weights into bf16 for good.
        kept = not arguments.get("use_transformers_continuous_batching") or recipe.values.get("dtype") == "bfloat16"
        arguments["bf16"] = kept and not arguments.get("fp16") and has_bf16(bool(arguments.get("use_cpu")))
    return arguments


def save_wanted(recipe: Recipe) -> bool:
    """Whether the recipe asks for checkpoints before the final one."""
    return "save_steps" in recipe.given or "save_strategy" in recipe.given
