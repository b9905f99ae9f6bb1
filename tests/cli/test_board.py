"""What `pods compare` shows: a line for each event and evaluation, and on a terminal how much is left."""

import io

import pytest
from rich.console import Console

from pods_rl.cli.board import Board
from pods_rl.experiment import Event, build_experiment
from pods_rl.recipe import Origin
from pods_rl.runs import RunWriter

from .. import until


@pytest.fixture
def plan():
    """Thirteen arms, two seeds: 26 runs."""
    base = {"num_generations": 8, "max_seconds": 100}
    arms = {f"arm-{number}": {} for number in range(13)}
    return build_experiment({"arms": arms, "base": base, "seeds": 2}, Origin("e")).plan()


def screen(terminal: bool) -> Console:
    options = {"color_system": None, "width": 80, "soft_wrap": True, "_environ": {"TERM": "xterm"}}
    return Console(file=io.StringIO(), force_terminal=terminal, **options)


def event(kind, plan, number, root, reason=None):
    return Event(kind, plan[number], root / plan[number].path, number + 1, len(plan), reason)


def progress(path, step, seconds, elapsed, accuracy):
    with RunWriter(path, resume=True) as writer:
        writer.write_status("running", step=step, seconds=seconds, elapsed=elapsed)
        writer.append_eval({"step": step, "seconds": seconds, "accuracy": accuracy})


def test_the_line_of_a_terminal_has_the_time_left_and_the_runs_in_progress(plan, tmp_path):
    board, seconds = Board(plan, out=screen(terminal=False)), iter([0.0, 9.99])
    board.get_time = lambda: next(seconds)
    for number in range(20):
        board(event("started", plan, number, tmp_path))
        board(event("failed" if number == 3 else "finished", plan, number, tmp_path, "why"))
    for number in (20, 21):
        board(event("started", plan, number, tmp_path))
    loading = "20 of 26 runs done, 1 failed\nnow: arm-7 seed 2 loading, arm-8 seed 2 loading"
    assert board.summary() == loading
    progress(tmp_path / plan[20].path, 120, 50.0, 80.0, 0.625)
    board._read(event("started", plan, 20, tmp_path))
    # half a run in 10 seconds, of 5.5
    assert board.summary() == (
        "20 of 26 runs done, 1 min 50 s left, 1 failed\nnow: arm-7 seed 2 step 120 (50 %), arm-8 seed 2 loading"
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_each_event_and_evaluation_is_a_line(plan, tmp_path, monkeypatch, terminal):
    """The watching thread prints an evaluation without an event."""
    monkeypatch.setattr("pods_rl.cli.board._EVERY", 0.01)
    out = screen(terminal)
    with Board(plan, out=out) as board:
        board(event("started", plan, 0, tmp_path))
        progress(tmp_path / plan[0].path, 7, 1.0, 2.0, 0.5)
        until(lambda: "accuracy 50.0 %" in out.file.getvalue())
        board(event("finished", plan, 0, tmp_path))
        board(event("skipped", plan, 1, tmp_path))
        board(event("failed", plan, 2, tmp_path, "[red]bad\x1b[2J"))
    assert [failure.reason for failure in board.failures] == ["[red]bad\x1b[2J"]
    text = out.file.getvalue()
    lines = [
        "[1/26] arm-0 seed 1 started  ", "arm-0 seed 1                  1 s  step 7  accuracy 50.0 %",
        "[1/26] arm-0 seed 1 finished  ", "[2/26] arm-1 seed 1 skipped  ",
        r"[3/26] arm-2 seed 1 failed: [red]bad\x1b[2J",
    ]  # fmt: skip
    assert [text.count(line) for line in lines] == [1] * 5
    assert sorted(lines, key=text.index) == lines
    assert ("0 of 26" in text) == ("\x1b" in text) == terminal
