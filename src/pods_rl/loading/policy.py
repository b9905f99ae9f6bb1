"""Load a policy and its tokenizer from their files, and check that these are whole."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import ModelConfig, get_quantization_config

from ..errors import UserError, first_line, hub_problem
from ..recipe import Recipe
from ..runs.files import check_regular
from .folders import ADAPTER_CONFIG, Policy, weight_files


def check_policy(path: str, revision: str = "main") -> None:
    """Check that a policy's files are complete and consistent, without reading its weights. Takes about a second.

    Raises UserError if a file is missing, truncated or a pickle, or if config.json does not match the weights.
    """
    folder = Path(path)
    for file in folder.glob("*"):
        check_regular(file)
    with _one_line(f"model_name_or_path = {path}"):
        if folder.is_dir():
            files = weight_files(folder)
            if (folder / ADAPTER_CONFIG).is_file():
                for file in files:
                    safe_open(file, framework="pt")  # reads the header and compares the file's length with it
                adapter = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
                check_policy(adapter["base_model_name_or_path"], revision)
                return
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        if not config.architectures:
            raise ValueError("config.json names no architecture")
        if getattr(config, "quantization_config", None) is not None:
            return  # its library loads quantised weights in its own format
        kind = getattr(transformers, config.architectures[0], AutoModelForCausalLM)
        # On the device "meta" transformers compares names and shapes, and reads no weights.
        _, info = kind.from_pretrained(
            path,
            revision=revision,
            device_map="meta",
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(f"{len(missing)} of its weights are missing, such as {missing[0]}")
        mismatched = sorted(key[0] for key in info["mismatched_keys"])
        if mismatched:
            raise ValueError(
                f"{len(mismatched)} of its weights have another shape than config.json says, such as {mismatched[0]}"
            )


def load_policy(policy: Policy, recipe: Recipe, device: torch.device) -> PreTrainedModel | PeftModel:
    """Load a model with the recipe's precision, attention and quantisation, and its adapter, which is not merged.

    No code of the model's repository is run.

    Raises UserError if the files do not match, or lack weights: transformers and PEFT would draw these at random.
    """
    options = load_options(recipe)
    options["revision"] = None  # the files are local
    name = policy.name
    if policy.adapter is not None:
        name += f" with {policy.adapter_name}"
    with _one_line(name):
        model, info = AutoModelForCausalLM.from_pretrained(
            policy.model, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
        )
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}")
        if policy.adapter is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "Found missing adapter keys")
                model = PeftModel.from_pretrained(model, str(policy.adapter))
    if options.get("quantization_config") is None:  # bitsandbytes places a quantised model itself
        model.to(device)
    return model


def load_tokenizer(path: str | Path, revision: str = "main") -> PreTrainedTokenizerBase:
    """Load a tokenizer that pads on the left, as generation needs; raises UserError if its files are not complete."""
    options = {"trust_remote_code": False, "padding_side": "left", "truncation_side": "left"}
    with _one_line(f"The tokenizer in {path}"):
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, **options)
        if not tokenizer("1")["input_ids"]:  # without its files transformers makes an empty one
            raise ValueError("it has no vocabulary")
    return tokenizer


def load_options(recipe: Recipe) -> dict[str, Any]:
    """Return keywords of `from_pretrained` for a policy: revision, precision, attention, quantisation if set."""
    model = ModelConfig(**recipe.model_arguments())
    options = {
        "revision": model.model_revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        "quantization_config": get_quantization_config(model),
    }
    return {name: value for name, value in options.items() if value is not None}


def uses_bf16(settings: Mapping[str, Any], *, on_cpu: bool) -> bool:
    """Return whether a policy computes in bf16: as `bf16` of a recipe says, or else on a GPU that has it in hardware.

    On a CPU the default is float32, which generated 1.3 times faster, even where the processor has bf16 instructions.
    """
    if settings.get("bf16") is not None:
        return bool(settings["bf16"])
    if settings.get("fp16") or on_cpu:
        return False
    return torch.cuda.is_bf16_supported(including_emulation=False)  # a T4 or V100 emulates it


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """In this context, an error of transformers, PEFT or safetensors becomes a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each library raises errors of its own
        problem = hub_problem(error)
        if problem:
            raise UserError(
                f"{what} is not in the local cache, and the hub cannot be reached ({problem}). Check the network, or "
                "name a local folder."
            ) from error
        raise UserError(
            f"{what} cannot be loaded: {first_line(error)} Expected all files of a causal language model that "
            "transformers knows."
        ) from error
