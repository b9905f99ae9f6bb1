"""Reward functions called in children of this process, which are killed when they take too long."""

from __future__ import annotations

import functools
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import nn
from trl.trainer.utils import get_callable_name, is_async_callable

from ...errors import UserError, raised
from ...rewards.own import Failure
from ...rewards.processes import (
    CAN_FORK,
    Private,
    end_family,
    end_leader,
    fork,
    frame,
    give_up_after,
    lead,
    no_copies,
    supervise,
    unframe,
    without_input,
)
from .rewards import Scores, check_scores, one_row
from .rows import plain

Reply = dict[str, Any]
AT_ONCE = 4  # children that share single rows
MOST_BYTES = 1 << 20  # read at once


def killable(function: Callable[..., Any], seconds: float) -> Callable[..., Scores]:
    """A reward function in TRL's signature, for PODSTrainer, that cannot hang the run.

    Each batch is scored in a forked child of this process, which is killed after half of `seconds` of wall time. Where
    it raised or was killed, every row is called alone, in four children, and has the other half: those that still give
    no score are treated as PODSConfig's `reward_errors` says. So a batch with one row that hangs takes `seconds`.

    What a child does stays in it: the function must keep no state between calls, and it cannot use the GPU, since a
    forked process cannot. `log_extra` and `log_metric` reach the trainer. Every row may be called a second time. What a
    child started ends with it, its standard input is empty, and an exception reaches the trainer as text.

    Raises:
        UserError: an async function or a reward model, a limit that is not above 0, or a system that cannot fork.

    >>> async def judge(completions, **_): ...
    >>> killable(judge, seconds=5)
    Traceback (most recent call last):
    pods_rl.errors.UserError: killable takes a plain reward function, got a function that is async or a model...
    """
    if isinstance(function, nn.Module) or is_async_callable(function):
        raise UserError(
            f"killable takes a plain reward function, got a {type(function).__name__} that is async or a model: "
            "give it a limit of its own (asyncio.wait_for)"
        )
    if not seconds > 0 or not CAN_FORK:
        raise UserError(f"killable needs a limit above 0 (got {seconds!r}) and a system that can fork (not Windows)")
    return _Killable(function, seconds)


class _Killable:
    """What `killable` gives; it has the name and the attributes of the function."""

    def __init__(self, function: Callable[..., Any], seconds: float) -> None:
        functools.update_wrapper(self, function, updated=())
        self.__name__ = get_callable_name(function)  # of a partial or an object too
        self._seconds = seconds

    def __call__(self, **columns: Any) -> Scores:
        function, rows = self.__wrapped__, len(columns["completions"])
        (reply,) = run_children([functools.partial(_call, function, columns, rows)], self._seconds / 2)
        if "scores" not in reply:
            alone = [functools.partial(_call, function, one_row(columns, i, rows), 1) for i in range(rows)]
            return [_score(row) for row in run_children(alone, self._seconds / 2, AT_ONCE)]
        for name in ("log_extra", "log_metric"):
            for logged in reply[name]:
                columns[name](*logged)
        return reply["scores"]

    def __reduce__(self) -> Any:
        if getattr(sys.modules.get(self.__module__), self.__qualname__, None) is self:
            return self.__qualname__  # a decorated function: its name finds it
        return killable, (self.__wrapped__, self._seconds)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # a copy that is not made yet
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)


def _call(function: Callable[..., Any], columns: Mapping[str, Any], rows: int) -> Reply:
    """In the child: the scores, and what was logged on the way."""
    logged: Reply = {"log_extra": [], "log_metric": []}
    recording = {name: lambda *values, name=name: logged[name].append(values) for name in logged}
    try:
        scores = check_scores(function(**{**columns, **recording}), get_callable_name(function), rows)
    except UserError as error:
        return {"refused": str(error)}
    return {"scores": scores, **logged}


def _score(reply: Reply) -> float | Failure | None:
    if "scores" in reply:
        return reply["scores"][0]
    return Failure(reply["failed"], late=reply.get("late", False))


def run_children(works: Sequence[Callable[[], Reply]], seconds: float, at_once: int = 1) -> list[Reply]:
    """What each work gave, in order, or `{"failed": why}`; none has longer than `seconds`, and no child is left.

    So many children share the works; one that is killed is replaced for those that it had left.

    Raises UserError where a work gave `{"refused": message}`.
    """
    replies: list[Reply] = [{}] * len(works)
    shares = [list(range(start, len(works), at_once)) for start in range(min(at_once, len(works)))]
    running: dict[int, _Child] = {}
    try:
        while shares or running:
            for share in shares:
                child = _Child(works, share, seconds)
                running[child.pipe] = child
            shares = []
            first = min(child.deadline for child in running.values())
            ready = wait(list(running), timeout=max(0.0, first - time.monotonic()))
            for pipe, child in list(running.items()):
                heard = child.hear() if pipe in ready else []
                if not heard and time.monotonic() >= child.deadline:
                    heard = [{"failed": f"gave no score within {seconds:g} s", "late": True, "died": True}]
                for reply in heard:
                    replies[child.left.pop(0)] = reply
                    child.deadline = time.monotonic() + seconds
                    if "died" in reply or not child.left:
                        child.end()
                        del running[pipe]
                        shares += [child.left] if child.left else []
                        break
    finally:
        for child in running.values():
            child.end()
    for reply in replies:
        if "refused" in reply:
            raise UserError(reply["refused"])
    return replies


class _Child:
    """A forked leader, its child at their share of the works, and the pipe that the replies come through."""

    def __init__(self, works: Sequence[Callable[[], Reply]], share: list[int], seconds: float) -> None:
        self.left = share  # the first is at work
        self._number = secrets.randbits(62)  # of the reply that is due
        self._heard = b""
        self.pipe, theirs = os.pipe()
        serve = functools.partial(_serve, theirs, [works[i] for i in share], self._number, seconds)
        self._leader = fork(functools.partial(_lead, serve))
        os.close(theirs)
        self.deadline = time.monotonic() + seconds

    def hear(self) -> list[Reply]:
        """The replies that came since; none where the pipe holds a part of one. Call it when the pipe is ready."""
        data = os.read(self.pipe, MOST_BYTES)
        *lines, self._heard = (self._heard + data).split(b"\n")
        replies = [self._read(line) for line in lines]
        return replies if data else [*replies, {"failed": "ended its process", "died": True}]

    def _read(self, line: bytes) -> Reply:
        number, self._number = self._number, self._number + 1
        try:
            reply = unframe(line, number)  # JSON: nothing of a child's is unpickled
        except ValueError:
            reply = None
        return reply if isinstance(reply, dict) else {"failed": "wrote into the pipe of its process", "died": True}

    def end(self) -> None:
        """Kill the child and what it started."""
        end_leader(self._leader)
        with suppress(ChildProcessError):  # a handler of SIGCHLD was quicker
            os.waitpid(self._leader, 0)
        os.close(self.pipe)


def _lead(serve: Callable[[], None]) -> None:
    os.setsid()
    without_input()
    lead()
    supervise(serve)
    end_family(os.getpid())


def _serve(pipe: int, works: Sequence[Callable[[], Reply]], first: int, seconds: float) -> None:
    private = Private(pipe)
    torch.set_num_threads(1)  # the parent's thread pool is not in the child
    for number, work in enumerate(works, first):
        give_up_after(0.0, seconds + 5)  # where the parent dies first
        try:
            with no_copies():
                line = frame(number, work(), default=plain)
        except BaseException as error:  # SystemExit too
            line = frame(number, {"failed": f"raised {raised(error)}"})
        private.send(pipe, line)
