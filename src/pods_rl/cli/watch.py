"""``pods watch``: the report's page of runs that train, in a browser on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from ..distributed.signals import stop_on_signals
from ..errors import UserError
from ..text import console, safe_text

if TYPE_CHECKING:
    from ..report.live import LivePage

_LOOPBACK = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself adds the rest, and no-referrer
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


def watch(
    directory: Annotated[Path, Argument(help="A run or an experiment; it may begin later.")],
    port: Annotated[int, Option(min=0, max=65535, help="0: a free one.")] = 8760,
    no_browser: Annotated[bool, Option("--no_browser", help="Print the address only.")] = False,
    baseline: Annotated[str | None, Option(help="The arm to compare with. [default: as pods report]")] = None,
) -> None:
    """Show the report of runs while they train, in a browser.

    The page updates itself. It is served on this machine only (127.0.0.1), and does not change the runs. Ctrl-C ends
    it; the runs continue.

    \b
    Examples:
      pods watch runs/mine
      pods watch runs/quickstart --port 9000 --no-browser
    """
    from ..report.live import LivePage
    from .compare import _declared_baseline

    if not directory.is_dir() and (directory.exists() or not directory.absolute().parent.is_dir()):
        raise UserError(f"{directory} is not a directory, nor a place for one: name a run or an experiment.")
    live = LivePage(directory, baseline=lambda: baseline or _declared_baseline([directory]))
    with stop_on_signals() as stop, live as page, _server(page, port) as server:
        address = f"http://{_LOOPBACK}:{server.server_port}/"
        console().print(f"Watching {safe_text(directory)} at {address}  (Ctrl-C ends this, not the runs)")
        _open(address, server.server_port, wanted=not no_browser)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            stop.over()
            console().print("Stopped watching.")
    if stop.number not in (None, signal.SIGINT):
        raise typer.Exit(stop.code)


def _server(page: LivePage, port: int) -> ThreadingHTTPServer:
    """Return a server of the page on a port."""
    try:
        return ThreadingHTTPServer((_LOOPBACK, port), type("Pages", (_Pages,), {"live": page}))
    except OSError as error:
        raise UserError(f"--port {port} cannot be used: {error.strerror}. Give another, or --port 0.") from error


class _Pages(BaseHTTPRequestHandler):
    """Answers GET and HEAD of the page, its parts and its data."""

    live: LivePage
    server_version, sys_version = "pods", ""
    timeout = 30.0  # seconds for a request to arrive

    def do_GET(self) -> None:
        served = self.live.served
        state = {"version": served.version, "state": served.state, "note": served.note}
        state["age"] = int(time.monotonic() - served.made)
        answers = {
            "/": (served.page, "text/html"),
            "/parts": (served.parts, "text/html"),
            "/points": (served.points, "application/json"),
            "/rollouts": (served.rollouts, "application/json"),
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


def _open(address: str, port: int, *, wanted: bool) -> None:
    """Open a browser if there is a screen; on a machine reached through ssh, print how to see the page."""
    screen = not sys.platform.startswith("linux") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if wanted and screen:
        webbrowser.open(address)
    elif os.environ.get("SSH_CONNECTION"):
        console().print(f"From your own machine: ssh -L {port}:{_LOOPBACK}:{port} THIS_MACHINE, then open {address}")
