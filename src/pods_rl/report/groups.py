"""A group of the ledger: one prompt's rollouts as the page shows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from markupsafe import escape

from ..text import content_text, plain_text
from .curves import finite
from .reasons import Reasons, Settings, ending
from .text import encodable, plain
from .turns import Conversation, read_conversation

TEXT_LIMIT = 2_000
_MARKUP = 340  # bytes of HTML around one rollout


@dataclass(frozen=True)
class Rollout:
    index: int
    reward: float  # NaN: unscored
    parts: tuple[tuple[str, float], ...]
    kept: bool
    advantage: float | None
    tokens: int | None
    text: str
    cut: int  # characters that are not shown
    conversation: Conversation = field(default_factory=Conversation)
    reason: str = ""  # why it was kept or dropped, and what ended it

    def shortened(self, limit: int) -> Rollout:
        """The same rollout with at most ``limit`` characters of text."""
        cut = self.cut + max(len(self.text) - limit, 0)
        return replace(self, text=self.text[:limit], cut=cut, conversation=self.conversation.shortened(limit))

    @property
    def texts(self) -> list[str]:
        """What the page shows of it."""
        turns = [f"{turn.text}{turn.calls}" for turn in self.conversation.turns]
        return [self.conversation.gist, *turns] if turns else [self.text]

    @property
    def whole(self) -> str:
        """Its text, and how much of it is not shown."""
        return f"{self.text} … ({self.cut} more characters)" if self.cut else self.text

    @property
    def facts(self) -> list[str]:
        """Its rewards by function, its length, its turns, why it was kept and what ended it."""
        parts = [f"{name} {value:.3f}" for name, value in self.parts]
        parts += [] if self.tokens is None else [f"{self.tokens} tokens"]
        return [*parts, *self.conversation.facts, *filter(None, [self.reason])]


@dataclass(frozen=True)
class Group:
    """One prompt's rollouts, in the order of ``outward``."""

    arm: str
    run: str
    step: int
    group: int
    prompt: str
    answer: str
    rollouts: tuple[Rollout, ...]  # those generated
    most: int | None = None  # n: rollouts that the group may generate
    stopped: str = ""  # what stopped it before n; empty in ledgers without waves
    why: tuple[str, ...] = ()  # why these were kept
    right: int | None = None  # rollouts with a right answer; None: no reward tells
    is_level: bool = False  # all rewards are equal: it teaches nothing

    @property
    def generated(self) -> str:
        """How many rollouts were generated, and of how many if waves stopped the group.

        >>> Group("pods", "seed-1", 1, 0, "", "", (), most=64, stopped="gave up").generated
        '0 generated of 64 (gave up)'
        """
        count = len(self.rollouts)
        if not self.stopped or self.most is None or count >= self.most:
            return str(count)
        return f"{count} generated of {self.most} ({self.stopped})"

    @property
    def kept(self) -> int:
        return sum(rollout.kept for rollout in self.rollouts)

    @property
    def gist(self) -> str:
        """The end of the prompt on one line: which holds the question, after common instructions."""
        line = plain(self.prompt, limit=TEXT_LIMIT)
        return line if len(line) <= 90 else "…" + line[-89:]

    @property
    def stat(self) -> str:
        """How many were kept, and mean and spread of the rewards."""

        def spread(*, kept_only: bool) -> str:
            mean, deviation = self.spread(kept_only=kept_only)
            return " ± ".join("–" if math.isnan(value) else f"{value:.2f}" for value in (mean, deviation))

        rest = f", of the kept {spread(kept_only=True)}" if self.kept < len(self.rollouts) else ""
        return f"kept {self.kept} of {self.generated} · reward {spread(kept_only=False)}{rest}"

    def spread(self, *, kept_only: bool) -> tuple[float, float]:
        """Mean and standard deviation (ddof = 1) of the rewards; NaN if there are too few."""
        rewards = [r.reward for r in self.rollouts if (r.kept or not kept_only) and not math.isnan(r.reward)]
        mean = float(np.mean(rewards)) if rewards else math.nan
        return mean, float(np.std(rewards, ddof=1)) if len(rewards) > 1 else math.nan

    @property
    def bars(self) -> list[tuple[int, bool]]:
        """Height in percent and kept or not, for the bar of each rollout; equal rewards are half height."""
        rewards = [rollout.reward for rollout in self.rollouts if not math.isnan(rollout.reward)]
        low, high = min(rewards, default=0.0), max(rewards, default=0.0)

        def height(reward: float) -> int:
            if math.isnan(reward):
                return 0
            return round(12 + 88 * (reward - low) / (high - low)) if high > low else 50

        return [(height(rollout.reward), rollout.kept) for rollout in self.rollouts]

    def shortened(self, limit: int) -> Group:
        """The same group, its rollouts cut to ``limit`` characters."""
        return replace(self, rollouts=tuple(rollout.shortened(limit) for rollout in self.rollouts))

    @property
    def folded(self) -> list[list[Rollout]]:
        """The rollouts with those of equal text and reward together, each list in the order of ``outward``."""
        found: dict[tuple[object, ...], list[Rollout]] = {}
        for rollout in self.rollouts:
            scored = None if math.isnan(rollout.reward) else rollout.reward
            key = (scored, rollout.text, rollout.cut, rollout.tokens, rollout.parts, rollout.conversation)
            found.setdefault(key, []).append(rollout)
        return list(found.values())

    @property
    def size(self) -> int:
        """The approximate size in bytes of HTML."""
        texts = [self.prompt, *(text for rollout in self.rollouts for text in rollout.texts)]
        return _MARKUP * len(texts) + sum(len(escape(text).encode()) for text in texts)


