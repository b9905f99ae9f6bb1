"""Show a page in headless Chromium, where there is one."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import DEADLINE, until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "no Chromium found: chromium, chromium-browser, google-chrome"
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


class Browser:
    """A page that is driven over a pipe with the DevTools protocol, in real time."""

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
