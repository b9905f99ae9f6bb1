"""``pods report``: figures, tables and one HTML page of runs that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import UserError
from ..text import console


def report(
    directories: Annotated[
        list[Path] | None, typer.Argument(help="An experiment, a run, or several of either.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Report on a CSV of evaluations instead.")] = None,
    output: Annotated[Path | None, typer.Option(help="Directory of the report. [default: report/ inside]")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The arm to measure against. [default: the experiment's, else grpo]")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="The column of evals.jsonl, or of the CSV.")] = None,
) -> None:
    """Write report.html, report.md, figures (PNG) and a CSV of every table: speedup.csv, final.csv and more.

    --csv takes runs of other tools: a row per run and evaluation, with the columns arm, run, hours and the metric;
    rule, n, m and advantages, where there, give the ablations.

    \b
    Examples:
      pods report runs/quickstart
      pods report runs/grpo runs/pods --baseline grpo --output report
      pods report --csv evaluations.csv --baseline grpo --metric answer_accuracy --output report
    """
    directories = directories or []
    if (csv is None) == (not directories):
        raise UserError("Name the runs to report on: `pods report DIRECTORY...`, or --csv FILE.")
    from ..report import build_report, build_report_from_csv, print_summary

    if csv is not None:
        if output is None:
            raise UserError("--csv needs --output DIRECTORY for the report.")
        files = build_report_from_csv(csv, output, baseline or "grpo", metric or "answer_accuracy")
    else:
        files = build_report(
            directories,
            output,
            baseline=baseline or _declared_baseline(directories),
            metric=metric or "accuracy",
        )
    print_summary(files, console())


def _declared_baseline(directories: list[Path]) -> str:
    from ..recipe.reading import read_yaml

    declared = directories[0] / "experiment.yaml"
    if len(directories) == 1 and declared.is_file():
        return str(read_yaml(declared)[0].get("baseline", "grpo"))
    return "grpo"
