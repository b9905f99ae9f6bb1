"""Tasks of written questions and answers: GSM8K, MATH, AMC 2023, SciKnowEval's chemistry, and your own data sets."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, load_dataset, load_from_disk

from ..errors import UserError
from ..rewards import extract_gold, get_reward
from ..text import describe, suggest
from .generated import is_held_out
from .prompts import PromptForm, mapped
from .task import COLUMNS, FORM_REWARDS, PAPER_REWARDS, Prompt, Settings, Task

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
QUESTION_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "solution")
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


@dataclass(frozen=True)
class DataSource:
    """One split of a dataset, as a recipe names it.

    A file (.jsonl, .json, .parquet, .csv) is one split, whatever its name; a folder holds a file for each split, or
    what `save_to_disk` wrote; any other name is looked up on the hub. `split` may carry a slice (`train[:100]`).
    """

    name: str
    split: str
    config: str | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.split})"

    def read(self) -> Dataset:
        """Read the rows.

        Raises UserError for a file, folder or split that is missing, naming what exists; for one that cannot be
        read or has no rows; for an unreachable hub.
        """
        path = Path(self.name).expanduser()
        if not path.exists() and _looks_local(self.name, path):
            near = suggest(path.name, [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else [])
            raise UserError(f"there is no file or folder {self.name!r} (looked in {Path.cwd()}).{near}")
        if path.is_file() and path.suffix.lower() not in READERS:
            raise UserError(
                f"{path} is a {path.suffix or 'file without an ending'}; expected one of {', '.join(READERS)}"
            )
        try:
            rows = self._load(path)
        except Exception as error:  # each reader raises its own, pyarrow's and the system's
            what = f"the file {path}" if path.is_file() else f"the data set {self.name} of the hub"
            what = f"the folder {path} (it holds {listing(path)})" if path.is_dir() else what
            reason = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise UserError(f"{what} gives no split {self.split!r}: {reason}. Fix it, or name another file") from error
        if len(rows) == 0:
            raise UserError(f"{self} has no rows; expected at least one")
        return rows

    def _load(self, path: Path) -> Dataset:
        if path.is_file():
            bare = re.split(r"[\[+]", self.split)[0] or "train"
            return load_dataset(READERS[path.suffix.lower()], data_files={bare: str(path)}, split=self.split)
        if any((path / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
            saved = load_from_disk(str(path))
            return saved if isinstance(saved, Dataset) else saved[self.split]
        return load_dataset(str(path) if path.is_dir() else self.name, self.config, split=self.split)


def dataset_task(settings: Settings) -> Task:
    """Make a task from the data set that a recipe names (settings: `pods_rl.tasks.load_task`).

    Each gold answer is extracted and graded against itself before anything is trained; the paper's rewards are the
    default. `task_train_size` and `task_test_size` keep the first rows of a split.

    Raises UserError for missing or unreadable data, and for a bad question or answer with its row (counted from 1).
    """
    return _task("dataset", _named_sources(settings), settings)


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


def check_golds(golds: Sequence[str], places: Sequence[str], reward: str) -> None:
    """Raise UserError if the reward does not accept a gold answer as right; `places` names each one's row."""
    marks = get_reward(reward).batch([f"<answer>{gold}</answer>" for gold in golds], golds)
    refused = [row for row, mark in enumerate(marks) if not mark >= 1]
    if refused:
        place, gold = places[refused[0]], describe(golds[refused[0]])
        raise UserError(f"{place}: the grader does not accept {gold} as its own answer; fix the row")


def _task(name: str, sources: tuple[DataSource | None, DataSource], settings: Settings) -> Task:
    """Return the task of a training and a test source; without a training source it can only be evaluated."""
    form = PromptForm.of(settings)
    no_rows = Dataset.from_dict({column: [] for column in COLUMNS})
    train, test = (
        _split(source, settings, form, settings.get(size)) if source else no_rows
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
    if Path(name).expanduser().is_file() and ("[" not in test or train.split == test):
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


def _split(source: DataSource, settings: Settings, form: PromptForm, size: int | None) -> Dataset:
    """Return the prompts and gold answers of a source's first rows, in a file if they are many (`mapped`)."""
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
        golds = [_gold(*given) for given in zip(batch[columns[1]], answered, strict=True)]
        check_golds(golds, answered, "accuracy")
        prompts = [_prompt(question, form, place) for question, place in zip(batch[columns[0]], asked, strict=True)]
        return {"prompt": prompts, "answer": golds}

    rows = rows.select(range(min(size or len(rows), len(rows))))
    try:
        return mapped(rows, prepare, form.version(1), columns, str(source))
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
    """Return the prompt of a question: text, or chat messages, whose parts of text are joined."""
    if isinstance(question, str) and question.strip():
        return form.write(question)
    if not isinstance(question, list) or not question:
        raise UserError(f"{where}: the question is {describe(question)}; expected text, or a list of chat messages")
    messages = []
    for number, turn in enumerate(question, start=1):
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            texts = [part.get("text") for part in content if part.get("type") in ("text", None)]
            content = "".join(texts) if len(texts) == len(content) and all(isinstance(t, str) for t in texts) else None
        if not isinstance(role, str) or not isinstance(content, str) or (role == "user" and not content.strip()):
            raise UserError(
                f"{where}, message {number}: is {describe(turn)}; expected a role, and its content as text (images are "
                "not supported)"
            )
        messages.append({**turn, "content": content})
    try:
        return form.write(messages)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _gold(value: object, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UserError(f"{where}: the answer is {describe(value)}; expected text or a number")
    gold = extract_gold(str(value))
    if gold is None:
        raise UserError(f"{where}: no gold answer in {describe(value)}; fix the row")
    return gold


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
        for number, row in enumerate(source.read(), 1):
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


def local_folder(data_dir: str) -> Path:
    """The folder that a recipe names as `data_dir`; raise UserError if it does not exist."""
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise UserError(f"data_dir = {data_dir}: there is no such folder (looked in {Path.cwd()})")
    return folder


def listing(folder: Path) -> str:
    """Return the first names in a folder, for a message."""
    return ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"


def _looks_local(name: str, path: Path) -> bool:
    """Return whether a missing name must be a path: hub names are `name` or `owner/name`."""
    return path.suffix.lower() in READERS or name.startswith((".", "~")) or path.is_absolute() or name.count("/") > 1
