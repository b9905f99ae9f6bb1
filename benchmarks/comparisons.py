"""Compare the arms of a study, from its curves: python benchmarks/comparisons.py STUDY [--runs FOLDER]

Reads `curves.csv` in the study's folder of `docs/results/` and writes `comparisons.csv` beside it: for each pair of
arms that the study's experiment declares, on the seeds that both have, the difference in accuracy at the end and over
time, the speedup to each target, in seconds and in steps, and what a step costs. Curves, differences, speedups and
intervals are those of `pods report`, as it computes them: Student's t at 95 %, paired by seed. The interval of a cost
is on log ratios. Each is of one comparison: none is corrected for the number of comparisons.

With `--runs`, first makes `curves.csv` and `runs.csv` from the finished runs of `pods compare` in that folder. If the
speed check of a run took longer than that of the others, it names the run, which must be repeated, and writes nothing.

With `--quiet`, compares on the seeds whose runs were not disturbed, and writes `quiet.csv`: the speed check of
`runs.csv` is at most 1.2 times the median. For runs without one it is the selection, the same work in each step, that
may take at most 1.2 times as long as in the arm's fastest run.
"""

from __future__ import annotations

import csv
import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from measuring import command_line, read_csv
from pods_rl.experiment import DeclaredPair, load_experiment
from pods_rl.report.analysis import compare_arms, cost_of, mean_over, speedup_between, times_after_start
from pods_rl.report.arms import Arm, arms_from_runs, curve_of
from pods_rl.report.intervals import Array, Difference, difference
from pods_rl.report.statistics import Curve, Speedup
from pods_rl.runs.speed import LIMIT, disturbed, speed_of

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PHASES = ("rollout", "reward", "selection", "update")
OVER_TIME = "accuracy over time"
AT_END = "final accuracy"
COST = "seconds a step"  # a name in the committed files


ROWS_32 = (0.5, 0.6, 0.7)
STUDIES = {
    "equal_memory_4": (0.3, 0.4, 0.5, 0.6),
    "equal_memory_16": (0.3, 0.4, 0.5, 0.6),
    "equal_rows_8": (0.3, 0.4, 0.5),
    "equal_rows_16": (0.5, 0.6, 0.7),
    "equal_rows_32": ROWS_32,
    "equal_rows_32/first": ROWS_32,
    "many_prompts": (0.3, 0.4, 0.5, 0.6),
    "many_prompts_trl": (0.3, 0.5, 0.7),
    "plan_sums": (0.5, 0.6, 0.7),
    "rules": (0.5, 0.6, 0.7),
    "study": (0.5, 0.6, 0.7, 0.8),
    "quickstart": (0.5, 0.6, 0.7),
    "chat": (0.5, 0.65, 0.8),
}
"""The accuracies to which times are measured, by study: chosen before its runs, as the pairs of its experiment were."""

BATCH = (0.3, 0.5, 0.7)  # the same for every cell of batch_study.yaml
STUDIES |= {file.parent.name: BATCH for file in sorted(RESULTS.glob("batch_*/curves.csv"))}


def pairs_of(study: str) -> tuple[DeclaredPair, ...]:
    """Return the pairs that the experiment of a study declares."""
    name = study.partition("/")[0]
    file = Path(__file__).parent / f"{name}.yaml"
    return load_experiment(file if file.is_file() else name).pairs


Evaluated = dict[int, list[dict[str, float]]]  # evaluations by seed


def read_evaluations(path: Path) -> dict[str, Evaluated]:
    """Return the evaluations of each arm."""
    arms: dict[str, Evaluated] = {}
    for row in read_csv(path):
        point = {key: float(row[key]) for key in ("due", "accuracy", "seconds", "step", "prompts")}
        arms.setdefault(row["arm"], {}).setdefault(int(row["seed"]), []).append(point)
    return arms


def curve(evaluated: Evaluated, clock: str = "seconds") -> Curve:
    """Return the curve of an arm over seconds or steps."""
    found = curve_of({str(seed): evaluated[seed] for seed in sorted(evaluated)}, "accuracy", clock)
    assert found is not None
    if clock == "step":
        return replace(found, due=found.times)  # ends are compared in steps too
    return found


def as_arm(name: str, curve: Curve) -> Arm:
    return Arm(name, name, curve, {})


