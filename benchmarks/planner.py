"""Compare what `pods plan` predicts with what the studies measured: python benchmarks/planner.py [--measure]

For each comparison of the studies on word problems in which PODS and GRPO train equal rows, the signal of both arms is
computed from the rewards in `docs/results/plan/rewards.csv`, as `pods plan` does. Writes all of them to
`predictions.csv` beside it, and prints

1. the constants of `pods_rl/planning/signal.py`, fitted to the studies before them: the exponent that predicts how many
   times fewer steps an arm needs from its signal, and how far a study is from that;
2. the table of `docs/results.md`: the predicted and the measured speed of the main comparisons.

With `--measure`, first generates `rewards.csv`: 64 rollouts of the shipped policy for each of 150 problems.
"""

from __future__ import annotations

import csv
import itertools
import math
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from comparisons import PILOT_SEEDS, RESULTS
from measuring import command_line, set_up_torch
from pods_rl.distributed.processes import quiet_libraries
from pods_rl.experiment import load_experiment
from pods_rl.planning.plan import Plan, decide
from pods_rl.planning.prices import Prices, Setting
from pods_rl.planning.signal import Candidate, Pool, simulate
from pods_rl.recipe import load_recipe

HERE = Path(__file__).parent
REWARDS = RESULTS / "plan" / "rewards.csv"
PREDICTIONS = RESULTS / "plan" / "predictions.csv"
PROMPTS = 150
ROLLOUTS = 64
# Folders of results, and the experiment that made each. Those of one experiment count as one study. The constants are
# fitted to these.
FITTED = {
    "equal_memory_4": "equal_memory_4",
    "equal_memory_16": "equal_memory_16",
    "many_prompts": "many_prompts",
    "regimes": "regimes",
    "regimes/first_processor": "regimes",
}
# Studies that were made after the constants were fitted: they show how well these predict.
LATER = {name: name for name in ("equal_rows_8", "equal_rows_16", "equal_rows_32")}
STUDIES = FITTED | LATER
# The rows of the table: folder, arm, rival.
MAIN = (
    ("equal_memory_4", "pods-16-4", "grpo-4"),
    ("equal_memory_16", "pods-64-16", "grpo-16"),
    ("many_prompts", "16x4-n8", "8x8-n8"),
    ("regimes", "1x4-n16@0.0002", "1x4-n4@0.0002"),
    ("regimes", "1x16-n64@0.0002", "1x16-n16@0.0002"),
    ("regimes/first_processor", "1x16-n64@0.0002", "1x16-n16@0.0002"),
    ("regimes", "16x4-n8@0.0004", "4x16-n16@0.0002"),
    ("equal_rows_8", "pods-16-4", "grpo-4"),
    ("equal_rows_16", "pods-16-4", "grpo-4"),
    ("equal_rows_32", "pods-16-4", "grpo-4"),
    ("equal_rows_8", "pods-16-4", "grpo-8"),
    ("equal_rows_16", "pods-16-4", "grpo-16"),
    ("equal_rows_32", "pods-16-4", "grpo-8"),
)
TARGETS = ("0.5", "0.4", "0.3")  # accuracies: the first that both arms reach counts
STEPS = 1000  # simulated
ONE_SECOND = Prices(step=1.0)  # only the measured seconds count


@dataclass(frozen=True)
class Arm:
    """An arm of a study: its setting, and the rows that it trains in a step."""

    setting: Setting
    rows: int


@dataclass(frozen=True)
class Comparison:
    """PODS against GRPO with equal rows: how many times fewer steps and seconds it needs to an accuracy.

    Args:
        folder: in `docs/results`.
        arm, rival: their names there.
        pods, grpo: the two arms.
        target: the accuracy.
        fewer_steps: how many times fewer steps PODS needs.
        faster: how many times fewer seconds, with an interval from `faster_low` to `faster_high`.
    """

    folder: str
    arm: str
    rival: str
    pods: Arm
    grpo: Arm
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
    """Return every comparison of PODS with GRPO at equal rows, by the first of `TARGETS` that both reach."""
    found = []
    for folder, experiment in STUDIES.items():
        arms = arms_of(experiment)
        values = {}
        for row in rows_of(RESULTS / folder / "comparisons.csv"):
            values[row["arm"], row["rival"], row["measure"]] = row
        for arm, rival in dict.fromkeys((arm, rival) for arm, rival, _ in values):
            pods = arms.get(arm.partition("@")[0])  # the rate is part of some names
            grpo = arms.get(rival.partition("@")[0])
            if pods is None or grpo is None or pods.rows != grpo.rows:
                continue
            if pods.setting.n == pods.setting.m or grpo.setting.n > grpo.setting.m:
                continue
            for target in TARGETS:
                steps = values[arm, rival, f"steps to {target}"]
                seconds = values[arm, rival, f"seconds to {target}"]
                if math.isfinite(float(steps["value"])):
                    numbers = [float(seconds[name]) for name in ("value", "low", "high")]
                    found.append(Comparison(folder, arm, rival, pods, grpo, target, float(steps["value"]), *numbers))
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
def signal(arm: Arm) -> float:
    return simulate(arm.setting, pool(), ONE_SECOND, arm.rows, steps=STEPS).signal


