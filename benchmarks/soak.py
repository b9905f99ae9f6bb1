"""Does a long run stay flat? python benchmarks/soak.py [--steps 5000] [--json FILE]

The recipe tiny-pods (shipped policy, rollout log, evaluations) through the real command, with a checkpoint every 50
steps, two kept. Samples every second: resident memory of the process and of its workers, and open files. The last
quarter of the steps is compared with the second: memory within 2 %, no more open files, step time flat within its
noise (five blocks of each quarter). Exit code 1 if one of them fails. 5,000 steps take about half an hour on a quiet
core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

import resident
from pods_rl.recipe import shipped_recipes
from pods_rl.runs import Run

SAVE_STEPS, KEPT = 50, 2
MEMORY_LIMIT = 0.02
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


def look(pid: int, step: int) -> Sample | None:
    """Take one sample; None if the process has just ended."""
    try:
        workers = sum(resident.memory(child) for child in resident.children(pid))
        seen = Sample(step, resident.memory(pid), workers, resident.open_files(pid))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return seen if seen.memory else None


def steps_done(metrics: Path) -> int:
    """Count the lines of metrics.jsonl: one per step."""
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def watch(folder: Path, steps: int, every: float) -> tuple[list[Sample], Path]:
    """Run the command to its end; return the samples and the run directory."""
    (folder / "soak.yaml").write_text(yaml.safe_dump(recipe(steps)))
    run = folder / "run"
    command = [sys.executable, "-m", "pods_rl", "train", "--config", str(folder / "soak.yaml"), "--output", str(run)]
    samples: list[Sample] = []
    with (folder / "log.txt").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            while child.poll() is None:
                time.sleep(every)
                seen = look(child.pid, steps_done(run / "metrics.jsonl"))
                samples += [seen] if seen else []
        finally:
            child.kill()
            child.wait()
    if child.returncode:
        raise SystemExit((folder / "log.txt").read_text()[-3000:])
    return samples, run


def quarter(values: list[tuple[int, Any]], steps: int, which: int) -> list[Any]:
    """Return the values of a quarter of the steps, 1 to 4."""
    return [value for step, value in values if (which - 1) * steps < 4 * step <= which * steps]


def judge(samples: list[Sample], seconds: list[float]) -> dict[str, Any]:
    """Compare the last quarter with the second.

    Args:
        samples: in order.
        seconds: of each step, in order. Noise is the range of ratios between five blocks of each quarter.

    >>> flat = [Sample(step, 100, 10, 5) for step in range(1, 41)]
    >>> {name: row["holds"] for name, row in judge(flat, [0.5] * 40).items()}
    {'memory': True, 'workers': True, 'files': True, 'step time': True}
    """
    steps, rows = len(seconds), {}
    for name, field, allowed in (
        ("memory", "memory", MEMORY_LIMIT), ("workers", "workers", MEMORY_LIMIT), ("files", "files", 0.0)
    ):  # fmt: skip
        pairs = [(sample.step, getattr(sample, field)) for sample in samples]
        second, last = (statistics.median(quarter(pairs, steps, which)) for which in (2, 4))
        rows[name] = {"second": second, "last": last, "holds": last <= second * (1 + allowed)}
    timed = list(enumerate(seconds, 1))
    second, last = (quarter(timed, steps, which) for which in (2, 4))
    ratios = [a / b for a, b in zip(blocks(last), blocks(second), strict=True)]
    low, high = min(ratios), max(ratios)
    ratio = statistics.median(last) / statistics.median(second)
    rows["step time"] = {
        "second": statistics.median(second), "last": statistics.median(last), "ratio": ratio, "range": [low, high],
        "holds": low <= 1.0 or ratio <= TIME_LIMIT,
    }  # fmt: skip
    return rows


def blocks(values: list[float], count: int = 5) -> list[float]:
    """Return medians of `count` equal parts, or of fewer if there are fewer values."""
    count = min(count, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    return [statistics.median(values[a:b]) for a, b in pairwise(edges)]


def state_bytes(run: Run) -> float:
    """Return bytes per step of the last checkpoint's trainer_state.json: what the trainer keeps of each step."""
    last = run.checkpoints()[-1]
    return (last / "trainer_state.json").stat().st_size / int(last.name.rsplit("-", 1)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between samples (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pods-bench-") as folder:
        samples, path = watch(Path(folder), options.steps, options.every)
        run = Run.open(path)
        seconds = [
            sum(row[f"pods/seconds/{p}"] for p in ("rollout", "reward", "selection", "update")) for row in run.metrics
        ]
        rows = judge(samples, seconds)
        done = f"{len(seconds)} steps, {len(run.evals)} evaluations, {len(run.checkpoints())} checkpoints kept"
        state = state_bytes(run)
    print(f"{done}; {len(samples)} samples; trainer_state.json {state:.0f} B a step")
    print(f"{'':12}{'2nd quarter':>14}{'last quarter':>14}{'ratio':>9}")
    for name, row in rows.items():
        unit = MIB if name in ("memory", "workers") else 1
        ratio = f"{row['last'] / row['second']:.4f}" if row["second"] else "-"
        spread = " ({:.3f}-{:.3f})".format(*row["range"]) if "range" in row else ""
        verdict = "holds" if row["holds"] else "FAILS"
        print(f"{name:12}{row['second'] / unit:>14.3f}{row['last'] / unit:>14.3f}{ratio:>9}  {verdict}{spread}")
    if options.json:
        figures = {"rows": rows, "samples": [asdict(s) for s in samples], "seconds": seconds, "state_bytes": state}
        options.json.write_text(json.dumps(figures) + "\n")
    sys.exit(not all(row["holds"] for row in rows.values()))


if __name__ == "__main__":
    main()
