"""Is what `pods plan` recommends as quick as the best of a grid of real runs? `python benchmarks/plan.py --validate`.

For each task: `pods plan` once, then a run of every setting of the grid and seed, and of the recommended setting if the
grid lacks it. All train for the same processor time (`clock: cpu`). The threshold of a task is 95 % of the peak of the
mean accuracy of 16 -> 16; a setting's seconds are where its own mean accuracy over seeds first crosses it, linearly
between evaluations; intervals are 5th to 95th percentiles over resampled seeds, the same ones for all settings.
What is done already is read, and not made again.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pods_rl.planning.grid import PLANNED, Setting
from pods_rl.report.arms import arms_from_runs
from pods_rl.report.statistics import time_to

GOAL, SHARE, RESAMPLES = 1.10, 0.95, 1000
BASE = {
    "temperature": 1.0, "loss_type": "grpo", "gradient_checkpointing": False, "bf16": False,
    "use_cpu": True, "threads": 1, "clock": "cpu", "eval_prompts": 128,
    "eval_completions": False, "ledger_every": 0, "num_generations": 16, "per_device_train_batch_size": 16,
}  # fmt: skip
FAMILIES = {
    "arithmetic": {
        "model_name_or_path": "tiny", "max_completion_length": 56, "learning_rate": 1e-4,
        "max_seconds": 30, "eval_seconds": 3,
    },
    "words": {
        "model_name_or_path": "tiny-words", "max_completion_length": 48, "learning_rate": 2e-4,
        "max_seconds": 60, "eval_seconds": 5,
    },
}  # fmt: skip
# In the time of the others, no setting learns hard words.
LONGER = {"words-hard": {"max_seconds": 120, "eval_seconds": 10}}
TASKS: dict[str, dict[str, Any]] = {
    f"{family}-{difficulty}": {
        "task": family,
        "task_difficulty": difficulty,
        **keys,
        **LONGER.get(f"{family}-{difficulty}", {}),
    }
    for family, keys in FAMILIES.items()
    for difficulty in ("easy", "mixed", "hard")
}
BASELINE, PLAN = "16-16", "planned"
# One prompt a step. A plan keeps the 16 rows of a step, so with m = 8 it has two prompts: another setting.
GRID: dict[str, dict[str, Any]] = {
    f"{n}-{m}": {"num_rollouts": n, "num_generations": m, "per_device_train_batch_size": m}
    for n, m in ((16, 16), (32, 16), (64, 16), (16, 8), (32, 8))
}


def validate(
    tasks: Sequence[str], folder: Path, *, seeds: int, seconds: float, parallel: int, keys: Mapping[str, Any]
) -> None:
    """Make what is missing of the runs of these tasks under a folder, and print the table after each task.

    Args:
        seconds: of `pods plan`.
        parallel: runs at the same time.
        keys: of all recipes, in place of `BASE`.
    """
    rows: list[list[str]] = []
    for task in tasks:
        base = {**BASE, **TASKS[task], **keys}
        place = folder / task
        arm, label = recommended(base, folder, task, seconds)
        arms = GRID if arm in GRID else {**GRID, PLAN: read(folder / f"{task}-plan.yaml", PLANNED)}
        experiment = folder / f"{task}.yaml"
        write(experiment, {"name": task, "baseline": BASELINE, "arms": arms, "seeds": seeds, "base": base})
        words = ["compare", "--config", str(experiment), "--output", str(place), "--parallel", str(parallel)]
        subprocess.run([sys.executable, "-m", "pods_rl", *words], check=True)
        rows += table(task, place, arm, label)
        show(rows, folder / "validation.csv")


def recommended(base: Mapping[str, Any], folder: Path, task: str, seconds: float) -> tuple[str, str]:
    """Return the arm and the label of what `pods plan` recommends for a task; its output is kept."""
    recipe, planned = folder / f"{task}-recipe.yaml", folder / f"{task}-plan.yaml"
    if not planned.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write(recipe, {**base, "num_rollouts": 16})
        words = ["plan", "--config", str(recipe), "--seconds", f"{seconds:g}", "--write", str(planned)]
        done = subprocess.run([sys.executable, "-m", "pods_rl", *words], check=True, stdout=subprocess.PIPE, text=True)
        (folder / f"{task}-plan.txt").write_text(done.stdout, encoding="utf-8")
        print(done.stdout, flush=True)
    setting = Setting.of(read(planned, PLANNED))
    rows = base["per_device_train_batch_size"]
    same = [
        arm for arm, keys in GRID.items() if (Setting.of(keys), keys["per_device_train_batch_size"]) == (setting, rows)
    ]
    return same[0] if same else PLAN, setting.label


def table(task: str, place: Path, arm: str, label: str) -> list[list[str]]:
    """Return a row for each setting of a task: seconds to the threshold, and its ratio to the best of the grid."""
    curves = {one.name: one.curve for one in arms_from_runs([place], "accuracy") if one.curve is not None}
    base, rng = curves[BASELINE], np.random.default_rng(0)
    drawn = rng.integers(len(base.runs), size=(RESAMPLES, len(base.runs)))
    target = SHARE * np.nanmax(base.mean)
    targets = SHARE * np.nanmax(base.scores[drawn].mean(axis=1), axis=1)
    found, spread = {}, {}
    for name, curve in curves.items():
        found[name] = float(time_to(curve.mean, curve.times, target, interpolated=True))
        again = drawn % len(curve.runs)  # runs are in the order of their seeds
        means, times = curve.scores[again].mean(axis=1), curve.seconds[again].mean(axis=1)
        spread[name] = time_to(means, times, targets, interpolated=True)
    best = min(GRID, key=lambda name: found.get(name, np.inf))
    rows = []
    for name, seconds in found.items():
        ratio, ratios = seconds / found[best], spread[name] / spread[best]
        mark = {best: "best of the grid"}.get(name, "")
        mark = ", ".join(filter(None, [mark, f"recommended ({label})" if name == arm else ""]))
        goal = ("within the goal" if ratio <= GOAL else "misses the goal") if name == arm else ""
        rows.append(
            [task, f"{target:.3f}", name.replace("-", " -> "), number(seconds), interval(spread[name]),
             number(ratio), interval(ratios), "; ".join(filter(None, [mark, goal]))]
        )  # fmt: skip
    return rows


def number(value: float) -> str:
    return f"{value:.3g}" if np.isfinite(value) else "never"


def interval(values: np.ndarray) -> str:
    """Return the 5th and 95th percentile; a resample that never gets there counts as infinite."""
    known = np.where(np.isnan(values), np.inf, values)
    return " to ".join(number(float(np.quantile(known, at, method="inverted_cdf"))) for at in (0.05, 0.95))


HEAD = ["task", "threshold", "setting", "seconds", "90 %", "ratio to the best", "90 %", ""]


def show(rows: Sequence[Sequence[str]], path: Path) -> None:
    """Print the rows as a Markdown table, and write them as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([HEAD, *rows])
    print("\n".join(f"| {' | '.join(row)} |" for row in [HEAD, ["---"] * len(HEAD), *rows]), flush=True)


def write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")


def read(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {key: values[key] for key in keys}
