"""reasoning-gym: its generators and never its scorers; a stand-in of the library where it is not installed."""

from __future__ import annotations

import dataclasses
import sys
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType

import pytest

from pods_rl.errors import UserError
from pods_rl.recipe import build_recipe
from pods_rl.recipe.reading import Origin
from pods_rl.tasks import generated, load_task

NAME = "reasoning_gym"
SIZES = {"task_train_size": 6, "task_test_size": 3}


class Doubles:
    """A data set of the library: problem i doubles seed + i, or whatever `answer` says."""

    def __init__(self, size, seed, answer="double"):
        self.size, self.seed, self.answer = size, seed, answer

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        number = self.seed + index
        gold = {"double": str(2 * number), "none": None, "empty": ""}[self.answer]
        return {"question": f"Double {number}.", "answer": gold, "metadata": {}}

    def score_answer(self, answer, entry):
        raise AssertionError("a scorer of the library was called")


@pytest.fixture
def library(monkeypatch):
    """Its table and factory, put where the real ones would be."""
    factory = ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"doubles": Doubles, "halves": Doubles}
    factory.create_dataset = lambda name, **options: factory.DATASETS[name](**options)
    monkeypatch.setitem(sys.modules, NAME, ModuleType(NAME))
    monkeypatch.setitem(sys.modules, f"{NAME}.factory", factory)
    monkeypatch.setattr(generated, "find_spec", lambda name: object())
    monkeypatch.setattr(generated.metadata, "version", lambda name: "9.9")


def make(dataset="doubles", **settings):
    options = {"dataset": dataset, **settings.pop("options", {})}
    return load_task({"task": NAME, "task_options": options, **SIZES, **settings})


def test_its_problems_become_a_task_with_our_grader(library):
    task = make()
    assert (task.name, len(task.train), len(task.test), task.answer) == ("reasoning_gym/doubles", 6, 3, "accuracy")
    number = int(task.train[0]["prompt"][1]["content"].split()[1].rstrip("."))
    assert task.train[0]["answer"] == str(2 * number)
    golds = task.test["answer"][:]
    assert all(grade.answer for grade in task.grade([f"<answer>{gold}.0</answer>" for gold in golds], golds))
    assert "-1.9.9-" in task.version


def test_no_seed_trains_on_what_another_tests(library):
    made = [make(task_seed=seed) for seed in (0, 7)]
    assert made[0].train["answer"][:] != made[1].train["answer"][:]
    trained = {answer for task in made for answer in task.train["answer"]}
    assert not trained & {answer for task in made for answer in task.test["answer"]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "double"}, "no data set 'double'; similar names: doubles"),
        ({"options": {"max_terms": 4}}, "rejects {'max_terms': 4}"),
        ({"options": {"answer": "none"}}, "problem 0: the grader does not accept None as its own answer"),
        ({"options": {"answer": "empty"}}, "does not accept ''"),
        ({"task_train_size": 0}, "a split of 0 prompts"),
    ],
)
def test_what_it_cannot_give_is_refused(library, settings, message):
    with pytest.raises(UserError, match=message):
        make(**settings)


def test_its_data_set_must_be_named():
    with pytest.raises(UserError, match=r"task_options is None; .*task_options: {dataset: chain_sum"):
        load_task({"task": NAME})


def test_where_it_is_not_installed_a_sentence_says_how(monkeypatch):
    monkeypatch.setattr(generated, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed: pip install 'pods-rl\[reasoning-gym\]'"):
        make()
    monkeypatch.setattr("pods_rl.recipe.task_checks.find_spec", lambda name: None)
    values = {"max_steps": 1, "model_name_or_path": "tiny", "task": NAME, "task_options": {"dataset": "chain_sum"}}
    with pytest.raises(UserError, match=r"not installed: pip install 'pods-rl\[reasoning-gym\]'"):
        build_recipe(values, Origin("test"))


@pytest.mark.skipif(find_spec(NAME) is None, reason="reasoning-gym is not installed")
@pytest.mark.parametrize("dataset", ["chain_sum", "gcd", "letter_counting"])
def test_the_real_library_gives_tasks_and_none_of_its_scorers_is_called(monkeypatch, dataset):
    from reasoning_gym import factory

    def scorer(*_):
        raise AssertionError("a scorer of the library was called")

    monkeypatch.setattr(factory.DATASETS[dataset][0], "score_answer", scorer)
    task = make(dataset)
    golds = task.train["answer"][:]
    assert all(grade.both for grade in task.grade([f"<think>so</think><answer>{a}</answer>" for a in golds], golds))
    assert metadata.version("reasoning-gym") in task.version


@pytest.mark.skipif(find_spec(NAME) is None, reason="reasoning-gym is not installed")
def test_the_options_of_the_real_library_reach_it():
    task = make("chain_sum", options={"min_terms": 4, "max_terms": 4})
    assert all(len(prompt[1]["content"].split()) >= 7 for prompt in task.train["prompt"])
    with pytest.raises(UserError, match=r"rejects {'max_therms': 4}"):
        make("chain_sum", options={"max_therms": 4})
    assert dataclasses.is_dataclass(sys.modules["reasoning_gym.factory"].DATASETS["chain_sum"][1])
