"""The study of selection over the batch (batch_study.yaml): python benchmarks/batch_study.py [CELL...] [--trial]

Without a cell: print what is done, what remains, and how many minutes of two cores that takes. With cells, or `all`:

1. Make the pilot runs, each candidate at three rates on two seeds and then beyond the edge of its grid while the best
   rate lies there, and write them to `docs/results/batch_CELL/rates.csv`. Then the same for the arms that take the best
   shape of another.
2. Write `benchmarks/batch_CELL.yaml` from that file. Of each kind the best shape is an arm, at its best rate: the
   highest mean over the pilot seeds of the accuracy over time. A best rate at the edge of its grid is refused.
3. Stop until these two files are committed, so that arms, rates, targets and questions are older than the seeds.
4. Make the runs of the seeds, and write `curves.csv`, `runs.csv` and `comparisons.csv` next to `rates.csv`.

The same command resumes: finished runs are kept. Nothing else may run on the machine. If the speed check of a run of
the seeds shows that the machine was slower, the command names the run, and stops until it is repeated. On a machine
whose own speed varies, repeat such runs twice, then write the tables with `--keep-slow`. `quiet.csv` leaves out their
seeds. Pilot runs are not checked: they only choose. With `--trial` every arm makes one run of a second in the folder of
`--runs`, and nothing is written elsewhere.
"""

from __future__ import annotations

import csv
import dataclasses
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import comparisons
import rates
from measuring import command_line
from pods_rl.experiment import Experiment, build_experiment, load_experiment, make_starters, run_experiment
from pods_rl.runs import Run, is_run
from pods_rl.yaml_files import Origin, dump_yaml, read_yaml

HERE = Path(__file__).parent
STUDY, SOURCE = read_yaml(HERE / "batch_study.yaml")
OF_GRPO = ("dynamic", "trl")  # these followers take the best shape of grpo, the others that of the batch
CONTROLS = {"random": "random", "shuffled": "benchmarks.batch_controls:shuffled_sizes"}  # the rule of each
# Estimates for the plan, from earlier studies (docs/results.md, chat.yaml).
OVERHEAD = 3.0  # seconds of a run outside its training clock
OVERHEAD_OF_CHAT = 45.0
RATES_TRIED = 3.5  # of a shape, on average


