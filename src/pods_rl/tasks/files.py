"""Tasks made of questions and answers that somebody wrote: any data set with a column for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..errors import UserError
from ..rewards import extract_gold, get_reward
from .base import COLUMNS, PAPER_REWARDS, Task
from .prompts import Prompt, PromptForm, plain_prompt
from .reading import read_split

QUESTION_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "solution")
_NUMBER = 1


@dataclass(frozen=True)
class Source:
    """One split of a dataset as a recipe names it, and how it is spoken of in messages."""

    name: str
    split: str
    config: str | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.split})"

    @property
    def is_file(self) -> bool:
        """Whether it is one local file, and so one split."""
        return Path(self.name).expanduser().is_file()

    def read(self) -> Dataset:
        """Read its rows; raises UserError as `reading.read_split` does, and where there are none."""
        rows = read_split(self.name, self.split, self.config)
        if len(rows) == 0:
            raise UserError(f"{self} has no rows; expected at least one")
        return rows


def dataset_task(settings: Mapping[str, Any]) -> Task:
    """Make a task of the dataset that a recipe's settings name (`pods_rl.tasks.load_task` lists them).

    Each gold answer is extracted and shown to the grader before anything is trained; the paper's rewards are
    the default. `task_train_size` and `task_test_size` keep the first rows of a split.

    Raises UserError for what cannot be found or read, naming the row (counted from 1) of a bad question or
    answer.
    """
    return sourced_task("dataset", named_sources(settings), settings, number=_NUMBER)


def sourced_task(name: str, sources: tuple[Source | None, Source], settings: Mapping[str, Any], *, number: int) -> Task:
    """Make a task of a training and a test source; None for the first makes one that can be evaluated only.

    `number` is the task's own part of its version.
    """
    train, test = sources
    form = PromptForm.of(settings)
    return Task(
        name=name,
        version=form.version(number),
        train=_build(train, settings, form, settings.get("task_train_size")) if train else no_rows(),
        test=_build(test, settings, form, settings.get("task_test_size")),
        rewards=dict(PAPER_REWARDS),
    )


def no_rows() -> Dataset:
    """The training split of a task that can be evaluated only."""
    return Dataset.from_dict({column: [] for column in COLUMNS})


def named_sources(settings: Mapping[str, Any]) -> tuple[Source, Source]:
    """The two sources that `dataset_name` and the keys beside it name."""
    name, config = settings.get("dataset_name"), settings.get("dataset_config")
    if not name:
        raise UserError(
            "task 'dataset' needs dataset_name: a .jsonl, .json, .parquet or .csv file, a folder, or a hub id"
        )
    train = Source(name, settings.get("dataset_train_split") or "train", config)
    test_split = settings.get("dataset_test_split") or "test"
    if settings.get("dataset_test_name"):
        return train, Source(settings["dataset_test_name"], test_split, config)
    test = Source(name, test_split, config)
    if train.is_file and ("[" not in test_split or train.split == test_split):
        raise UserError(
            f"{name} is one file, so there is nothing to test on: name a second one as dataset_test_name, or "
            "cut this one in two with dataset_train_split: train[:90%] and dataset_test_split: train[90%:]"
        )
    return train, test


def _build(source: Source, settings: Mapping[str, Any], form: PromptForm, size: int | None) -> Dataset:
    """Turn the rows of a source into prompts and gold answers."""
    rows = source.read()
    question_column = _column(rows, source, settings, "question_column", QUESTION_COLUMNS)
    answer_column = _column(rows, source, settings, "answer_column", ANSWER_COLUMNS)
    rows = rows.select(range(min(size or len(rows), len(rows))))
    after = settings.get("answer_after")
    places = [f"{source}, row {number} (counted from 1)" for number in range(1, len(rows) + 1)]
    prompts = [
        _prompt(question, form, f"{place}, column {question_column!r}")
        for place, question in zip(places, _values(rows, source, question_column), strict=True)
    ]
    golds = [
        _gold(value, after, f"{place}, column {answer_column!r}")
        for place, value in zip(places, _values(rows, source, answer_column), strict=True)
    ]
    check_golds(golds, [f"{place}, column {answer_column!r}" for place in places], "accuracy")
    return Dataset.from_dict({"prompt": prompts, "answer": golds})


def check_golds(golds: Sequence[str], places: Sequence[str], reward: str) -> None:
    """Raise UserError where the reward does not accept some gold answers as their own; `places` names each."""
    marks = get_reward(reward).batch([f"<answer>{gold}</answer>" for gold in golds], golds)
    refused = [row for row, mark in enumerate(marks) if not mark >= 1]
    if refused:
        first, others = refused[0], len(refused) - 1
        more = f" ({others} more rows are like it)" if others else ""
        raise UserError(
            f"{places[first]}: the grader does not accept {shown(golds[first])} as its own answer{more}; mend the row"
        )


def _column(rows: Dataset, source: Source, settings: Mapping[str, Any], key: str, usual: tuple[str, ...]) -> str:
    given, present = settings.get(key), rows.column_names
    if given is None:
        found = next((column for column in usual if column in present), None)
        if found:
            return found
        raise UserError(
            f"{source} has the columns {', '.join(present)}, none of {', '.join(usual)}; name yours as {key}"
        )
    if given not in present:
        raise UserError(f"{key} is {given!r}, but {source} has the columns {', '.join(present)}; name one of them")
    return given


def _values(rows: Dataset, source: Source, column: str) -> list[Any]:
    try:
        return list(rows[column])
    except UnicodeDecodeError as error:  # the JSON reader takes any bytes
        raise UserError(
            f"{source}, column {column!r}, is not text in UTF-8 ({error.reason}); save it as UTF-8"
        ) from error


def _prompt(question: Any, form: PromptForm, where: str) -> Prompt:
    if isinstance(question, str) and question.strip():
        return form.write(question)
    if isinstance(question, list) and question:
        messages = form.prepend([_turn(turn, f"{where}, message {n}") for n, turn in enumerate(question, start=1)])
        if form.style == "chat":
            return messages
        try:
            return plain_prompt(messages)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    raise UserError(f"{where}: the question is {shown(question)}; expected text, or a list of chat messages")


def _turn(turn: Any, where: str) -> dict[str, Any]:
    """A chat message with its content as text: OpenAI's list of parts becomes the text of them all."""
    if not isinstance(turn, dict):
        raise UserError(f"{where}: is {shown(turn)}; expected a mapping of role and content")
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or not role:
        raise UserError(f"{where}: the role is {shown(role)}; expected user, assistant or system")
    if isinstance(content, list) and content:
        content = "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        raise UserError(f"{where}: the content is {shown(content)}; expected text")
    if role == "user" and not content.strip():
        raise UserError(f"{where}: the content is empty; expected text")
    return {**turn, "content": content}


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else "text"
    text = part.get("text") if isinstance(part, dict) else part
    if kind not in ("text", None) or not isinstance(text, str):
        raise UserError(f"{where}: a part of the content is {shown(part)}; expected text: images are not supported")
    return text


def _gold(value: Any, after: str | None, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UserError(f"{where}: the answer is {shown(value)}; expected text or a number")
    gold = extract_gold(str(value), after)
    if gold is None:
        wanted = f"something after {after!r}" if after else "an answer"
        raise UserError(f"{where}: no gold answer in {shown(value)}; expected {wanted}. Mend it, or set answer_after")
    return gold


def shown(value: Any, most: int = 80) -> str:
    """A value short enough for a message.

    >>> shown("a" * 100, most=8)
    "'aaa...aaa'"
    """
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"
