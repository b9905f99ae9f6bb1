"""What one process of a run tells the others when the run cannot go on. No torch."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..errors import UserError
from ..text import plain_text
from .heartbeat import SILENT, Position

# Of the many types that a broken collective raises, most are plain RuntimeErrors: the library's name is in the text.
_TRANSPORTS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "tcpstore", "c10d")


@dataclass(frozen=True)
class Failure:
    """Why a run ends.

    Args:
        process: the one at fault.
        reason: one line; what `status.json` keeps.
        details: a traceback to print below it, or nothing.
        code: with which every process exits.
        state: in which the run ends.
        host: of a process that ended without a word, where its launcher can say how; else empty.
    """

    process: int
    reason: str
    details: str = ""
    code: int = 1
    state: str = "failed"
    host: str = ""

    def to_json(self) -> str:
        """
        >>> failure = Failure(1, "process 1: ValueError: no")
        >>> Failure.from_json(failure.to_json()) == failure
        True
        """
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        return cls(**json.loads(text))


def of_error(error: BaseException, process: int) -> Failure:
    """What an exception in a process's own work means for the run.

    >>> of_error(UserError("No data.\\nPut some there."), 1).reason, of_error(UserError(""), 1).code
    ('process 1: No data. Put some there.', 2)
    """
    if isinstance(error, KeyboardInterrupt):
        return Failure(process, str(error) or "interrupted", code=getattr(error, "code", 130), state="stopped")
    said = plain_text(error).replace("\n", " ").strip()
    if isinstance(error, UserError):
        return Failure(process, f"process {process}: {said}", code=2)
    kind = type(error).__name__
    details = plain_text("".join(traceback.format_exception(error)))
    return Failure(process, f"process {process}: {kind}: {said}" if said else f"process {process}: {kind}", details)


def of_stall(process: int, late: Position, waiting: int, own: Position, limit: float) -> Failure:
    """What it means that `process`, which stands at `late`, did not come to where process `waiting` waits."""
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
    """What it means that a collective failed and no process is known to be at fault: where each of them is."""
    said = plain_text(error).split("\n")[0]
    places = {process: own, **others}
    lines = [f"process {k}: {places[k].describe()}, at {plain_text(places[k].where)}\n" for k in sorted(places)]
    return Failure(process, f"process {process} lost contact {own.describe()}: {said}", "".join(lines))


def is_of_a_collective(error: BaseException) -> bool:
    """Whether an exception may only say that another process has gone.

    >>> is_of_a_collective(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    True
    >>> is_of_a_collective(ValueError("reward 'format' gave None"))
    False
    """
    named = type(error).__module__.startswith("torch.distributed")
    text = str(error).lower()
    return named or (isinstance(error, RuntimeError) and any(word in text for word in _TRANSPORTS))
