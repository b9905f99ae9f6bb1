"""What every task is: prompts, gold answers, the rewards it is trained on, and how a completion is graded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from datasets import Dataset

from ..errors import UserError
from ..rewards import REWARDS, get_reward, score
from ..rewards.user_rewards import RewardFailure, Scores

COLUMNS = ("prompt", "answer")
# arXiv 2504.13818, single-GPU experiments: accuracy 1.0, 0.1 x format, 0.025 per tag (in tag_count itself).
FORM_REWARDS = {"format": 0.1, "tag_count": 1.0}
PAPER_REWARDS = {"accuracy": 1.0, **FORM_REWARDS}


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
    (the gold answer, a string). `rewards` maps names of `pods_rl.rewards.REWARDS` (or dotted paths) to weights, in
    order; it is what the policy is trained on. `answer` names the reward whose full marks (1.0) mean a right answer.
    `version` changes whenever the same settings give other prompts or other grades, so that results of different
    versions are never compared by mistake. A task without training rows can be evaluated only.

    A user's own reward scores each completion in a process of its own within `reward_seconds`; None: in this process,
    without a limit. A completion that it cannot grade counts as wrong, or raises where `reward_errors` is `raise`.

    Raises ValueError where a split lacks a column, the test split is empty, or no reward is named.

    >>> split = Dataset.from_dict({"prompt": ["1+1="], "answer": ["2"]})
    >>> task = Task("sums", "1", split, split, {"accuracy": 1.0})
    >>> task.grade(["<answer>2</answer>"], ["2"])
    [Grade(answer=True, format=False)]
    """

    name: str
    version: str
    train: Dataset
    test: Dataset
    rewards: Mapping[str, float]
    answer: str = "accuracy"
    reward_seconds: float | None = None
    reward_errors: str = "raise"

    def __post_init__(self) -> None:
        for split, dataset in (("train", self.train), ("test", self.test)):
            missing = [column for column in COLUMNS if column not in dataset.column_names]
            if missing:
                raise ValueError(
                    f"task {self.name!r}: its {split} split has the columns {dataset.column_names}, "
                    f"without {missing}; name the columns that hold the prompt and the answer"
                )
        if len(self.test) == 0:
            raise ValueError(f"task {self.name!r}: its test split has no rows; give it at least one")
        if not self.rewards:
            raise ValueError(f"task {self.name!r}: no reward is named; name at least one with its weight")

    def grade(self, texts: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        """Judge completions, in order: the answer by the reward `answer` names, the form by full format marks.

        Raises ValueError where there is not one gold answer to each text, and UserError where a user's own reward
        cannot grade a completion and `reward_errors` is `raise`.
        """
        right = self.scores(self.answer, texts, golds)
        formed = REWARDS["format"].batch(texts, golds)
        return [Grade(answer=a >= 1, format=f >= 1) for a, f in zip(right, formed, strict=True)]

    def scores(self, name: str, texts: Sequence[str], golds: Sequence[str]) -> list[float]:
        """Score completions with one reward, in order; 0 where it fails, unless `reward_errors` is `raise`."""
        given: Scores = score(get_reward(name), texts, golds, self.reward_seconds)
        for row, (mark, text) in enumerate(zip(given, texts, strict=True)):
            if isinstance(mark, RewardFailure) and self.reward_errors == "raise":
                shown = text if len(text) <= 80 else text[:77] + "..."
                raise UserError(
                    f"the reward '{name}' {mark.reason} for row {row} of {len(texts)} (counted from 0) that it grades, "
                    f"completion {shown!r}. Fix the function, or set reward_errors: zero or drop (it counts as wrong)"
                ) from mark.error
        return [0.0 if isinstance(mark, RewardFailure) else mark for mark in given]
