"""Our graders as verl's reward function: `reward.custom_reward_function.{path,name}`."""

from __future__ import annotations

from typing import Any

from ...errors import UserError
from ...rewards import get_reward
from ...tasks import TASKS


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> dict[str, float]:
    """Return a completion's reward, whether its answer is right (`acc`), and each of the task's rewards.

    Args:
        data_source: a task's name (`pods tasks`); its default rewards and weights are used.
        solution_str: the completion's text.
        ground_truth: the gold answer.

    Raises:
        UserError: an unknown task, or one with tools, whose conversations verl does not hand to its reward function.

    >>> compute_score("arithmetic", "<think>1+1=2</think><answer>2</answer>", "2")["acc"]
    1.0
    """
    entry = TASKS.get(data_source)
    if entry is None:
        raise UserError(
            f"the column data_source is {data_source!r}; expected the task whose rewards to use: {', '.join(TASKS)}. "
            "For other data name a reward function of your own there."
        )
    if entry.tools:
        raise UserError(
            f"task {data_source} has tools, which the verl engine does not run: train it with pods train (TRL's engine)"
        )
    marks = {name: get_reward(name)(solution_str, ground_truth) for name in entry.rewards}
    total = sum(weight * marks[name] for name, weight in entry.rewards.items())
    return {"score": total, "acc": float(marks[entry.answer] >= 1), **marks}
