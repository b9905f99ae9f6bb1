"""Rewards of a user's own in processes of their own: right, in order, and one that hangs costs itself alone."""

import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest
from datasets import Dataset

from pods_rl.distributed.signals import SIGNALS
from pods_rl.errors import UserError
from pods_rl.rewards import Reward, attempt, score, user_pool
from pods_rl.sandbox import RewardFailure
from pods_rl.sandbox import pool as pool_module
from pods_rl.tasks import Task, load_task

from .. import DEADLINE, until, with_time
from ..reliability.own_rewards import MEDDLERS, ODD, fickle, gone, good

OWN_REWARDS = "tests.reliability.own_rewards"
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")


@pytest.fixture(autouse=True)
def one_worker(monkeypatch):
    monkeypatch.setattr(pool_module, "MAX_WORKERS", 1)


def scored(path, texts, golds, limit=DEADLINE):
    return score(Reward(path, good), texts, golds, limit)


def test_scores_come_in_order_and_failures_in_their_places():
    with_time(scores_in_order, 1.0)


def scores_in_order(limit):
    texts = ["true", "raise", "nan", "hang", "inf", "exit", "print", "none", "true"]
    scores = scored(f"{OWN_REWARDS}:fickle", texts, [""] * len(texts), limit)
    user_pool(f"{OWN_REWARDS}:fickle").close()
    assert [scores[i] for i in (0, 4, 6, 8)] == [1.0, math.inf, 0.75, 1.0]
    assert math.isnan(scores[2])
    assert scores[3] == RewardFailure(scores[3].reason, late=True)
    assert scores[5] == RewardFailure(scores[5].reason)
    assert "SystemExit: 0 (" in scores[5].reason
    assert "\x1b[2J999" in scores[1].reason
    assert len(scores[1].reason) < 260
    assert scores[1].reason.endswith(")")
    assert "NoneType" in scores[7].reason
    assert "ValueError: " in attempt(fickle, "raise", "").reason  # in this process


def test_a_grader_of_a_task_alone_which_no_other_process_can_import_scores_in_this_one():
    grader = Reward("mine", lambda text, gold: float(text == gold))
    rows = Dataset.from_dict({"prompt": ["1+1="], "answer": ["2"]})
    task = Task("sums", "1", rows, rows, {"mine": 1.0}, "mine", reward_seconds=DEADLINE, graders=(grader,))
    assert task.scores("mine", ["2", "3"], ["2", "2"]) == [1.0, 0.0]


# -- modules that do not import ---------------------------------------------------------------------------------------

JUDGE = "def judge(text, gold): return 1.0\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of a user's; the import path of its `judge`."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> str:
        name = f"judges_{abs(hash(text))}"
        (tmp_path / f"{name}.py").write_text(text)
        return f"{name}:judge"

    return write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit()", "SystemExit"),
        ("class judge: ...", ":judge' .*class"),
        ("import os; os._exit(3)", ":judge' .*process"),
        ("while True: pass", ":judge' .*3 s"),
    ],
)
def test_a_module_that_does_not_import_is_refused_in_a_line_before_this_process_imports_it(
    module, monkeypatch, text, message
):
    monkeypatch.setattr(pool_module, "START_LIMIT", 3.0 if "while" in text else DEADLINE)
    path = module(text)
    with pytest.raises(UserError, match=message) as told:
        load_task({"task_rewards": {path: 1.0}, "reward_seconds": DEADLINE})
    assert "\n" not in str(told.value)
    assert path.removesuffix(":judge") not in sys.modules
    user_pool(path).close()


