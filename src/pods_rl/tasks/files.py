"""Tasks made of questions and answers that somebody wrote: GSM8K, and any dataset like it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..errors import UserError
from ..rewards import GRADER_VERSION, accuracy, extract_gold
from .base import PAPER_REWARDS, Task
from .reading import read_split

QUESTION_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "solution")
PROMPT_STYLES = ("chat", "plain")

# Asks for the form that the paper's format reward looks for (arXiv 2504.13818), in our own words.
SYSTEM_PROMPT = (
    "Solve the problem you are given. First reason step by step between <think> and </think>, and check your "
    "work there. Then state the final answer alone, without explanation, between <answer> and </answer>:\n"
    "<think>your reasoning</think><answer>your final answer</answer>"
)

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class PromptForm:
    """How a question becomes a prompt: `chat` gives messages, `plain` text; an empty system prompt is none.

    Raises UserError for an unknown style.

    >>> PromptForm("chat", "Add.").write("1+1?")
    [{'role': 'system', 'content': 'Add.'}, {'role': 'user', 'content': '1+1?'}]
    >>> PromptForm("plain", "").write("1+1?")
    '1+1?\\n'
    """

    style: str = "chat"
    system: str = SYSTEM_PROMPT

    def __post_init__(self) -> None:
        if self.style not in PROMPT_STYLES:
            raise UserError(f"prompt_style is {self.style!r}; expected one of {', '.join(PROMPT_STYLES)}")

    def write(self, question: str) -> Prompt:
        """Write the prompt for one question."""
        if self.style == "plain":
            return "\n\n".join(part for part in (self.system, question) if part) + "\n"
        return self.prepend([{"role": "user", "content": question}])

    def prepend(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Put the system prompt before chat messages that have none of their own."""
        if not self.system or any(message.get("role") == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    @property
    def version(self) -> str:
        """A mark that changes with any prompt this writes."""
        return hashlib.sha256(json.dumps([self.style, self.system]).encode()).hexdigest()[:8]


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


def dataset_task(settings: Mapping[str, Any], name: str = "dataset") -> Task:
    """Make a task of the dataset that a recipe's settings name (`pods_rl.tasks.load_task` lists them).

    Each gold answer is extracted and shown to the grader before anything is trained; the paper's rewards are
    the default. `task_train_size` and `task_test_size` keep the first rows of a split.

    Raises UserError for what cannot be found or read, naming the row (counted from 1) of a bad question or
    answer.
    """
    train, test = _sources(settings)
    form = _prompt_form(settings)
    return Task(
        name=name,
        version=f"{GRADER_VERSION}-{form.version}",
        train=_build(train, settings, form, settings.get("task_train_size")),
        test=_build(test, settings, form, settings.get("task_test_size")),
        rewards=dict(PAPER_REWARDS),
    )


def gsm8k_task(settings: Mapping[str, Any]) -> Task:
    """Make the GSM8K task, from the hub or from `dataset_name` where given; gold answers follow `####`."""
    given = {key: value for key, value in settings.items() if value is not None}
    source = {} if "dataset_name" in given else {"dataset_name": "openai/gsm8k", "dataset_config": "main"}
    return dataset_task({"answer_after": "####", **source, **given}, name="gsm8k")


def _sources(settings: Mapping[str, Any]) -> tuple[Source, Source]:
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


def _prompt_form(settings: Mapping[str, Any]) -> PromptForm:
    system, style = settings.get("system_prompt"), settings.get("prompt_style")
    return PromptForm(style or "chat", SYSTEM_PROMPT if system is None else system)


def _build(source: Source, settings: Mapping[str, Any], form: PromptForm, size: int | None) -> Dataset:
    """Turn the rows of a source into prompts and gold answers."""
    rows = read_split(source.name, source.split, source.config)
    question_column = _column(rows, source, settings, "question_column", QUESTION_COLUMNS)
    answer_column = _column(rows, source, settings, "answer_column", ANSWER_COLUMNS)
    if len(rows) == 0:
        raise UserError(f"{source} has no rows; expected at least one")
    rows = rows.select(range(min(size or len(rows), len(rows))))
    prompts, answers = [], []
    for number, (question, answer) in enumerate(zip(rows[question_column], rows[answer_column], strict=True), 1):
        where = f"{source}, row {number} (counted from 1)"
        prompts.append(_prompt(question, form, f"{where}, column {question_column!r}"))
        answers.append(_gold(answer, settings.get("answer_after"), f"{where}, column {answer_column!r}"))
    return Dataset.from_dict({"prompt": prompts, "answer": answers})


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


def _prompt(question: Any, form: PromptForm, where: str) -> Prompt:
    if isinstance(question, str) and question.strip():
        return form.write(question)
    if isinstance(question, list) and question and all(isinstance(turn, dict) for turn in question):
        if form.style == "plain":
            raise UserError(f"{where}: the question is a list of chat messages; set prompt_style: chat")
        return form.prepend(question)
    raise UserError(f"{where}: the question is {_shown(question)}; expected text, or a list of chat messages")


def _gold(value: Any, after: str | None, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UserError(f"{where}: the answer is {_shown(value)}; expected text or a number")
    gold = extract_gold(str(value), after)
    if gold is None:
        wanted = f"something after {after!r}" if after else "an answer"
        raise UserError(f"{where}: no gold answer in {_shown(value)}; expected {wanted}. Mend it, or set answer_after")
    if accuracy(f"<answer>{gold}</answer>", gold) != 1:
        raise UserError(f"{where}: the grader does not accept {_shown(gold)} as its own answer; mend the row")
    return gold


def _shown(value: Any, most: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"
