"""A report from run directories: an HTML page, Markdown and CSV files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..runs import Run, find_runs, not_begun, undeclared_runs, write_atomic
from ..runs.files import EXPERIMENT, read_mapping
from ..text import counted
from .analysis import analyse
from .arms import Arm, arms_from_runs
from .charts import charts, styles_of
from .ledger import ledger_of
from .notes import method, notes
from .outputs import PAGE, Account, ReportFiles, to_html, to_markdown
from .tables import CSV_NAMES, tables
from .text import finite, listed, one_line
from .wording import findings

MARKDOWN = "report.md"
FILES = (PAGE, MARKDOWN, *(f"{name}.csv" for name in CSV_NAMES))
"""The files that a report writes into its folder."""


def build_report(
    sources: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    *,
    baseline: str | None = None,
    metric: str | None = None,
) -> ReportFiles:
    """Read runs and write ``report.html``, ``report.md`` and a CSV of every table.

    Args:
        sources: an experiment directory, a run directory, or several of either.
        output: folder to write to; by default ``report`` inside the one directory, or next to several.
        baseline: the arm that all others are compared with, instead of the pairs that the experiment declares. None:
            these pairs, and the baseline of the first experiment's file, else the first arm, which a note says. If it
            is ``none``, arms are not compared.
        metric: the field of ``evals.jsonl`` to compare by. None: ``accuracy``, and ``reward`` of runs whose task
            grades no answer.

    Raises:
        UserError: if no run is found, if runs of an arm differ in more than the seed, if runs were evaluated but
            never on ``metric``, and if none of several arms is called ``baseline``.
        OSError: if the folder cannot be written.
    """
    if isinstance(sources, (str, Path)):
        sources = [sources]
    paths = [Path(source) for source in sources]
    account = read_account(paths, baseline=baseline, metric=metric)
    if output is not None:
        folder = Path(output)
    elif len(paths) == 1:
        folder = paths[0] / "report"
    else:  # next to them
        parents = [os.path.dirname(os.path.realpath(path)) for path in paths]
        folder = Path(os.path.commonpath(parents), "report")
    report = ReportFiles(account, folder)
    # Every content is made before the first file is written, so that an error leaves an old report as it is.
    contents = {PAGE: to_html(account), MARKDOWN: to_markdown(account)}
    for name, path in report.csv.items():
        contents[path.name] = account.tables[name].to_csv()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_atomic(folder / name, content)
    return report


def _usual_baseline(settings: Mapping[str, Any], arms: Sequence[Arm]) -> tuple[str, str]:
    """Return the baseline of a report that names none, and a note that says so; the note may be empty."""
    names = [arm.name for arm in arms]
    declared = settings.get("baseline")
    if declared in names or (len(names) == 1 and declared is None):
        return names[0] if declared is None else str(declared), ""
    if declared is not None:
        return "none", f"No run of {one_line(declared)}, the baseline, has begun."
    return names[0], f"The baseline is {arms[0].label}, the first arm. Choose another with --baseline."


def _declared_pairs(settings: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the pairs that the file of an experiment declares; skip other entries."""
    entries = settings.get("pairs")
    pairs = []
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, Mapping):
            against = entry.get("against", settings.get("baseline"))
            pairs.append((str(entry.get("arm")), str(against), one_line(entry.get("shows") or "")))
    return pairs


def _notes_on_declared(paths: Sequence[Path], arms: Sequence[Arm]) -> list[str]:
    """Return notes on runs that an experiment declares and does not have, and on runs that it does not declare."""
    reported = {os.path.realpath(run.path) for arm in arms for run in arm.runs}
    lines = []
    for path in paths:
        missing = not_begun(path)
        if missing:
            lines.append(
                f"{counted(len(missing), 'run')} that {EXPERIMENT} declares {'is' if len(missing) == 1 else 'are'} "
                f"missing: {listed(missing)}."
            )
        ignored = []
        for folder, runs in undeclared_runs(path).items():
            left_out = [run for run in runs if os.path.realpath(run.path) not in reported]
            is_folder_itself = [run.path.name for run in left_out] == [folder]
            for run in left_out:
                ignored.append(folder if is_folder_itself else f"{folder}/{run.path.name}")
        if ignored:
            lines.append(
                f"Ignored {counted(len(ignored), 'run')} that {EXPERIMENT} does not declare: {listed(ignored)}."
            )
    return lines


def read_account(
    paths: Sequence[Path],
    *,
    baseline: str | None = None,
    metric: str | None = None,
) -> Account:
    """Return what a report says of runs, without writing it; arguments as of ``build_report``."""
    # The real path, since `.` is not a title.
    title = os.path.basename(os.path.realpath(paths[0])) if len(paths) == 1 else f"{len(paths)} directories"
    if not metric:  # evaluations have rewards instead of an accuracy if no grader was used
        measured = _measured(run for path in paths for runs in find_runs(path).values() for run in runs)
        metric = "reward" if "reward" in measured and "accuracy" not in measured else "accuracy"
    found = arms_from_runs(paths, metric)
    if not any(arm.curve.runs for arm in found):
        fields = sorted(_measured(run for arm in found for run in arm.runs))
        if fields:  # otherwise no run has been evaluated yet
            names = ", ".join(map(one_line, fields))
            raise UserError(f"No evaluation has a number called {metric!r}. Choose another with --metric: {names}.")
    first_notes = _notes_on_declared(paths, found)
    pairs: list[tuple[str, str, str]] = []
    if baseline is None:  # else the baseline replaces what the experiment declares
        settings = read_mapping(paths[0] / EXPERIMENT)
        baseline, note = _usual_baseline(settings, found)
        if note:
            first_notes.append(note)
        pairs = _declared_pairs(settings)
    analysis = analyse(found, baseline=baseline, metric=metric, pairs=pairs)
    styles = styles_of(analysis)
    colours = {arm.label: styles[arm.name].colour for arm in analysis.arms}
    ledger = ledger_of(analysis.arms, colours)
    return Account(
        title=title,
        findings=findings(analysis),
        notes=(*first_notes, *notes(analysis, ledger)),
        method=method(analysis),
        tables=tables(analysis),
        charts=charts(analysis, styles),
        styles=styles,
        ledger=ledger,
        analysis=analysis,
    )


def _measured(runs: Iterable[Run]) -> set[str]:
    """Return the fields of all evaluations that hold a number."""
    return {key for run in runs for row in run.evals for key, value in row.items() if finite(value) is not None}
