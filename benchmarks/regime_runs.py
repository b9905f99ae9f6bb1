"""The arms of the map of regimes, its finished runs as CSV files, and which learning rates they choose."""

from __future__ import annotations

import argparse
import csv
import io
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pods_rl.report.analysis import cost_of
from pods_rl.report.arms import Curve, curve_of
from pods_rl.report.intervals import Array
from pods_rl.runs import Run, find_runs, write_atomic
from pods_rl.yaml_files import read_yaml

HERE = Path(__file__).parent
RESULTS = HERE.parent / "docs" / "results"
CONFIG, ORIGIN = read_yaml(HERE / "regimes.yaml")
RATES = (2e-4, 4e-4, 8e-4)
RANGE_RATES = (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3)
RANGE_ARMS = ("16x4-n4", "16x4-n8", "16x4-n16", "4x16-n16", "4x16-n64")
FIRST_SELECTION_SEED = 100  # this and later seeds choose; earlier ones compare
SEEDS = {
    "select": (100, 101),
    "compare": (1, 2, 3, 4, 5),
    "range": (100, 101),
    "rules": (1, 2, 3, 4, 5),
    "ladder": (1, 2, 3, 4, 5, 6, 7, 8),
}
CHOOSING = ("select", "range")
TRL = "TRL's own step"
PHASES = ("rollout", "reward", "selection", "update", "other")
RUN_COLUMNS = ("arm", "rate", "seed", "max_seconds", "steps", "seconds_per_step", *PHASES, "elapsed", "commit", "cpu")
CURVE_COLUMNS = ("arm", "rate", "seed", "due", "seconds", "step", "accuracy")


@dataclass(frozen=True)
class Arm:
    """An arm of `regimes.yaml`: prompts a step, rollouts trained and generated of each, and in what it differs."""

    name: str
    prompts: int
    m: int
    n: int
    base: str  # the arm of the map that a variant changes; an arm of the map itself
    what: str = ""

    @property
    def rows(self) -> int:
        return self.prompts * self.m

    @property
    def is_grpo(self) -> bool:
        return self.n == self.m

    @property
    def label(self) -> str:
        what = f"GRPO {self.m}" if self.is_grpo else f"PODS {self.n} -> {self.m}"
        prompts = f"{self.prompts} prompt{'s' if self.prompts > 1 else ''} a step"
        return ", ".join(filter(None, (what, self.what, prompts)))


class Key(NamedTuple):
    """What identifies a run."""

    arm: str
    rate: float
    seed: int


def keys_of(name: str) -> dict[str, Any]:
    """Return the keys of an arm of the map, or of a variant with those of its arm."""
    base = "-".join(name.split("-")[:2])
    return CONFIG["arms"][base] | CONFIG["variants"].get(name, {})


def read_arm(name: str) -> Arm:
    keys = keys_of(name)
    m = keys["num_generations"]
    what = TRL if keys.get("exact_trl") else keys.get("rule", "")
    return Arm(
        name, keys["per_device_train_batch_size"] // m, m, keys["num_rollouts"], "-".join(name.split("-")[:2]), what
    )


ARMS = {name: read_arm(name) for name in CONFIG["arms"]}
VARIANTS = {name: read_arm(name) for name in CONFIG["variants"]}
RULES = [name for name, keys in CONFIG["variants"].items() if "rule" in keys]
LADDER: dict[str, float] = CONFIG["ladder"]
FIXED: dict[str, float] = CONFIG["rates"] | LADDER


