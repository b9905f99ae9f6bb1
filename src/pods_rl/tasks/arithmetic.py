"""The built-in task: sums of several integers, worked out step by step. Generated, so it needs no download.

A prompt is `37+58-14+10=`; a full-marks completion spells out every running total and repeats the last one:

    <think>37
    +58=95
    -14=81
    +10=91</think><answer>91</answer>
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

from ..errors import UserError
from ..rewards import GRADER_VERSION
from .generated import TEST_SIZE, TRAIN_SIZE, draw_splits, is_held_out
from .task import PAPER_REWARDS, Task

VERSION = f"{GRADER_VERSION}-1"
Step = tuple[str, int]  # a sign and a number, applied to the total before


def take_step(total: int, step: Step) -> int:
    """Return the total after a step; division rounds down.

    >>> take_step(24, ("+", 18)), take_step(25, ("/", 2))
    (42, 12)
    """
    sign, number = step
    return {"+": total + number, "-": total - number, "*": total * number, "/": total // number}[sign]


class Chain:
    """A problem that is solved step by step from a first number, `start`."""

    start: int
    steps: tuple[Step, ...]

    @property
    def prompt(self) -> str:
        """The text as the policy reads it."""
        raise NotImplementedError

    @property
    def totals(self) -> list[int]:
        """The result of each step."""
        return list(accumulate(self.steps, take_step, initial=self.start))[1:]

    @property
    def answer(self) -> str:
        """The gold answer."""
        return str(self.totals[-1])

    def write_steps(self, totals: list[int]) -> str:
        """Write the chain of thought with these totals, whether or not they are right."""
        raise NotImplementedError


@dataclass(frozen=True)
class Difficulty:
    """The lengths of sums and the size of their numbers.

    A sum has `min_terms` to `max_terms` integers, each length equally often; every integer's size and every running
    total is within `smallest` and `largest`.
    """

    min_terms: int
    max_terms: int
    smallest: int = 10
    largest: int = 99


DIFFICULTIES = {
    "easy": Difficulty(min_terms=2, max_terms=3),
    "mixed": Difficulty(min_terms=2, max_terms=6),
    "hard": Difficulty(min_terms=5, max_terms=6),
}


@dataclass(frozen=True)
class Problem(Chain):
    """One sum: its terms with their signs, the first one positive.

    >>> problem = Problem((37, 58, -14))
    >>> problem.prompt, problem.answer
    ('37+58-14=', '81')
    >>> problem.held_out
    True
    """

    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """The sum as the policy reads it, ending in the equals sign."""
        return str(self.terms[0]) + "".join(f"{term:+d}" for term in self.terms[1:]) + "="

    @property
    def start(self) -> int:  # type: ignore[override]
        """The first term."""
        return self.terms[0]

    @property
    def steps(self) -> tuple[Step, ...]:  # type: ignore[override]
        """The other terms."""
        return tuple(("-" if term < 0 else "+", abs(term)) for term in self.terms[1:])

    @property
    def held_out(self) -> bool:
        """Whether the prompt belongs to the test set (`is_held_out`)."""
        return is_held_out(self.prompt)

    def write_steps(self, totals: list[int]) -> str:
        r"""Write running totals as a chain of thought, one line per term, whether or not they are right.

        >>> Problem((37, 58, -14)).write_steps([95, 81])
        '37\n+58=95\n-14=81'
        """
        lines = [f"{term:+d}={total}" for term, total in zip(self.terms[1:], totals, strict=True)]
        return "\n".join([str(self.terms[0]), *lines])


def write_completion(problem: Chain, totals: list[int] | None = None) -> str:
    r"""Write a completion in the required form, by default the one that earns full marks.

    `totals` replaces the right running totals; the last one is the answer given.

    >>> write_completion(Problem((8, 5)))
    '<think>8\n+5=13</think><answer>13</answer>'
    """
    totals = problem.totals if totals is None else totals
    return f"<think>{problem.write_steps(totals)}</think><answer>{totals[-1]}</answer>"


def draw_problem(rng: random.Random, difficulty: Difficulty) -> Problem:
    """Draw one sum; if only one of the two signs keeps the total in range, use that sign.

    >>> problem = draw_problem(random.Random(0), DIFFICULTIES["easy"])
    >>> 10 <= min(problem.totals) and max(problem.totals) <= 99
    True
    """
    low, high = difficulty.smallest, difficulty.largest
    total = rng.randint(low, high)
    terms = [total]
    for _ in range(rng.randint(difficulty.min_terms, difficulty.max_terms) - 1):
        room_above, room_below = high - total, total - low
        adding = room_below < low or (room_above >= low and rng.random() < 0.5)
        size = rng.randint(low, room_above if adding else room_below)
        terms.append(size if adding else -size)
        total += terms[-1]
    return Problem(tuple(terms))


def arithmetic_task(
    difficulty: str | Difficulty = "mixed", train_size: int = TRAIN_SIZE, test_size: int = TEST_SIZE, seed: int = 0
) -> Task:
    """Generate the arithmetic task: distinct prompts, the same ones for the same arguments.

    Rewards are the paper's for a single GPU (accuracy 1.0, 0.1 x format, 0.025 per tag). Train and test are disjoint
    over all seeds and difficulties.

    `difficulty` is a name of `DIFFICULTIES` or a `Difficulty`. Raises UserError for an unknown name, a size below 1,
    or more prompts than the difficulty has.

    >>> task = arithmetic_task("easy", train_size=8, test_size=4, seed=1)
    >>> len(task.train), len(task.test), task.grade(["<think>1+1=2</think><answer>2</answer>"], ["2"])[0].both
    (8, 4, True)
    """
    level = difficulty if isinstance(difficulty, Difficulty) else DIFFICULTIES.get(difficulty)
    if level is None:
        raise UserError(
            f"difficulty is {difficulty!r}; expected one of {', '.join(DIFFICULTIES)}, or a Difficulty of your own"
        )

    def draw(rng: random.Random) -> tuple[str, str]:
        problem = draw_problem(rng, level)
        return problem.prompt, problem.answer

    train, test = draw_splits(draw, (train_size, test_size), seed, str, of=str(level))
    return Task("arithmetic", VERSION, train, test, dict(PAPER_REWARDS))
