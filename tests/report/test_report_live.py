"""`pods watch`: the page of runs that train, from the server. In a browser: test_report_browser.py."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

from conftest import grow, serving, write_run
from tests import DEADLINE, until

from pods_rl.report.live import LivePage


def ask(port: int, method: str = "GET", path: str = "/", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_a_report_is_made_again_when_a_file_changes_and_only_then(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", end=0, state="running")
    page = LivePage(run)
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
    page = LivePage(tmp_path / "runs")
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
    with LivePage(write_run(tmp_path / "run", end=30)) as page:
        until(lambda: b"went from" in page.served.page)


def test_only_a_reader_on_this_machine_is_answered(tmp_path: Path) -> None:
    page = LivePage(write_run(tmp_path / "run", end=30))
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
