"""The rollouts of a report: every group of the ledgers as data for the page's script, bounded in size."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..runs import Run
from ..text import call_text, content_text, plain_text
from .arms import Arm
from .text import finite, plain, rounded

DATA_MB = 20.0
"""Approximate megabytes of the page that rollouts may take."""

TEXT_LIMIT = 2_000
"""Characters of a text that are shown."""

_ESCAPED = re.compile("[<>&']")  # six bytes each in a page
_MOST_NUMBERS = 12  # of equal rollouts that are named
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, pa.ArrowException)


@dataclass
class Ledger:
    """The rollouts of a page."""

    limit_mb: float = DATA_MB  # megabytes that they may take
    files: int = 0
    unreadable: list[str] = field(default_factory=list)  # names of files
    groups: int = 0  # in the files that could be read
    rollouts: int = 0  # on the page
    left_out: int = 0  # groups that do not fit the page
    _bytes: int = 0
    _arms: dict[str, int] = field(default_factory=dict)
    _runs: dict[str, int] = field(default_factory=dict)
    _texts: dict[str, int] = field(default_factory=dict)  # each text once
    _shown: list[list[Any]] = field(default_factory=list)

    @property
    def data(self) -> Mapping[str, Any]:
        """What templates/ledger.js reads; empty without groups."""
        if not self._shown:
            return {}
        groups = sorted(self._shown, key=lambda group: (group[0], group[2], group[1], group[3]))  # arm, step, run
        names = {"arms": [*self._arms], "runs": [*self._runs], "texts": [*self._texts]}
        return {**names, "groups": groups, "total": self.groups, "limit_mb": self.limit_mb}

    def read(self, path: Path, arm: Arm, run: str) -> None:
        """Add the groups of a file; raise one of ``_UNREADABLE`` if it is damaged."""
        if not path.is_file():  # opening a pipe would block
            raise OSError("not a regular file")
        parts: dict[int, list[dict[str, Any]]] = {}
        with pq.ParquetFile(path) as file:
            rows = file.read(columns=["step", "group"] if self.left_out else None).to_pylist()
        for row in rows:
            if not isinstance(row["step"], int) or not isinstance(row["group"], int):
                raise TypeError("step and group must be integers")
            parts.setdefault(row["group"], []).append(row)
        self.groups += len(parts)
        for _, part in sorted(parts.items()):
            if self.left_out or not self._add(part, arm, run):
                self.left_out += 1

    def _add(self, rows: Sequence[Mapping[str, Any]], arm: Arm, run: str) -> bool:
        """Add a group if the page has room for it."""
        rollouts = [_rollout(row, index) for index, row in enumerate(rows)]
        rollouts.sort(key=lambda one: (-math.inf if one.reward is None else one.reward, -one.index), reverse=True)
        known, first = len(self._texts), rows[0]
        group = [
            self._arms.setdefault(arm.label, len(self._arms)),
            self._runs.setdefault(run, len(self._runs)),
            first["step"],
            first["group"],
            self._id(_middle_cut(first.get("prompt"))),
            self._id(_middle_cut(first.get("answer"), 200)),
            _stat(rollouts),
            self._lines(rollouts),
        ]
        new = [*self._texts][known:]
        text = json.dumps([group, new], ensure_ascii=False)
        size = len(text.encode()) + 5 * len(_ESCAPED.findall(text))
        if self._bytes + size > self.limit_mb * 1e6:
            for one in new:
                del self._texts[one]
            return False
        self._shown.append(group)
        self._bytes += size
        self.rollouts += len(rollouts)
        return True

    def _lines(self, rollouts: Sequence[_Rollout]) -> list[list[Any]]:
        """Return the rollouts in their order, those of equal text, reward and facts in one line."""
        folds: dict[tuple[float | None, str, str], list[_Rollout]] = {}
        for rollout in rollouts:
            folds.setdefault((rollout.reward, rollout.text, rollout.facts), []).append(rollout)
        lines = []
        for (reward, text, facts), fold in folds.items():
            kept = [rollout.advantage for rollout in fold if rollout.kept]
            numbers = [rollout.index for rollout in fold[:_MOST_NUMBERS]]
            advantage = kept[0] if kept else None
            lines.append([self._id(text), reward, len(fold), len(kept), advantage, self._id(facts), numbers])
        return lines

    def _id(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))


@dataclass(frozen=True)
class _Rollout:
    index: int
    reward: float | None  # None without a score
    kept: bool
    advantage: float | None
    text: str
    facts: str  # rewards by function, and length
    right: bool | None  # None without the reward accuracy


def ledger_of(arms: Sequence[Arm], *, data_mb: float = DATA_MB) -> Ledger:
    """Read every ledger file of the arms; skip and name a damaged one, or one with other columns.

    Args:
        arms: those without a ledger are not shown.
        data_mb: megabytes of the data. If not all groups fit, the dropped ones are spread over steps and runs: files
            are read in a shuffled order, the arms in turn.
    """
    ledger = Ledger(data_mb)
    queue: list[tuple[int, Path, Run, Arm]] = []
    for arm in arms:
        files = [(path, run) for run in arm.runs for path in run.rollout_files()]
        files.sort(key=lambda file: sha256(f"{file[1].path.name}/{file[0].name}".encode(errors="replace")).digest())
        queue += [(place, path, run, arm) for place, (path, run) in enumerate(files)]
    for _, path, run, arm in sorted(queue, key=lambda entry: entry[0]):
        ledger.files += 1
        name = plain(run.path.name)
        try:
            ledger.read(path, arm, name)
        except _UNREADABLE:
            ledger.unreadable.append(plain(f"{name}/{path.name}"))
    ledger.unreadable.sort()
    return ledger


def _rollout(row: Mapping[str, Any], position: int) -> _Rollout:
    index, tokens = finite(row.get("rollout")), finite(row.get("completion_tokens"))
    parts = {name.removeprefix("reward/"): value for name, value in row.items() if name.startswith("reward/")}
    facts = [f"{plain(name)} {value:.3f}" for name, raw in parts.items() if (value := finite(raw)) is not None]
    turns = row.get("turn_rewards")
    given = [finite(value) for value in turns] if isinstance(turns, list) else []
    facts += [f"turn {number} {value:.3f}" for number, value in enumerate(given, 1) if value is not None]
    facts += [] if tokens is None else [f"{int(tokens)} tokens"]
    answer = finite(parts.get("accuracy"))
    return _Rollout(
        index=position if index is None else int(index),
        reward=rounded(row.get("reward"), 6),
        kept=bool(row.get("selected")),
        advantage=rounded(row.get("advantage"), 4),
        text=_middle_cut(conversation(row.get("messages")) or row.get("completion")),
        facts=" · ".join(facts),
        right=None if "accuracy" not in parts else answer is not None and answer >= 1,
    )


def _stat(rollouts: Sequence[_Rollout]) -> str:
    """Return how many were right and kept, and mean and spread of the rewards."""

    def spread(chosen: Sequence[_Rollout]) -> str:
        rewards = [rollout.reward for rollout in chosen if rollout.reward is not None]
        mean = f"{fmean(rewards):.2f}" if rewards else "–"
        return f"{mean} ± {stdev(rewards):.2f}" if len(rewards) > 1 else mean

    count, kept = len(rollouts), [rollout for rollout in rollouts if rollout.kept]
    graded = [rollout.right for rollout in rollouts if rollout.right is not None]
    parts = [f"{sum(graded)} of {count} right"] if graded else []
    parts += [f"kept {len(kept)} of {count}"]
    rest = f", of the kept {spread(kept)}" if len(kept) < count else ""
    return " · ".join([*parts, f"reward {spread(rollouts)}{rest}"])


def conversation(messages: Any) -> str:
    """Return the column ``messages`` of a rollout as text; empty if it is not a list of messages in JSON.

    >>> conversation('[{"role": "assistant", "content": "3"}, {"role": "tool", "name": "add", "content": "4"}]')
    'assistant: 3\\ntool add: 4'
    """
    with suppress(ValueError, TypeError, RecursionError, AttributeError):
        return "\n".join(map(_message, json.loads(messages)))
    return ""


def _message(message: Mapping[str, Any]) -> str:
    speaker = " ".join(content_text(message[key]) for key in ("role", "name") if message.get(key))
    thoughts = (message.get(key) for key in ("reasoning_content", "thinking", "content"))
    texts = [*map(content_text, filter(None, thoughts)), *map(call_text, message.get("tool_calls") or ())]
    return f"{speaker}: " + "\n".join(texts)


def _middle_cut(value: Any, limit: int = TEXT_LIMIT) -> str:
    """Return a long text without its middle: instructions come first, a question and an answer last."""
    text = "" if value is None else str(value)
    cut = len(text) - limit
    if cut > 0:
        text = f"{text[: limit // 2]} … ({cut} characters) … {text[-limit // 2 :]}"
    return plain_text(text)
