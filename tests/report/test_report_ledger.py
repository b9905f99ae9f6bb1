"""The rollouts of a report: order, size, damage; and that nothing in the page is ever live."""

import html
import json
import math
import os
import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from conftest import write_rollouts, write_run
from tests.reliability.payloads import harmful

from pods_rl.report import ReportFiles, build_report
from pods_rl.report.arms import arms_from_runs
from pods_rl.report.ledger import TEXT_LIMIT, Ledger, conversation, ledger_of


def ledger(root: Path, **settings: Any) -> Ledger:
    return ledger_of(arms_from_runs([root], "accuracy"), **settings)


def write_group(path: Path, rows: list[dict[str, Any]], step: int = 1) -> None:
    (path / "rollouts").mkdir(exist_ok=True)
    full = [
        {"step": step, "group": 0, "rollout": i, "prompt": "1+1", "completion": "2", **row}
        for i, row in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(full), path / "rollouts" / f"step-{step:06d}.parquet")


def lines_of(found: Ledger) -> list[list[Any]]:
    """Of the first group: text, reward, how many, kept."""
    texts = found.data["texts"]
    return [[texts[row[0]], *row[1:4]] for row in found.data["groups"][0][-1]]


def test_rollouts_are_sorted_by_reward_and_the_unscored_come_last(tmp_path: Path) -> None:
    path = write_run(tmp_path / "pods" / "seed-0", "pods", end=30)
    given = [(0, True), (math.nan, False), (1, False), (0, False), (1, True)]
    write_group(path, [{"completion": str(i), "reward": float(r), "selected": k} for i, (r, k) in enumerate(given)])
    assert lines_of(ledger(tmp_path)) == [
        ["2", 1.0, 1, 0], ["4", 1.0, 1, 1], ["0", 0.0, 1, 1], ["3", 0.0, 1, 0], ["1", None, 1, 0],
    ]  # fmt: skip


def test_equal_rollouts_fold_and_others_do_not(tmp_path: Path) -> None:
    path = write_run(tmp_path / "pods" / "seed-0", "pods", end=30)
    rows = [{"reward": 1.0, "selected": True}, {"reward": 1.0, "selected": False}, {"reward": 0.5, "selected": True}]
    write_group(path, [*rows, {"reward": 1.0, "selected": False, "completion": "3"}])
    assert lines_of(ledger(tmp_path)) == [["2", 1.0, 2, 1], ["3", 1.0, 1, 0], ["2", 0.5, 1, 1]]


def test_arms_and_runs_are_in_their_order(tmp_path: Path) -> None:
    for arm in ("grpo", "pods"):
        for seed in (10, 2, 1):
            path = write_run(tmp_path / arm / f"seed-{seed}", arm, seed, end=30)
            for step in (1, 20):
                write_group(path, [{"reward": 1.0, "completion": f"{arm} {seed} {step}"}], step)
    data = ledger(tmp_path, colours={"grpo (16)": "#111111", "pods (64→16)": "#222222"}).data
    assert data["arms"] == ["grpo (16)", "pods (64→16)"]
    assert data["colours"] == ["#111111", "#222222"]
    assert data["runs"] == ["seed-1", "seed-2", "seed-10"]
    found = []
    for group in data["groups"]:
        arm = data["arms"][group[0]].split()[0]
        seed = data["runs"][group[1]].removeprefix("seed-")
        assert data["texts"][group[-1][0][0]] == f"{arm} {seed} {group[2]}"
        found.append((arm, group[2], seed))
    assert found == [(arm, step, seed) for arm in ("grpo", "pods") for step in (1, 20) for seed in ("1", "2", "10")]