FAILING = "import os, time\ndef judge(text, gold):\n    if text == 'raise': raise ValueError('no')\n" + (
    "    if text == 'exit': os._exit(0)\n    if text == 'hang': time.sleep(3600)\n    return 1.0\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("errors", ["raise", "zero"])
def test_a_task_grades_with_the_users_own_reward_as_training_does(module, errors):
    path = module(f"{FAILING}# {errors}\n")  # a pool that is closed stays so
    with_time(lambda seconds: grades_as_training(path, errors, seconds), 2.0)


def grades_as_training(path, errors, seconds):
    rows = Dataset.from_dict({"prompt": ["1+1="], "answer": ["2"]})
    task = Task("mine", "1", rows, rows, {path: 1.0}, answer=path, reward_seconds=seconds, reward_errors=errors)
    assert [grade.answer for grade in task.grade(["2"] * 2, ["2"] * 2)] == [True, True]
    if errors == "raise":
        for text, message in (("raise", "ValueError: "), ("exit", "process"), ("hang", f" {seconds:g} s")):
            with pytest.raises(UserError, match=f"{message}.*row 1 of 2 .*'{text}'"):
                task.grade(["2", text], ["2"] * 2)
    else:
        grades = task.grade(["2", "raise", "exit", "hang", "2"], ["2"] * 5)
        assert [grade.answer for grade in grades] == [True, False, False, False, True]
    user_pool(path).close()


SENT = [number for number in SIGNALS if number != signal.SIGTERM]
SLOW = "import signal, time\ndef judge(text, gold):\n    time.sleep(1.5)\n    return 0.5\n"


def under_signals(work):
    """What work returns while every process that it starts gets each signal, again and again."""
    others = set(psutil.Process().children(recursive=True))
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(work)

        def done():
            for child in set(psutil.Process().children(recursive=True)) - others:
                for number in SENT:
                    with suppress(psutil.Error):
                        child.send_signal(number)
            return result.done()

        until(done, poll=0.05)
        return result.result()


@pytest.mark.slow
@needs_linux
def test_signals_that_ask_a_run_to_end_cost_no_answer_when_all_its_processes_get_them(module):
    """From the first moment of a worker on."""
    slow = module(SLOW)
    assert under_signals(lambda: scored(slow, ["a"], ["b"])) == [0.5]
    (leader,) = (worker.process.pid for worker in user_pool(slow).workers)
    user_pool(slow).close()
    assert not psutil.pid_exists(leader)


def test_a_module_may_print_and_fork_when_it_is_imported(module):
    text = "import os\nprint('0.5\\n' * 100_000)\nif os.fork() == 0: os._exit(0)\n" + JUDGE
    path = module(text)
    assert scored(path, ["a"] * 3, ["b"] * 3) == [1.0] * 3
    user_pool(path).close()


# -- what a reward does to its process --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", MEDDLERS)
def test_whatever_a_reward_does_to_its_process_no_other_score_is_taken_for_its_own(how):
    texts = ["1", "2", ODD, *map(str, range(3, 9))]
    scores = scored(f"{OWN_REWARDS}:meddles", texts, [how] * len(texts))
    right = [good(text, "") for text in texts]
    assert all(x == y or isinstance(x, RewardFailure) for x, y in zip(scores, right, strict=True))

    def others_are_right():
        scores = scored(f"{OWN_REWARDS}:meddles", texts[3:], [how] * 6)
        assert all(x == y or isinstance(x, RewardFailure) for x, y in zip(scores, right[3:], strict=True))
        return scores == right[3:]

    if how in ("exit from a thread", "end the leader"):  # these hit a later row, or none
        for _ in range(2):
            time.sleep(0.2)
            until(others_are_right, poll=0.2)
    else:
        assert [i for i, x in enumerate(scores) if isinstance(x, RewardFailure)] == ([] if MEDDLERS[how][1] else [2])
        assert others_are_right()


# -- what a reward leaves running --------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, threading
from pods_rl.rewards import get_reward, score
name, mark, limit, ending = sys.argv[1:]
if ending == "kill while it works":
    threading.Timer(float(limit) / 2, os.kill, [os.getpid(), signal.SIGKILL]).start()
print(score(get_reward("tests.reliability.own_rewards:" + name), ["1"] * 2, [mark] * 2, float(limit)), flush=True)
"""


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize(
    ("name", "limit", "ending"),
    [
        ("leaves_behind", 60, "return"),
        ("leaves_behind_and_spins", 2, "return"),
        ("leaves_behind_and_spins", 6, "kill while it works"),
    ],
)
def test_nothing_that_a_reward_started_outlives_the_run(name, limit, ending):
    mark = f"left-by-{name}-{ending}-{os.getpid()}".replace(" ", "-")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, mark, str(limit), ending],
        check=False, stdout=subprocess.PIPE, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert done.returncode == (0 if ending == "return" else -signal.SIGKILL)
    assert gone(mark)
    if ending != "kill while it works":
        assert done.stdout.startswith("[RewardFailure(" if "spins" in name else "[0.25, 0.25]")
