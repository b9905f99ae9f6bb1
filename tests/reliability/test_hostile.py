"""Hostile text is text: nothing of it runs in a grader, nothing of it steers a terminal. Reports: tests/report."""

import io
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from pods_rl import cli
from pods_rl.errors import UserError
from pods_rl.rewards import REWARDS
from pods_rl.training.display import RunDisplay

from .payloads import CODE, fuzzed, harmful

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


# --------------------------------------------------------------------------- escapes, on a terminal


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
