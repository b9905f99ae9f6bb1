"""Configurations of ``accelerate launch``: which are shipped, how many processes each starts, and what they shard.

Read from the file, before torch is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from ..text import describe, suggest
from ..yaml_files import read_yaml
from .reading import local_path

MOST_PROCESSES = 1024  # of one launch on one machine
_SHIPPED = Path(__file__).parent.parent / "recipes" / "accelerate"
_SHARED = {  # what the processes shard, by ZeRO's stage; FSDP2 shards as much as stage 3
    0: "nothing",
    1: "optimizer states",
    2: "gradients and optimizer states",
    3: "weights, gradients and optimizer states",
}


class Sharding(NamedTuple):
    """What the processes of an accelerate configuration shard.

    `name` is the usual name; `shared` says what is sharded; `library` must be installed as well; `on_cpu` says whether
    it runs without a GPU.
    """

    name: str
    shared: str = "nothing"
    library: str | None = None
    on_cpu: bool = True

    @property
    def missing_library(self) -> str | None:
        """Return a sentence on the library that must be installed first; None if nothing is missing."""
        if self.library is None or find_spec(self.library) is not None:
            return None
        return (
            f"{self.name} needs {self.library}, which is not installed: pip install '.[{self.library}]' in a checkout."
        )


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
    """Return how many processes an accelerate configuration starts; raise UserError if it gives no number."""
    count = read_yaml(config)[0].get("num_processes", 1)
    if not isinstance(count, int) or not 1 <= count <= MOST_PROCESSES:
        raise UserError(
            f"{config}: num_processes: got {describe(count)}, expected a whole number from 1 to {MOST_PROCESSES}."
        )
    return count


def accelerate_sharding(config: Path) -> Sharding:
    """Return what an accelerate configuration shards; raise UserError if it is invalid or not supported."""
    values, _ = read_yaml(config)
    kind = str(values.get("distributed_type"))
    if kind == "DEEPSPEED":
        stage = _zero_stage(values.get("deepspeed_config") or {}, config)
        return Sharding(f"ZeRO-{stage}", _SHARED[stage], "deepspeed", on_cpu=False)
    if kind == "FSDP":
        version = (values.get("fsdp_config") or {}).get("fsdp_version", 1)
        if version != 2:
            raise UserError(f"{config}: fsdp_version: got {version!r}, expected 2 (FSDP2); 1 is not supported.")
        return Sharding("FSDP2", _SHARED[3])
    return Sharding("DDP")


def _zero_stage(settings: Mapping[str, Any], config: Path) -> int:
    """Return ZeRO's stage, from accelerate's own keys or from the DeepSpeed file that it names."""
    own = settings.get("deepspeed_config_file")
    try:
        stage = (
            json.loads(Path(own).read_text())["zero_optimization"]["stage"] if own else settings.get("zero_stage", 2)
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{config}: deepspeed_config_file: {own} gives no zero_optimization.stage ({error})."
        ) from error
    if stage not in _SHARED:
        raise UserError(f"{config}: zero_stage: got {stage!r}, expected one of {', '.join(map(str, _SHARED))}.")
    return int(stage)


def check_accelerate(config: Path, *, on_cpu: bool) -> None:
    """Raise UserError if an accelerate configuration needs a library or a GPU that is missing.

    Args:
        on_cpu: whether the recipe says `use_cpu`.
    """
    sharding = accelerate_sharding(config)
    if sharding.missing_library:
        raise UserError(f"{config.stem}: {sharding.missing_library}")
    if on_cpu and not sharding.on_cpu:
        raise UserError(
            f"{config.stem}: {sharding.name} runs on GPUs only, and use_cpu is true: unset use_cpu, or choose "
            "--accelerate_config fsdp2 or ddp."
        )
