"""``python -m pods_rl.distributed.launch``: `accelerate launch` with signals forwarded and failures in one line.

Torch's launcher answers a signal by killing all processes 30 seconds later, and a failed process by pages about its own
internals. This one forwards a signal to the processes, which end themselves after their step. A process that fails has
printed why itself (`watch.py`); one that was killed is reported here, by its exit code.
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
from .signals import SIGNALS, exit_code, handled_signals, ignore_signals
from .streams import outlive_output
from .watch import LAUNCHER

STARTER = "PODS_STARTER"  # the process without which the run is to end; a run of an experiment continues alone
# For the processes, unless the user has set it: the launcher kills soon, C++ libraries report errors only.
_ENVIRONMENT = {LAUNCHER: "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def main() -> int:
    """Launch what the command line says and return the exit code, which agrees with the status of the run."""
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
    """Start the processes, wait for them and return the exit code."""
    handled = handled_signals()
    for number in handled:
        signal.signal(number, forward)
    if starter := os.environ.get(STARTER):
        Thread(target=_stop_without, args=[int(starter)], daemon=True).start()
    logging.disable(logging.CRITICAL)  # of this process alone: the agent's reports on the others
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The one patch of torch's launcher: its handler of every signal, which would kill the processes, forwards instead.
    ignored = set(SIGNALS) - set(handled)  # it installs the handler for these too
    api._terminate_process_handler = lambda signum, frame: None if signum in ignored else forward(signum, frame)
    try:
        launch_command(launch_command_parser().parse_args())
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        published = failure.message if Path(failure.error_file).is_file() else None
        return report_failure(rank, failure.exitcode, published)
    except CalledProcessError as error:  # how accelerate starts a single process
        return report_failure(0, error.returncode)
    return 0


def forward(signum: int, frame: FrameType | None) -> None:
    """Send a signal to the processes; end where there are none yet."""
    import psutil

    processes = psutil.Process().children()
    if not processes:
        raise SystemExit(128 + signum)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


def _stop_without(starter: int) -> None:
    """Stop the processes, as SIGTERM does, when the process that started us has ended: nothing else would."""
    while os.getppid() == starter:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def report_failure(rank: int, code: int, published: str | None = None) -> int:
    """Write into the run's status why it failed, where its processes could not; return the exit code of the launch.

    Args:
        rank: the process that failed first.
        code: its exit code.
        published: the reason that it gave; None: it gave none, so the exit code is reported.
    """
    reason, unreported = published or how_it_ended(rank, code), False
    with suppress(RunInUseError):  # another run holds the directory, and these processes were refused
        unreported = end_run(_output(), "failed", reason)
    if unreported and published is None:
        console(stderr=True).print(f"[red]Error:[/red] {safe_text(reason)}")
    return code if code > 0 else 1


def _output() -> str:
    """The run's directory, as the command line of the processes names it."""
    return sys.argv[sys.argv.index("--output") + 1]


def how_it_ended(rank: int, code: int) -> str:
    """Return in words how a process ended.

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
