"""The files a policy's weights are in: safetensors alone, and a hash that says which they were. No torch."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from ..errors import UserError

WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors")  # what transformers and PEFT load
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth")
_CHUNK = 2**22  # bytes read at once


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a saved model or adapter, by name.

    Raises UserError where there are none, and says so where the weights are a pickle, which can run code when loaded.
    """
    found = sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))
    if found:
        return found
    pickles = sorted(
        path.name
        for pattern in _PICKLES
        for path in folder.glob(pattern)
        if not any(path.match(name) for name in _NO_WEIGHTS)
    )
    if pickles:
        raise UserError(
            f"{folder} holds its weights as a pickle ({pickles[0]}), which can run code when it is loaded: expected "
            "*.safetensors. Convert it where you trust it: model.save_pretrained(folder) of transformers writes them."
        )
    raise UserError(f"{folder} holds no weights: expected model*.safetensors, as `pods train` saves them.")


def weights_hash(folder: Path) -> str:
    """The sha256 over names and contents of a folder's weight files; the same wherever the folder lies.

    Raises UserError as `weight_files` does.
    """
    whole = hashlib.sha256()
    for path in weight_files(folder):
        whole.update(
            f"{path.name} {_file_hash(path, path.stat().st_size, path.stat().st_mtime_ns)}\n".encode(
                "utf-8", "backslashreplace"
            )
        )
    return whole.hexdigest()


@lru_cache(maxsize=256)
def _file_hash(path: Path, size: int, changed: int) -> str:
    """The sha256 of a file; size and time of change are there to tell when a kept one no longer holds."""
    digest, chunk = hashlib.sha256(), bytearray(_CHUNK)
    view = memoryview(chunk)
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(chunk):
            digest.update(view[:read])
    return digest.hexdigest()