def test_a_page_that_is_full_leaves_out_groups_spread_over_steps_and_arms(tmp_path, monkeypatch):
    for arm in ("grpo", "pods"):
        path = write_run(tmp_path / arm / "seed-0", arm)
        for step in range(1, 21):
            write_rollouts(path, step, n=8, m=4, random=np.random.default_rng(step), text=f"é<{step}" * 1000)
    monkeypatch.setattr("pods_rl.report.ledger.DATA_MB", 0.1)
    found = ledger(tmp_path)
    assert found.groups == 80
    assert 0 < len(found.data["groups"]) == 80 - found.left_out
    assert len(json.dumps(found.data)) < 120_000
    assert {group[0] for group in found.data["groups"]} == {0, 1}
    steps = [group[2] for group in found.data["groups"]]
    assert min(steps) <= 10 < max(steps)
    assert max(map(len, found.data["texts"])) < TEXT_LIMIT + 40
    monkeypatch.setattr("pods_rl.report.ledger.DATA_MB", 0)
    none = ledger(tmp_path)
    assert (none.data, none.left_out) == ({}, 80)


def test_damaged_foreign_and_special_files_are_named(experiment: Path, tmp_path: Path) -> None:
    folder = experiment / "pods" / "seed-0" / "rollouts"
    good = (folder / "step-000020.parquet").read_bytes()
    (folder / "step-000040.parquet").write_bytes(good[: len(good) // 2])
    (folder / "step-000060.parquet").write_text("not parquet")
    for step, row in enumerate([{"group": "0"}, {"step": None}, {"group": None}, {"group": 1.5}]):
        write_group(experiment / "pods" / "seed-0", [{"reward": 1.0, **row}], 100 + step)
    os.mkfifo(folder / "step-000200.parquet")
    (folder / "step-000201.parquet").mkdir()
    (folder / "step-000202.parquet").symlink_to("step-000202.parquet")
    (folder / "step-000203.parquet").symlink_to("/dev/zero")
    found = ledger(experiment)
    assert len(found.unreadable) == 2 + 4 + 4
    assert found.groups == 36 - 4
    assert "10 of 26 " in build_report(experiment, tmp_path / "out").html.read_text()


# ----------------------------------------------------------------------------------------- conversations


def test_a_conversation_is_shown_with_roles_thoughts_and_calls() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "assistant", "reasoning_content": "hm", "content": "let me see", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "4"},
        {"role": "assistant", "content": [{"type": "text", "text": "4"}]},
    ]
    assert conversation(json.dumps(messages)) == "assistant: hm\nlet me see\nadd(a=1)\ntool add: 4\nassistant: 4"


def test_long_conversations_keep_their_end_and_turns_their_rewards(tmp_path: Path) -> None:
    path = write_run(tmp_path / "pods" / "seed-0", "pods", end=30)
    messages = [{"role": "user", "content": str(i)} for i in range(5000)]
    write_group(path, [{"reward": 1.0, "messages": json.dumps(messages), "turn_rewards": [0.5, None, 1.0]}])
    found = ledger(tmp_path)
    ((text, *_),) = lines_of(found)
    assert text.endswith("user: 4999")
    assert "turn 1 0.500 · turn 3 1.000" in found.data["texts"]


# ---------------------------------------------------------------------------------- hostile input


def test_the_policy_allows_our_scripts_by_hash_and_nothing_else(report: ReportFiles, hostile: ReportFiles) -> None:
    for text in (report.html.read_text(), hostile.html.read_text()):
        policy = html.unescape(re.findall(r'content="([^"]*script-src[^"]*)"', text)[0])
        rules = dict(rule.partition(" ")[::2] for rule in policy.split("; "))
        scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
        assert set(rules["script-src"].split()) == {
            f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts
        }
        assert rules["default-src"] == "'none'"
        assert rules["require-trusted-types-for"] == "'script'"
        assert "connect-src" not in rules
        for island in re.findall(r'<script type="application/json" id="[a-z-]+">(.*?)</script>', text, re.DOTALL):
            assert json.loads(island)
            assert not set("<>&") & set(island)


def test_nothing_of_a_run_is_live_in_markdown(hostile: ReportFiles) -> None:
    markdown = (hostile.folder / "report.md").read_text(encoding="utf-8")
    assert "<" not in markdown
    assert not re.search(r"(?<!\\)\]\(", markdown)
    assert not harmful(markdown)


def test_the_library_of_the_figures_is_the_published_one() -> None:
    known = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    for name, digest in known.items():
        content = files("pods_rl.report").joinpath("vendor", name).read_bytes()
        assert sha256(content).hexdigest() == digest
