"""Signals at any moment: a run ends after its step, says so by its exit code, and goes on exactly.

A run whose directory goes away ends with one line, and one whose display goes away goes on.
"""

import os
import pty
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pods_rl.errors import Interrupted
from pods_rl.runs import Run, is_run
from pods_rl.runs.checkpoints import last_good

from .commands import RECIPE, differences, outcome, server, write_recipe

STEPS, ROLLOUTS = int(RECIPE["max_steps"]), int(RECIPE["num_rollouts"])  # type: ignore[call-overload]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGUSR1: 138}
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
        # or after it, where a busy machine shows nothing of the saving
        "saving": lambda: any((place / "run/checkpoints").glob(f"**/checkpoint-{moment.step}")),
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
    return outcome(place / "run")


def stop_and_go_on(place: Path, moment: Moment, reference: dict[str, object]) -> None:
    """Stop a run at a moment, check what it left, and go on with it."""
    prepare(place)
    command = server().start("train", "--config", "r.yaml", "--output", "run", cwd=place)
    assert command.until(reached(place, moment)), command.log.read_text()
    time.sleep(moment.delay)
    command.kill(signal.SIGSTOP)  # no step is made between the count and the signal
    steps = len(Run(place / "run").metrics)
    command.kill(moment.number)
    command.kill(signal.SIGCONT)
    code = command.wait()
    run = Run(place / "run")
    words = command.log.read_text()
    assert "Traceback" not in words, words
    if run.state == "finished":  # it had nothing left to do but to write that
        assert code == 0
    else:
        assert code == CODES[moment.number], (moment, words)
        assert (run.state, run.status["reason"]) == ("stopped", str(Interrupted(moment.number)))
        assert len(run.metrics) <= steps + 1
        good, passed = last_good(place / "run/checkpoints")
        assert passed == []
        assert (good.name if good else None) == (f"checkpoint-{len(run.metrics)}" if run.metrics else None)
    code, words = server().run("train", "--output", "run", "--resume", cwd=place, log="resumed.log")
    assert code == 0, words
    assert differences(reference, outcome(place / "run")) == [], moment


def test_a_stop_in_an_update_and_one_in_an_evaluation(tmp_path, reference):
    for moment in (
        Moment("update", 2, 0.01, signal.SIGUSR1),
        Moment("evaluation", 2, 0.0, signal.SIGINT),
    ):
        stop_and_go_on(tmp_path / moment.phase, moment, reference)


@pytest.mark.reliability
@pytest.mark.timeout(3600)
def test_stops_at_random_moments(tmp_path, reference):
    """Each phase comes twice."""
    draws = random.Random(2504)
    phases = ["loading", "generation", "reward", "update", "saving", "evaluation"]
    for number in range(2 * len(phases)):
        phase = phases[number % len(phases)]
        moment = Moment(phase, draws.randint(1, STEPS), draws.uniform(0, 0.1), draws.choice([*CODES]))
        stop_and_go_on(tmp_path / str(number), moment, reference)


# A module of the user's that sends SIGTERM just before and just after the run writes that it has finished.
RACE = """
import os, signal
from pods_rl.runs import RunWriter
write_status = RunWriter.write_status

def racing(self, state, **rest):
    if state == "finished":
        os.kill(os.getpid(), signal.SIGTERM)
    write_status(self, state, **rest)
    if state == "finished":
        os.kill(os.getpid(), signal.SIGTERM)

RunWriter.write_status = racing

def ones(text, gold):
    return text.count("1") / 6
"""


def test_signals_while_the_end_is_written_leave_a_finished_run(tmp_path):
    (tmp_path / "mine.py").write_text(RACE)
    write_recipe(tmp_path, task_rewards={"mine:ones": 1.0}, reward_seconds=None)
    code, words = server().run("train", "--config", "r.yaml", "--output", "run", cwd=tmp_path)
    assert (code, Run(tmp_path / "run").state) == (0, "finished"), words


def test_a_run_whose_directory_is_moved_ends_with_one_line(tmp_path):
    write_recipe(tmp_path, max_steps=100_000, save_steps=1000)
    run = tmp_path / "run"
    command = server().start("train", "--config", "r.yaml", "--output", "run", cwd=tmp_path)
    assert command.until(lambda: len(Run(run).metrics) > 1), command.log.read_text()
    run.rename(tmp_path / "elsewhere")
    assert command.wait() == 2
    printed = command.log.read_text()
    assert [line for line in printed.splitlines() if "Error" in line] == [printed.splitlines()[-1]]
    assert "Traceback" not in printed
    assert not run.exists()


# -- the display ------------------------------------------------------------------------------------------------------


class Display:
    """A place to print to, which goes away."""

    def __init__(self, kind: str, place: Path) -> None:
        self.end, self.terminal = -1, -1
        self.path = "/dev/full"
        if kind == "reader":
            self.path = str(place / "fifo")
            os.mkfifo(self.path)
            self.end = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        if kind == "terminal":
            self.end, self.terminal = pty.openpty()
            self.path = os.ttyname(self.terminal)

    def go_away(self) -> None:
        for number in (self.end, self.terminal):
            if number >= 0:
                os.close(number)


def test_a_run_outlives_the_reader_of_its_display(tmp_path):
    outlive(tmp_path, "reader", ("stdout", "stderr"), rewards=(None,))


@pytest.mark.reliability
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("streams", [("stdout",), ("stderr",), ("stdout", "stderr")])
@pytest.mark.parametrize("kind", ["full disk", "reader", "terminal"])
def test_a_run_outlives_its_display(tmp_path, kind, streams):
    outlive(tmp_path, kind, streams, rewards=(None, 10.0))


def outlive(tmp_path: Path, kind: str, streams: tuple[str, ...], rewards: tuple[float | None, ...]) -> None:
    """A reward prints as well, in the training process (None) and in a process of its own."""
    for seconds in rewards:
        place = tmp_path / str(seconds)
        place.mkdir()
        write_recipe(place, task_rewards={"mine:loud": 1.0}, reward_seconds=seconds)
        loud = "    print('scored', flush=True)\n    print('scored', file=sys.stderr, flush=True)\n"
        (place / "mine.py").write_text(f"import sys\n\ndef loud(text, gold):\n{loud}    return len(text) / 9\n")
        display = Display(kind, place)
        words = ["train", "--config", "r.yaml", "--output", "run"]
        command = server().start(*words, cwd=place, **dict.fromkeys(streams, display.path))
        assert command.until(lambda at=place: is_run(at / "run")), command.log.read_text()
        display.go_away()
        assert command.wait() == 0, command.log.read_text()
        run = Run(place / "run")
        assert run.state == "finished"
        assert last_good(run.path / "checkpoints")[0].name == f"checkpoint-{STEPS}"
