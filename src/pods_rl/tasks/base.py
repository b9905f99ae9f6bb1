"""What every task is: prompts, gold answers, the rewards it is trained on, and how a completion is graded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from datasets import Dataset

COLUMNS = ("prompt", "answer")


class Grade(NamedTuple):
    """Whether one completion holds the right answer, and whether it is in the required form.

    The two are judged apart, so that learning the form is never mistaken for learning to answer.

    >>> Grade(answer=True, format=False).both
    False
    """

    answer: bool
    format: bool

    @property
    def both(self) -> bool:
        """True where the answer is right and the form is kept."""
        return self.answer and self.format


@dataclass(frozen=True)
class Task:
    """Prompts with gold answers, and how completions to them are rewarded and graded.

    `train` and `test` have at least the columns `prompt` (a string, or a list of chat messages) and `answer`
    (the gold answer, a string). `rewards` maps names of `pods_rl.rewards.REWARDS` to weights, in order.
    `grade(text, gold)` judges one completion. `version` changes whenever the same settings give other prompts or
    other grades, so that results of different versions are never compared by mistake.

    Raises ValueError where a split is empty or lacks a column, or where no reward is named.

    >>> split = Dataset.from_dict({"prompt": ["1+1="], "answer": ["2"]})
    >>> task = Task("sums", "1", split, split, {"accuracy": 1.0}, lambda text, gold: Grade(text == gold, True))
    >>> task.grade("2", task.test[0]["answer"]).answer
    True
    """

    name: str
    version: str
    train: Dataset
    test: Dataset
    rewards: Mapping[str, float]
    grade: Callable[[str, str], Grade]

    def __post_init__(self) -> None:
        for split, dataset in (("train", self.train), ("test", self.test)):
            missing = [column for column in COLUMNS if column not in dataset.column_names]
            if missing:
                raise ValueError(
                    f"task {self.name!r}: its {split} split has the columns {dataset.column_names}, "
                    f"without {missing}; name the columns that hold the prompt and the answer"
                )
            if len(dataset) == 0:
                raise ValueError(f"task {self.name!r}: its {split} split has no rows; give it at least one")
        if not self.rewards:
            raise ValueError(f"task {self.name!r}: no reward is named; name at least one with its weight")
