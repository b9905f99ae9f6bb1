"""Does a task's grader accept its own gold answers? The proof that a reward of 0 is the policy's fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ..rewards import get_reward
from .base import Task
from .prompts import plain_prompt

_BATCH = 500  # rows graded at once: often enough to show how far it is


@dataclass(frozen=True)
class SplitCheck:
    """What checking one split found.

    `refused` holds the row (counted from 1) and gold answer of each row whose own gold answer, written in the
    required form, is not graded as right and in form; `reward` is the mean weighted reward of those completions;
    `kinds` counts the kinds of rows, where the task tells them apart.
    """

    prompts: int
    refused: tuple[tuple[int, str], ...]
    reward: float
    kinds: dict[str, int]

    @property
    def accepted(self) -> int:
        """How many gold answers the grader accepts."""
        return self.prompts - len(self.refused)


def in_form(gold: str) -> str:
    """A gold answer as a completion in the required form.

    >>> in_form("18")
    '<think>The answer is known.</think>\\n<answer>18</answer>'
    """
    return f"<think>The answer is known.</think>\n<answer>{gold}</answer>"


def check_split(task: Task, split: str, done: Callable[[int], None] = lambda rows: None) -> SplitCheck:
    """Grade every gold answer of a split in the required form.

    Args:
        task: any task.
        split: `train` or `test`.
        done: told how many rows are graded, for a person who waits.

    >>> from .arithmetic import arithmetic_task
    >>> found = check_split(arithmetic_task("easy", train_size=4, test_size=2), "train")
    >>> found.prompts, found.accepted, round(found.reward, 3)
    (4, 4, 1.2)
    """
    rows = {"train": task.train, "test": task.test}[split]
    golds = list(rows["answer"])
    refused, total = [], 0.0
    for start in range(0, len(golds), _BATCH):
        batch = golds[start : start + _BATCH]
        texts = [in_form(gold) for gold in batch]
        grades = task.grade(texts, batch)
        refused += [(start + row, batch[row - 1]) for row, grade in enumerate(grades, 1) if not grade.both]
        for name, weight in task.rewards.items():
            if get_reward(name).reads == "text":
                total += weight * sum(task.scores(name, texts, batch))
        done(start + len(batch))
    kinds = Counter(rows["kind"]) if "kind" in rows.column_names else {}
    return SplitCheck(len(golds), tuple(refused), total / max(len(golds), 1), dict(kinds))


def shared_prompts(task: Task) -> int:
    """How many test prompts are training prompts as well.

    >>> from .arithmetic import arithmetic_task
    >>> shared_prompts(arithmetic_task("easy", train_size=4, test_size=2))
    0
    """
    trained = {plain_prompt(prompt) for prompt in task.train["prompt"]}
    return sum(plain_prompt(prompt) in trained for prompt in task.test["prompt"])
