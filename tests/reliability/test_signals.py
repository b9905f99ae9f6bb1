"""SIGTERM and SIGINT at any moment: a run ends after its step, says so by its exit code, and goes on exactly."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pods_rl.runs import Run, is_run
from pods_rl.runs.checkpoints import last_good

from .commands import DEADLINE, RECIPE, outcome, server, write_recipe

STEPS, ROLLOUTS = int(RECIPE["max_steps"]), int(RECIPE["num_rollouts"])  # type: ignore[call-overload]
MOMENTS = 20
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
# A reward of the user's: it counts its calls in a file, so that a test can see where a run is.
REWARD = """
import time

def ones(text, gold):
    with open("scored", "ab") as file:
        file.write(b".")
    time.sleep(0.02)
    return text.count("1") / 6
"""


class Moment(NamedTuple):
    """A signal so many seconds after a run has reached a phase of a step."""

    phase: str
    step: int
    delay: float
    number: signal.Signals


def moments() -> list[Moment]:
    """Random ones; each phase comes at least three times."""
    draws = random.Random(2504)
    phases = ["loading", "generation", "reward", "update", "saving", "evaluation"]
    chosen = [phases[i % len(phases)] for i in range(MOMENTS)]
    return [
        Moment(phase, draws.randint(1, STEPS), draws.uniform(0, 0.1), draws.choice([signal.SIGINT, signal.SIGTERM]))
        for phase in chosen
    ]


def prepare(place: Path) -> Path:
    place.mkdir()
    (place / "mine.py").write_text(REWARD)
    write_recipe(place, task_rewards={"mine:ones": 1.0}, eval_prompts=6, eval_batch_size=1, save_total_limit=9)
    return place


def reached(place: Path, moment: Moment) -> Callable[[], bool]:
    """Whether the run in a place has come to a moment's phase."""

    def size(name: str) -> int:
        return (place / name).stat().st_size if (place / name).exists() else 0

    def lines(name: str) -> int:
        return (place / "run" / name).read_bytes().count(b"\n") if (place / "run" / name).exists() else 0

    before = moment.step - 1
    return {
        "loading": lambda: is_run(place / "run"),
        "generation": lambda: lines("evals.jsonl") > 0 and lines("metrics.jsonl") >= before,
        "reward": lambda: size("scored") > before * ROLLOUTS,
        "update": lambda: size("scored") >= moment.step * ROLLOUTS,
        "saving": lambda: (place / f"run/checkpoints/.saving/checkpoint-{moment.step}").exists(),
        # the first one, or the last
        "evaluation": lambda: (
            (place / "run/environment.json").exists()
            if moment.step % 2
            else (place / f"run/checkpoints/checkpoint-{STEPS}").exists()
        ),
    }[moment.phase]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    place = prepare(tmp_path_factory.mktemp("signals") / "reference")
    code, words = server().run("train", "--config", "r.yaml", "--output", "run", cwd=place)
    assert code == 0, words
    return outcome(place / "run"), evaluations(place)


def evaluations(place: Path) -> list[tuple[object, ...]]:
    return [(row["step"], row["accuracy"], row["mean_completion_tokens"]) for row in Run(place / "run").evals]


def stop_and_go_on(place: Path, moment: Moment, reference: tuple[object, object]) -> float:
    """Stop a run at a moment, check what it left, go on with it; the seconds it took to end."""
    prepare(place)
    command = server().start("train", "--config", "r.yaml", "--output", "run", cwd=place)
    assert command.until(reached(place, moment)), command.log.read_text()
    time.sleep(moment.delay)
    steps = len(Run(place / "run").metrics)
    since = time.monotonic()
    command.kill(moment.number)
    code = command.wait()
    seconds = time.monotonic() - since
    run = Run(place / "run")
    words = command.log.read_text()
    assert "Traceback" not in words, words
    if run.state == "finished":  # it had nothing left to do but to write that
        assert code == 0
    else:
        assert code == CODES[moment.number], (moment, words)
        assert (run.state, run.status["reason"]) == ("stopped", f"interrupted by {moment.number.name}")
        assert len(run.metrics) <= steps + 1
        good, passed = last_good(place / "run/checkpoints")
        assert passed == []
        assert (good.name if good else None) == (f"checkpoint-{len(run.metrics)}" if run.metrics else None)
    code, words = server().run("train", "--output", "run", "--resume", cwd=place, log="resumed.log")
    assert code == 0, words
    assert (outcome(place / "run"), evaluations(place)) == reference, moment
    return seconds


def test_a_stop_in_an_update_and_one_in_an_evaluation(tmp_path, reference):
    for moment in (
        Moment("update", 2, 0.01, signal.SIGTERM),
        Moment("evaluation", 2, 0.0, signal.SIGINT),
    ):
        stop_and_go_on(tmp_path / moment.phase, moment, reference)


@pytest.mark.reliability
@pytest.mark.timeout(3600)
def test_stops_at_20_random_moments(tmp_path, reference):
    phases: Counter[str] = Counter()
    slowest = 0.0
    for number, moment in enumerate(moments()):
        slowest = max(slowest, stop_and_go_on(tmp_path / str(number), moment, reference))
        phases[moment.phase] += 1
    print(
        f"\nsignals: {sum(phases.values())} of {MOMENTS} resume exactly ({dict(phases)}); slowest end {slowest:.1f} s"
    )


@pytest.mark.reliability
@pytest.mark.timeout(1800)
def test_a_stop_of_several_processes(tmp_path):
    """The signal goes to `pods train`, which has started a launcher, which has started the two that train."""
    place = prepare(tmp_path / "two")
    words = ["train", "--config", "r.yaml", "--output", "run", "--num_processes", "2"]
    words += ["--per_device_train_batch_size", "1"]
    process = pods(place, *words)
    metrics = place / "run/metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143, errors
    assert "Traceback" not in errors
    run = Run(place / "run")
    assert (run.state, run.status["reason"]) == ("stopped", "interrupted by SIGTERM")
    good, passed = last_good(place / "run/checkpoints")
    assert good is not None
    assert (good.name, passed) == (f"checkpoint-{len(run.metrics)}", [])
    again = pods(place, *words, "--resume")
    _, errors = again.communicate(timeout=DEADLINE)
    assert again.returncode == 0, errors
    assert [row["step"] for row in Run(place / "run").metrics] == list(range(1, STEPS + 1))
    print("\nSIGTERM to 2 processes: stopped with a checkpoint, gone on to the end")


def pods(place: Path, *words: str) -> subprocess.Popen[str]:
    """The real command."""
    command = [sys.executable, "-m", "pods_rl", *words]
    return subprocess.Popen(command, cwd=place, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.reliability
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", CODES)
def test_a_stop_while_torch_is_imported(tmp_path, number):
    """Before there is a run to speak of: the real command, at three moments of its imports."""
    for delay in (0.2, 1.0, 3.0):
        place = prepare(tmp_path / str(delay))
        process = pods(place, "train", "--config", "r.yaml", "--output", "run")
        while not (place / "run/.lock").exists():
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(delay)
        process.send_signal(number)
        _, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode == CODES[number], errors
        assert "Traceback" not in errors
    print(f"\n{number.name} while it imports: 3 of 3 end with exit code {CODES[number]}")
