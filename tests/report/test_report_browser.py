"""The page in a headless Chromium: its figures, its rollouts, and that nothing in it is ever live."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PAYLOADS, grow, serving, write_rollouts, write_run
from tests import DEADLINE, until

from pods_rl.report import ReportFiles, build_report
from pods_rl.report.live import LivePage

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


class Browser:
    """A page in headless Chromium that is driven over a pipe with the DevTools protocol, in real time."""

    def __init__(self, profile: Path, *, width: int = 1200, height: int = 900, mobile: bool = False) -> None:
        assert CHROMIUM
        theirs_in, self.outgoing = os.pipe()
        self.incoming, theirs_out = os.pipe()
        # the browser reads from descriptor 3 and writes to 4; by way of 103 and 104, since either may be taken
        moves = ((theirs_in, 103), (theirs_out, 104), (103, 3), (104, 4))
        script = f"import os, sys; [os.dup2(*move) for move in {moves}]; os.execv(sys.argv[1], sys.argv[1:])"
        command = [
            sys.executable,
            "-c",
            script,
            CHROMIUM,
            *_FLAGS.split(),
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), **quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        self.number, self.buffer, self.session = 0, b"", ""
        self.complaints: list[str] = []  # what the console shows: errors, and violations of the page's policy
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait()
        os.close(self.incoming)
        os.close(self.outgoing)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; note what the page complains about meanwhile."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.outgoing, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                ready, _, _ = select.select([self.incoming], [], [], DEADLINE)
                assert ready, f"no answer to {method}"
                found = os.read(self.incoming, 1 << 20)
                assert found, "the browser has ended"
                self.buffer += found
            text, self.buffer = self.buffer.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.complaints.append(json.dumps(answer["params"])[:500])

    def open(self, address: str) -> None:
        """Show a page, and wait until its scripts have run."""
        self.call("Page.navigate", url=address)
        self.until(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true in the page."""
        until(lambda: self.run(script), lambda: self.run("document.body.innerText.slice(0, 2000)"), poll=0.05)


pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found"), pytest.mark.slow]


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    """One prompt in two arms, equal rollouts, and 7,680 rollouts of a third arm."""
    root = tmp_path_factory.mktemp("explored") / "runs"
    for arm, rewards in (("grpo", [0.0, 0, 0, 0]), ("pods", [1.0, 1, 0, 0]), ("many", None)):
        path = write_run(root / arm / "seed-1", arm, end=60, config={"num_generations": 2, "num_rollouts": 4})
        given = None if rewards is None else np.array(rewards)
        size: dict[str, Any] = {"n": 4, "m": 2, "groups": 1} if rewards else {"n": 64, "m": 16, "groups": 30}
        for step in (1, 20) if rewards else (1, 2, 3, 4):
            random = np.random.default_rng(step)
            text = f"{arm} says <b>Pear</b>" if rewards else None
            prompt = f"Question {step} of {arm}" if arm != "grpo" or step == 1 else "Question 1 of pods"
            write_rollouts(path, step, **size, random=random, text=text, prompt=prompt, rewards=given)
    return build_report(root)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(browser: Browser, explored: ReportFiles) -> Iterator[Browser]:
    browser.complaints.clear()
    browser.open(explored.html.as_uri())
    browser.run(HELP)
    yield browser
    assert browser.complaints == []


HELP = """
window.texts = (css) => [...document.querySelectorAll(css)].map((e) => e.textContent.replace(/\\s+/g, " ").trim());
window.type = async (id, value) => {
  const count = texts("#f-count")[0], field = document.getElementById(id);
  field.value = value;
  field.dispatchEvent(new Event("input", {bubbles: true}));
  const pause = () => new Promise((done) => setTimeout(done, 25));
  for (let wait = 0; wait < 40 && texts("#f-count")[0] === count; wait += 1) await pause();
};
0"""


# ---------------------------------------------------------------------------------------- figures


def test_arms_runs_and_axes_change_the_figure_and_survive_new_points(page: Browser, explored: ReportFiles) -> None:
    labels = [arm["label"] for arm in explored.account.points["scores"][0]["arms"]]
    assert page.run("texts('#scores .read b')") == labels
    page.run("document.querySelector('#scores .bar button[aria-pressed]:not(.bar > span button)').click()")
    page.run("""(() => {const pick = [...document.querySelectorAll('#scores select')].at(-1);
        pick.value = 'step'; pick.dispatchEvent(new Event('change'))})()""")
    shown = page.run("texts('#scores .read b')")
    assert shown == labels[1:]
    grown = json.loads(json.dumps(explored.account.points))
    for arm in grown["scores"][0]["arms"]:
        arm["lines"]["step"]["mean"][-1] = 98.7
    page.run(f"window.pods.figures({json.dumps(grown)})")
    assert page.run("texts('#scores .read b')") == shown
    assert all("98.7 %" in line for line in page.run("texts('#scores .read div')")[: len(shown)])
    assert page.run("[...document.querySelectorAll('#scores select')].at(-1).value") == "step"
    assert page.run("document.querySelectorAll('#scores canvas').length") == 1


