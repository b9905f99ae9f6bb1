"""The arms of a comparison and their curves, from run directories, and which files of runs are damaged."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..runs import Run, find_runs, is_run, undeclared_runs
from ..runs.files import CONFIG, ENVIRONMENT, EVALS, EXPERIMENT, METRICS, STATUS
from .comparable import config_of, recipe_difference
from .intervals import Array
from .statistics import NO_EVALUATIONS, SAME_MOMENT, Curve, on_a_line
from .text import finite, one_line, tally

ACCURACIES = ("accuracy", "answer_accuracy", "both_accuracy", "format_accuracy")
LENGTH = "mean_completion_tokens"
HOUR = 3600.0
_METRICS = (*ACCURACIES, LENGTH)
_MOST_DAMAGED = 5  # files that are named

Evals = Mapping[str, Iterable[Mapping[str, Any]]]  # by run
Points = dict[float, tuple[float, float, float]]  # by nominal second: real second, score, standard error


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm of the comparison: a name, its runs and its curve."""

    name: str
    label: str
    curve: Curve
    config: Mapping[str, Any]
    runs: tuple[Run, ...] = ()
    curves: Mapping[str, Curve] = field(default_factory=dict)  # by metric, the compared one first

    @property
    def run_count(self) -> int:
        """Number of runs: directories, or without them the runs of the curve."""
        return len(self.runs or self.curve.runs)

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
        return self.curve.end

    @property
    def is_trained(self) -> bool:
        """Whether the arm was evaluated after its start."""
        return self.end > 0

    @cached_property
    def seeds(self) -> tuple[str, ...]:
        """The seed of each run of the curve, or the run's name if its seed is unknown."""
        seeds = {str(run.path): str(run.seed) for run in self.runs if run.seed is not None}
        return tuple(seeds.get(name, name) for name in self.curve.runs)


def same_seeds(arm: Arm, rival: Arm) -> bool:
    """Whether the curves of two arms have the same seeds. Runs are in the order of their seeds."""
    return arm.seeds == rival.seeds and len({*arm.seeds}) == len(arm.seeds)


# --------------------------------------------------------------------------------------------- curves


def curve_of(evals: Evals, metric: str, clock: str = "seconds", running: Collection[str] = ()) -> Curve | None:
    """Return the curve of one metric over the runs of an arm. If no run has an evaluation, return None.

    All runs are put on one clock: the nominal seconds of the run with the most evaluations. A run that was evaluated at
    other times is on straight lines between its evaluations. Nothing is extrapolated, and nothing is interpolated
    between two evaluations that are two usual pauses or more apart: the run has skipped one there.

    Args:
        evals: evaluations by run, each with ``due`` (nominal seconds), ``seconds`` (real), the metric and, if logged,
            its standard error ``<metric>_se`` or the number of ``prompts``. Of two evaluations of one run with the same
            ``due`` (a resumed run repeats one) the later line counts. ``due`` defaults to ``seconds``.
        metric: the field to read; an evaluation without a finite number there is skipped.
        clock: the field of the real times.
        running: the runs that still train.

    >>> curve_of({"0": [{"due": 0, "seconds": 0.1, "accuracy": 0.2}], "1": []}, "accuracy").scores
    array([[0.2]])
    """
    by_run: dict[str, Points] = {}  # the evaluations that have a score and a time, by nominal second
    for run, rows in evals.items():
        points: Points = {}
        for row in rows:
            score = finite(row.get(metric))
            measured = finite(row.get(clock))
            scheduled = finite(row.get("due"))
            nominal = measured if scheduled is None else scheduled
            seconds = scheduled if measured is None else measured
            if score is not None and nominal is not None and seconds is not None:
                points[nominal] = (seconds, score, standard_error(row, metric))
        if points:
            by_run[run] = points
    if not by_run:
        return None
    ended = {run for run in by_run if run not in running} or {*by_run}  # if all still train, none waits for another
    pauses = np.concatenate([np.diff(sorted(points)) for points in by_run.values()])
    pause = float(np.median(pauses)) / SAME_MOMENT if len(pauses) else 0.0  # below a full one of a shared clock
    by_run = _to_a_common_end(by_run, ended, pause)
    longest = max(by_run.values(), key=lambda points: (len(points), max(points)))
    due = np.array(sorted(longest), dtype=np.float64)  # [C]
    # [R; seconds, score and error; C]
    table = np.array([_on_clock(points, due, 2 * pause) for points in by_run.values()])
    seconds_RC, scores_RC, errors_RC = table.transpose(1, 0, 2)
    ended_R = np.array([run in ended for run in by_run])
    return Curve(tuple(by_run), due, seconds_RC, scores_RC, errors_RC, ended_R)


def _on_clock(points: Points, due: Array, gap: float = math.inf) -> Array:
    """Return seconds, score and error of one run at nominal seconds, ``[3, C]``, on straight lines between evaluations.

    NaN where it has none, and within a gap of this length or longer.
    """
    times = np.array(sorted(points))
    columns = np.array([points[time] for time in times.tolist()]).T
    after = np.searchsorted(times, due).clip(1, max(len(times) - 1, 1))  # index of the evaluation after each time
    values = np.array([on_a_line(due, times, column) for column in columns])
    if len(times) > 1:
        is_within = (times[after] - times[after - 1] >= gap) & ~np.isin(due, times)
        values[:, is_within] = math.nan
    return values


