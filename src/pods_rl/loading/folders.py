"""The folders of a policy: its model and its LoRA adapter, and the hash of their weights. Does not import torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError, hub_problem
from ..policies import policy_path
from ..recipe.catalog import local_path, looks_like_path
from ..runs.files import check_regular

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors")  # what transformers and PEFT load
_DOWNLOADED = (*_WEIGHTS, "*.json", "*.jinja", "*.model", "*.txt")  # from the hub: no pickle, no code


@dataclass(frozen=True)
class Policy:
    """The folders of a model and of its adapter, and the names that the user gave them."""

    name: str
    model: Path
    adapter_name: str | None = None
    adapter: Path | None = None

    @property
    def tokenizer(self) -> Path:
        """The folder with the tokenizer: the adapter's if it has one, since it was trained with that."""
        if self.adapter is not None and (self.adapter / "tokenizer_config.json").is_file():
            return self.adapter
        return self.model

    def hashes(self) -> dict[str, str | None]:
        """The sha256 of the weights of model and adapter."""
        adapter_hash = None if self.adapter is None else weights_hash(self.adapter)
        return {"model_sha256": weights_hash(self.model), "adapter_sha256": adapter_hash}


def find_policy(model: str, adapter: str | None = None, *, revision: str = "main") -> Policy:
    """Find a policy's folders; a name that is not a local path is downloaded from the hub.

    A folder that holds an adapter alone names its base model. `revision` is of a model on the hub. Raises UserError if
    a folder is missing, or does not hold a saved model or adapter with safetensors weights.
    """
    folder = _folder(policy_path(model), "model", revision)
    if adapter is None and (folder / ADAPTER_CONFIG).is_file():
        file = folder / ADAPTER_CONFIG
        try:
            base_model = str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} names no base model ({error}): give both, with --model BASE --adapter.") from error
        return find_policy(base_model, model, revision=revision)
    _require(folder, "config.json", model, "a saved model, as transformers writes it")
    if adapter is None:
        return Policy(model, folder)
    adapter_folder = _folder(adapter, "adapter", "main")
    _require(adapter_folder, ADAPTER_CONFIG, adapter, "a saved adapter, as PEFT writes it")
    return Policy(model, folder, adapter, adapter_folder)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a saved model or adapter, sorted by name; raise UserError if there are none."""
    files = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))
    if not files:
        raise UserError(
            f"{folder} holds no weights as safetensors: expected model*.safetensors, as `pods train` saves them. A "
            "pickle (*.bin, *.pt) can run code when it is loaded. If you trust yours, model.save_pretrained(folder) of "
            "transformers converts it."
        )
    return files


def weights_hash(folder: Path) -> str:
    """Return the sha256 over names and contents of a folder's weight files, independent of the folder's path."""
    lines = ""
    for path in weight_files(folder):
        with path.open("rb", buffering=0) as file:
            lines += f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n"
    return hashlib.sha256(lines.encode("utf-8", "backslashreplace")).hexdigest()


def _folder(name: str, what: str, revision: str) -> Path:
    """Return a local folder, or the snapshot of a hub repository."""
    path = local_path(name)
    if path.is_dir():
        return path
    if path.exists() or looks_like_path(name):
        raise UserError(f"{what} {name}: there is no such directory (looked in {Path.cwd()}).")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_DOWNLOADED)))
    except (OSError, HFValidationError, ValueError) as error:
        problem = hub_problem(error)
        if problem:
            raise UserError(
                f"{what} {name} is not a local folder and not in the local cache, and the hub cannot be reached "
                f"({problem}). Check the network, or name a local folder."
            ) from error
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{what} {name} is not a local folder, and downloading it from the hub failed ({type(error).__name__}: "
            f"{reason}). Check the name, the network, and HF_TOKEN for a repository that needs it."
        ) from error


def _require(folder: Path, file: str, name: str, expected: str) -> None:
    for path in folder.glob("*"):
        check_regular(path)
    if not (folder / file).is_file():
        raise UserError(f"{name} holds no {file}: expected {expected}.")
    weight_files(folder)
