"""The report's page of runs that train: made again in memory as their files change, with a script that updates it."""

from __future__ import annotations

import html
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ..errors import UserError
from ..runs import find_runs
from ..runs.files import EVALS, METRICS
from .build import build_report
from .pages import _asset, _hash, content_security_policy
from .text import plain

_LOOK = 1.0  # seconds between looks at the files
_SHARE = 0.25  # of the time is spent on making pages
_POLICY = re.compile('(<meta http-equiv="Content-Security-Policy" content=")([^"]*)')
_WAITING = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>PODS: {title}</title><style>{style}</style></head>
<body><header><p class="kicker">PODS report · {title}</p><h1>{message}</h1></header><main></main></body></html>
"""


class Served(NamedTuple):
    """A page, its number, what the runs do, and why there is no newer page."""

    page: bytes
    version: int
    state: str
    note: str = ""


class LivePage:
    """Makes the page of a run or an experiment whenever its files change, in a thread; nothing is written there.

    Args:
        source: a run or an experiment; before it exists the page says what it waits for.
        baseline: returns it, as `build_report` takes it; called for each page.
        look: seconds between looks at the files.
    """

    def __init__(
        self, source: Path, *, baseline: Callable[[], str | None] = lambda: "grpo", look: float = _LOOK
    ) -> None:
        self._source, self._baseline, self._least = source, baseline, look
        self._over = threading.Event()
        self._made = False  # whether a report was made
        self.served = Served(b"", 0, "starting")
        self._publish(self._waiting(f"Reading {source}"), "starting")
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> LivePage:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def _work(self) -> None:
        seen: frozenset[object] | None = None
        pause = 0.0
        while not self._over.wait(pause):
            pause = self._least
            files = frozenset(_files(self._source))
            if files != seen:
                started, seen = time.monotonic(), files
                self._look(any(name in (METRICS, EVALS) and size for _, name, size, _ in files))
                pause = max(pause, (time.monotonic() - started) * (1 / _SHARE - 1))

    def _look(self, begun: bool) -> None:
        """Make the page that the files give now; a report stays if they give none."""
        try:
            state = self._state()
            if begun:
                with TemporaryDirectory(prefix="pods-watch-") as folder:
                    page = build_report(self._source, folder, baseline=self._baseline()).html.read_text("utf-8")
                self._made = True
                self._publish(page, state)
                return
            note = f"Waiting for the first step of {self._source} ({state})"
        except Exception as error:  # files of a run that begins, or damaged ones: another look may find better ones
            state, note = "waiting", f"No report: {str(error) if isinstance(error, UserError) else repr(error)}"
        if self._made:
            self.served = self.served._replace(note=plain(note, limit=200))
        else:
            self._publish(self._waiting(note), state)

    def _state(self) -> str:
        if not self._source.exists():
            return "there is no such directory yet"
        counts = Counter(run.state for runs in find_runs(self._source).values() for run in runs)
        return ", ".join(f"{count} {plain(state, limit=20)}" for state, count in counts.items()) or "no run yet"

    def _waiting(self, message: str) -> str:
        style = _asset("templates/report.css")
        policy, title = content_security_policy(style), self._source.resolve().name
        escaped = {key: html.escape(plain(text, limit=300)) for key, text in (("title", title), ("message", message))}
        return _WAITING.format(policy=html.escape(policy), style=style, **escaped)

    def _publish(self, page: str, state: str) -> None:
        version = self.served.version + 1
        self.served = Served(with_updates(page, version).encode("utf-8"), version, state)


def with_updates(page: str, version: int) -> str:
    """Return a page with the script that updates it, whose policy allows that script and requests to its own server.

    >>> page = '<meta http-equiv="Content-Security-Policy" content="default-src &#39;none&#39;"><main></main></body>'
    >>> html.unescape(with_updates(page, 3))[52:111]
    "default-src 'none'; connect-src 'self'; script-src 'sha256-"
    """
    script = _asset("templates/watch.js")
    found = _POLICY.search(page)
    assert found
    rules = dict(rule.partition(" ")[::2] for rule in html.unescape(found[2]).split("; "))
    rules |= {"connect-src": "'self'", "script-src": f"{rules.get('script-src', '')} {_hash(script)}".strip()}
    rules |= {"require-trusted-types-for": "'script'"}
    policy = html.escape("; ".join(f"{name} {value}" for name, value in rules.items()))
    page = page[: found.start(2)] + policy + page[found.end(2) :]
    head, end, rest = page.rpartition("</main>")  # before the page's other scripts, which change what was sent
    return f'{head}{end}<script data-version="{version}">{script}</script>{rest}'


def _files(source: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield folder, name, size and time of each file that a report may read."""
    for folder, folders, names in os.walk(source):
        folders[:] = [name for name in folders if name not in ("checkpoints", "report") and not name.startswith(".")]
        for name in names:
            if name.endswith((".json", ".jsonl", ".yaml", ".parquet")):
                with suppress(OSError):  # replaced at this moment
                    about = os.stat(os.path.join(folder, name))
                    yield folder, name, about.st_size, about.st_mtime_ns
