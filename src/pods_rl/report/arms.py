"""The arms of a comparison and their curves, from run directories or a CSV, and which runs are missing or damaged."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, read_csv

from ..errors import UserError
from ..runs import Run, find_runs, is_run, undeclared_runs
from ..runs.files import CONFIG, ENVIRONMENT, EVALS, EXPERIMENT, METRICS, STATUS, check_regular
from .comparable import config_of, recipe_difference
from .intervals import Array
from .statistics import SAME_MOMENT, Curve, on_a_line
from .text import finite, from_csv_text, plain, tally

ACCURACIES = ("accuracy", "answer_accuracy", "both_accuracy", "format_accuracy")
LENGTH = "mean_completion_tokens"
HOUR = 3600.0
MOST_CHECKPOINTS = 1000  # of a curve; a longer one keeps this many, evenly spread
_METRICS = (*ACCURACIES, LENGTH)
_CSV_SETTINGS = {"rule": "rule", "num_rollouts": "n", "num_generations": "m", "advantages": "advantages"}
# as spreadsheets and data frames write it
_NOT_MEASURED = ("", "nan", "NaN", "na", "NA", "n/a", "N/A", "null", "none", "None", "-")
_MOST_DAMAGED = 5  # files that are named

Evals = Mapping[str, Iterable[Mapping[str, Any]]]  # by run
Points = dict[float, tuple[float, float, float]]  # by nominal second or step: real second, score, standard error


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm of the comparison: a name, its runs and its curve (None before a run has been evaluated)."""

    name: str
    label: str
    curve: Curve | None
    config: Mapping[str, Any]
    runs: tuple[Run, ...] = ()
    curves: Mapping[str, Curve] = field(default_factory=dict)  # by metric, the compared one first

    @property
    def run_count(self) -> int:
        """Number of runs: directories, or of a CSV the runs of the curve."""
        if self.runs:
            return len(self.runs)
        if self.curve:
            return len(self.curve.runs)
        return 0

    @property
    def is_single(self) -> bool:
        """Whether the curve is that of one run."""
        return self.curve is not None and len(self.curve.runs) == 1

    @property
    def unfinished(self) -> str:
        """How many runs did not finish, by state, such as ``1 failed``; empty if all finished."""
        states = Counter(run.state for run in self.runs)
        del states["finished"]
        return tally(sorted(states.items()))

    @property
    def is_running(self) -> bool:
        """Whether some run still trains."""
        return any(run.state == "running" for run in self.runs)

    @property
    def has_scores(self) -> bool:
        """Whether the curve has a mean at some checkpoint."""
        return not math.isnan(self.end)

    @property
    def end(self) -> float:
        """Nominal seconds of the last checkpoint with a mean; NaN if there is none."""
        if self.curve is None:
            return math.nan
        return self.curve.end

    def ends_by(self, due: float) -> bool:
        """Whether the curve has no later score than a nominal second."""
        return self.end <= due * SAME_MOMENT

    @property
    def is_trained(self) -> bool:
        """Whether the arm was evaluated after its start."""
        return self.end > 0

    @cached_property
    def seeds(self) -> tuple[str, ...]:
        """The seed of each run of the curve, or the run's name if its seed is unknown."""
        if self.curve is None:
            return ()
        seeds = {}
        for run in self.runs:
            if run.seed is not None:
                seeds[str(run.path)] = str(run.seed)
        return tuple(seeds.get(name, name) for name in self.curve.runs)


def same_seeds(arm: Arm, rival: Arm) -> list[int] | None:
    """Return the rows of the rival's curve in the order of the arm's seeds; None if their seeds are not the same."""
    if len({*rival.seeds}) < len(rival.seeds) or sorted(arm.seeds) != sorted(rival.seeds):
        return None
    return [rival.seeds.index(seed) for seed in arm.seeds]


# --------------------------------------------------------------------------------------------- curves


