"""Generated tasks: seeded, distinct, disjoint over seeds, and right."""

import re
from itertools import accumulate

import pytest

from pods_rl.errors import UserError
from pods_rl.tasks import load_task
from pods_rl.tasks.generated import DIFFICULTIES


def make(name, **settings):
    sizes = {"task_train_size": 200, "task_test_size": 80}
    return load_task({"task": name, "prompt_style": "plain", "system_prompt": "", **sizes, **settings})


def rows(task):
    return [pair for split in (task.train, task.test) for pair in zip(split["prompt"], split["answer"], strict=True)]


@pytest.mark.parametrize("name", ["arithmetic", "words"])
def test_same_settings_give_same_prompts_and_another_seed_gives_others(name):
    first, again, other = (rows(make(name, task_seed=seed)) for seed in (3, 3, 4))
    assert first == again != other
    assert len(make(name, task_train_size=None, task_test_size=1).train) == 4096


def test_prompts_are_distinct_and_test_is_disjoint_over_seeds_and_difficulties():
    tasks = [make("arithmetic", task_seed=seed, task_difficulty=level) for seed in (0, 1) for level in DIFFICULTIES]
    assert all(len(set(task.train["prompt"])) == 200 and len(set(task.test["prompt"])) == 80 for task in tasks)
    trained = {prompt for task in tasks for prompt in task.train["prompt"]}
    assert not trained & {prompt for task in tasks for prompt in task.test["prompt"]}


@pytest.mark.parametrize("level", DIFFICULTIES)
def test_gold_sums_are_right_and_all_numbers_and_totals_have_two_digits(level):
    for prompt, gold in rows(make("arithmetic", task_difficulty=level)):
        terms = [int(term) for term in re.findall(r"[+-]?\d+", prompt)]
        assert sum(terms) == int(gold)
        assert all(10 <= number <= 99 for number in (*map(abs, terms), *accumulate(terms)))


def test_refuses_what_it_cannot_make():
    with pytest.raises(UserError, match=r"^0 distinct"):
        make("arithmetic", task_train_size=0)
