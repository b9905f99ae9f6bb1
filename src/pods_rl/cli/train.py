"""``pods train``: one run from one recipe."""

from __future__ import annotations

import itertools
import os
import subprocess
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from ..errors import UserError
from ..terminal import console, plain_text, safe_text

if TYPE_CHECKING:
    from ..batching import BatchPlan
    from ..recipe import Recipe


class TrainCommand(TyperCommand):
    """`--recipe` without a name is asked for one too, rather than told off."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        pairs = itertools.zip_longest(args, args[1:], fillvalue="--")
        bare = [word == "--recipe" and after.startswith("--") for word, after in pairs]
        return super().parse_args(ctx, ["--recipe=" if alone else word for word, alone in zip(args, bare, strict=True)])


def train(
    context: typer.Context,
    config: Annotated[
        str | None, typer.Option(help="A recipe: a YAML file, or a name that `pods recipes` lists.")
    ] = None,
    recipe_name: Annotated[
        str | None,
        typer.Option("--recipe", metavar="NAME", help="A shipped recipe, or <experiment>-<arm>; no NAME: list them."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Directory of the run. [default: runs/<recipe>-<date>-<time>]")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --output from its last checkpoint.")
    ] = False,
    num_processes: Annotated[
        int | None,
        typer.Option(
            "--num_processes",
            "--num-processes",
            metavar="K",
            min=1,
            help="Train on so many processes of this machine, started through accelerate.",
        ),
    ] = None,
    accelerate_config: Annotated[
        str | None,
        typer.Option(
            "--accelerate_config",
            "--accelerate-config",
            metavar="NAME",
            help="How they share the model: a file of accelerate's, or a shipped one. [default: ddp]",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the resolved recipe and the batch plan, and stop.")
    ] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="KEY", help="Show type, default and meaning of a recipe key.")
    ] = None,
) -> None:
    """Train a policy from a recipe.

    Any key of a recipe can be set with --KEY VALUE; TRL's own names are used. A GRPO user turns PODS on with
    --num_rollouts 64. Ctrl-C saves the policy and leaves a usable run directory.

    \b
    Examples:
      pods train --recipe tiny-pods
      pods train --recipe gsm8k-qwen2.5-3b-pods --data_dir gsm8k/ --dry-run
      pods train --config my.yaml --num_rollouts 64 --learning_rate 5e-6 --output runs/mine
      pods train --config my.yaml --num_processes 8 --dry-run
      pods train --config my.yaml --num_processes 8 --accelerate_config fsdp2
      pods train --explain num_rollouts
    """
    from ..recipe import check_layout, load_recipe
    from ..recipe.reading import parse_overrides

    if explain is not None:
        show_key(explain)
        return
    if recipe_name is not None:
        config = _shipped(recipe_name, config)
    if config is None and resume and output is not None:
        config = str(output / "config.yaml")
    if config is None:
        raise UserError("No recipe: give --config FILE, or --recipe NAME, one that `pods recipes` lists.")
    launch = find_launch(num_processes, accelerate_config)
    recipe = load_recipe(config, parse_overrides(context.args), processes=launch and launch.processes)
    if dry_run:
        print(plain_text(recipe.to_yaml()))
        show_plan(recipe.batch_plan(launch and launch.processes))
        tell_missing(recipe)
        return
    recipe.check_installed()
    if launch:
        check_layout(launch.config, on_cpu=bool(recipe.values.get("use_cpu")))
    output = output or _default_output(recipe)
    _check_output(output, resume=resume)
    try:
        if launch:
            words = ["--config", config, "--output", str(output), *(["--resume"] if resume else []), *context.args]
            state = _train_processes(launch, words, output)
        else:
            from ..train import train as run_training

            state = run_training(recipe, output, resume=resume).state
    except KeyboardInterrupt:  # before the first step, or a second Ctrl-C
        raise typer.Exit(130) from None
    if state == "stopped":
        raise typer.Exit(130)
    if state != "finished":
        raise typer.Exit(1)


class Launch(NamedTuple):
    """Processes to start, and the accelerate configuration they are started with."""

    processes: int
    config: Path


def find_launch(processes: int | None, config: str | None) -> Launch | None:
    """What to start through accelerate, None where nothing was asked for.

    Raises UserError for a configuration there is not, and among processes that a launcher has started already.
    """
    from ..recipe import accelerate_processes, find_accelerate_config

    if processes is None and config is None:
        return None
    if "WORLD_SIZE" in os.environ:
        raise UserError(
            f"A launcher started this already (WORLD_SIZE = {os.environ['WORLD_SIZE']}): leave --num_processes and "
            "--accelerate_config out, or start `pods train` by itself."
        )
    path = find_accelerate_config(config or "ddp")
    return Launch(processes or accelerate_processes(path), path)


def _train_processes(launch: Launch, words: list[str], output: Path) -> str:
    """`pods train` with these words on several processes; the state in which the run ended."""
    from ..experiment.process import child_environment, launcher, wait_for
    from ..runs import Run

    command = [*launcher(launch.config, launch.processes), "train", *words]
    # A session of its own: Ctrl-C reaches us alone, and the processes are asked once, by us.
    code = wait_for(subprocess.Popen(command, env=child_environment({}), start_new_session=True))
    state = Run(output).state
    return "failed" if code and state == "finished" else state


def show_key(key: str) -> None:
    """Print what a recipe key means; raises UserError for one there is not."""
    from ..recipe import explain
    from ..recipe.fields import suggest
    from ..recipe.schema import fields

    key = key.lstrip("-").replace("-", "_")
    if key not in fields():
        raise UserError(f"{key} is no recipe key.{suggest(key, fields())}")
    print(explain(key))


def show_plan(plan: BatchPlan) -> None:
    """Print what a step generates and trains."""
    out = console()
    for label, value in plan.describe():
        out.print(f"{label:<20} {safe_text(value)}")


def tell_missing(recipe: Recipe) -> None:
    """Print what must be installed before a recipe can train on this machine, if anything."""
    if recipe.missing_library:
        console().print(f"[yellow]Note:[/yellow] {safe_text(recipe.missing_library)}")


def _shipped(name: str, config: str | None) -> str:
    """A name of what is shipped; raises UserError with all names where it is none."""
    from ..recipe import shipped_arms, shipped_recipes
    from ..recipe.fields import suggest
    from .recipes import is_experiment

    if config is not None:
        raise UserError(f"--recipe {name} and --config {config}: give one of them.")
    single = [recipe for recipe, path in shipped_recipes().items() if not is_experiment(path)]
    known = [*single, *shipped_arms()]
    if name not in known:
        what = f"{name}: no such recipe is shipped.{suggest(name, known)}" if name else "a name is missing."
        raise UserError("\n  ".join([f"--recipe {what} Choose one of", *known]))
    return name


def _default_output(recipe: Recipe) -> Path:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("Several processes must agree on one run directory: give it with --output.")
    return Path("runs") / f"{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}"


def _check_output(output: Path, *, resume: bool) -> None:
    """Refuse a directory that cannot take the run now, rather than after torch and the model are loaded."""
    from ..runs import Run, RunWriter, is_run

    if resume and not is_run(output):
        raise UserError(f"--resume: {output} holds no run to go on with.")
    if resume and not Run(output).checkpoints():
        raise UserError(
            f"--resume: {output} ({Run(output).state}) has no checkpoint to go on from, and what it holds would "
            "be lost: start again in another --output, with save_steps low enough."
        )
    if os.environ.get("RANK", "0") == "0":
        RunWriter(output, resume=resume).close()
