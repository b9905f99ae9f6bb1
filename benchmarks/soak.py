"""Does a long run stay flat? python benchmarks/soak.py [--steps 5000]

The recipe tiny-pods (shipped policy, rollout log, evaluations) through the real command, with a checkpoint every 50
steps, two kept. Samples every second: resident memory of the process and of its workers, and open files. The last
quarter of the steps is compared with the second: memory within 2 %, no more open files, step time flat within its
noise (five blocks of each quarter). Exit code 1 if one of them fails. 5,000 steps take about half an hour on a quiet
core.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml

from measuring import command_line, ratios
from pods_rl.engines import PHASES
from pods_rl.recipe import shipped_recipes
from pods_rl.runs import Run

SAVE_STEPS = 50
KEPT = 2
MEMORY_LIMIT = 0.02
LIMITS = {"memory": MEMORY_LIMIT, "workers": MEMORY_LIMIT, "files": 0.0}  # the growth allowed of each
TIME_LIMIT = 1.05  # slower than this in every block is more than noise
MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """Memory and open files of the run after a step."""

    step: int
    memory: int
    workers: int
    files: int


def recipe(steps: int) -> dict[str, Any]:
    """The recipe tiny-pods with a number of steps, frequent evaluations and checkpoints."""
    shipped = yaml.safe_load(Path(shipped_recipes()["tiny-pods"]).read_text())
    shipped.pop("max_seconds")
    checkpoints = {
        "save_strategy": "steps",
        "save_steps": min(SAVE_STEPS, max(1, steps // 4)),
        "save_total_limit": KEPT,
    }
    return shipped | checkpoints | {"max_steps": steps, "eval_seconds": 20, "eval_prompts": 64}


def take_sample(pid: int, step: int) -> Sample | None:
    """Take one sample; None if the process has just ended."""
    try:
        process = psutil.Process(pid)
        workers = sum(worker.memory_info().rss for worker in process.children(recursive=True))
        sample = Sample(step, process.memory_info().rss, workers, process.num_fds())
    except psutil.Error:
        return None
    if sample.memory == 0:  # a process that has ended, and has not been waited for
        return None
    return sample


def steps_done(metrics: Path) -> int:
    """Count the lines of metrics.jsonl: one per step."""
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def watch(folder: Path, steps: int, every: float) -> tuple[list[Sample], Path]:
    """Run the command to its end; return a sample each `every` seconds, and the run directory."""
    (folder / "soak.yaml").write_text(yaml.safe_dump(recipe(steps)))
    run = folder / "run"
    command = [sys.executable, "-m", "pods_rl", "train", "--config", str(folder / "soak.yaml"), "--output", str(run)]
    samples: list[Sample] = []
    with (folder / "log.txt").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            while child.poll() is None:
                time.sleep(every)
                sample = take_sample(child.pid, steps_done(run / "metrics.jsonl"))
                if sample is not None:
                    samples.append(sample)
        finally:
            child.kill()
            child.wait()
    if child.returncode:
        raise SystemExit((folder / "log.txt").read_text()[-3000:])
    return samples, run


def quarter(values: list[tuple[int, Any]], steps: int, number: int) -> list[Any]:
    """Return the values of a quarter of the steps, 1 to 4; each value comes with its step."""
    return [value for step, value in values if (number - 1) * steps < 4 * step <= number * steps]


def judge(samples: list[Sample], seconds: list[float]) -> dict[str, Any]:
    """Compare the last quarter with the second.

    Args:
        samples: in order.
        seconds: of each step, in order. Noise is the range of ratios between five blocks of each quarter.

    >>> flat = [Sample(step, 100, 10, 5) for step in range(1, 41)]
    >>> {name: row["holds"] for name, row in judge(flat, [0.5] * 40).items()}
    {'memory': True, 'workers': True, 'files': True, 'step time': True}
    """
    steps = len(seconds)
    rows: dict[str, Any] = {}
    for name, allowed_growth in LIMITS.items():
        values = [(sample.step, getattr(sample, name)) for sample in samples]
        second = statistics.median(quarter(values, steps, 2))
        last = statistics.median(quarter(values, steps, 4))
        rows[name] = {"second": second, "last": last, "holds": last <= second * (1 + allowed_growth)}
    timed = list(enumerate(seconds, start=1))
    second_seconds = quarter(timed, steps, 2)
    last_seconds = quarter(timed, steps, 4)
    block_ratios = ratios(blocks(last_seconds), blocks(second_seconds))
    second = statistics.median(second_seconds)
    last = statistics.median(last_seconds)
    rows["step time"] = {
        "second": second,
        "last": last,
        "ratio": last / second,
        "range": [min(block_ratios), max(block_ratios)],
        "holds": min(block_ratios) <= 1.0 or last / second <= TIME_LIMIT,
    }
    return rows


def blocks(values: list[float], count: int = 5) -> list[float]:
    """Return medians of `count` equal parts, or of fewer if there are fewer values."""
    count = min(count, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    return [statistics.median(values[a:b]) for a, b in pairwise(edges)]


def table(rows: dict[str, Any]) -> str:
    """Return a line for each of what `judge` compares."""
    lines = [f"{'':12}{'2nd quarter':>14}{'last quarter':>14}{'ratio':>9}"]
    for name, row in rows.items():
        unit = MIB if name in ("memory", "workers") else 1
        ratio = f"{row['last'] / row['second']:.4f}" if row["second"] else "-"
        verdict = "holds" if row["holds"] else "FAILS"
        line = f"{name:12}{row['second'] / unit:>14.3f}{row['last'] / unit:>14.3f}{ratio:>9}  {verdict}"
        if "range" in row:
            line += " ({:.3f}-{:.3f})".format(*row["range"])
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pods-bench-") as folder:
        samples, path = watch(Path(folder), options.steps, every=1.0)
        run = Run.open(path)
        seconds = [sum(row[f"pods/seconds/{phase}"] for phase in PHASES) for row in run.metrics]
        rows = judge(samples, seconds)
        print(f"{len(seconds)} steps, {len(run.evals)} evaluations, {len(run.checkpoints())} checkpoints kept")
    print(table(rows))
    sys.exit(not all(row["holds"] for row in rows.values()))


if __name__ == "__main__":
    main()
