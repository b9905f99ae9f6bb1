"""Compare what `pods plan` predicts with what the studies measured: python benchmarks/planner.py [--measure]

For each comparison of the studies on word problems whose arms train equal rows, the signal of both arms is computed
from the rewards in `docs/results/plan/rewards.csv`, as `pods plan` does. Prints

1. the constants of `pods_rl/planning/signal.py` (`Model`), fitted to all studies;
2. the predicted and the measured speed of each comparison. A study is predicted with constants that are fitted to the
   others. They are also written to `predictions.csv` beside the rewards.

With `--measure`, first generates `rewards.csv`: 64 rollouts of the shipped policy for each of 150 problems.
"""

from __future__ import annotations

import csv
import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from comparisons import RESULTS
from measuring import command_line, set_up_torch
from pods_rl.distributed.processes import quiet_libraries
from pods_rl.experiment import load_experiment
from pods_rl.planning.plan import Plan, decide
from pods_rl.planning.prices import Array, Prices, Setting
from pods_rl.planning.signal import Candidate, Model, Pool, precisions, signal_of, simulate
from pods_rl.recipe import load_recipe

HERE = Path(__file__).parent
REWARDS = RESULTS / "plan" / "rewards.csv"
PREDICTIONS = RESULTS / "plan" / "predictions.csv"
PROMPTS = 150
ROLLOUTS = 64
# Folders of results, each with an experiment of the same name.
STUDIES = ("equal_memory_4", "equal_memory_16", "equal_rows_8", "equal_rows_16", "equal_rows_32", "many_prompts")
TARGETS = ("0.5", "0.4", "0.3")  # accuracies: the first that both arms reach counts
STEPS = 1000  # simulated
BETWEEN = np.arange(0.0, 20.0, 0.25)  # the values that are tried
ONE_SECOND = Prices(step=1.0)  # only the measured seconds count


@dataclass(frozen=True)
class Arm:
    """An arm of a study: its setting, and the rows that it trains in a step."""

    setting: Setting
    rows: int


@dataclass(frozen=True)
class Comparison:
    """An arm against GRPO with equal rows: how many times fewer steps and seconds it needs to an accuracy.

    Args:
        folder: in `docs/results`.
        arm, rival: their names there.
        ours, theirs: the two arms.
        target: the accuracy.
        fewer_steps: how many times fewer steps the arm needs.
        faster: how many times fewer seconds, with an interval from `faster_low` to `faster_high`.
    """

    folder: str
    arm: str
    rival: str
    ours: Arm
    theirs: Arm
    target: str
    fewer_steps: float
    faster: float
    faster_low: float
    faster_high: float


# ------------------------------------------------------------------------------------------- what was measured


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def arms_of(experiment: str) -> dict[str, Arm]:
    """Return the arms of an experiment by name, without those that select by another rule or train as TRL does."""
    loaded = load_experiment(HERE / f"{experiment}.yaml")
    arms = {}
    for run in loaded.plan():
        values = run.recipe.every_value()
        if values["rule"] != "max_variance" or values["exact_trl"]:
            continue
        m = values["num_generations"]
        arms[run.arm] = Arm(Setting(values["num_rollouts"] or m, m), run.recipe.batch_plan().rows_per_generation)
    return arms


def measured() -> list[Comparison]:
    """Return every comparison with a GRPO of equal rows, by the first of `TARGETS` that both reach."""
    found = []
    for folder in STUDIES:
        arms = arms_of(folder)
        values = {}
        for row in rows_of(RESULTS / folder / "comparisons.csv"):
            values[row["arm"], row["rival"], row["measure"]] = row
        for arm, rival in dict.fromkeys((arm, rival) for arm, rival, _ in values):
            ours = arms.get(arm)
            theirs = arms.get(rival)
            if ours is None or theirs is None or ours.rows != theirs.rows or theirs.setting.n > theirs.setting.m:
                continue
            for target in TARGETS:
                steps = values[arm, rival, f"steps to {target}"]
                seconds = values[arm, rival, f"seconds to {target}"]
                if math.isfinite(float(steps["value"])):
                    numbers = [float(seconds[name]) for name in ("value", "low", "high")]
                    found.append(Comparison(folder, arm, rival, ours, theirs, target, float(steps["value"]), *numbers))
                    break
    return found


# ------------------------------------------------------------------------------------------- what is predicted


@cache
def pool() -> Pool:
    """Return the rewards of the shipped policy."""
    groups: dict[str, list[float]] = {}
    for row in rows_of(REWARDS):
        groups.setdefault(row["prompt"], []).extend([float(row["reward"])] * int(row["rollouts"]))
    return Pool(list(groups.values()))


@cache
def precision(arm: Arm) -> Array:
    return precisions(arm.setting, pool(), arm.rows, steps=STEPS)


