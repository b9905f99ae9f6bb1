"""When a signal is met: at once, or later, or at once again."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from pods_rl.stopping import Interrupted, Stop, stop_on_signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
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
