"""The policy that is evaluated: a model, on disk or on the hub, with or without a LoRA adapter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..policies.weights import WEIGHTS, weight_files, weights_hash
from ..recipe import Recipe

ADAPTER_CONFIG = "adapter_config.json"
_FILES = (*WEIGHTS, "*.json", "*.jinja", "*.model", "*.txt")  # what is fetched from the hub: no pickle, no code


@dataclass(frozen=True)
class Policy:
    """Where a policy is: the folders of the model and of its adapter, and what the user calls them."""

    name: str
    model: Path
    adapter_name: str | None = None
    adapter: Path | None = None

    @property
    def tokenizer(self) -> Path:
        """The folder with the tokenizer: the adapter's where it has one, since it was trained with that."""
        if self.adapter is not None and (self.adapter / "tokenizer_config.json").is_file():
            return self.adapter
        return self.model

    def hashes(self) -> dict[str, str | None]:
        """The sha256 of the weights of model and adapter."""
        return {
            "model_sha256": weights_hash(self.model),
            "adapter_sha256": weights_hash(self.adapter) if self.adapter is not None else None,
        }


def find_policy(model: str, adapter: str | None = None, *, revision: str = "main") -> Policy:
    """Find a policy's folders, fetching from the hub what is no path.

    Args:
        model: a local path, a hub id, or `tiny`; a folder with an adapter alone brings its base model along.
        adapter: a folder or hub id with a LoRA adapter for `model`.
        revision: of a model on the hub.

    Raises:
        UserError: it cannot be found, is no saved model, or its weights are no safetensors.
    """
    from ..engines.trl.build import policy_path

    folder = _folder(policy_path(model), "model", revision)
    if adapter is None and (folder / ADAPTER_CONFIG).is_file():
        base = _read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        if not base:
            raise UserError(f"{folder / ADAPTER_CONFIG} names no base model: give both, with --model BASE --adapter.")
        return find_policy(str(base), model, revision=revision)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{model} holds no config.json, so it is no saved model: expected one as transformers saves it."
        )
    weight_files(folder)
    if adapter is None:
        return Policy(model, folder)
    beside = _folder(adapter, "adapter", "main")
    if not (beside / ADAPTER_CONFIG).is_file():
        raise UserError(f"{adapter} holds no {ADAPTER_CONFIG}, so it is no adapter: expected one as PEFT saves it.")
    weight_files(beside)
    return Policy(model, folder, adapter, beside)


def load_policy(policy: Policy, recipe: Recipe, device: Any) -> tuple[Any, Any]:
    """The model, with its adapter beside it (not merged: what was trained is what is evaluated), and the tokenizer.

    Precision, attention and quantisation are the recipe's. No code of the model's repository is run.

    Raises UserError where the files do not fit together, or lack weights, which transformers and PEFT would draw at
    random.
    """
    import warnings

    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from ..engines.trl.build import load_options

    options = load_options(recipe) | {"revision": None}
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            policy.model, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
        )
        if missing := sorted(found["missing_keys"]):
            raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}")
        if policy.adapter is not None:
            from peft import PeftModel

            with warnings.catch_warnings():
                warnings.filterwarnings("error", "Found missing adapter keys")
                model = PeftModel.from_pretrained(model, str(policy.adapter))
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, UserWarning, SafetensorError) as error:
        raise UserError(
            f"{policy.name}{f' with {policy.adapter_name}' if policy.adapter else ''} cannot be loaded: "
            f"{type(error).__name__}: {error}. Expected a causal language model that transformers knows, with whole "
            "files."
        ) from error
    if options.get("quantization_config") is None:  # a quantised model is where it belongs already
        model.to(device)
    return model, load_tokenizer_of(policy)


def load_tokenizer_of(policy: Policy) -> Any:
    """The policy's tokenizer; raises UserError where it has none."""
    from ..engines.trl.build import load_tokenizer

    return load_tokenizer(str(policy.tokenizer))


def lora_rank(adapter: Path) -> int:
    """The largest rank of an adapter; raises UserError where its file does not say."""
    config = _read_json(adapter / ADAPTER_CONFIG)
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise UserError(f"{adapter / ADAPTER_CONFIG} gives the ranks {ranks}: expected those of a LoRA adapter.")
    return max(ranks)


def _folder(name: str, what: str, revision: str) -> Path:
    """A local folder, or the snapshot of a hub repository: no pickle is fetched."""
    from ..recipe.reading import looks_like_path

    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or looks_like_path(name):
        raise UserError(f"{what} {name}: there is no such directory (looked in {Path.cwd()}).")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except (OSError, HFValidationError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise UserError(
            f"{what} {name} is no folder here, and the hub did not give it ({type(error).__name__}: {reason}). Check "
            "the name, the network, and HF_TOKEN for one that needs it."
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}. Expected a JSON object.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object.")
    return value
