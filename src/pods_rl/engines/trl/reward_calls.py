"""One call of a reward function: what it gives is checked, and what it raises is handled as `reward_errors` says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from trl.trainer.utils import is_async_callable

from ...distributed import busy
from ...errors import UserError, add_note, raised
from ...rewards.sandbox.processes import no_copies
from ...rewards.user_rewards import RewardFailure, as_score
from ...text import plain_text
from .rollouts import as_text

REWARD_ERRORS = ("raise", "zero", "drop")
Scores = list[float | RewardFailure | None]


@dataclass
class Faults:
    """Rows that had no score in one generation, over the reward functions of this process."""

    errors: int = 0
    timeouts: int = 0
    first: dict[str, str] = field(default_factory=dict)  # by function, what happened to its first such row

    def clear(self) -> None:
        self.errors = self.timeouts = 0
        self.first.clear()


def watched(function: Any, name: str, policy: str, faults: Faults) -> Any:
    """The reward function as TRL calls it in this generation; a reward model stays as it is.

    Args:
        name: what messages call it.
        policy: one of REWARD_ERRORS, for rows that it does not score.
        faults: where those are counted.
    """
    if isinstance(function, nn.Module):
        return function
    call = _AsyncCall if is_async_callable(function) else _Call
    return call(function, name, policy, faults)


@dataclass
class _Call:
    function: Callable[..., Any]
    name: str
    policy: str
    faults: Faults

    def __call__(self, **columns: Any) -> list[float | None]:
        rows = len(columns["completions"])
        with busy(f"reward {self.name}"):  # around the second calls too: every process passes as many marks
            try:
                with no_copies():
                    scores = check_scores(self.function(**columns), self.name, rows)
            except UserError:
                raise
            except (Exception, SystemExit) as error:
                self._raise(error, rows)
                scores = [self._alone(columns, i, rows) for i in range(rows)]
        return self._settled(scores, columns)

    def _alone(self, columns: Mapping[str, Any], row: int, rows: int) -> float | RewardFailure | None:
        """The score of one row, for which the function is called a second time."""
        try:
            with no_copies():
                return check_scores(self.function(**one_row(columns, row, rows)), self.name, 1)[0]
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            return RewardFailure(f"raised {raised(error)}", error=error)

    def _raise(self, error: BaseException, rows: int) -> None:
        """Raise what the function raised, by its own type, unless the policy scores the rows one by one."""
        if self.policy != "raise":
            return
        said = f"reward function {self.name!r} raised {{}} for a batch of {rows} completions. {_ADVICE['raise']}"
        if isinstance(error, SystemExit):
            raise UserError(plain_text(said.format(raised(error)))) from error
        add_note(error, plain_text(said.format("this")))
        raise error

    def _settled(self, scores: Scores, columns: Mapping[str, Any]) -> list[float | None]:
        """Failures by the policy: inf marks the whole rollout as unscored. NaN is None, as TRL takes it."""
        settled: list[float | None] = []
        for i, score in enumerate(scores):
            if isinstance(score, RewardFailure):
                self._count(i, columns, score)
                settled.append(0.0 if self.policy == "zero" else math.inf)
            else:
                settled.append(score)
        return settled

    def _count(self, row: int, columns: Mapping[str, Any], failure: RewardFailure) -> None:
        refusal = self._refusal(row, columns, failure.reason)
        if self.policy == "raise":
            raise refusal from failure.error
        self.faults.errors += not failure.late
        self.faults.timeouts += failure.late
        self.faults.first.setdefault(self.name, str(refusal))

    def _refusal(self, row: int, columns: Mapping[str, Any], reason: str) -> UserError:
        prompt, completion = (shown(as_text(columns[key][row])) for key in ("prompts", "completions"))
        return UserError(
            plain_text(f"reward function {self.name!r} {reason} for row {row} of {len(columns['completions'])}")
            + f", prompt {prompt}, completion {completion}. {_ADVICE[self.policy]}"
        )


class _AsyncCall(_Call):
    """One that is awaited."""

    async def __call__(self, **columns: Any) -> list[float | None]:  # type: ignore[override]
        rows = len(columns["completions"])
        with busy(f"reward {self.name}"):
            try:
                with no_copies():
                    scores = check_scores(await self.function(**columns), self.name, rows)
            except UserError:
                raise
            except (Exception, SystemExit) as error:
                self._raise(error, rows)
                scores = [await self._alone(columns, i, rows) for i in range(rows)]
        return self._settled(scores, columns)

    async def _alone(self, columns: Mapping[str, Any], row: int, rows: int) -> float | RewardFailure | None:  # type: ignore[override]
        try:
            with no_copies():
                return check_scores(await self.function(**one_row(columns, row, rows)), self.name, 1)[0]
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            return RewardFailure(f"raised {raised(error)}", error=error)


_ADVICE = {
    "raise": "Fix the function, or set reward_errors: zero (such rollouts score 0) or drop (they count as unscored)",
    "zero": "It scores 0 (reward_errors: zero)",
    "drop": "It counts as unscored (reward_errors: drop)",
}


def one_row(columns: Mapping[str, Any], row: int, rows: int) -> dict[str, Any]:
    """The arguments of a call for one row alone; what it logs is left out."""
    alone = {
        key: [values[row]] if isinstance(values, list) and len(values) == rows else values
        for key, values in columns.items()
    }
    return alone | {"log_extra": _ignore, "log_metric": _ignore}


def _ignore(*_: Any) -> None:
    """What a second call logs was logged by the first."""


def check_scores(returned: Any, name: str, rows: int) -> Scores:
    """What a reward function gave, as floats, None where it does not apply, and RewardFailure where there is no score.

    Takes lists, tuples and one-dimensional arrays of real numbers (`as_score`); booleans count as 0 and 1.

    Raises:
        UserError: anything else, with what came and what was expected.

    >>> check_scores([1, None, True], "f", 3)
    [1.0, None, 1.0]
    >>> check_scores([0.5, "1"], "f", 2)
    Traceback (most recent call last):
    pods_rl.errors.UserError: reward function 'f' gave '1' (str) for row 1; expected a list of 2 floats, ...
    """

    def refuse(came: str) -> UserError:
        return UserError(
            f"reward function {plain_text(name)!r} gave {came}; expected a list of {rows} floats, one per completion "
            "(None where it does not apply). Nothing was trained on it: fix what the function returns"
        )

    if hasattr(returned, "tolist") and hasattr(returned, "shape"):
        if len(returned.shape) != 1:
            raise refuse(f"{_kind(returned)} of shape {list(returned.shape)}")
        returned = returned.tolist()
    if not isinstance(returned, Sequence) or isinstance(returned, (str, bytes)):
        raise refuse(_kind(returned))
    if len(returned) != rows:
        raise refuse(f"{_kind(returned)} of {len(returned)}")
    scores: Scores = []
    for row, value in enumerate(returned):
        try:
            scores.append(value if isinstance(value, RewardFailure) else as_score(value))
        except TypeError:
            raise refuse(f"{shown(value)} ({type(value).__name__}) for row {row}") from None
    return scores


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def shown(value: Any) -> str:
    """A value in a message: quoted, short, and harmless in a terminal.

    >>> shown("1+1=\\x1b[2J"), len(shown("9" * 1000))
    ("'1+1=\\\\x1b[2J'", 82)
    """
    if isinstance(value, str):
        value = value if len(value) <= 80 else value[:77] + "..."
        return plain_text(repr(value))
    text = repr(value)
    return plain_text(text if len(text) <= 80 else text[:77] + "...")
