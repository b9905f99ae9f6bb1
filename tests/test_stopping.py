"""When a signal is met: at once, or later, or at once again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from pods_rl.distributed.signals import PARENT, SIGNALS, Stop, end_with_parent, print_notice, stop_on_signals
from pods_rl.errors import Interrupted

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
    with pytest.raises(Interrupted, match=f"interrupted by {number.name}") as met, stop_on_signals() as stop:
        os.kill(os.getpid(), number)
    assert met.value.code == stop.code == code
    assert isinstance(met.value, KeyboardInterrupt)


def test_within_later_it_only_leaves_a_reason():
    with stop_on_signals() as stop, stop.later():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a launcher may say it twice
    assert (stop.reason, stop.code) == ("interrupted by SIGTERM", 143)


def test_a_second_sigint_is_met_wherever_it_comes():
    with stop_on_signals() as stop, stop.later():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)


def test_at_once_within_later_meets_what_came_before_and_what_comes():
    stop = Stop()
    with stop.later():
        with pytest.raises(Interrupted), stop.at_once():
            stop.ask(signal.SIGTERM)
        with pytest.raises(Interrupted), stop.at_once():
            raise AssertionError("not reached")
        stop.ask(signal.SIGTERM)  # later again


def test_later_is_not_begun_where_a_signal_was_lost_on_the_way():
    stop = Stop()
    with pytest.raises(Interrupted):
        stop.ask(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM"), stop.later():
        raise AssertionError("not reached")


def test_within_later_the_first_signal_prints_what_happens(capfd):
    stop = Stop()
    with stop.later("the step ends first."):
        stop.ask(signal.SIGTERM)
        stop.ask(signal.SIGTERM)
        assert capfd.readouterr().err == "Interrupted by SIGTERM: the step ends first.\n"
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


PARENT_OF = """
import os, subprocess, sys, time
child = "import time; from pods_rl.distributed.signals import end_with_parent; end_with_parent(); print('ready', "
child += "flush=True); time.sleep(900)"
os.environ["PODS_PARENT"] = str(os.getpid())
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(900)
"""


def test_a_process_ends_with_its_parent_however_that_ends():
    parent = subprocess.Popen([sys.executable, "-c", PARENT_OF], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


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


def test_once_the_end_is_written_no_signal_changes_it():
    with stop_on_signals() as stop, stop.later():
        stop.over()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.ended


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


def test_a_command_that_a_signal_ends_at_once_has_its_exit_code():
    """Of a command that is no run: typer says 130 for every KeyboardInterrupt."""
    program = """
import os, signal, sys, pods_rl.cli as c, pods_rl.cli.catalog as catalog
catalog.console = lambda: os.kill(os.getpid(), signal.SIGUSR1)
sys.argv = ["pods", "recipes"]
c.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 138, done
    assert "Traceback" not in done.stderr


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
