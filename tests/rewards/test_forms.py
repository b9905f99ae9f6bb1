"""The rewards of form and length: worked values of the rules that their docstrings state."""

from pods_rl.rewards import format_reward, overlong, tag_count

GOOD = "<think>9*2=18</think><answer>18</answer>"
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
