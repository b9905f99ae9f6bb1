"""Rewards and rules that go wrong on one process of several; and processes that only wait for each other."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pods_rl.distributed import Failure, busy, watch, watching
from pods_rl.errors import UserError
from pods_rl.runs import RunWriter

LIMIT = 600.0
if __name__ != "__main__" or "refuse" in sys.argv:
    watch.GRACE = LIMIT  # however slow the first process is, no other says the same in its stead


def raises_on_one(text: str, gold: str) -> float:
    """A reward."""
    if os.environ["RANK"] == "1":
        raise ValueError("no score for this one")
    return float(len(text))


def stalls_on_one(rewards: torch.Tensor, m: int, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """A rule."""
    if os.environ["RANK"] == "1":
        time.sleep(3600)
    return torch.arange(m).repeat(len(rewards), 1)


def main(fault: str, output: Path) -> None:
    """Join the others, then `wait` on process 1 until the test kills it, or `refuse` there; or `finish`, while the
    launcher gets a SIGTERM after it was written that the run has finished."""
    rank = int(os.environ["RANK"])
    writer = RunWriter(output) if rank == 0 else None

    def end(failure: Failure) -> None:
        if writer:
            writer.write_status(failure.state, reason=failure.reason)

    if writer:
        writer.write_status("running", step=3)
    with watching(LIMIT, end):
        dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
        dist.barrier()
        (output / f"process-{rank}").write_text(str(os.getpid()))
        with busy("waiting"):
            if rank == 1 and fault == "refuse":
                raise UserError("Nothing to train on.\nPut some there.")
            if rank == 1 and fault == "wait":
                time.sleep(3600)
            if writer and fault == "finish":
                writer.write_status("finished")
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a run that has written its end
                os.kill(os.getppid(), signal.SIGTERM)
        dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[sys.argv.index("--output") + 1]))