def curve_of(evals: Evals, metric: str, clock: str = "seconds", running: Collection[str] = ()) -> Curve | None:
    """Return the curve of one metric over the runs of an arm. If no run has an evaluation, return None.

    Runs are matched by the nominal seconds of their evaluations, else by their steps. If they share neither, scores are
    interpolated at common times, or at common steps if they have no time in common.

    Args:
        evals: evaluations by run, each with ``due`` (nominal seconds), ``seconds`` (real), the metric and, if
            logged, its ``step``, and its standard error ``<metric>_se`` or the number of ``prompts``. Of two
            evaluations of one run with the same ``due`` (a resumed run repeats one) the later line counts. ``due``
            defaults to ``seconds``.
        metric: the field to read; an evaluation without a finite number there is skipped.
        clock: the field of the real times.
        running: the runs that still train.

    >>> curve_of({"0": [{"due": 0, "seconds": 0.1, "accuracy": 0.2}], "1": []}, "accuracy").scores
    array([[0.2]])
    """
    by_time: dict[str, Points] = {}
    by_step: dict[str, Points] = {}
    for run, rows in evals.items():
        of_time, of_step = _points_of(rows, metric, clock)
        if of_time:
            by_time[run] = of_time
            by_step[run] = of_step
    if not by_time:
        return None
    ended = {run for run in by_time if run not in running} or {*by_time}
    ended_R = np.array([run in ended for run in by_time])
    has_steps = all(by_step.values())
    until_end = _to_a_common_end(by_time, ended)
    if _share_a_clock([*by_time.values()]):
        return replace(_aligned(until_end), ended=ended_R)
    if has_steps and _share_a_clock([*by_step.values()]):
        return replace(_over_time(_aligned(_to_a_common_end(by_step, ended))), ended=ended_R)
    curve = replace(_interpolated(until_end), ended=ended_R)
    if curve.last() is None and has_steps:
        curve = _interpolated(_to_a_common_end(by_step, ended), over_steps=True)
        return replace(_over_time(curve), ended=ended_R)
    return curve


def _points_of(rows: Iterable[Mapping[str, Any]], metric: str, clock: str) -> tuple[Points, Points]:
    """Return the evaluations of one run that have a score and a time, by nominal second and by step.

    By step there are none if one of them has no step.
    """
    by_time: Points = {}
    by_step: Points = {}
    for row in rows:
        score = finite(row.get(metric))
        seconds = finite(row.get(clock))
        due = finite(row.get("due"))
        if due is None:
            due = seconds
        if seconds is None:
            seconds = due
        if score is not None and due is not None and seconds is not None:
            point = (seconds, score, standard_error(row, metric))
            by_time[due] = point
            step = finite(row.get("step"))
            if step is not None:
                by_step[step] = point
    return by_time, by_step if len(by_step) == len(by_time) else {}


def _over_time(curve: Curve) -> Curve:
    """Return a curve over steps as one over time: the nominal second of a step is the mean of its seconds over runs."""
    seconds = np.nanmean(curve.seconds, axis=0)
    return replace(curve, due=np.maximum.accumulate(seconds), by_step=True)


