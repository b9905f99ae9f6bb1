"""From a recipe and a task to a trainer that is ready to train."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftConfig, inject_adapter_in_model
from safetensors import safe_open
from torch.nn import Linear
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, get_peft_config, get_quantization_config

from ...errors import UserError
from ...policies import TINY, tiny_policy_path
from ...policies.weights import weight_files
from ...recipe import Recipe
from ...recipe.checks import cpu_has_bf16
from ...recipe.reading import short
from ...recipe.recipe import checkpoint_keys
from ...tasks import Task
from .config import PODSConfig
from .generators import lossy_cast
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


def load_options(recipe: Recipe) -> dict[str, Any]:
    """Keywords of `from_pretrained` for a recipe's policy: revision, precision, attention, quantisation where set."""
    model = ModelConfig(**recipe.model_arguments())
    options = {
        "revision": model.model_revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        "quantization_config": get_quantization_config(model),
    }
    return {name: value for name, value in options.items() if value is not None}


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
        arguments["bf16"] = kept and not arguments.get("fp16") and bf16_here(bool(arguments.get("use_cpu")))
    return arguments


def save_wanted(recipe: Recipe) -> bool:
    """Whether the recipe asks for checkpoints before the final one."""
    return "save_steps" in recipe.given or "save_strategy" in recipe.given


def bf16_here(on_cpu: bool) -> bool:
    """Whether the processor multiplies bf16 matrices in hardware."""
    return bool(cpu_has_bf16()) if on_cpu else torch.cuda.is_bf16_supported()


def policy_path(name: str) -> str:
    """`tiny` is the policy in the package; anything else is a local path or a hub id."""
    return str(tiny_policy_path()) if name == TINY else name


def check_policy(path: str, revision: str = "main") -> None:
    """Check that a policy's files are whole and fit together, without reading its weights: it takes a second.

    Args:
        path: a folder, or a hub id, whose files are fetched.
        revision: of a model on the hub.

    Raises:
        UserError: a file is missing, torn or a pickle, or config.json and the weights do not fit together.
    """
    folder = Path(path)
    try:
        if folder.is_dir():
            files = weight_files(folder)
            if (folder / "adapter_config.json").is_file():
                for file in files:
                    safe_open(file, framework="pt")  # reads the header, and whether the file has its length
                adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
                return check_policy(adapter["base_model_name_or_path"], revision)
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        if not config.architectures:
            raise ValueError("config.json names no architecture")
        if getattr(config, "quantization_config", None) is not None:
            return  # loaded by a library of its own
        kind = getattr(transformers, config.architectures[0], AutoModelForCausalLM)
        options = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
        _, found = kind.from_pretrained(path, revision=revision, device_map="meta", **options)
        for what, names in (
            ("are missing", found["missing_keys"]),
            ("have another shape than config.json says", [key[0] for key in found["mismatched_keys"]]),
        ):
            if names:
                raise ValueError(f"{len(names)} of its weights {what}, such as {min(names)}")
    except UserError:
        raise
    except Exception as error:  # each file has a library of its own, with errors of its own
        raise UserError(
            f"model_name_or_path = {path} cannot be loaded: {first_line(error)} Expected a causal language model that "
            "transformers knows, with whole files."
        ) from error


def load_tokenizer(path: str, revision: str = "main") -> Any:
    """Load a tokenizer that pads on the left, as generation needs it; raises UserError where its files are torn."""
    sides = {"padding_side": "left", "truncation_side": "left"}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False, **sides)
        if not tokenizer("1")["input_ids"]:  # without its files transformers makes an empty one
            raise ValueError("it has no vocabulary")
    except Exception as error:
        raise UserError(f"The tokenizer in {path} cannot be loaded: {first_line(error)}") from error
    return tokenizer


def first_line(error: Exception) -> str:
    """The first line of what an error says, as a sentence."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return said if said.endswith((".", "!")) else f"{said}."
