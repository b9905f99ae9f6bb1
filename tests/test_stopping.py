"""When a signal is met: at once, or later, or at once again."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Pipe
from pathlib import Path

import psutil
import pytest

from pods_rl.distributed.signals import PARENT, SIGNALS, Stop, end_with_parent, print_notice, stop_on_signals
from pods_rl.errors import Interrupted
from pods_rl.experiment.starters import Check, Train

from . import until

CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129, "SIGUSR1": 138, "SIGUSR2": 140, "SIGXCPU": 152}


@pytest.fixture(autouse=True)
def not_ignored():
    """As in a process that was started to ignore none of them."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.Signals[name], code) for name, code in CODES.items()])
def test_a_signal_is_met_at_once_and_says_which(number, code):
    with pytest.raises(Interrupted, match=number.name) as met, stop_on_signals() as stop:
        os.kill(os.getpid(), number)
    assert met.value.code == stop.code == code
    assert isinstance(met.value, KeyboardInterrupt)


def test_a_second_sigint_is_met_wherever_it_comes():
    with stop_on_signals() as stop, stop.later():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)


def test_within_later_the_first_signal_prints_what_happens(capfd):
    stop = Stop()
    with stop.later("the step ends first."):
        stop.ask(signal.SIGTERM)
        stop.ask(signal.SIGTERM)
        (line,) = capfd.readouterr().err.splitlines()
        assert ("SIGTERM" in line, line.endswith("ends first.")) == (True, True)
    stop = Stop()
    with stop.later("the step ends first."), pytest.raises(Interrupted), stop.at_once():
        stop.ask(signal.SIGTERM)
    assert capfd.readouterr().err == ""


def test_a_notice_is_dropped_if_nobody_reads(monkeypatch):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 65536)
    os.set_blocking(writer, True)
    kept = os.dup(2)
    os.dup2(writer, 2)
    try:
        print_notice("a full pipe")
        os.close(reader)
        print_notice("a closed pipe")
    finally:
        os.dup2(kept, 2)
        os.close(writer)


def test_a_process_that_another_started_does_not_end_with_it(monkeypatch):
    monkeypatch.setenv(PARENT, str(os.getpid()))  # this process is not its own parent
    end_with_parent()
    assert PARENT not in os.environ
    end_with_parent()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_is_ignored_from_the_start_stays_so(number):
    signal.signal(number, signal.SIG_IGN)
    if number in (signal.SIGINT, signal.SIGTERM):  # but for those: a shell ignores SIGINT for its background jobs
        with pytest.raises(Interrupted), stop_on_signals():
            os.kill(os.getpid(), number)
    else:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), number)
        assert stop.reason is None


def test_a_signal_is_passed_on_once_whenever_it_comes():
    heard = []
    with stop_on_signals() as stop, stop.later():
        os.kill(os.getpid(), signal.SIGUSR1)
        with stop.passed_to(lambda *what: heard.append(what)):
            os.kill(os.getpid(), signal.SIGINT)
    assert heard == [(signal.SIGUSR1, False), (signal.SIGINT, True)]
    assert stop.number == signal.SIGUSR1


def test_within_another_there_is_one_stop():
    with stop_on_signals() as outer:
        with stop_on_signals() as inner:
            assert inner is outer
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGHUP)


def test_handlers_are_given_back_and_only_set_by_the_main_thread():
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals():
        assert signal.getsignal(signal.SIGTERM) != before
        seen = []
        thread = threading.Thread(target=lambda: seen.append(stop_on_signals().__enter__().reason))
        thread.start()
        thread.join()
    assert seen == [None]
    assert signal.getsignal(signal.SIGTERM) == before


# -- a command that has not begun, or imports ------------------------------------------------------------------------

# Waits for a signal inside the import of the module that $PAUSE_AT names.
PAUSE = """
import os, signal, sys

class Pause:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["PAUSE_AT"]:
            open("paused", "w").close()
            while True:
                signal.pause()

sys.meta_path.insert(0, Pause())
"""
MODULE = ("-m", "pods_rl")
SCRIPT = ("-c", "from pods_rl.cli import main; main()")


@pytest.mark.parametrize(
    ("entry", "words", "module", "number"),
    [
        (SCRIPT, "recipes", "typer", signal.SIGTERM),
        (MODULE, "train tiny-pods --output run", "torch", signal.SIGINT),
        (SCRIPT, "report run", "pods_rl.report", signal.SIGHUP),
    ],
)
def test_a_signal_during_any_import_is_one_line_and_its_exit_code(tmp_path, entry, words, module, number):
    (tmp_path / "sitecustomize.py").write_text(PAUSE)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, *entry, *words.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "PAUSE_AT": module},
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    until(lambda: (tmp_path / "paused").exists() or process.poll() is not None)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 128 + number, errors
    assert [line for line in errors.splitlines() if "importing" not in line] == [f"Stopped: {Interrupted(number)}."]
    assert not (tmp_path / "run").exists()


# -- runs that a starter forks ---------------------------------------------------------------------------------------

# A starter whose forked process pauses right after the fork, until the file `go` is there, and then "trains".
STARTER = """
import os, time, pods_rl.cli.starter as starter
from pods_rl.distributed.signals import end_with_parent

def forks():
    process = fork()
    while process == 0 and not os.path.exists("go"):
        time.sleep(0.001)
    return process

def trains():
    end_with_parent()
    open("trained", "w").close()

fork = os.fork
os.fork = forks
starter.import_all = lambda: None
starter.pods_command = trains
starter.check_arms = lambda *_, **__: trains()
starter.main()
"""


@pytest.fixture
def starter(tmp_path):
    """The process of a starter and the connection to it."""
    connection, theirs = Pipe()
    words = [sys.executable, "-c", STARTER, str(theirs.fileno())]
    process = subprocess.Popen(words, cwd=tmp_path, pass_fds=[theirs.fileno()])
    theirs.close()
    yield process, connection
    (tmp_path / "go").touch()
    connection.close()
    process.kill()
    process.wait()


def test_a_signal_right_after_the_fork_of_a_run_is_not_lost(tmp_path, starter):
    _, connection = starter
    connection.send(Train(Path("r.yaml"), tmp_path, False))
    os.kill(connection.recv().process, signal.SIGTERM)
    (tmp_path / "go").touch()
    assert connection.recv() == 128 + signal.SIGTERM
    assert not (tmp_path / "trained").exists()


@pytest.mark.parametrize(("request_of", "reaped"), [("run", True), ("run", False), ("check", True)])
def test_a_run_ends_if_its_starter_is_killed_right_after_the_fork(tmp_path, starter, request_of, reaped):
    process, connection = starter
    request = Check(None, False) if request_of == "check" else Train(Path("r.yaml"), tmp_path, False)
    connection.send(request)
    until(lambda: psutil.Process(process.pid).children())
    (forked,) = psutil.Process(process.pid).children()
    process.kill()
    if reaped:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    (tmp_path / "go").touch()
    until(lambda: not forked.is_running() or forked.status() == psutil.STATUS_ZOMBIE)
    assert not (tmp_path / "trained").exists()