def _to_a_common_end(runs: dict[str, Points], ended: Collection[str]) -> dict[str, Points]:
    """Return the runs with one last time or step, where their ends differ by less than an interval of evaluations.

    It is the earliest of these ends. The score of a run that ends later is there on a straight line between two
    evaluations. Without this, a mean at the end would be over the runs that happened to end late. Runs that end at
    least an interval before most others stay as they are, and are missing at the end. So do those that still train.
    """
    ends = {run: max(points) for run, points in runs.items() if run in ended}
    usual_end = sorted(ends.values(), reverse=True)[len(ends) // 2]  # more than half of the runs have not ended before
    interval = _interval(runs)
    if interval == 0:
        return runs
    common_end = min(end for end in ends.values() if usual_end - end < interval)
    cut: dict[str, Points] = {}
    for run, points in runs.items():
        cut[run] = points
        if run in ends and min(points) <= common_end < ends[run]:
            belongs_to_end = ends[run] - common_end < interval
            kept = {due: values for due, values in points.items() if due < common_end or not belongs_to_end}
            cut[run] = {**kept, common_end: _point_at(points, common_end)}
    return cut


def _interval(runs: Mapping[str, Points]) -> float:
    """Return the usual nominal seconds between two evaluations of a run; 0 if every run has only one."""
    steps = np.concatenate([np.diff(sorted(points)) for points in runs.values()])
    if len(steps) == 0:
        return 0.0
    return float(np.median(steps)) / SAME_MOMENT  # so that evaluations on one clock are a full interval apart


def _point_at(points: Points, due: float) -> tuple[float, float, float]:
    """Return an evaluation of one run, on a straight line between two if there is none at this nominal second."""
    if due in points:
        return points[due]
    times = np.array(sorted(points))
    seconds, score, error = (
        float(on_a_line(np.array([due]), times, values)[0])
        for values in np.array([points[time] for time in times.tolist()]).T
    )
    return seconds, score, error


def _aligned(runs: Mapping[str, Points]) -> Curve:
    """Return a curve with a checkpoint for each nominal second, or evenly spread ones if there are too many."""
    all_due = sorted(set().union(*runs.values()))
    kept = np.linspace(0, len(all_due) - 1, min(len(all_due), MOST_CHECKPOINTS)).round().astype(int)
    column_of = {all_due[index]: column for column, index in enumerate(kept)}
    table = np.full((3, len(runs), len(kept)), np.nan)  # [seconds, score and error; R; C]
    for row, points in enumerate(runs.values()):
        for due, values in points.items():
            if due in column_of:
                table[:, row, column_of[due]] = values
    seconds_RC, scores_RC, errors_RC = table
    return Curve(tuple(runs), np.array([*column_of], dtype=np.float64), seconds_RC, scores_RC, errors_RC)


def standard_error(row: Mapping[str, Any], metric: str) -> float:
    """Return the standard error of an evaluation: as given, else that of a share of its prompts, else NaN.

    Two answers, one right, are added to the prompts (Agresti and Coull 1998): 0 of 256 does not prove 0.

    >>> round(standard_error({"accuracy": 0.5, "prompts": 98}, "accuracy"), 3)
    0.05
    """
    score = finite(row.get(metric)) or 0.0
    logged_error = finite(row.get(f"{metric}_se")) or 0.0
    prompts = finite(row.get("prompts")) or 0.0
    if logged_error > 0:
        return logged_error
    if metric not in ACCURACIES or prompts < 1 or not 0 <= score <= 1:
        return math.nan
    share = (score * prompts + 1) / (prompts + 2)
    return math.sqrt(share * (1 - share) / (prompts + 2))


def _share_a_clock(runs: Sequence[Points]) -> bool:
    """Whether some run has at least half of its evaluations at times at which another run has one too.

    Evaluations at the earliest time do not count: all runs start at 0.
    """
    start = min(min(points) for points in runs)
    times_of_runs = []
    count: Counter[float] = Counter()  # runs by time
    for points in runs:
        times = points.keys() - {start}
        if times:
            times_of_runs.append(times)
            count.update(times)
    if len(times_of_runs) < 2:
        return True
    for times in times_of_runs:
        shared = [time for time in times if count[time] > 1]
        if len(shared) >= len(times) / 2:
            return True
    return False


def _interpolated(runs: Mapping[str, Points], *, over_steps: bool = False) -> Curve:
    """Interpolate linearly at common times or steps, about one for each evaluation of a run, without extrapolation."""
    tables: list[Array] = []  # of each run: [time or step, seconds, score and error; C]
    for points in runs.values():
        keys = sorted(points)
        values = np.array([points[key] for key in keys]).T
        tables.append(np.vstack([keys if over_steps else values[0], values]))
    count = min(int(np.median([len(points) for points in runs.values()])), MOST_CHECKPOINTS)
    all_keys = np.concatenate([table[0] for table in tables])
    grid = np.unique(np.quantile(all_keys, np.linspace(0, 1, max(2, count))))  # [C]
    columns = [[on_a_line(grid, keys, column) for column in values] for keys, *values in tables]
    seconds_RC, scores_RC, errors_RC = np.array(columns).transpose(1, 0, 2)
    return Curve(tuple(runs), grid, seconds_RC, scores_RC, errors_RC, interpolated=True)


# ----------------------------------------------------------------------------------------------- arms


def arms_from_runs(
    sources: Sequence[str | Path], metric: str, named: Mapping[str, Sequence[str | Path]] | None = None
) -> list[Arm]:
    """Return the arms of experiment directories and run directories, in the order given.

    A run called ``seed-<k>`` belongs to the arm that its parent is named after, as in an experiment, whether the
    experiment, the arm or the run was given. A run of any other name is an arm of its own. A run that is given twice
    counts once.

    Args:
        sources: experiments, folders of an arm, and runs.
        metric: the score.
        named: further arms by name, each with the folders of its runs. They have their runs before any of ``sources``.

    Raises:
        UserError: if there is no run, or if the runs of an arm are not seeds of one recipe.
    """
    named = named or {}
    folders = _runs_by_arm(sources, named)
    for name, paths in named.items():
        if name not in folders:
            raise UserError(f"--arm {plain(name)}: no run found in {', '.join(map(str, paths))}.")
    if not folders:
        where = ", ".join(str(source) for source in sources) or "an empty list"
        hint = "expected run directories, or a directory of them, as `pods compare` writes it"
        if any(undeclared_runs(source) for source in sources):
            hint = f"{EXPERIMENT} there declares other arms or seeds than it holds. Name the folder of an arm or a run"
        raise UserError(f"No run found in {where}: {hint}.")
    arms = []
    for name, runs in folders.items():
        _check_one_recipe(name, runs)
        evals = {str(run.path): run.evals for run in runs}
        arms.append(_arm(name, config_of(runs), evals, metric, runs))
    return arms


def _runs_by_arm(sources: Sequence[str | Path], named: Mapping[str, Sequence[str | Path]]) -> dict[str, list[Run]]:
    """Return the runs by the name of their arm, each once."""
    found: list[tuple[str, Run]] = []
    for name, paths in named.items():
        for path in paths:
            for runs in find_runs(path).values():
                found += [(name, run) for run in runs]
    for source in map(Path, sources):
        for folder, runs in find_runs(source).items():
            found += [(_name_of(run, folder, source), run) for run in runs]
    arms: dict[str, list[Run]] = {}
    seen: set[str] = set()
    for name, run in found:
        place = os.path.realpath(run.path)
        if place not in seen:
            seen.add(place)
            arms.setdefault(name, []).append(run)
    for runs_of_arm in arms.values():
        runs_of_arm.sort(key=_seed_of)  # those without a seed stay in the order given, at the end
    return arms


def _name_of(run: Run, folder: str, source: Path) -> str:
    """Return the name of a run's arm: its folder's if it is called ``seed-<k>``, else its own."""
    if is_run(source) or run.path.name == folder:
        return run.arm or folder
    return folder if re.fullmatch(r"seed-\d+", run.path.name) else run.path.name


def _check_one_recipe(name: str, runs: Sequence[Run]) -> None:
    """Raise UserError if some run of an arm is not another seed of the recipe of those before it."""
    for place, run in enumerate(runs):
        difference = recipe_difference(runs[:place], run)
        if difference:
            where = plain(f"{run.path.parent.name}/{run.path.name}")
            raise UserError(
                f"The runs of {plain(name)} are not seeds of one recipe: {difference} (the latter in {where}). Name "
                "the runs of each arm with --arm NAME=FOLDER."
            )


def _seed_of(run: Run) -> float:
    return math.inf if run.seed is None else run.seed


def _arm(name: str, config: Mapping[str, Any], evals: Evals, metric: str, runs: Sequence[Run] = ()) -> Arm:
    running = {str(run.path) for run in runs if run.state == "running"}
    curves = {}
    for measured in dict.fromkeys((metric, *_METRICS)):
        curve = curve_of(evals, measured, running=running)
        if curve is not None:
            curves[measured] = curve
    return Arm(name, label_of(name, config), curves.get(metric), config, tuple(runs), curves)


def arms_from_csv(path: str | Path, metric: str = "answer_accuracy") -> list[Arm]:
    """Return the arms of a CSV with a row per run and checkpoint, in the order in which they first appear.

    Args:
        path: columns ``arm``, ``run``, ``hours`` (nominal, also taken as the real time), and the metric; optional,
            ``<metric>_se``, the standard error of an evaluation, or ``prompts``, how many it was over; ``rule``,
            ``n``, ``m`` and ``advantages`` describe an arm.
        metric: the column to read; a row with nothing there is skipped.

    Raises:
        UserError: if the file or a column is missing, if an hour or a score is not a number of at most 15 digits, or
            if a run has two rows at the same hour (two benchmarks in one file, for instance).
    """
    configs: dict[str, dict[str, Any]] = {}
    evals: dict[str, dict[str, dict[float, dict[str, Any]]]] = {}  # by arm, run and hour
    for number, row in enumerate(_rows_of_csv(path, metric), start=2):
        name = row["arm"]
        run = row["run"]
        hours = row["hours"]
        score = row[metric]
        if finite(hours) is None or (score is not None and finite(score) is None):
            raise UserError(f"{path}, row {number}: hours is {hours} and {metric} {score}, expected numbers.")
        points = evals.setdefault(name, {}).setdefault(run, {})
        if hours in points:
            raise UserError(
                f"{path}, row {number}: run {run} of arm {name} has a second row at {hours} h. Keep one row per "
                "run and checkpoint (one benchmark per file)."
            )
        points[hours] = row | {"due": hours * HOUR, "seconds": hours * HOUR}
        if name not in configs:
            configs[name] = _settings_of_csv(row)
    arms = []
    for name, runs in evals.items():
        evals_of_runs = {run: points.values() for run, points in runs.items()}
        arms.append(_arm(name, configs[name], evals_of_runs, metric))
    return arms


def _settings_of_csv(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a row says of its arm, by the keys of a recipe."""
    config = {}
    for key, column in _CSV_SETTINGS.items():
        if row.get(column):
            config[key] = row[column]
    return config


def _rows_of_csv(path: str | Path, metric: str) -> list[dict[str, Any]]:
    """Read a CSV that has the columns of `arms_from_csv`."""
    check_regular(Path(path))
    needed = ["arm", "run", "hours", metric]
    texts = ("arm", "run", "rule", "advantages")
    types = dict.fromkeys(texts, pa.string())
    types |= dict.fromkeys(("hours", metric), pa.float64())
    one_thread = ReadOptions(use_threads=False)  # so that an error names its row
    parse = ParseOptions(newlines_in_values=True)
    convert = ConvertOptions(column_types=types, null_values=_NOT_MEASURED)
    try:
        table = read_csv(path, one_thread, parse, convert)
        rows: list[dict[str, Any]] = table.to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"Cannot read {path} as CSV: {error}. Expected columns {', '.join(needed)}.") from error
    columns = table.column_names
    for name, count in Counter(columns).items():
        if count > 1:
            raise UserError(f"{path} has several columns called {plain(name)}. Remove or rename all but one.")
    if not rows or not {*needed} <= {*columns}:
        raise UserError(
            f"{path} has no row with {', '.join(needed)}: its columns are {', '.join(columns)}. "
            "Choose a metric with --metric, or rename the columns."
        )
    for row in rows:
        for name in texts:
            if row.get(name):
                row[name] = from_csv_text(row[name])
    return rows


def label_of(name: str, config: Mapping[str, Any]) -> str:
    """Return the arm's name with n and m, unless the name has n already.

    >>> label_of("pods", {"num_rollouts": 64, "num_generations": 16})
    'pods (64→16)'
    >>> label_of("pods-n64-m16", {"num_rollouts": 64, "num_generations": 16})
    'pods-n64-m16'
    """
    n, m = rollouts_of(config)
    label = plain(name) or "(no name)"
    if n is None or m is None or re.search(rf"\b[a-z]?{n}\b", name):
        return label
    if n == m:
        return f"{label} ({n})"
    return f"{label} ({n}→{m})"


def rollouts_of(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return n and m of a recipe; n is m if it sets no ``num_rollouts`` (plain GRPO)."""
    m = _whole(config.get("num_generations"))
    n = _whole(config.get("num_rollouts"))
    if n is None:
        n = m
    return n, m


def _whole(value: object) -> int | None:
    number = finite(value)
    if number is None:
        return None
    return int(number)


def damaged_files(arms: Sequence[Arm]) -> str:
    """Name the files of the runs that could not be read, and lines that were skipped; empty if there are none."""
    damaged = []
    for arm in arms:
        for run in arm.runs:
            damaged += _damage_of(run)
    text = ", ".join(damaged[:_MOST_DAMAGED])
    if len(damaged) > _MOST_DAMAGED:
        text += f", and {len(damaged) - _MOST_DAMAGED} more files"
    return text


def _damage_of(run: Run) -> list[str]:
    """Return each damaged file of a run with its first skipped line, or ``all of it``."""
    contents = {
        CONFIG: run.config,
        STATUS: run.status,
        ENVIRONMENT: run.environment,
        METRICS: run.metrics,
        EVALS: run.evals,
    }
    folder = f"{plain(run.path.parent.name)}/{plain(run.path.name)}"
    damaged = []
    for name, content in contents.items():
        place = f"{folder}/{name}"
        path = run.path / name
        lines = run.skipped.get(name)
        if lines:
            damaged.append(f"{place} (line {lines[0]})")
        elif os.path.lexists(path) and (content == {} or not path.is_file()):
            damaged.append(f"{place} (all of it)")
    return damaged
