"""The table of rewards, and a user's own by dotted path."""

import subprocess
import sys

import pytest

from pods_rl.rewards import REWARDS, Reward, get_reward

TEXT = "<think>9*2=18</think><answer>18</answer>"


def shout(text: str, gold: str) -> float:
    return float(text.isupper())


def wordy(text: str, gold: str):
    return "good"


def test_a_batch_scores_as_one_by_one():
    for reward in REWARDS.values():
        if reward.reads == "text":
            assert reward.batch([TEXT, ""], ["18", "18"]) == [reward(TEXT, "18"), 0.0]


def test_no_answer_no_gold_answer_and_an_answer_that_is_not_marked_are_wrong():
    golds = {"accuracy": "18", "choice": "B", "equation": "2H2 + O2 = 2H2O", "countdown": "6*(5-1)"}
    for name, gold in (golds | {"chemistry": "B"}).items():
        for text, wanted in (("", gold), (gold, gold), ("<answer> </answer>", gold), (f"<answer>{gold}</answer>", " ")):
            assert REWARDS[name](text, wanted) == 0.0


@pytest.mark.parametrize("path", [f"{__name__}:shout", f"{__name__}.shout"])
def test_your_own_reward(path):
    reward = get_reward(path)
    assert reward.name == path
    assert (reward("A", ""), reward.batch(["A", "a"], ["", ""])) == (1.0, [1.0, 0.0])


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
