"""The type of every task: prompts, gold answers, rewards for training, and the grading of completions."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from datasets import Dataset

from ..errors import UserError, users_code
from ..rewards import REWARDS, Reward, get_reward, graded_text, score
from ..rewards.thinking import CLOSING, OPENING, opened_thought
from ..sandbox import RewardFailure, Scores
from ..sandbox.limits import close_environment
from ..tables import rows_hash, rows_of
from ..text import short
from .sources import column_of

Settings = Mapping[str, Any]  # the task part of a recipe
Messages = list[dict[str, Any]]
Prompt = str | Messages
COLUMNS = ("prompt", "answer")
# arXiv 2504.13818, single-GPU experiments: accuracy 1.0, 0.1 x format, 0.025 per tag (in tag_count itself).
FORM_REWARDS = {"format": 0.1, "tag_count": 1.0}
BY_ENVIRONMENT = "environment"  # the `answer` of a task that its environments grade
PAPER_REWARDS = {"accuracy": 1.0, **FORM_REWARDS}
GRADERS = ("accuracy", "choice", "chemistry", "equation")  # the rewards that compare with a gold answer
NO_TOOLS = ("reset", "get_reward", "close")  # of an environment's public methods


class Grade(NamedTuple):
    """Whether one completion holds the right answer, and whether it has the required form.

    The two are graded separately, so that learning the form does not count as learning to answer.

    >>> Grade(answer=True, format=False).both
    False
    """

    answer: bool
    format: bool

    @property
    def both(self) -> bool:
        """Whether the answer and the form are right."""
        return self.answer and self.format


@dataclass(frozen=True)
class Task:
    """Prompts with gold answers, and how completions to them are rewarded and graded.

    Args:
        name: of the task.
        version: changes whenever the same settings give other prompts or other grades, so that results of different
            versions are never compared by mistake.
        train: has at least the columns `prompt` (text, or a list of chat messages) and `answer` (the gold answer).
            Without rows the task can only be evaluated.
        test: as `train`, with at least one row.
        rewards: names of `pods_rl.rewards.REWARDS` (or dotted paths) to weights, in order; the policy is trained on
            these.
        answer: the reward whose full marks (1.0) mean a right answer. `environment` names the environment's
            `get_reward`. If None, evaluations show the rewards themselves instead of an accuracy (`deciding_reward`).
        reward_seconds: the time limit of a user's own reward for one completion, in a separate process. If None, the
            reward runs in this process, without a limit.
        reward_errors: if `raise`, an evaluation raises when a user's own reward cannot grade a completion. Otherwise
            the completion counts as wrong.
        tools: functions, sync or async, that the policy may call in a conversation; names, types and docstrings
            describe them to it, as in TRL. The text of the last assistant turn is graded (`last_turn`).
        environment_factory: makes an environment for a conversation, as TRL's: `reset(**row)` starts it, its other
            public methods but `close` are tools, and its `get_reward`, if it has one, is a reward of weight 1.
        graders: rewards of this task alone; `rewards` and `answer` name them as others. One with a plain name and
            without a `maker` runs in this process, without a time limit.
        notes: what a user should know about the data, such as a test split that was cut off the training rows.

    Raises ValueError if a split lacks a column, the test split is empty, or no reward has a weight and there
    is no environment.

    >>> split = Dataset.from_dict({"prompt": ["1+1="], "answer": ["2"]})
    >>> Task("sums", "1", split, split, {"accuracy": 1.0}).grade(["<answer>2</answer>"], ["2"])
    [Grade(answer=True, format=False)]
    """

    name: str
    version: str
    train: Dataset
    test: Dataset
    rewards: Mapping[str, float]
    answer: str | None = "accuracy"
    reward_seconds: float | None = None
    reward_errors: str = "raise"
    tools: tuple[Callable[..., Any], ...] = ()
    environment_factory: Callable[[], Any] | None = None
    graders: tuple[Reward, ...] = ()
    notes: tuple[str, ...] = ()

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
        if not self.rewards and self.environment_factory is None:
            raise ValueError(f"task {self.name!r}: no reward is named; name at least one with its weight")
        has_weight = any(self.rewards.values())
        if self.rewards and not has_weight and self.environment_factory is None:
            raise ValueError(f"task {self.name!r}: all weights of its rewards are 0; give one of them a weight")

    def reward(self, name: str) -> Reward:
        """Return the reward of that name: the task's own, or `pods_rl.rewards.get_reward`."""
        graders = {grader.name: grader for grader in self.graders}
        return graders.get(name) or get_reward(name)

    def tools_of(self, environment: object | None = None) -> list[Callable[..., Any]]:
        """Return the tools of a conversation: the task's, and the methods of its environment that are tools."""
        methods = inspect.getmembers(type(environment), predicate=inspect.isfunction)  # without one, there are none
        names = [name for name, _ in methods if not name.startswith("_") and name not in NO_TOOLS]
        return [*self.tools, *(getattr(environment, name) for name in names)]

    def new_environment(self) -> Any:
        """Return an environment for conversations, or None if the task has none; raise UserError if its code raises."""
        factory = self.environment_factory
        if factory is None:
            return None
        name = getattr(factory, "__name__", type(factory).__name__)
        with users_code(f"the task {self.name}: its environment_factory, {name},"):
            return factory()

    def list_tools(self) -> list[Callable[..., Any]]:
        """Return the tools of a conversation, for their descriptions: those of an environment that is closed again."""
        environment = self.new_environment()
        try:
            return self.tools_of(environment)
        finally:
            close_environment(environment)

    @property
    def converses(self) -> bool:
        """Whether a completion is a conversation, with tools or an environment."""
        return bool(self.tools) or self.environment_factory is not None

    def grade(
        self, texts: Sequence[str], golds: Sequence[str], environment_rewards: Sequence[float | None] | None = None
    ) -> list[Grade]:
        """Grade completions, in order: the answer by the reward `answer` names, the form by full format marks.

        Args:
            texts: of conversations, the last assistant turn.
            golds: gold answers.
            environment_rewards: the reward of each conversation, read if `answer` is `environment`.

        Raises ValueError unless there is one gold answer per text, and UserError if a user's own reward
        cannot grade a completion and `reward_errors` is `raise`, or if only environments can grade it, or nothing.
        """
        if self.answer is None:
            raise UserError(f"task {self.name!r} has no reward that says which answers are right: read its rewards")
        if self.answer != BY_ENVIRONMENT:
            answer_scores = self.scores(self.answer, texts, golds)
        elif environment_rewards is not None:
            answer_scores = [reward or 0.0 for reward in environment_rewards]
        else:
            raise UserError(f"task {self.name!r} is graded by its environments, which did not score these texts")
        format_scores = REWARDS["format"].batch(texts, golds)
        return [
            Grade(answer=answer_score >= 1, format=format_score >= 1)
            for answer_score, format_score in zip(answer_scores, format_scores, strict=True)
        ]

    def reward_parts(
        self,
        texts: Sequence[str],
        golds: Sequence[str],
        tokens: Sequence[int],
        limit: int,
        environment_rewards: Sequence[float | None] | None = None,
    ) -> list[dict[str, float]]:
        """Return what completions score in training, in order: `reward`, their weighted sum, and `reward/<name>`.

        A completion that a reward cannot score has 0 there.

        Args:
            texts: of conversations, the last assistant turn.
            golds: gold answers.
            tokens: the length of each completion.
            limit: the most tokens of a completion.
            environment_rewards: the reward of each conversation, with weight 1.

        >>> split = Dataset.from_dict({"prompt": ["1+1="], "answer": ["2"]})
        >>> task = Task("sums", "1", split, split, {"accuracy": 1.0, "overlong": 0.5})
        >>> task.reward_parts(["<answer>2</answer>"], ["2"], [10], limit=10)
        [{'reward': 0.5, 'reward/accuracy': 1.0, 'reward/overlong': -1.0}]
        """
        parts: list[tuple[str, float, Sequence[float | None]]] = []  # name, weight and scores of each reward
        for name, weight in self.rewards.items():
            reward = self.reward(name)
            by_length = reward.reads == "tokens"
            scores = reward.of_lengths(tokens, limit) if by_length else self.scores(name, texts, golds)
            parts.append((name, weight, scores))
        if environment_rewards is not None:
            parts.append((BY_ENVIRONMENT, 1.0, environment_rewards))
        columns = {"reward": [0.0] * len(texts)}
        for name, weight, marks in parts:
            usable = [0.0 if mark is None or not math.isfinite(mark) else mark for mark in marks]
            columns["reward"] = [total + weight * mark for total, mark in zip(columns["reward"], usable, strict=True)]
            columns[f"reward/{name}"] = usable
        return rows_of(columns)

    def scores(self, name: str, texts: Sequence[str], golds: Sequence[str]) -> list[float]:
        """Score completions with one reward, in order; 0 if it fails, unless `reward_errors` is `raise`."""
        marks: Scores = score(self.reward(name), texts, golds, self.reward_seconds)
        scores = []
        for row, (mark, text) in enumerate(zip(marks, texts, strict=True)):
            if not isinstance(mark, RewardFailure):
                scores.append(mark)
                continue
            scores.append(0.0)
            if self.reward_errors == "raise":
                raise UserError(
                    f"the reward '{name}' {mark.reason} for row {row} of {len(texts)} (counted from 0) that it grades, "
                    f"completion {short(repr(text))}. Fix the function, or set reward_errors: zero or drop (it counts "
                    "as wrong)"
                ) from mark.error
        return scores


