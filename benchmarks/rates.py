"""The best learning rate of every arm of an experiment: python benchmarks/rates.py EXPERIMENT.yaml --seeds 201,202

Trains each arm at three rates, a factor of 1.4 apart around the one in the file, on seeds that the experiment does
not have. While an arm's best rate is the lowest or the highest of those tried, the next one beyond it is tried too. The
best rate has the highest accuracy over time: the mean over the evaluations after the start, then over seeds.

Writes a row for each run to `rates.csv` of the output folder. A later call makes only the runs that are missing. The
chosen rates are copied into the experiment's file by hand, before its own runs begin.

The committed `rates.csv` have arms too that were not chosen: grpo-GROUP, trl-GROUP (TRL's own step) and pods-N-M. Those
of the quickstart have eight rows a step, or the number that a name begins with, and four on hard sums.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measuring import command_line, write_csv
from pods_rl.errors import UserError
from pods_rl.experiment import (
    Event,
    Experiment,
    build_experiment,
    load_experiment,
    make_starters,
    run_experiment,
)
from pods_rl.report.analysis import cost_of
from pods_rl.report.arms import curve_of
from pods_rl.report.statistics import Curve
from pods_rl.runs import Run, is_run
from pods_rl.yaml_files import Origin

FACTOR_STEPS = 2  # rates double in this many steps, so neighbours are a factor of 1.4 apart
FARTHEST = 6  # steps from the file's rate, beyond which the search gives up
COLUMNS = ("arm", "rate", "seed", "accuracy_over_time", "final_accuracy", "steps", "seconds_a_step")


class Trial(NamedTuple):
    """An arm at a learning rate: `place` counts the steps from the rate in the file."""

    arm: str
    place: int


class Rates:
    """The trials of an experiment, its finished runs, and what they choose."""

    def __init__(self, experiment: Experiment, seeds: Sequence[int], output: Path) -> None:
        self.experiment = experiment
        self.seeds = seeds
        self.output = output
        self.trials = [Trial(arm, place) for arm in experiment.arms for place in (-1, 0, 1)]

    def rate(self, trial: Trial) -> float:
        """Return a trial's learning rate, rounded to two digits.

        The rates around 2e-4 are 1e-4, 1.4e-4, 2e-4, 2.8e-4 and 4e-4.
        """
        keys = self.experiment.base | self.experiment.arms[trial.arm]
        return float(f"{keys['learning_rate'] * 2 ** (trial.place / FACTOR_STEPS):.1e}")

    def name(self, trial: Trial) -> str:
        return f"{trial.arm}-lr{self.rate(trial):.1e}"

    def runs(self, trial: Trial) -> list[Run]:
        """Return the finished runs of a trial, by seed."""
        finished = []
        for seed in self.seeds:
            path = self.output / self.name(trial) / f"seed-{seed}"
            if is_run(path) and Run(path).state == "finished":
                finished.append(Run(path))
        return finished

    def score(self, trial: Trial) -> float:
        """Return the mean accuracy over time of a trial's runs; NaN while one is missing."""
        scores = [accuracy_over_time(run) for run in self.runs(trial)]
        if len(scores) < len(self.seeds):
            return math.nan
        return statistics.fmean(scores)

    def best(self, arm: str) -> Trial | None:
        """Return the best trial of an arm, or None while one is missing."""
        scores = {trial: self.score(trial) for trial in self.trials if trial.arm == arm}
        if any(math.isnan(score) for score in scores.values()):
            return None
        return max(scores, key=scores.__getitem__)

    def extend(self) -> bool:
        """Add a trial beyond every best one that lies at an edge; return whether there was one."""
        added = []
        for arm in self.experiment.arms:
            best = self.best(arm)
            if best is None or abs(best.place) == FARTHEST:
                continue
            for neighbour in (Trial(arm, best.place - 1), Trial(arm, best.place + 1)):
                if neighbour not in self.trials:
                    added.append(neighbour)
        self.trials += added
        return bool(added)

    def to_experiment(self, overrides: Mapping[str, Any]) -> Experiment:
        """Return the experiment of all trials so far."""
        arms = {}
        for trial in self.trials:
            arms[self.name(trial)] = self.experiment.arms[trial.arm] | {"learning_rate": self.rate(trial)}
        values = {
            "name": f"{self.experiment.name}-rates",
            "arms": arms,
            "base": self.experiment.base,
            "seeds": [*self.seeds],
        }
        return build_experiment(values, Origin(self.experiment.source), overrides)

    def write_csv(self) -> None:
        rows = []
        for trial in sorted(self.trials):
            for run in self.runs(trial):
                cost = cost_of([run])
                final_accuracy = float(curve(run).scores[0, -1])
                values = [accuracy_over_time(run), final_accuracy, cost.steps, cost.seconds_per_step]
                words = [f"{value:.6g}" for value in values]
                rows.append([trial.arm, f"{self.rate(trial):g}", run.config["seed"], *words])
        write_csv(self.output / "rates.csv", COLUMNS, rows)


