"""The task `calculator`: arithmetic too hard to do in the head, with a tool that computes one step. Generated.

A full-marks conversation about `(47*83)-219` calls the tool once a step, and then answers:

    calculator("47*83")      -> 3901
    calculator("3901-219")   -> 3682
    <think>3682</think><answer>3682</answer>
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import reduce

from ..errors import UserError
from .arithmetic import Step, take_step
from .generated import draw_splits, sizes_of
from .prompts import PromptForm
from .task import PAPER_REWARDS, Settings, Task

DIFFICULTIES = {"easy": (1, 1), "mixed": (1, 2), "hard": (2, 3)}  # fewest and most steps
_EXPRESSION = re.compile(r"\s*(-?[0-9]{1,12})\s*([-+*])\s*(-?[0-9]{1,12})\s*")
_FACTORS, _TERMS, _LARGEST = (12, 99), (100, 999), 99_999


@dataclass(frozen=True)
class Calculation:
    """A start and the steps that follow, each on the result before it.

    >>> problem = Calculation(47, (("*", 83), ("-", 219)))
    >>> problem.question, problem.answer
    ('(47*83)-219', '3682')
    """

    start: int
    steps: tuple[Step, ...]

    @property
    def question(self) -> str:
        """The expression, with a bracket around each result that is used again."""
        inner = reduce(lambda text, step: f"({text}{step[0]}{step[1]})", self.steps, str(self.start))
        return inner[1:-1]

    @property
    def answer(self) -> str:
        """The gold answer."""
        return str(reduce(take_step, self.steps, self.start))


def calculator(expression: str) -> str:
    """Compute one operation on two whole numbers.

    Args:
        expression: two whole numbers with +, - or * between them, such as 12*34.

    Returns:
        The result.

    >>> calculator("12 * -34")
    '-408'
    """
    found = _EXPRESSION.fullmatch(expression)
    if found is None:
        raise ValueError("expected a*b, a+b or a-b")
    return str(take_step(int(found[1]), (found[2], int(found[3]))))


def draw_calculation(rng: random.Random, steps: tuple[int, int]) -> Calculation:
    """Draw a problem of that many steps, fewest and most: factors of two digits, terms of three, results above 9.

    >>> draw_calculation(random.Random(0), (2, 2)).question
    '(876+365)*74'
    """
    start = total = rng.randint(*rng.choice((_FACTORS, _TERMS)))
    drawn: list[Step] = []
    for _ in range(rng.randint(*steps)):
        sign = rng.choice("+-*")
        step = sign, rng.randint(*(_FACTORS if sign == "*" else _TERMS))
        if not 9 < take_step(total, step) <= _LARGEST:
            step = "+", rng.randint(*_TERMS)
        drawn.append(step)
        total = take_step(total, step)
    return Calculation(start, tuple(drawn))


def calculator_task(settings: Settings) -> Task:
    """Generate the task: chat prompts of one expression each, and the tool `calculator`. Rewards are the paper's.

    Raises UserError for an unknown difficulty, a size below 1, or prompts as plain text, which tools cannot continue.

    >>> task = calculator_task({"task_train_size": 2, "task_test_size": 1, "system_prompt": ""})
    >>> task.test[0]["prompt"][0]["content"], task.test[0]["answer"], task.tools[0].__name__
    ('(82+633)-163', '552', 'calculator')
    """
    difficulty = settings.get("task_difficulty") or "mixed"
    if difficulty not in DIFFICULTIES:
        raise UserError(f"task_difficulty is {difficulty!r}; expected one of {', '.join(DIFFICULTIES)}")
    form = PromptForm.of(settings)
    if form.style != "chat":
        raise UserError(f"prompt_style is {form.style!r}; task calculator has a tool, and tools need chat prompts")

    def draw(rng: random.Random) -> tuple[str, str]:
        problem = draw_calculation(rng, DIFFICULTIES[difficulty])
        return problem.question, problem.answer

    seed, of = settings.get("task_seed") or 0, f"calculator ({difficulty})"
    train, test = draw_splits(draw, sizes_of(settings), seed, form.write, of)
    return Task("calculator", form.version(1), train, test, dict(PAPER_REWARDS), tools=(calculator,))
