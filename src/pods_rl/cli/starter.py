"""What runs in a starter of `pods compare` (`experiment/starters.py`): python -m pods_rl.cli.starter CONNECTION

It imports what a run imports, and then forks itself for each request. The number is the file descriptor of its end of
the connection.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from ..distributed.signals import SIGNALS, end_on_signals, end_with_parent, signals_held
from ..errors import UserError
from ..experiment import Experiment
from ..experiment.starters import Began, Check, Train
from ..runs.files import LOG, open_own
from . import main as pods_command
from .commands import find_user_modules
from .train import check_recipe


def main() -> None:
    """Serve requests until the other end of the connection is closed. A forked process returns when it has served."""
    end_with_parent()
    # a terminal sends its signals to every process of a command: the runs handle those that they get
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # `Starter.begin` held them
    connection = Connection(int(sys.argv[1]))
    import_all()
    starter = os.getpid()
    for request in requests(connection):
        gc.collect()
        gc.freeze()  # else the first collection in a run would copy the memory of every imported object
        with signals_held():  # a run that ignored them here would lose one
            process = os.fork()
            if process == 0:
                end_with_parent(starter)
                if isinstance(request, Train):
                    for number, handler in handlers.items():
                        signal.signal(number, handler)
                    end_on_signals()
        if process == 0:
            serve(request, connection)
            return
        if isinstance(request, Train):
            connection.send(Began(process))
        _, status = os.waitpid(process, 0)
        connection.send(os.waitstatus_to_exitcode(status))


def import_all() -> None:
    """Import all that a run on a CPU imports. Nothing is computed: the threads of torch do not survive a fork."""
    import torch  # noqa: F401

    from ..distributed.processes import quiet_libraries

    quiet_libraries()
    from .. import evaluation  # noqa: F401
    from ..loading import prepare  # noqa: F401
    from ..training import checks, recorder, run, trainer  # noqa: F401
    from . import commands  # noqa: F401


def requests(connection: Connection) -> Iterator[Check | Train]:
    """Yield each request until the other end is closed."""
    with suppress(EOFError):
        while True:
            yield connection.recv()


def serve(request: Check | Train, connection: Connection) -> None:
    """Serve a request in the forked process."""
    if not isinstance(request, Train):
        try:
            find_user_modules()  # as the command does for a run
            connection.send(check_arms(request.experiment, data=request.data))
        except UserError as error:
            connection.send(error)
        return
    connection.close()
    words = ["train", "--config", str(request.config), "--output", str(request.output)]
    if request.resume:
        words.append("--resume")
    with open_own(request.output / LOG, "ab" if request.resume else "wb") as log:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.argv = ["pods", *words]
    pods_command()


def check_arms(experiment: Experiment, *, data: bool) -> list[str]:
    """Check the recipe of each arm, and with `data` its task's data; return what runs would note, each note once."""
    from ..training.checks import check_engine

    notes: dict[str, None] = {}  # a set that keeps its order
    loaded: dict[str, Any] = {}  # tasks, which most arms share
    for run in experiment.first_runs():
        if data:
            notes |= dict.fromkeys(check_recipe(run.recipe, experiment.processes, loaded))
        elif run.recipe.missing_library is None:  # else no configuration can be made
            check_engine(run.recipe, experiment.processes)
    return list(notes)


if __name__ == "__main__":
    main()
