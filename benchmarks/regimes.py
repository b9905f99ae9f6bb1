"""Where PODS pays, over regimes: python benchmarks/regimes.py select | compare | range | rules | ladder | report

Word problems, the policy `tiny-words`, one thread, 60 seconds of processor time a run. `regimes.yaml` has the arms.
In order:

- select: each arm at three learning rates, two seeds from 100 on. Its best rate has the highest accuracy over time.
- compare: each arm at its best rate, seeds 1 to 5. `--cells 16x4-n8 --seeds 8` adds seeds to a cell and its rival.
- range: GRPO and PODS with 64 rows a step, five rates from too low to collapse.
- rules: max-variance against the paper's other rules at equal n and m, seeds 1 to 5.
- ladder: seconds to an accuracy on one core, a row for each lever, seeds 1 to 8. `make ladder` repeats it. Add your row
  to `regimes.yaml`. `--cells 1x16-n16-trl` makes TRL's runs of one prompt a step.
- report: tables and figures of what is finished, and what is missing. Trains nothing.

Each part makes only the runs that `docs/results/regimes/` lacks, so it continues after a kill, and on another machine
without the run directories. Every finished run is added there: its curve to `curves.csv`, its cost to `runs.csv`. A run
that was killed starts again. `--dry-run` lists what is left and trains nothing. Run one command at a time.

A PODS cell's rival is the best GRPO of any m with as many rows a step, at its own best rate, both by the seeds of
`select`. Scores are paired by seed. Two accuracies are timed: the high one, 0.8, which most arms of 64 rows reached in
pilot runs, and 0.5, halfway from the policy's first 0.22 to it. Both were fixed before these runs.

Two runs at once, one on each of two cores, cost about 2 % more processor time each than one alone. `--parallel 2` is
therefore sound on two quiet cores.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pods_rl.errors import UserError
from pods_rl.experiment import Event, Experiment, build_experiment, run_experiment
from pods_rl.runs import Run
from regime_report import report, write_ladder
from regime_runs import (
    ARMS,
    CHOOSING,
    CONFIG,
    FIRST_SELECTION_SEED,
    FIXED,
    ORIGIN,
    RATES,
    RESULTS,
    RULES,
    SEEDS,
    Key,
    Store,
    choose,
    keys_of,
    wanted_runs,
)


def experiment_of(store: Store, arms: Sequence[tuple[str, float]], seeds: Sequence[int]) -> Experiment:
    """Return the experiment of arms at learning rates: what `pods compare` would run."""
    evaluated = CONFIG["base"]["eval_seconds"] * store.max_seconds / CONFIG["base"]["max_seconds"]
    base = CONFIG["base"] | {"eval_seconds": evaluated}
    expanded = {
        f"{arm}-lr{rate:.1e}": keys_of(arm) | {"learning_rate": rate, "max_seconds": store.length(arm)}
        for arm, rate in arms
    }
    values = {"name": "regimes", "arms": expanded, "base": base, "seeds": [*seeds]}
    return build_experiment(values, ORIGIN)


def make(store: Store, wanted: Sequence[Key], options: argparse.Namespace) -> None:
    """Make the runs that are missing; exit with 1 if any failed."""
    missing = [key for key in dict.fromkeys(wanted) if key not in store.runs]
    minutes = len(missing) * store.seconds_a_run / 60 / options.parallel
    print(
        f"{len(wanted) - len(missing)} of {len(wanted)} runs are finished, {len(missing)} are left: about "
        f"{minutes:.0f} minutes with --parallel {options.parallel}",
        flush=True,
    )
    if options.dry_run:
        for key in missing:
            print(f"  {key.arm}  learning rate {key.rate:g}  seed {key.seed}")
        return
    started = time.monotonic()
    total = len(missing)
    failed = 0

    def on_event(event: Event) -> None:
        nonlocal failed
        if event.kind == "started":
            return
        if event.kind in ("finished", "skipped"):
            store.add(Run(event.path))
        failed += event.kind == "failed"
        left = sum(key not in store.runs for key in missing)
        rate = (time.monotonic() - started) / max(total - left, 1)
        reason = f": {event.reason}" if event.reason else ""
        print(
            f"{event.run.arm} seed {event.run.seed} {event.kind}{reason}; "
            f"{left} of {total} left, about {left * rate / 60:.0f} minutes",
            flush=True,
        )

    lacking: dict[tuple[str, float], list[int]] = {}
    for key in missing:
        lacking.setdefault((key.arm, key.rate), []).append(key.seed)
    grouped: dict[tuple[int, ...], list[tuple[str, float]]] = {}
    for arm, seeds in lacking.items():
        grouped.setdefault(tuple(seeds), []).append(arm)
    for seeds, arms in grouped.items():  # usually one group: every arm lacks the same seeds
        run_experiment(experiment_of(store, arms, seeds), options.runs, on_event, parallel=options.parallel)
    if failed:
        raise SystemExit(f"{failed} runs failed; their log.txt in {options.runs} says why. Repeat the command.")


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*SEEDS, "report"))
    parser.add_argument(
        "--cells", type=lambda text: text.split(","), help="arms of regimes.yaml (default: all of the part)"
    )
    parser.add_argument("--seeds", type=_seeds, help="how many, from 1, or a list such as 100,101,102")
    parser.add_argument("--rates", type=_rates, default=RATES, help="the grid of select, for compare and report too")
    parser.add_argument("--parallel", type=int, default=1, help="concurrent runs, one core each")
    parser.add_argument("--max-seconds", type=float, default=60.0, help="of a run")
    parser.add_argument("--runs", type=Path, default=Path("runs/regimes"), help="folder of the run directories")
    parser.add_argument("--results", type=Path, default=RESULTS / "regimes")
    parser.add_argument("--dry-run", action="store_true", help="list the runs that are left")
    options = parser.parse_args(words)
    arms = {"rules": RULES, "ladder": FIXED}.get(options.part, ARMS)
    unknown = set(options.cells or ()) - set(arms)
    if unknown:
        parser.error(f"--cells {min(unknown)}: expected arms of regimes.yaml: {', '.join(arms)}")
    if options.part != "report" and options.seeds:
        wrong = [seed for seed in options.seeds if (seed < FIRST_SELECTION_SEED) == (options.part in CHOOSING)]
        if wrong:
            parser.error(
                f"--seeds {wrong[0]}: select and range take seeds from {FIRST_SELECTION_SEED}, other parts lower ones"
            )
    return options


def _seeds(text: str) -> tuple[int, ...]:
    numbers = tuple(int(word) for word in text.split(","))
    if len(numbers) == 1 and numbers[0] < FIRST_SELECTION_SEED:  # how many
        return tuple(range(1, numbers[0] + 1))
    return numbers


def _rates(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


def main() -> None:
    options = parse(sys.argv[1:])
    store = Store(options.results, options.max_seconds)
    store.collect(options.runs)
    if options.part == "report":
        options.seeds = options.cells = None
        print(report(store, options))
    else:
        if options.part == "compare":
            waiting = [name for name in options.cells or ARMS if choose(store, name, options.rates) is None]
            for name in waiting:
                print(f"{name} is not compared: first `regimes.py select --cells {name}`")
        try:
            make(store, wanted_runs(options.part, store, options), options)
        except UserError as error:
            raise SystemExit(str(error)) from error
        except KeyboardInterrupt:
            raise SystemExit("Interrupted. Finished runs are kept: repeat the command to continue.") from None
        if options.part == "ladder":
            print(write_ladder(store))


if __name__ == "__main__":
    main()
