"""Print the oldest version of each library that this project allows: python tools/oldest.py > oldest.txt

A line for each runtime dependency of pyproject.toml, pinned to its lower bound, for `pip install -r`.
`make test-oldest` installs and tests these.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def oldest(requirement: str) -> str:
    """Return a requirement as the pin of its lower bound.

    Raises:
        ValueError: it has no lower bound.

    Example:
        >>> oldest("transformers>=5.3.0,<5.25")
        'transformers==5.3.0'
    """
    match = re.match(r"([\w.-]+)\s*>=\s*([\w.]+)", requirement)
    if match is None:
        raise ValueError(f"Expected a requirement that begins as in name>=1.0, got {requirement!r}.")
    name, version = match.groups()
    return f"{name}=={version}"


def main() -> None:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    for requirement in project["dependencies"]:
        print(oldest(requirement))


if __name__ == "__main__":
    main()
