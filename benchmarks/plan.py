"""Seconds of a step that `pods plan` predicts, beside timed ones: python benchmarks/plan.py [--seconds 120]

Fits prices to the few settings that `pods plan` measures, predicts ten others, and times these: rounds that alternate
over all ten, real steps of the embedded policy. They differ from the measured ones in n, m, waves, giving up and dead
groups. Seconds are of the processor, so that other programs count little: one thread, on the CPU. Goal: the median of
|predicted / timed - 1| is 0.15 or less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pods_rl.distributed.processes import quiet_libraries, set_threads
from pods_rl.engines.trl.build import build_trainer
from pods_rl.planning.costs import Measured, fit_costs, mean_seconds
from pods_rl.planning.grid import Setting, settings_to_compare
from pods_rl.planning.plan import model
from pods_rl.planning.signal import Pool
from pods_rl.recipe import load_recipe
from pods_rl.training.inputs import fitted_task
from pods_rl.training.measuring import Meter
from pods_rl.training.planning import standing_still, to_measure

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny-pods")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the recipe")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    quiet_libraries()
    set_threads(1)
    recipe = load_recipe(options.recipe, dict(pair.split("=", 1) for pair in options.set))
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
