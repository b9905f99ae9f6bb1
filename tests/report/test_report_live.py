"""`pods watch`: the page of runs that train, from the server and in a browser."""

from __future__ import annotations

import html
import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from conftest import PAYLOADS, write_rollouts, write_run
from tests import until
from tests.chromium import CHROMIUM, MISSING, Browser

from pods_rl.cli import watch
from pods_rl.report.live import LivePage


def page_of(source: Path) -> LivePage:
    return LivePage(source, look=0.01)


def grow(run: Path, due: float, accuracy: float) -> None:
    """Another step and evaluation."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": int(due * 5), "seconds": due, "reward": accuracy}) + "\n")
    with (run / "evals.jsonl").open("a") as file:
        file.write(json.dumps({"step": int(due * 5), "due": due, "seconds": due, "accuracy": accuracy}) + "\n")


@contextmanager
def serving(page: Any) -> Iterator[int]:
    with watch._server(page, 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


def ask(port: int, method: str = "GET", path: str = "/", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


# -------------------------------------------------------------------------------------------- the server


def test_a_report_is_made_again_when_a_file_changes_and_only_then(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", end=0, state="running")
    page = page_of(run)
    page.look()
    version = page.served.version
    page.look()
    assert page.served.version == version
    grow(run, 1.0, 0.1)
    (run / "status.json").write_text('{"state": "finished"}')
    page.look()
    assert (page.served.version, page.served.state) == (version + 1, "1 finished")
    assert json.loads(page.served.points)["scores"][0]["arms"][0]["lines"]["time"]["mean"][-1] == 0.1


def test_a_page_waits_for_runs_and_outlives_damage(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "pods" / "seed-0"
    page = page_of(tmp_path / "runs")
    page.look()
    assert "Waiting" in page.served.page.decode()
    write_run(run, end=30)
    page.look()
    made = page.served
    assert b"ledger-data" in made.page
    assert b"went from" in made.page
    for path in run.iterdir():
        path.unlink()
    page.look()
    assert page.served.page == made.page
    assert page.served.note


def test_a_thread_makes_the_pages(tmp_path: Path) -> None:
    with page_of(write_run(tmp_path / "run", end=30)) as page:
        until(lambda: b"went from" in page.served.page)


def test_only_a_reader_on_this_machine_is_answered(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", end=30))
    page.look()
    with serving(page) as port:
        for path in ("/", "/parts", "/points", "/rollouts", "/state"):
            assert ask(port, path=path)[0] == 200
            assert ask(port, "HEAD", path) == (200, "")
        state = json.loads(ask(port, path="/state")[1])
        assert state["state"] == "1 finished"
        assert state["age"] >= 0
        assert "<script" not in ask(port, path="/parts")[1]
        assert "<style" not in ask(port, path="/parts")[1]
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "127.0.0.1:1@evil", ""):
            assert ask(port, Host=host)[0] == 421
        for path in ("/../etc/passwd", "//etc/passwd", "/report.html", "/?x", f"http://127.0.0.1:{port}/"):
            assert ask(port, path=path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "FOO"):
            assert ask(port, method)[0] == 501


# ---------------------------------------------------------------------------------------- in a browser


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(MISSING)
    with Browser(tmp_path / "profile") as found:
        yield found


def test_a_browser_follows_a_run_without_a_reload_or_a_violation(tmp_path: Path, browser: Browser) -> None:
    """From before the run exists; the filter, the focus and the page itself stay."""
    run = tmp_path / "run"
    page = page_of(run)
    random = np.random.default_rng(1)
    with serving(page) as port:
        browser.open(f"http://127.0.0.1:{port}/")
        browser.run("window.mine = 1")
        write_run(run, end=0, state="running")
        write_rollouts(run, 1, n=8, m=4, random=random, groups=1, text="pear")
        page.look()
        browser.until(
            "document.querySelectorAll('#ledger-groups .g').length === 1 && document.querySelector('canvas') !== null"
        )
        assert "starts at" in browser.run("document.querySelector('h1').textContent")
        browser.run("(() => {const f = document.getElementById('f-text'); f.value = 'pear'; f.focus();"
                    "f.dispatchEvent(new Event('input', {bubbles: true}))})()")  # fmt: skip
        grow(run, 10.0, 0.987)
        page.look()
        browser.until("document.querySelector('#scores .read').textContent.includes('0.987 at 10')")
        write_rollouts(run, 20, n=8, m=4, random=random, groups=1, text="a new pear")
        (run / "status.json").write_text('{"state": "finished"}')
        page.look()
        browser.until("document.getElementById('f-count').textContent.startsWith('2 of 2 groups')")
        browser.until("document.querySelector('h1').textContent.includes('0.987')")
        found = browser.run("[window.mine, document.activeElement.id, document.getElementById('f-text').value]")
        assert found == [1, "f-text", "pear"]
        assert "s old" in browser.run("document.getElementById('live').textContent")
    browser.until("document.getElementById('live').textContent.includes('not live')")
    assert all("ERR_CONNECTION" in one for one in browser.complaints)


def test_hostile_text_that_arrives_later_runs_nothing(tmp_path: Path, browser: Browser) -> None:
    run = write_run(tmp_path / "run", end=30)
    random = np.random.default_rng(1)
    write_rollouts(run, 1, n=4, m=2, random=random, groups=1)
    page = page_of(run)
    page.look()
    with serving(page) as port:
        browser.open(f"http://127.0.0.1:{port}/")
        for place, payload in enumerate(PAYLOADS, 2):
            write_rollouts(run, place, n=4, m=2, random=random, groups=1, text=payload, prompt=payload)
        (run / "status.json").write_text(json.dumps({"state": PAYLOADS[0], "reason": PAYLOADS[1]}))
        page.look()
        browser.run("document.getElementById('ledger').scrollIntoView()")
        browser.until("document.querySelectorAll('#ledger-groups .g').length > 12")
        shown = browser.run("document.documentElement.outerHTML")
    assert html.escape(PAYLOADS[0], quote=False) in shown
    assert "<title>PODS report:" in shown
    assert "<iframe" not in shown
    assert "<svg" not in shown
    assert browser.complaints == []
