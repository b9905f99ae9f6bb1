"""What a training run shows: how far it is, what it does, and at the end where it lies and how to go on."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from pods_rl.runs import RunWriter
from pods_rl.runs.checkpoints import publish, staging
from pods_rl.training.display import RunDisplay
from pods_rl.training.resume import last_lines

ROW = {
    "step": 120, "seconds": 40.0, "reward": 0.953, "pods/seconds/rollout": 0.77, "pods/seconds/reward": 0.02,
    "pods/seconds/selection": 0.004, "pods/seconds/update": 0.2,
}  # fmt: skip


def screen(width: int, **options: object) -> Console:
    terminal = {"force_terminal": True, "color_system": None, "_environ": {"TERM": "xterm"}} | options
    return Console(file=io.StringIO(), width=width, height=24, **terminal)  # type: ignore[arg-type]


SECONDS = "0.994 s per step: 77 % rollouts, 2 % rewards, 20 % update"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_terminal_shows_how_far_a_run_is_and_cuts_nothing(width: int) -> None:
    out = screen(width)
    with RunDisplay("run", out=out, max_steps=500) as progress:
        progress.begin("loading the task [red]\x1b[2J")
        progress.step(ROW)
        shown = out.render_lines(progress.make_tasks_table(progress.tasks))
    lines = ["".join(part.text for part in parts).rstrip() for parts in shown]
    assert "loading the task [red]\\x1b[2J" in out.file.getvalue() or width < 80  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    words = " ".join(" ".join(lines).split())
    assert f"━━━┄┄┄┄┄┄┄┄┄┄┄ 24 % step 120 of 500, reward 0.953 {SECONDS}" in words
    if width >= 80:
        assert len(lines) == 2


@pytest.mark.parametrize(
    ("budget", "left"),
    [
        ({"max_steps": 500, "max_seconds": 64.0}, "62 %, step 120 of 500, 24 s left"),
        ({"max_steps": 130, "max_seconds": 3600.0}, "92 %, step 120 of 130, 4 s left"),
    ],
)
def test_the_time_left_is_of_the_budget_that_ends_first(budget: dict, left: str) -> None:
    out, clock = screen(200, force_terminal=False), iter([0.0, 20.0])
    progress = RunDisplay("run", out=out, every=0.0, **budget)
    progress.get_time = lambda: next(clock)
    for row in (ROW | {"step": 60, "seconds": 20.0}, ROW):
        progress.step(row)
    first, _, second, _ = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "left" not in first
    assert left in second


def write(run: Path, state: str, *, steps: int = 3, saved: bool = True, final: bool = False, evals: int = 1) -> Path:
    with RunWriter(run) as writer:
        writer.write_config("max_seconds: 60\n")
        writer.write_status(state, step=steps)
        for step in range(1, steps + 1):
            writer.append_metrics({"step": step})
        for step, accuracy in [(0, 0.168), (steps, 0.281)][:evals]:
            writer.append_eval({"step": step, "accuracy": accuracy, "prompts": 256})
    for name in [f"checkpoint-{steps}"] * saved + ["final"] * final:
        target = run / "checkpoints" / name
        staging(target).mkdir(parents=True)
        (staging(target) / "model.bin").write_bytes(b"x")
        publish(target, {"step": steps})
    return run


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"state": "finished", "final": True, "saved": False}, "run result report"),
        ({"state": "finished", "final": True}, "run result report"),
        ({"state": "finished", "final": True, "evals": 0}, "run evaluate"),
        ({"state": "failed"}, "run result resume report"),
        ({"state": "failed", "steps": 0, "saved": False}, ""),
        ({"state": "stopped", "steps": 0, "saved": False, "evals": 0}, "run resume"),
        ({"state": "stopped", "saved": False, "evals": 0}, "run"),  # --resume would be refused
    ],
)
def test_only_what_works_is_offered(tmp_path: Path, given: dict, names: str) -> None:
    lines = last_lines(write(tmp_path / "run", **given))
    assert [line.split()[0] for line in lines] == names.split()
    assert all(len(line.replace(str(tmp_path), "runs")) <= 80 for line in lines)
