"""A task with a tool: expressions too hard to compute in the head, and a calculator for one step of them.

    pods train --task calculator:make_task --model_name_or_path Qwen/Qwen3-0.6B --max_steps 100

Run it in this folder, with a chat model whose template has tools. A full-marks conversation about `(47*83)-219` calls
the tool twice, and then answers `<think>3682</think><answer>3682</answer>`.
"""

import random
import re

from datasets import Dataset

from pods_rl.tasks import PAPER_REWARDS, Task

_STEP = re.compile(r"\s*(-?[0-9]{1,12})\s*([-+*])\s*(-?[0-9]{1,12})\s*")


def calculator(expression: str) -> str:
    """Compute one operation on two whole numbers.

    Args:
        expression: two whole numbers with +, - or * between them, such as 12*34.

    Returns:
        The result.
    """
    found = _STEP.fullmatch(expression)
    if found is None:
        raise ValueError("expected a*b, a+b or a-b")
    left, sign, right = int(found[1]), found[2], int(found[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[sign])


def draw(rng):
    """Return an expression of two steps and its value."""
    first, second, third = (rng.randint(12, 99) for _ in range(3))
    inner, sign = calculator(f"{first}*{second}"), rng.choice("+-")
    return f"({first}*{second}){sign}{third}", calculator(f"{inner}{sign}{third}")


def make_task(settings):
    """Return the task: what `task: calculator:make_task` names in a recipe."""
    rng = random.Random(settings.get("task_seed") or 0)
    sizes = settings.get("task_train_size") or 1000, settings.get("task_test_size") or 100
    splits = []
    for size in sizes:
        rows = [draw(rng) for _ in range(size)]
        prompts = [[{"role": "user", "content": question}] for question, _ in rows]
        splits.append(Dataset.from_dict({"prompt": prompts, "answer": [answer for _, answer in rows]}))
    return Task("calculator", "1", *splits, dict(PAPER_REWARDS), tools=(calculator,))
