"""``pods doctor``: whether this machine can train, and what a recipe would do on it."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from ..errors import UserError
from ..text import console, safe_text

if TYPE_CHECKING:
    from ..planning.batching import BatchPlan
    from ..recipe import Recipe
    from .train import Launch

TESTED_TRL = ("1.16", "1.16")  # first and last version the tests have run with
_PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "math-verify", "pyarrow")
_EXTRAS = ("vllm", "bitsandbytes", "deepspeed")
_GIB = 2**30
_LOOKS = {"ok": "green", "note": "yellow", "bad": "red"}


class Finding(NamedTuple):
    """One line of the doctor: ``bad`` means that training cannot work."""

    grade: Literal["ok", "note", "bad"]
    what: str
    value: str


def doctor(
    context: typer.Context,
    config: Annotated[str | None, typer.Option(help="Show what a step of this recipe handles.")] = None,
    recipe_name: Annotated[
        str | None, typer.Option("--recipe", metavar="NAME", help="The same, by the name of a shipped recipe.")
    ] = None,
    num_processes: Annotated[
        int | None,
        typer.Option(
            "--num_processes", "--num-processes", metavar="K", min=1, help="Check a launch of so many processes."
        ),
    ] = None,
    accelerate_config: Annotated[
        str | None,
        typer.Option("--accelerate_config", "--accelerate-config", metavar="NAME", help="As `pods train` takes it."),
    ] = None,
) -> None:
    """Check whether this machine can train.

    Looks at versions, processor, disk and the files of the package; with a recipe shows the batch plan and the memory
    it will take, and with --num_processes how it lies over them.

    \b
    Examples:
      pods doctor
      pods doctor tiny-pods --num_rollouts 128
      pods doctor my.yaml --num_processes 8
    """
    from ..recipe import load_recipe
    from ..recipe.reading import parse_words, short
    from ..rewards import check_rewards
    from .train import find_config, find_launch, show_plan

    launch = find_launch(num_processes, accelerate_config)
    processes = launch and launch.processes
    named, given = parse_words(context.args, recipe_name if config is None else config)
    if named is None and given:
        raise UserError(
            f"--{short(next(iter(given)))} sets a key of a recipe, and none is named: name one, as in "
            "`pods doctor tiny-pods --num_rollouts 128`."
        )
    recipe = None
    if named is not None:
        recipe = load_recipe(
            find_config(named if recipe_name is None else config, recipe_name), given, processes=processes
        )
    findings = [*check_versions(), *check_torch(), *check_machine(), *check_package()]
    if recipe is not None and recipe.missing_library:
        findings.append(Finding("bad", "recipe", recipe.missing_library))
    if recipe is not None:
        try:
            check_rewards(recipe.values)
        except UserError as error:
            findings.append(Finding("bad", "reward", str(error)))
    if launch:
        findings += check_launch(launch, on_cpu=bool(recipe and recipe.values.get("use_cpu")))
    out = console()
    for grade, what, value in findings:
        out.print(f"[{_LOOKS[grade]}]{grade:<4}[/{_LOOKS[grade]}]  {what:<16} {safe_text(value)}")
    if recipe is not None:
        out.print()
        plan = recipe.batch_plan(processes)
        show_plan(plan)
        out.print()
        show_memory(recipe, plan)
    if any(finding.grade == "bad" for finding in findings):
        raise typer.Exit(1)


def show_memory(recipe: Recipe, plan: BatchPlan) -> None:
    """Print what each phase holds at its peak, reckoned from the policy's config.json, and what would lower it."""
    import torch

    from ..planning.memory import GENERATION, UPDATE, Shape, advice, estimate, read_config
    from ..recipe.checks import cpu_has_bf16

    out, values = console(), recipe.every_value()
    try:
        revision = str(values.get("model_revision") or "main")
        shape = Shape.of(read_config(str(values["model_name_or_path"]), revision))
    except UserError as error:
        out.print(f"[yellow]Note:[/yellow] {safe_text(error)}")
        return
    on_cpu = bool(values.get("use_cpu")) or not torch.cuda.is_available()
    bf16 = bool(
        values.get("fp16") or (values["bf16"] if values.get("bf16") is not None else not on_cpu or cpu_has_bf16())
    )
    expected = estimate(values, shape, plan, bf16=bf16, on_cpu=on_cpu)
    out.print(f"{'memory, GiB':<20} {GENERATION:>10} {UPDATE:>10}   estimated, for each process")
    for part in expected.parts:
        if part.generation or part.update:
            sizes = [f"{size / _GIB:.3f}" if size else "" for size in (part.generation, part.update)]
            out.print(f"{part.name:<20} {sizes[0]:>10} {sizes[1]:>10}".rstrip())
    generation, update = (expected.total(phase) / _GIB for phase in (GENERATION, UPDATE))
    out.print(f"{'together':<20} {generation:>10.3f} {update:>10.3f}   {expected.phase} peaks")
    given = "max_prompt_length" if values.get("max_prompt_length") else "assumed"
    out.print(f"Prompts of {expected.prompt} tokens ({given}). Python and its libraries take about 0.5 GiB more.")
    if values["use_vllm"]:
        out.print(f"vLLM takes {values['vllm_gpu_memory_utilization']:.0%} of a device where colocated.")
    for change in advice(values, shape, plan, expected.phase, bf16=bf16, on_cpu=on_cpu):
        out.print(f"{'less':<20} {safe_text(change.settings)}: {change.left / _GIB:.3f}")


