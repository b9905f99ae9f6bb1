"""Why a run ends: what one process publishes to the others. No torch."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UserError
from ..text import plain_text
from .heartbeat import SILENT, Position

# A broken collective raises many types, most often a plain RuntimeError with the library's name in its text.
_TRANSPORTS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "tcpstore", "c10d")


@dataclass(frozen=True)
class Failure:
    """Why a run ends.

    Args:
        process: the one at fault.
        reason: one line, which `status.json` keeps.
        details: a traceback to print below it, or nothing.
        code: the exit code of every process.
        state: in which the run ends.
        host: of a process that was killed, where its launcher can say how; else empty.
    """

    process: int
    reason: str
    details: str = ""
    code: int = 1
    state: str = "failed"
    host: str = ""


def of_error(error: BaseException, process: int) -> Failure:
    """Return the failure that an exception in a process's own work means for the run.

    >>> of_error(UserError("No data.\\nPut some there."), 1).reason, of_error(UserError(""), 1).code
    ('process 1: No data. Put some there.', 2)
    """
    if isinstance(error, KeyboardInterrupt):
        return Failure(process, str(error) or "interrupted", code=getattr(error, "code", 130), state="stopped")
    message = plain_text(error).replace("\n", " ").strip()
    if isinstance(error, UserError):
        return Failure(process, f"process {process}: {message}", code=2)
    kind = type(error).__name__
    details = plain_text("".join(traceback.format_exception(error)))
    return Failure(process, f"process {process}: {kind}: {message}".removesuffix(": "), details)


def of_stall(process: int, late: Position, waiting: int, own: Position, limit: float) -> Failure:
    """Return the failure of `process`, last seen at `late`, for which process `waiting` waits at `own`."""
    at = f", at {plain_text(late.where)}" if late.where else ""
    silent = own.seen - late.seen
    quiet = f", without a sign of life for {silent:.0f} s" if silent > SILENT else ""
    return Failure(
        process,
        f"process {process} has been {late.describe()} for {own.seen - late.since:.0f} s{at}{quiet}; process {waiting} "
        f"waited {own.seen - own.since:.0f} s for it, and ddp_timeout = {limit:g} s allows no more. Set a higher "
        "ddp_timeout in the recipe if work may take so long",
    )


def of_broken_collective(error: BaseException, process: int, own: Position, others: Mapping[int, Position]) -> Failure:
    """Return the failure of a collective that broke for no known reason: it lists where each process is."""
    message = plain_text(error).split("\n")[0]
    positions = {process: own, **others}
    lines = [f"process {k}: {at.describe()}, at {plain_text(at.where)}\n" for k, at in sorted(positions.items())]
    return Failure(process, f"process {process} lost contact {own.describe()}: {message}", "".join(lines))


def is_of_a_collective(error: BaseException) -> bool:
    """Whether an exception may only mean that another process has ended.

    >>> is_of_a_collective(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    True
    >>> is_of_a_collective(ValueError("reward 'format' gave None"))
    False
    """
    text = str(error).lower()
    of_transport = isinstance(error, RuntimeError) and any(word in text for word in _TRANSPORTS)
    return of_transport or type(error).__module__.startswith("torch.distributed")
