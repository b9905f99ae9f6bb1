"""`pods watch`: the page of runs that train, served to a browser on this machine."""

from __future__ import annotations

import html
import http.client
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PAYLOADS, write_rollouts, write_run
from tests import until
from tests.chromium import CHROMIUM, MISSING, dump

from pods_rl.cli import watch
from pods_rl.report import live
from pods_rl.report.live import LivePage, Served, with_updates

GROWN = {"step": 9999, "due": 45.0, "seconds": 45.0, "accuracy": 0.987, "format_accuracy": 0.987, "both_accuracy": 0.9}


def page_of(source: Path) -> LivePage:
    return LivePage(source, baseline=lambda: "grpo")


def look(page: LivePage) -> str:
    """The page after a look at the files."""
    page._look(any(name.endswith("s.jsonl") and size for _, name, size, _ in live._files(page._source)))
    return page.served.page.decode()


def grow(run: Path) -> None:
    with (run / "evals.jsonl").open("a") as file:
        file.write(json.dumps(GROWN) + "\n")


def everything(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@contextmanager
def serving(page: Any) -> Iterator[int]:
    with watch._server(page, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, method: str = "GET", path: str = "/", **headers: str) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers


@pytest.mark.usefixtures("no_rendering")
def test_the_page_follows_a_run_from_before_it_exists(tmp_path: Path) -> None:
    run = tmp_path / "run"
    page = page_of(run)
    assert "there is no such directory yet" in look(page)
    run.mkdir()
    assert "no run yet" in look(page)
    (run / "status.json").write_text(json.dumps({"state": "running", "reason": "loading"}))
    assert "/run (1 running)" in look(page)
    (run / "status.json").unlink()
    run.rmdir()
    write_run(run, end=30)
    before = everything(run)
    first = look(page)
    assert "0.987" not in first
    assert page.served.state == "1 finished"
    grow(run)
    version = page.served.version
    assert "0.987" in look(page)
    assert page.served.version == version + 1
    grown = {run / "evals.jsonl": (run / "evals.jsonl").read_bytes()}
    assert everything(run) == before | grown  # nothing was written there
    (run / "config.yaml").unlink()
    (run / "status.json").unlink()
    assert "0.987" in look(page)  # the last report stays, with a note
    assert page.served.note.startswith("No report: ")


@pytest.mark.usefixtures("no_rendering")
def test_a_page_is_made_when_files_change_and_for_a_share_of_the_time(tmp_path: Path, monkeypatch: Any) -> None:
    """The clock moves 2 s in each making, so 6 s pass before the next look."""
    run = write_run(tmp_path / "run", end=30)
    page, clock, waits, made = page_of(run), [0.0], [], []
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])

    def make(begun: bool) -> None:
        made.append(begun)
        clock[0] += 2

    def wait(seconds: float) -> bool:
        waits.append(round(seconds, 6))
        if len(waits) == 4:
            grow(run)
        return len(waits) == 6

    monkeypatch.setattr(page, "_look", make)
    monkeypatch.setattr(page._over, "wait", wait)
    page._work()
    assert waits == [0, 6, 1, 1, 6, 1]
    assert made == [True, True]


@pytest.mark.usefixtures("no_rendering")
def test_a_thread_makes_the_pages(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", end=30)
    with page_of(run) as page:
        until(lambda: page.served.state == "1 finished")
        grow(run)
        until(lambda: b"0.987" in page.served.page)


def test_only_a_reader_on_this_machine_is_answered() -> None:
    class Still:
        served = Served(b"<p>page</p>", 7, "1 running")

    with serving(Still()) as port:
        status, body, headers = ask(port)
        assert (status, body) == (200, b"<p>page</p>")
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert json.loads(ask(port, path="/version")[1]) == {"version": 7, "state": "1 running", "note": ""}
        assert ask(port, "HEAD")[:2] == (200, b"")
        for host in ("localhost:9", "127.0.0.1", f"127.0.0.1:{port}"):  # another port: a tunnel
            assert ask(port, Host=host)[0] == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "127.0.0.1:1@evil", ""):
            assert ask(port, Host=host)[0] == 421
        for path in ("/../etc/passwd", "//etc/passwd", "/report.html", "/%2e%2e/", "/?x", f"http://127.0.0.1:{port}/"):
            assert ask(port, path=path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "FOO"):
            assert ask(port, method)[0] == 405