def check_versions() -> Iterator[Finding]:
    """Python, the packages we stand on, and TRL against the versions that were tested."""
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    for name in _PACKAGES:
        version = _version(name)
        if version is None:
            yield Finding("bad", name, "not installed: pip install pods-rl")
        elif name == "trl" and not _tested(version):
            yield Finding("note", name, f"{version}; tested with {' to '.join(dict.fromkeys(TESTED_TRL))}")
        else:
            yield Finding("ok", name, version)
    for name in _EXTRAS:
        yield Finding("ok", name, _version(name) or "not installed (optional)")


def check_torch() -> Iterator[Finding]:
    """Device, precision and threads."""
    from ..recipe.checks import cpu_has_bf16

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
        yield Finding("note", "device", "CPU only: fine for the tiny policy; set use_cpu: true")
        bf16 = cpu_has_bf16()
    words = {True: "yes", False: "no: training runs in float32", None: "unknown"}
    yield Finding("ok" if bf16 else "note", "bf16", words[bf16])
    yield Finding("ok", "CPU threads", str(torch.get_num_threads()))


def check_launch(launch: Launch, *, on_cpu: bool) -> Iterator[Finding]:
    """Whether so many processes have a device each, what they would talk over, and what each would hold."""
    import torch

    from ..recipe import accelerate_sharding

    layout = accelerate_sharding(launch.config)
    gpus = 0 if on_cpu else torch.cuda.device_count()
    wanted = f"{launch.processes} with {launch.config.stem}"
    if gpus == 0:
        yield Finding("note", "processes", f"{wanted}: on the CPU, over gloo; each wants cores of its own")
    elif gpus < launch.processes:
        yield Finding("bad", "processes", f"{wanted}, but {gpus} GPU{'s' if gpus > 1 else ''}: lower --num_processes")
    else:
        yield Finding("ok", "processes", f"{wanted}: a GPU each, over nccl")
    if layout.missing_library:
        yield Finding("bad", "layout", layout.missing_library)
    elif gpus == 0 and not layout.on_cpu:
        yield Finding("bad", "layout", f"{layout.name} runs on GPUs only: --accelerate_config fsdp2 or ddp run without")
    else:
        yield Finding("ok", "layout", layout.describe())


def check_machine() -> Iterator[Finding]:
    """Room on the disk that runs are written to."""
    free = shutil.disk_usage(Path.cwd()).free / _GIB
    grade: Literal["ok", "note"] = "ok" if free > 5 else "note"
    yield Finding(grade, "disk", f"{free:.1f} GiB free in {Path.cwd()}")


def check_package() -> Iterator[Finding]:
    """The recipes and the policy that are shipped, and the command itself."""
    from ..recipe import shipped_recipes
    from ..recipe.reading import read_yaml

    for name, path in shipped_recipes().items():
        try:
            read_yaml(path)
        except UserError as error:
            yield Finding("bad", "recipe", f"{name}: {error}")
    yield Finding("ok", "recipes", ", ".join(shipped_recipes()) or "none")
    tiny = Path(__file__).parent.parent / "policies" / "tiny"
    missing = [file for file in ("config.json", "model.safetensors", "tokenizer.json") if not (tiny / file).is_file()]
    if missing:
        yield Finding("bad", "tiny policy", f"{', '.join(missing)} missing: install pods-rl again")
    else:
        yield Finding("ok", "tiny policy", f"{(tiny / 'model.safetensors').stat().st_size / 2**20:.1f} MiB")
    yield Finding("ok", "command", f"{sys.executable} -m pods_rl")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _tested(version: str) -> bool:
    """Whether a version lies in the tested range, compared by its first two numbers.

    >>> _tested("1.16.2"), _tested("1.9"), _tested("2.0")
    (True, False, False)
    """
    first, last = (tuple(map(int, end.split("."))) for end in TESTED_TRL)
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    return first <= numbers <= last
