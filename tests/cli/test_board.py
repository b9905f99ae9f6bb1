"""What `pods compare` shows: a table that fits the terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from pods_rl.cli.board import Board
from pods_rl.experiment import Event, build_experiment
from pods_rl.recipe import Origin
from pods_rl.runs import RunWriter

from .. import until

BASE = {"num_generations": 8, "max_seconds": 100}


@pytest.fixture
def plan():
    """Thirteen arms, two seeds: 26 runs."""
    arms = {f"an-arm-with-a-rather-long-name-{number}": {} for number in range(13)}
    return build_experiment({"arms": arms, "base": BASE, "seeds": 2}, Origin("e")).plan()


def screen(**options) -> Console:
    options = {"force_terminal": True, "width": 80, "height": 12, **options}
    return Console(file=io.StringIO(), color_system=None, _environ={"TERM": options.pop("term", "xterm")}, **options)


def event(kind, plan, number, root, reason=None):
    return Event(kind, plan[number], root / plan[number].path, number + 1, len(plan), reason)


def progress(path, step, seconds, elapsed, accuracy):
    with RunWriter(path) as writer:
        writer.write_status("running", step=step, seconds=seconds, elapsed=elapsed)
        writer.append_metrics({"step": step, "seconds": seconds, "elapsed": elapsed})
        writer.append_eval({"step": step, "seconds": seconds, "accuracy": accuracy})


def test_the_table_fits_the_terminal_and_shows_what_matters(plan, tmp_path):
    out = screen()
    board = Board(plan, parallel=2, out=out)
    for number in range(20):
        board(event("started", plan, number, tmp_path))
        board(event("failed" if number == 3 else "finished", plan, number, tmp_path, "why"))
    progress(tmp_path / plan[20].path, 120, 40.0, 80.0, 0.625)
    board(event("started", plan, 20, tmp_path))
    board(event("started", plan, 21, tmp_path))
    with out.capture() as shown:
        out.print(board.table())
    lines = shown.get().rstrip().split("\n")
    assert len(lines) < 12
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert lines[0].split() == ["arm", "seed", "state", "step", "seconds", "accuracy", "left"]
    assert rows[plan[20].arm][1:] == ["training", "120", "40", "0.625", "60", "s"]
    assert rows[plan[21].arm][1:] == ["loading", "100", "s"]
    assert rows[plan[3].arm][:2] == ["1", "failed"]
    # 60 + 100 seconds of the two in progress, 4 x 100 planned; twice that by the wall clock, two at a time
    assert lines[-1] == "20 of 26 runs done, 1 failed, about 9 min left"
    assert "more runs" in lines[-2]


def test_a_narrow_terminal_cuts_names_not_numbers(plan, tmp_path):
    out = screen(width=56)
    board = Board(plan, out=out)
    progress(tmp_path / plan[0].path, 7, 1.0, 2.0, 0.5)
    board(event("started", plan, 0, tmp_path))
    with out.capture() as shown:
        out.print(board.table())
    line = next(line for line in shown.get().split("\n") if "training" in line)
    assert len(line) <= 56
    assert line.split()[1:] == ["1", "training", "7", "1", "0.500", "99", "s"]


@pytest.mark.parametrize("options", [{"force_terminal": False}, {"term": "dumb"}])
def test_without_a_terminal_each_event_and_evaluation_is_a_line(plan, tmp_path, options):
    out = screen(soft_wrap=True, **options)  # as terminal.console gives it
    with Board(plan, out=out) as board:
        board(event("started", plan, 0, tmp_path))
        progress(tmp_path / plan[0].path, 7, 1.0, 2.0, 0.5)
        board(event("finished", plan, 0, tmp_path))
        board(event("skipped", plan, 1, tmp_path))
        board(event("failed", plan, 2, tmp_path, "[red]bad\x1b[2J"))
    text = out.file.getvalue()
    assert "\x1b" not in text
    lines = text.rstrip().split("\n")
    arm = plan[0].arm
    assert [line.split("  ")[0] for line in lines] == [
        f"[1/26] {arm} seed 1 started",
        f"{arm} seed 1",
        f"[1/26] {arm} seed 1 finished",
        f"[2/26] {plan[1].arm} seed 1 skipped",
        f"[3/26] {plan[2].arm} seed 1 failed: [red]bad\\x1b[2J",
    ]
    assert lines[1].endswith("1 s  step 7  accuracy 0.500")
    assert [failure.reason for failure in board.failures] == ["[red]bad\x1b[2J"]


def test_evaluations_come_as_they_are_made(plan, tmp_path, monkeypatch):
    """The watching thread prints them without an event."""
    monkeypatch.setattr("pods_rl.cli.board._EVERY", 0.01)
    seen = []
    out = screen(force_terminal=False)
    monkeypatch.setattr(out, "print", lambda text: seen.append(str(text)))
    with Board(plan, out=out) as board:
        board(event("started", plan, 0, tmp_path))
        for step, accuracy in ((1, 0.25), (2, 0.75)):
            with RunWriter(tmp_path / plan[0].path, resume=True) as writer:
                writer.append_eval({"step": step, "seconds": step, "accuracy": accuracy})
            until(lambda said=f"accuracy {accuracy:.3f}": any(said in line for line in seen))
    assert [line.rsplit(None, 1)[1] for line in seen[1:]] == ["0.250", "0.750"]


def test_a_live_table_is_drawn_and_failures_stay_above_it(plan, tmp_path):
    out = screen()
    with Board(plan, out=out) as board:
        board(event("started", plan, 0, tmp_path))
        board(event("failed", plan, 0, tmp_path, "no memory"))
    text = out.file.getvalue()
    assert "[1/26]" in text
    assert "failed: no memory" in text
    assert text.count("runs done") >= 2
    assert "started" not in text


@pytest.mark.parametrize("value", [[1], {"a": 1}, True, "x", None, 1e999, 10**400])
def test_a_damaged_run_does_not_break_the_board(plan, tmp_path, value):
    out = screen(force_terminal=False)
    with Board(plan, out=out) as board:
        board(event("started", plan, 0, tmp_path))
        path = tmp_path / plan[0].path
        path.mkdir(parents=True)
        row = {"state": "running", "step": value, "seconds": value, "elapsed": value}
        (path / "status.json").write_text(json.dumps(row))
        (path / "evals.jsonl").write_text(json.dumps(row | {"accuracy": 0.5}) + "\n")
        board(event("finished", plan, 0, tmp_path))
        with out.capture():
            out.print(board.table())
    assert "accuracy 0.500" in out.file.getvalue()
