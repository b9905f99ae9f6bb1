"""`reasoning_gym:NAME`, graded by the real library's scorers."""

from importlib import metadata
from importlib.util import find_spec

import pytest

from pods_rl.errors import UserError
from pods_rl.tasks import load_task
from pods_rl.tasks.task import check_split, shared_prompts

SIZES = {"task_train_size": 6, "task_test_size": 3}
gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")


def make(task: str, options: dict | None = None, **settings):
    return load_task({"task": task, "task_options": options, **SIZES, **settings})


@pytest.fixture(autouse=True, scope="module")
def one_process():
    """One grading process a task: each imports its library for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pods_rl.sandbox.pool.MAX_WORKERS", 1)
        yield


def answers(*given: str) -> list[str]:
    return [f"<answer>{answer}</answer>" for answer in given]


@gym
def test_problems_are_graded_by_the_scorer_of_their_data_set():
    legs = make("reasoning_gym:leg_counting", {"max_animals": 4})
    assert (legs.name, len(legs.train), len(legs.test)) == ("reasoning_gym/leg_counting", 6, 3)
    assert legs.rewards == {"reasoning_gym": 1.0, "format": 0.1, "tag_count": 1.0}
    assert metadata.version("reasoning-gym") in legs.version
    assert shared_prompts(legs) == 0
    for split in ("train", "test"):
        assert check_split(legs, split).refused == ()
    gold = legs.train[0]["answer"]
    right = gold.split()[0]
    # the library's partial credit: the share of the text that is the gold answer
    marks = legs.scores("reasoning_gym", [*answers(right, f"{right} legs", "x"), right], [gold] * 4)
    assert marks == [1.0, len(right) / len(f"{right} legs"), 0.0, 0.0]


@gym
def test_no_scorer_runs_an_answer_as_code(tmp_path):
    """The scorer of spiral_matrix would `eval` an answer that is not the gold text."""
    task = make("reasoning_gym:spiral_matrix", {"max_n": 3})
    gold = task.test[0]["answer"]
    numbers = gold.partition(" (")[0]
    mark = tmp_path / "ran"
    attempts = answers(f"[open({str(mark)!r}, 'w')]", f"[{numbers.replace(' ', ', ')}]", numbers)
    assert task.scores("reasoning_gym", attempts, [gold] * 3) == [0.0, 0.0, 1.0]
    assert not mark.exists()


@gym
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("leg_count", None, "leg_count .*registered"),
        ("leg_counting", {"max_animal": 3}, "task_options: .*leg_counting .*{'max_animal': 3}"),
        ("countdown", None, "countdown"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_refused(name, options, message):
    with pytest.raises(UserError, match=message):
        make(f"reasoning_gym:{name}", options)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("pods_rl.tasks.generated.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"\[reasoning-gym\]"):
        make("reasoning_gym:chain_sum")
