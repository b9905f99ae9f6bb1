"""``pods train``: one run from one recipe. Other commands share its options and its recipe lookup."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand

from ..distributed import get_rank, get_world_size
from ..distributed.signals import Stop, exit_code, stop_on_signals
from ..errors import UserError
from ..text import console, plain_text, safe_text
from .starting import Launch, find_launch, last_words, launch_run, loaded_trainer

if TYPE_CHECKING:
    from ..engines.trl.batching import BatchPlan
    from ..recipe import Recipe


Config = Annotated[str | None, Option(help="A recipe: a YAML file, or a name that `pods recipes` lists.")]
RecipeName = Annotated[
    str | None, Option("--recipe", metavar="NAME", help="A shipped recipe, or <experiment>-<arm>; no NAME: list them.")
]
Processes = Annotated[
    int | None,
    Option("--num_processes", metavar="K", min=1, help="Use K processes on this machine, started through accelerate."),
]
AccelerateConfig = Annotated[
    str | None,
    Option("--accelerate_config", metavar="NAME",
           help="How the processes share the model: a shipped configuration or a file of accelerate's. [default: ddp]"),
]  # fmt: skip
Output = Annotated[Path | None, Option(help="Directory of the run. [default: runs/<recipe>-<date>-<time>]")]
Resume = Annotated[
    bool,
    Option("--resume", help="Resume the run in --output from its last whole checkpoint; without --output, the newest "
                            "run of the recipe under runs/."),
]  # fmt: skip
AllowChanged = Annotated[
    bool, Option("--allow_changed_recipe", help="With --resume: accept a checkpoint of another recipe.")
]
DryRun = Annotated[
    bool, Option("--dry_run", help="Check and show the recipe, or each arm, and its batch plan; then stop.")
]
Force = Annotated[bool, Option("--force", help="Replace a file that this command did not write.")]
Explain = Annotated[str | None, Option(metavar="KEY", help="Show type, default and meaning of a recipe key.")]


class KeyCommand(TyperCommand):
    """A command that takes keys of a recipe: the shell completes them, their values, and names of recipes."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        from ..recipe import shipped_arms, shipped_recipes
        from ..recipe.schema import RULES, TASKS, fields

        last = ctx.args[-1] if ctx.args else ""
        key = last.lstrip("-").replace("-", "_")
        if incomplete.startswith("-"):
            names = [f"--{name}" for name in fields()]
        elif last.startswith("--") and key in fields():
            names = [*{"rule": RULES, "task": TASKS}.get(key, fields()[key].choices)]
        else:
            names = [*shipped_recipes(), *shipped_arms()]
        found = [SimpleNamespace(value=n, type="plain", help=None) for n in names if n.startswith(incomplete)]
        return [*super().shell_complete(ctx, incomplete), *found]