def calibrate(comparisons: list[Comparison]) -> tuple[float, float]:
    """Return the exponent and the model's error, of the studies in `FITTED`.

    The exponent is the slope through the origin of the logarithm of fewer steps over that of more signal, by least
    squares in which each study has the same weight. The error is the standard deviation of the studies' mean residuals.
    """
    comparisons = [comparison for comparison in comparisons if comparison.folder in FITTED]
    studies = [FITTED[comparison.folder] for comparison in comparisons]
    weights = np.array([1 / studies.count(study) for study in studies])
    more_signal = np.log([signal(comparison.pods) / signal(comparison.grpo) for comparison in comparisons])
    fewer_steps = np.log([comparison.fewer_steps for comparison in comparisons])
    exponent = float((weights * more_signal * fewer_steps).sum() / (weights * more_signal**2).sum())
    residuals = fewer_steps - exponent * more_signal
    means = []
    for study in dict.fromkeys(studies):
        means.append(residuals[[each == study for each in studies]].mean())
    error = float(np.sqrt(np.square(means).sum() / (len(means) - 1)))
    return exponent, error


def seconds_a_step(folder: str, arm: str) -> tuple[float, ...]:
    """Return the mean seconds of a step in each run of an arm."""
    name, _, rate = arm.partition("@")
    seconds = []
    for row in rows_of(RESULTS / folder / "runs.csv"):
        is_pilot = int(row["seed"]) in PILOT_SEEDS
        if row["arm"] == name and not is_pilot and (not rate or float(row["rate"]) == float(rate)):
            seconds.append(float(row.get("seconds_a_step") or row["seconds_per_step"]))
    return tuple(seconds)


@cache
def predict(comparison: Comparison) -> Plan:
    """Return what `pods plan` says of two arms with the rewards of the shipped policy and the study's seconds."""
    simulated = partial(simulate, pool=pool(), prices=ONE_SECOND, rows=comparison.pods.rows)
    candidates: list[Candidate] = []
    for arm, name in ((comparison.grpo, comparison.rival), (comparison.pods, comparison.arm)):
        times = seconds_a_step(comparison.folder, name)
        candidates.append(replace(simulated(arm.setting), times=times))
    return decide(candidates, pool(), simulated, {})


def predictions(comparisons: list[Comparison]) -> list[dict[str, str | float | bool]]:
    """Return the rows of `predictions.csv`: the predicted gain of each comparison, next to the measured one."""
    rows: list[dict[str, str | float | bool]] = []
    for comparison in comparisons:
        plan = predict(comparison)
        gain = plan.gains[comparison.pods.setting]
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
                "recommended": plan.chosen.setting == comparison.pods.setting,
            }
        )
    return rows


def table(comparisons: list[Comparison]) -> list[str]:
    """Return the rows of the table in `docs/results.md`."""
    by_name = {(each.folder, each.arm, each.rival): each for each in comparisons}
    lines = []
    for name in MAIN:
        comparison = by_name[name]
        plan = predict(comparison)
        gain = plan.gains[comparison.pods.setting]
        prompts = comparison.pods.rows // comparison.pods.setting.m
        grpo_prompts = comparison.grpo.rows // comparison.grpo.setting.m
        cells = [
            f"`{comparison.folder}`",
            f"{comparison.pods.setting.label}, {prompts} a step",
            f"GRPO {comparison.grpo.setting.m}, {grpo_prompts} a step",
            f"{gain.median:.2f} [{gain.low:.2f}, {gain.high:.2f}]",
            f"{comparison.faster:.2f} [{comparison.faster_low:.2f}, {comparison.faster_high:.2f}]",
            "PODS" if plan.chosen.setting == comparison.pods.setting else "GRPO",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


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
    exponent, error = calibrate(comparisons)
    print(f"exponent {exponent:.2f}, error {error:.2f}")
    print("\n".join(table(comparisons)))


if __name__ == "__main__":
    main()