def test_the_policy_stays_and_allows_our_script_and_our_server() -> None:
    rules = "default-src 'none'; script-src 'sha256-x='; require-trusted-types-for 'script'; base-uri 'none'"
    page = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(rules)}"><main></main><script>1</script>'
    made = with_updates(page, 3)
    policy = re.search('content="([^"]*)', made)
    assert policy
    found = html.unescape(policy[1]).split("; ")
    assert found[0] == "default-src 'none'"
    assert re.fullmatch("script-src 'sha256-x=' 'sha256-[^']+'", found[1])
    assert set(found[2:]) == {"require-trusted-types-for 'script'", "base-uri 'none'", "connect-src 'self'"}
    assert made.index('data-version="3"') < made.index("<script>1")


# ---------------------------------------------------------------------------------- in a browser


class Growing:
    """A page whose run grows once the browser has asked a third time; it notes what is asked for."""

    def __init__(self, page: LivePage, change: Any) -> None:
        self._page, self._change, self._asked = page, change, 0

    @property
    def served(self) -> Served:
        self._asked += 1
        if self._asked == 3:
            self._change()
            look(self._page)
        return self._page.served


def shown(page: LivePage, change: Any, folder: Path, monkeypatch: Any) -> tuple[str, list[str]]:
    """The page's elements some seconds after a change, and what the browser fetched the page for."""
    fetched = []
    answer = watch._Pages.do_GET

    def noting(handler: Any) -> None:
        if handler.path == "/":
            fetched.append(handler.headers["Sec-Fetch-Dest"])
        answer(handler)

    monkeypatch.setattr(watch._Pages, "do_GET", noting)
    with serving(Growing(page, change)) as port:
        return dump(f"http://127.0.0.1:{port}/", folder / "profile"), fetched


in_browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
USER = """;(() => {
  const one = () => document.querySelectorAll("details.g")[1], sought = () => document.getElementById("f-text");
  let started = 0;
  addEventListener("load", () => { one().open = true; sought().value = "pear"; scrollTo(0, 300); started = 1; });
  (window.pods ??= []).push(() => { window.again = (window.again ?? 0) + 1; });
  setInterval(() => {
    const found = [one().open, sought().value, scrollY > 0, window.again ?? 0, performance.navigation.type, started];
    document.title = JSON.stringify(found);
  }, 50);
})();"""


@in_browser
@pytest.mark.usefixtures("no_rendering")
def test_a_browser_shows_a_new_evaluation_without_a_reload(tmp_path: Path, monkeypatch: Any) -> None:
    """Scroll, filter and open groups stay; registered functions are called for what is new."""
    run = write_run(tmp_path / "run", end=30)
    random = np.random.default_rng(1)
    write_rollouts(run, 1, n=8, m=4, random=random, groups=2, text="pear")
    asset = live._asset
    monkeypatch.setattr(live, "_asset", lambda name: asset(name) + (USER if name.endswith("watch.js") else ""))

    def change() -> None:
        grow(run)
        write_rollouts(run, 20, n=8, m=4, random=random, groups=1, text="a new rollout")

    page = page_of(run)
    assert "0.987" not in look(page)
    text, fetched = shown(page, change, tmp_path, monkeypatch)
    assert "0.987" in text
    assert "a new rollout" in text
    assert fetched == ["document", "empty"]  # one load, one update
    title = re.search("<title>(.*?)</title>", text)
    assert title
    assert json.loads(html.unescape(title[1])) == [True, "pear", True, 2, 0, 1]
    assert "live: 1 finished" in text


@in_browser
@pytest.mark.usefixtures("no_rendering")
def test_a_browser_that_waits_gets_the_first_report(tmp_path: Path, monkeypatch: Any) -> None:
    run = tmp_path / "run"
    page = page_of(run)
    look(page)
    text, _ = shown(page, lambda: write_run(run, end=30), tmp_path, monkeypatch)
    assert "How these numbers were computed" in text


@in_browser
@pytest.mark.usefixtures("no_rendering")
def test_hostile_text_that_arrives_later_runs_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    run = write_run(tmp_path / "run", end=30)
    random = np.random.default_rng(1)
    write_rollouts(run, 1, n=4, m=2, random=random, groups=1)
    page = page_of(run)
    look(page)

    def change() -> None:
        for place, payload in enumerate(PAYLOADS, 2):
            write_rollouts(run, place, n=4, m=2, random=random, groups=1, text=payload, prompt=payload)
        (run / "status.json").write_text(json.dumps({"state": PAYLOADS[0], "reason": PAYLOADS[1]}))

    before = look(page).count("<script")
    text, fetched = shown(page, change, tmp_path, monkeypatch)
    assert fetched == ["document", "empty"]
    assert html.escape(PAYLOADS[0], quote=False) in text
    assert "<title>PODS report:" in text
    assert len(re.findall("<script", text)) == before
    assert "<iframe" not in text
    assert "<svg" not in text
