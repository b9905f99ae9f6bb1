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
from conftest import unrendered, write_rollouts, write_run
from test_report_ledger import OURS, Elements
from tests.chromium import CHROMIUM, MISSING, dump, visit

from pods_rl.report import ReportFiles, build_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)


def drive(page: Path, folder: Path, script: str, *, width: int = 1000, height: int = 900, in_time: bool = False) -> Any:
    """What ``script`` (the body of an async function of ``d``, the page's document) returns, as JSON.

    Args:
        in_time: as time passes, for what waits until the page is painted; else as fast as it goes.
    """
    outer = folder / "outer.html"
    frame = (
        f'<iframe style="width:{width}px;height:{height}px;border:0" srcdoc="{html.escape(page.read_text())}"></iframe>'
    )
    done = 'fetch("/done", {method: "POST", body: result})' if in_time else "document.title = result"
    run = f"""const f = document.querySelector("iframe");
    f.onload = async () => {{
      const d = f.contentDocument, w = f.contentWindow, pause = (ms) => new Promise((go) => setTimeout(go, ms));
      const work = async () => {{ {script} }};
      const result = JSON.stringify(await work().catch((error) => `${{error}}`));
      {done};
    }};"""
    text = f"<!doctype html><meta charset=utf-8><title></title>{frame}<script>{run}</script>"
    if in_time:
        return json.loads(visit(text, folder / "profile"))
    outer.write_text(text)
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
    await pause(150);
    for (const group of d.querySelectorAll("#ledger-groups .g")) group.open = true;
    await pause(50);
    const seen = d.querySelectorAll("#ledger-groups details.r");
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
    found = drive(two_runs.html, tmp_path, script, height=9000)  # all groups in view
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


# ---------------------------------------------------------------------------------------- exploring


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    """One prompt in two arms and a second in one of them; equal rollouts; 7,680 rollouts of a third arm."""
    root = tmp_path_factory.mktemp("explored") / "runs"
    for arm, rewards in (("grpo", [0.0, 0, 0, 0]), ("pods", [1.0, 1, 0, 0]), ("many", None)):
        path = write_run(root / arm / "seed-1", arm, end=30, config={"num_generations": 2, "num_rollouts": 4})
        given = None if rewards is None else np.array(rewards)
        size: dict[str, Any] = {"n": 4, "m": 2, "groups": 1} if rewards else {"n": 64, "m": 16, "groups": 30}
        for step in (1, 20) if rewards else (1, 2, 3, 4):
            random = np.random.default_rng(step)
            text = f"{arm} says <b>Pear</b>" if rewards else None
            prompt = f"Question {step} of {arm}" if arm != "grpo" or step == 1 else "Question 1 of pods"
            write_rollouts(path, step, **size, random=random, text=text, prompt=prompt, rewards=given)
    with unrendered():
        return build_report(root, resamples=5)


START = """
  d.documentElement.style.scrollBehavior = "auto";
  const all = (css) => [...d.querySelectorAll(css)], texts = (css) => all(css).map((e) => e.textContent);
  const type = async (id, value) => {
    d.getElementById(id).value = value;
    d.getElementById(id).dispatchEvent(new w.Event("input", {bubbles: true}));
    await pause(200);
  };
"""


def test_equal_rollouts_are_one_line_with_the_reason(explored: ReportFiles, tmp_path: Path) -> None:
    script = """await type("f-text", "pods says"); all("#ledger-groups summary .m")[0].click(); await pause(100);
        d.querySelector("#ledger-groups .r:not([open])").open = true; await pause(50);
        return [texts("#ledger-groups .g:first-child .r summary").map((t) => t.replace(/\\s+/g, " ")),
          texts("#ledger-groups .g:first-child .r > p"), texts("#ledger-groups .g:first-child .why li"),
          texts("#ledger-groups .g:first-child mark")];"""
    rows, facts, why, marks = drive(explored.html, tmp_path, START + script)
    assert rows == ["◐1.000+0.502 ×pods says <b>Pear</b>", "◐0.000-0.502 ×pods says <b>Pear</b>"]
    assert facts[0].startswith("2 equal rollouts (0, 1), 1 kept · accuracy 1.000")
    assert "kept: one of the 1 highest · dropped: equal to kept ones, later number" in facts[0]
    assert why[0] == "max_variance kept the 1 highest and the 1 lowest of 4 rewards."
    assert why[1].endswith("Variance of the kept rewards 0.500, of a random choice of 2 on average 0.333: 1.50 times.")
    assert marks == ["pods says"] * 2


