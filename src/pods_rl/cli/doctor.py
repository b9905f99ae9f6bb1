"""``pods doctor``: whether this machine can train, and what a recipe does on it; ``pods plan``: what its steps cost."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ..engines import TESTED
from ..errors import UserError
from ..recipe import load_recipe
from ..text import console, plain_text, safe_text
from ..yaml_files import dump_yaml
from .train import Config, named_recipe, show_fact, show_facts, stoppable, working

_TESTED_TRL = TESTED["trl"].rpartition(".")[0]
_NEEDED = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "latex2sympy2_extended", "pyarrow")
_OPTIONAL_PACKAGES = ("vllm", "bitsandbytes", "deepspeed")
_GIB = 2**30
_DISK_LEFT = 5.0  # GiB, below which a checkpoint of a small model may not fit
_STYLE_OF_KIND = {"ok": "green", "note": "yellow", "bad": "red"}
CheckResult = tuple[str, str, str]  # ok, note or bad; what was checked; its value


def doctor(context: typer.Context, config: Config = None) -> None:
    """Check whether this machine can train; the exit code is 1 if it cannot.

    Checks versions, devices and disk. With a recipe, also shows what is missing for it, its batch plan, and what its
    policy computes over prefix trees. Set any key of the recipe with --KEY VALUE. With a model, a folder or a name on
    the hub, shows what it computes over prefix trees.

    \b
    Examples:
      pods doctor
      pods doctor tiny-pods --num_rollouts 128
      pods doctor Qwen/Qwen3-0.6B
    """
    recipe = None
    is_model = False
    if context.args or config:
        named, keys = named_recipe(context, config)
        is_model = config is None and _is_model(named)
        if is_model:
            # a model alone is loaded with the settings of any recipe
            recipe = load_recipe("tiny-pods", keys | {"model_name_or_path": named})
        else:
            recipe = load_recipe(named, keys)
    results = list(check_packages())
    _show_results(results)  # before torch, whose import takes seconds and may fail
    with working("importing torch"):
        of_machine = list(check_machine())
    if recipe and recipe.missing_library:
        of_machine.append(("bad", "recipe", recipe.missing_library))
    _show_results(of_machine)
    results += of_machine
    if recipe and not recipe.missing_library:
        console().print()
        with working("loading the policy"):
            from ..distributed.processes import quiet_libraries
            from ..planning.trees import describe_trees

            quiet_libraries()
            try:
                facts = describe_trees(recipe)
            except UserError as error:
                if is_model:
                    raise  # there is nothing else to show; of a recipe there is its batch plan
                facts = [("prefix trees", f"not tried: {error}")]
        show_facts(facts)
    if recipe and not is_model:
        show_facts(recipe.batch_plan().describe())
        console().print(f"\nWhat do more rollouts cost here? Measure it: pods plan {safe_text(named)}")
    if any(kind == "bad" for kind, _, _ in results):
        raise typer.Exit(1)


def _is_model(name: str) -> bool:
    """Return whether a word names a model, in a folder or on the hub, and not a recipe."""
    if Path(name).is_dir():
        return (Path(name) / "config.json").is_file()
    return name.count("/") == 1 and Path(name).suffix not in (".yaml", ".yml")


def _show_results(results: Iterable[CheckResult]) -> None:
    for kind, name, value in results:
        show_fact(f"{kind:<4}  {name:<22} ", value, style=_STYLE_OF_KIND[kind])


def check_packages() -> Iterator[CheckResult]:
    """Check Python and the required packages, and compare TRL's version with the tested one."""
    from ..distributed.processes import version

    yield "ok", "python", f"{platform.python_version()} on {platform.platform()}"
    for name in _NEEDED:
        installed = version(name)
        if installed is None:
            yield "bad", name, "not installed: pip install . in a checkout of pods-rl"
        # With a dot at the end, 1.10 does not begin with 1.1.
        elif name == "trl" and not f"{installed}.".startswith(f"{_TESTED_TRL}."):
            yield "note", name, f"{installed}; tested with {_TESTED_TRL}"
        else:
            yield "ok", name, installed
    for name in _OPTIONAL_PACKAGES:
        yield "ok", name, version(name) or "not installed (optional)"


def check_machine() -> Iterator[CheckResult]:
    """Report devices, precision, threads, and the free space on the disk that runs are written to."""
    try:
        import torch
    except ImportError as error:
        yield "bad", "device", f"torch cannot be imported: {error}"
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield "ok", f"GPU {index}", f"{gpu.name}, {gpu.total_memory / _GIB:.0f} GiB"
    if not torch.cuda.is_available():
        yield "note", "device", "CPU only: enough for the shipped tiny policies"
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    yield "ok" if bf16 else "note", "bf16", "yes" if bf16 else "no: training runs in float32"
    yield "ok", "CPU threads", str(torch.get_num_threads())
    free = shutil.disk_usage(Path.cwd()).free / _GIB
    yield "ok" if free > _DISK_LEFT else "note", "disk", f"{free:.1f} GiB free in {Path.cwd()}"


def plan(
    context: typer.Context,
    config: Config = None,
    seconds: Annotated[float, Option(min=1, max=1e6, help="Seconds to measure, after loading.")] = 120,
) -> None:
    """Measure what a step of a recipe costs with more rollouts, by selection of each prompt and over the batch.

    Trains real steps with a learning rate of 0. All settings train the rows of the recipe; the first is plain GRPO.
    Prints how many fewer steps each setting must need to pay off, what our studies measured with about as many rows,
    and an experiment that settles it. Set any key of the recipe with --KEY VALUE.

    \b
    Examples:
      pods plan tiny-pods
      pods plan --config my.yaml --seconds 600
    """
    named, keys = named_recipe(context, config)
    recipe = load_recipe(named, keys)
    recipe.check_reachable()  # before torch loads
    from ..training.display import LiveLine

    with stoppable() as stop, stop.at_once(), LiveLine(console()) as line:
        line.begin("importing torch and TRL")
        from ..planning.measure import plan_recipe

        def show(text: str) -> None:
            line.work_on(text)
            line.show(text)

        result = plan_recipe(recipe, seconds, show=show)
    for text in result.lines():
        print(plain_text(text))
    print("\nTo settle it, save this as settings.yaml and run: pods compare --config settings.yaml")
    for text in result.experiment(named):
        print(plain_text(text))
    # Without a seed: the experiment has seeds.
    shared = {key: recipe.given[key] for key in keys if key in recipe.given and key != "seed"}
    if shared:
        print(plain_text(dump_yaml(shared)), end="")
