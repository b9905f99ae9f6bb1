"""Generated tasks: shared functions, countdown, sorting, and the data sets of reasoning-gym.

Prompts are distinct and depend on the seed; no seed trains on a problem of the test side.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from itertools import count, islice
from typing import Any

from datasets import Dataset

from ..errors import UserError
from ..rewards import library_reward, score
from ..rewards.gym import numbered, unnumbered
from ..sandbox.scores import RewardFailure
from ..text import suggest
from .prompts import PromptForm
from .task import FORM_REWARDS, Prompt, Settings, Task, shown

DIFFICULTIES = ("easy", "mixed", "hard")
TRAIN_SIZE, TEST_SIZE = 4096, 512
GYM = "reasoning_gym"
_HELD_OUT_ONE_IN = 5
_DRAWS_PER_PROMPT = 200
_GYM_DRAWS_PER_PROMPT = 20
_TRIED = 8  # gold answers of each split that the scorer must accept before anything is trained

# a question and its gold answer
Problem = tuple[str, str]

# fewest and most numbers, and the largest of them
_COUNTDOWN = {"easy": (3, 3, 20), "mixed": (3, 4, 50), "hard": (4, 6, 99)}
_SORTING = {"easy": (4, 6, 99), "mixed": (4, 10, 999), "hard": (10, 16, 999)}
_LARGEST_VALUE = 999  # of a countdown's target and of every step of its gold expression


def is_held_out(text: str) -> bool:
    """Whether a problem belongs to the test side: one in five, by a hash of its text, so that every seed agrees.

    >>> is_held_out("37+58-14="), is_held_out("37+58=")
    (True, False)
    """
    return zlib.crc32(text.encode()) % _HELD_OUT_ONE_IN == 0


def distinct(problems: Iterable[Problem], size: int, *, held_out: bool, of: str) -> dict[str, str]:
    """Return the first `size` distinct problems of one side, question -> gold answer.

    `problems` may be finite; at most 200 per wanted problem are drawn. `of` names their source in the message.

    Raises UserError for a size below 1, and if the problems run out.

    >>> distinct(((f"{i}+1=", str(i + 1)) for i in range(99)), 2, held_out=True, of="sums")
    {'2+1=': '3', '4+1=': '5'}
    """
    return take(((is_held_out(problem[0]) == held_out, problem) for problem in problems), size, held_out, of)


def take(drawn: Iterable[tuple[bool, Problem]], size: int, held_out: bool, of: str) -> dict[str, str]:
    """Return the first `size` distinct problems that come with True; other arguments and errors as in `distinct`."""
    if size < 1:
        raise UserError(f"a split of {size} prompts is empty; set at least 1")
    kept: dict[str, str] = {}
    for wanted, (question, answer) in islice(drawn, _DRAWS_PER_PROMPT * size):
        if wanted:
            kept.setdefault(question, answer)
        if len(kept) == size:
            return kept
    side = "test" if held_out else "train"
    raise UserError(
        f"{size} distinct {side} prompts are needed, but {of} gave only {len(kept)}; "
        "ask for fewer, or allow longer problems or larger numbers"
    )


def draw_splits(
    draw: Callable[[random.Random], Problem], sizes: tuple[int, int], seed: int, write: Callable[[str], Prompt], of: str
) -> tuple[Dataset, Dataset]:
    """Draw a training and a test split of given sizes, disjoint over all seeds; `write` makes prompts of questions."""
    rng = random.Random(seed)
    problems = (draw(rng) for _ in count())
    return (
        to_dataset(distinct(problems, sizes[0], held_out=False, of=of), write),
        to_dataset(distinct(problems, sizes[1], held_out=True, of=of), write),
    )


def to_dataset(problems: Mapping[str, str], write: Callable[[str], Prompt]) -> Dataset:
    """Return the split with these questions, written by `write`."""
    return Dataset.from_dict({"prompt": [write(question) for question in problems], "answer": list(problems.values())})


def sizes_of(settings: Settings) -> tuple[int, int]:
    """Return the numbers of training and test prompts in a recipe."""
    train, test = settings.get("task_train_size"), settings.get("task_test_size")
    return TRAIN_SIZE if train is None else train, TEST_SIZE if test is None else test


def countdown_task(settings: Settings) -> Task:
    """Generate countdown problems; the gold answer is one right expression, which uses every number once.

    Graded by the reward `countdown`, which parses an expression, never evaluates it as code, and gives partial
    credit.

    >>> task = countdown_task({"task_train_size": 2, "task_test_size": 1})
    >>> print(task.train[0]["prompt"][1]["content"])
    Write an arithmetic expression that uses each of the numbers 3, 17, 27, 49 exactly once and has the value 8. \
