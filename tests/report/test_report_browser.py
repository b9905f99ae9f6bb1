"""The page in headless Chromium: no script but ours, the ledger's filters, a phone's width.

The page is shown in a frame of another page that drives it, so that its own policy stays in force.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import write_rollouts, write_run
from test_report_ledger import OURS, Elements
from tests.chromium import CHROMIUM, MISSING, dump

from pods_rl.report import ReportFiles, build_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)


def drive(page: Path, folder: Path, script: str, *, width: int = 1000, dark: bool = False) -> Any:
    """What ``script`` (the body of an async function of ``d``, the page's document) returns, as JSON."""
    outer = folder / "outer.html"
    frame = f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(page.read_text())}"></iframe>'
    run = f"""const f = document.querySelector("iframe");
    f.onload = async () => {{
      const d = f.contentDocument, w = f.contentWindow, pause = (ms) => new Promise((go) => setTimeout(go, ms));
      const work = async () => {{ {script} }};
      document.title = JSON.stringify(await work());
    }};"""
    outer.write_text(f"<!doctype html><meta charset=utf-8><title></title>{frame}<script>{run}</script>")
    text = dump(outer, folder / "profile")
    title = re.search(r"<title>(.*?)</title>", text, re.DOTALL)
    assert title
    assert title[1], "the script did not end"
    return json.loads(html.unescape(title[1]))


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    """Rewards 0 to 7 in each group of 8, the ends kept; a word of its own in each arm's completions."""
    root = tmp_path_factory.mktemp("browser") / "runs"
    for arm, text in (("grpo", "plain <b>apple</b>"), ("pods", "juicy pear\nsecond line")):
        for seed in (1, 2):
            path = write_run(root / arm / f"seed-{seed}", arm, seed, end=30)
            for step in (1, 20):
                random = np.random.default_rng(step)
                rewards = np.arange(8.0)
                write_rollouts(path, step, n=8, m=4, random=random, groups=1, text=text, rewards=rewards)
    return build_report(root, resamples=10)


SET = """
  const set = async (values) => {
    d.getElementById("f-clear").click();
    for (const [id, value] of Object.entries(values)) {
      d.getElementById(id).value = value;
      d.getElementById(id).dispatchEvent(new w.Event("input", {bubbles: true}));
    }
    await pause(200);
    const seen = [...d.querySelectorAll("details.r")].filter((r) => !r.hidden && !r.closest(".g").hidden);
    return [d.getElementById("f-count").textContent, seen.length];
  };
"""


def test_filters_work_under_the_policy(two_runs: ReportFiles, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, str], str, int]] = [
        ({}, "8 of 8 groups, 64 rollouts", 64),
        ({"f-kept": "1"}, "8 of 8 groups, 32 rollouts", 32),
        ({"f-kept": "0"}, "8 of 8 groups, 32 rollouts", 32),
        ({"f-arm": "0"}, "4 of 8 groups, 32 rollouts", 32),
        ({"f-run": "1"}, "4 of 8 groups, 32 rollouts", 32),
        ({"f-from": "2"}, "4 of 8 groups, 32 rollouts", 32),
        ({"f-to": "1"}, "4 of 8 groups, 32 rollouts", 32),
        ({"f-low": "5"}, "8 of 8 groups, 24 rollouts", 24),
        ({"f-low": "2", "f-high": "5", "f-kept": "0"}, "8 of 8 groups, 32 rollouts", 32),
        ({"f-low": "0", "f-high": "0"}, "8 of 8 groups, 8 rollouts", 8),
        ({"f-text": "PEAR"}, "4 of 8 groups, 32 rollouts", 32),
        ({"f-text": "second line"}, "4 of 8 groups, 32 rollouts", 32),
        ({"f-text": "<b>apple"}, "4 of 8 groups, 32 rollouts", 32),
        ({"f-text": "12 + 7"}, "8 of 8 groups, 64 rollouts", 64),  # the prompt
        ({"f-text": "pear", "f-run": "0", "f-low": "7", "f-from": "20"}, "1 of 8 groups, 1 rollouts", 1),
        ({"f-text": "no such text"}, "No rollout matches.", 0),
    ]
    script = (
        SET
        + f"const out = []; for (const c of {json.dumps([c[0] for c in cases])}) out.push(await set(c)); return out;"
    )
    found = drive(two_runs.html, tmp_path, script)
    assert [tuple(pair) for pair in found] == [(count, shown) for _, count, shown in cases]


def test_rollouts_are_sorted_by_reward_with_the_kept_marked(two_runs: ReportFiles, tmp_path: Path) -> None:
    script = """return [...d.querySelector("details.g").querySelectorAll("details.r")].map(
        (r) => [r.querySelector(".m").textContent, Number(r.querySelector(".n").textContent)]);"""
    marks = ["●", "●", "○", "○", "○", "○", "●", "●"]
    assert drive(two_runs.html, tmp_path, script) == [[mark, 7 - k] for k, mark in enumerate(marks)]


def test_no_sideways_scroll_on_a_phone(two_runs: ReportFiles, tmp_path: Path) -> None:
    """Closed and opened; wide tables scroll within themselves."""
    script = """const width = () => [d.documentElement.scrollWidth, d.documentElement.clientWidth];
        const closed = width();
        for (const part of d.querySelectorAll("details")) part.open = true;
        await pause(50);
        const tables = [...d.querySelectorAll(".scroll")].map((t) => getComputedStyle(t).overflowX);
        return [closed, width(), [...new Set(tables)]];"""
    closed, opened, tables = drive(two_runs.html, tmp_path, script, width=390)
    assert closed == opened
    assert closed[0] == closed[1] <= 390
    assert tables == ["auto"]


def test_a_phone_gets_the_narrow_figures(two_runs: ReportFiles, tmp_path: Path) -> None:
    script = """await pause(50);
        return [...d.querySelectorAll("figure img")].map((i) => i.complete && i.naturalWidth);"""
    wide = drive(two_runs.html, tmp_path, script, width=1280)
    narrow = drive(two_runs.html, tmp_path, script, width=390)
    assert len(wide) == len(narrow) == len(two_runs.figures)
    assert all(0 < a < b for a, b in zip(narrow, wide, strict=True))


# ---------------------------------------------------------------------------------- hostile input


def test_hostile_text_runs_nothing_in_a_browser(hostile: ReportFiles, tmp_path: Path) -> None:
    dom = Elements()
    text = dump(hostile.html, tmp_path / "profile")
    dom.feed(text)
    assert "<title>PODS report:" in text  # no payload changed it
    assert dom.tags.count("script") == 5  # the library, two of ours, their data, and their start
    assert dom.tags.count("img") == OURS
    for tag in ("iframe", "form", "base", "svg"):
        assert tag not in dom.tags
    assert not [name for name, _ in dom.attributes if name.startswith("on")]


def test_policy_stops_a_script_that_is_not_ours(report: ReportFiles, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    foreign = "<script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\"></body>"
    page.write_text(report.html.read_text().replace("</body>", foreign))
    assert "pwned</title>" not in dump(page, tmp_path / "profile")
