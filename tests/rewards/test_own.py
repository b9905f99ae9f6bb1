"""Rewards of a user's own in processes of their own: right, in order, and one that hangs costs itself alone."""

from __future__ import annotations

import math

import pytest

from pods_rl.errors import UserError
from pods_rl.rewards.own import Failure, OwnPool, attempt


def fickle(text: str, gold: str) -> float:
    """What each text asks for."""
    if text == "raise":
        raise ValueError("not\n  this \x1b[2J" + "9" * 1000)
    if text == "exit":
        raise SystemExit(0)
    if text == "hang":
        while True:
            pass
    if text == "print":
        print("0.25\n0.5")  # must not be read as a score
        return 0.75
    return {"nan": math.nan, "inf": math.inf, "none": None, "true": True}[text]  # type: ignore[return-value]


@pytest.fixture(scope="module")
def pool():
    pool = OwnPool(f"{__name__}:fickle", limit=1.0, size=2)
    yield pool
    pool.close()


def test_scores_come_in_order_and_failures_in_their_places(pool):
    texts = ["true", "raise", "nan", "hang", "inf", "exit", "print", "none", "true"]
    scores = pool.score(texts, [""] * len(texts))
    assert [scores[i] for i in (0, 4, 6, 8)] == [1.0, math.inf, 0.75, 1.0]
    assert math.isnan(scores[2])
    assert scores[3] == Failure("gave no score within 1 s", late=True)
    assert scores[5] == Failure("ended its process")
    assert scores[1].reason.startswith("raised ValueError: not this \x1b[2J999")
    assert len(scores[1].reason) < 260
    assert scores[1].reason.endswith(")")
    assert "gave None of type NoneType; it must give a float" in scores[7].reason


def test_the_same_in_this_process():
    assert attempt(fickle, "inf", "") == math.inf
    assert attempt(fickle, "raise", "").reason.startswith("raised ValueError: not this")


def test_one_that_cannot_be_imported_is_told_with_the_way_out():
    pool = OwnPool(f"{__name__}:missing", limit=1.0, size=1)
    with pytest.raises(UserError, match=r"did not start in a process of its own: .*no attribute 'missing'.*null"):
        pool.score(["a"], ["b"])
    pool.close()
