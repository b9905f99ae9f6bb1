"""Compare the arms of a study, from its curves: python benchmarks/comparisons.py STUDY [--runs FOLDER]

Reads `curves.csv` in the study's folder of `docs/results/` and writes `comparisons.csv` beside it: for each pair of
arms, on the seeds that both have, the difference in accuracy at the end and over time, the speedup to each target, in
seconds and in steps, and what a step costs. All intervals are Student's t at 95 %, paired by seed: on differences of
scores, on times as `pods_rl.report.statistics.speedups_to` describes, and on log ratios of costs.

With `--runs`, first makes `curves.csv` and `runs.csv` from the finished runs of `pods compare` in that folder.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from measuring import command_line
from pods_rl.report.analysis import cost_of
from pods_rl.report.intervals import Array, difference
from pods_rl.report.statistics import Speedup, speedups_to
from pods_rl.runs import find_runs

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PHASES = ("rollout", "reward", "selection", "update")
PILOT_SEEDS = (100, 101)  # of the studies whose file also has the runs that chose their learning rates
OVER_TIME = "accuracy over time"
AT_END = "final accuracy"
COST = "seconds a step"


class Pair(NamedTuple):
    """An arm and the one that it is compared with."""

    arm: str
    rival: str


@dataclass(frozen=True)
class Study:
    """What to compare, and the accuracies to which times are measured: all were chosen before the study's runs."""

    pairs: tuple[Pair, ...]
    targets: tuple[float, ...]


def against(rival: str, *arms: str) -> tuple[Pair, ...]:
    """Return the pairs of several arms with one."""
    return tuple(Pair(arm, rival) for arm in arms)


# The arms of `regimes` are PROMPTSxM-nN at a learning rate: 16x4-n8 generates 8 rollouts for each of 16 prompts and
# trains on 4 of each.
REGIMES = (
    *against("4x16-n16@0.0002", "16x4-n8@0.0004", "16x4-n16@0.0004", "4x16-n32@0.0002", "4x16-n64@0.0004"),
    *against("16x4-n4@0.0004", "16x4-n8@0.0004", "16x4-n16@0.0004"),
    *against("4x16-n16-trl@0.0002", "4x16-n16@0.0002"),
    *against("1x4-n4@0.0002", "1x4-n8@0.0002", "1x4-n16@0.0002"),
    *against("1x16-n16@0.0002", "1x16-n32@0.0002", "1x16-n64@0.0002", "1x4-n16@0.0002"),
    *against("1x16-n16-trl@0.0002", "1x16-n16@0.0002", "1x16-n64@0.0002"),
    *against("16x4-n16-max-reward@0.0004", "16x4-n16@0.0004"),
    *against("16x4-n16-random@0.0004", "16x4-n16@0.0004"),
    *against("16x4-n16-percentile@0.0004", "16x4-n16@0.0004"),
    *against("1x16-n64-max-reward@0.0002", "1x16-n64@0.0002"),
    *against("1x16-n64-random@0.0002", "1x16-n64@0.0002"),
    *against("1x16-n64-percentile@0.0002", "1x16-n64@0.0002"),
)
EQUAL_MEMORY_4 = (
    *against("grpo-4", "pods-16-4", "grpo-16-accumulated", "grpo-16"),
    *against("grpo-16-accumulated", "pods-16-4"),
    *against("grpo-16", "pods-16-4"),
    *against("grpo-4-trl", "grpo-4", "pods-16-4"),
)
EQUAL_MEMORY_16 = (
    *against("grpo-16", "pods-64-16", "grpo-64-accumulated", "grpo-64"),
    *against("grpo-64-accumulated", "pods-64-16"),
    *against("grpo-64", "pods-64-16"),
    *against("grpo-16-trl", "grpo-16", "pods-64-16"),
)
STUDIES = {
    "equal_memory_4": Study(EQUAL_MEMORY_4, (0.3, 0.4, 0.5, 0.6)),
    "equal_memory_16": Study(EQUAL_MEMORY_16, (0.3, 0.4, 0.5, 0.6)),
    "equal_rows_8": Study(
        (*against("grpo-8", "pods-16-4", "pods-8-2", "grpo-4"), *against("grpo-4", "pods-16-4")), (0.3, 0.4, 0.5)
    ),
    "many_prompts": Study(against("8x8-n8", "16x4-n8"), (0.3, 0.4, 0.5, 0.6)),
    "regimes": Study(REGIMES, (0.5, 0.6, 0.7, 0.8)),
    "regimes/first_processor": Study(against("1x16-n16@0.0002", "1x16-n64@0.0002"), (0.5, 0.6, 0.7, 0.8)),
    # of an earlier version, which kept the last score of each run and no curves
    "study": Study(
        (
            *against("grpo-16", "pods-64-16"),
            *against("grpo-16-trl", "pods-64-16"),
            *against("grpo-ga-64", "pods-64-16"),
            *against("pods-32-16", "pods-64-16"),
            *against("pods-128-16", "pods-64-16"),
            *against("pods-64-8", "pods-64-16"),
            *against("pods-64-4", "pods-64-16"),
            *against("pods-64-2", "pods-64-16"),
            *against("max-reward-64-16", "pods-64-16"),
            *against("random-64-16", "pods-64-16"),
            *against("percentile-64-16", "pods-64-16"),
            *against("before-64-16", "pods-64-16"),
        ),
        (),
    ),
    "chat": Study((*against("grpo-8", "pods-32-8"), *against("grpo-8-trl", "pods-32-8", "grpo-8")), (0.5, 0.65, 0.8)),
}