def deciding_reward(rewards: Mapping[str, float], answer: str | None, *, environment: bool = False) -> str | None:
    """Return the reward that says which answers are right, among those that a policy is trained on.

    `answer`, the task's own, stays if it is trained on, if it is the user's own function, or if the environment is
    asked. A shipped grader that nobody asked for would show 0 for a policy that learns something else. To see it
    without training on it, give it weight 0.

    Returns the first shipped grader of `rewards` otherwise, the environment if there is no reward, or None.

    >>> deciding_reward({"accuracy": 1.0, "mine:judge": 1.0}, "accuracy")
    'accuracy'
    >>> deciding_reward({"format": 0.1, "choice": 1.0}, "accuracy"), deciding_reward({"mine:judge": 1.0}, "accuracy")
    ('choice', None)
    """
    if answer is None or answer in rewards or answer == BY_ENVIRONMENT or ":" in answer or "." in answer:
        return answer
    without_grader = BY_ENVIRONMENT if environment and not rewards else None
    return next((name for name in rewards if name in GRADERS), without_grader)


@dataclass(frozen=True)
class SplitCheck:
    """The check of a task's grader on the gold answers of one split.

    `refused` holds the row (counted from 1) and gold answer of each row whose own gold answer, written in the
    required form, is not graded as right and in form; `reward` is the mean weighted reward of those completions;
    `unknown` counts the rows without a gold answer to check.
    """

    prompts: int
    refused: tuple[tuple[int, str], ...]
    reward: float
    unknown: int = 0

    @property
    def accepted(self) -> int:
        """The number of gold answers that the grader accepts."""
        return self.prompts - self.unknown - len(self.refused)


