"""Seconds to one accuracy on one core, a row for each lever: python benchmarks/ladder.py [ROW ...], or `make ladder`

Each arm of `ladder.yaml` is a row. Trains its missing seeds, then writes `docs/results/ladder/ladder.csv` and prints it
as Markdown: processor time until the mean accuracy over seeds reaches 0.5, with a 95 % bootstrap interval over seeds,
the command and the commit of its runs. With names of rows it trains and replaces only those, for example yours. Seconds
of another processor are not comparable, so a row names its processor.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from pods_rl.experiment import Event, load_experiment, run_experiment
from pods_rl.report.arms import curve_of
from pods_rl.report.statistics import mean_curve, time_to
from pods_rl.runs import Run, find_runs
from regime_runs import cpu, read_rows, write_rows
from regime_statistics import interval, resamples

HERE = Path(__file__).parent
COLUMNS = ("row", "seconds", "low", "high", "seeds", "accuracy", "seconds_a_step", "cpu", "commit", "command")


def row_of(name: str, runs: list[Run], accuracy: float) -> dict[str, str]:
    """Return a row: `never` where the mean curve, or a resample of it, does not reach the accuracy."""
    curve = curve_of({str(run.path): run.evals for run in runs}, "accuracy")
    assert curve is not None

    def seconds(drawn: np.ndarray | None) -> np.ndarray:
        return time_to(mean_curve(curve.scores, drawn), mean_curve(curve.seconds, drawn), accuracy, interpolated=True)

    values = [float(seconds(None)), *interval(seconds(resamples(len(runs))))]
    shown = ["never" if np.isinf(value) else f"{value:.1f}" for value in values]
    costs = [run.seconds / run.step for run in runs if run.step]
    return {
        **dict(zip(("row", "seconds", "low", "high"), (name, *shown), strict=True)),
        "seeds": str(len(runs)),
        "accuracy": f"{accuracy:g}",
        "seconds_a_step": f"{np.mean(costs):.3f}",
        "cpu": cpu(),
        "commit": ", ".join(sorted({str(run.environment.get("git_commit") or "unknown")[:9] for run in runs})),
        "command": f"python benchmarks/ladder.py {name}",
    }


def table(rows: list[dict[str, str]]) -> str:
    """Return the ladder as Markdown."""
    lines = ["| row | seconds to the accuracy | seeds | command | commit |", "|---|---|---|---|---|"]
    for row in rows:
        time = f"{row['seconds']} ({row['low']} to {row['high']})"
        lines.append(f"| {row['row']} | {time} | {row['seeds']} | `{row['command']}` | {row['commit']} |")
    return "\n".join(lines)


def say(event: Event) -> None:
    print(f"{event.run.arm} seed {event.run.seed} {event.kind} {event.reason or ''}".strip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="arms of ladder.yaml (default: all)")
    parser.add_argument("--seeds", type=int, help="default: as in ladder.yaml")
    parser.add_argument("--accuracy", type=float, default=0.5)
    parser.add_argument("--max-seconds", type=float, help="of a run, for a test of the script")
    parser.add_argument("--parallel", type=int, default=1, help="concurrent runs, one core each")
    parser.add_argument("--runs", type=Path, default=Path("runs/ladder"))
    parser.add_argument("--results", type=Path, default=HERE.parent / "docs" / "results" / "ladder")
    options = parser.parse_args()
    experiment = load_experiment(HERE / "ladder.yaml", {"seeds": options.seeds} if options.seeds else {})
    rows = options.rows or [*experiment.arms]
    if unknown := {*rows} - experiment.arms.keys():
        parser.error(f"{min(unknown)} is not an arm of ladder.yaml: expected {', '.join(experiment.arms)}")
    arms = {name: experiment.arms[name] for name in rows}
    if options.max_seconds:
        arms = {name: keys | {"max_seconds": options.max_seconds, "eval_seconds": 2.0} for name, keys in arms.items()}
    experiment = replace(experiment, arms=arms, baseline=rows[0])
    counts = run_experiment(experiment, options.runs, say, parallel=options.parallel)
    if counts.get("failed"):
        raise SystemExit(f"{counts['failed']} runs failed; their log.txt in {options.runs} says why.")
    found = find_runs(options.runs)
    kept = {row["row"]: row for row in read_rows(options.results / "ladder.csv")}
    for name in rows:
        finished = [run for run in found[name] if run.state == "finished" and run.seed in experiment.seeds]
        kept[name] = row_of(name, finished, options.accuracy)
    options.results.mkdir(parents=True, exist_ok=True)
    write_rows(options.results / "ladder.csv", COLUMNS, kept.values())
    print(table([*kept.values()]))


if __name__ == "__main__":
    main()
