"""``pods train``: one run from one recipe."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from ..distributed import place
from ..distributed.signals import Stop, exit_code, stop_on_signals
from ..distributed.streams import outlive_output
from ..errors import Interrupted, UserError
from ..text import console, plain_text, safe_text

if TYPE_CHECKING:
    from ..planning.batching import BatchPlan
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
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in --output from its last whole checkpoint; without --output, with the newest "
            "run of the recipe under runs/.",
        ),
    ] = False,
    allow_changed_recipe: Annotated[
        bool,
        typer.Option(
            "--allow_changed_recipe",
            "--allow-changed-recipe",
            help="With --resume: go on also where the checkpoint was made with another recipe.",
        ),
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
    """Train a policy from a recipe, by the name of a shipped one or by its file.

    Any key of a recipe can be set with --KEY VALUE; TRL's own names are used. A GRPO user turns PODS on with
    --num_rollouts 64. Ctrl-C (exit code 130), SIGTERM (143), SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU (128 and the signal's
    number) end the run after its step, with a checkpoint that --resume goes on from.

    \b
    Examples:
      pods train tiny-pods
      pods train --recipe gsm8k-qwen2.5-3b-pods --data_dir gsm8k/ --dry-run
      pods train --config my.yaml --num_rollouts 64 --learning_rate 5e-6 --output runs/mine
      pods train --config my.yaml --num_processes 8 --dry-run
      pods train --config my.yaml --num_processes 8 --accelerate_config fsdp2
      pods train --output runs/mine --resume
      pods train --explain num_rollouts
    """
    from ..recipe import check_accelerate, load_recipe
    from ..recipe.reading import parse_words
    from ..rewards import check_rewards

    if explain is not None:
        show_key(explain)
        return
    with stoppable() as stop:
        launch = find_launch(num_processes, accelerate_config)
        named, given = parse_words(context.args, recipe_name if config is None else config)
        config = find_config(named if recipe_name is None else config, recipe_name, output if resume else None)
        recipe = load_recipe(config, given, processes=launch and launch.processes)
        if dry_run:
            print(plain_text(recipe.to_yaml()))
            show_plan(recipe.batch_plan(launch and launch.processes))
            tell_missing(recipe)
            return
        recipe.check_installed()
        recipe.check_reachable()
        if launch:
            check_accelerate(launch.config, on_cpu=bool(recipe.values.get("use_cpu")))
        else:  # else each process does, once it is started
            check_rewards(recipe.values)
        if output is None:
            output = _newest_run(recipe) if resume else _default_output(recipe)
        again = Again(resume, allow_changed_recipe)
        _check_output(recipe, output, again, launch)
        if launch:
            keys = [f"--{key}={'true' if value is True else value}" for key, value in given.items()]
            words = ["--config", config, "--output", str(output), *again.words, *keys]
            status = _train_processes(launch, words, output, stop)
        else:
            from ..training.run import train as run_training

            status = run_training(recipe, output, stop=stop, **again._asdict()).status
        if code := exit_code(status, default=stop.code):
            raise typer.Exit(code)


class Again(NamedTuple):
    """Whether a run goes on, and with which recipes."""

    resume: bool
    allow_changed_recipe: bool

    @property
    def words(self) -> list[str]:
        """The options that say so."""
        return [f"--{name}" for name, wanted in self._asdict().items() if wanted]


class Launch(NamedTuple):
    """Processes to start, and the accelerate configuration they are started with."""

    processes: int
    config: Path


def find_launch(processes: int | None, config: str | None) -> Launch | None:
    """What to start through accelerate, None where nothing was asked for.

    Raises UserError for a configuration there is not, and among processes that a launcher has started already.
    """
    from ..recipe import accelerate_processes, find_accelerate_config
    from ..recipe.accelerate import MOST_PROCESSES
    from ..recipe.reading import short

    if processes is None and config is None:
        return None
    if "WORLD_SIZE" in os.environ:
        raise UserError(
            f"A launcher started this already (WORLD_SIZE = {os.environ['WORLD_SIZE']}): leave --num_processes and "
            "--accelerate_config out, or start `pods train` by itself."
        )
    if processes is not None and processes > MOST_PROCESSES:
        raise UserError(f"--num_processes {short(str(processes))}: expected at most {MOST_PROCESSES} on one machine.")
    path = find_accelerate_config(config or "ddp")
    return Launch(processes or accelerate_processes(path), path)


def _train_processes(launch: Launch, words: list[str], output: Path, stop: Stop) -> Mapping[str, Any]:
    """`pods train` with these words on several processes; the status in which the run ended."""
    from ..distributed.launch import STARTER
    from ..experiment.process import child_environment, launcher, wait_for
    from ..runs import Run, end_run
    from ..runs.files import LOG

    command = [*launcher(launch.config, launch.processes), "train", *words]
    code = 0
    with stop.later(), outlive_output(output / LOG):
        try:
            # A session of its own: Ctrl-C reaches us alone, and the processes are asked once, by us.
            environment = child_environment({STARTER: str(os.getpid())})
            process = subprocess.Popen(command, env=environment, start_new_session=True)
            code = wait_for(process, apart=True)
        except Interrupted as interrupt:  # they have ended, perhaps before they wrote a status, or finished anyway
            stop.over()
            end_run(output, "stopped", str(interrupt))
        stop.over()
        status = Run(output).status
        if status.get("state") == "stopped":
            reason = safe_text(status.get("reason"))
            console(stderr=True).print(f"Stopped: {reason}. What is done is kept in {safe_text(output)}.")
    if code == 2 and status.get("state") == "failed":  # a mistake of the user's, told already
        raise typer.Exit(2)
    return status


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
    """A name of what is shipped; raises UserError where it is none, with all names where none was given."""
    from ..recipe import shipped_arms, shipped_recipes
    from ..recipe.fields import suggest
    from ..recipe.reading import local_path
    from .recipes import is_experiment

    if config is not None:
        raise UserError(f"--recipe {name} and --config {config}: give one of them.")
    single = [recipe for recipe, path in shipped_recipes().items() if not is_experiment(path)]
    known = [*single, *shipped_arms()]
    if not name:
        raise UserError("\n  ".join(["--recipe a name is missing. Choose one of", *known]))
    if name not in known:
        near = suggest(name, known) or f" `pods recipes` lists the {len(known)} there are."
        file = f" A file is given with --config {name}." if local_path(name).is_file() else ""
        raise UserError(f"--recipe {name}: no such recipe is shipped.{file or near}")
    return name


def find_config(config: str | None, recipe_name: str | None, resumed: Path | None = None) -> str:
    """What to load: what was named, else the recipe of the run that goes on."""
    if recipe_name is not None:
        return _shipped(recipe_name, config)
    if config is None and resumed is not None:
        return str(resumed / "config.yaml")
    if config is None:
        raise UserError("No recipe: name one that `pods recipes` lists, as in `pods train tiny-pods`, or a YAML file.")
    return config


def _newest_run(recipe: Recipe) -> Path:
    from ..training.resume import newest_run

    return newest_run(recipe)


def _default_output(recipe: Recipe) -> Path:
    if place().processes > 1:
        raise UserError("Several processes must agree on one run directory: give it with --output.")
    return Path("runs") / f"{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}"


def _check_output(recipe: Recipe, output: Path, again: Again, launch: Launch | None) -> None:
    """Refuse a directory that cannot take the run now, rather than after torch and the model are loaded."""
    from ..runs import RunWriter
    from ..training.resume import find_start

    if again.resume:
        processes = launch.processes if launch else place().processes
        find_start(recipe, output, processes=processes, changed=again.allow_changed_recipe, hashes=False)
    if place().rank == 0:
        with RunWriter(output, resume=again.resume) as writer:
            if launch and again.resume:  # the status of before is not how this launch ends
                writer.write_status("running", reason="loading")


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Signals ask a run to stop; where they end a command at once, the exit code says which it was."""
    with stop_on_signals() as stop:
        try:
            yield stop
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(getattr(interrupt, "code", 130)) from None
