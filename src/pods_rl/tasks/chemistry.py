"""The chemistry part of SciKnowEval v2: multiple choice, true or false, and equations to balance."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from datasets import Dataset

from ..errors import UserError
from ..text import describe
from .checks import check_golds
from .generated import is_held_out
from .prompts import PromptForm
from .sources import DataSource, listing, local_folder, read_rows
from .task import FORM_REWARDS, Settings, Task

CHEMISTRY = "sciknoweval_chemistry"
_FILES = "L*.jsonl"
_ASKS_FOR_LETTER = "Answer with the letter of the right option."
_YES_NO = "Is this right? Answer Yes or No."
_BALANCE = "Answer with the balanced equation alone, its reactants and products in the order given."


class ChemistryQuestion(NamedTuple):
    """One question: the text, the gold answer, its kind, and its place in the source."""

    text: str
    gold: str
    kind: str  # multiple choice, true or false, or equation
    stem: str  # the question without its options
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
    golds = [question.gold for question in questions]
    places = [question.place for question in questions]
    check_golds(golds, places, "chemistry")
    form = PromptForm.of(settings)
    training = [question for question in questions if not question.held_out]
    testing = [question for question in questions if question.held_out]
    train = _side(training, form, settings.get("task_train_size"))
    test = _side(testing, form, settings.get("task_test_size"))
    rewards = {"chemistry": 1.0, **FORM_REWARDS}
    return Task(CHEMISTRY, form.version(1), train, test, rewards, answer="chemistry")


def _side(questions: Sequence[ChemistryQuestion], form: PromptForm, size: int | None) -> Dataset:
    """Return the first questions of one side in the order of a hash, as prompts with gold answers."""

    def order(question: ChemistryQuestion) -> tuple[bytes, str]:
        return hashlib.sha256(question.text.encode()).digest(), question.gold

    mixed = sorted(questions, key=order)[:size]
    prompts = [form.write(question.text) for question in mixed]
    golds = [question.gold for question in mixed]
    kinds = [question.kind for question in mixed]
    return Dataset.from_dict({"prompt": prompts, "answer": golds, "kind": kinds})


def read_questions(settings: Settings) -> Iterator[ChemistryQuestion]:
    """Read every question that can be graded, in the order of the files."""
    for source in _sources(settings.get("data_dir")):
        for number, row in enumerate(read_rows(source.read()), 1):
            question = _question(row, f"{source}, row {number} (counted from 1)")
            if question is not None:
                yield question


def _sources(data_dir: str | None) -> list[DataSource]:
    """Return the files of a local folder in the order of their names, or the data set of the hub."""
    if not data_dir:
        return [DataSource("hicai-zju/SciKnowEval", "test", "v2")]
    folder = local_folder(data_dir)
    files = sorted((folder / CHEMISTRY).glob(_FILES))
    if not files:
        raise UserError(f"data_dir = {folder}: expected {CHEMISTRY}/{_FILES} there; the folder holds {listing(folder)}")
    return [DataSource(str(file), "test") for file in files]


def _question(row: Mapping[str, Any], place: str) -> ChemistryQuestion | None:
    """Return the question of a row; None for a row of another science, or of a kind that cannot be graded."""
    if row.get("domain") != "Chemistry":
        return None
    row_type = str(row.get("type"))
    details = row.get("details") or {}
    stem = _text(row, "question")
    answer = _text(row, "answer")
    if row_type.startswith("mcq"):
        choices = row.get("choices") or {}
        options = dict(zip(choices.get("label") or (), choices.get("text") or (), strict=False))
        listed = "\n".join(f"{label}) {text}" for label, text in options.items())
        kind = "multiple choice"
        request = f"{listed}\n\n{_ASKS_FOR_LETTER}"
        answer = _text(row, "answerKey")
        allowed = list(options)
    elif row_type == "true_or_false":
        kind = "true or false"
        request = _YES_NO
        allowed = ["Yes", "No"]
    elif row_type == "filling" and details.get("task") == "balancing_chemical_equation":
        kind = "equation"
        request = _BALANCE
        allowed = [answer]  # any equation; the grader checks it
    else:
        return None
    if not stem or answer not in allowed:
        raise UserError(f"{place}: {describe(answer)} as answer of {describe(stem)} is not among {allowed}")
    return ChemistryQuestion(f"{stem}\n\n{request}", answer, kind, stem, place)


def _text(row: Mapping[str, Any], column: str) -> str:
    return str(row.get(column) or "").strip()