def keys_of(arm: str, rows: int) -> dict[str, Any]:
    """Return the recipe keys of an arm by its name.

    >>> keys_of("batch-4x8", 16)["num_prompts"], keys_of("all-4x8", 16)["per_device_train_batch_size"]
    (4, 32)
    """
    kind, _, shape = arm.partition("-")
    keys: dict[str, Any] = {"per_device_train_batch_size": rows}
    if kind in ("grpo", *OF_GRPO):
        keys |= {"num_rollouts": int(shape), "num_generations": int(shape)}
        if kind == "dynamic":
            keys["dynamic_sampling"] = True
        if kind == "trl":
            keys |= {"exact_trl": True, "skip_zero_advantage_steps": False}
        return keys
    if kind == "pods":
        n, m = map(int, shape.split("-"))
        return keys | {"num_rollouts": n, "num_generations": m}
    prompts, n = map(int, shape.split("x"))
    if kind == "all":
        return {"per_device_train_batch_size": prompts * n, "num_rollouts": n, "num_generations": n}
    mean = max(2, rows // prompts)  # TRL requires at least 2, and a divisor of the rows
    keys |= {"selection": "batch", "num_prompts": prompts, "num_rollouts": n, "num_generations": mean}
    if kind in CONTROLS:
        keys["rule"] = CONTROLS[kind]
    return keys


class Best(NamedTuple):
    """The best learning rate of an arm in its pilot runs, and the accuracy over time that it had."""

    rate: float
    score: float


def best_rates(rows: Iterable[Mapping[str, str]], seeds: Sequence[int]) -> dict[str, Best]:
    """Return the best rate of each arm in a file of pilot runs.

    Raises:
        SystemExit: a seed is missing at a rate, or the best rate of an arm is the lowest or highest that was tried.
    """
    scores: dict[str, dict[float, dict[int, float]]] = {}
    for row in rows:
        of_rate = scores.setdefault(row["arm"], {}).setdefault(float(row["rate"]), {})
        of_rate[int(row["seed"])] = float(row["accuracy_over_time"])
    found = {}
    for arm, of_arm in scores.items():
        for rate, of_rate in of_arm.items():
            if of_rate.keys() != {*seeds}:
                raise SystemExit(f"{arm} at {rate:g} has pilot runs of the seeds {sorted(of_rate)}, not {[*seeds]}.")
        means = {rate: statistics.fmean(of_rate.values()) for rate, of_rate in of_arm.items()}
        rate = max(means, key=means.__getitem__)
        if not min(means) < rate < max(means):
            raise SystemExit(f"{arm}: the best rate, {rate:g}, is at the edge of those tried, {sorted(means)}.")
        found[arm] = Best(rate, means[rate])
    return found


@dataclass(frozen=True)
class Cell:
    """A task and a number of rows per step, with everything that is compared there."""

    name: str
    task: str
    rows: int
    seconds: float
    pilot_seconds: float
    seeds: int
    candidates: dict[str, list[str]]
    followers: list[str]
    always: list[str] = dataclasses.field(default_factory=list)
    count: int = 12

    @property
    def full_name(self) -> str:
        return f"batch_{self.name}"

    @property
    def file(self) -> Path:
        return HERE / f"{self.full_name}.yaml"

    @property
    def results(self) -> Path:
        return comparisons.RESULTS / self.full_name

    @property
    def pilot_seeds(self) -> list[int]:
        return [self.seeds + 90, self.seeds + 91]

    @property
    def first_arms(self) -> list[str]:
        """The arms whose shapes are given."""
        arms = [f"{kind}-{shape}" for kind, shapes in self.candidates.items() for shape in shapes]
        return arms + self.always

    def best_shapes(self, best: Mapping[str, Best]) -> dict[str, str]:
        """Return the shape of each kind of candidate whose best rate has the highest score."""
        shapes = {}
        for kind, of_kind in self.candidates.items():
            shapes[kind] = max(of_kind, key=lambda shape, kind=kind: best[f"{kind}-{shape}"].score)
        return shapes

    def following(self, shapes: Mapping[str, str]) -> list[str]:
        """Return the arms that take the best shape of grpo or of the batch."""
        return [f"{kind}-{shapes['grpo' if kind in OF_GRPO else 'batch']}" for kind in self.followers]

    def final_arms(self, shapes: Mapping[str, str]) -> list[str]:
        return [*(f"{kind}-{shape}" for kind, shape in shapes.items()), *self.always, *self.following(shapes)]

    def experiment(self, arms: Iterable[str], **keys: Any) -> Experiment:
        """Return an experiment with some arms at the middle rate of the grid."""
        base = STUDY["base"] | STUDY["tasks"][self.task]
        values = {"name": self.full_name, "base": base, "arms": {arm: keys_of(arm, self.rows) for arm in arms}}
        return build_experiment(values | keys, Origin(SOURCE.name))

    def final_text(self, rows: Iterable[Mapping[str, str]]) -> str:
        """Return the text of the experiment of the seeds, from the rows of the pilot runs."""
        best = best_rates(rows, self.pilot_seeds)
        shapes = self.best_shapes(best)
        arms = self.final_arms(shapes)
        subject = f"batch-{shapes['batch']}"
        baseline = f"grpo-{shapes['grpo']}"
        pairs = [{"arm": subject, "against": arm} for arm in arms if arm != subject]
        pairs += [{"arm": arm, "against": baseline} for arm in self.always]
        pairs += [{"arm": baseline, "against": arm} for arm in arms if arm.startswith("trl-")]
        values = {
            "name": self.full_name,
            "baseline": baseline,
            "arms": {arm: keys_of(arm, self.rows) | {"learning_rate": best[arm].rate} for arm in arms},
            "pairs": pairs,
            "seeds": [*range(self.seeds, self.seeds + self.count)],
            "base": STUDY["base"] | STUDY["tasks"][self.task] | {"max_seconds": self.seconds},
        }
        source = f"docs/results/{self.full_name}/rates.csv"
        return f"# `python benchmarks/batch_study.py {self.name}` wrote this from {source}.\n" + dump_yaml(values)

    # -- the plan --------------------------------------------------------------------------------------------------

    @property
    def overhead(self) -> float:
        return OVERHEAD_OF_CHAT if self.task == "chat" else OVERHEAD

    @cached_property
    def pilot_runs(self) -> int:
        """The number of pilot runs, about: an arm whose best rate is at an edge needs more than three rates."""
        return round((len(self.first_arms) + len(self.followers)) * RATES_TRIED * len(self.pilot_seeds))

    @property
    def final_runs(self) -> int:
        return (len(self.candidates) + len(self.always) + len(self.followers)) * self.count

    def minutes(self, runs: Path) -> tuple[float, float]:
        """Return the minutes of two cores that remain for the pilot runs and for the seeds."""
        pilots = 0 if self.file.exists() else max(self.pilot_runs - finished(runs / "pilots" / self.name), 0)
        seeds = self.final_runs - finished(runs / self.name)
        if (self.results / "comparisons.csv").exists():
            seeds = 0
        per_run = self.pilot_seconds + self.overhead, self.seconds + self.overhead
        return pilots * per_run[0] / 2 / 60, seeds * per_run[1] / 2 / 60

    # -- the runs --------------------------------------------------------------------------------------------------

    def make_pilots(self, output: Path, parallel: int) -> None:
        """Make the pilot runs, and write `rates.csv` and the experiment of the seeds."""
        arms = self.first_arms
        best = self._pilots(arms, output, parallel)
        arms = arms + self.following(self.best_shapes(best))
        self._pilots(arms, output, parallel)
        rows = read_rows(output / "rates.csv")
        self.results.mkdir(parents=True, exist_ok=True)
        (self.results / "rates.csv").write_bytes((output / "rates.csv").read_bytes())
        self.file.write_text(self.final_text(rows), encoding="utf-8")

    def _pilots(self, arms: Sequence[str], output: Path, parallel: int) -> dict[str, Best]:
        search = rates.Rates(self.experiment(arms), self.pilot_seeds, output)
        rates.make_runs(search, {"max_seconds": self.pilot_seconds}, parallel)
        return best_rates(read_rows(output / "rates.csv"), self.pilot_seeds)

    def make_final_runs(self, output: Path, parallel: int, keep_slow: bool) -> None:
        """Make the runs of the seeds, and write the tables."""
        make(load_experiment(self.file), output, parallel)
        comparisons.collect(output, self.results, keep_slow)
        rows = comparisons.compare_study(self.full_name)
        comparisons.write_csv(self.results / "comparisons.csv", rows)
        comparisons.write_csv(self.results / "quiet.csv", comparisons.compare_study(self.full_name, quiet=True))
        comparisons.show(rows)

    def try_out(self, output: Path, parallel: int) -> None:
        """Make one short run of every arm, as if the first shape of each kind were the best."""
        shapes = {kind: of_kind[0] for kind, of_kind in self.candidates.items()}
        arms = dict.fromkeys([*self.first_arms, *self.following(shapes)])
        make(self.experiment(arms, max_seconds=1.0, eval_prompts=4, ledger_every=1), output, parallel)


def cells() -> dict[str, Cell]:
    """Return the cells of the study by name, the most important first."""
    return {name: Cell(name, **keys) for name, keys in STUDY["cells"].items()}


def make(experiment: Experiment, output: Path, parallel: int) -> None:
    """Make the runs of an experiment; raise SystemExit if one failed."""
    with make_starters(experiment, parallel) as starters:
        counts = run_experiment(experiment, output, rates.on_event, parallel=parallel, starters=starters)
    if counts.get("failed") or counts.get("stopped"):
        raise SystemExit(f"Runs in {output} are missing. The same command makes them again.")


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def finished(folder: Path) -> int:
    """Return the number of finished runs below a folder."""
    paths = folder.glob("*/seed-*")
    return sum(is_run(path) and Run(path).state == "finished" for path in paths)


def is_committed(paths: Sequence[Path]) -> bool:
    """Whether all files are in the last commit as they are."""
    for path in paths:
        in_commit = subprocess.run(
            ["git", "show", f"HEAD:./{path.name}"], cwd=path.parent, capture_output=True, check=False
        )
        if in_commit.returncode or in_commit.stdout != path.read_bytes():
            return False
    return True


def show_plan(runs: Path) -> None:
    """Print the minutes that remain of each cell, on two quiet cores, and how far the batch was ahead in the pilots."""
    print("minutes of two cores that remain, about; accuracy over time of the batch less that of grpo in the pilots")
    print(f"{'cell':<14}{'pilots':>8}{'seeds':>8}   batch - grpo")
    total = 0.0
    for cell in cells().values():
        pilots, seeds = cell.minutes(runs)
        total += pilots + seeds
        gap = ""
        if (cell.results / "rates.csv").exists():
            best = best_rates(read_rows(cell.results / "rates.csv"), cell.pilot_seeds)
            shapes = cell.best_shapes(best)
            gap = f"{best['batch-' + shapes['batch']].score - best['grpo-' + shapes['grpo']].score:+.3f}"
        print(f"{cell.name:<14}{pilots:>8.0f}{seeds:>8.0f}   {gap}".rstrip())
    print(f"{'together':<14}{total:>16.0f}")


def main() -> None:
    known = cells()
    parser = command_line(__doc__)
    parser.add_argument("cells", nargs="*", choices=[*known, "all", []], metavar="CELL", help="or all")
    parser.add_argument("--runs", type=Path, default=Path("runs/batch_study"), help="default: runs/batch_study")
    parser.add_argument("--parallel", type=int, default=2, help="runs at the same time, one core each")
    parser.add_argument("--keep-slow", action="store_true", help="write the tables also if the machine was slower")
    parser.add_argument("--trial", action="store_true", help="one run of a second of every arm")
    options = parser.parse_args()
    names = [*known] if "all" in options.cells else options.cells
    if not names:
        show_plan(options.runs)
    for name in names:
        cell = known[name]
        if options.trial:
            cell.try_out(options.runs / "trial" / name, options.parallel)
            continue
        if not cell.file.exists():
            cell.make_pilots(options.runs / "pilots" / name, options.parallel)
        if is_committed([cell.file, cell.results / "rates.csv"]):
            cell.make_final_runs(options.runs / name, options.parallel, options.keep_slow)
        else:
            print(f"Commit {cell.file.name} and {cell.results.name}/rates.csv, then repeat the command for the seeds.")


if __name__ == "__main__":
    main()