def check_split(task: Task, split: str) -> SplitCheck:
    """Grade every gold answer of a split (`train` or `test`) as a completion in the required form.

    >>> split = Dataset.from_dict({"prompt": ["1+1="], "answer": ["2"]})
    >>> check_split(Task("sums", "1", split, split, {"accuracy": 1.0}), "test").accepted
    1
    """
    rows = {"train": task.train, "test": task.test}[split]
    golds = list(rows["answer"])
    written: list[str | None] = [None] * len(golds)
    if task.answer not in (None, BY_ENVIRONMENT):
        grader = task.reward(task.answer)
        written = [grader.gold(gold) for gold in golds]
    numbered = enumerate(zip(golds, written, strict=True), start=1)
    checked = [(row, gold) for row, (gold, answer) in numbered if answer is not None]
    checked_golds = [gold for _, gold in checked]
    answers = [answer for answer in written if answer is not None]
    texts = [f"<think>The answer is known.</think>\n<answer>{answer}</answer>" for answer in answers]
    if not texts:
        return SplitCheck(len(golds), (), 0.0, unknown=len(golds))
    graded = zip(checked, task.grade(texts, checked_golds), strict=True)
    refused = [row_and_gold for row_and_gold, grade in graded if not grade.both]
    total = 0.0
    for name, weight in task.rewards.items():
        if task.reward(name).reads == "text":
            total += weight * sum(task.scores(name, texts, checked_golds))
    return SplitCheck(len(golds), tuple(refused), total / len(texts), unknown=len(golds) - len(texts))


def row_hashes(task: Task) -> dict[str, str]:
    """Return the sha256 of the rows of each split: all columns, in order, wherever the task read them."""
    return {"train": rows_hash(task.train), "test": rows_hash(task.test)}


def last_turn(completion: str | Messages, prompt: str = "", raw: str | None = None) -> str:
    """Return the text that is graded of a completion: text, or of messages what the last assistant turn says.

    The `<think>` at the end of a rendered prompt, or of the turn's own generation prompt, is part of it
    (`graded_text`). Tool calls and results never count. Reasoning that a response template set apart is put back before
    the content.

    Args:
        completion: text, or messages.
        prompt: the rendered prompt that the policy continued, or its end.
        raw: the text of the completion's tokens. Needed for messages if the prompt opens a thought: a response template
            hides whether the thought was closed.

    >>> call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    >>> said = {"role": "assistant", "reasoning_content": "Add.", "content": "3"}
    >>> last_turn([call, {"role": "tool", "content": "3"}, said])
    '<think>Add.</think>3'
    >>> last_turn("Add.</think>3", prompt="1+2?<think>")
    '<think>Add.</think>3'
    """
    if isinstance(completion, str):
        return graded_text(prompt, completion)
    turn = next((message for message in reversed(completion) if message.get("role") == "assistant"), {})
    content = str(turn.get("content") or "")
    reasoning = turn.get("reasoning_content") or turn.get("thinking")  # LFM2.5 and gpt-oss say `thinking`
    if not reasoning:
        return _opening_of(content, prompt, content if raw is None else raw) + content
    text = f"{OPENING}{reasoning}"
    if content or raw is None or raw.rstrip().endswith(CLOSING):
        text += CLOSING
    return text + content


def _opening_of(content: str, prompt: str, raw: str) -> str:
    """Return the opening of a last turn without reasoning: that of its generation prompt, or of an empty thought."""
    text = raw.rstrip()
    ending = content.rstrip()
    before = text[: len(text) - len(ending)] if text.endswith(ending) else ""
    if opened_thought(prompt) and before.strip() == CLOSING:  # a response template dropped it
        return OPENING + CLOSING
    return opened_thought(prompt + before)


def shared_prompts(task: Task) -> int:
    """Count the test prompts that are also training prompts: the same text, or the same turns."""
    test_prompts = [_prompt_key(prompt) for prompt in task.test["prompt"]]
    shared = set(test_prompts).intersection(map(_prompt_key, column_of(task.train, "prompt")))
    return sum(prompt in shared for prompt in test_prompts)


def _prompt_key(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt)
