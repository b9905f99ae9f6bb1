"""Generated tasks: seeded, distinct, disjoint over seeds, right by an independent evaluator."""

import ast
import re
from collections import Counter
from fractions import Fraction
from itertools import accumulate

import pytest

from pods_rl.errors import UserError
from pods_rl.tasks import load_task
from pods_rl.tasks.generated import DIFFICULTIES

NAMES = {"arithmetic": "accuracy", "countdown": "countdown"}


def make(name, **settings):
    sizes = {"task_train_size": 200, "task_test_size": 80}
    return load_task({"task": name, "prompt_style": "plain", "system_prompt": "", **sizes, **settings})


def rows(task):
    return [pair for split in (task.train, task.test) for pair in zip(split["prompt"], split["answer"], strict=True)]


def value(text: str) -> Fraction:
    """Work an expression out from its syntax tree: independent of how the task made it and of the reward."""

    def of(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        left, right = of(node.left), of(node.right)
        apply = {ast.Add: left.__add__, ast.Sub: left.__sub__, ast.Mult: left.__mul__, ast.Div: left.__truediv__}
        return apply[type(node.op)](right)

    return of(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize("name", [*NAMES, "words"])
def test_same_settings_give_same_prompts_and_another_seed_gives_others(name):
    first, again, other = (rows(make(name, task_seed=seed)) for seed in (3, 3, 4))
    assert first == again != other
    assert len(make(name, task_train_size=None, task_test_size=1).train) == 4096


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_distinct_and_test_is_disjoint_over_seeds_and_difficulties(name):
    tasks = [make(name, task_seed=seed, task_difficulty=level) for seed in (0, 1) for level in DIFFICULTIES]
    assert all(len(set(task.train["prompt"])) == 200 and len(set(task.test["prompt"])) == 80 for task in tasks)
    trained = {prompt for task in tasks for prompt in task.train["prompt"]}
    assert not trained & {prompt for task in tasks for prompt in task.test["prompt"]}


@pytest.mark.parametrize("level", DIFFICULTIES)
def test_gold_sums_are_right_and_all_numbers_and_totals_have_two_digits(level):
    for prompt, gold in rows(make("arithmetic", task_difficulty=level)):
        assert value(prompt.removesuffix("=")) == int(gold)
        terms = [int(term) for term in re.findall(r"[+-]?\d+", prompt)]
        assert all(10 <= number <= 99 for number in (*map(abs, terms), *accumulate(terms)))


@pytest.mark.parametrize("level", DIFFICULTIES)
def test_gold_expressions_use_every_number_once_and_have_the_value(level):
    for prompt, gold in rows(make("countdown", task_difficulty=level)):
        listed, target = re.search(r"numbers ([\d, ]+) exactly once and has the value (\d+)", prompt).groups()
        numbers = [int(number) for number in listed.split(", ")]
        assert numbers == sorted(numbers)
        assert Counter(map(int, re.findall(r"\d+", gold))) == Counter(numbers)
        assert value(gold) == int(target)
        assert 1 <= int(target) <= 999


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_decided_by_the_tasks_own_reward(name):
    task = make(name)
    assert (task.name, task.answer) == (name, NAMES[name])
    assert dict(task.rewards) == {task.answer: 1.0, "format": 0.1, "tag_count": 1.0}
    golds = task.test["answer"][:]
    assert all(
        grade.both for grade in task.grade([f"<think>so</think><answer>{gold}</answer>" for gold in golds], golds)
    )
    others = [*golds[1:], golds[0]]
    assert not any(grade.answer for grade in task.grade([f"<answer>{gold}</answer>" for gold in others], golds))


def test_refuses_what_it_cannot_make():
    with pytest.raises(UserError, match=r"^0 distinct"):
        make("arithmetic", task_train_size=0)
