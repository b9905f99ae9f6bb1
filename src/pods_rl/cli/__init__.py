"""The command line: ``pods train | eval | compare | report | watch | plan | select | doctor | ...``.

This module imports almost nothing, so that signals are handled before anything else is imported. The commands are in
`commands`, and each imports heavy libraries inside its function, so that ``pods --help`` stays fast.
"""

from __future__ import annotations

import signal


def main() -> None:
    """The ``pods`` command. It is a process of its own: its signal handlers stay until the process ends."""
    # Python's own handlers would end an import with a traceback. So signals wait until ours are set.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    from ..distributed.signals import end_on_signals

    end_on_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    from .commands import run

    run()
