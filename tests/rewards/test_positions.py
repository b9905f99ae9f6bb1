"""Items in order: the share of positions, and what counts as an item."""

from __future__ import annotations

import pytest

from pods_rl.rewards import positions
from pods_rl.rewards.graded import MAX_SEQUENCE

GOLD = "1 2 3 4 5 6 7 8"
SCORES = [
    ("1 2 3 4 5 6 7 8", GOLD, 1.0),
    ("1, 2, 3, 4, 5, 6, 7, 8", GOLD, 1.0),
    ("[1,2,3,4,5,6,7,8]", GOLD, 1.0),
    ("1 -> 2 -> 3 → 4; 5 | 6\n7 < 8.", GOLD, 1.0),
    (r"$\left(1, 2, 3, 4, 5, 6, 7, 8\right)$", GOLD, 1.0),
    ("['1', '2', '3', '4', '5', '6', '7', '8']", GOLD, 1.0),
    ("2 1 3 4 5 6 7 8", GOLD, 0.75),
    ("8 7 6 5 4 3 2 1", GOLD, 0.0),
    ("1 2 3 4 5 6 7", GOLD, 0.875),  # one short
    ("1 2 3 4 5 6", GOLD, 0.75),  # a quarter short
    ("1 2 3 4 5", GOLD, 0.0),  # more than that
    ("1 2 3 4 5 6 7 8 9", GOLD, 8 / 9),
    ("1 2 3 4 5 6 7 8 9 10", GOLD, 0.8),
    ("1 2 3 4 5 6 7 8 9 10 11", GOLD, 0.0),
    ("2 3 4 5 6 7 8", GOLD, 0.0),  # all moved by one
    ("3", "3", 1.0),
    ("3 3", "3", 0.5),
    ("", "3", 0.0),
    ("3", "", 0.0),
    ("Apple pear", "apple Pear", 1.0),
    ("-1 -2", "-1 -2", 1.0),
    ("1 -2", "-1 -2", 0.5),
    ("1.5 2", "1.5 2", 1.0),
]


@pytest.mark.parametrize(("answer", "gold", "score"), SCORES)
def test_scores(answer, gold, score):
    assert positions(f"<answer>{answer}</answer>", gold) == score


def test_an_answer_must_be_marked_and_of_a_length_to_be_read():
    assert positions(GOLD, GOLD) == 0.0
    assert positions(f"<answer>{GOLD}</answer>", GOLD) == 1.0
    assert positions(f"<answer>{' ' * MAX_SEQUENCE}{GOLD}.{' ' * MAX_SEQUENCE}</answer>", GOLD) == 1.0
    assert positions(f"<answer>{'1 ' * MAX_SEQUENCE}</answer>", "1 " * MAX_SEQUENCE) == 0.0