def test_a_prompt_in_two_arms_side_by_side(explored: ReportFiles, tmp_path: Path) -> None:
    script = """await type("f-text", "Question 1 of pods");
        const marked = texts("#ledger-groups .g:first-child pre mark");
        d.querySelector("#ledger-groups .prompt button").click(); await pause(100);
        const sides = all(".side").map((s) => [s.querySelector("select").selectedOptions[0].textContent,
          s.querySelectorAll(".steps button").length, s.querySelectorAll(".steps .k").length,
          s.querySelector(".note").textContent]);
        d.querySelector("#prompts").open = true; await pause(100);
        d.getElementById("prompt-kind").value = "dead";
        d.getElementById("prompt-kind").dispatchEvent(new w.Event("change")); await pause(50);
        return [marked, sides, d.getElementById("prompt-count").textContent, texts("#prompt-rows .stat")];"""
    marked, sides, count, stats = drive(explored.html, tmp_path, START + script)
    assert marked == ["Question 1 of pods"]
    assert [side[:3] for side in sides] == [["grpo (4→2)", 1, 0], ["pods (4→2)", 1, 1]]
    assert sides[0][3].startswith("step 20 · seed-1 · 0 % right · kept 2 of 4")
    assert sides[1][3].startswith("step 1 · seed-1 · 50 % right · kept 2 of 4 · reward 0.50")
    assert count == "2 prompts"
    assert any("grpo (4→2): dead, 0 of 4 right in 1 group" in text for text in stats)


def test_thousands_of_rollouts_stay_few_elements(explored: ReportFiles, tmp_path: Path) -> None:
    """Closed, with every rollout matched and open, at the end of the page, and cleared; the filter stays in view."""
    script = """const few = () => d.querySelectorAll("*").length, counts = [few()];
        const until = async (fine) => { while (!fine()) await pause(30); };
        await type("f-text", "answer"); counts.push(few());
        const count = d.getElementById("f-count").textContent, list = d.getElementById("ledger-groups");
        const inView = ({top, bottom}) => top < 900 && bottom > 100;
        const seen = () => all("#ledger-groups .r").some((r) => inView(r.getBoundingClientRect()));
        for (const part of [0.3, 0.6, 0.9]) {
          w.scrollTo(0, part * list.offsetHeight); await until(seen);
          counts.push(few());
        }
        const top = d.getElementById("filter").getBoundingClientRect().top;
        d.getElementById("f-clear").click(); await pause(50);
        return [count, [...counts, few()], top];"""
    count, elements, top = drive(explored.html, tmp_path, START + script, in_time=True)
    assert count == "120 of 124 groups, 7680 rollouts"
    assert max(elements) < 6000
    assert top == 0


def test_filters_and_open_rows_outlive_new_data(explored: ReportFiles, tmp_path: Path) -> None:
    """As a live page does: the section is replaced by a new one, and every function is called again."""
    script = """await type("f-text", "pods says"); await type("f-arm", "2");
        d.querySelector("#ledger-groups .g summary").click(); await pause(50);
        const look = () => [d.getElementById("f-count").textContent, d.getElementById("f-text").value,
          d.getElementById("f-arm").selectedOptions[0].textContent, all("#ledger-groups .g").map((g) => g.open)];
        const before = look();
        for (const start of w.pods) start(d);
        const same = look();
        const groups = d.getElementById("ledger-groups");
        const part = new DOMParser().parseFromString(PAGE, "text/html").getElementById("ledger");
        d.getElementById("ledger").replaceWith(d.adoptNode(part));
        for (const start of w.pods) start(d);
        await pause(50);
        return [before, same, look(), groups.isConnected, d.getElementById("filter").hidden];"""
    source = json.dumps(explored.html.read_text()).replace("</", "<\\/")
    before, same, after, connected, hidden = drive(explored.html, tmp_path, START + f"const PAGE = {source};" + script)
    assert before == same == after
    assert before[3] == [False, True]
    assert not connected
    assert not hidden


# ---------------------------------------------------------------------------------- hostile input


def test_hostile_text_runs_nothing_in_a_browser(hostile: ReportFiles, tmp_path: Path) -> None:
    dom = Elements()
    text = dump(hostile.html, tmp_path / "profile")
    dom.feed(text)
    assert "<title>PODS report:" in text  # no payload changed it
    assert dom.foreign_scripts() == []
    assert dom.tags.count("img") == OURS
    for tag in ("iframe", "form", "base", "svg"):
        assert tag not in dom.tags
    assert not [name for name, _ in dom.attributes if name.startswith("on")]


def test_policy_stops_a_script_that_is_not_ours(report: ReportFiles, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    foreign = "<script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\"></body>"
    page.write_text(report.html.read_text().replace("</body>", foreign))
    assert "pwned</title>" not in dump(page, tmp_path / "profile")