def make_runs(rates: Rates, overrides: Mapping[str, Any], parallel: int) -> None:
    """Make the runs of a search, with further rates until no best one lies at an edge or a run failed."""
    while True:
        # finished runs are skipped, so a later round makes only the trials that were added
        experiment = rates.to_experiment(overrides)
        with make_starters(experiment, parallel) as starters:
            counts = run_experiment(experiment, rates.output, on_event, parallel=parallel, starters=starters)
        rates.write_csv()
        if counts.get("failed") or not rates.extend():
            break


def curve(run: Run) -> Curve:
    """Return the curve of one run."""
    found = curve_of({str(run.path): run.evals}, "accuracy")
    assert found is not None
    return found


def accuracy_over_time(run: Run) -> float:
    """Return the mean accuracy of a run over its evaluations, without the one before training."""
    return float(curve(run).scores[0, 1:].mean())


def on_event(event: Event) -> None:
    """Print how a run ended."""
    if event.kind in ("started", "skipped"):
        return
    reason = f": {event.reason}" if event.reason else ""
    print(f"{event.position} of {event.total}  {event.run.path}  {event.kind}{reason}", flush=True)


def whole_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("experiment", type=Path)
    parser.add_argument(
        "--seeds", type=whole_numbers, required=True, help="for example 201,202: none of the experiment's own"
    )
    parser.add_argument("--max-seconds", type=float, help="of training; default: as in the file")
    parser.add_argument("--output", type=Path, help="default: runs/NAME-rates")
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time, one core each")
    parser.add_argument("--eval-seconds", type=float, help="of training between evaluations; default: as in the file")
    options = parser.parse_args()
    try:
        experiment = load_experiment(options.experiment)
    except UserError as error:
        raise SystemExit(str(error)) from error
    shared = sorted(set(options.seeds) & set(experiment.seeds))
    if shared:
        parser.error(f"--seeds {shared[0]}: the experiment itself has this seed")
    output = options.output or Path("runs") / f"{experiment.name}-rates"
    rates = Rates(experiment, options.seeds, output)
    overrides = {}
    if options.max_seconds:
        overrides["max_seconds"] = options.max_seconds
    if options.eval_seconds:
        overrides["eval_seconds"] = options.eval_seconds
    make_runs(rates, overrides, options.parallel)
    for arm in experiment.arms:
        best = rates.best(arm)
        tried = sorted(trial for trial in rates.trials if trial.arm == arm)
        line = ", ".join(f"{rates.rate(trial):g} {rates.score(trial):.3f}" for trial in tried)
        if best is None:
            print(f"{arm}: runs are missing ({line})")
        else:
            print(f"{arm}: best {rates.rate(best):g} ({line})")


if __name__ == "__main__":
    main()
