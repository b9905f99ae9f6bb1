"""What `pods compare` shows: a line for each event and evaluation, and on a terminal how many runs are done."""

import io

import pytest
from rich.console import Console

from pods_rl.cli.board import Board
from pods_rl.experiment import Event, build_experiment
from pods_rl.recipe import Origin
from pods_rl.runs import RunWriter

from .. import until


def event(kind, plan, number, root, reason=None):
    return Event(kind, plan[number], root / plan[number].path, number + 1, len(plan), reason)


@pytest.mark.parametrize("terminal", [True, False])
def test_each_event_and_evaluation_is_a_line(tmp_path, monkeypatch, terminal):
    """Of thirteen arms with two seeds. The watching thread prints an evaluation without an event."""
    base = {"num_generations": 8, "max_seconds": 100}
    arms = {f"arm-{number}": {} for number in range(13)}
    plan = build_experiment({"arms": arms, "base": base, "seeds": 2}, Origin("e")).plan()
    monkeypatch.setattr("pods_rl.cli.board._EVERY", 0.01)
    options = {"color_system": None, "width": 80, "soft_wrap": True, "_environ": {"TERM": "xterm"}}
    out = Console(file=io.StringIO(), force_terminal=terminal, **options)
    with Board(plan, out=out) as board:
        board(event("started", plan, 0, tmp_path))
        with RunWriter(tmp_path / plan[0].path, resume=True) as writer:
            writer.write_status("running", step=7, seconds=1.0, elapsed=2.0)
            writer.append_eval({"step": 7, "seconds": 1.0, "accuracy": 0.5})
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
