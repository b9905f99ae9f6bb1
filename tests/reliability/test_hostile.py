"""Hostile text is text: nothing of it runs in a grader or is live in a report, nothing of it steers a terminal."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from pods_rl import cli
from pods_rl.engines import PHASES
from pods_rl.errors import UserError
from pods_rl.report import build_report
from pods_rl.rewards import REWARDS
from pods_rl.runs import RunWriter
from pods_rl.training.display import RunDisplay

from .payloads import CODE, fuzzed, scripts

# ----------------------------------------------------------------------------- code, in every grader

FORMS = ("{}", "<think>x</think><answer>{}</answer>", "\\boxed{{{}}}", "#### {}", "<answer>\\boxed{{{}}}</answer>")
GOLDS = ("18", "x^2+1", r"\{1, 2\}", "B", "2H2 + O2 = 2H2O", "6*(5-1)", "1 2 3")


def pairs_of(payload: str) -> list[tuple[str, str]]:
    """A payload as the completion, as its final answer in each form that an answer has, and as the gold answer."""
    answers = [(form.format(payload), gold) for form in FORMS for gold in GOLDS]
    gold_answers = [(f"<answer>{answer}</answer>", payload) for answer in GOLDS]
    return [*answers, *gold_answers, (f"<answer>{payload} </answer>", payload)]


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.reliability)])
def test_no_code_runs_in_a_grader(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload that ran would make a file. What a process of the verifier may do is in the next test."""
    monkeypatch.chdir(tmp_path)
    pairs = [pair for payload in CODE[::every] for pair in pairs_of(payload)]
    texts = [text for text, _ in pairs]
    golds = [gold for _, gold in pairs]
    for reward in REWARDS.values():
        if reward.reads == "text":
            reward.batch(texts, golds)
    assert list(tmp_path.iterdir()) == []


BARRED = """
import os, socket, subprocess, sympy
from pods_rl.rewards.verifier import bar_process
bar_process()
passed = []
for name, act in {
    "sympify": lambda: sympy.sympify("__import__('os').getpid()"),
    "attribute": lambda: sympy.sympify("x.__class__"),
    "system": lambda: os.system("touch CANARY"),
    "process": lambda: subprocess.run(["true"]),
    "socket": lambda: socket.create_connection(("127.0.0.1", 9)),
    "write": lambda: open("CANARY", "w"),
    "remove": lambda: os.remove("CANARY"),
    "fork": os.fork,
}.items():
    try:
        act()
        passed.append(name)
    except PermissionError:
        pass
assert sympy.sympify("0.25") == 0.25 and sympy.Number("12") == 12
print(passed)
"""


def test_a_verifier_process_is_barred(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", BARRED], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------- scripts, in a report (tests/report shows its page)


def name_of(payload: str, place: int) -> str:
    """A directory's name that is a payload, as far as a file system takes it."""
    return f"{place} {payload}".replace("/", "∕").replace("\x00", "")[:200].encode()[:240].decode(errors="ignore")


def write_run(path: Path, seed: int, payload: str) -> None:
    """A run of 6 steps, 3 evaluations and 2 ledger files, whose texts are all a payload."""
    places = range(8)  # of a prompt's rollouts
    rewards = [place / 8 for place in places]
    with RunWriter(path) as writer:
        writer.write_config(f"seed: {seed}\nnum_generations: 8\nnum_rollouts: 8\n")
        writer.write_environment({"device": payload, "versions": {payload: payload}})
        for step in range(1, 7):
            row = {"step": step, "seconds": float(step), "elapsed": step * 1.1, "loss": 0.1, "reward": 0.5}
            writer.append_metrics(row | {f"pods/seconds/{phase}": 0.2 for phase in PHASES})
            if step not in (1, 6):
                continue
            texts = {
                "prompt": [payload] * 8,
                "completion": [f"{payload} {place}" for place in places],
                "answer": [payload] * 8,
            }
            numbers = {
                "step": [step] * 8,
                "group": [0] * 8,
                "rollout": list(places),
                "reward": rewards,
                f"reward/{payload}": rewards,
                "selected": [True] * 8,
                "advantage": [reward - 0.5 for reward in rewards],
                "completion_tokens": [20] * 8,
            }
            writer.write_rollouts(step, texts | numbers)
        for step in (0, 3, 6):
            row = {"step": step, "due": float(step), "seconds": step + 0.1, "elapsed": step + 0.2}
            writer.append_eval(row | {"accuracy": 0.3 + 0.05 * step + 0.01 * seed})
        writer.write_status("finished", reason=payload, step=6, seconds=6.0, elapsed=7.0)


def test_nothing_of_a_run_is_live_in_the_markdown_of_its_report(tmp_path: Path) -> None:
    """Each payload is a prompt, completion, answer, arm, run, reward, state, reason and device."""
    root = tmp_path / "<img src=x onerror=alert(1)> $\\frac{$"
    for place, payload in enumerate(scripts("https://example.invalid")):
        path = root / name_of(payload, place) / f"seed-{place} {name_of(payload, place)[:60]}"
        write_run(path, place, payload)
        path.joinpath("status.json").write_text(json.dumps({"state": payload, "reason": payload, "step": payload}))
    report = build_report([root], tmp_path / "out", baseline="none")
    markdown = (report.folder / "report.md").read_text(encoding="utf-8")
    assert "<" not in markdown
    assert not re.search(r"(?<!\\)\]\(", markdown)
    assert not harmful(markdown)


# --------------------------------------------------------------------------- escapes, on a terminal

# rich's own, for a line that is redrawn, and its colours; none of ours has the 66 of the payloads
RICH = re.compile(r"\x1b\[(?!66)[0-9;?]*[A-Za-z]|(?<![^\n])\r|\r(?=\x1b\[[12])")
HARMFUL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmful(printed: str) -> list[str]:
    """Each character that would steer a terminal, with what stands around it."""
    left = RICH.sub("", printed).replace("\r\n", "\n")
    return [left[max(0, found.start() - 20) : found.end() + 20] for found in HARMFUL.finditer(left)]


def by_progress(texts: Sequence[str]) -> str:
    printed = io.StringIO()
    out = Console(file=printed, force_terminal=True, color_system="truecolor", width=200, soft_wrap=True)
    row = {"step": 1, "seconds": 1.0, "reward": 0.5, "accuracy": 0.5, "format_accuracy": 1.0}
    for text in texts:
        with RunDisplay(text, out=out) as progress:
            progress.say(text)
            progress.step(row)
            progress.evaluation(row)
    return printed.getvalue()


def by_errors(texts: Sequence[str]) -> str:
    """What `pods` says when a command ends in an error, ours, typer's or one that nobody foresaw."""
    said = io.StringIO()
    for place, text in enumerate(texts):
        error = (UserError(text), ValueError(text), RuntimeError(f"{text} in row 1"))[place % 3]

        def fail(error: Exception = error, **_: object) -> None:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pods_rl.cli.commands.app", fail)
            patch.setattr(sys, "stderr", said)
            with pytest.raises(SystemExit):
                cli.main()
    return said.getvalue()


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.reliability)])
@pytest.mark.parametrize("sink", [by_progress, by_errors])
def test_no_escape_reaches_a_terminal(sink: Callable[[Sequence[str]], str], count: int) -> None:
    printed = sink(fuzzed(count))
    assert harmful(printed) == []
    assert len(printed) > count
