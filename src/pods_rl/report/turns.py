"""The conversation of a rollout, from the ledger's columns `messages` and `turn_rewards`: bounded, and safe to show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..text import call_text, content_text, plain_text
from .curves import finite
from .text import plain, plural

Item = TypeVar("Item")

MOST_TURNS = 24
TURN_LIMIT = 1_000
_FOLDED = 320  # characters, or four lines: what is longer is folded
_THOUGHTS = ("reasoning_content", "thinking")


@dataclass(frozen=True)
class Turn:
    """A message: who speaks, the text, and the tool calls, with controls and marks of direction escaped."""

    speaker: str
    text: str
    calls: str
    reward: float | None
    cut: int = 0  # characters that are not shown

    @property
    def is_long(self) -> bool:
        return len(self.text) + len(self.calls) > _FOLDED or f"{self.text}\n{self.calls}".count("\n") > 4

    def shortened(self, limit: int) -> Turn:
        """The same turn, its text and then its calls cut to `limit` characters in all."""
        text = self.text[:limit]
        calls = self.calls[: limit - len(text)]
        return replace(self, text=text, calls=calls, cut=self.cut + len(self.text + self.calls) - len(text + calls))


@dataclass(frozen=True)
class Conversation:
    """The messages of a rollout; none if it is a text or one assistant message."""

    turns: tuple[Turn, ...] = ()
    hidden: int = 0  # messages before the last one that are not shown
    facts: tuple[str, ...] = ()  # on all messages: how many, and rewards that belong to none

    @property
    def gist(self) -> str:
        """The last text of the conversation, or its last calls, on one line."""
        return next((plain(turn.text or turn.calls, limit=200) for turn in reversed(self.turns)), "")

    def shortened(self, limit: int) -> Conversation:
        """The same conversation with fewer and shorter turns; `limit` is that of a text of the page."""
        turns = _first_and_last(self.turns, MOST_TURNS * limit // (2 * TURN_LIMIT))
        hidden = self.hidden + len(self.turns) - len(turns)
        return replace(self, turns=tuple(turn.shortened(limit // 2) for turn in turns), hidden=hidden)


_NONE = Conversation()


def read_conversation(messages: Any, rewards: Any) -> Conversation:
    """Return the conversation of a row of the ledger; reward i is that of the i-th assistant message.

    Args:
        messages: JSON text, or None. What is no list of messages is ignored.
        rewards: numbers, or None.

    >>> found = read_conversation('[{"role": "assistant", "content": "3"}, {"role": "user", "content": "?"}]', [0.5, 1])
    >>> [(turn.speaker, turn.text, turn.reward) for turn in found.turns], found.facts
    ([('assistant', '3', 0.5), ('user', '?', None)], ('1 turn', 'reward of turn 2: 1.000'))
    """
    if messages is None and rewards is None:
        return _NONE
    given = [finite(reward) for reward in rewards] if isinstance(rewards, list) else []
    try:
        found = json.loads(messages) if isinstance(messages, str) else []
        known = [m for m in found if isinstance(m, Mapping)] if isinstance(found, list) else []
        places = [i for i, m in enumerate(known) if m.get("role") == "assistant"]
        reward_of = dict(zip(places, given, strict=False))
        turns = [_turn(known[i], reward_of.get(i)) for i in _first_and_last(range(len(known)), MOST_TURNS)]
        calls = sum(len(m.get("tool_calls") or ()) for m in known)
    except (ValueError, TypeError, RecursionError):
        known, places, turns, calls = [], [], [], 0
    facts = [plural(len(places), "turn")] if known else []
    facts += [plural(calls, "tool call")] if calls else []
    rest = [(i, reward) for i, reward in enumerate(given, 1) if i > len(places) and reward is not None]
    facts += [f"reward of turn {i}: {reward:.3f}" for i, reward in rest[:MOST_TURNS]]
    return Conversation(tuple(turns), len(known) - len(turns), tuple(facts))


def _first_and_last(items: Sequence[Item], count: int) -> list[Item]:
    """Return at most `count` items: the first ones and the last one."""
    return list(items) if len(items) <= count else [*items[: max(count - 1, 0)], *items[len(items) - 1 :][:count]]


def _turn(message: Mapping[str, Any], reward: float | None) -> Turn:
    speaker = " ".join(content_text(message[key]) for key in ("role", "name") if message.get(key))
    text = "\n".join(filter(None, (content_text(message.get(name)) for name in (*_THOUGHTS, "content"))))
    calls = "\n".join(call_text(call) for call in message.get("tool_calls") or ())
    turn = Turn(plain(speaker), text, calls, reward).shortened(TURN_LIMIT)
    return replace(turn, text=plain_text(turn.text), calls=plain_text(turn.calls))
