"""Tasks of written questions and answers: GSM8K, MATH, AMC 2023, SciKnowEval's chemistry, and your own data sets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset

from ..errors import UserError
from ..rewards import extract_gold, get_reward
from .generated import is_held_out
from .prompts import PromptForm
from .sources import READERS, DataSource, find_split, listing, local_folder, mapped
from .task import COLUMNS, FORM_REWARDS, PAPER_REWARDS, Prompt, Settings, Task, shown

QUESTION_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "solution")
CHEMISTRY = "sciknoweval_chemistry"
_HUB = DataSource("hicai-zju/SciKnowEval", "test", "v2")
_FILES = "L*.jsonl"
_YES_NO = "Is this right? Answer Yes or No."
_BALANCE = "Answer with the balanced equation alone, its reactants and products in the order given."


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
    """Return the prompt of a question: text, or chat messages, whose parts of text are joined."""
    if isinstance(question, str) and question.strip():
        return form.write(question)
    if not isinstance(question, list) or not question:
        raise UserError(f"{where}: the question is {shown(question)}; expected text, or a list of chat messages")
    messages = []
    for number, turn in enumerate(question, start=1):
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            texts = [part.get("text") for part in content if part.get("type") in ("text", None)]
            content = "".join(texts) if len(texts) == len(content) and all(isinstance(t, str) for t in texts) else None
        if not isinstance(role, str) or not isinstance(content, str) or (role == "user" and not content.strip()):
            raise UserError(
                f"{where}, message {number}: is {shown(turn)}; expected a role, and its content as text (images are "
                "not supported)"
            )
        messages.append({**turn, "content": content})
    try:
        return form.write(messages)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _gold(value: object, where: str, mark: str | None) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UserError(f"{where}: the answer is {shown(value)}; expected text or a number")
    gold = extract_gold(str(value), mark)
    if gold is None:
        wanted = f"something after {mark!r}" if mark else "an answer"
        raise UserError(f"{where}: no gold answer in {shown(value)}; expected {wanted}; fix the row")
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

    Read from the `L*.jsonl` files of `data_dir` (or of its folder `sciknoweval_chemistry`), else from the hub
    (hicai-zju/SciKnowEval, configuration v2). Raises UserError for a row that cannot be used, with its place.
    """
    questions = list(read_questions(settings))
    check_golds([q.gold for q in questions], [q.place for q in questions], "chemistry")
    form = PromptForm.of(settings)
    splits = []
    for held_out, use, size in ((False, "train on", "task_train_size"), (True, "test", "task_test_size")):
        side = [question for question in questions if question.held_out == held_out]
        if not side:
            raise UserError(f"task {CHEMISTRY}: {len(questions)} questions leave none to {use}; add more of its files")
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
    for source in _sources(settings):
        for number, row in enumerate(source.read(), 1):
            question = _chemistry_question(row, f"{source}, row {number} (counted from 1)")
            if question is not None:
                yield question


def _sources(settings: Settings) -> list[DataSource]:
    if not settings.get("data_dir"):
        return [_HUB]
    folder = local_folder(settings["data_dir"])
    folder = folder / CHEMISTRY if (folder / CHEMISTRY).is_dir() else folder
    files = sorted(folder.glob(_FILES))
    if not files:
        raise UserError(
            f"data_dir = {folder}: task {CHEMISTRY} found none of its files {_FILES} there; it holds {listing(folder)}"
        )
    return [DataSource(str(file), "test") for file in files]


def _chemistry_question(row: Mapping[str, Any], place: str) -> ChemistryQuestion | None:
    """Return the question of a row; None for a row of another science, or of a kind that cannot be graded."""
    if row.get("domain") != "Chemistry":
        return None
    stem, kind = str(row.get("question") or "").strip(), str(row.get("type") or "")
    if not stem:
        raise UserError(f"{place}: the question is {shown(row.get('question'))}; expected text")
    if kind.startswith("mcq"):
        return _choice(row, stem, place)
    answer = str(row.get("answer") or "").strip()
    if kind == "true_or_false":
        if answer not in ("Yes", "No"):
            raise UserError(f"{place}: the answer is {shown(answer)}; expected Yes or No")
        return ChemistryQuestion(f"{stem}\n\n{_YES_NO}", answer, "true or false", stem, place)
    if kind == "filling" and (row.get("details") or {}).get("task") == "balancing_chemical_equation":
        return ChemistryQuestion(f"{stem}\n\n{_BALANCE}", answer, "equation", stem, place)
    return None


def _choice(row: Mapping[str, Any], stem: str, place: str) -> ChemistryQuestion:
    choices = row.get("choices") or {}
    letters, texts = list(choices.get("label") or []), list(choices.get("text") or [])
    gold = str(row.get("answerKey") or "").strip()
    if len(letters) != len(texts) or gold not in letters:
        raise UserError(
            f"{place}: the answer is {shown(gold)} among the options {shown(letters)} with {len(texts)} texts; "
            "expected one of the letters, and a text for each"
        )
    options = "\n".join(f"{letter}) {text}" for letter, text in zip(letters, texts, strict=True))
    question = f"{stem}\n\n{options}\n\nAnswer with the letter of the right option."
    return ChemistryQuestion(question, gold, "multiple choice", stem, place)
