"""Print what CHANGELOG.md says of a version, as the notes of its release: python tools/notes.py 0.1.0

It refuses a version that the file does not have, and one that is not dated yet.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parents[1] / "CHANGELOG.md"


def notes_of(version: str, changelog: str) -> str:
    """Return the part of a changelog below the heading of a version.

    >>> text = "# Changelog\\n\\n## 0.2.0 (2026-12-01)\\n\\n- New.\\n\\n## 0.1.0 (2026-11-01)\\n\\nFirst release.\\n"
    >>> notes_of("0.2.0", text), notes_of("0.1.0", text)
    ('- New.', 'First release.')
    >>> notes_of("0.3.0", text)
    Traceback (most recent call last):
    SystemExit: CHANGELOG.md has no heading of 0.3.0 with a date, as in: ## 0.3.0 (2026-12-01)
    """
    for part in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        if re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading):
            return text.strip()
    raise SystemExit(f"CHANGELOG.md has no heading of {version} with a date, as in: ## {version} (2026-12-01)")


if __name__ == "__main__":
    print(notes_of(sys.argv[1], CHANGELOG.read_text(encoding="utf-8")))
