"""The table of rewards, and a user's own by dotted path."""

import subprocess
import sys

import pytest

from pods_rl.rewards import REWARDS, Reward, format_reward, get_reward, overlong, tag_count

GOOD = "<think>9*2=18</think><answer>18</answer>"


def shout(text: str, gold: str) -> float:
    return float(text.isupper())


def wordy(text: str, gold: str):
    return "good"


def test_no_answer_no_gold_answer_and_an_answer_that_is_not_marked_are_wrong():
    golds = {"accuracy": "18", "choice": "B", "equation": "2H2 + O2 = 2H2O"}
    for name, gold in (golds | {"chemistry": "B"}).items():
        for text, wanted in (("", gold), (gold, gold), ("<answer> </answer>", gold), (f"<answer>{gold}</answer>", " ")):
            assert REWARDS[name](text, wanted) == 0.0


def test_a_reward_must_give_numbers_and_one_gold_answer_each():
    with pytest.raises(TypeError, match=r"'good' .*str"):
        get_reward(f"{__name__}:wordy")("a", "b")
    with pytest.raises(ValueError, match="argument"):
        Reward("own", shout).batch(["a"], [])


def test_rewards_load_neither_torch_nor_the_verifier():
    program = "import sys, pods_rl.rewards as r; r.accuracy('#### 4', '4'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "rich", "sympy", "math_verify", "datasets", "transformers"} & set(loaded)
    ours = {name.split(".")[1] for name in loaded if name.startswith("pods_rl.")}
    assert ours <= {"distributed", "errors", "packages", "rewards", "sandbox", "text"}


# -- the rewards of form and length: worked values of the rules that their docstrings state ---------------------------

FORMATS = {
    GOOD: 1.0,
    "<think>\na\n</think>\n\n<answer>\n18\n</answer>\n": 1.0,
    "<think>a</think>so<answer>18</answer>": 0.98,
    f"a b{GOOD}c d": 0.96,
    "é" + GOOD: 0.99,
    f"{'x' * 99}{GOOD}": 0.01,
    f"{'x' * 1000}{GOOD}": 0.0,
    f"{GOOD}<answer>17</answer>": 0.81,
    "<think>a</think>b</think><answer>18</answer>": 0.91,
    "<think></think><answer></answer>": 1.0,
    "<answer>18</answer><think>a</think>": 0.0,
    "<think>a<answer>18</answer>": 0.0,
    "<think>a</think><answer>18": 0.0,
    "<Think>a</Think><Answer>18</Answer>": 0.0,
    "": 0.0,
}
TAGS = {
    GOOD: 0.1,
    "<answer>18</answer>": 0.05,
    "</think>": 0.025,
    "<think>a</think><think>b</think><answer>18</answer>": 0.05,
    GOOD * 2: 0.0,
    "": 0.0,
}


def test_the_form_of_a_completion():
    assert {text: format_reward(text) for text in FORMATS} == FORMATS
    assert {text: tag_count(text) for text in TAGS} == TAGS


def test_the_penalty_of_length_has_dapo_s_worked_values():
    # 16384 expected tokens, 4096 of buffer
    values = {1: 0.0, 16384: 0.0, 17408: -0.25, 18432: -0.5, 20480: -1.0, 20481: -1.0, 10**9: -1.0}
    assert {tokens: overlong(tokens, 20480) for tokens in values} == values