def group_of(
    rows: Sequence[Mapping[str, Any]], arm: str, run: str, settings: Settings, *, drawn: bool = False
) -> Group:
    """Return the group of these rows of a ledger.

    Raises:
        KeyError, TypeError, ValueError: a step or a group that is no whole number.
    """
    first = rows[0]
    step, group = first["step"], first["group"]
    if not isinstance(step, int) or not isinstance(group, int):
        raise TypeError(f"expected whole numbers, got step {step!r} and group {group!r}")
    stopped = plain(first.get("stopped") or "", limit=40)
    waves = max((int(finite(row.get("wave")) or 0) for row in rows), default=0) if "wave" in first else 0
    rewards = [math.nan if (reward := finite(row.get("reward"))) is None else reward for row in rows]
    kept = [bool(row.get("selected")) for row in rows]
    reasons = Reasons(settings, rewards, kept, stopped=stopped, waves=waves, drawn=drawn)
    column = f"reward/{settings.answer}"
    answers = [finite(row.get(column)) for row in rows]
    return Group(
        arm=arm,
        run=run,
        step=step,
        group=group,
        prompt=_middle_cut(message_text(first.get("prompt"))),
        answer=plain_text(message_text(first.get("answer"))[:200]),
        rollouts=tuple(outward(_rollout(row, index, reasons) for index, row in enumerate(rows))),
        most=settings.n,
        stopped=stopped,
        why=tuple(reasons.lines()),
        right=sum(answer is not None and answer >= 1 for answer in answers) if column in first else None,
        is_level=reasons.is_level,
    )


def outward(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Sort by reward, highest first, those without one last.

    Of equal rewards the kept come first above the group's mean and last below it, so that a choice of extremes
    (Lemma 3.1) looks like one; then in the order of generation.
    """
    rollouts = list(rollouts)
    scored = [r.reward for r in rollouts if not math.isnan(r.reward)]
    mean = float(np.mean(scored)) if scored else 0.0

    def place(r: Rollout) -> tuple[bool, float, bool, int]:
        if math.isnan(r.reward):
            return True, 0.0, r.kept, r.index
        return False, -r.reward, r.kept if r.reward < mean else not r.kept, r.index

    return sorted(rollouts, key=place)


def _rollout(row: Mapping[str, Any], position: int, reasons: Reasons) -> Rollout:
    text = message_text(row.get("completion"))
    index, length = finite(row.get("rollout")), finite(row.get("completion_tokens"))
    reward, kept, tokens = reasons.rewards[position], reasons.kept[position], None if length is None else int(length)
    parts = [
        (_part_name(key), value)
        for key, raw in row.items()
        if key.startswith("reward/") and (value := finite(raw)) is not None
    ]
    conversation = read_conversation(row.get("messages"), row.get("turn_rewards"))
    turns = conversation.turns
    why = reasons.of_rollout(reward, kept)
    ended = ending(tokens, reasons.settings.length, open_call=bool(turns and turns[-1].calls))
    return Rollout(
        index=position if index is None else int(index),
        reward=reward,
        parts=tuple(parts),
        kept=kept,
        advantage=finite(row.get("advantage")),
        tokens=tokens,
        text=plain_text(text[:TEXT_LIMIT]),
        cut=max(len(text) - TEXT_LIMIT, 0),
        conversation=conversation,
        reason=" · ".join(filter(None, [why and f"{'kept' if kept else 'dropped'}: {why}", ended])),
    )


@cache
def _part_name(column: str) -> str:
    return plain(column.removeprefix("reward/"))


def _middle_cut(prompt: str) -> str:
    """Return a prompt without its middle if it is long: instructions come first and the question last."""
    cut = len(prompt) - TEXT_LIMIT
    if cut > 0:
        prompt = f"{prompt[: TEXT_LIMIT // 2]} … ({cut} characters) … {prompt[-TEXT_LIMIT // 2 :]}"
    return plain_text(prompt)


def message_text(value: Any) -> str:
    """Return a prompt or completion as text: itself, or a chat's messages with their roles.

    >>> message_text([{"role": "user", "content": "1+1"}])
    'user: 1+1'
    """
    if value is None:
        return ""
    if isinstance(value, list):
        return "\n".join(
            f"{m.get('role', '')}: {content_text(m.get('content'))}" if isinstance(m, dict) else str(m) for m in value
        )
    return encodable(value)
