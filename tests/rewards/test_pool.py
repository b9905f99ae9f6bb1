"""The verifier pool: it answers, it gives up, it leaves no process behind."""

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from pods_rl.errors import UserError
from pods_rl.rewards import verifier
from pods_rl.rewards.verifier import VerifierPool
from pods_rl.sandbox import pool as pool_module
from pods_rl.sandbox.worker import Reply, frame

from .. import DEADLINE, until

HANG = ("18", r"\sum_{n=1}^{10^9} \frac{1}{n^n}")
RIGHT = ("18", "9*2")
WRONG = ("18", "9*3")


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Processor time alone ends an answer here: a machine that stalls gives none up."""
    monkeypatch.setattr(verifier, "PATIENCE", 1e4)


@pytest.fixture(scope="module")
def running():
    """A pool for tests that leave its processes alone: starting one takes a second."""
    pool = VerifierPool(size=2, limit=1.0)
    yield pool
    pool.close()


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="watches processes through /proc")


def pids(pool: VerifierPool) -> list[int]:
    return [worker.process.pid for worker in pool.workers if worker.process]


def group(leader: int) -> set[int]:
    """The running processes of a verifier: itself and the child that does the work; no zombies."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == leader and state != "Z":
                found.add(int(stat.parent.name))
    return found


def test_answers_come_in_order_from_processes_that_start_when_they_are_needed():
    pool = VerifierPool(size=2, limit=1.0)
    assert pool.verify([]) == []
    assert pids(pool) == []
    assert [pool.verify([pair]) for pair in (RIGHT, WRONG)] == [[True], [False]]
    assert len(pids(pool)) == 1
    assert pool.verify([RIGHT, WRONG] * 32) == [True, False] * 32
    assert (pool.timeouts, pool.crashes) == (0, 0)
    pool.close()
    pool.close()  # twice is fine
    assert pids(pool) == []


@needs_proc
def test_what_hangs_is_killed_counted_and_replaced():
    pool = VerifierPool(size=1, limit=1.0)
    pool.verify([RIGHT])
    (leader,) = pids(pool)
    before = group(leader)
    assert len(before) == 2
    assert pool.verify([RIGHT, HANG, RIGHT]) == [True, False, True]
    assert (pool.timeouts, pool.crashes) == (1, 0)
    assert pids(pool) == [leader]  # a new child is cheap, a new process is not
    assert pool.verify([RIGHT]) == [True]  # the new child is there by now
    after = group(leader)
    assert len(after) == 2
    assert after != before
    pool.close()
    until(lambda: not group(leader))


@pytest.mark.slow
@needs_proc
def test_a_process_that_dies_idle_costs_nothing_and_shifts_no_verdict():
    pool = VerifierPool(size=1)
    pool.verify([RIGHT])
    (leader,) = pids(pool)
    (child,) = group(leader) - {leader}
    os.kill(child, signal.SIGKILL)
    until(lambda: not group(leader) <= {leader, child})  # it is replaced
    assert pool.verify([RIGHT, WRONG, WRONG, RIGHT]) == [True, False, False, True]
    assert pids(pool) == [leader]
    os.kill(leader, signal.SIGKILL)
    pool.workers[0].process.wait()
    assert pool.verify([RIGHT, WRONG]) == [True, False]  # replaced before it was asked
    assert pids(pool) != [leader]
    assert (pool.timeouts, pool.crashes) == (0, 0)
    pool.close()


@pytest.mark.slow
@needs_proc
def test_a_process_that_does_not_even_give_up_is_killed_with_its_child(monkeypatch):
    monkeypatch.setattr(verifier, "PATIENCE", 4.0)
    pool = VerifierPool(size=1)
    pool.verify([RIGHT])
    (leader,) = pids(pool)
    for pid in group(leader):
        os.kill(pid, signal.SIGSTOP)
    assert pool.verify([RIGHT]) == [True]  # at the second try, by another process
    until(lambda: not group(leader))
    assert pids(pool) != [leader]
    pool.close()


def asked(monkeypatch, pool, slow):
    """Have `pool` answer without a process: what is in `slow` needs so many seconds; give the list of limits asked."""
    limits = []

    def ask(pairs, _, limit):
        limits.extend([limit] * len(pairs))
        return [Reply("timeout") if slow.get(pair, 0) > limit else Reply("gave", True) for pair in pairs]

    monkeypatch.setattr(pool, "ask", ask)
    return limits


def test_slow_answers_get_a_second_try_with_an_equal_share_up_to_the_limit(monkeypatch):
    pool = VerifierPool(size=2, limit=5.0)
    limits = asked(monkeypatch, pool, {HANG: 100, ("a", "b"): 3})
    assert pool.verify([HANG, RIGHT, ("a", "b")]) == [False, True, True]
    assert limits == [verifier.FIRST_LIMIT] * 3 + [verifier.BATCH_SECONDS] * 2
    assert (pool.timeouts, pool.crashes) == (1, 0)
    limits.clear()
    assert pool.verify([HANG] * 64) == [False] * 64  # each share would be too small: no second try
    assert limits == [verifier.FIRST_LIMIT] * 64
    limits.clear()
    pool.limit = 0.1
    assert pool.verify([HANG]) == [False]
    assert limits == [0.1]
    pool.close()


def test_the_crash_of_a_process_that_has_just_answered_is_not_read_as_the_next_answer():
    pool = VerifierPool(size=1)
    worker = pool_module.Worker(pool)
    worker.channel, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(frame(1, Reply("gave", True)))
        assert worker.exchange(1, b"", DEADLINE) == Reply("gave", True)
        theirs.sendall(frame(1, Reply("crash")) + frame(2, Reply("gave", False)))
        assert worker.exchange(2, b"", DEADLINE) == Reply("gave", False)
        theirs.sendall(frame(1, Reply("crash")))
        assert worker.exchange(3, b"", DEADLINE) == Reply("crash")  # not of the last request
    pool.close()


def test_text_that_would_break_the_channel(running):
    odd = ["\n1\n", "\x00", '"', "\udcff", "é", "1\r\n1", "", " " * 200_000]
    assert running.verify([("18", text) for text in odd]) == [False] * len(odd)
    assert running.verify([RIGHT]) == [True]


def test_several_threads_may_ask_at_once(running):
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda _: running.verify([RIGHT, WRONG]), range(8))) == [[True, False]] * 8


def test_a_verifier_that_cannot_start_makes_up_no_score(monkeypatch):
    monkeypatch.setattr(pool_module, "_PROGRAM", "raise SystemExit('no such library')")
    pool = VerifierPool(size=1)
    with pytest.raises(UserError, match=r"verifier|process"):
        pool.verify([RIGHT])
    pool.close()