def test_the_cursor_shows_values_and_saved_files_hold_them(page: Browser, explored: ReportFiles) -> None:
    plot = "document.querySelector('#scores .plot')"
    page.run(f"{plot}.dispatchEvent(new KeyboardEvent('keydown', {{key: 'ArrowRight'}}))")
    assert page.run("texts('#scores .read div')")[0].count(" at 0") == 1
    points = json.loads(json.dumps(explored.account.points))
    for arm in points["scores"][0]["arms"]:
        arm["label"] = arm["label"].replace("pods", "=pods")
    page.run(f"window.pods.figures({json.dumps(points)})")
    page.run("document.querySelectorAll('#scores .save a').forEach((a) => a.addEventListener('click', "
             "(event) => event.preventDefault()))")  # fmt: skip
    page.run("document.querySelectorAll('#scores .save a').forEach((a) => a.click())")
    table, picture = page.run(
        "[...document.querySelectorAll('#scores .save a')].map((a) => decodeURIComponent(a.href))"
    )
    assert table.startswith('data:text/csv;charset=utf-8,"arm","run","training time (s)","accuracy (%)"')
    assert '"many (4→2)","mean",0,' in table
    assert '"\'=pods (4→2)","mean",0,' in table
    assert picture.startswith("data:image/png")


# --------------------------------------------------------------------------------------- rollouts


def test_filters_narrow_the_groups_and_clear_shows_all(page: Browser) -> None:
    assert page.run("texts('#f-count')") == ["124 of 124 groups, 7696 rollouts"]
    page.run("type('f-arm', 'pods (4→2)')")
    assert page.run("texts('#f-count')") == ["2 of 124 groups, 8 rollouts"]
    page.run("type('f-kept', '1')")
    page.run("type('f-low', '0.5')")
    assert page.run("texts('#f-count')") == ["2 of 124 groups, 2 rollouts"]
    page.run("type('f-text', 'nothing like it')")
    assert page.run("texts('#f-count')") == ["No rollout matches."]
    page.run("document.getElementById('f-clear').click()")
    page.until("texts('#f-count')[0].startsWith('124 of 124')")


def test_thousands_of_rollouts_stay_few_elements(page: Browser) -> None:
    """With every rollout matched and open, at several places of the page."""
    counts = []
    page.run("type('f-text', 'answer')")
    assert page.run("texts('#f-count')") == ["120 of 124 groups, 7680 rollouts"]
    for part in (0.3, 0.6, 0.9):
        page.run("(() => {const box = document.getElementById('ledger-groups').getBoundingClientRect();"
                 f"scrollTo(0, scrollY + box.top + {part} * box.height)}})()")  # fmt: skip
        page.until(
            "[...document.querySelectorAll('#ledger-groups .r')].map((r) => r.getBoundingClientRect())"
            ".some(({top, bottom}) => top < innerHeight && bottom > 100)"
        )
        counts.append(page.run("document.querySelectorAll('*').length"))
    assert max(counts) < 6000
    # below the navigation, which stays in view
    assert page.run("document.getElementById('nav').getBoundingClientRect().top") == 0
    filters, nav = page.run("['filter', 'nav'].map((id) => document.getElementById(id).getBoundingClientRect())"
                            ".map((box) => [box.top, box.bottom])")  # fmt: skip
    assert abs(filters[0] - nav[1]) < 12


# -------------------------------------------------------------------------------------- hostile text


def test_hostile_text_runs_nothing(hostile: ReportFiles, browser: Browser) -> None:
    browser.complaints.clear()
    browser.open(hostile.html.as_uri())
    browser.run("document.getElementById('ledger').scrollIntoView()")
    browser.until("document.querySelectorAll('#ledger-groups .g').length > 2")
    browser.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    browser.until("document.querySelectorAll('#ledger-groups .r').length > 2")
    assert browser.run("document.title").startswith("PODS report:")
    for tag in ("img", "iframe", "form", "base", "svg", "object", "link"):
        assert browser.run(f"document.querySelectorAll('{tag}').length") == 0, tag
    handlers = (
        "[...document.querySelectorAll('*')].flatMap((e) => [...e.attributes]).filter((a) => a.name.startsWith('on'))"
    )
    assert browser.run(f"{handlers}.length") == 0
    assert PAYLOADS[0] in browser.run("document.getElementById('ledger').textContent")
    assert browser.complaints == []


# ------------------------------------------------------------------------------------------ live


def test_a_browser_follows_a_run_and_waits_for_its_reader(tmp_path: Path, browser: Browser) -> None:
    """From before the run exists, without a violation of the page's policy."""
    browser.complaints.clear()
    run = tmp_path / "run"
    page = LivePage(run)
    live = "(document.getElementById('live')?.textContent ?? '')"
    with serving(page) as port:
        browser.open(f"http://127.0.0.1:{port}/")
        write_run(run, end=0, state="running")
        page.look()
        browser.until("document.querySelector('h1')?.textContent.includes('starts at')")
        browser.until(f"{live}.includes('s old')")
        browser.run("window.mine = 1; dispatchEvent(new KeyboardEvent('keydown'))")
        grow(run, 10.0, 0.987)
        page.look()
        browser.until(f"{live}.includes('newer')")
        assert browser.run("window.mine") == 1  # it is in use
        browser.open(f"http://127.0.0.1:{port}/")
        browser.until("document.querySelector('#scores .read')?.textContent.includes(' at 10')")
        browser.until(f"{live}.includes('s old')")
        assert browser.run("getComputedStyle(document.getElementById('live')).position") == "static"  # covers nothing
    browser.until(f"{live}.includes('not live')")
    assert all("ERR_CONNECTION" in one for one in browser.complaints)


def test_a_phone_needs_no_sideways_scroll(explored: ReportFiles, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile", width=390, height=800, mobile=True) as phone:
        phone.open(explored.html.as_uri())
        assert phone.run("document.documentElement.scrollWidth") == 390
        assert phone.run("document.querySelector('#scores canvas').getBoundingClientRect().width") < 390
        # filters wrap: each is on the screen without scrolling in a row
        ends = phone.run("[...document.querySelectorAll('#filter *')].map((e) => e.getBoundingClientRect().right)")
        assert 0 < max(ends) <= 390
        assert phone.complaints == []
