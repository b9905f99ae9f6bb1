"""Configurations of ``accelerate launch``: those in the package, their processes, and what they need.

Does not import torch.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ..errors import UserError
from ..text import describe, suggest
from ..yaml_files import read_yaml
from .catalog import local_path

MOST_PROCESSES = 1024  # of one launch on one machine
_SHIPPED = Path(__file__).parent.parent / "recipes" / "accelerate"


def accelerate_configs() -> dict[str, Path]:
    """Return the accelerate configurations in the package, by name."""
    return {path.stem: path for path in sorted(_SHIPPED.glob("*.yaml"))}


def find_accelerate_config(path_or_name: str) -> Path:
    """Return the file of an accelerate configuration; raise UserError with the nearest name if there is none."""
    path, shipped = local_path(path_or_name), accelerate_configs()
    if path.is_file():
        return path.resolve()
    if path_or_name not in shipped:
        raise UserError(
            f"accelerate: {path_or_name} is neither a file nor a shipped configuration."
            f"{suggest(path_or_name, shipped)} Expected a YAML file that `accelerate config` wrote, or one of "
            f"{', '.join(shipped)}."
        )
    return shipped[path_or_name]


def accelerate_processes(config: Path) -> int:
    """Return how many processes an accelerate configuration starts; raise UserError if the number is wrong."""
    count = read_yaml(config)[0].get("num_processes", 1)
    if not isinstance(count, int) or not 1 <= count <= MOST_PROCESSES:
        raise UserError(
            f"{config}: num_processes: got {describe(count)}, expected a whole number from 1 to {MOST_PROCESSES}."
        )
    return count


def check_accelerate(config: Path, *, on_cpu: bool) -> None:
    """Raise UserError if an accelerate configuration is not supported, or needs a library or a GPU that is missing.

    Args:
        config: the file.
        on_cpu: whether the recipe sets `use_cpu`.
    """
    values, _ = read_yaml(config)
    kind = str(values.get("distributed_type"))
    if kind == "FSDP":
        version = (values.get("fsdp_config") or {}).get("fsdp_version", 1)
        if version != 2:
            raise UserError(f"{config}: fsdp_version: got {version!r}, expected 2 (FSDP2).")
    if kind == "DEEPSPEED" and find_spec("deepspeed") is None:
        raise UserError(
            f"{config.stem} needs deepspeed, which is not installed: pip install '.[deepspeed]' in a checkout."
        )
    if kind == "DEEPSPEED" and on_cpu:
        raise UserError(
            f"{config.stem}: DeepSpeed runs on GPUs only, and use_cpu is true: unset use_cpu, or choose "
            "--accelerate_config fsdp2 or ddp."
        )
