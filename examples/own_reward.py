"""A reward of your own, next to the shipped ones: a function of one completion and the gold answer.

    PYTHONPATH=examples pods train tiny-pods --max_seconds 20 \\
      --task_rewards '{accuracy: 1.0, own_reward:brevity: 0.2}'

Needs: pods-rl; half a minute on one CPU core. PYTHONPATH makes the module importable. `reward_errors` decides what
happens if a call raises or takes longer than `reward_seconds` (docs/rewards.md).
"""


def brevity(text: str, gold: str) -> float:
    """Return 1 for an empty completion, falling to 0 at 60 characters.

    >>> brevity("<think>1+2=3</think><answer>3</answer>", "3")
    0.3666666666666667
    """
    return max(0.0, 1.0 - len(text) / 60)
