"""From a task's rewards to TRL's reward functions: lengths, thresholds, and what the verifier gave up."""

from __future__ import annotations

import math

import pytest
from datasets import Dataset

from pods_rl import rewards
from pods_rl.errors import UserError
from pods_rl.recipe import Origin
from pods_rl.recipe.recipe import build_recipe
from pods_rl.rewards import REWARDS, VerifierPool, answers, verifier
from pods_rl.sandbox.scores import RewardFailure
from pods_rl.tasks import Task
from pods_rl.training import trainer as build
from pods_rl.training.trainer import reward_functions, trl_reward

RIGHT, WRONG = "<answer>3</answer>", "<answer>4</answer>"
HANGS = r"<answer>\sum_{n=1}^{10^9} \frac{1}{n^n}</answer>"


def unsure(text: str, gold: str) -> float:
    return math.nan if text == "" else 0.4


def graded(text: str, gold: str) -> float:
    return float(text)


graded.range = (-2.0, 2.0)


def call(function, completions, lengths=None, **more):
    ids = [[0] * length for length in lengths or [1] * len(completions)]
    return function(prompts=completions, completions=completions, completion_ids=ids, answer=["3"] * len(ids), **more)


@pytest.fixture
def quick_pool(monkeypatch):
    """The process's own pool, one that gives up soon."""
    pool = VerifierPool(size=1, limit=0.2)
    for module in (answers, verifier):
        monkeypatch.setattr(module, "default_pool", lambda: pool)
    yield pool
    pool.close()


def test_texts_and_chat_messages_are_scored_and_the_function_keeps_its_name():
    function = trl_reward(REWARDS["accuracy"], limit=10)
    assert function.__name__ == "accuracy"
    assert call(function, [RIGHT, WRONG]) == [1.0, 0.0]
    assert call(function, [[{"role": "assistant", "content": RIGHT}]]) == [1.0]


def test_overlong_reads_the_lengths_of_the_completions():
    texts, lengths = ["long text"] * 4, [1, 80, 90, 100]
    assert call(trl_reward(REWARDS["overlong"], limit=100), texts, lengths) == [0.0, 0.0, -0.5, -1.0]


def test_what_the_verifier_gave_up_is_logged_by_the_reward_that_asks_it(quick_pool, monkeypatch):
    logged = []

    def log_metric(name, value):
        logged.append((name, value))

    assert call(trl_reward(REWARDS["format"], limit=10), [RIGHT], log_metric=log_metric) == [0.0]
    assert logged == []
    function = trl_reward(REWARDS["accuracy"], limit=10)
    assert call(function, [RIGHT, HANGS, HANGS], log_metric=log_metric) == [1.0, 0.0, 0.0]
    assert logged == [("pods/verifier_timeouts", 1.0), ("pods/verifier_crashes", 0.0)]  # equal answers once
    assert call(function, [RIGHT], log_metric=log_metric) == [1.0]
    assert logged[2:] == [("pods/verifier_timeouts", 0.0), ("pods/verifier_crashes", 0.0)]


def test_the_mean_over_processes_is_the_sum_of_their_counts(monkeypatch):
    class FourProcesses:
        num_processes = 4

    monkeypatch.setattr(build, "PartialState", FourProcesses)
    mine = {"pods/verifier_timeouts": [], "pods/verifier_crashes": []}
    for lost in [(1, 0), (0, 0), (5, 2), (0, 0)]:  # what each process gave up
        monkeypatch.setattr(build, "verifier_losses", lambda lost=lost: (10 + lost[0], 20 + lost[1]))
        build._log_losses((10, 20), lambda name, value: mine[name].append(value))
    assert {name: sum(values) / len(values) for name, values in mine.items()} == {
        "pods/verifier_timeouts": 6.0,
        "pods/verifier_crashes": 2.0,
    }


def test_a_recipe_s_settings_reach_every_reward():
    rows = Dataset.from_dict({"prompt": ["1+2="], "answer": ["3"]})
    task = Task("sums", "1", rows, rows, {"overlong": 0.5, "positions": 1.0}, answer="positions")
    settings = {"model_name_or_path": "tiny", "max_steps": 1, "max_completion_length": 100}
    plain = reward_functions(build_recipe(settings, Origin("a test")), task)
    assert [function.__name__ for function in plain] == ["overlong", "positions"]
    assert call(plain[0], [RIGHT], lengths=[90]) == [-0.5]


def test_steps_log_what_the_verifier_gave_up_(make_trainer, quick_pool):
    verify = trl_reward(REWARDS["accuracy"], limit=12)
    lengths = trl_reward(REWARDS["overlong"], limit=12)
    seen = []

    def one_hangs(completions, **more):
        return verify(completions=[HANGS, *completions[1:]], **more)

    def watched(**more):
        seen.append(lengths(**more))
        return seen[-1]

    trainer = make_trainer(reward=[one_hangs, watched], num_rollouts=8)
    trainer.train()
    steps = [line for line in trainer.state.log_history if "pods/verifier_timeouts" in line]
    assert len(steps) == 2
    assert [line.get("pods/verifier_timeouts", 0.0) for line in steps] == [1.0, 1.0]
    assert [line.get("pods/verifier_crashes", 0.0) for line in steps] == [0.0, 0.0]
    assert [line["rewards/watched/mean"] for line in steps] == pytest.approx([sum(s) / len(s) for s in seen])


def test_a_recipe_s_own_reward_runs_within_its_limit(monkeypatch):
    rows = Dataset.from_dict({"prompt": ["1+2="], "answer": ["3"]})
    name = f"{__name__}:graded"
    task = Task("sums", "1", rows, rows, {name: 1.0, "format": 1.0})
    asked = []

    class Pool:
        def score(self, texts, golds):
            return [RewardFailure("gave no score within 7 s", late=True), *[2.0] * (len(texts) - 1)]

    monkeypatch.setattr(rewards, "user_pool", lambda *key: asked.append(key) or Pool())
    settings = {"model_name_or_path": "tiny", "max_steps": 1}
    for seconds in (7, None):
        own, _ = reward_functions(build_recipe(settings | {"reward_seconds": seconds}, Origin("a test")), task)
        first, second = call(own, ["x", "2"])
        assert isinstance(first, RewardFailure)
        assert second == 2.0
    assert asked == [(name, 7)]  # the one built in never asks, and without a limit nobody does


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reward_seconds": 0}, r"reward_seconds: got 0"),
    ],
)
def test_impossible_settings_are_refused_with_the_recipe(settings, words):
    with pytest.raises(UserError, match=words):
        build_recipe({"model_name_or_path": "tiny", "max_steps": 1} | settings, Origin("a test"))
