"""Start a run of ``pods train`` in this process or in several, and print its last lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from ..distributed import get_rank, get_world_size, is_launched
from ..distributed.signals import Stop
from ..distributed.streams import outlive_output
from ..errors import Interrupted, UserError
from ..runs.files import LOG
from ..text import console, safe_text

if TYPE_CHECKING:
    from ..recipe import Recipe
    from ..runs import Run


class Launch(NamedTuple):
    """The number of processes to start, and their accelerate configuration."""

    processes: int
    config: Path
    name: str = "ddp"


def find_launch(processes: int | None, config: str | None) -> Launch | None:
    """Return what to start through accelerate; None if neither option is given.

    Raises UserError for an unknown configuration, or if a launcher has started this process.
    """
    from ..recipe import accelerate_processes, find_accelerate_config
    from ..recipe.accelerate import MOST_PROCESSES
    from ..text import short

    if processes is None and config is None:
        return None
    if is_launched():
        raise UserError(
            f"A launcher has already started this process (WORLD_SIZE = {get_world_size()}): remove "
            "--num_processes and --accelerate_config, or start `pods train` by itself."
        )
    if processes is not None and processes > MOST_PROCESSES:
        raise UserError(f"--num_processes {short(str(processes))}: expected at most {MOST_PROCESSES} on one machine.")
    path = find_accelerate_config(config or "ddp")
    return Launch(processes or accelerate_processes(path), path, config or "ddp")


def loaded_trainer(recipe: Recipe, output: Path) -> Callable[..., Run]:
    """Import what trains, which takes seconds, log it, and check the recipe with it.

    With several processes, each one checks the recipe when it builds its trainer.
    """
    from ..training.progress import Progress, label_of

    with outlive_output(output / LOG), Progress(label_of(output)) if get_rank() == 0 else nullcontext() as shown:
        if shown:
            shown.begin("importing torch")
        from ..training.run import train as train_run
        from ..training.trainer import check_engine

        if not is_launched():
            check_engine(recipe)
    return train_run


@contextmanager
def last_words(output: Path, launch: Launch | None) -> Iterator[None]:
    """At the end, also after an error, print the directory of the run, how to resume it and what to do next."""
    from ..distributed.launch import LAUNCHED
    from ..training.progress import label_of
    from ..training.resume import last_lines

    try:
        yield
    finally:
        if get_rank() == 0 and LAUNCHED not in os.environ:
            options = f" --num_processes {launch.processes} --accelerate_config {launch.name}" if launch else ""
            several = f"{label_of(output)}: " if launch or get_world_size() > 1 else ""
            with outlive_output(output / LOG):
                for line in last_lines(output, options):
                    console().print(f"{several}{safe_text(line)}")


def launch_run(
    launch: Launch, recipe: str, keys: Mapping[str, str | bool], output: Path, again: Mapping[str, bool], stop: Stop
) -> Mapping[str, Any]:
    """Train with `pods train` in several processes; return the last status of the run."""
    from ..distributed.launch import launch as start
    from ..runs import Run, RunInUseError, RunWriter

    words = ["train", "--config", recipe, "--output", str(output)]
    words += [f"--{name}" for name, wanted in again.items() if wanted]
    words += [f"--{key}={'true' if value is True else value}" for key, value in keys.items()]
    failure = None
    with stop.later(), outlive_output(output / LOG):
        with suppress(Interrupted):  # before the processes started
            failure = start(words, launch.config, launch.processes, stop)
        stop.over()
        state, stopped = Run(output).state, stop.reason
        if state == "finished" or (stopped and state != "failed"):
            failure = None
        if failure or (stopped and state not in ("finished", "stopped")):
            end, reason = ("failed", failure.reason) if failure else ("stopped", str(stopped))
            with suppress(RunInUseError), RunWriter(output, resume=True) as writer:
                writer.write_end(end, reason)
        if failure:
            console(stderr=True).print(f"[red]Error:[/red] {safe_text(failure.reason)}")
            console(stderr=True).print(safe_text(failure.details), end="")
            raise typer.Exit(failure.code)
        if stopped and state != "finished":
            console(stderr=True).print(f"Stopped: {stopped}. Finished work is kept in {safe_text(output)}.")
    return Run(output).status
