"""The trainer's side of the rollout worker: its queue, and the error that ends a run without rollouts."""

from __future__ import annotations

import math
import queue
import time
from contextlib import suppress
from typing import Any

import requests
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from .loop import DeadGroupsError, FrozenServerError, KeptSample, PODSRolloutLoop

CHECK_EVERY = 10.0  # seconds between two checks of the worker and the server

RESUME = "resume from the last checkpoint: trainer.train(resume_from_checkpoint=True)."
START_SERVER = f"Start the vLLM server again, and {RESUME}"
CORRECT = f"Correct this, and {RESUME}"


class LostRolloutsError(RuntimeError):
    """The rollout worker or the vLLM server has ended, so the run cannot continue."""


class PODSRolloutWorker(AsyncRolloutWorker):
    """TRL's worker with the loop of PODS, and the queue that TRL's data set reads."""

    _loop_cls = PODSRolloutLoop
    lost: str | None = None  # why there are no more rollouts, and what to do
    _process: Any
    finished_groups: set[int]  # ids of the groups that were read or dropped, by which the trainer counts epochs
    _next_check = 0.0
    _group = -1  # of the sample that was returned last
    _staleness = 0  # of the first sample of that group

    def start(self) -> None:
        super().start()
        # While our copy of a pipe's writing end is open, reading a message that a killed process began waits forever.
        # Closed, it raises EOFError.
        for pipe in (self.rollout_buffer, self.metrics_queue):
            pipe._writer.close()

    def get(self, timeout: float) -> KeptSample:
        """Return the next sample, with its group's metrics instead of its own.

        A group's rows follow each other. If the policy is updated between two of them, the later rows keep the
        staleness of the first, because TRL drops single rows that are too old.

        Raises:
            queue.Empty: none within `timeout` seconds.
            LostRolloutsError: the worker or the server has ended, also if samples are left.
        """
        if time.monotonic() >= self._next_check:
            self.check_health(math.inf)  # TRL checks for a worker that hangs
            self._next_check = time.monotonic() + CHECK_EVERY
        sample: KeptSample = self.rollout_buffer.get(timeout=timeout)
        if sample.group_id != self._group:
            self._group = sample.group_id
            self._staleness = self.model_version - sample.model_version
        sample.model_version = self.model_version - self._staleness
        # A group counts also if the trainer drops this sample, because it is too old.
        self.finished_groups.add(sample.group_id)
        self.finished_groups.update(sample.dropped_groups)
        sample.metrics = sample.group_metrics | {"pods/selected/reward_mean": sample.metrics["reward"]}
        return sample

    def qsize(self) -> int:
        return int(self.rollout_buffer.qsize())

    def check_health(self, stale_after_s: float) -> None:
        """Raise LostRolloutsError if the worker or the server has ended, and TRL's error if the worker hangs."""
        self.lost = self.lost or self._find_loss()
        if self.lost:
            raise LostRolloutsError(f"No more rollouts: {self.lost}")
        super().check_health(stale_after_s)

    def stop(self) -> None:
        self.lost = self.lost or self._find_loss()
        if self.lost and self._process is not None:
            # TRL would wait for the process: for its requests, and if it was killed, forever.
            self._process.kill()
            self._process.join()
            self._process = None
        super().stop()
        self.metrics_queue: Any = queue.Queue()  # the trainer reads it whenever it logs

    def _find_loss(self) -> str | None:
        """Return why there are no more rollouts, and what to do; None if the worker and the server run."""
        if self._process is None:
            return None
        url = self._loop_kwargs["vllm_server_url"]
        if self._failed_event.is_set():
            with suppress(queue.Empty):
                kind, text, _ = self._exception_info_queue.get(timeout=5)
                message = " ".join(text.split())
                if kind == FrozenServerError.__name__:
                    return f"{message}. {START_SERVER}"
                if kind == DeadGroupsError.__name__:
                    return f"{message}. {CORRECT}"
                # The worker's requests fail if the server has ended.
                advice = CORRECT if _is_healthy(url) else START_SERVER
                return f"the rollout worker failed with {kind}: {message}. {advice}"
        if not self._process.is_alive():
            return f"the rollout worker ended with exit code {self._process.exitcode}. To continue, {RESUME}"
        # A busy server can refuse one connection, so it is asked again.
        if not _is_healthy(url):
            time.sleep(1)
            if not _is_healthy(url):
                return f"the vLLM server at {url} cannot be reached or reports that it has failed. {START_SERVER}"
        return None


def _is_healthy(url: str) -> bool:
    """Return whether a vLLM server reports that it runs; a slow one counts as running."""
    try:
        return bool(requests.get(f"{url}/health", timeout=5).ok)
    except requests.ReadTimeout:
        return True
    except requests.RequestException:
        return False