class Curves(NamedTuple):
    """The evaluations of an arm, each ``[R, C]``: R seeds, C checkpoints. NaN where a run has none."""

    seeds: list[int]
    due: list[float]  # nominal seconds of the checkpoints
    accuracy: Array
    seconds: Array
    steps: Array

    def of(self, seeds: Sequence[int]) -> Curves:
        """Return those of some seeds, in that order."""
        rows = [self.seeds.index(seed) for seed in seeds]
        return Curves([*seeds], self.due, self.accuracy[rows], self.seconds[rows], self.steps[rows])

    def scores_at(self, due: Sequence[float]) -> Array:
        """Return the accuracy at some nominal seconds, ``[R, len(due)]``."""
        return self.accuracy[:, [self.due.index(moment) for moment in due]]

    def complete(self) -> set[float]:
        """Return the nominal seconds at which every run has an evaluation."""
        has_all = ~np.isnan(self.accuracy).any(axis=0)
        return {moment for moment, every_run in zip(self.due, has_all, strict=True) if every_run}

    @property
    def step_seconds(self) -> Array:
        return np.nanmax(self.seconds, axis=1) / np.nanmax(self.steps, axis=1)


def read_curves(path: Path) -> dict[str, Curves]:
    """Return the curves of each arm; an arm at a learning rate is ARM@RATE if the file has rates."""
    points: dict[str, dict[tuple[int, float], list[float]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name = row["arm"]
            if "rate" in row:
                name = f"{name}@{row['rate']}"
            place = (int(row["seed"]), float(row["due"]))
            points.setdefault(name, {})[place] = [float(row[key]) for key in ("accuracy", "seconds", "step")]
    curves = {}
    for name, of_arm in points.items():
        seeds = sorted({seed for seed, _ in of_arm})
        due = sorted({moment for _, moment in of_arm})
        table = np.full((len(seeds), len(due), 3), math.nan)
        for (seed, moment), values in of_arm.items():
            table[seeds.index(seed), due.index(moment)] = values
        curves[name] = Curves(seeds, due, table[:, :, 0], table[:, :, 1], table[:, :, 2])
    return curves


def compare(pair: Pair, curves: dict[str, Curves], targets: Sequence[float]) -> list[dict[str, Any]]:
    """Return a row for each measure of a pair, on the seeds that both arms have."""
    seeds = sorted(set(curves[pair.arm].seeds) & set(curves[pair.rival].seeds) - set(PILOT_SEEDS))
    arm = curves[pair.arm].of(seeds)
    rival = curves[pair.rival].of(seeds)
    due = sorted(arm.complete() & rival.complete())
    arm_scores = arm.scores_at(due)
    rival_scores = rival.scores_at(due)
    rows = [
        score_row(AT_END, arm_scores[:, -1], rival_scores[:, -1]),
        # the mean over the evaluations after the start
        score_row(OVER_TIME, arm_scores[:, 1:].mean(axis=1), rival_scores[:, 1:].mean(axis=1)),
    ]
    for unit, arm_clock, rival_clock in (("seconds", arm.seconds, rival.seconds), ("steps", arm.steps, rival.steps)):
        for result in speedups_to((rival.accuracy, rival_clock), (arm.accuracy, arm_clock), targets, paired=True):
            rows.append(time_row(unit, result))
    rows.append(cost_row(arm.step_seconds, rival.step_seconds))
    named = []
    for row in rows:
        named.append({"arm": pair.arm, "rival": pair.rival, "seeds": len(seeds), **row})
    return named


def compare_ends(pair: Pair, scores: dict[str, dict[int, float]]) -> list[dict[str, Any]]:
    """Return the row of the last scores, where no more is left of a study."""
    seeds = sorted(scores[pair.arm].keys() & scores[pair.rival].keys())
    arm_R = np.array([scores[pair.arm][seed] for seed in seeds])
    rival_R = np.array([scores[pair.rival][seed] for seed in seeds])
    return [{"arm": pair.arm, "rival": pair.rival, "seeds": len(seeds), **score_row(AT_END, arm_R, rival_R)}]


def read_last_scores(path: Path) -> dict[str, dict[int, float]]:
    """Return the last score of each seed of each arm."""
    scores: dict[str, dict[int, float]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            scores.setdefault(row["arm"], {})[int(row["seed"])] = float(row["last_score"])
    return scores


def compare_study(name: str) -> list[dict[str, Any]]:
    """Return a row for each measure of each pair of a study."""
    study = STUDIES[name]
    curves_file = RESULTS / name / "curves.csv"
    rows = []
    if curves_file.exists():
        curves = read_curves(curves_file)
        for pair in study.pairs:
            rows += compare(pair, curves, study.targets)
    else:
        scores = read_last_scores(RESULTS / name / "runs.csv")
        for pair in study.pairs:
            rows += compare_ends(pair, scores)
    return rows


def score_row(measure: str, arm_R: Array, rival_R: Array) -> dict[str, Any]:
    gap = difference(arm_R, rival_R, paired=True)
    values = {"arm_value": arm_R.mean(), "rival_value": rival_R.mean(), "value": gap.mean}
    wins = f"{int((arm_R > rival_R).sum())}/{len(arm_R)}"
    return {"measure": measure, **values, "low": gap.low, "high": gap.high, "settled": gap.settled, "seeds_above": wins}


def time_row(unit: str, result: Speedup) -> dict[str, Any]:
    values = {"arm_value": result.arm_time, "rival_value": result.baseline_time, "value": result.speedup}
    bounds = {"low": result.ci_low, "high": result.ci_high, "settled": result.settled}
    return {"measure": f"{unit} to {result.criterion}", **values, **bounds, "seeds_above": ""}


def cost_row(arm_R: Array, rival_R: Array) -> dict[str, Any]:
    """Return the row of a step's cost: the geometric mean of the ratios."""
    gap = difference(np.log(arm_R), np.log(rival_R), paired=True)
    ratio, low, high = (math.exp(value) for value in (gap.mean, gap.low, gap.high))
    values = {"arm_value": arm_R.mean(), "rival_value": rival_R.mean(), "value": ratio}
    return {"measure": COST, **values, "low": low, "high": high, "settled": gap.settled, "seeds_above": ""}


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: as_text(value) for name, value in row.items()})


def as_text(value: Any) -> Any:
    if isinstance(value, float):  # numpy's too
        return f"{value:.6g}"
    return value


def collect(runs: Path, folder: Path) -> None:
    """Write the curves and the costs of the finished runs of `pods compare`."""
    points = []
    costs = []
    for of_arm in find_runs(runs).values():
        for run in of_arm:
            if run.state != "finished":
                continue
            names = {"arm": run.arm, "seed": int(run.config["seed"])}
            for row in run.evals:
                points.append(names | {name: row[name] for name in ("due", "seconds", "step", "accuracy")})
            cost = cost_of([run])
            phases = {phase: cost.phases[phase] for phase in PHASES}
            environment = run.environment
            made = {"commit": environment["git_commit"][:9], "processor": environment["processor"]}
            rate = {"rate": float(run.config["learning_rate"])}
            costs.append(names | rate | {"steps": cost.steps, "seconds_a_step": cost.seconds_per_step} | phases | made)
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "curves.csv", points)
    write_csv(folder / "runs.csv", costs)


def show(rows: Iterable[dict[str, Any]]) -> None:
    pair = None
    for row in rows:
        if pair != (row["arm"], row["rival"]):
            pair = (row["arm"], row["rival"])
            print(f"{row['arm']} against {row['rival']}, {row['seeds']} seeds")
        verdict = "settled" if row["settled"] else "not settled"
        numbers = f"{row['arm_value']:9.3f} {row['rival_value']:9.3f}"
        interval = f"{row['value']:7.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        print(f"  {row['measure']:<20} {numbers}  {interval}  {verdict}")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--runs", type=Path, help="the folder of `pods compare`")
    options = parser.parse_args()
    folder = RESULTS / options.study
    if options.runs:
        collect(options.runs, folder)
    rows = compare_study(options.study)
    write_csv(folder / "comparisons.csv", rows)
    show(rows)


if __name__ == "__main__":
    main()
