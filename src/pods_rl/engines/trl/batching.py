"""The batch arithmetic of GRPO and PODS. Does not import torch.

Three units, always named: a **prompt**; a **rollout**, one completion generated for it (n = ``num_rollouts`` each);
a **row**, a rollout that was kept and is trained on (m = ``num_generations`` a prompt). Batch sizes count rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...distributed.processes import get_world_size
from ...errors import UserError
from ...text import counted
from ..sizes import check_sizes, whole_number

MOST_ROLLOUTS = 1_000_000
"""Rollouts of a generation batch. Their rows are in memory at once; a larger batch would end in hours of allocation."""


@dataclass(frozen=True)
class Shares:
    """The rollouts of a batch that each process generates: as many on every process.

    They are numbered over all processes, prompt by prompt: rollout p * n + i is the i-th of prompt p. Each process has
    a contiguous range, as it has of the rows of TRL's sampler. So it generates rollouts of only the prompts whose rows
    it was given, and prompts never move.

    Args:
        prompts: P of the generation batch, over all processes.
        num_rollouts: n; P * n is a multiple of ``processes``.

    >>> shares = Shares(prompts=1, num_rollouts=8, processes=2)
    >>> [shares.rollouts(process) for process in range(2)]
    [range(0, 4), range(4, 8)]
    """

    prompts: int
    num_rollouts: int
    processes: int = 1

    @property
    def rollouts_each(self) -> int:
        """The number of rollouts that a process generates."""
        return self.prompts * self.num_rollouts // self.processes

    def rollouts(self, process: int) -> range:
        """The rollouts that a process generates."""
        return range(process * self.rollouts_each, (process + 1) * self.rollouts_each)


@dataclass(frozen=True)
class BatchPlan:
    """How many prompts, rollouts and rows each part of training handles.

    A generation batch is sampled at once, from one fixed policy; an optimizer step consumes all of it, or a part if
    ``steps_per_generation`` exceeds ``gradient_accumulation_steps``.
    """

    num_generations: int  # m
    num_rollouts: int  # n
    processes: int
    micro_batch_rows: int  # of a process
    micro_batches: int  # of an optimizer step
    steps_per_generation: int  # micro-batches of a generation batch
    num_prompts: int | None = None  # of a generation batch. If None, its rows divided by m

    @property
    def rows_per_generation(self) -> int:
        return self.micro_batch_rows * self.processes * self.steps_per_generation

    @property
    def prompts_per_generation(self) -> int:
        return self.num_prompts or self.rows_per_generation // self.num_generations

    @property
    def shares(self) -> Shares:
        """Which process generates which rollouts of a generation batch."""
        return Shares(self.prompts_per_generation, self.num_rollouts, self.processes)

    def describe(self) -> list[tuple[str, str]]:
        """Return (label, value) lines to display.

        >>> settings = {"num_generations": 16, "num_rollouts": 64, "gradient_accumulation_steps": 4}
        >>> for line in batch_plan(settings, processes=2).describe():
        ...     print(*line, sep=": ")
        a prompt: 64 rollouts generated, 16 trained
        an optimizer step: 4 prompts, 256 rollouts generated, 64 rows trained
        a process: 128 rollouts generated, 32 rows trained in 4 micro-batches of 8
        """
        rows = self.micro_batch_rows * self.micro_batches
        # A fraction if a generation is spread over several steps.
        prompts = self.prompts_per_generation * rows * self.processes / self.rows_per_generation
        mean_rows = self.rows_per_generation / self.prompts_per_generation
        trained = f"{mean_rows:g} on average" if self.num_prompts else str(self.num_generations)
        rollouts_of_step = counted(prompts * self.num_rollouts, "rollout")
        rows_of_step = counted(rows * self.processes, "row")
        rollouts_of_process = counted(self.shares.rollouts_each, "rollout")
        micro_batches = f"{counted(self.micro_batches, 'micro-batch', 'es')} of {self.micro_batch_rows}"
        return [
            ("a prompt", f"{counted(self.num_rollouts, 'rollout')} generated, {trained} trained"),
            (
                "an optimizer step",
                f"{counted(prompts, 'prompt')}, {rollouts_of_step} generated, {rows_of_step} trained",
            ),
            ("a process", f"{rollouts_of_process} generated, {counted(rows, 'row')} trained in {micro_batches}"),
        ]


def batch_plan(settings: Mapping[str, Any], processes: int | None = None) -> BatchPlan:
    """Return the batch plan for settings with TRL's names and meanings; a missing one has TRL's default.

    Args:
        settings: of these, ``num_generations`` is m, at least 2 (one row has no spread, so no advantage), and
            ``num_rollouts`` n, at least m. If None, n = m, plain GRPO.
        processes: number of processes. If None, that of the launcher (``WORLD_SIZE``).

    Raises:
        UserError: a number is below its minimum, n < m, a batch splits a group, there are more than `MOST_ROLLOUTS`
            rollouts, or they cannot be shared equally by the processes (two values that work are named).

    >>> batch_plan({"num_generations": 8, "num_rollouts": 32, "per_device_train_batch_size": 16}).prompts_per_generation
    2
    """
    if processes is None:
        processes = get_world_size()
    m = settings.get("num_generations", 8)
    n = settings.get("num_rollouts")
    n, m = check_sizes(m if n is None else n, m, least=2)
    if settings.get("rollout_batch_size") is not None:
        whole_number(
            "rollout_batch_size", settings["rollout_batch_size"], why="unset it to generate all rollouts at once"
        )
    rows = whole_number("per_device_train_batch_size", settings.get("per_device_train_batch_size", 8))
    accumulation = whole_number("gradient_accumulation_steps", settings.get("gradient_accumulation_steps", 1))
    steps = _steps_per_generation(
        m, rows, processes, accumulation, settings.get("steps_per_generation"), settings.get("generation_batch_size")
    )
    num_prompts = settings.get("num_prompts")
    if num_prompts is not None:
        whole_number("num_prompts", num_prompts, why="unset it for the rows divided by num_generations")
    plan = BatchPlan(m, n, processes, rows, accumulation, steps, num_prompts)
    prompts = plan.prompts_per_generation
    if plan.rows_per_generation > prompts * n:
        raise UserError(
            f"A generation trains {plan.rows_per_generation} rows, and num_prompts = {num_prompts} x num_rollouts {n} "
            f"are {prompts * n} rollouts. Raise num_prompts or num_rollouts, or lower per_device_train_batch_size."
        )
    if prompts * n > MOST_ROLLOUTS:
        raise UserError(
            f"A generation batch may hold at most {MOST_ROLLOUTS:,} rollouts: got {prompts * n:,} "
            f"({counted(prompts, 'prompt')} x num_rollouts {n:,}). Lower num_rollouts, num_generations or "
            "per_device_train_batch_size."
        )
    if prompts * n % processes:  # a process with fewer would wait for the others, and gathered lists would not fit
        low, high = _neighbours(n, processes // math.gcd(processes, prompts))
        advice = f"{low} or {high}" if low >= m else f"{high}"
        raise UserError(
            f"Every process must generate the same number of rollouts, but {processes} processes share "
            f"{counted(prompts, 'prompt')} x num_rollouts {n} = {prompts * n}. "
            f"Set num_rollouts to {advice}."
        )
    return plan


def _steps_per_generation(
    m: int, rows: int, processes: int, accumulation: int, steps: int | None, size: int | None
) -> int:
    """Return the micro-batches of a generation batch, which must hold complete groups; `size` decides over `steps`."""
    if size is not None:
        size = whole_number("generation_batch_size", size)
        unit = math.lcm(rows * processes, m)
        if size % unit:
            low, high = _neighbours(size, unit)
            raise UserError(
                f"generation_batch_size = {size}: a generation batch must hold whole micro-batches "
                f"(per_device_train_batch_size {rows} x processes {processes}) and whole groups of num_generations = "
                f"{m} rows. Set generation_batch_size to {low} or {high}."
            )
        return size // (rows * processes)
    key = "steps_per_generation"
    if steps is None:
        key = "gradient_accumulation_steps"
        steps = accumulation
    steps = whole_number(key, steps)
    if rows * processes * steps % m:
        low, high = _neighbours(rows, m // math.gcd(m, processes * steps))
        raise UserError(
            f"A generation batch must hold whole groups of num_generations = {m} rows, but it holds "
            f"{rows * processes * steps} rows (per_device_train_batch_size {rows} x processes {processes} x "
            f"{key} {steps}). "
            f"Rows are kept rollouts, not prompts. Set per_device_train_batch_size to {low} or {high}."
        )
    return steps


def _neighbours(value: int, step: int) -> tuple[int, int]:
    """Two neighbouring multiples of ``step`` near ``value``, both at least ``step``."""
    low = max(value // step, 1) * step
    return low, low + step
