"""Show a page in headless Chromium, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

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
