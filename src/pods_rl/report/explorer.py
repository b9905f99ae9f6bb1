"""The ledger's data for the page's script: groups of folded rollouts, each text once, bounded in size."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .groups import Group, Rollout
from .turns import Conversation

_HEADERS = 1.5  # times the limit: where even the heads of groups end
_ESCAPED = re.compile("[<>&]")  # six bytes each in a page
_MOST_NUMBERS = 12  # of equal rollouts that are named


@dataclass
class Explorer:
    """Collects groups until ``limit`` bytes are full; of further ones only the head: no rollout.

    Add groups in an order that is spread over the run, because those that come first fit.
    """

    limit: int
    bytes: int = 0
    is_full: bool = False
    rollouts: int = 0  # on the page
    left_out: int = 0  # groups without their rollouts
    _texts: list[str] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)
    _talks: list[Any] = field(default_factory=list)
    _talk_places: dict[Conversation, int] = field(default_factory=dict)
    _groups: list[list[Any]] = field(default_factory=list)
    _runs: dict[str, int] = field(default_factory=dict)

    def add(self, group: Group, arm: int) -> None:
        """Take a group of the arm with that number."""
        if not self.is_full:
            before = len(self._texts), len(self._talks)
            cost = self._head(group, arm, [self._row(fold) for fold in group.folded], *before)
            self.is_full = self.bytes + cost > self.limit
            if not self.is_full:
                self.bytes += cost
                self.rollouts += len(group.rollouts)
                return
            self._forget(*before)
        self.left_out += 1
        if self.bytes < self.limit * _HEADERS:
            self.bytes += self._head(group, arm, None, len(self._texts), len(self._talks))

    def data(self, arms: list[str]) -> Mapping[str, Any]:
        """What templates/ledger.js reads; `arms` are the labels, by number."""
        return {
            "arms": arms,
            "runs": [*self._runs],
            "texts": self._texts,
            "turns": self._talks,
            "groups": sorted(self._groups, key=lambda g: (g[0], g[2], g[1], g[3])),  # arm, step, run,
        }

    def _head(self, group: Group, arm: int, rows: list[Any] | None, texts: int, talks: int) -> int:
        """Take a group; return the bytes of it and of all texts and conversations from these places on."""
        head = [
            arm,
            self._runs.setdefault(group.run, len(self._runs)),
            group.step,
            group.group,
            self._id(group.prompt),
            self._id(group.answer),
            group.right,
            len(group.rollouts),
            group.kept,
            int(group.is_level),
            group.stat,
            self._id("\n".join(group.why)),
            rows,
        ]
        self._groups.append(head)
        return sum(map(_size, [head, *self._texts[texts:], *self._talks[talks:]]))

    def _row(self, fold: list[Rollout]) -> list[Any]:
        first = fold[0]
        kept = [rollout for rollout in fold if rollout.kept]
        reasons = dict.fromkeys(rollout.reason for rollout in fold)
        facts = [*first.facts[: len(first.facts) - bool(first.reason)], *filter(None, reasons)]
        return [
            self._id(first.conversation.gist if first.conversation.turns else first.whole),
            None if math.isnan(first.reward) else float(f"{first.reward:.6g}"),
            len(fold),
            len(kept),
            float(f"{kept[0].advantage:.4g}") if kept and kept[0].advantage is not None else None,
            self._id(" · ".join(facts)),
            [rollout.index for rollout in fold[:_MOST_NUMBERS]],
            self._talk(first.conversation),
        ]

    def _talk(self, conversation: Conversation) -> int | None:
        if not conversation.turns:
            return None
        if conversation not in self._talk_places:
            self._talk_places[conversation] = len(self._talks)
            turns = [
                [self._id(t.speaker), self._id(t.text), self._id(t.calls), t.reward, t.cut, int(t.is_long)]
                for t in conversation.turns
            ]
            self._talks.append([turns, conversation.hidden])
        return self._talk_places[conversation]

    def _id(self, text: str) -> int:
        place = self._places.setdefault(text, len(self._texts))
        if place == len(self._texts):
            self._texts.append(text)
        return place

    def _forget(self, texts: int, talks: int) -> None:
        """Undo the last group."""
        self._groups.pop()
        for text in self._texts[texts:]:
            del self._places[text]
        self._talk_places = {talk: place for talk, place in self._talk_places.items() if place < talks}
        del self._texts[texts:], self._talks[talks:]


def _size(value: Any) -> int:
    """Bytes of a value in the page."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return len(text.encode()) + 5 * len(_ESCAPED.findall(text)) + 1