def calibrate(comparisons: Sequence[Comparison]) -> Model:
    """Return the model that is fitted to studies; its error is how far each study is from a fit to the others."""
    squares = []
    for study in dict.fromkeys(comparison.folder for comparison in comparisons):
        of_others = fit([comparison for comparison in comparisons if comparison.folder != study])
        mine = [comparison for comparison in comparisons if comparison.folder == study]
        residuals = fewer_steps(mine) - of_others.exponent * more_signal(mine, of_others.between)
        squares.append(np.square(residuals).mean())
    return fit(comparisons)._replace(error=float(np.sqrt(np.mean(squares))))


def fit(comparisons: Sequence[Comparison]) -> Model:
    """Return the model, without an error, by least squares of fewer steps. Each study has the same weight."""
    studies = [comparison.folder for comparison in comparisons]
    weights = np.array([1 / studies.count(study) for study in studies])
    steps = fewer_steps(comparisons)
    fits = {}  # by their sum of squares
    for between in BETWEEN:
        signals = more_signal(comparisons, between)
        exponent = (weights * signals * steps).sum() / (weights * signals**2).sum()
        squares = (weights * (steps - exponent * signals) ** 2).sum()
        fits[float(squares)] = Model(float(between), float(exponent), error=0.0)
    return fits[min(fits)]


def fewer_steps(comparisons: Sequence[Comparison]) -> Array:
    """Return the logarithm of how many times fewer steps each arm needed."""
    return np.log([comparison.fewer_steps for comparison in comparisons])


def more_signal(comparisons: Sequence[Comparison], between: float) -> Array:
    """Return the logarithm of how many times more signal each arm has."""
    return np.log(
        [
            signal_of(precision(comparison.ours), between) / signal_of(precision(comparison.theirs), between)
            for comparison in comparisons
        ]
    )


@cache
def model_without(study: str) -> Model:
    """Return the model that is fitted to the other studies."""
    return calibrate([comparison for comparison in measured() if comparison.folder != study])


def seconds_a_step(folder: str, arm: str) -> tuple[float, ...]:
    """Return the mean seconds of a step in each run of an arm."""
    rows = rows_of(RESULTS / folder / "runs.csv")
    return tuple(float(row["seconds_a_step"]) for row in rows if row["arm"] == arm)


@cache
def predict(comparison: Comparison) -> Plan:
    """Return what `pods plan` says of two arms with the rewards of the shipped policy and the study's seconds.

    The constants are fitted to the other studies.
    """
    model = model_without(comparison.folder)
    simulated = partial(simulate, pool=pool(), prices=ONE_SECOND, rows=comparison.ours.rows, model=model)
    candidates: list[Candidate] = []
    for arm, name in ((comparison.theirs, comparison.rival), (comparison.ours, comparison.arm)):
        times = seconds_a_step(comparison.folder, name)
        candidates.append(replace(simulated(arm.setting), times=times))
    return decide(candidates, pool(), simulated, {}, model)


def predictions(comparisons: list[Comparison]) -> list[dict[str, str | float | bool]]:
    """Return the rows of `predictions.csv`: the predicted gain of each comparison, next to the measured one."""
    rows: list[dict[str, str | float | bool]] = []
    for comparison in comparisons:
        plan = predict(comparison)
        gain = plan.gains[comparison.ours.setting]
        rows.append(
            {
                "study": comparison.folder,
                "arm": comparison.arm,
                "rival": comparison.rival,
                "target": comparison.target,
                "value": round(gain.median, 4),
                "low": round(gain.low, 4),
                "high": round(gain.high, 4),
                "measured": comparison.faster,
                "recommended": plan.chosen.setting == comparison.ours.setting,
            }
        )
    return rows


# ------------------------------------------------------------------------------------------- measuring


def measure() -> None:
    """Generate `rewards.csv`."""
    # Imports TRL, which only measuring needs.
    from pods_rl.loading.prepare import prepare
    from pods_rl.planning.measure import Meter, standing_still
    from pods_rl.training.trainer import build_trainer

    quiet_libraries()
    set_up_torch(1)
    setting = Setting(ROLLOUTS, 16)
    still = standing_still(load_recipe("words-pods"), setting)
    with tempfile.TemporaryDirectory(prefix="pods-planner-") as folder:
        meter = Meter(build_trainer(still, prepare(still), Path(folder)))
        meter.run(itertools.repeat(setting, PROMPTS))
    REWARDS.parent.mkdir(parents=True, exist_ok=True)
    with REWARDS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["prompt", "reward", "rollouts"])
        for prompt, rewards in enumerate(meter.rewards.values()):
            for reward, rollouts in sorted(Counter(round(reward, 6) for reward in rewards).items()):
                writer.writerow([prompt, f"{reward:g}", rollouts])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--measure", action="store_true", help="generate the rewards first")
    if parser.parse_args().measure:
        measure()
    comparisons = measured()
    rows = predictions(comparisons)
    with PREDICTIONS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(calibrate(comparisons))
    for row in rows:
        print(*row.values())


if __name__ == "__main__":
    main()
