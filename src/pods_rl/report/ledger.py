"""The rollouts of a report: every group of the ledgers as data for the page's script, bounded in size."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..runs import Run
from ..text import call_text, content_text, plain_text
from .arms import Arm, rollouts_of
from .text import encodable, finite, plain, rounded

DATA_MB = 20.0
"""Approximate megabytes of the page that rollouts may take."""

TEXT_LIMIT = 2_000
"""Characters of a text that are shown."""

_ESCAPED = re.compile("[<>&]")  # six bytes each in a page
_MOST_NUMBERS = 12  # of equal rollouts that are named
_MOST_TURNS = 40
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, pa.ArrowException)


@dataclass
class Ledger:
    """The rollouts of a page.

    Args:
        limit_mb: megabytes that they may take.
        files: how many ledger files there are.
        unreadable: names of files that could not be read.
        groups: in the files that could be read.
        rollouts: on the page.
        left_out: number of groups that do not fit the page.
    """

    limit_mb: float = DATA_MB
    files: int = 0
    unreadable: list[str] = field(default_factory=list)
    groups: int = 0
    rollouts: int = 0
    left_out: int = 0
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
        rollouts = outward([_rollout(row, index) for index, row in enumerate(rows)])
        known, first = len(self._texts), rows[0]
        group = [
            self._arms.setdefault(arm.label, len(self._arms)),
            self._runs.setdefault(run, len(self._runs)),
            first["step"],
            first["group"],
            self._id(_middle_cut(message_text(first.get("prompt")))),
            self._id(plain_text(message_text(first.get("answer"))[:200])),
            _stat(rollouts, rollouts_of(arm.config)[0]),
            [self._row(fold) for fold in folded(rollouts)],
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

    def _row(self, fold: Sequence[_Rollout]) -> list[Any]:
        first, kept = fold[0], [rollout for rollout in fold if rollout.kept]
        advantage = kept[0].advantage if kept else None
        numbers = [rollout.index for rollout in fold[:_MOST_NUMBERS]]
        return [self._id(first.text), first.reward, len(fold), len(kept), advantage, self._id(first.facts), numbers]

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
    text = conversation(row.get("messages")) or message_text(row.get("completion"))
    cut = len(text) - TEXT_LIMIT
    index, tokens = finite(row.get("rollout")), finite(row.get("completion_tokens"))
    parts = {name.removeprefix("reward/"): value for name, value in row.items() if name.startswith("reward/")}
    facts = [f"{plain(name)} {value:.3f}" for name, raw in parts.items() if (value := finite(raw)) is not None]
    turns = row.get("turn_rewards")
    given = [finite(value) for value in turns[:_MOST_TURNS]] if isinstance(turns, list) else []
    facts += [f"turn {number} {value:.3f}" for number, value in enumerate(given, 1) if value is not None]
    facts += [] if tokens is None else [f"{int(tokens)} tokens"]
    answer = finite(parts.get("accuracy"))
    return _Rollout(
        index=position if index is None else int(index),
        reward=rounded(row.get("reward"), 6),
        kept=bool(row.get("selected")),
        advantage=rounded(row.get("advantage"), 4),
        text=plain_text(text[:TEXT_LIMIT]) + (f" … ({cut} more characters)" if cut > 0 else ""),
        facts=" · ".join(facts),
        right=None if "accuracy" not in parts else answer is not None and answer >= 1,
    )


def outward(rollouts: Sequence[_Rollout]) -> list[_Rollout]:
    """Sort by reward, highest first. Among equal rewards the kept ones are nearer the ends; unscored ones are last."""
    scored = [r.reward for r in rollouts if r.reward is not None]
    mean = sum(scored) / len(scored) if scored else 0.0

    def place(r: _Rollout) -> tuple[float, bool, int]:
        return (math.inf, True, r.index) if r.reward is None else (-r.reward, r.kept == (r.reward < mean), r.index)

    return sorted(rollouts, key=place)


def folded(rollouts: Sequence[_Rollout]) -> list[list[_Rollout]]:
    """Return the rollouts with those of equal text, reward and facts together, in their order."""
    found: dict[tuple[object, ...], list[_Rollout]] = {}
    for rollout in rollouts:
        found.setdefault((rollout.reward, rollout.text, rollout.facts), []).append(rollout)
    return list(found.values())


def _stat(rollouts: Sequence[_Rollout], n: int | None) -> str:
    """Return how many were right and kept, and mean and spread of the rewards."""

    def spread(chosen: Sequence[_Rollout]) -> str:
        rewards = [rollout.reward for rollout in chosen if rollout.reward is not None]
        mean = f"{fmean(rewards):.2f}" if rewards else "–"
        return f"{mean} ± {stdev(rewards):.2f}" if len(rewards) > 1 else mean

    count, kept = len(rollouts), [rollout for rollout in rollouts if rollout.kept]
    graded = [rollout.right for rollout in rollouts if rollout.right is not None]
    parts = [f"{sum(graded)} of {count} right"] if graded else []
    parts += [f"kept {len(kept)} of {count}" + (f" (n = {n})" if n and n > count else "")]
    rest = f", of the kept {spread(kept)}" if len(kept) < count else ""
    return " · ".join([*parts, f"reward {spread(rollouts)}{rest}"])


def message_text(value: Any) -> str:
    """Return a prompt or completion as text: itself, or a chat's messages with their roles.

    >>> message_text([{"role": "user", "content": "1+1"}])
    'user: 1+1'
    """
    if value is None:
        return ""
    if not isinstance(value, list):
        return encodable(value)
    shown = value if len(value) <= _MOST_TURNS else [*value[: _MOST_TURNS - 1], "…", value[-1]]
    return "\n".join(_message(one) if isinstance(one, Mapping) else encodable(one) for one in shown)


def _message(message: Mapping[str, Any]) -> str:
    speaker = " ".join(content_text(message[key]) for key in ("role", "name") if message.get(key))
    thoughts = (message.get(key) for key in ("reasoning_content", "thinking", "content"))
    calls = message.get("tool_calls")
    parts = [*map(content_text, filter(None, thoughts)), *map(call_text, calls if isinstance(calls, list) else ())]
    return f"{speaker}: " + "\n".join(parts)


def conversation(messages: Any) -> str:
    """Return the column ``messages`` of a rollout as text; empty if it is not a list of messages in JSON.

    >>> conversation('[{"role": "assistant", "content": "3"}, {"role": "tool", "name": "add", "content": "4"}]')
    'assistant: 3\\ntool add: 4'
    """
    try:
        found = json.loads(messages) if isinstance(messages, str) else None
        return message_text(found) if isinstance(found, list) else ""
    except (ValueError, TypeError, RecursionError):
        return ""


def _middle_cut(prompt: str) -> str:
    """Return a prompt without its middle if it is long: instructions come first and the question last."""
    cut = len(prompt) - TEXT_LIMIT
    if cut > 0:
        prompt = f"{prompt[: TEXT_LIMIT // 2]} … ({cut} characters) … {prompt[-TEXT_LIMIT // 2 :]}"
    return plain_text(prompt)
