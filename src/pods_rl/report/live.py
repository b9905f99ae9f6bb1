"""The report's page of runs that train, made again as their files change, and its server on this machine."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from ..runs import find_runs, not_begun
from ..runs.files import CONFIG, STATUS, encoded
from .build import read_account
from .outputs import Account, to_html
from .text import one_line, tally
from .wording import Finding

LOOPBACK = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself adds the rest, and no-referrer
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class Served(NamedTuple):
    """The page that the server sends, and the state of the runs."""

    page: bytes = b""
    version: int = 0  # of the page
    state: str = "starting"
    note: str = ""  # why there is no newer report
    made: float = 0.0  # time of the report on the monotonic clock


class LivePage:
    """Follow the files of a run or an experiment, which may not exist yet, in a thread, without writing there."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._over = threading.Event()
        self._seen: tuple[dict[str, tuple[int, int]], str] | None = None  # files and state of the latest report
        self._made = False  # whether a report was made
        self.served = Served()
        self._wait(f"Reading {source}", "starting")
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> LivePage:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def _work(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            started = time.monotonic()
            self.look()
            pause = max(1.0, 3 * (time.monotonic() - started))  # a quarter of the time goes to reports

    def look(self) -> None:
        """Make the report again if a file or the state of a run has changed: a kill changes no file."""
        files = dict(_files_below(self._source))
        state = "waiting"
        with suppress(Exception):  # files of a run that begins, or damaged ones, as below
            if self._source.exists():
                counts = Counter(run.state for runs in find_runs(self._source).values() for run in runs)
                missing = not_begun(self._source)
                if missing:
                    counts["not begun"] = len(missing)
                state = tally(counts.items()) or "no run yet"
            else:
                state = "the directory does not exist yet"
        if (files, state) == self._seen:
            return
        self._seen = (files, state)
        try:
            if any(os.path.basename(path) in (CONFIG, STATUS) for path in files):  # as `is_run` recognizes a run
                self._show(read_account([self._source]), state)
                self._made = True
                return
            note = f"Waiting for the first run of {self._source} ({state})"
        except Exception as error:  # files of a run that begins, or damaged ones: another look may find better ones
            state = "waiting"
            note = f"No report: {error if isinstance(error, UserError) else repr(error)}"
        if self._made:
            self.served = self.served._replace(note=one_line(note, limit=200))
        else:
            self._wait(note, state)

    def _wait(self, message: str, state: str) -> None:
        title = os.path.basename(os.path.realpath(self._source))
        self._show(Account(title, (Finding("", one_line(message, limit=300)),)), state)

    def _show(self, account: Account, state: str) -> None:
        self.served = Served(  # one assignment: a reader sees the old or the new
            page=encoded(to_html(account, live=self.served.version + 1)),
            version=self.served.version + 1,
            state=state,
            made=time.monotonic(),
        )


def _files_below(source: Path, depth: int = 3) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the files that a report may read, with size and time: those of arm, run and rollouts. Follow links."""
    with suppress(OSError):  # removed or replaced at this moment
        for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
            with suppress(OSError):  # also a loop of links
                if entry.is_dir():
                    if depth and entry.name not in ("checkpoints", "report") and not entry.name.startswith("."):
                        yield from _files_below(Path(entry.path), depth - 1)
                elif entry.name.endswith((".json", ".jsonl", ".yaml", ".parquet")):
                    about = entry.stat()
                    yield entry.path, (about.st_size, about.st_mtime_ns)


def server(page: LivePage, port: int) -> ThreadingHTTPServer:
    """Return a server of the page on a port of this machine; raise UserError if the port cannot be used."""
    try:
        return _Server((LOOPBACK, port), type("Pages", (_Pages,), {"live": page}))
    except OSError as error:
        raise UserError(f"--port {port} cannot be used: {error.strerror}. Give another, or --port 0.") from error


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # otherwise the browser has gone in the middle of an answer
            super().handle_error(request, client_address)


class _Pages(BaseHTTPRequestHandler):
    """Answers GET and HEAD of the page and its state."""

    live: LivePage
    server_version = "pods"
    sys_version = ""
    timeout = 30.0  # seconds for a request to arrive

    def do_GET(self) -> None:
        served = self.live.served
        state = {
            "version": served.version,
            "state": served.state,
            "note": served.note,
            "age": int(time.monotonic() - served.made),
        }
        answers = {
            "/": (served.page, "text/html"),
            "/state": (json.dumps(state).encode(), "application/json"),
        }
        hosts = self.headers.get_all("Host", [])
        # a page of another site whose name resolves to this machine could read ours
        if len(hosts) != 1 or not re.fullmatch(r"(127\.0\.0\.1|localhost)(:\d+)?", hosts[0]):
            self._answer(421, b"This address is not served here.\n")
        elif self.path in answers:
            self._answer(200, *answers[self.path])
        else:
            self._answer(404, b"There is one page: /\n")

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, code: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(code)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), **_HEADERS}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
