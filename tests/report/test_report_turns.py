"""Rollouts of several turns on the page: order, folding, rewards by turn, size, hostile text; calls of tools by run."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import PAYLOADS, unrendered, write_run
from markupsafe import escape
from test_report_browser import drive
from test_report_ledger import Elements
from tests.chromium import CHROMIUM, MISSING

from pods_rl.report import ReportFiles, build_report
from pods_rl.report.arms import arms_from_runs
from pods_rl.report.ledger import TEXT_LIMIT, Group, ledger_page
from pods_rl.report.turns import MOST_TURNS, Conversation, read_conversation
from pods_rl.runs import to_json, write_parquet

Message = dict[str, Any]


def said(content: str, *calls: tuple[str, dict[str, Any]]) -> Message:
    made = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {})


def result(name: str, content: str) -> Message:
    return {"role": "tool", "name": name, "content": content}


SHORT = [said("Let me see.", ("add", {"a": 1, "b": [2]}), ("now", {})), result("add", "3"), said("It is 3.")]
LONG = [said("", ("read", {"page": "x"})), result("read", "line\n" * 900), said("word " * 70)]


def write_turns(path: Path, rollouts: list[tuple[list[Message] | None, list[float] | None]], **columns: Any) -> None:
    count = len(rollouts)
    write_run(path, path.parent.name, end=30)
    made = {
        "step": [1] * count,
        "group": [0] * count,
        "rollout": list(range(count)),
        "prompt": ["What is 1 + 2?"] * count,
        "completion": [f"text {i}" for i in range(count)],
        "reward": [float(count - i) for i in range(count)],
        "selected": [True] * count,
        "advantage": [0.0] * count,
        "messages": [messages if messages is None else to_json(messages) for messages, _ in rollouts],
        "turn_rewards": [rewards for _, rewards in rollouts],
    }
    write_parquet(path / "rollouts" / "step-000001.parquet", made | columns)


def shown_group(root: Path, **limits: int) -> Group:
    page = ledger_page(arms_from_runs([root], "accuracy"), **limits)
    assert page.unreadable == ()
    (group,) = page.groups
    return group


def rollouts_of(report: ReportFiles) -> list[str]:
    return report.html.read_text().split('<details class="r')[1:]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    root = tmp_path_factory.mktemp("turns") / "runs"
    write_turns(root / "pods" / "seed-0", [(SHORT, [0.25, 1.0]), (None, None), (LONG, [0.5, 0.5, 2.0])])
    with unrendered():
        return build_report(root, resamples=5)


# ------------------------------------------------------------------------------------------ what is shown


def test_turns_lie_one_below_the_other_with_their_rewards(report: ReportFiles) -> None:
    short, text, long = rollouts_of(report)
    turns = re.findall(r"<li><h4>(.*?)</h4>(.*?)</li>", short, re.DOTALL)
    assert turns == [
        (
            "assistant <span>reward 0.250</span>",
            '<pre>Let me see.</pre><pre class="call">add(a=1, b=[2])\nnow()</pre>',
        ),
        ("tool add", "<pre>3</pre>"),
        ("assistant <span>reward 1.000</span>", "<pre>It is 3.</pre>"),
    ]
    assert '<pre class="one">It is 3.</pre></summary>' in short
    assert "rollout 0 · 2 turns · 2 tool calls</p>" in short
    assert "<pre>text 1</pre>" in text
    assert "<ol>" not in text
    assert "2 turns · 1 tool call · reward of turn 3: 2.000</p>" in long


def test_long_turns_are_folded(report: ReportFiles) -> None:
    call, page, words = re.findall(r"<li><h4>(.*?)</li>", rollouts_of(report)[2], re.DOTALL)
    assert "<details>" not in call
    assert "<details><summary><pre>line\nline\n" in page
    assert f"({900 * 5 - 1000} more characters)</p></summary></details>" in page
    assert f"<details><summary><pre>{'word ' * 70}</pre></summary></details>" in words


def test_thoughts_come_before_the_text() -> None:
    turn = {"role": "assistant", "reasoning_content": "hm", "content": "3", "tool_calls": []}
    assert [(turn.text, turn.calls) for turn in read_conversation(json.dumps([turn]), None).turns] == [("hm\n3", "")]


def test_the_last_of_many_turns_is_shown() -> None:
    found = read_conversation(json.dumps([said(f"turn {i}") for i in range(100)]), [float(i) for i in range(100)])
    numbers = [*range(MOST_TURNS - 1), 99]
    assert [turn.text for turn in found.turns] == [f"turn {i}" for i in numbers]
    assert [turn.reward for turn in found.turns] == numbers
    assert (found.hidden, found.gist, found.facts) == (100 - MOST_TURNS, "turn 99", ("100 turns",))
    few = found.shortened(TEXT_LIMIT // 8)
    assert [turn.text for turn in few.turns] == ["turn 0", "turn 1", "turn 99"]
    assert few.hidden == 97
    assert found.shortened(10).turns == ()


def test_a_single_turn_needs_no_messages(tmp_path: Path) -> None:
    """Rewards of text rollouts; values that are no numbers."""
    write_turns(tmp_path / "pods" / "seed-0", [(None, [0.5]), (None, [float("nan"), 1.0]), (None, None)])
    facts = [r.conversation.facts for r in shown_group(tmp_path).rollouts]
    assert facts == [("reward of turn 1: 0.500",), ("reward of turn 2: 1.000",), ()]


# ------------------------------------------------------------------------------------------ damage and size

BAD = [
    "",
    "not JSON",
    "7",
    "null",
    "{}",
    "[1, null]",
    "[" * 100_000,
    '[{"role": "assistant", "tool_calls": 7}]',
    "[" + "9" * 9000,
]


@pytest.mark.parametrize("messages", [*BAD, 7, [1], b"[]"], ids=lambda x: repr(x)[:12])
def test_what_is_no_conversation_leaves_the_text(messages: Any) -> None:
    assert read_conversation(messages, "high") == Conversation()


def test_odd_messages_are_shown_as_far_as_they_go() -> None:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    odd = [
        {},
        {"role": ["x"], "content": {"a": 1}},
        {"role": "assistant", "content": None, "tool_calls": ["f", {"name": "g"}, {"function": 7}]},
        {"role": "tool", "name": deep, "content": deep},
        {"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]},
    ]
    turns = read_conversation(json.dumps(odd), None).turns
    assert [(turn.speaker, turn.text, turn.calls) for turn in turns] == [
        ("", "", ""),
        ('["x"]', '{"a": 1}', ""),
        ("assistant", "", '"f"\ng()\n{"function": 7}'),
        ("tool nested too deeply", "nested too deeply", ""),
        ("assistant", "[image]\nhi", ""),
    ]


@pytest.mark.usefixtures("no_rendering")
def test_huge_conversations_stay_within_the_budget(tmp_path: Path) -> None:
    many = [said("é<" * 900, ("f", {"x": "<" * 900})), result("f", "\x00" * 9000)] * 60
    write_turns(tmp_path / "pods" / "seed-0", [(many, [1.0] * 60)] * 8)
    for budget, turns in ((2_400_000, 24), (200_000, 12), (50_000, 6)):
        group = shown_group(tmp_path, budget=budget)
        assert len(group.rollouts) == 8
        texts = [f"{t.speaker}{t.text}{t.calls}" for r in group.rollouts for t in r.conversation.turns]
        assert len(texts) == 8 * turns
        assert sum(len(escape(text).encode()) for text in texts) <= budget
    (first, *_) = group.rollouts
    assert first.conversation.facts == ("60 turns", "60 tool calls")
    assert build_report(tmp_path, resamples=5).html.stat().st_size < 3_000_000


# ---------------------------------------------------------------------------------------- hostile input


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    """Payloads as roles, names of tools, texts, names of arguments and their values; short and folded."""
    root = tmp_path_factory.mktemp("hostile_turns") / "runs"
    rollouts: list[tuple[list[Message] | None, list[float] | None]] = []
    for payload in PAYLOADS:
        spoken = said(payload, (payload, {payload: payload}), ("f", {"x": [payload]}))
        thought = spoken | {"role": payload, "thinking": payload * 40, "name": payload}
        rollouts.append(([spoken, result(payload, payload), thought], [1.0]))
    write_turns(root / "pods" / "seed-0", rollouts)
    with unrendered():
        return build_report(root, resamples=5)


def test_hostile_turns_give_no_element_and_no_control_character(hostile: ReportFiles) -> None:
    text = hostile.html.read_text()
    page = Elements()
    page.feed(text)
    assert page.tags.count("script") == 5  # the library, two of ours, their data, and their start
    assert page.tags.count("ol") == len(PAYLOADS)
    for tag in ("svg", "iframe", "form", "base", "object", "embed", "link", "a href"):
        assert tag not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "\\u202e\\x00\\x1b]0;pwned\\x07&amp;lt;b&amp;gt;" in text


@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_turns_fit_a_phone_and_run_nothing(hostile: ReportFiles, tmp_path: Path) -> None:
    script = """const r = [...d.querySelectorAll("details.r")];
        for (const part of r) part.open = true;
        await pause(50);
        const long = d.querySelector("li details"), closed = long.offsetHeight;
        for (const part of d.querySelectorAll("li details")) part.open = true;
        await pause(50);
        return [d.documentElement.scrollWidth, d.documentElement.clientWidth, closed < long.offsetHeight, d.title];"""
    width, window, folded, title = drive(hostile.html, tmp_path, script, width=390)
    assert width == window <= 390
    assert folded
    assert title == "PODS report: runs"


# ----------------------------------------------------------------------------------------- calls of tools


@pytest.mark.usefixtures("no_rendering")
def test_calls_and_failures_are_in_the_table_of_runs(tmp_path: Path) -> None:
    """Shares over all calls where they were counted; an arm without tools has a dash."""
    for arm, logged in (("pods", [(2.0, 0.5, 8.0, 4.0), (1.0, 0.0, 4.0, 0.0)]), ("grpo", [])):
        path = write_run(tmp_path / arm / "seed-0", arm, end=30)
        names = ("tools/call_frequency", "tools/failure_frequency", "pods/tool_calls", "pods/tool_failures")
        rows = [{"step": step, **dict(zip(names, values, strict=True))} for step, values in enumerate(logged, 1)]
        with (path / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    made = build_report(tmp_path, resamples=5)
    rows = {row["arm"]: row for row in csv.DictReader(made.csv["runs"].open())}
    assert (rows["pods"]["tool_calls"], rows["pods"]["tool_failures"]) == ("1.5", "0.3333333333")
    assert (rows["grpo"]["tool_calls"], rows["grpo"]["tool_failures"]) == ("", "")
    table = made.tables["runs"].to_markdown()
    assert "tool calls of a rollout | failed |" in table
    assert "| 1.50 | 0.333 |" in table
    assert "share of tool calls that failed" in made.images["steps"].alt


def test_runs_without_tools_have_no_such_column(report: ReportFiles) -> None:
    assert "tool_calls" not in report.csv["runs"].read_text()
