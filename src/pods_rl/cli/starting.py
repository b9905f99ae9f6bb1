"""How ``pods train`` starts a run, in this process or in several, and what it says at the end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
    from ..recipe.reading import short

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


def loaded_trainer(output: Path) -> Callable[..., Run]:
    """Import what trains, which takes seconds, and say so."""
    from ..training.progress import Progress, label_of

    with outlive_output(output / LOG), Progress(label_of(output)) if get_rank() == 0 else nullcontext() as shown:
        if shown:
            shown.begin("importing torch")
        from ..training.run import train as train_run
    return train_run


@contextmanager
def last_words(output: Path, launch: Launch | None) -> Iterator[None]:
    """At the end, however it comes, print where the run lies, how to resume it and what to do next."""
    from ..distributed.launch import STARTER
    from ..training.progress import label_of
    from ..training.resume import last_lines

    try:
        yield
    finally:
        if get_rank() == 0 and STARTER not in os.environ:
            options = f" --num_processes {launch.processes} --accelerate_config {launch.name}" if launch else ""
            several = f"{label_of(output)}: " if launch or get_world_size() > 1 else ""
            with outlive_output(output / LOG):
                for line in last_lines(output, options):
                    console().print(f"{several}{safe_text(line)}")


def launch_run(
    launch: Launch, recipe: str, keys: Mapping[str, str | bool], output: Path, again: Mapping[str, bool], stop: Stop
) -> Mapping[str, Any]:
    """Train with `pods train` in several processes; return the last status of the run."""
    from ..distributed.launch import STARTER
    from ..experiment.process import child_environment, launcher, wait_for
    from ..runs import Run, end_run

    command = [*launcher(launch.config, launch.processes), "train", "--config", recipe, "--output", str(output)]
    command += [f"--{name}" for name, wanted in again.items() if wanted]
    command += [f"--{key}={'true' if value is True else value}" for key, value in keys.items()]
    code = 0
    with stop.later(), outlive_output(output / LOG):
        try:
            # In a session of its own: Ctrl-C reaches only this process, which forwards it once.
            environment = child_environment({STARTER: str(os.getpid())})
            process = subprocess.Popen(command, env=environment, start_new_session=True)
            code = wait_for(process, apart=True)
        except Interrupted as interrupt:  # the processes may end before they write a status, or after they finish
            stop.over()
            end_run(output, "stopped", str(interrupt))
        stop.over()
        status = Run(output).status
        if status.get("state") == "stopped":
            reason = safe_text(status.get("reason"))
            console(stderr=True).print(f"Stopped: {reason}. Finished work is kept in {safe_text(output)}.")
    if code == 2 and status.get("state") == "failed":  # a user's mistake, already printed by a process
        raise typer.Exit(2)
    return status
