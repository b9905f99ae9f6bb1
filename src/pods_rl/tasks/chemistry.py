"""SciKnowEval's chemistry: multiple choice, true or false, and equations to balance."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from datasets import Dataset

from ..errors import UserError
from .generated import is_held_out
from .prompts import PromptForm
from .questions import check_golds
from .sources import DataSource, listing, local_folder
from .task import FORM_REWARDS, Settings, Task, shown

CHEMISTRY = "sciknoweval_chemistry"
_HUB = DataSource("hicai-zju/SciKnowEval", "test", "v2")
_FILES = "L*.jsonl"
_YES_NO = "Is this right? Answer Yes or No."
_BALANCE = "Answer with the balanced equation alone, its reactants and products in the order given."


class Question(NamedTuple):
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


def read_questions(settings: Settings) -> Iterator[Question]:
    """Read every question that can be graded, in the order of the files."""
    for source in _sources(settings):
        for number, row in enumerate(source.read(), 1):
            question = _question(row, f"{source}, row {number} (counted from 1)")
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


def _question(row: Mapping[str, Any], place: str) -> Question | None:
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
        return Question(f"{stem}\n\n{_YES_NO}", answer, "true or false", stem, place)
    if kind == "filling" and (row.get("details") or {}).get("task") == "balancing_chemical_equation":
        return Question(f"{stem}\n\n{_BALANCE}", answer, "equation", stem, place)
    return None


def _choice(row: Mapping[str, Any], stem: str, place: str) -> Question:
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
    return Question(question, gold, "multiple choice", stem, place)
