"""What a process keeps in a checkpoint so that a run goes on exactly: tensors as safetensors, the rest as JSON.

Where a checkpoint falls between two generations, the rows still to be trained lie in it: m a prompt and never n, about
`24 T` bytes each (tokens and masks as int64, the old and, with `beta`, the reference log-probabilities as float32).
With m = 16 and T = 4096 that is 1.6 MB a prompt, whatever n is. The ledger's text of all n lies in it too: 17 MB a
prompt with n = 1024 completions of 4096 tokens. On the boundary of a generation, which is every step unless
`num_iterations` or `steps_per_generation` say otherwise, there is neither: a few hundred bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...errors import UserError
from .exchange import plain

_TENSOR = "__tensor__"  # stands for a tensor in the JSON


def slots_to_come(step: int, steps_per_generation: int, num_iterations: int) -> list[int]:
    """Which of a generation's micro-batches are still trained, or trained again, before the next generation.

    Args:
        step: micro-batches trained so far in the run.
        steps_per_generation: micro-batches of a generation.
        num_iterations: how often each of them is trained.

    Returns:
        Their numbers, ascending; none on the boundary of a generation.

    Example:
        >>> slots_to_come(3, 4, 1), slots_to_come(3, 4, 2), slots_to_come(8, 4, 2)
        ([3], [0, 1, 2, 3], [])
    """
    to_come = range(step, step - step % -(steps_per_generation * num_iterations))
    return sorted({at % steps_per_generation for at in to_come})


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A nest of mappings and lists with its tensors taken out, ready for JSON.

    Args:
        value: what to pack; a tuple comes back as a list.
        name: prefix of the tensors' names.
        tensors: gets a copy of each tensor, on the CPU and sharing memory with no other, as safetensors asks for.

    Example:
        >>> tensors = {}
        >>> pack([{"ids": torch.ones(2), "skip": False}], "buffer", tensors)
        [{'ids': {'__tensor__': 'buffer.0.ids'}, 'skip': False}]
        >>> tensors
        {'buffer.0.ids': tensor([1., 1.])}
    """
    if isinstance(value, Tensor):
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {key: pack(part, f"{name}.{key}", tensors) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [pack(part, f"{name}.{i}", tensors) for i, part in enumerate(value)]
    return value


def unpack(packed: Any, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> Any:
    """What `pack` was given, its tensors on `device`.

    Example:
        >>> unpack({"kept": {"__tensor__": "kept"}, "first": 0}, {"kept": torch.tensor([3])})
        {'kept': tensor([3]), 'first': 0}
    """
    if isinstance(packed, dict):
        if packed.keys() == {_TENSOR}:
            return tensors[packed[_TENSOR]].to(device)
        return {key: unpack(part, tensors, device) for key, part in packed.items()}
    if isinstance(packed, list):
        return [unpack(part, tensors, device) for part in packed]
    return packed


def write_state(folder: Path, process: int, values: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write one process's state into a checkpoint's folder; numbers that are not finite are kept."""
    if tensors:
        save_file(dict(tensors), _file(folder, process, "safetensors"))
    _file(folder, process, "json").write_text(json.dumps(values, default=plain), encoding="ascii")


def read_values(folder: Path, process: int, processes: int) -> dict[str, Any]:
    """The JSON part of a process's state.

    Args:
        folder: the checkpoint's.
        process: whose state.
        processes: how many there are now.

    Raises:
        UserError: the checkpoint was made by another number of processes, or holds no state to go on from exactly.
    """
    own, first = _file(folder, process, "json"), _file(folder, 0, "json")
    file = own if own.is_file() else first  # without a shared file system a node has those of its own processes
    values: dict[str, Any] = json.loads(file.read_text(encoding="ascii")) if file.is_file() else {}
    made_by = values.get("processes", processes)
    if made_by != processes:
        how = f"with --num_processes {made_by}" if made_by > 1 else "without --num_processes"
        raise UserError(
            f"{folder} was made by {made_by} process{'es' * (made_by > 1)} and {processes} would resume it: each has "
            f"its own rows and random state, so a run goes on with as many as it began with. Start it {how}."
        )
    if not own.is_file():
        raise UserError(
            f"{folder} cannot be resumed: it has no {own.name}, so it was saved with save_only_model, or by another "
            "trainer or version, and optimizer, random state or rollouts are missing. Resume from a checkpoint of "
            "`pods train` without save_only_model, or start a new run whose model_name_or_path is this folder."
        )
    return values


def read_tensors(folder: Path, process: int) -> dict[str, Tensor]:
    """The tensors of a process's state, on the CPU; none where there were none to write."""
    file = _file(folder, process, "safetensors")
    return load_file(file) if file.is_file() else {}


def _file(folder: Path, process: int, kind: str) -> Path:
    return folder / f"pods_state_{process}.{kind}"
