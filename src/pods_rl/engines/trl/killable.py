"""Call reward functions in forked children of this process, which are killed at a timeout."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...errors import UserError
from ...sandbox.pool import Work, WorkerPool
from ...sandbox.scores import failure
from .compat import get_callable_name, is_async_callable
from .rewards import Scores, check_scores, one_row

AT_ONCE = 4  # children that share single rows


def killable(function: Callable[..., Any], seconds: float) -> Callable[..., Scores]:
    """Return a reward function in TRL's signature, for PODSTrainer, that cannot hang the run.

    Each batch is scored in a forked child of this process, which is killed after half of `seconds` of wall time. If it
    raises or is killed, each row is scored alone, in four children, with the other half of the time; a row without a
    score is then handled as PODSConfig's `reward_errors` says. A batch with one row that hangs takes `seconds`.

    The function must keep no state between calls, and cannot use the GPU, as no forked process can. `log_extra` and
    `log_metric` reach the trainer. Each row may be scored a second time. Its child processes end with it, its
    standard input is empty, and an exception reaches the trainer as text.

    Raises:
        UserError: an async function or a reward model, or a limit that is not above 0.

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
    if not seconds > 0:
        raise UserError(f"killable needs a limit above 0 seconds: got {seconds!r}")
    return _Killable(function, seconds)


class _Killable:
    """A killable function, with the name and the attributes of the user's."""

    def __init__(self, function: Callable[..., Any], seconds: float) -> None:
        functools.update_wrapper(self, function, updated=())
        self.__name__ = get_callable_name(function)  # of a partial or an object too
        self._seconds = seconds

    def __call__(self, **columns: Any) -> Scores:
        rows, limit = len(columns["completions"]), self._seconds / 2
        answer = functools.partial(_answer, self.__wrapped__, columns, rows)
        pool = WorkerPool(AT_ONCE, limit, Work(answer, prepare=_one_thread), runs_user_code=True)
        try:
            (reply,) = pool.ask([None], 0.0, limit)
            replies = [reply] if reply.kind == "gave" else pool.ask(range(rows), 0.0, limit)
        finally:
            pool.close()
        for each in replies:
            if each.kind == "gave" and "refused" in each.value:
                raise UserError(each.value["refused"])
        if reply.kind != "gave":
            return [each.value["scores"][0] if each.kind == "gave" else failure(each, limit) for each in replies]
        for name in ("log_extra", "log_metric"):
            for logged in reply.value[name]:
                columns[name](*logged)
        return reply.value["scores"]

    def __reduce__(self) -> Any:
        if getattr(sys.modules.get(self.__module__), self.__qualname__, None) is self:
            return self.__qualname__  # a decorated function is found by its name
        return killable, (self.__wrapped__, self._seconds)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)


def _answer(function: Callable[..., Any], columns: Mapping[str, Any], rows: int, row: int | None) -> dict[str, Any]:
    """In the child: score one row or (None) all; return the scores and the logs, or why the scores are refused."""
    logged: dict[str, list[Any]] = {"log_extra": [], "log_metric": []}
    recording = {name: lambda *values, name=name: logged[name].append(values) for name in logged}
    asked = dict(columns) if row is None else one_row(columns, row, rows)
    try:
        scores = check_scores(
            function(**{**asked, **recording}), get_callable_name(function), rows if row is None else 1
        )
    except UserError as error:
        return {"refused": str(error)}
    return {"scores": scores, **logged}


def _one_thread() -> None:
    torch.set_num_threads(1)  # the parent's thread pool does not exist in the child
