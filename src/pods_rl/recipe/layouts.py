"""How an accelerate configuration lays a policy over its processes: read from its file, before torch is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from .reading import read_yaml

_ZERO = {  # what DeepSpeed's stages share out
    0: (),
    1: ("optimizer states",),
    2: ("gradients", "optimizer states"),
    3: ("weights", "gradients", "optimizer states"),
}


class Layout(NamedTuple):
    """What the processes of an accelerate configuration share.

    `name` is what people call it; `shared` is what each process holds a part of, nothing for DDP; `library` must be
    installed besides; `on_cpu` says whether it runs without a GPU.
    """

    name: str
    shared: tuple[str, ...]
    library: str | None = None
    on_cpu: bool = True

    def describe(self) -> str:
        """What a process holds, for people.

        >>> Layout("ZeRO-2", ("gradients", "optimizer states")).describe()
        'ZeRO-2: each process holds a part of gradients and optimizer states, the rest whole'
        """
        if not self.shared:
            return f"{self.name}: each process holds the whole model and its optimizer"
        *first, last = self.shared
        parts = f"{', '.join(first)} and {last}" if first else last
        rest = ", the rest whole" if len(self.shared) < 3 else ""
        return f"{self.name}: each process holds a part of {parts}{rest}"

    @property
    def missing_library(self) -> str | None:
        """What must be installed before it can be used, as a sentence; None where nothing is missing."""
        if self.library is None or find_spec(self.library) is not None:
            return None
        return f"{self.name} needs {self.library}, which is not installed: pip install 'pods-rl[{self.library}]'."


def accelerate_layout(config: Path) -> Layout:
    """The layout of an accelerate configuration; raises UserError where the file is no such thing."""
    values, _ = read_yaml(config)
    kind = str(values.get("distributed_type"))
    if kind == "DEEPSPEED":
        stage = _zero_stage(values.get("deepspeed_config") or {}, config)
        return Layout(f"ZeRO-{stage}", _ZERO[stage], "deepspeed", on_cpu=False)
    if kind == "FSDP":
        version = (values.get("fsdp_config") or {}).get("fsdp_version", 1)
        if version != 2:
            raise UserError(f"{config}: fsdp_version: got {version!r}, expected 2 (FSDP2); 1 is not supported.")
        return Layout("FSDP2", _ZERO[3])
    return Layout("DDP", ())


def _zero_stage(settings: Mapping[str, Any], config: Path) -> int:
    """The stage in accelerate's own words, or in the file of DeepSpeed's that it names."""
    own = settings.get("deepspeed_config_file")
    try:
        stage = (
            json.loads(Path(own).read_text())["zero_optimization"]["stage"] if own else settings.get("zero_stage", 2)
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{config}: deepspeed_config_file: {own} gives no zero_optimization.stage ({error})."
        ) from error
    if stage not in _ZERO:
        raise UserError(f"{config}: zero_stage: got {stage!r}, expected one of {', '.join(map(str, _ZERO))}.")
    return int(stage)


def check_layout(config: Path, *, on_cpu: bool) -> None:
    """Raises UserError where an accelerate configuration cannot be used: a library is missing, or a GPU.

    Args:
        on_cpu: whether the recipe says `use_cpu`.
    """
    layout = accelerate_layout(config)
    if layout.missing_library:
        raise UserError(f"{config.stem}: {layout.missing_library}")
    if on_cpu and not layout.on_cpu:
        raise UserError(
            f"{config.stem}: {layout.name} runs on GPUs only, and use_cpu is true: leave use_cpu out, or choose "
            "--accelerate_config fsdp2 or ddp."
        )
