"""The task `words`: word problems of one to four steps in English, with sentences that do not matter. Generated.

A full-marks completion has one equation a line, and repeats the last result:

    <think>24+18=42
    42-7=35</think><answer>35</answer>
"""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ..yaml_files import read_yaml
from .generated import Drawn, generated_task, is_held_out
from .prompts import PromptForm
from .task import Settings, Task

WordStep = tuple[str, int]  # a sign and a number, applied to the total before
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
_PRONOUN_FIELD = re.compile(r"\{(He|he|him|His|his)\}")
_PRONOUNS = {"she": ("she", "her", "her"), "he": ("he", "his", "him")}  # subjective, possessive, objective
_LARGEST = 99  # of numbers and results; the smallest is 2, so that plurals are right
_DISTRACTING = (4, 24)  # an age, minutes, dollars, ...
SIGN_OF_KIND = {"group": "*", "gain": "+", "loss": "-", "growth": "*", "half": "/"} | {
    "share": "/", "price": "*", "more": "+", "fewer": "-", "times": "*", "together": "+",
}  # fmt: skip
_NUMBERS = {"group": range(2, 50), "growth": tuple(TIMES), "times": tuple(TIMES), "half": (2,)}  # others: 2 to 9
_SENTENCES_OF_KIND = {"group": "groups", "gain": "gains", "loss": "losses", "growth": "growths", "half": "halvings"}
_EVENTS = ("gain", "gain", "gain", "loss", "loss", "loss", "growth", "half")

# fewest and most steps of a problem, fewest and most of its sentences that do not matter
LEVELS = {"easy": ((1, 2), (2, 3)), "mixed": ((1, 4), (2, 3)), "hard": ((3, 4), (3, 5))}


class WordProblem(NamedTuple):
    """A word problem: its text, its template (the sentences that matter, with fields for what varies), its solution.

    >>> WordProblem("...", "...", 24, (("+", 18), ("-", 7))).totals
    [42, 35]
    """

    text: str
    template: str
    start: int
    steps: tuple[WordStep, ...]

    @property
    def totals(self) -> list[int]:
        """The result of each step; the last one is the answer."""
        return list(accumulate(self.steps, take_step, initial=self.start))[1:]

    @property
    def held_out(self) -> bool | None:
        """True for a test problem: template and numbers are both held out; False if neither is; None if one is."""
        template_held_out = is_held_out(self.template)
        numbers_held_out = is_held_out(f"{self.start} {self.steps}")
        return template_held_out if template_held_out == numbers_held_out else None


def take_step(total: int, step: WordStep) -> int:
    """Return the total after a step; division rounds down."""
    sign, number = step
    match sign:
        case "+":
            return total + number
        case "-":
            return total - number
        case "*":
            return total * number
        case "/":
            return total // number
    raise ValueError(f"sign is {sign!r}; expected one of + - * /")


def draw_problem(rng: random.Random, lengths: tuple[int, int], distractors: tuple[int, int]) -> WordProblem:
    """Draw one problem: its steps, its numbers, then its sentences.

    >>> print(draw_problem(random.Random(0), *LEVELS["easy"]).text)
    Maria has a small garden behind the house. Maria harvests 40 pumpkins from the first bed. Then half of the \
pumpkins go to Daniel. It is 21 degrees outside. Daniel has 23 cousins. Tom has 7 more pumpkins than Maria has now. \
How many pumpkins does Tom have?
    """
    kinds = _draw_kinds(rng, rng.randint(*lengths))
    start, steps = draw_numbers(rng, kinds)
    stories = read_stories()
    scene = rng.choice(stories["scenes"])
    # the scene's own for a kind of step, or those of all scenes
    sentences: dict[str, list[str]] = {**stories, **stories["ends"], **scene}
    written: list[tuple[str, int]] = []
    for kind, (_, number) in zip(kinds, steps, strict=True):
        of_kind = sentences[_SENTENCES_OF_KIND.get(kind, kind)]
        fresh = [sentence for sentence in of_kind if sentence not in dict(written)]
        written.append((rng.choice(fresh), number))
    if kinds[0] != "group":
        written.insert(0, (rng.choice(scene["opens"]), start))
    if kinds[-1] not in stories["ends"]:
        written.append((rng.choice(stories["ends"]["ask"]), 0))
    template = " ".join(sentence for sentence, _ in written)
    for sentence in rng.sample(stories["distractors"], rng.randint(*distractors)):
        written.insert(rng.randint(1, len(written) - 1), (sentence, rng.randint(*_DISTRACTING)))
    written.insert(0, (rng.choice(scene["settings"]), 0))
    return WordProblem(_write_story(rng, scene, written, groups=start), template, start, steps)


