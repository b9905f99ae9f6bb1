"""Write what `pods plan` says of our studies: python benchmarks/planner.py

For each number of rows a step, the comparisons of the studies below, by the steps that two arms need to the first of
`TARGETS` that both reach: `src/pods_rl/planning/studies.csv`.
"""

from __future__ import annotations

import math
from pathlib import Path

from comparisons import RESULTS, write_csv
from measuring import read_csv
from pods_rl.experiment import load_experiment
from pods_rl.planning.measure import own_setting

HERE = Path(__file__).parent
STUDIES_FILE = HERE.parent / "src" / "pods_rl" / "planning" / "studies.csv"
TARGETS = ("0.5", "0.4", "0.3")
# The study, the arm, and the arm of GRPO that it is compared with.
COMPARISONS = (
    ("equal_memory_4", "pods-16-4", "grpo-4"),
    ("equal_rows_8", "pods-16-4", "grpo-8"),
    ("equal_rows_8", "grpo-4", "grpo-8"),
    ("equal_memory_16", "pods-64-16", "grpo-16"),
    ("equal_rows_16", "pods-16-4", "grpo-16"),
    ("equal_rows_16", "grpo-4", "grpo-16"),
    ("batch_words_8", "batch-2x8", "grpo-4"),
    ("batch_words_16", "batch-4x16", "grpo-16"),
    ("batch_sums_16", "batch-8x8", "grpo-4"),
    ("batch_words_32", "batch-4x16", "grpo-8"),
    ("batch_sums_32", "batch-8x8", "grpo-8"),
    ("equal_rows_32", "pods-16-4", "grpo-8"),
    ("equal_rows_32", "grpo-4", "grpo-8"),
    ("batch_words_64", "batch-16x8", "grpo-8"),
    ("many_prompts", "16x4-n8", "8x8-n8"),
)


def rows_of(study: str, arm: str, rival: str) -> dict[str, str]:
    """Return the line of a comparison."""
    runs = {run.arm: run.recipe for run in load_experiment(HERE / f"{study}.yaml", {"seeds": 1}).plan()}
    described = []
    for name in (arm, rival):
        setting = own_setting(runs[name])
        described.append(f"{setting.selection}, {setting.prompts} x {setting.n}")
    lines = read_csv(RESULTS / study / "comparisons.csv")
    measured = {row["measure"]: row for row in lines if (row["arm"], row["rival"]) == (arm, rival)}
    reached = [measured[f"steps to {target}"] for target in TARGETS if f"steps to {target}" in measured]
    row = next(row for row in reached if math.isfinite(float(row["value"])))  # both reach it
    return {
        "rows": str(runs[arm].batch_plan().rows_per_generation), "arm": described[0], "rival": described[1],
        "fewer_steps": row["value"], "low": row["low"], "high": row["high"], "study": study,
    }  # fmt: skip


def main() -> None:
    write_csv(STUDIES_FILE, [rows_of(*comparison) for comparison in COMPARISONS])


if __name__ == "__main__":
    main()
