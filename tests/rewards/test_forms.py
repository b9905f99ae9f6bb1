"""The form rewards: worked values of the rule their docstrings state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_rl.rewards import format_reward, tag_count

GOOD = "<think>9*2=18</think><answer>18</answer>"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (GOOD, 1.0),
        ("<think>\na\n</think>\n\n<answer>\n18\n</answer>\n", 1.0),
        (f"\n {GOOD} \n", 1.0),
        (f"x{GOOD}", 0.99),
        (f"{GOOD} Hope this helps!", 0.86),
        ("<think>a</think>so<answer>18</answer>", 0.98),
        (f"a b{GOOD}c d", 0.96),
        ("é" + GOOD, 0.99),
        (f"{'x' * 99}{GOOD}", 0.01),
        (f"{'x' * 100}{GOOD}", 0.0),
        (f"{'x' * 1000}{GOOD}", 0.0),
        (f"{GOOD}<answer>17</answer>", 0.81),
        ("<think>a</think>b</think><answer>18</answer>", 0.91),
        ("<think></think><answer></answer>", 1.0),
        ("<answer>18</answer><think>a</think>", 0.0),
        ("<think>a<answer>18</answer>", 0.0),
        ("<think>a</think><answer>18", 0.0),
        ("<think>a</think>18", 0.0),
        ("<answer>18</answer>", 0.0),
        ("<Think>a</Think><Answer>18</Answer>", 0.0),
        ("18", 0.0),
        ("", 0.0),
    ],
)
def test_format_reward(text, score):
    assert format_reward(text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (GOOD, 0.1),
        ("<answer>18</answer>", 0.05),
        ("</think>", 0.025),
        ("<think>a</think><think>b</think><answer>18</answer>", 0.05),
        ("<think><think>a</think><answer>18</answer>", 0.075),
        (GOOD * 2, 0.0),
        ("", 0.0),
    ],
)
def test_tag_count(text, score):
    assert tag_count(text) == score


@given(st.lists(st.sampled_from([*"ab \n", "<think>", "</think>", "<answer>", "</answer>"]), max_size=30))
def test_ranges(pieces):
    text = "".join(pieces)
    assert 0.0 <= format_reward(text) <= 1.0
    assert 0.0 <= tag_count(text) <= 0.1
    assert format_reward(text + "x") <= format_reward(text)


def test_hostile_megabytes():
    for unit in ("<think>", "</think>", "<answer>", "<think></think>", "x", " "):
        text = unit * (1_000_000 // len(unit))
        assert format_reward(text) == 0.0
        assert tag_count(text) == 0.0
