"""What generated tasks share: distinct prompts from a seed, and a test side that no seed trains on."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from datasets import Dataset

from ..errors import UserError
from .base import FORM_REWARDS, Task
from .prompts import PromptForm

DIFFICULTIES = ("easy", "mixed", "hard")
TRAIN_SIZE, TEST_SIZE = 4096, 512
_HELD_OUT_ONE_IN = 5
_DRAWS_PER_PROMPT = 200

# a question and its gold answer
Problem = tuple[str, str]


def is_held_out(text: str) -> bool:
    """Whether a problem belongs to the test side: one in five, by a hash of its text, so that every seed agrees.

    >>> is_held_out("37+58-14="), is_held_out("37+58=")
    (True, False)
    """
    return zlib.crc32(text.encode()) % _HELD_OUT_ONE_IN == 0


def distinct(problems: Iterable[Problem], size: int, *, held_out: bool, of: str) -> dict[str, str]:
    """Keep the first `size` distinct problems of one side, question -> gold answer.

    `problems` may end; at most 200 for each one wanted are drawn. `of` names what is drawn from, for the message.

    Raises ValueError for a size below 1, and where the problems run out.

    >>> distinct(((f"{i}+1=", str(i + 1)) for i in range(99)), 2, held_out=True, of="sums")
    {'2+1=': '3', '4+1=': '5'}
    """
    if size < 1:
        raise ValueError(f"a split of {size} prompts was asked for; ask for at least 1")
    kept: dict[str, str] = {}
    for question, answer in islice(problems, _DRAWS_PER_PROMPT * size):
        if is_held_out(question) == held_out:
            kept.setdefault(question, answer)
        if len(kept) == size:
            return kept
    side = "test" if held_out else "train"
    raise ValueError(
        f"{size} distinct {side} prompts were asked for, but {of} gave only {len(kept)}; "
        "ask for fewer, or allow longer problems or larger numbers"
    )


def procedural_task(
    name: str,
    settings: Mapping[str, Any],
    draw: Callable[[random.Random, str], Problem],
    *,
    number: int,
    answer: str,
) -> Task:
    """Make a task of generated problems, the same ones for the same settings.

    Args:
        name: of the task.
        settings: `task_difficulty`, `task_train_size`, `task_test_size`, `task_seed` and the prompt form are read.
        draw: one problem of a difficulty.
        number: raised by the task whenever it draws or words its problems differently.
        answer: the reward that decides an answer; it has weight 1, beside the paper's two for the form.

    Raises UserError for an unknown difficulty, and for more prompts than there are.
    """
    difficulty = settings.get("task_difficulty") or "mixed"
    if difficulty not in DIFFICULTIES:
        raise UserError(f"task_difficulty is {difficulty!r}; expected one of {', '.join(DIFFICULTIES)}")
    rng = random.Random(settings.get("task_seed") or 0)
    form = PromptForm.of(settings)

    def problems() -> Iterator[Problem]:
        while True:
            yield draw(rng, difficulty)

    def split(size: int, held_out: bool) -> Dataset:
        return as_split(distinct(problems(), size, held_out=held_out, of=f"{name} ({difficulty})"), form)

    train_size, test_size = sizes(settings)
    try:
        train, test = split(train_size, False), split(test_size, True)
    except ValueError as error:
        raise UserError(str(error)) from error
    return Task(name, form.version(number), train, test, {answer: 1.0, **FORM_REWARDS}, answer)


def sizes(settings: Mapping[str, Any]) -> tuple[int, int]:
    """How many training and test prompts a recipe asks a generator for."""
    given = (settings.get("task_train_size"), settings.get("task_test_size"))
    return (TRAIN_SIZE if given[0] is None else given[0], TEST_SIZE if given[1] is None else given[1])


def as_split(problems: Mapping[str, str], form: PromptForm) -> Dataset:
    """The split of a task that asks these questions."""
    return Dataset.from_dict(
        {"prompt": [form.write(question) for question in problems], "answer": list(problems.values())}
    )
