"""Generated tasks: shared functions, arithmetic, and the data sets of reasoning-gym.

Prompts are distinct and depend on the seed; no seed trains on a problem of the test side.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from itertools import count, islice
from typing import Any, NamedTuple

from datasets import Dataset

from ..errors import UserError
from ..rewards import GRADER_VERSION, Reward, score
from ..rewards.gym import numbered, unnumbered
from ..sandbox import RewardFailure
from ..text import describe
from .prompts import PromptForm
from .task import FORM_REWARDS, Settings, Task

TRAIN_SIZE = 4096
TEST_SIZE = 512
GYM = "reasoning_gym"
_DRAWS_PER_PROMPT = 200
_GYM_DRAWS_PER_PROMPT = 20
_TRIED = 8  # gold answers of each split that the scorer must accept before anything is trained

# fewest and most terms of a sum; the size of every term and every running total is from 10 to 99
_SUMS = {"easy": (2, 3), "mixed": (2, 6), "hard": (5, 6)}
DIFFICULTIES = tuple(_SUMS)


class Drawn(NamedTuple):
    """A question with its gold answer, and whether it is a test problem. With None it is in neither split."""

    question: str
    answer: str
    held_out: bool | None


def is_held_out(text: str) -> bool:
    """Whether a problem belongs to the test side: one in five, by a hash of its text, so that every seed agrees."""
    return zlib.crc32(text.encode()) % 5 == 0


def distinct(problems: Iterable[Drawn], size: int, *, held_out: bool, of: str) -> dict[str, str]:
    """Return the first `size` distinct problems of one side, question -> gold answer.

    >>> sums = (Drawn(f"{i}+1=", str(i + 1), is_held_out(f"{i}+1=")) for i in range(99))
    >>> distinct(sums, 2, held_out=True, of="sums")
    {'2+1=': '3', '4+1=': '5'}
    """
    kept: dict[str, str] = {}
    for problem in islice(problems, _DRAWS_PER_PROMPT * size):
        if problem.held_out is held_out:
            kept.setdefault(problem.question, problem.answer)
        if len(kept) == size:
            return kept
    side = "test" if held_out else "train"
    raise UserError(
        f"{size} distinct {side} prompts are needed, but {of} gave only {len(kept)}; "
        "ask for fewer, or allow longer problems or larger numbers"
    )


def to_dataset(problems: Mapping[str, str], form: PromptForm | None) -> Dataset:
    """Return the split with these questions. Without a form the questions are the prompts."""
    prompts = [form.write(question) if form else question for question in problems]
    return Dataset.from_dict({"prompt": prompts, "answer": list(problems.values())})


def sizes_of(settings: Settings) -> tuple[int, int]:
    """Return the numbers of training and test prompts in a recipe."""
    train = settings.get("task_train_size")
    test = settings.get("task_test_size")
    return (TRAIN_SIZE if train is None else train), (TEST_SIZE if test is None else test)


def generated_task(
    name: str, settings: Settings, draw: Callable[[random.Random, str], Drawn], form: PromptForm | None
) -> Task:
    """Generate a task: distinct prompts, the same ones for the same settings, disjoint splits over all seeds."""
    difficulty = settings.get("task_difficulty") or "mixed"
    rng = random.Random(settings.get("task_seed") or 0)
    problems = (draw(rng, difficulty) for _ in count())
    source = f"{name} ({difficulty})"
    train_size, test_size = sizes_of(settings)
    train = to_dataset(distinct(problems, train_size, held_out=False, of=source), form)
    test = to_dataset(distinct(problems, test_size, held_out=True, of=source), form)
    version = form.version(1) if form else f"{GRADER_VERSION}-1"
    return Task(name, version, train, test, {"accuracy": 1.0, **FORM_REWARDS})


def arithmetic_task(settings: Settings) -> Task:
    """Generate sums of two to six integers; the prompt is the sum, as in `37+58-14=`, whatever the form of prompts.

    >>> task = arithmetic_task({"task_difficulty": "easy", "task_train_size": 8, "task_test_size": 4})
    >>> task.train[0]
    {'prompt': '59+40-75=', 'answer': '24'}
    """

    def draw(rng: random.Random, difficulty: str) -> Drawn:
        terms = draw_sum(rng, *_SUMS[difficulty])
        question = f"{''.join(f'{term:+d}' for term in terms)[1:]}="
        return Drawn(question, str(sum(terms)), is_held_out(question))

    return generated_task("arithmetic", settings, draw, form=None)


def draw_sum(rng: random.Random, fewest: int, most: int) -> list[int]:
    """Draw the terms of a sum, each number of terms equally often; the first term is positive.

    >>> draw_sum(random.Random(0), 3, 3)
    [59, 40, -75]
    """
    low = 10
    high = 99
    total = rng.randint(low, high)
    terms = [total]
    for _ in range(rng.randint(fewest, most) - 1):
        room_above = high - total
        room_below = total - low
        must_add = room_below < low
        can_add = room_above >= low
        if must_add or (can_add and rng.random() < 0.5):
            term = rng.randint(low, room_above)
        else:
            term = -rng.randint(low, room_below)
        terms.append(term)
        total += term
    return terms


def gym_task(settings: Settings) -> Task:
    """Generate the problems of a reasoning-gym data set, `task: reasoning_gym:NAME`; `task_options` holds its options.

    The deciding reward `reasoning_gym` is what the data set's own scorer gives the extracted answer, often with
    partial credit (`pods_rl.rewards.gym`). Train and test are disjoint over all seeds.

    Raises UserError if reasoning-gym is not installed, for an unknown data set or option, if it yields too few
    distinct problems, or if its scorer does not accept its own answers.
    """
    name = str(settings["task"]).partition(":")[2]
    form = PromptForm.of(settings)
    train_size, test_size = sizes_of(settings)
    draws = _GYM_DRAWS_PER_PROMPT * max(train_size, test_size)
    seed = settings.get("task_seed") or 0
    options = dict(settings.get("task_options") or {})
    source = _create_gym(name, options, draws, seed)

    def problems() -> Iterator[Drawn]:
        for row in range(draws):
            problem = source[row]
            question = str(problem["question"])
            yield Drawn(question, numbered(problem["answer"], row), is_held_out(question))

    train = distinct(problems(), train_size, held_out=False, of=f"reasoning-gym's {name}")
    test = distinct(problems(), test_size, held_out=True, of=f"reasoning-gym's {name}")
    work = json.dumps([name, {**options, "size": draws, "seed": seed}])
    grader = Reward(
        GYM,
        lambda text, gold: score(grader, [text], [gold], None)[0],
        maker=("pods_rl.rewards.gym:gym_scoring", work),
        gold=lambda gold: unnumbered(gold)[0] or None,
    )
    first_golds = [*islice(train.values(), _TRIED), *islice(test.values(), _TRIED)]
    _check_gym_golds(name, grader, first_golds, settings.get("reward_seconds"))
    version = form.version(f"scored.1.{metadata.version('reasoning-gym')}")
    return Task(
        f"{GYM}/{name}",
        version,
        to_dataset(train, form),
        to_dataset(test, form),
        {GYM: 1.0, **FORM_REWARDS},
        GYM,
        graders=(grader,),
    )


def _check_gym_golds(name: str, grader: Reward, golds: list[str], seconds: float | None) -> None:
    """Raise UserError if the scorer of a data set does not give full marks to its own answers."""
    assert grader.gold is not None
    answered = [gold for gold in golds if grader.gold(gold)]
    texts = [f"<answer>{grader.gold(gold)}</answer>" for gold in answered]
    for gold, mark in zip(answered, score(grader, texts, answered, seconds), strict=True):
        if isinstance(mark, RewardFailure):
            reason = mark.reason
        elif mark < 1:
            reason = f"it scores {mark:g}"
        else:
            continue
        raise UserError(
            f"reasoning-gym's {name}: its scorer does not accept its own answer, {describe(gold)} ({reason}). Some "
            "scorers run an answer as code, which is blocked: choose another data set."
        )


def _create_gym(name: str, options: Settings, size: int, seed: int) -> Any:
    """Make a data set of reasoning-gym; the library is imported here because it loads slowly."""
    if find_spec("reasoning_gym") is None:
        raise UserError(
            "task reasoning_gym:NAME needs reasoning-gym, which is not installed: pip install '.[reasoning-gym]'"
            " in a checkout"
        )
    try:
        return import_module("reasoning_gym").create_dataset(name, **{**options, "size": size, "seed": seed})
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"task_options: reasoning-gym's {name} rejects {dict(options)}: {error}") from error
