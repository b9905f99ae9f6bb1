"""Show a page in headless Chromium, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread

from . import DEADLINE

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "no Chromium found: chromium, chromium-browser, google-chrome"
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=6000 --dump-dom"
)


def dump(page: Path | str, profile: Path) -> str:
    """The elements of a page, a file or an address, as they stand after its scripts have run."""
    assert CHROMIUM
    command = [
        CHROMIUM,
        *_FLAGS.split(),
        f"--user-data-dir={profile}",
        page if isinstance(page, str) else page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True).stdout


def visit(page: str, profile: Path) -> str:
    """Show a page as time passes, so that it scrolls and paints; return what it posts to /done."""
    posted: Queue[str] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(page if self.path == "/" else "")

        def do_POST(self) -> None:
            posted.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self._answer("")

        def _answer(self, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    assert CHROMIUM
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        flags = [flag for flag in _FLAGS.split() if not flag.startswith(("--virtual", "--dump"))]
        address = f"http://127.0.0.1:{server.server_port}/"
        browser = subprocess.Popen(
            [CHROMIUM, *flags, f"--user-data-dir={profile}", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return posted.get(timeout=DEADLINE)
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
