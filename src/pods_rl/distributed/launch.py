"""Start the processes of one run with `accelerate launch`, inside this process, and report a failure in one line.

Torch's elastic agent ends the other processes if one fails, and `ddp_timeout` ends a hang.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, NamedTuple

from ..errors import Interrupted
from ..runs.files import read_mapping
from .processes import get_rank
from .signals import PARENT, Stop, how_it_ended, print_notice

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

LAUNCHED = "PODS_LAUNCHED"  # set for the processes that `launch` starts
_SHUTDOWN = 5  # seconds between the SIGTERM and the SIGKILL of torch's agent
# For the agent, unless the user has set them: it kills quickly and leaves signals to us; C++ reports only errors.
_AGENT = {
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_SHUTDOWN),
    "PET_SIGNALS_TO_HANDLE": "SIGQUIT",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_ON_SIGNAL = (
    "the processes end after this step and save a checkpoint. Another Ctrl-C ends them at once and loses the step."
)


class Failure(NamedTuple):
    """The end of the process that failed first: one line, a traceback or nothing, and its exit code."""

    reason: str
    details: str
    code: int


def launch(words: Sequence[str], config: Path, processes: int, stop: Stop) -> Failure | None:
    """Run ``pods WORDS`` in several processes and wait for them; return the failure of the first one that failed.

    A signal is forwarded to the processes, which end themselves after their step. A second SIGINT kills them, and so
    does the end of this process.

    Args:
        words: the command line of each process.
        config: an accelerate configuration.
        processes: their number on this machine.
        stop: receives the signals.
    """
    variables = {**_AGENT, LAUNCHED: "1", "PYTHONSAFEPATH": "1"}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    os.environ[PARENT] = str(os.getpid())
    logging.disable(logging.CRITICAL)  # the agent's own reports on the processes
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--config_file", str(config), "--num_processes", str(processes), "--module", "pods_rl", *words]
    try:
        with stop.passed_to(_forward):
            launch_command(launch_command_parser().parse_args(options))
    except ChildFailedError as error:
        return first_failure(error)
    except CalledProcessError as error:  # a single process, which has printed its error
        return Failure(how_process_ended(0, error.returncode), "", max(error.returncode, 1))
    finally:
        logging.disable(logging.NOTSET)
        for name in (LAUNCHED, "PYTHONSAFEPATH", PARENT):
            os.environ.pop(name, None)
    return None


def report_failure(reason: str, details: str, code: int) -> bool:
    """Leave the reason of a failure for the launcher, which prints it; return False in a process without a launcher."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if LAUNCHED not in os.environ or not file:
        return False
    now = time.time()
    report = {
        "message": f"process {get_rank()}: {reason}",
        "details": details,
        "code": code,
        "time": now,
        "timestamp": int(now),  # torch's agent reads it
    }
    try:
        Path(file).write_text(json.dumps(report), encoding="ascii")
    except OSError:
        return False
    return True


def first_failure(error: ChildFailedError) -> Failure:
    """Return the failure that caused the others.

    Of the processes that reported, the earliest one counts, since the others lose contact only after it. A process that
    was killed could not report, and comes before them, unless it ended so late that the agent killed it: a process that
    stalls ignores the agent's SIGTERM.
    """
    # The agent names the files of the processes that failed first. Those of the others are in the same folder.
    folders = {Path(failure.error_file).parent.parent for failure in error.failures.values()}
    reports = []
    for folder in folders:
        for file in folder.glob("*/error.json"):
            candidate = read_mapping(file)
            if "time" in candidate:  # otherwise torch wrote it
                reports.append(candidate)
    report = min(reports, key=lambda candidate: float(candidate["time"]), default=None)
    # A process that was killed later than this was killed by the agent, whose times are whole seconds.
    latest = math.inf if report is None else float(report["time"]) + _SHUTDOWN - 1
    ends = sorted((failure.timestamp, rank, failure.exitcode) for rank, failure in error.failures.items())
    for ended, rank, code in ends:
        was_killed = code < 0 and code != -signal.SIGTERM
        if was_killed and ended < latest:
            return Failure(how_process_ended(rank, code), "", 1)
    if report is not None:
        return Failure(str(report["message"]), str(report["details"]), int(report["code"]))
    _, rank, code = ends[0]
    return Failure(how_process_ended(rank, code), "", max(code, 1))


def how_process_ended(rank: int, code: int) -> str:
    """Return a sentence on how a process ended.

    >>> how_process_ended(1, -9), how_process_ended(0, 3)
    ('process 1 was killed by signal 9 (SIGKILL), perhaps out of memory', 'process 0 ended with exit code 3')
    """
    verb = "was" if code < 0 else "ended with"
    return f"process {rank} {verb} {how_it_ended(code)}"


def _forward(number: int, again: bool) -> None:
    """Send a signal to the processes of this one; a second SIGINT kills them. Raise Interrupted before they start."""
    import psutil

    kills = again and number == signal.SIGINT
    # Killed processes cannot end their own children.
    processes = psutil.Process().children(recursive=kills)
    if not processes:
        raise Interrupted(number)
    if not again:
        print_notice(f"Interrupted by {signal.Signals(number).name}: {_ON_SIGNAL}")
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if kills:
                process.kill()
            else:
                process.send_signal(number)
