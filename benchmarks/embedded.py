"""GRPO 16, GRPO 64 and PODS 64 -> 16 on the shipped policy, eight seeds: python benchmarks/embedded.py

Trains what is not trained yet (24 runs, two at a time, one core each, about 18 minutes), then writes
`docs/results/embedded/`: the report against each GRPO baseline, and what each arm had spent when it reached the
threshold (seconds, optimizer steps, tokens generated, tokens trained).
"""

from __future__ import annotations

import argparse
import csv
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from pods_rl.report import build_report
from pods_rl.runs import Run, find_runs

HERE = Path(__file__).parent
BASELINES = ("grpo-16", "grpo-64")
SPENT = ("seconds", "steps", "tokens generated", "tokens trained", "seconds a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/embedded"), help="where the runs are, or will be")
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs" / "results" / "embedded")
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()
    command = ["compare", "--config", str(HERE / "embedded.yaml"), "--output", str(options.runs)]
    subprocess.run([sys.executable, "-m", "pods_rl", *command, "--parallel", str(options.parallel)], check=True)
    options.output.mkdir(parents=True, exist_ok=True)
    for baseline in BASELINES:
        files = build_report(options.runs, options.runs / f"report-{baseline}", baseline=baseline)
        for source in (files.png, files.markdown, files.speedup, files.csv["final"], files.csv["phases"]):
            shutil.copy(source, options.output / f"{baseline}-{source.name}")
    write_spent(find_runs(options.runs), options.output / "spent.csv")


def write_spent(arms: dict[str, list[Run]], path: Path) -> None:
    """What each arm had spent when its mean accuracy first reached 99 % of each baseline's peak."""
    curves = {
        arm: np.mean([[row["accuracy"] for row in run.evals] for run in runs], axis=0) for arm, runs in arms.items()
    }
    rows = []
    for baseline in BASELINES:
        threshold = 0.99 * curves[baseline].max()
        for arm, runs in arms.items():
            reached = np.flatnonzero(curves[arm] >= threshold)
            spent = [spent_at(run, int(reached[0])) for run in runs] if len(reached) else []
            means = [statistics.mean(values) for values in zip(*spent, strict=True)] or [""] * len(SPENT)
            rows.append([baseline, f"{threshold:.4f}", arm, *(f"{m:.4g}" if m != "" else "never" for m in means)])
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["baseline", "threshold", "arm", *SPENT], *rows])
    for row in rows:
        print("  ".join(f"{cell:>12}" for cell in row))


def spent_at(run: Run, evaluation: int) -> tuple[float, ...]:
    at = run.evals[evaluation]
    rows = [row for row in run.metrics if row["step"] <= at["step"]]
    generated = sum(row["pods/tokens/generated"] for row in rows)
    trained = sum(row["pods/tokens/trained"] for row in rows)
    return at["seconds"], at["step"], generated, trained, at["seconds"] / max(1, at["step"])


if __name__ == "__main__":
    main()
