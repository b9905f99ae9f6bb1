"""``python -m pods_rl.distributed.launch``: `accelerate launch` with signals forwarded and failures in one line.

Torch's launcher kills all processes 30 seconds after a signal, and prints pages about its internals if one fails.
This launcher forwards a signal to the processes, which end themselves after their step. A process that fails has
printed the reason itself (`watch.py`); this launcher reports killed processes, by exit code.
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

STARTER = "PODS_STARTER"  # the process that the run must not outlive; a run of an experiment continues alone
# For the processes, unless the user has set it: the launcher kills quickly, C++ libraries report only errors.
_ENVIRONMENT = {LAUNCHER: "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def main() -> int:
    """Launch the command line's program and return the exit code, which agrees with the status of the run."""
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
    logging.disable(logging.CRITICAL)  # only in this process: the agent's reports on the others
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The only patch of torch's launcher: its signal handler forwards, rather than kill the processes.
    ignored = set(SIGNALS) - set(handled)  # torch installs its handler for these too
    api._terminate_process_handler = lambda signum, frame: None if signum in ignored else forward(signum, frame)
    try:
        launch_command(launch_command_parser().parse_args())
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        published = failure.message if Path(failure.error_file).is_file() else None
        return report_failure(rank, failure.exitcode, published)
    except CalledProcessError as error:  # raised if accelerate started a single process
        return report_failure(0, error.returncode)
    return 0


def forward(signum: int, frame: FrameType | None) -> None:
    """Send a signal to the processes; exit if there are none yet."""
    import psutil

    processes = psutil.Process().children()
    if not processes:
        raise SystemExit(128 + signum)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


def _stop_without(starter: int) -> None:
    """Stop the processes, like SIGTERM, once the process that started this launcher has ended."""
    while os.getppid() == starter:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def report_failure(rank: int, code: int, published: str | None = None) -> int:
    """Write the reason of a failure into the run's status if its processes could not; return the exit code.

    Args:
        rank: the process that failed first.
        code: its exit code.
        published: the reason that it published; None: report the exit code.
    """
    reason, unreported = published or how_it_ended(rank, code), False
    with suppress(RunInUseError):  # another run uses the directory, so these processes were refused
        unreported = end_run(_output(), "failed", reason)
    if unreported and published is None:
        console(stderr=True).print(f"[red]Error:[/red] {safe_text(reason)}")
    return code if code > 0 else 1


def _output() -> str:
    """Return the run's directory from the command line of the processes."""
    return sys.argv[sys.argv.index("--output") + 1]


def how_it_ended(rank: int, code: int) -> str:
    """Return a sentence on how a process ended.

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
