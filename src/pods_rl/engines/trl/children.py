"""Reward functions called in children of this process, which are killed when they take too long."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import nn
from trl.trainer.utils import is_async_callable

from ...errors import UserError, raised
from ...rewards.own import Failure
from ...rewards.worker import CAN_FORK, give_up_after
from .exchange import plain
from .reward_calls import Scores, check_scores, one_row

Reply = dict[str, Any]
AT_ONCE = 4  # children that share single rows


def killable(function: Callable[..., Any], seconds: float) -> Callable[..., Scores]:
    """A reward function in TRL's signature, for PODSTrainer, that cannot hang the run.

    Each batch is scored in a forked child of this process, which is killed after half of `seconds` of wall time. Where
    it raised or was killed, every row is called alone, in four children, and has the other half: those that still give
    no score are treated as PODSConfig's `reward_errors` says. So a batch with one row that hangs takes `seconds`.

    What a child does stays in it: the function must keep no state between calls, and it cannot use the GPU, since a
    forked process cannot. `log_extra` and `log_metric` reach the trainer. Every row may be called a second time.

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

    @functools.wraps(function)
    def scored(**columns: Any) -> Scores:
        rows = len(columns["completions"])
        (reply,) = run_children([functools.partial(_call, function, columns, rows)], seconds / 2)
        if "scores" not in reply:
            alone = [functools.partial(_call, function, one_row(columns, i, rows), 1) for i in range(rows)]
            return [_score(row) for row in run_children(alone, seconds / 2, AT_ONCE)]
        for name in ("log_extra", "log_metric"):
            for logged in reply[name]:
                columns[name](*logged)
        return reply["scores"]

    return scored


def _call(function: Callable[..., Any], columns: Mapping[str, Any], rows: int) -> Reply:
    """In the child: the scores, and what was logged on the way."""
    logged: Reply = {"log_extra": [], "log_metric": []}
    recording = {name: lambda *values, name=name: logged[name].append(values) for name in logged}
    name = getattr(function, "__name__", type(function).__name__)
    try:
        scores = check_scores(function(**{**columns, **recording}), name, rows)
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
    running: dict[Connection, _Child] = {}
    try:
        while shares or running:
            for share in shares:
                child = _Child(works, share, seconds)
                running[child.pipe] = child
            shares = []
            first = min(child.deadline for child in running.values())
            ready = wait(list(running), timeout=max(0.0, first - time.monotonic()))
            for pipe, child in list(running.items()):
                if pipe not in ready and time.monotonic() < child.deadline:
                    continue
                reply = child.reply() if pipe in ready else _late(seconds)
                replies[child.left.pop(0)] = reply
                if "died" in reply or not child.left:
                    child.end()
                    del running[pipe]
                    shares += [child.left] if child.left else []
                child.deadline = time.monotonic() + seconds
    finally:
        for child in running.values():
            child.end()
    for reply in replies:
        if "refused" in reply:
            raise UserError(reply["refused"])
    return replies


def _late(seconds: float) -> Reply:
    return {"failed": f"gave no score within {seconds:g} s", "late": True, "died": True}


class _Child:
    """A forked process at its share of the works, and the pipe that its replies come through."""

    def __init__(self, works: Sequence[Callable[[], Reply]], share: list[int], seconds: float) -> None:
        context = multiprocessing.get_context("fork")
        self.left = share  # the first is at work
        self.pipe, theirs = context.Pipe(duplex=False)
        mine = [works[number] for number in share]
        self._process = context.Process(target=_serve, args=(theirs, mine, seconds))
        self._process.start()
        theirs.close()
        self.deadline = time.monotonic() + seconds

    def reply(self) -> Reply:
        try:
            return json.loads(self.pipe.recv_bytes())  # JSON: nothing of a child's is unpickled
        except (EOFError, OSError, ValueError):
            return {"failed": "ended its process", "died": True}

    def end(self) -> None:
        """Kill the child and what it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()


def _serve(pipe: Connection, works: Sequence[Callable[[], Reply]], seconds: float) -> None:
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)  # the parent's thread pool is not in the child
    for work in works:
        give_up_after(0.0, seconds + 5)  # where the parent dies first
        try:
            reply = work()
        except Exception as error:
            reply = {"failed": f"raised {raised(error)}"}
        pipe.send_bytes(json.dumps(reply, default=plain).encode("utf-8", "surrogatepass"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
