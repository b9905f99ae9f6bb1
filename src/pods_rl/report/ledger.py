"""The rollouts of a report: every group of the ledgers as data for the page's script, bounded in size."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..text import call_text, content_text, plain_text
from .arms import Arm
from .text import finite, finite_numbers, one_line, rounded

DATA_MB = 20.0
"""Approximate megabytes of the page that rollouts may take: a larger one is slow in a browser."""

TEXT_LIMIT = 2_000
"""Characters of a text that are shown."""

_ESCAPED = re.compile("[<>&']")  # six bytes each in a page
_MOST_NUMBERS = 12  # of equal rollouts that are named
_READ_ERRORS = (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, pa.ArrowException)


@dataclass
class Ledger:
    """The rollouts of a page."""

    files: int = 0
    unreadable: list[str] = field(default_factory=list)  # names of files
    groups: int = 0  # in the files that could be read
    rollouts: int = 0  # on the page
    left_out: int = 0  # groups that do not fit the page
    arms: Sequence[str] = ()  # labels, in the order of the page
    runs: Sequence[str] = ()  # names, in the order of the page
    colours: Mapping[str, str] = field(default_factory=dict)  # by label of the arm
    _bytes: int = 0
    _texts: dict[str, int] = field(default_factory=dict)  # each text once
    _shown: list[list[Any]] = field(default_factory=list)

    @property
    def data(self) -> Mapping[str, Any]:
        """The data that templates/ledger.js reads; empty without groups."""
        if not self._shown:
            return {}
        groups = sorted(self._shown, key=lambda group: (group[0], group[2], group[1], group[3]))  # arm, step, run
        names = {"arms": self.arms, "runs": self.runs, "texts": [*self._texts]}
        names["colours"] = [self.colours.get(label, "") for label in self.arms]
        return {**names, "groups": groups, "total": self.groups}

    def read(self, path: Path, arm: Arm, run: str) -> None:
        """Add the groups of a file; raise one of ``_READ_ERRORS`` if it is damaged."""
        if not path.is_file():  # opening a pipe would block
            raise OSError("not a regular file")
        parts: dict[int, list[dict[str, Any]]] = {}
        # on a page that is full, groups are only counted
        columns = ["step", "group"] if self.left_out else None
        with pq.ParquetFile(path) as file:
            rows = file.read(columns=columns).to_pylist()
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
        # the highest reward first, those without a score last
        rollouts.sort(key=lambda rollout: (math.inf if rollout.reward is None else -rollout.reward, rollout.index))
        texts_before = len(self._texts)
        first = rows[0]
        group = [
            self.arms.index(arm.label),
            self.runs.index(run),
            first["step"],
            first["group"],
            self._id(_middle_cut(first.get("prompt"))),
            self._id(_middle_cut(first.get("question") or first.get("prompt"))),
            self._id(_middle_cut(first.get("answer"), 200)),
            _stat(rollouts),
            *_mean_and_spread(rollouts),
            self._lines(rollouts),
        ]
        new_texts = [*self._texts][texts_before:]
        content = json.dumps([group, new_texts], ensure_ascii=False)
        size = len(content.encode()) + 5 * len(_ESCAPED.findall(content))
        if self._bytes + size > DATA_MB * 1e6:
            for text in new_texts:
                del self._texts[text]
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
            kept = [rollout for rollout in fold if rollout.kept]
            advantage = kept[0].advantage if kept else None
            numbers = [rollout.index for rollout in fold[:_MOST_NUMBERS]]
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


def ledger_of(arms: Sequence[Arm], colours: Mapping[str, str] | None = None) -> Ledger:
    """Read every ledger file of the arms; skip and name a damaged one, or one with other columns.

    If not all groups fit, the dropped ones are spread over arms, runs and steps: files are read in a shuffled order.
    """
    labels = [*dict.fromkeys(arm.label for arm in arms)]
    seeds: dict[str, float] = {}  # by the name of a run; those without a seed come last
    files: list[tuple[Path, str, Arm]] = []
    for arm in arms:
        for run in arm.runs:
            name = one_line(run.path.name)
            seeds[name] = math.inf if run.seed is None else run.seed
            files += [(path, name, arm) for path in run.rollout_files()]
    random.Random(0).shuffle(files)  # always the same order
    ledger = Ledger(files=len(files), arms=labels, runs=sorted(seeds, key=seeds.__getitem__), colours=colours or {})
    for path, name, arm in files:
        try:
            ledger.read(path, arm, name)
        except _READ_ERRORS:
            ledger.unreadable.append(one_line(f"{name}/{path.name}"))
    ledger.unreadable.sort()
    return ledger


def _rollout(row: Mapping[str, Any], position: int) -> _Rollout:
    facts = []
    for key, value in row.items():
        reward = finite(value)
        if key.startswith("reward/") and reward is not None:
            facts.append(f"{one_line(key.removeprefix('reward/'))} {reward:.3f}")
    turns = row.get("turn_rewards")
    if isinstance(turns, list):
        for turn, value in enumerate(turns, start=1):
            reward = finite(value)
            if reward is not None:
                facts.append(f"turn {turn} {reward:.3f}")
    tokens = finite(row.get("completion_tokens"))
    if tokens is not None:
        facts.append(f"{int(tokens)} tokens")
    index = finite(row.get("rollout"))
    accuracy = finite(row.get("reward/accuracy"))
    return _Rollout(
        index=position if index is None else int(index),
        reward=rounded(row.get("reward"), 6),
        kept=bool(row.get("selected")),
        advantage=rounded(row.get("advantage"), 4),
        text=_middle_cut(conversation(row.get("messages")) or row.get("completion")),
        facts=" · ".join(facts),
        right=(accuracy is not None and accuracy >= 1) if "reward/accuracy" in row else None,
    )


def _stat(rollouts: Sequence[_Rollout]) -> str:
    """Return how many rollouts were right and kept, and mean and spread of the rewards."""
    kept = [rollout for rollout in rollouts if rollout.kept]
    graded = [rollout.right for rollout in rollouts if rollout.right is not None]
    parts = [f"{sum(graded)} of {len(rollouts)} right"] if graded else []
    parts.append(f"kept {len(kept)} of {len(rollouts)}")
    rewards = f"reward {_spread_text(rollouts)}"
    if len(kept) < len(rollouts):
        rewards += f", of the kept {_spread_text(kept)}"
    return " · ".join([*parts, rewards])


def _mean_and_spread(rollouts: Sequence[_Rollout]) -> tuple[float | None, float | None]:
    """Return mean and standard deviation of the rewards; None without a reward."""
    rewards = finite_numbers(rollout.reward for rollout in rollouts)
    if not rewards:
        return None, None
    return rounded(fmean(rewards)), rounded(stdev(rewards)) if len(rewards) > 1 else 0.0


def _spread_text(rollouts: Sequence[_Rollout]) -> str:
    """Return mean and standard deviation of the rewards as text."""
    mean, spread = _mean_and_spread(rollouts)
    if mean is None:
        return "–"
    return f"{mean:.2f} ± {spread:.2f}" if len(rollouts) > 1 else f"{mean:.2f}"


def conversation(messages: Any) -> str:
    """Return the column ``messages`` of a rollout as text; empty if it is not a list of messages in JSON."""
    with suppress(ValueError, TypeError, RecursionError, AttributeError):
        return "\n".join(map(_speaker_and_text, json.loads(messages)))
    return ""


def _speaker_and_text(message: Mapping[str, Any]) -> str:
    speaker = " ".join(content_text(message[key]) for key in ("role", "name") if message.get(key))
    lines = [content_text(message[key]) for key in ("reasoning_content", "thinking", "content") if message.get(key)]
    lines += [call_text(call) for call in message.get("tool_calls") or ()]
    return f"{speaker}: " + "\n".join(lines)


def _middle_cut(value: Any, limit: int = TEXT_LIMIT) -> str:
    """Return a long text without its middle: instructions come first, a question and an answer last."""
    text = "" if value is None else str(value)
    cut = len(text) - limit
    if cut > 0:
        text = f"{text[: limit // 2]} … ({cut} characters) … {text[-limit // 2 :]}"
    return plain_text(text)