def compare_pair(
    pair: DeclaredPair, arms: Mapping[str, Evaluated], targets: Sequence[float], noisy: Mapping[str, set[int]]
) -> list[dict[str, Any]]:
    """Return a row for each measure of a pair, on the seeds that both arms have and whose runs are not noisy."""
    seeds = arms[pair.arm].keys() & arms[pair.against].keys()
    seeds -= noisy.get(pair.arm, set()) | noisy.get(pair.against, set())
    ours = {seed: arms[pair.arm][seed] for seed in seeds}
    theirs = {seed: arms[pair.against][seed] for seed in seeds}
    arm = curve(ours)
    rival = curve(theirs)
    found = compare_arms(as_arm(pair.arm, arm), as_arm(pair.against, rival))
    assert found.over_time
    times = times_after_start(arm, rival, found.due)
    rows = [
        score_row(AT_END, arm.at(found.due)[0], rival.at(found.due)[0], found.difference),
        score_row(OVER_TIME, mean_over(arm, times)[0], mean_over(rival, times)[0], found.over_time),
    ]
    arm_steps = curve(ours, "step")
    rival_steps = curve(theirs, "step")
    for unit, left, right in (("seconds", arm, rival), ("steps", arm_steps, rival_steps)):
        for target in targets:
            result = speedup_between(as_arm(pair.arm, left), as_arm(pair.against, right), target)
            rows.append(time_row(f"{unit} to {target:g}", result))
    rows.append(cost_row(step_seconds(arm, arm_steps), step_seconds(rival, rival_steps)))
    return [{"arm": pair.arm, "rival": pair.against, "seeds": len(seeds), **row} for row in rows]


def step_seconds(over_seconds: Curve, over_steps: Curve) -> Array:
    """Return the seconds per step of each run."""
    return np.nanmax(over_seconds.seconds, axis=1) / np.nanmax(over_steps.seconds, axis=1)


def noisy_seeds(name: str) -> dict[str, set[int]]:
    """Return by arm the seeds of the runs on a slower machine, by the speed check or by what a selection took."""
    rows = read_csv(RESULTS / name / "runs.csv")
    fastest: dict[str, float] = {}  # selection of each arm
    for row in rows:
        selection = float(row["selection"])
        fastest[row["arm"]] = min(selection, fastest.get(row["arm"], selection))
    noisy: dict[str, set[int]] = {}
    for row in rows:
        speed = float(row["speed"]) if "speed" in row else float(row["selection"]) / fastest[row["arm"]]
        if speed > LIMIT:
            noisy.setdefault(row["arm"], set()).add(int(row["seed"]))
    return noisy


def compare_study(name: str, *, quiet: bool = False) -> list[dict[str, Any]]:
    """Return a row for each measure of each pair of a study."""
    arms = read_evaluations(RESULTS / name / "curves.csv")
    noisy = noisy_seeds(name) if quiet else {}
    rows = []
    for pair in pairs_of(name):
        rows += compare_pair(pair, arms, STUDIES.get(name, BATCH), noisy)
    return rows


def score_row(measure: str, arm_R: Array, rival_R: Array, gap: Difference) -> dict[str, Any]:
    values = {"arm_value": arm_R.mean(), "rival_value": rival_R.mean(), "value": gap.mean}
    wins = f"{int((arm_R > rival_R).sum())}/{len(arm_R)}"
    return {"measure": measure, **values, "low": gap.low, "high": gap.high, "settled": gap.settled, "seeds_above": wins}


def time_row(measure: str, result: Speedup) -> dict[str, Any]:
    values = {"arm_value": result.arm_time, "rival_value": result.baseline_time, "value": result.speedup}
    bounds = {"low": result.ci_low, "high": result.ci_high, "settled": result.settled}
    return {"measure": measure, **values, **bounds, "seeds_above": ""}


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


def collect(runs: Path, folder: Path, keep_slow: bool = False) -> None:
    """Write the curves and the costs of the finished runs of `pods compare`.

    Args:
        keep_slow: write them also if the machine was slower for some runs than for the others.

    Raises:
        SystemExit: the machine was slower for some runs. They have to be repeated.
    """
    points = []
    costs = []
    arms = arms_from_runs([runs], "accuracy")
    speeds = {str(run.path): speed_of(run.evals) for arm in arms for run in arm.runs}
    slow = disturbed(speeds)
    if slow and not keep_slow:
        lines = [f"{factor:.2f} times as slow: rm -r {shlex.quote(path)}" for path, factor in slow.items()]
        raise SystemExit("\n".join([*lines, "Remove these runs, and repeat the command with nothing else running."]))
    usual = statistics.median_low([seconds for seconds in speeds.values() if seconds > 0] or [math.nan])
    for arm in arms:
        for run in arm.runs:
            if run.state != "finished":
                continue
            names = {"arm": arm.name, "seed": int(run.config["seed"])}
            for row in run.evals:
                points.append(names | {name: row[name] for name in ("due", "seconds", "step", "accuracy", "prompts")})
            cost = cost_of([run])
            phases = {phase: cost.phases[phase] for phase in PHASES}
            environment = run.environment
            made = {"commit": environment["git_commit"][:9], "processor": environment["processor"]}
            rate = {"rate": float(run.config["learning_rate"])}
            made |= {"speed": speeds[str(run.path)] / usual}
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
    parser.add_argument("--keep-slow", action="store_true", help="collect also the runs on a slower machine")
    parser.add_argument("--quiet", action="store_true", help="only the seeds whose runs were not disturbed")
    options = parser.parse_args()
    folder = RESULTS / options.study
    if options.runs:
        collect(options.runs, folder, options.keep_slow)
    rows = compare_study(options.study, quiet=options.quiet)
    write_csv(folder / ("quiet.csv" if options.quiet else "comparisons.csv"), rows)
    show(rows)


if __name__ == "__main__":
    main()
