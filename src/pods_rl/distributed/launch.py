"""``python -m pods_rl.distributed.launch``: `accelerate launch` with signals forwarded and failures in one line.

Torch's launcher answers a signal by ending all processes 30 seconds later, and a failed process by pages about its own
insides. Here a signal goes to the processes as it came, and they end themselves after their step; a process that
failed has said why itself (`watch.py`), and one that could not is told of by its exit code.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import CalledProcessError
from threading import Thread
from types import FrameType

from ..runs import Run, RunInUseError, end_run
from ..text import console, safe_text
from .signals import SIGNALS, exit_code, heeded, ignore_signals
from .streams import outlive_output
from .watch import LAUNCHER

STARTER = "PODS_STARTER"  # the process without which the run is not to go on; a run of an experiment goes on
# What the processes get, unless the user has set it: the launcher's kill comes soon, C++ libraries only report errors.
_ENVIRONMENT = {LAUNCHER: "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def main() -> int:
    """Launch what the command line says; the exit code, which agrees with the status that the run has written."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        with outlive_output(None):
            code = launch()
    except SystemExit as end:
        code = int(end.code or 0)
    ignore_signals()
    status = Run(Path(_output())).status
    return exit_code(status, default=code) if status.get("state") in ("finished", "stopped") else code


def launch() -> int:
    """Start the processes and wait for them; the exit code."""
    heard = heeded()
    for number in heard:
        signal.signal(number, pass_on)
    if starter := os.environ.get(STARTER):
        Thread(target=stop_without, args=[int(starter)], daemon=True).start()
    logging.disable(logging.CRITICAL)  # of this process alone: the agent's reports on the others
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What the agent installs for each signal that it knows, also for one that this process was started to ignore.
    ignored = set(SIGNALS) - set(heard)
    api._terminate_process_handler = lambda signum, frame: None if signum in ignored else pass_on(signum, frame)
    try:
        launch_command(launch_command_parser().parse_args())
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        said = failure.message if Path(failure.error_file).is_file() else None
        return tell(rank, failure.exitcode, said)
    except CalledProcessError as error:  # accelerate starts a single process so
        return tell(0, error.returncode)
    return 0


def pass_on(signum: int, frame: FrameType | None) -> None:
    """Send a signal to the processes; before there are any, end."""
    import psutil

    processes = psutil.Process().children()
    if not processes:
        raise SystemExit(128 + signum)
    for process in processes:
        try:
            process.send_signal(signum)
        except psutil.NoSuchProcess:
            continue


def stop_without(starter: int) -> None:
    """Stop the processes, as SIGTERM does, when the process that started us is gone: nobody else would."""
    while os.getppid() == starter:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def tell(rank: int, code: int, said: str | None = None) -> int:
    """Write into the run's status why it failed, if its processes could not; the launch's exit code.

    Args:
        rank: the process that failed first.
        code: its exit code.
        said: what it has said; None: nothing, and we say how it ended.
    """
    reason, untold = said or how_it_ended(rank, code), False
    with suppress(RunInUseError):  # it is another's, which these processes were refused
        untold = end_run(_output(), "failed", reason)
    if untold and said is None:
        console(stderr=True).print(f"[red]Error:[/red] {safe_text(reason)}")
    return code if code > 0 else 1


def _output() -> str:
    """The run's directory, as the processes are given it."""
    return sys.argv[sys.argv.index("--output") + 1]


def how_it_ended(rank: int, code: int) -> str:
    """
    >>> how_it_ended(1, -9), how_it_ended(0, 3)
    ('process 1 was killed by signal 9 (SIGKILL), perhaps out of memory', 'process 0 ended with exit code 3')
    """
    if code >= 0:
        return f"process {rank} ended with exit code {code}"
    name = signal.Signals(-code).name
    more = ", perhaps out of memory" if name == "SIGKILL" else ""
    return f"process {rank} was killed by signal {-code} ({name}){more}"


if __name__ == "__main__":
    sys.exit(main())
