"""The ledger's page: order, sampling, size, damage; and that nothing in it is ever live.

In a browser: test_report_browser.py."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import write_rollouts, write_run
from markupsafe import escape

from pods_rl.report import ReportFiles, build_report
from pods_rl.report.arms import arms_from_runs
from pods_rl.report.ledger import Rollout, ledger_page, outward

OURS = 6  # figures: curves, threshold, phases, steps, format accuracy, both


def rollout(reward: float, *, kept: bool, index: int = 0) -> Rollout:
    return Rollout(index, reward, (), kept, None, None, "", 0)


def test_kept_lie_outward_among_equal_rewards() -> None:
    group = [rollout(r, kept=k, index=i) for i, (r, k) in enumerate([(0, True), (1, False), (0, False), (1, True)])]
    assert [(r.reward, r.kept) for r in outward(group)] == [(1, True), (1, False), (0, False), (0, True)]


def test_rollouts_nobody_could_score_come_last() -> None:
    group = [rollout(math.nan, kept=False, index=0), rollout(-5, kept=True, index=1)]
    assert [r.index for r in outward(group)] == [1, 0]


def test_groups_are_sampled_over_the_whole_run(experiment: Path) -> None:
    page = ledger_page(arms_from_runs([experiment], "accuracy"), groups_per_arm=5)
    assert page.total == 2 * 3 * 3 * 2  # arms, runs, logged steps, groups
    assert len(page.groups) == 10
    pods = [group for group in page.groups if group.arm == "pods"]
    assert (pods[0].step, pods[-1].step) == (20, 60)
    assert {group.run for group in pods} == {"seed-0", "seed-1", "seed-2"}
    assert [(len(group.rollouts), group.kept) for group in pods] == [(64, 16)] * 5
    assert [group.arm for group in page.groups] == ["pods"] * 5 + ["grpo"] * 5  # the one that drops rollouts first


def test_page_stays_within_its_budget(tmp_path: Path) -> None:
    path = write_run(tmp_path / "pods" / "seed-0", "pods")
    for step in range(1, 6):
        write_rollouts(path, step, n=64, m=16, random=np.random.default_rng(step), text="é<" * 5_000)
    arms = arms_from_runs([tmp_path], "accuracy")
    for budget, groups in ((1_000_000, 2), (60_000, 1)):
        page = ledger_page(arms, budget=budget)
        assert len(page.groups) == groups
        size = sum(len(escape(r.text).encode()) for group in page.groups for r in group.rollouts)
        assert size <= budget
        assert all(len(r.text) + r.cut == 10_000 for group in page.groups for r in group.rollouts)
    report = build_report(tmp_path, resamples=10)
    assert report.html.stat().st_size < 3_000_000
    assert f"{len(ledger_page(arms).groups)} of 10 logged groups" in report.html.read_text()


def test_a_long_run_of_many_rollouts_makes_no_long_page(tmp_path: Path) -> None:
    path = write_run(tmp_path / "pods" / "seed-0", "pods", end=30)
    for step in range(1, 81):
        write_rollouts(path, step, n=256, m=16, random=np.random.default_rng(step), groups=1)
    page = ledger_page(arms_from_runs([tmp_path], "accuracy"))
    assert (page.files, page.files_read, page.total) == (80, 64, 64)
    assert len(page.groups[0].rollouts) == 256
    assert page.groups[-1].step == 80
    report = build_report(tmp_path, resamples=5)
    assert report.html.stat().st_size < 4_000_000
    assert f"{len(page.groups)} of 64 logged groups in 64 of 80 ledger files" in report.html.read_text()


@pytest.mark.usefixtures("no_rendering")
def test_groups_that_stopped_early_show_how_many_of_n_were_generated(tmp_path: Path) -> None:
    """Rollouts that were never generated are no rows; those without a reward are, and count as generated."""
    path = write_run(tmp_path / "pods" / "seed-0", "pods")
    write_rollouts(path, 20, n=64, m=16, random=np.random.default_rng(0), groups=4)
    old = pq.read_table(path / "rollouts" / "step-000020.parquet").to_pylist()
    stops = ((24, "decided"), (32, "gave up"), (64, "full"), (64, ""))
    rows = [
        row | {"step": 40, "wave": max(0, row["rollout"] - 8) // 8, "stopped": stopped or None}
        for row in old
        for generated, stopped in [stops[row["group"]]]
        if row["rollout"] < generated
    ]
    rows[3]["reward"] = math.nan
    pq.write_table(pa.Table.from_pylist(rows), path / "rollouts" / "step-000040.parquet")
    page = ledger_page(arms_from_runs([tmp_path], "accuracy"))
    assert [group.generated for group in page.groups if group.step == 20] == ["64"] * 4
    shown = [group for group in page.groups if group.step == 40]
    assert [group.generated for group in shown] == [
        "24 generated of 64 (decided)",
        "32 generated of 64 (gave up)",
        "64",
        "64",
    ]
    assert [len(group.rollouts) for group in shown] == [24, 32, 64, 64]
    html = build_report(tmp_path, resamples=5).html.read_text()
    assert re.search(r"kept \d+ of 24 generated of 64 \(decided\) · reward", html)
    assert "kept 16 of 64 · reward" in html


def test_no_even_choice_keeps_to_one_run(tmp_path: Path) -> None:
    for seed in range(4):
        path = write_run(tmp_path / "pods" / f"seed-{seed}", "pods", seed, end=30)
        for step in range(1, 9):
            write_rollouts(path, step, n=4, m=2, random=np.random.default_rng(step), groups=1)
    arms = arms_from_runs([tmp_path], "accuracy")
    for count in (7, 8, 9, 11, 16):  # of 32, some with a stride that is the number of runs, or one more
        page = ledger_page(arms, groups_per_arm=count)
        assert len(page.runs) >= 3
        assert [group.step for group in page.groups] == sorted(group.step for group in page.groups)


@pytest.mark.usefixtures("no_rendering")
def test_groups_of_another_type_are_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "pods" / "seed-0", "pods", end=30)
    (path / "rollouts").mkdir()
    for name, rows in (
        ("text", [{"step": 1, "group": "0", "reward": 1.0}]),
        ("stepless", [{"group": 0, "reward": 1.0}]),
        ("null", [{"step": None, "group": 0, "reward": "high", "prompt": None, "completion": None}]),
    ):
        pq.write_table(pa.Table.from_pylist(rows), path / "rollouts" / f"step-{name}.parquet")
    page = ledger_page(arms_from_runs([tmp_path], "accuracy"))
    assert page.groups == ()
    assert len(page.unreadable) == 3
    assert "3 ledger files could not be read" in build_report(tmp_path, resamples=5).html.read_text()


def test_torn_and_foreign_files_are_named(experiment: Path) -> None:
    folder = experiment / "pods" / "seed-0" / "rollouts"
    whole = (folder / "step-000020.parquet").read_bytes()
    (folder / "step-000040.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "step-000060.parquet").write_text("not parquet")
    page = ledger_page(arms_from_runs([experiment], "accuracy"))
    assert page.unreadable == ("seed-0/step-000040.parquet", "seed-0/step-000060.parquet")
    assert page.total == 36 - 4


def test_parts_advantage_and_length_are_shown(report: ReportFiles) -> None:
    text = report.html.read_text()
    assert re.search(r"rollout \d+ · accuracy 1\.000 · format 0\.\d+ · \d+ tokens", text)
    assert re.search(r'<span class="a">[+-]\d\.\d\d</span>', text)
    assert "of 36 logged groups" in text


# ---------------------------------------------------------------------------------- hostile input


class Elements(HTMLParser):
    """Counts what is live in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_hostile_text_gives_no_element(hostile: ReportFiles) -> None:
    page = Elements()
    page.feed(hostile.html.read_text())
    assert page.tags.count("script") == 5  # the library, two of ours, their data, and their start
    assert page.tags.count("img") == OURS
    for tag in ("svg", "iframe", "form", "base", "object", "embed", "link"):
        assert tag not in page.tags
    assert page.tags.count("meta") == 5
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    addresses = [value or "" for name, value in page.attributes if name in ("href", "src", "srcset", "action")]
    assert all(value.startswith(("#", "data:image/svg+xml;base64,")) for value in addresses)


def test_hostile_text_breaks_no_table(hostile: ReportFiles) -> None:
    for line in hostile.markdown.read_text().splitlines():
        assert "<" not in line
        assert not re.search(
            r"(?<!\\)[`\[](?!main figure\]|[^\[\]<]*\]\(figures/[\w-]+\.png\)$)", line.removeprefix("!")
        )


def test_policy_allows_our_script_by_hash_and_nothing_else(report: ReportFiles) -> None:
    text = report.html.read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    parts = dict(part.split(" ", 1) for part in policy[1].replace("&#39;", "'").split("; "))
    assert parts["default-src"] == "'none'"
    assert parts["img-src"] == "data:"
    assert re.fullmatch(r"('sha256-[\w+/]+=' ?){4}", parts["script-src"])
    library = files("pods_rl.report").joinpath("vendor", "uPlot.iife.min.js").read_text()  # names its home in a comment
    assert library in text
    assert not re.search(r"https?://", text.replace(library, "").replace("http-equiv", ""))