class Store:
    """The finished runs of `runs.csv` and `curves.csv`, and of a folder of run directories that is collected.

    Raises SystemExit if the runs in the files have another length than `max_seconds`.
    """

    def __init__(self, folder: Path, max_seconds: float) -> None:
        self.folder = folder
        self.max_seconds = max_seconds
        self.runs: dict[Key, dict[str, str]] = {key_of(row): row for row in read_rows(folder / "runs.csv")}
        self.curves: dict[Key, list[dict[str, float]]] = {}
        for row in read_rows(folder / "curves.csv"):
            points = {name: float(row[name]) for name in ("due", "seconds", "step", "accuracy")}
            self.curves.setdefault(key_of(row), []).append(points)
        for key, row in self.runs.items():
            if float(row["max_seconds"]) != self.length(key.arm):
                raise SystemExit(
                    f"{folder} has a run of {key.arm} of {row['max_seconds']} s, not {self.length(key.arm):g} s. "
                    "Choose another --results, or another --max-seconds."
                )

    def length(self, arm: str) -> float:
        """Return the training clock of an arm's runs: `max_seconds`, and longer where `regimes.yaml` says so."""
        usual = CONFIG["base"]["max_seconds"]
        return self.max_seconds * float(keys_of(arm).get("max_seconds", usual)) / usual

    def add(self, run: Run) -> None:
        """Add a finished run, and write both files."""
        key = Key(str(run.arm).rpartition("-lr")[0], float(run.config["learning_rate"]), int(run.config["seed"]))
        if key in self.runs or not run.evals or float(run.config["max_seconds"]) != self.length(key.arm):
            return
        cost = cost_of([run])
        values = {"max_seconds": self.length(key.arm), "steps": cost.steps, "seconds_per_step": cost.seconds_per_step}
        values |= {**cost.phases, "other": cost.other, "elapsed": run.elapsed}
        row = {name: f"{value:.6g}" for name, value in values.items()}
        row |= {"commit": str(run.environment.get("git_commit") or "unknown")[:9], "cpu": cpu()}
        self.runs[key] = words_of(key) | row
        self.curves[key] = [
            {"due": row["due"], "seconds": row["seconds"], "step": row["step"], "accuracy": row["accuracy"]}
            for row in run.evals
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        points = []
        for curve_key in sorted(self.curves):
            for point in self.curves[curve_key]:
                words = {name: f"{value:.6g}" for name, value in point.items()}
                points.append(words_of(curve_key) | words)
        write_rows(self.folder / "curves.csv", CURVE_COLUMNS, points)  # first: a run counts once it is in runs.csv
        write_rows(self.folder / "runs.csv", RUN_COLUMNS, [self.runs[at] for at in sorted(self.runs)])

    def collect(self, folder: Path) -> None:
        """Add the finished runs of a folder that were not added, as after a kill."""
        for runs in find_runs(folder).values() if folder.is_dir() else ():
            for run in runs:
                if run.state == "finished":
                    self.add(run)

    def seeds(self, arm: str, rate: float) -> set[int]:
        return {key.seed for key in self.runs if (key.arm, key.rate) == (arm, rate)}

    def curve(self, arm: str, rate: float, seeds: Iterable[int], over: str = "seconds") -> Curve:
        """Return accuracy over the training clock, or over steps."""
        points_of = {}
        for seed in sorted(seeds):
            points = self.curves[Key(arm, rate, seed)]
            points_of[str(seed)] = [point | {"seconds": point[over]} for point in points]
        curve = curve_of(points_of, "accuracy")
        assert curve is not None
        return curve

    def column(self, arm: str, rate: float, seeds: Iterable[int], name: str) -> Array:
        return np.array([float(self.runs[Key(arm, rate, seed)][name]) for seed in sorted(seeds)])

    @property
    def seconds_a_run(self) -> float:
        """The median wall-clock time of a finished run with its start; a guess before the first."""
        start = 15.0
        return start + statistics.median(
            [float(row["elapsed"]) for row in self.runs.values()] or [self.max_seconds * 1.3]
        )


def key_of(row: dict[str, str]) -> Key:
    return Key(row["arm"], float(row["rate"]), int(row["seed"]))


def words_of(key: Key) -> dict[str, str]:
    return {"arm": key.arm, "rate": f"{key.rate:g}", "seed": str(key.seed)}


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue())


def cpu() -> str:
    """Return the processor's name: seconds of another one are not comparable."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def over_time(curve: Curve) -> Array:
    """Return each run's mean accuracy over its evaluations, without the one before training."""
    return np.nanmean(curve.scores[:, 1:], axis=1)


def last_third(curve: Curve) -> Array:
    """Return the scores of the last third of the run, ``[R, evaluations]``."""
    return curve.scores[:, curve.due > curve.due[-1] * 2 / 3 - 1e-9]


class Choice(NamedTuple):
    """The best rate of an arm by the selection seeds, its score, and the best rate by the last third alone."""

    rate: float
    score: float
    by_last_third: float


def choose(store: Store, arm: str, rates: Sequence[float]) -> Choice | None:
    """Return the best rate of an arm; None while a rate lacks runs."""
    common = set.intersection(*(store.seeds(arm, rate) for rate in rates))
    shared = {seed for seed in common if seed >= FIRST_SELECTION_SEED}
    if len(shared) < len(SEEDS["select"]):
        return None
    curves = {rate: store.curve(arm, rate, shared) for rate in rates}
    scores = {rate: float(over_time(curve).mean()) for rate, curve in curves.items()}
    late = {rate: float(np.nanmean(last_third(curve))) for rate, curve in curves.items()}
    best = max(scores, key=scores.__getitem__)
    return Choice(best, scores[best], max(late, key=late.__getitem__))


def grpo_of(arm: Arm) -> list[str]:
    """Return every GRPO arm with as many rows a step."""
    return [grpo.name for grpo in ARMS.values() if grpo.is_grpo and grpo.rows == arm.rows]


def rival_of(arm: Arm, choices: dict[str, Choice | None]) -> str | None:
    """Return the best GRPO arm with as many rows a step; None until all are selected."""
    scores = {}
    for name in grpo_of(arm):
        choice = choices[name]
        if choice is None:
            return None
        scores[name] = choice.score
    return max(scores, key=scores.__getitem__) if scores else None


def wanted_runs(part: str, store: Store, options: argparse.Namespace) -> list[Key]:
    """Return every run of a part, finished or not, by seed and then by arm."""
    cells = options.cells
    seeds = options.seeds or SEEDS[part]
    if part == "range":
        pairs = list(product(cells or RANGE_ARMS, RANGE_RATES))
    elif part == "ladder":
        pairs = [(name, FIXED[name]) for name in cells or LADDER]
    elif part == "select":
        named = []
        for cell in cells or ARMS:
            named += [cell, *grpo_of(ARMS[cell])]
        pairs = list(product(dict.fromkeys(named), options.rates))
    elif part == "rules":  # each at the rate of max-variance, which runs on the same seeds
        named = []
        for variant in cells or RULES:
            named += [VARIANTS[variant].base, variant]
        rates = {name: choose(store, (ARMS | VARIANTS)[name].base, options.rates) for name in named}
        pairs = [(name, choice.rate) for name, choice in rates.items() if choice]
    else:
        choices = {name: choose(store, name, options.rates) for name in ARMS}
        named = list(cells or ARMS)
        if cells:
            rivals = [rival_of(ARMS[cell], choices) for cell in cells]
            named += [rival for rival in rivals if rival]
        pairs = []
        for name in dict.fromkeys(named):
            choice = choices[name]
            if choice:
                pairs.append((name, choice.rate))
    return [Key(name, rate, seed) for seed, (name, rate) in product(seeds, pairs)]
