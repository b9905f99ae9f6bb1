"""The ``pods`` command, also ``python -m pods_rl``."""

from __future__ import annotations

import signal


def main() -> None:
    """Run `cli.main`; until it has set handlers, signals wait."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    from .cli import main as command

    command()


if __name__ == "__main__":
    main()