Use only +, -, *, / and parentheses.
    """
    return _generated("countdown", settings, _draw_countdown, answer="countdown")


def sorting_task(settings: Settings) -> Task:
    """Generate lists of distinct integers to sort; the gold answer is the sorted list, separated by spaces.

    Graded by the reward `positions`, the share of positions with the right integer. With rewards between 0 and 1,
    max-variance keeps other rollouts than with a split into right and wrong.

    >>> task = sorting_task({"task_difficulty": "easy", "task_train_size": 2, "task_test_size": 1})
    >>> task.train[0]["answer"]
    '5 33 53 65 97'
    """
    return _generated("sorting", settings, _draw_sorting, answer="positions")


def _generated(name: str, settings: Settings, draw: Callable[[random.Random, str], Problem], *, answer: str) -> Task:
    difficulty = settings.get("task_difficulty") or "mixed"
    if difficulty not in DIFFICULTIES:
        raise UserError(f"task_difficulty is {difficulty!r}; expected one of {', '.join(DIFFICULTIES)}")
    form = PromptForm.of(settings)
    train, test = draw_splits(
        lambda rng: draw(rng, difficulty),
        sizes_of(settings),
        settings.get("task_seed") or 0,
        form.write,
        of=f"{name} ({difficulty})",
    )
    return Task(name, form.version(1), train, test, {answer: 1.0, **FORM_REWARDS}, answer)


def _draw_sorting(rng: random.Random, difficulty: str) -> Problem:
    fewest, most, largest = _SORTING[difficulty]
    numbers = rng.sample(range(largest + 1), rng.randint(fewest, most))
    question = f"Sort these integers in ascending order, and separate them by spaces: {' '.join(map(str, numbers))}"
    return question, " ".join(map(str, sorted(numbers)))


def _draw_countdown(rng: random.Random, difficulty: str) -> Problem:
    fewest, most, largest = _COUNTDOWN[difficulty]
    numbers = [rng.randint(1, largest) for _ in range(rng.randint(fewest, most))]
    target, expression = combine(rng, numbers)
    # sorted, so that a problem has one wording, and no seed tests a problem that another trains on
    listed = ", ".join(map(str, sorted(numbers)))
    question = (
        f"Write an arithmetic expression that uses each of the numbers {listed} exactly once and has the value "
        f"{target}. Use only +, -, *, / and parentheses."
    )
    return question, expression


def combine(rng: random.Random, numbers: list[int]) -> tuple[int, str]:
    """Join numbers by random operations to one expression; return its value and its text.

    Every step is a whole number from 1 to 999.

    >>> combine(random.Random(0), [3, 7, 25])
    (172, '(25 * 7) - 3')
    """
    while True:
        parts = [(number, str(number)) for number in numbers]
        while len(parts) > 1 and parts[0][0] <= _LARGEST_VALUE:
            rng.shuffle(parts)
            parts = [_join(rng, *parts.pop(), *parts.pop()), *parts]
        value, text = parts[0]
        if len(parts) == 1 and value <= _LARGEST_VALUE:
            return value, text[1:-1]


def _join(rng: random.Random, a: int, left: str, b: int, right: str) -> tuple[int, str]:
    if a < b:
        a, left, b, right = b, right, a, left
    results = {"+": a + b, "*": a * b}
    if a > b:
        results["-"] = a - b
    if a % b == 0:
        results["/"] = a // b
    sign = rng.choice(sorted(results))
    return results[sign], f"({left} {sign} {right})"


def gym_task(settings: Settings) -> Task:
    """Generate the problems of a reasoning-gym data set, `task: reasoning_gym:NAME`; `task_options` holds its options.

    The deciding reward `reasoning_gym` is what the data set's own scorer gives the extracted answer, often with
    partial credit (`pods_rl.rewards.gym`). Train and test are disjoint over all seeds.

    Raises UserError if reasoning-gym is not installed, for an unknown data set or option, if it yields too few
    distinct problems, or if its scorer does not accept its own answers.
    """
    name = str(settings["task"]).partition(":")[2]
    sizes, form = sizes_of(settings), PromptForm.of(settings)
    draws, seed = _GYM_DRAWS_PER_PROMPT * max(sizes), settings.get("task_seed") or 0
    options = dict(settings.get("task_options") or {})
    source = _create_gym(name, options, draws, seed)

    def split(size: int, held_out: bool) -> dict[str, str]:
        problems = (source[row] for row in range(draws))
        drawn = ((str(each["question"]), numbered(each["answer"], row)) for row, each in enumerate(problems))
        return distinct(drawn, size, held_out=held_out, of=f"reasoning-gym's {name}")

    splits = [split(size, held_out) for size, held_out in zip(sizes, (False, True), strict=True)]
    work = json.dumps([name, {**options, "size": draws, "seed": seed}])
    maker = "pods_rl.rewards.gym:scoring", work
    grader = library_reward(GYM, maker, range=(0.0, 1.0), gold=lambda gold: unnumbered(gold)[0] or None)
    golds = [gold for problems in splits for gold in list(problems.values())[:_TRIED] if grader.gold(gold)]
    texts = [f"<answer>{grader.gold(gold)}</answer>" for gold in golds]
    for gold, mark in zip(golds, score(grader, texts, golds, settings.get("reward_seconds")), strict=True):
        if isinstance(mark, RewardFailure) or mark < 1:
            said = mark.reason if isinstance(mark, RewardFailure) else f"it scores {mark:g}"
            raise UserError(
                f"reasoning-gym's {name}: its scorer does not accept its own answer {shown(gold)} ({said}). Some "
                "scorers run an answer as code, which is blocked: choose another data set."
            )
    train, test = (to_dataset(problems, form.write) for problems in splits)
    version = form.version(f"scored.1.{metadata.version('reasoning-gym')}")
    return Task(f"{GYM}/{name}", version, train, test, {GYM: 1.0, **FORM_REWARDS}, GYM, graders=(grader,))


def _create_gym(name: str, options: Settings, size: int, seed: int) -> Any:
    """Make a data set of reasoning-gym; the library is imported here because it loads slowly.

    Raises UserError if it is not installed, and for an unknown data set or option.
    """
    if find_spec("reasoning_gym") is None:
        raise UserError(
            "task reasoning_gym:NAME needs reasoning-gym, which is not installed: pip install '.[reasoning-gym]'"
            " in a checkout"
        )
    factory = import_module("reasoning_gym.factory")
    import_module("reasoning_gym")  # fills the table of data sets
    known = sorted(factory.DATASETS)
    if name not in known:
        raise UserError(
            f"reasoning-gym has no data set {name!r}.{suggest(name, known)} It has {', '.join(known[:8])}, ..."
        )
    try:
        return factory.create_dataset(name, **{**options, "size": size, "seed": seed})
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"task_options: reasoning-gym's {name} rejects {dict(options)}: {error}") from error
