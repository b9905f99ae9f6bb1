"""Tasks of written questions and answers: GSM8K, MATH, AMC 2023, and your own data sets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..errors import UserError
from ..tables import BATCH
from ..text import counted, describe
from .checks import check_golds, gold_notes, last_turn_problem, raise_listed, read_gold
from .files import with_numbers
from .prompts import PromptForm, mapped
from .sources import (
    READERS,
    DataSource,
    column_names,
    column_of,
    column_values,
    first_rows,
    hold_out,
    listing,
    local_folder,
    parsed,
    question_hash,
)
from .task import COLUMNS, PAPER_REWARDS, Prompt, Settings, Task, deciding_reward

QUESTION_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "final_answer", "solution")
_TEST_SPLITS = ("test", "validation", "valid", "val", "dev")  # in the order in which they are used to test on
_CUT_HERE = 2  # the number in a task's version if its test split is cut off the training rows, else 1


@dataclass(frozen=True)
class Published:
    """One split of a published set: its hub id and configuration, and its folders under `data_dir`."""

    hub: str
    config: str | None
    folders: tuple[str, ...]

    def source(self, split: str, data_dir: str | None) -> DataSource | None:
        """Return where its rows are read: a file of a local folder, None if there is none, or the hub."""
        if data_dir is None:
            return DataSource(self.hub, split, self.config)
        stem = split.partition("[")[0]  # a split may have a slice
        folder = local_folder(data_dir)
        for name in self.folders:
            for ending in READERS:
                file = folder / name / f"{stem}{ending}"
                if file.is_file():
                    return DataSource(str(file), split)
        return None


_GSM8K = Published("openai/gsm8k", "main", ("gsm8k",))
_MATH_TRAIN = Published("DigitalLearningGmbH/MATH-lighteval", "default", ("math",))
_MATH_500 = Published("HuggingFaceH4/MATH-500", None, ("math500", "math"))
_AMC23 = Published("math-ai/amc23", None, ("amc23",))
# task: its training set, its test set
PUBLISHED = {"gsm8k": (_GSM8K, _GSM8K), "math": (_MATH_TRAIN, _MATH_500), "amc23": (_MATH_TRAIN, _AMC23)}


def dataset_task(settings: Settings) -> Task:
    """Make a task from the data set that a recipe names (settings: `pods_rl.tasks.load_task`).

    Each gold answer is extracted and graded against itself before anything is trained; the paper's rewards are the
    default. `task_train_size` and `task_test_size` keep the first rows of a split.

    Raises UserError for missing or unreadable data, and for a bad question or answer with its row (counted from 1).
    """
    train, test, notes = _named_sources(settings)
    return _task("dataset", train, test, settings, notes)


def published_task(name: str, settings: Settings) -> Task:
    """Make `gsm8k` (7473 problems to train on, 1319 to test), `math` (7500, 500) or `amc23` (MATH's 7500, 40).

    Rows are read from the folders in `data_dir` if given, else from the hub. Gold answers of GSM8K follow `####`; those
    of MATH are the last box of `solution`, or `answer` if present. Raises UserError as `dataset_task` does.
    """
    train, test = PUBLISHED[name]
    data_dir = settings.get("data_dir")
    train_source = train.source(settings.get("dataset_train_split") or "train", data_dir)
    test_source = test.source("test", data_dir)
    if test_source is None:
        raise UserError(
            f"data_dir = {data_dir}: task {name} found no test file there: expected {test.folders[0]}/test.jsonl "
            f"(or {', '.join(READERS)}); the folder holds {listing(local_folder(str(data_dir)))}"
        )
    return _task(name, train_source, test_source, settings)


def _task(
    name: str,
    train_source: DataSource | None,
    test_source: DataSource | None,
    settings: Settings,
    notes: tuple[str, ...] = (),
) -> Task:
    """Return the task of a training and a test source."""
    form = PromptForm.of(settings)
    rewards = settings.get("task_rewards")
    if rewards is None:
        rewards = PAPER_REWARDS
    grader = deciding_reward(rewards, "accuracy")
    if test_source is None:
        assert train_source  # only a published set may lack it, and it has test rows
        train, test, cut_notes = _cut_in_two(train_source, settings, form, grader)
        return Task(name, form.version(_CUT_HERE), train, test, dict(PAPER_REWARDS), notes=cut_notes)
    train = Dataset.from_dict({column: [] for column in COLUMNS})
    if train_source:
        train = _make_split(_read_questions(train_source, settings, settings.get("task_train_size")), form, grader)
        notes += _notes(train, train_source, grader)
    test = _make_split(_read_questions(test_source, settings, settings.get("task_test_size")), form, grader)
    notes += _notes(test, test_source, grader)
    return Task(name, form.version(1), train, test, dict(PAPER_REWARDS), notes=notes)


def _cut_in_two(
    source: DataSource, settings: Settings, form: PromptForm, grader: str | None
) -> tuple[Dataset, Dataset, tuple[str, ...]]:
    """Return training rows, test rows and notes of a source that has no test split."""
    questions = _read_questions(source, settings, None)  # all rows: the sizes that a recipe sets are those of the parts
    rows = _make_split(questions, form, grader)
    hashes = [question_hash(question) for question in questions.texts()]
    train, test = hold_out(rows, hashes, source)
    train = first_rows(train, settings.get("task_train_size"))
    test = first_rows(test, settings.get("task_test_size"))
    note = (
        f"{source} has no test split. Of its {counted(len(rows), 'row')} {len(train):,} are for training and "
        f"{len(test):,} for testing, by a hash of the question: the same rows every time. To choose them yourself, set "
        "dataset_test_name"
    )
    return train, test, (note, *_notes(rows, source, grader))


def _notes(rows: Dataset, source: DataSource, grader: str | None) -> tuple[str, ...]:
    """Return what a user should know about the gold answers of a split."""
    answers = rows.select_columns(["answer"])  # the prompts, which may be many messages, are not read with them
    return gold_notes(column_of(answers, "answer"), str(source), grader)


def _named_sources(settings: Settings) -> tuple[DataSource, DataSource | None, tuple[str, ...]]:
    """Return the training source and the test source, if any, that a recipe names, and notes on the latter."""
    name = settings.get("dataset_name")
    config = settings.get("dataset_config")
    if not name:
        raise UserError(
            "task 'dataset' needs dataset_name: a .jsonl, .json, .parquet or .csv file, a folder, or a hub id"
        )
    train = DataSource(name, settings.get("dataset_train_split") or "train", config)
    test_name = settings.get("dataset_test_name")
    if test_name is None:
        test, notes = _usual_test(train)
        return train, test, notes
    is_path = "/" in test_name or Path(test_name).suffix in READERS
    # a folder that has the name of a split, such as the tests of a project, does not hide it
    if is_path or (Path(test_name).exists() and test_name not in (*_TEST_SPLITS, *train.splits())):
        return train, DataSource(test_name, "test", config), ()
    is_slice = "[" in test_name
    if train.is_one_split and (not is_slice or train.split == test_name):
        raise UserError(
            f"{name} is one split, so there is nothing to test on: name a second file as dataset_test_name, cut this "
            "one in two with dataset_train_split: train[:90%] and dataset_test_name: train[90%:], or remove "
            "dataset_test_name, which keeps one prompt in ten to test on"
        )
    return train, DataSource(name, test_name, config), ()


def _usual_test(train: DataSource) -> tuple[DataSource | None, tuple[str, ...]]:
    """Return the test split of a data set, or else its validation split with a note; None if it has neither."""
    if train.is_one_split:
        return None, ()
    names = train.splits()
    if not names:
        # The data cannot be read; reading this source raises the error that says why.
        return DataSource(train.name, "test", train.config), ()
    for split in _TEST_SPLITS:
        if split not in names or train.split.startswith(split):
            continue
        test = DataSource(train.name, split, train.config)
        if split == "test":
            return test, ()
        return test, (f"{train.name} has no split test: its split {split} is used to test on",)
    return None, ()


@dataclass(frozen=True)
class _Questions:
    """Rows as a source has them, and the names of their columns."""

    rows: Dataset
    source: DataSource
    question_column: str
    answer_column: str

    def texts(self) -> Iterator[object]:
        """Yield the questions as the data have them, without a system prompt."""
        for batch in self.rows.iter(BATCH):
            yield from column_values(parsed(batch), self.question_column)


def _read_questions(source: DataSource, settings: Settings, size: int | None) -> _Questions:
    """Read the first rows of a source, and find their columns."""
    rows = first_rows(source.read(), size)
    question_column = _column(rows, source, settings, "question_column", QUESTION_COLUMNS)
    answer_column = _column(rows, source, settings, "answer_column", ANSWER_COLUMNS)
    if question_column == answer_column:
        raise UserError(
            f"question_column and answer_column are both {question_column!r}: the prompt would give the answer away"
        )
    return _Questions(rows, source, question_column, answer_column)


def _make_split(questions: _Questions, form: PromptForm, grader: str | None) -> Dataset:
    """Return prompts and gold answers, in a file if they are many (`mapped`)."""
    answer_dtype = getattr(questions.rows.features.get(questions.answer_column), "dtype", None)
    source = str(questions.source)

    def prepare(batch: Mapping[str, list[object]], numbers: list[int]) -> dict[str, list[Any]]:
        rows_here = parsed(batch)
        texts = column_values(rows_here, questions.question_column)
        answers = column_values(rows_here, questions.answer_column, answer_dtype)
        prompts: list[Prompt] = []
        golds: list[str] = []
        gold_places: list[str] = []
        problems: list[str] = []
        for question, answer, number in zip(texts, answers, numbers, strict=True):
            row_place = f"{source}, row {number + 1} (counted from 1)"
            gold_place = f"{row_place}, column {questions.answer_column!r}"
            gold_places.append(gold_place)
            try:
                golds.append(read_gold(answer, grader))
            except UserError as error:
                problems.append(f"{gold_place}: {error}")
                continue
            try:
                prompts.append(_prompt(question, form, f"{row_place}, column {questions.question_column!r}"))
            except UserError as error:
                problems.append(str(error))
        raise_listed(problems)
        if grader:
            check_golds(golds, gold_places, grader)
        return {"prompt": prompts, "answer": golds}

    try:
        columns = (questions.question_column, questions.answer_column)
        return mapped(questions.rows, prepare, form.version(1), *columns, grader, source)
    except UnicodeDecodeError as error:  # a reader of the hub's files accepts any bytes
        raise UserError(f"{source} is not text in UTF-8 ({error.reason}); save it as UTF-8") from error


def _column(rows: Dataset, source: DataSource, settings: Settings, key: str, usual: tuple[str, ...]) -> str:
    """Return the name of the column of questions or answers: the one that `key` names, or the first of the usual."""
    named = settings.get(key)
    candidates = usual if named is None else (named,)
    # A column of a JSON file may begin late, but reading all rows for it is slow: look at a batch first.
    in_batch = column_names(rows, first=BATCH)
    present = in_batch if set(candidates) & set(in_batch) else column_names(rows)
    for column in candidates:
        if column in present:
            return column
    listed = ", ".join(present)
    if named is None:
        raise UserError(f"{source} has the columns {listed}, none of {', '.join(usual)}; name yours as {key}")
    raise UserError(f"{key} is {named!r}, but {source} has the columns {listed}; name one of them")


def _prompt(question: object, form: PromptForm, where: str) -> Prompt:
    """Return the prompt of a question: text, or chat messages, whose parts of text are joined."""
    question = with_numbers(question)
    if isinstance(question, str) and question.strip():
        if re.match(r"\s*\[\s*\{\s*[\"']role[\"']\s*:", question):
            raise UserError(
                f"{where}: the question is a list of chat messages written as text; store it as a list, in JSON or "
                "Parquet"
            )
        _check_encodable(question, where)
        return form.write(question)
    if not isinstance(question, list) or not question:
        raise UserError(f"{where}: the question is {describe(question)}; expected text, or a list of chat messages")
    messages = [_message(turn, f"{where}, message {number}") for number, turn in enumerate(question, start=1)]
    problem = last_turn_problem(messages)
    if problem:
        raise UserError(f"{where}: {problem}")
    try:
        return form.write(messages)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _check_encodable(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: holds half of a surrogate pair at character {error.start + 1}; remove it") from error


def _message(turn: object, where: str) -> dict[str, Any]:
    """Return a chat message with its content as text."""
    fields = turn if isinstance(turn, dict) else {}
    role = fields.get("role")
    content = fields.get("content")
    if isinstance(content, list):
        content = _joined_text(content)
    if not isinstance(role, str) or not isinstance(content, str) or (role == "user" and not content.strip()):
        raise UserError(
            f"{where}: is {describe(turn)}; expected a role, and its content as text (images are not supported)"
        )
    _check_encodable(content, where)
    return {**fields, "content": content}


def _joined_text(parts: list[Any]) -> str | None:
    """Return the text of a message's parts; None if one of them is not text, such as an image."""
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") not in ("text", None):
            return None
        texts.append(text)
    return "".join(texts)