def words_task(settings: Settings) -> Task:
    """Generate word problems; the prompts are plain text without a system prompt, unless the settings give one.

    Over all seeds and difficulties, no test problem has a template of a training problem, nor its numbers.

    >>> task = words_task({"task_difficulty": "easy", "task_train_size": 2, "task_test_size": 1})
    >>> task.test[0]["prompt"][-35:-1], task.test[0]["answer"]
    ('How many badges does Max have now?', '92')
    """
    set_values = {key: value for key, value in settings.items() if value is not None}
    form = PromptForm.of({"prompt_style": "plain", "system_prompt": "", **set_values})
    return generated_task("words", settings, _draw, form)


def _draw(rng: random.Random, difficulty: str) -> Drawn:
    problem = draw_problem(rng, *LEVELS[difficulty])
    return Drawn(problem.text, str(problem.totals[-1]), problem.held_out)


@cache
def read_stories() -> dict[str, Any]:
    """Return the names and sentences of `stories.yaml`."""
    return read_yaml(Path(__file__).parent / "stories.yaml")[0]


def _write_story(rng: random.Random, scene: dict[str, list[str]], written: list[tuple[str, int]], groups: int) -> str:
    """Write sentences, each with its number, as one text about one person and one kind of things."""
    stories = read_stories()
    gender = "she" if rng.random() < 0.5 else "he"
    other_gender = "he" if gender == "she" else "she"  # of the friends, so that a pronoun always means the person
    subjective, possessive, objective = _PRONOUNS[gender]
    name = rng.choice(stories[gender])
    friends = rng.sample(stories[other_gender], 2)
    fields: dict[str, Any] = {
        "A": name,
        "he": subjective,
        "He": subjective.title(),
        "his": possessive,
        "His": possessive.title(),
        "him": objective,
        "k": groups,
        "things": rng.choice(scene["things"]),
    }
    sentences: list[str] = []
    person_is_subject = False  # of the sentence before
    for sentence, number in written:
        if not person_is_subject:  # a pronoun would be unclear
            sentence = _PRONOUN_FIELD.sub(
                lambda pronoun: "{A}'s" if pronoun[1].lower() == "his" else "{A}", sentence, count=1
            )
        person_is_subject = sentence.startswith(("{He}", "{A} "))
        friend = rng.choice(friends)
        sentences.append(sentence.format(**fields, n=number, times=TIMES.get(number), B=friend))
    return " ".join(sentences)


def _draw_kinds(rng: random.Random, steps: int) -> list[str]:
    """Draw what happens: perhaps groups at the start, perhaps a question that needs a step of its own."""
    ends = [end for end in read_stories()["ends"] if end != "ask"]
    while True:
        head = ["group"] if rng.random() < 0.35 else []
        tail = [rng.choice(ends)] if rng.random() < 0.6 else []
        between = steps - len(head) - len(tail)
        if between >= 0:
            return [*head, *rng.sample(_EVENTS, between), *tail]


def draw_numbers(rng: random.Random, kinds: list[str]) -> tuple[int, tuple[WordStep, ...]]:
    """Draw the first number and the steps, so that all numbers and results are integers from 2 to 99."""
    while True:
        start = rng.randint(2, 9 if kinds[0] == "group" else 80)
        total = start
        steps: list[WordStep] = []
        for kind in kinds:
            sign = SIGN_OF_KIND[kind]
            exact = [number for number in _NUMBERS.get(kind, range(2, 10)) if sign != "/" or total % number == 0]
            fitting = [number for number in exact if 2 <= take_step(total, (sign, number)) <= _LARGEST]
            if not fitting:
                break
            steps.append((sign, rng.choice(fitting)))
            total = take_step(total, steps[-1])
        else:
            return start, tuple(steps)