class RecipeCommand(KeyCommand):
    """A command that takes a recipe: `--recipe` without a NAME lists the names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        pairs = itertools.zip_longest(args, args[1:], fillvalue="--")
        bare = [word == "--recipe" and after.startswith("--") for word, after in pairs]
        return super().parse_args(ctx, ["--recipe=" if alone else word for word, alone in zip(args, bare, strict=True)])


def train(
    context: typer.Context,
    config: Config = None,
    recipe_name: RecipeName = None,
    output: Output = None,
    resume: Resume = False,
    allow_changed_recipe: AllowChanged = False,
    num_processes: Processes = None,
    accelerate_config: AccelerateConfig = None,
    dry_run: DryRun = False,
    explain: Explain = None,
) -> None:
    """Train a policy from a recipe: a YAML file or the name of a shipped one.

    Set any key of the recipe with --KEY VALUE; the names are TRL's own. To turn PODS on for a GRPO recipe, add
    --num_rollouts 64. A signal ends the run after its step and saves a checkpoint for --resume: Ctrl-C (exit code 130),
    SIGTERM (143), SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU (128 plus the signal's number).

    \b
    Examples:
      pods train tiny-pods
      pods train --recipe gsm8k-qwen2.5-3b-pods --data_dir gsm8k/ --dry_run
      pods train --config my.yaml --num_rollouts 64 --learning_rate 5e-6 --output runs/mine
      pods train --config my.yaml --num_processes 8 --dry_run
      pods train --config my.yaml --num_processes 8 --accelerate_config fsdp2
      pods train --output runs/mine --resume
      pods train --explain num_rollouts
    """
    from ..recipe import load_recipe
    from ..training.resume import newest_run

    if explain is not None:
        _show_key(explain)
        return
    with stoppable() as stop:
        launch = find_launch(num_processes, accelerate_config)
        named, keys = named_recipe(context.args, config, recipe_name, resumed=output if resume else None)
        if named is None:
            raise UserError("Missing recipe. Pass a name that `pods recipes` lists, or a file: pods train tiny-pods")
        recipe = load_recipe(named, keys, processes=launch and launch.processes)
        if dry_run:
            check_engine(recipe, launch and launch.processes)
            print(plain_text(recipe.to_yaml()))
            show_plan(recipe.batch_plan(launch and launch.processes))
            note_missing(recipe)
            return
        _check_machine(recipe, launch)
        output = output or (newest_run(recipe) if resume else _default_output(recipe))
        again = {"resume": resume, "allow_changed_recipe": allow_changed_recipe}
        _check_output(recipe, output, launch, **again)
        with last_words(output, launch):
            if launch:
                status = launch_run(launch, named, keys, output, again, stop)
            else:
                status = loaded_trainer(recipe, output)(recipe, output, stop=stop, **again).status
        if code := exit_code(status, default=stop.code):
            raise typer.Exit(code)


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Inside, signals ask the work to stop; a signal that ends the command at once sets the exit code."""
    with stop_on_signals() as stop:
        try:
            yield stop
        except KeyboardInterrupt as interrupt:
            console(stderr=True).print(f"Stopped: {interrupt}.")
            raise typer.Exit(getattr(interrupt, "code", 130)) from None


def named_recipe(
    words: list[str], config: str | None, name: str | None, resumed: Path | None = None
) -> tuple[str | None, dict[str, str | bool]]:
    """Return the recipe that a command names, and the keys that it sets.

    Args:
        words: the words of the command line that are not options of the command.
        config: a name or a file (--config). Without it and `name`, a word alone names the recipe.
        name: a shipped recipe (--recipe).
        resumed: the run whose recipe is used if none is named.
    """
    from ..recipe.reading import parse_words
    from ..runs import Run

    named, keys = parse_words(words, name if config is None else config)
    if name is not None:
        return _shipped(name, config), keys
    if named is None and resumed is not None:
        named = str(Run.open(resumed).path / "config.yaml")
    return named, keys


def _shipped(name: str, config: str | None) -> str:
    """Check the name of a shipped recipe of one run; without a name, the error lists them all."""
    from ..recipe import shipped_arms, shipped_recipes
    from ..recipe.reading import local_path
    from ..text import suggest
    from ..yaml_files import read_yaml

    if config is not None:
        raise UserError(f"--recipe {name} and --config {config}: give one of them.")
    known = [recipe for recipe, path in shipped_recipes().items() if "arms" not in read_yaml(path)[0]]
    known += shipped_arms()
    if not name:
        raise UserError("\n  ".join(["--recipe needs a name: choose one of", *known]))
    if name not in known:
        near = suggest(name, known) or f" `pods recipes` lists all {len(known)}."
        file = f" For a file, use --config {name}." if local_path(name).is_file() else ""
        raise UserError(f"--recipe {name}: no shipped recipe has this name.{file or near}")
    return name


def show_plan(plan: BatchPlan) -> None:
    """Print what a step generates and trains."""
    for label, value in plan.describe():
        console().print(f"{label:<20} {safe_text(value)}")


def check_engine(recipe: Recipe, processes: int | None = None) -> None:
    """Raise UserError if TRL, transformers, PEFT or torch reject the recipe; unless one that it needs is missing."""
    if recipe.missing_library is None:
        from ..training.checking import check_engine as check

        check(recipe, processes or 1)


def note_missing(recipe: Recipe) -> None:
    """Print which libraries a recipe still needs before it can train on this machine."""
    if recipe.missing_library:
        console().print(f"[yellow]Note:[/yellow] {safe_text(recipe.missing_library)}")


def _show_key(key: str) -> None:
    from ..recipe import explain
    from ..recipe.schema import fields
    from ..text import suggest

    key = key.lstrip("-").replace("-", "_")
    if key not in fields():
        raise UserError(f"Unknown recipe key {key}.{suggest(key, fields())}")
    print(explain(key))


def _check_machine(recipe: Recipe, launch: Launch | None) -> None:
    """Raise UserError, before torch and the model are loaded, if the recipe cannot train here."""
    from ..recipe import check_accelerate
    from ..rewards import check_rewards

    recipe.check_installed()
    recipe.check_reachable()
    if launch:  # each process checks its rewards itself
        check_accelerate(launch.config, on_cpu=bool(recipe.values.get("use_cpu")))
    else:
        check_rewards(recipe.values)


def _default_output(recipe: Recipe) -> Path:
    if get_world_size() > 1:
        raise UserError("Several processes need one directory for the run: give it with --output.")
    return Path("runs") / f"{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}"


def _check_output(
    recipe: Recipe, output: Path, launch: Launch | None, *, resume: bool, allow_changed_recipe: bool
) -> None:
    """Raise UserError, before torch and the model are loaded, if the run cannot use this directory."""
    from ..runs import RunWriter
    from ..training.resume import find_start

    if resume:
        processes = launch.processes if launch else get_world_size()
        find_start(recipe, output, processes=processes, changed=allow_changed_recipe, hashes=False)
    if get_rank() == 0:
        with RunWriter(output, resume=resume) as writer:
            if launch and resume:  # otherwise the status of the earlier run would decide the exit code
                writer.write_status("running", reason="loading")
