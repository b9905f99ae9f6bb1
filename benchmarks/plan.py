"""Seconds of a step that `pods plan` predicts, beside timed ones: python benchmarks/plan.py [--seconds 120]

Fits prices to the few settings that `pods plan` measures, predicts ten others, and times these: rounds that alternate
over all ten, real steps of the embedded policy. They differ from the measured ones in n, m, waves, giving up and dead
groups. Seconds are of the processor, so that other programs count little: one thread, on the CPU. Goal: the median of
|predicted / timed - 1| is 0.15 or less.

    python benchmarks/plan.py --study

compares the modelled signal of a step with the steps that the arms of the study (`docs/results/study`) needed to 99 %
of the peak of GRPO on 64 rollouts. Pass rates are those of `benchmarks/stopping.py`'s trainings; no model runs.

    python benchmarks/plan.py --validate arithmetic-easy words-hard --parallel 2

trains a grid of settings on some tasks, or without names on all, and compares the seconds to a threshold with those of
the setting that `pods plan` recommends (`validation.py`): 25 or 30 runs of 45 processor seconds a task.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from pods_rl.distributed.processes import quiet_libraries, set_threads
from pods_rl.planning.costs import Measured, fit_costs, mean_seconds
from pods_rl.planning.grid import Setting, settings_to_compare
from pods_rl.planning.plan import model
from pods_rl.planning.signal import Batches, Observed, Pool, simulate
from pods_rl.recipe import load_recipe
from pods_rl.training.inputs import fitted_task
from pods_rl.training.measuring import Meter
from pods_rl.training.planning import standing_still, to_measure
from pods_rl.training.trainer import build_trainer
from validation import TASKS, validate

GOAL = 0.15
TEN = (
    Setting(32, 16),
    Setting(16, 16, None, None, "refill"),
    Setting(32, 16, None, None, "refill"),
    Setting(64, 16, (16, 16)),
    Setting(64, 16, (16, 48), 16),
    Setting(128, 16, (16, 112), 16, "refill"),
    Setting(16, 8),
    Setting(64, 8),
    Setting(32, 8, (8, 8), None, "share"),
    Setting(32, 4, None, None, "share"),
)


RESULTS = Path(__file__).parents[1] / "docs" / "results"
STUDY = {
    "grpo-16": Setting(16, 16),
    "pods-32-16": Setting(32, 16),
    "pods-64-16": Setting(64, 16),
    "pods-128-16": Setting(128, 16),
    "pods-64-8": Setting(64, 8),
    "pods-64-4": Setting(64, 4),
    "grpo-ga-64": Setting(64, 64),
}


class Comparison:
    """A schedule of settings: those measured, then the ten."""

    def __init__(self, settings: list[Setting], seconds: float) -> None:
        self.settings, self.seconds = settings, seconds
        self.steps: dict[Setting, list[Measured]] = {}
        self.meter: Meter

    def add(self, setting: Setting, measured: Measured) -> None:
        self.steps.setdefault(setting, []).append(measured)

    def rounds(self, settings: list[Setting], seconds: float) -> Iterator[Setting]:
        yield from settings  # warm-up
        self.steps, end = {}, time.perf_counter() + seconds
        while time.perf_counter() < end:
            yield from settings

    def schedule(self) -> Iterator[Setting]:
        yield from self.rounds(to_measure(self.settings), 0.3 * self.seconds)
        costs = fit_costs([*self.steps.values()])
        pool = Pool(self.meter.seen.observed(*self.meter.answer_range()))
        self.predicted = model(TEN, pool, self.meter.batches(), costs)
        yield from self.rounds(list(TEN), 0.7 * self.seconds)


def study() -> None:
    """Print how many times fewer steps each arm needed than GRPO 16, the ratio of signals, and that of precisions."""
    stored = json.loads((RESULTS / "rollouts" / "groups.json").read_text(encoding="utf-8"))
    right = {letter for letter, total in stored["totals"].items() if total is not None and total >= 1}
    groups = [group for run in stored["runs"] for group in run]
    pool = Pool(
        [
            Observed(i, float(r in right), float(r in right), k)
            for i, group in enumerate(groups)
            for k, r in enumerate(group)
        ]
    )
    with (RESULTS / "study" / "spent.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["baseline"] == "grpo-ga-64"]
    steps = {row["arm"]: float(row["steps"]) for row in rows if row["steps"] != "never"}
    found = {
        arm: simulate(setting, pool, Batches(setting.num_generations), steps=4000) for arm, setting in STUDY.items()
    }
    base, *arms = STUDY
    print(f"{'n -> m, one prompt':<20}{'fewer steps':>12}{'signal':>8}{'precision':>11}   (ratios to {base})")
    for arm in arms:
        signal, precision = (getattr(found[arm], name) / getattr(found[base], name) for name in ("signal", "precision"))
        print(f"{STUDY[arm].label:<20}{steps[base] / steps[arm]:>12.2f}{signal:>8.2f}{precision:>11.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny-pods")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the recipe")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--study", action="store_true", help="compare the modelled signal with the study instead")
    parser.add_argument("--validate", nargs="*", metavar="TASK", help=f"some of {', '.join(TASKS)}; no name: all")
    parser.add_argument("--runs", type=Path, default=Path("runs/plan"), help="folder of the runs of --validate")
    parser.add_argument("--seeds", type=int, default=5, help="of --validate")
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time of --validate")
    options = parser.parse_args()
    given = dict(pair.split("=", 1) for pair in options.set)
    if options.study:
        study()
        return
    if options.validate is not None:
        if unknown := [task for task in options.validate if task not in TASKS]:
            parser.error(f"--validate {' '.join(unknown)}: expected some of {', '.join(TASKS)}")
        validate(
            options.validate or [*TASKS], options.runs, seeds=options.seeds, seconds=options.seconds,
            parallel=options.parallel, keys={key: yaml.safe_load(value) for key, value in given.items()},
        )  # fmt: skip
        return
    quiet_libraries()
    set_threads(1)
    recipe = load_recipe(options.recipe, given)
    settings = settings_to_compare(recipe.every_value(), recipe.batch_plan())
    with tempfile.TemporaryDirectory(prefix="pods-bench-") as folder:
        still = standing_still(recipe, max(settings, key=lambda setting: setting.num_rollouts))
        compared = Comparison(settings, options.seconds)
        trainer = build_trainer(still, fitted_task(still)[0], Path(folder))
        compared.meter = Meter(trainer, compared.schedule(), compared.add, now=time.process_time)
        compared.meter.run()
    print(f"{recipe.name} {' '.join(options.set)}\n{'n -> m':<41}{'model':>8}{'timed':>8}{'ratio':>7}{'steps':>7}")
    rows = {}
    for one in compared.predicted:
        timed = mean_seconds(compared.steps[one.setting])
        rows[one.setting.label] = {"predicted": one.seconds, "timed": timed, "steps": len(compared.steps[one.setting])}
        print(f"{one.setting.label:<41}{one.seconds:>8.4f}{timed:>8.4f}{one.seconds / timed:>7.2f}"
              f"{len(compared.steps[one.setting]):>7}")  # fmt: skip
    error = statistics.median(abs(row["predicted"] / row["timed"] - 1) for row in rows.values())
    print(f"median of |model / timed - 1|: {error:.3f}; goal {GOAL} or less")
    if options.json:
        options.json.write_text(json.dumps({"median_error": error, "settings": rows}, indent=1))


if __name__ == "__main__":
    main()
