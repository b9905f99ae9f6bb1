"""Tasks of written questions and answers: GSM8K, MATH, AMC 2023, and your own data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..errors import UserError
from ..rewards import extract_gold, get_reward
from .prompts import PromptForm
from .sources import READERS, DataSource, find_split, listing, local_folder, mapped
from .task import COLUMNS, PAPER_REWARDS, Prompt, Settings, Task, shown

QUESTION_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "solution")


@dataclass(frozen=True)
class Published:
    """One split of a published set: its hub id and configuration, and its folders under `data_dir`."""

    hub: str
    config: str | None
    folders: tuple[str, ...]


_GSM8K = Published("openai/gsm8k", "main", ("gsm8k",))
_MATH_TRAIN = Published("DigitalLearningGmbH/MATH-lighteval", "default", ("math",))
_MATH_500 = Published("HuggingFaceH4/MATH-500", None, ("math500", "math"))
_AMC23 = Published("math-ai/amc23", None, ("amc23",))
# task: its training set, its test set
PUBLISHED = {"gsm8k": (_GSM8K, _GSM8K), "math": (_MATH_TRAIN, _MATH_500), "amc23": (_MATH_TRAIN, _AMC23)}
_FOLDERS = {name for pair in PUBLISHED.values() for split in pair for name in split.folders}


def dataset_task(settings: Settings) -> Task:
    """Make a task from the data set that a recipe names (settings: `pods_rl.tasks.load_task`).

    Each gold answer is extracted and graded against itself before anything is trained; the paper's rewards are the
    default. `task_train_size` and `task_test_size` keep the first rows of a split.

    Raises UserError for missing or unreadable data, and for a bad question or answer with its row (counted from 1).
    """
    return _task("dataset", _named_sources(settings), settings)


def published_task(name: str, settings: Settings) -> Task:
    """Make `gsm8k` (7473 problems to train on, 1319 to test), `math` (7500, 500) or `amc23` (MATH's 7500, 40).

    Rows are read from `dataset_name` or `data_dir` if given, else from the hub. Gold answers of GSM8K follow
    `####`; those of MATH are the last box of `solution`, or `answer` if present. Raises UserError as
    `dataset_task` does.
    """
    settings = {key: value for key, value in settings.items() if value is not None}
    if "dataset_name" in settings:
        return _task(name, _named_sources(settings), settings)
    train, test = PUBLISHED[name]
    splits = settings.get("dataset_train_split", "train"), "test"
    if "data_dir" not in settings:
        hub = DataSource(train.hub, splits[0], train.config), DataSource(test.hub, splits[1], test.config)
        return _task(name, hub, settings)
    folder = local_folder(settings["data_dir"])
    own = {*train.folders, *test.folders}
    if folder.resolve().name in _FOLDERS - own:  # its files have the same names but other questions
        raise UserError(
            f"data_dir = {folder}: this is another task's folder, and task {name} is in {' or '.join(sorted(own))}/; "
            "name that one, or the folder above it"
        )
    local_test = find_split(folder, test.folders, splits[1])
    if local_test is None:
        raise UserError(
            f"data_dir = {folder}: task {name} found no test file there or in its folder {test.folders[0]}/: expected "
            f"test.jsonl (or {', '.join(READERS)}); the folder holds {listing(folder)}"
        )
    return _task(name, (find_split(folder, train.folders, splits[0]), local_test), settings)


def check_golds(golds: Sequence[str], places: Sequence[str], reward: str) -> None:
    """Raise UserError if the reward does not accept a gold answer as right; `places` names each one's row."""
    marks = get_reward(reward).batch([f"<answer>{gold}</answer>" for gold in golds], golds)
    refused = [row for row, mark in enumerate(marks) if not mark >= 1]
    if refused:
        first, others = refused[0], len(refused) - 1
        more = f" (at least {others} more rows are like it)" if others else ""
        raise UserError(
            f"{places[first]}: the grader does not accept {shown(golds[first])} as its own answer{more}; fix the row"
        )


def _task(name: str, sources: tuple[DataSource | None, DataSource], settings: Settings) -> Task:
    """Return the task of a training and a test source; without a training source it can only be evaluated."""
    form = PromptForm.of(settings)
    no_rows = Dataset.from_dict({column: [] for column in COLUMNS})
    mark = "####" if name == "gsm8k" else None
    train, test = (
        _split(source, settings, form, settings.get(size), mark) if source else no_rows
        for source, size in zip(sources, ("task_train_size", "task_test_size"), strict=True)
    )
    return Task(name, form.version(1), train, test, dict(PAPER_REWARDS))


def _named_sources(settings: Settings) -> tuple[DataSource, DataSource]:
    """Return the two sources that `dataset_name` and related keys name."""
    name, config = settings.get("dataset_name"), settings.get("dataset_config")
    if not name:
        raise UserError(
            "task 'dataset' needs dataset_name: a .jsonl, .json, .parquet or .csv file, a folder, or a hub id"
        )
    train = DataSource(name, settings.get("dataset_train_split") or "train", config)
    test = settings.get("dataset_test_name") or "test"
    if _names_data(test):
        return train, DataSource(test, "test", config)
    if train.is_file and ("[" not in test or train.split == test):
        raise UserError(
            f"{name} is one file, so there is nothing to test on: name a second one as dataset_test_name, or "
            "cut this one in two with dataset_train_split: train[:90%] and dataset_test_name: train[90%:]"
        )
    return train, DataSource(name, test, config)


def _names_data(test: str) -> bool:
    """Return whether `dataset_test_name` names other data than a split of `dataset_name`.

    >>> _names_data("validation"), _names_data("train[90%:]"), _names_data("owner/set"), _names_data("test.jsonl")
    (False, False, True, True)
    """
    return "/" in test or Path(test).suffix in READERS or Path(test).exists()


def _split(source: DataSource, settings: Settings, form: PromptForm, size: int | None, mark: str | None) -> Dataset:
    """Return the prompts and gold answers of a source's first rows.

    Gold answers start after the last `mark`. Many rows are kept in a file, which the process maps into memory.
    """
    rows = source.read()
    columns = (
        _column(rows, source, settings, "question_column", QUESTION_COLUMNS),
        _column(rows, source, settings, "answer_column", ANSWER_COLUMNS),
    )

    def prepare(batch: Mapping[str, list[object]], numbers: list[int]) -> dict[str, list[Any]]:
        asked, answered = (
            [f"{source}, row {number + 1} (counted from 1), column {column!r}" for number in numbers]
            for column in columns
        )
        golds = [_gold(*given, mark) for given in zip(batch[columns[1]], answered, strict=True)]
        check_golds(golds, answered, "accuracy")
        prompts = [_prompt(question, form, place) for question, place in zip(batch[columns[0]], asked, strict=True)]
        return {"prompt": prompts, "answer": golds}

    rows = rows.select(range(min(size or len(rows), len(rows))))
    try:
        return mapped(rows, prepare, form.version(1), columns, mark, str(source))
    except UnicodeDecodeError as error:  # the JSON reader accepts any bytes
        raise UserError(f"{source} is not text in UTF-8 ({error.reason}); save it as UTF-8") from error


def _column(rows: Dataset, source: DataSource, settings: Settings, key: str, usual: tuple[str, ...]) -> str:
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


def _prompt(question: object, form: PromptForm, where: str) -> Prompt:
    if isinstance(question, str) and question.strip():
        return form.write(question)
    if not isinstance(question, list) or not question:
        raise UserError(f"{where}: the question is {shown(question)}; expected text, or a list of chat messages")
    messages = [_message(turn, f"{where}, message {number}") for number, turn in enumerate(question, start=1)]
    try:
        return form.write(messages)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _message(turn: object, where: str) -> dict[str, object]:
    """Return a chat message with its content as text; OpenAI's list of parts is joined."""
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


def _part(part: object, where: str) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else ("text", part)
    if kind not in ("text", None) or not isinstance(text, str):
        raise UserError(f"{where}: a part of the content is {shown(part)}; expected text: images are not supported")
    return text


def _gold(value: object, where: str, mark: str | None) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UserError(f"{where}: the answer is {shown(value)}; expected text or a number")
    gold = extract_gold(str(value), mark)
    if gold is None:
        wanted = f"something after {mark!r}" if mark else "an answer"
        raise UserError(f"{where}: no gold answer in {shown(value)}; expected {wanted}; fix the row")
    return gold
