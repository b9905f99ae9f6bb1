"""Tasks of written questions and answers: GSM8K, MATH, AMC 2023, SciKnowEval's chemistry, and your own data sets."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from datasets import Dataset

from ..errors import UserError
from ..text import describe
from .checks import check_golds, gold_notes, last_turn_problem, prompt_notes, raise_listed, read_gold
from .files import with_numbers
from .generated import is_held_out
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
    names_data,
    read_rows,
)
from .task import COLUMNS, FORM_REWARDS, PAPER_REWARDS, Prompt, Settings, Task, deciding_reward

QUESTION_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "final_answer", "solution")
_TEST_SPLITS = ("test", "validation", "valid", "val", "dev")  # in the order in which they are used to test on
_BATCH = 1000  # rows read at once
CHEMISTRY = "sciknoweval_chemistry"
_FILES = "L*.jsonl"
_YES_NO = "Is this right? Answer Yes or No."
_BALANCE = "Answer with the balanced equation alone, its reactants and products in the order given."


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
        files = (local_folder(data_dir) / name / f"{stem}{ending}" for name in self.folders for ending in READERS)
        return next((DataSource(str(file), split) for file in files if file.is_file()), None)


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
    return _task("dataset", (train, test), settings, notes)


def published_task(name: str, settings: Settings) -> Task:
    """Make `gsm8k` (7473 problems to train on, 1319 to test), `math` (7500, 500) or `amc23` (MATH's 7500, 40).

    Rows are read from the folders in `data_dir` if given, else from the hub. Gold answers of GSM8K follow `####`;
    those of MATH are the last box of `solution`, or `answer` if present. Raises UserError as `dataset_task` does.
    """
    train, test = PUBLISHED[name]
    data_dir = settings.get("data_dir")
    tested = test.source("test", data_dir)
    if tested is None:
        raise UserError(
            f"data_dir = {data_dir}: task {name} found no test file there: expected {test.folders[0]}/test.jsonl (or "
            f"{', '.join(READERS)}); the folder holds {listing(local_folder(str(data_dir)))}"
        )
    trained = train.source(settings.get("dataset_train_split") or "train", data_dir)
    return _task(name, (trained, tested), settings)


def _task(
    name: str,
    sources: tuple[DataSource | None, DataSource | None],
    settings: Settings,
    notes: tuple[str, ...] = (),
) -> Task:
    """Return the task of a training and a test source.

    Without a training source it can only be evaluated. Without a test source, part of the training rows is held out.
    """
    form = PromptForm.of(settings)
    rewards = settings.get("task_rewards")
    grader = deciding_reward(PAPER_REWARDS if rewards is None else rewards, "accuracy")
    train_source, test_source = sources
    train_size = settings.get("task_train_size")
    test_size = settings.get("task_test_size")
    train = test = Dataset.from_dict({column: [] for column in COLUMNS})
    if train_source:
        # a split that is cut in two keeps the first rows of each part
        train = _split(train_source, settings, form, grader, train_size if test_source else None)
        notes += _notes(train, train_source, grader)
    if test_source:
        test = _split(test_source, settings, form, grader, test_size)
        notes += _notes(test, test_source, grader)
    elif train_source:
        train, test, note = hold_out(train, train_source)
        train = first_rows(train, train_size)
        test = first_rows(test, test_size)
        notes += (note,)
    return Task(name, form.version(1), train, test, dict(PAPER_REWARDS), notes=notes)


def _notes(rows: Dataset, source: DataSource, grader: str | None) -> tuple[str, ...]:
    """Return what a user should know about the prompts and gold answers of a split."""
    of_golds = gold_notes(column_of(rows, "answer"), str(source), grader)
    return of_golds + prompt_notes(column_of(rows, "prompt"), str(source))


def _named_sources(settings: Settings) -> tuple[DataSource, DataSource | None, tuple[str, ...]]:
    """Return the two sources that `dataset_name` and related keys name, and a note on the second.

    The second is None if the data have no test split.
    """
    name, config = settings.get("dataset_name"), settings.get("dataset_config")
    if not name:
        raise UserError(
            "task 'dataset' needs dataset_name: a .jsonl, .json, .parquet or .csv file, a folder, or a hub id"
        )
    train = DataSource(name, settings.get("dataset_train_split") or "train", config)
    test = settings.get("dataset_test_name")
    if test is None:
        return train, *_usual_test(train)
    if names_data(test):
        return train, DataSource(test, "test", config), ()
    if train.is_one_split and ("[" not in test or train.split == test):
        raise UserError(
            f"{name} is one split, so there is nothing to test on: name a second file as dataset_test_name, cut this "
            "one in two with dataset_train_split: train[:90%] and dataset_test_name: train[90%:], or remove "
            "dataset_test_name, which keeps one prompt in ten to test on"
        )
    return train, DataSource(name, test, config), ()


def _usual_test(train: DataSource) -> tuple[DataSource | None, tuple[str, ...]]:
    """Return the test split of a data set, or else its validation split with a note; None if it has neither."""
    names = [] if train.is_one_split else train.splits()
    for split in _TEST_SPLITS:
        if split in names and not train.split.startswith(split):
            note = f"{train.name} has no split test: its split {split} is used to test on"
            return DataSource(train.name, split, train.config), () if split == "test" else (note,)
    if names or train.is_one_split:
        return None, ()
    return DataSource(train.name, "test", train.config), ()  # reading it says what is wrong


def _split(source: DataSource, settings: Settings, form: PromptForm, grader: str | None, size: int | None) -> Dataset:
    """Return the prompts and gold answers of a source's first rows, in a file if they are many (`mapped`)."""
    rows = first_rows(source.read(), size)
    asked = _column(rows, source, settings, "question_column", QUESTION_COLUMNS)
    answered = _column(rows, source, settings, "answer_column", ANSWER_COLUMNS)
    if asked == answered:
        raise UserError(f"question_column and answer_column are both {asked!r}: the prompt would give the answer away")
    dtype = getattr(rows.features.get(answered), "dtype", None)

    def prepare(batch: Mapping[str, list[object]], numbers: list[int]) -> dict[str, list[Any]]:
        places = [f"{source}, row {number + 1} (counted from 1)" for number in numbers]
        questions = column_values(batch, asked)
        answers = column_values(batch, answered, dtype)
        prompts: list[Prompt] = []
        golds: list[str] = []
        problems: list[str] = []
        for question, answer, place in zip(questions, answers, places, strict=True):
            try:
                golds.append(_gold(answer, f"{place}, column {answered!r}", grader))
                prompts.append(_prompt(question, form, f"{place}, column {asked!r}"))
            except UserError as error:
                problems.append(str(error))
        raise_listed(problems)
        if grader:
            check_golds(golds, [f"{place}, column {answered!r}" for place in places], grader)
        return {"prompt": prompts, "answer": golds}

    try:
        return mapped(rows, prepare, form.version(1), asked, answered, grader, str(source))
    except UnicodeDecodeError as error:  # a reader of the hub's files accepts any bytes
        raise UserError(f"{source} is not text in UTF-8 ({error.reason}); save it as UTF-8") from error


def _column(rows: Dataset, source: DataSource, settings: Settings, key: str, usual: tuple[str, ...]) -> str:
    given = settings.get(key)
    wanted = usual if given is None else (given,)
    present = column_names(rows, first=_BATCH)
    if not set(wanted) & set(present):
        present = column_names(rows)
    for column in wanted:
        if column in present:
            return column
    if given is None:
        raise UserError(
            f"{source} has the columns {', '.join(present)}, none of {', '.join(usual)}; name yours as {key}"
        )
    raise UserError(f"{key} is {given!r}, but {source} has the columns {', '.join(present)}; name one of them")


def _prompt(question: object, form: PromptForm, where: str) -> Prompt:
    """Return the prompt of a question: text, or chat messages, whose parts of text are joined."""
    question = with_numbers(question)
    if isinstance(question, str) and question.strip():
        _check_question(question, where)
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


def _check_question(question: str, where: str) -> None:
    if re.match(r"\s*\[\s*\{\s*[\"']role[\"']\s*:", question):
        raise UserError(
            f"{where}: the question is a list of chat messages written as text; store it as a list, in JSON or Parquet"
        )
    _check_encodable(question, where)


def _check_encodable(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: holds half of a surrogate pair at character {error.start + 1}; remove it") from error


def _message(turn: object, where: str) -> dict[str, Any]:
    """Return a chat message with its content as text."""
    fields = turn if isinstance(turn, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part.get("text") for part in content if part.get("type") in ("text", None)]
        content = "".join(texts) if len(texts) == len(content) and all(isinstance(t, str) for t in texts) else None
    if not isinstance(role, str) or not isinstance(content, str) or (role == "user" and not content.strip()):
        raise UserError(
            f"{where}: is {describe(turn)}; expected a role, and its content as text (images are not supported)"
        )
    _check_encodable(content, where)
    return {**fields, "content": content}


def _gold(value: object, where: str, grader: str | None) -> str:
    try:
        return read_gold(value, grader)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


class ChemistryQuestion(NamedTuple):
    """One question: the text, the gold answer, its kind, and its place in the source.

    `kind` is `multiple choice`, `true or false` or `equation`; `stem` is the question without its options.
    """

    text: str
    gold: str
    kind: str
    stem: str
    place: str

    @property
    def held_out(self) -> bool:
        """Whether it belongs to the test side; rows with the same stem, whatever their options, are on one side."""
        return is_held_out(" ".join(self.stem.split()).casefold())


def chemistry_task(settings: Settings) -> Task:
    """Make the chemistry part of SciKnowEval v2 (arXiv 2406.09098): choices, judgements and equations.

    Only a test set is published. One question in five, by a hash of its text, is a test question; questions with
    equal text are on the same side. Each side is ordered by another hash, so that the kinds are mixed and the first k
    questions are a fair sample, whatever the order of the files. Rows that no rule can grade (open questions, other
    fillings) are skipped. Splits have a third column, `kind`.

    Read from `sciknoweval_chemistry/L*.jsonl` in `data_dir`, else from the hub
    (hicai-zju/SciKnowEval, configuration v2). Raises UserError for a row that cannot be used, with its place.
    """
    questions = list(read_questions(settings))
    check_golds([q.gold for q in questions], [q.place for q in questions], "chemistry")
    form = PromptForm.of(settings)
    splits = []
    for held_out, size in ((False, "task_train_size"), (True, "task_test_size")):
        side = [question for question in questions if question.held_out == held_out]
        side.sort(key=lambda q: (hashlib.sha256(q.text.encode()).digest(), q.gold))
        side = side[: settings.get(size)]
        columns = {
            "prompt": [form.write(question.text) for question in side],
            "answer": [question.gold for question in side],
            "kind": [question.kind for question in side],
        }
        splits.append(Dataset.from_dict(columns))
    rewards = {"chemistry": 1.0, **FORM_REWARDS}
    return Task(CHEMISTRY, form.version(1), splits[0], splits[1], rewards, answer="chemistry")


def read_questions(settings: Settings) -> Iterator[ChemistryQuestion]:
    """Read every question that can be graded, in the order of the files."""
    sources = [DataSource("hicai-zju/SciKnowEval", "test", "v2")]
    if settings.get("data_dir"):
        folder = local_folder(settings["data_dir"])
        sources = [DataSource(str(file), "test") for file in sorted((folder / CHEMISTRY).glob(_FILES))]
        if not sources:
            raise UserError(
                f"data_dir = {folder}: expected {CHEMISTRY}/{_FILES} there; the folder holds {listing(folder)}"
            )
    for source in sources:
        for number, row in enumerate(read_rows(source.read()), 1):
            question = _chemistry_question(row, f"{source}, row {number} (counted from 1)")
            if question is not None:
                yield question


def _chemistry_question(row: Mapping[str, Any], place: str) -> ChemistryQuestion | None:
    """Return the question of a row; None for a row of another science, or of a kind that cannot be graded."""
    if row.get("domain") != "Chemistry":
        return None
    given, details, choices = str(row.get("type")), row.get("details") or {}, row.get("choices") or {}
    stem, answer, letter = (str(row.get(key) or "").strip() for key in ("question", "answer", "answerKey"))
    if given.startswith("mcq"):
        options = dict(zip(choices.get("label") or (), choices.get("text") or (), strict=False))
        listed = "\n".join(f"{label}) {text}" for label, text in options.items())
        kind, answer, allowed = "multiple choice", letter, list(options)
        asked = f"{listed}\n\nAnswer with the letter of the right option."
    elif given == "true_or_false":
        kind, asked, allowed = "true or false", _YES_NO, ["Yes", "No"]
    elif given == "filling" and details.get("task") == "balancing_chemical_equation":
        kind, asked, allowed = "equation", _BALANCE, [answer]
    else:
        return None
    if not stem or answer not in allowed:
        raise UserError(f"{place}: {describe(answer)} as answer of {describe(stem)} is not among {allowed}")
    return ChemistryQuestion(f"{stem}\n\n{asked}", answer, kind, stem, place)
