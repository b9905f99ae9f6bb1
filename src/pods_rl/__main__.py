"""The ``pods`` command, also ``python -m pods_rl``."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
