"""How often the quickstart's sentences are settled: python benchmarks/quickstart.py [EXPERIMENT] [--repeat 10]

Repeats the quickstart, or the experiment of a file such as `benchmarks/batch_quick_4.yaml`, each time on seeds of its
own that no study has. Prints for each declared pair in how many repetitions the report settles it in the arm's favour:
the score at the end, the mean over the run, and the speedup. The reports are in `runs/quickstart_NAME/K/report/`, and
`--csv` writes their pairs into one file. A later call makes only the runs that are missing. Nothing else may run on the
machine.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from batch_study import make, read_rows
from measuring import command_line, write_csv
from pods_rl.experiment import load_experiment
from pods_rl.report import build_report

FIRST_SEED = 4001  # the seeds from 3001 to 3100 chose the number of seeds
MEASURES = {  # columns of the report's pairs.csv: what is settled, its value, and what no difference would be
    "settled": ("difference", 0.0),
    "over_time_settled": ("over_time", 0.0),
    "speedup_settled": ("speedup", 1.0),
}


def settled_pairs(files: list[Path]) -> dict[tuple[str, str], Counter[str]]:
    """Return by pair, an arm and its rival, how many of several reports settle each measure in the arm's favour."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for file in files:
        for row in read_rows(file):
            of_pair = counts.setdefault((row["arm"], row["other"]), Counter())
            for measure, (value, no_difference) in MEASURES.items():
                of_pair[measure] += row[measure] == "true" and float(row[value]) > no_difference
    return counts


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("experiment", nargs="?", default="quickstart", help="a file or a shipped experiment")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--runs", type=Path, help="default: runs/quickstart_NAME")
    parser.add_argument("--parallel", type=int, default=2, help="runs at the same time, one core each")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    number = len(load_experiment(options.experiment).seeds)
    files = []
    for repetition in range(options.repeat):
        first = FIRST_SEED + repetition * number
        experiment = load_experiment(options.experiment, {"seeds": [*range(first, first + number)]})
        output = (options.runs or Path("runs") / f"quickstart_{experiment.name}") / str(repetition + 1)
        make(experiment, output, options.parallel)
        build_report(output)
        files.append(output / "report" / "pairs.csv")
    pairs = [{"repetition": repetition, **row} for repetition, file in enumerate(files, 1) for row in read_rows(file)]
    write_csv(options.csv, [*pairs[0]], [[*pair.values()] for pair in pairs])
    for (arm, rival), of_pair in settled_pairs(files).items():
        numbers = ", ".join(f"{measure.replace('_', ' ')} {of_pair[measure]}" for measure in MEASURES)
        print(f"{arm} above {rival}, of {options.repeat}: {numbers}")


if __name__ == "__main__":
    main()