def _to_a_common_end(runs: dict[str, Points], ended: Collection[str], pause: float) -> dict[str, Points]:
    """Return the runs with one last time, where their ends differ by less than a pause between evaluations.

    It is the earliest of these ends. Without this, a mean at the end would be over the runs that happened to end late.
    Runs that end at least a pause before most others stay as they are, and are missing at the end. So do those that
    still train.
    """
    ends = {run: max(points) for run, points in runs.items() if run in ended}
    usual_end = sorted(ends.values(), reverse=True)[len(ends) // 2]  # more than half of the runs have not ended before
    common_end = min(end for end in ends.values() if usual_end - end < pause or end == usual_end)
    cut: dict[str, Points] = {}
    for run, points in runs.items():
        cut[run] = points
        if run in ends and min(points) <= common_end < ends[run]:
            seconds, score, error = _on_clock(points, np.array([common_end]))[:, 0].tolist()
            belongs_to_end = ends[run] - common_end < pause
            kept = {due: values for due, values in points.items() if due < common_end or not belongs_to_end}
            cut[run] = {**kept, common_end: (seconds, score, error)}
    return cut


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


# ----------------------------------------------------------------------------------------------- arms


def arms_from_runs(sources: Sequence[str | Path], metric: str) -> list[Arm]:
    """Return the arms of experiments, folders of an arm, and runs, in the order given.

    A run called ``seed-<k>`` belongs to the arm that its parent is named after, as in an experiment, whether the
    experiment, the arm or the run was given. A run of any other name is an arm of its own. A run that is given twice
    counts once. Raises UserError if no run is found, or if runs of an arm differ in more than the seed.
    """
    folders = _runs_by_arm(sources)
    if not folders:
        where = ", ".join(str(source) for source in sources) or "an empty list"
        hint = "expected run directories, or a directory of them, as `pods compare` writes it"
        if any(undeclared_runs(source) for source in sources):
            hint = f"{EXPERIMENT} there declares other arms or seeds than it holds. Name the folder of an arm or a run"
        raise UserError(f"No run found in {where}: {hint}.")
    arms = []
    for name, runs in folders.items():
        for index, run in enumerate(runs):
            difference = recipe_difference(runs[:index], run)
            if difference:
                where = one_line(f"{run.path.parent.name}/{run.path.name}")
                raise UserError(
                    f"The runs of {one_line(name)} are not seeds of one recipe: {difference} (the latter in {where}). "
                    "Move the seeds of each recipe to a folder of their own: ARM/seed-1, ARM/seed-2."
                )
        evals = {str(run.path): run.evals for run in runs}
        running = {str(run.path) for run in runs if run.state == "running"}
        curves = {}
        for measured in dict.fromkeys((metric, *_METRICS)):
            curve = curve_of(evals, measured, running=running)
            if curve is not None:
                curves[measured] = curve
        config = config_of(runs)
        arms.append(Arm(name, label_of(name, config), curves.get(metric, NO_EVALUATIONS), config, tuple(runs), curves))
    return arms


def _runs_by_arm(sources: Sequence[str | Path]) -> dict[str, list[Run]]:
    """Return the runs by the name of their arm, each once."""
    arms: dict[str, list[Run]] = {}
    seen: set[str] = set()
    for source in map(Path, sources):
        for folder, runs in find_runs(source).items():
            for run in runs:
                real_path = os.path.realpath(run.path)
                if real_path in seen:
                    continue
                seen.add(real_path)
                if is_run(source) or run.path.name == folder:
                    name = run.arm or folder
                else:
                    name = folder if re.fullmatch(r"seed-\d+", run.path.name) else run.path.name
                arms.setdefault(name, []).append(run)
    for runs_of_arm in arms.values():  # those without a seed stay in the order given, at the end
        runs_of_arm.sort(key=lambda run: math.inf if run.seed is None else run.seed)
    return arms


def label_of(name: str, config: Mapping[str, Any]) -> str:
    """Return the arm's name with n and m, unless the name has n already.

    >>> label_of("pods", {"num_rollouts": 64, "num_generations": 16})
    'pods (64→16)'
    >>> label_of("pods-n64-m16", {"num_rollouts": 64, "num_generations": 16})
    'pods-n64-m16'
    >>> label_of("mine", {"num_rollouts": 8, "num_generations": 8, "selection": "batch"})  # not plain GRPO
    'mine (8, batch)'
    """
    n, m = rollouts_of(config)
    label = one_line(name) or "(no name)"
    if n is None or m is None or re.search(rf"\b[a-z]?{n}\b", name):
        return label
    if config.get("selection") == "batch":
        return f"{label} ({n}, batch)"
    return f"{label} ({n})" if n == m else f"{label} ({n}→{m})"


def rollouts_of(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return n and m of a recipe; n is m if it sets no ``num_rollouts`` (plain GRPO)."""
    m = _whole(config.get("num_generations"))
    n = _whole(config.get("num_rollouts"))
    return (m if n is None else n), m


def _whole(value: object) -> int | None:
    number = finite(value)
    return None if number is None else int(number)


def damaged_files(arms: Sequence[Arm]) -> str:
    """Name each file of the runs that could not be read, or its first skipped line; empty if there is none."""
    damaged = []
    runs = [run for arm in arms for run in arm.runs]
    for run in runs:
        contents = {
            CONFIG: run.config,
            STATUS: run.status,
            ENVIRONMENT: run.environment,
            METRICS: run.metrics,
            EVALS: run.evals,
        }
        for name, content in contents.items():
            path = run.path / name
            place = f"{one_line(run.path.parent.name)}/{one_line(run.path.name)}/{name}"
            lines = run.skipped.get(name)
            if lines:
                damaged.append(f"{place} (line {lines[0]})")
            elif os.path.lexists(path) and (content == {} or not path.is_file()):
                damaged.append(f"{place} (all of it)")
    text = ", ".join(damaged[:_MOST_DAMAGED])
    if len(damaged) > _MOST_DAMAGED:
        text += f", and {len(damaged) - _MOST_DAMAGED} more files"
    return text
