"""``pods doctor``: check whether this machine can train, and show what a recipe does on it."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import typer

from ..errors import UserError
from ..text import console, safe_text
from .starting import Launch, find_launch
from .train import AccelerateConfig, Config, Processes, RecipeName, named_recipe, show_plan

if TYPE_CHECKING:
    from ..recipe import Recipe

TESTED_TRL = ("1.16", "1.16")  # first and last version that the tests ran with
_PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "math-verify", "pyarrow")
_EXTRAS = ("vllm", "bitsandbytes", "deepspeed")
_GIB = 2**30
_STYLES = {"ok": "green", "note": "yellow", "bad": "red"}


class Finding(NamedTuple):
    """One line of the output: ``bad`` means that training cannot work."""

    grade: Literal["ok", "note", "bad"]
    what: str
    value: str


def doctor(
    context: typer.Context,
    config: Config = None,
    recipe_name: RecipeName = None,
    num_processes: Processes = None,
    accelerate_config: AccelerateConfig = None,
) -> None:
    """Check whether this machine can train; the exit code is 1 if it cannot.

    Checks versions, processor, disk and the files of the package. With a recipe, also shows its batch plan and the
    memory it needs; with --num_processes, how the plan is split over the processes. Set any key of the recipe with
    --KEY VALUE.

    \b
    Examples:
      pods doctor
      pods doctor tiny-pods --num_rollouts 128
      pods doctor my.yaml --num_processes 8
    """
    from ..recipe import load_recipe
    from ..text import short

    launch = find_launch(num_processes, accelerate_config)
    named, keys = named_recipe(context.args, config, recipe_name)
    if named is None and keys:
        raise UserError(
            f"--{short(next(iter(keys)))} sets a key of a recipe, but no recipe is given: name one, as in "
            "`pods doctor tiny-pods --num_rollouts 128`."
        )
    recipe = None if named is None else load_recipe(named, keys, processes=launch and launch.processes)
    findings = [*check_versions(), *check_torch(), *check_machine(), *check_package()]
    if recipe is not None:
        findings += check_recipe(recipe)
    if launch:
        findings += check_launch(launch, on_cpu=bool(recipe and recipe.values.get("use_cpu")))
    out = console()
    for grade, what, value in findings:
        out.print(f"[{_STYLES[grade]}]{grade:<4}[/{_STYLES[grade]}]  {what:<16} {safe_text(value)}")
    if recipe is not None:
        plan = recipe.batch_plan(launch and launch.processes)
        out.print()
        show_plan(plan)
        out.print()
        out.print("\nWhich n and m are quickest here? pods plan measures it: pods plan " + safe_text(named))
    if any(finding.grade == "bad" for finding in findings):
        raise typer.Exit(1)


def check_versions() -> Iterator[Finding]:
    """Check Python, the required packages, and TRL's version against the tested ones."""
    from ..distributed.processes import version

    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    for name in _PACKAGES:
        found = version(name)
        if found is None:
            yield Finding("bad", name, "not installed: pip install . in a checkout of pods-rl")
        elif name == "trl" and not _tested(found):
            yield Finding("note", name, f"{found}; tested with {' to '.join(dict.fromkeys(TESTED_TRL))}")
        else:
            yield Finding("ok", name, found)
    for name in _EXTRAS:
        yield Finding("ok", name, version(name) or "not installed (optional)")


def _tested(version: str) -> bool:
    """Return whether a version is in the tested range, by its first two numbers.

    >>> _tested("1.16.2"), _tested("1.9"), _tested("2.0")
    (True, False, False)
    """
    first, last = (tuple(map(int, end.split("."))) for end in TESTED_TRL)
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    return first <= numbers <= last


def check_torch() -> Iterator[Finding]:
    """Report device, precision and threads."""

    from ..policies.files import cpu_has_bf16

    try:
        import torch
    except ImportError as error:
        yield Finding("bad", "device", f"torch cannot be imported: {error}")
        return
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            yield Finding("ok", f"GPU {index}", f"{found.name}, {found.total_memory / _GIB:.0f} GiB")
        bf16 = torch.cuda.is_bf16_supported()
    else:
        yield Finding("note", "device", "CPU only: enough for the tiny policy; set use_cpu: true")
        bf16 = cpu_has_bf16()
    words = {True: "yes", False: "no: training runs in float32", None: "unknown"}
    yield Finding("ok" if bf16 else "note", "bf16", words[bf16])
    yield Finding("ok", "CPU threads", str(torch.get_num_threads()))


def check_machine() -> Iterator[Finding]:
    """Report the free space on the disk that runs are written to."""
    free = shutil.disk_usage(Path.cwd()).free / _GIB
    yield Finding("ok" if free > 5 else "note", "disk", f"{free:.1f} GiB free in {Path.cwd()}")


def check_package() -> Iterator[Finding]:
    """Check the shipped recipes and policies, and the command itself."""
    from ..policies import tiny_policy_path
    from ..recipe import shipped_recipes
    from ..recipe.catalog import SHIPPED
    from ..yaml_files import read_yaml

    for name, path in shipped_recipes().items():
        try:
            read_yaml(path)
        except UserError as error:
            yield Finding("bad", "recipe", f"{name}: {error}")
    yield Finding("ok", "recipes", ", ".join(shipped_recipes()) or "none")
    for name in SHIPPED:
        folder = tiny_policy_path(name)
        files = ("config.json", "model.safetensors", "tokenizer.json")
        if missing := [file for file in files if not (folder / file).is_file()]:
            yield Finding("bad", f"{name} policy", f"{', '.join(missing)} missing: install pods-rl again")
        else:
            yield Finding("ok", f"{name} policy", f"{(folder / 'model.safetensors').stat().st_size / 2**20:.1f} MiB")
    yield Finding("ok", "command", f"{sys.executable} -m pods_rl")


def check_recipe(recipe: Recipe) -> Iterator[Finding]:
    """Report missing libraries of a recipe, and rewards of the user that cannot be used."""
    from ..rewards import check_rewards

    if recipe.missing_library:
        yield Finding("bad", "recipe", recipe.missing_library)
    try:
        check_rewards(recipe.values)
    except UserError as error:
        yield Finding("bad", "reward", str(error))


def check_launch(launch: Launch, *, on_cpu: bool) -> Iterator[Finding]:
    """Check that each process has a device; report how processes communicate and what each holds."""
    import torch

    from ..recipe import accelerate_sharding

    layout = accelerate_sharding(launch.config)
    gpus = 0 if on_cpu else torch.cuda.device_count()
    wanted = f"{launch.processes} with {launch.config.stem}"
    if gpus == 0:
        yield Finding("note", "processes", f"{wanted}: on the CPU, over gloo; each needs its own cores")
    elif gpus < launch.processes:
        yield Finding("bad", "processes", f"{wanted}, but {gpus} GPU{'s' if gpus > 1 else ''}: lower --num_processes")
    else:
        yield Finding("ok", "processes", f"{wanted}: a GPU each, over nccl")
    if layout.missing_library:
        yield Finding("bad", "layout", layout.missing_library)
    elif gpus == 0 and not layout.on_cpu:
        yield Finding("bad", "layout", f"{layout.name} runs on GPUs only: use --accelerate_config fsdp2 or ddp")
    else:
        yield Finding("ok", "layout", f"{layout.name}: the processes shard {layout.shared}")
