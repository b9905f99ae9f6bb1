"""The files of a report: what is written, what is in the tables, and that the same input gives the same numbers."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import write_run
from rich.console import Console

from pods_rl.errors import UserError
from pods_rl.report import ReportFiles, build_report, build_report_from_csv, print_summary
from pods_rl.report.analysis import analyse
from pods_rl.report.arms import arms_from_runs
from pods_rl.report.line_plots import Line, curves_figure
from pods_rl.report.plots import Bar, Series, binned, phases_figure, steps_figure, threshold_figure, to_bytes
from pods_rl.report.run_tables import config_table
from pods_rl.report.tables import speedup_table

SPEEDUP_COLUMNS = "arm,criterion,interpolated,threshold,baseline_hours,arm_hours,speedup,ci_low,ci_high,never_reached"


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_every_file_is_written(report: ReportFiles) -> None:
    assert (report.folder.parent.name, report.folder.name) == ("quickstart", "report")
    names = sorted(path.name for path in report.folder.iterdir())
    tables = ["ablations", "config", "curves", "final", "phases", "runs", "scores", "speedup"]
    assert names == sorted([*(f"{name}.csv" for name in tables), "figures", "report.html", "report.md", "report.png"])
    figures = ["both_accuracy", "curves", "format_accuracy", "phases", "steps", "threshold"]
    assert sorted(path.stem for path in (report.folder / "figures").iterdir()) == figures == sorted(report.figures)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in [report.png, *report.figures.values()])


def test_speedup_csv(report: ReportFiles) -> None:
    assert report.speedup.read_text().splitlines()[0] == SPEEDUP_COLUMNS
    rows = read_csv(report.speedup)
    combinations = [(r["arm"], r["criterion"], r["interpolated"]) for r in rows]
    assert combinations == [(a, c, i) for a in ("grpo", "pods") for c in ("p99", "peak") for i in ("false", "true")]
    pods = rows[4]
    assert float(pods["baseline_hours"]) / float(pods["arm_hours"]) == pytest.approx(float(pods["speedup"]))
    assert float(pods["ci_low"]) <= float(pods["speedup"]) <= float(pods["ci_high"])


def test_an_arm_that_never_arrives_has_no_time(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / "grpo" / f"seed-{seed}", "grpo", seed)
        write_run(tmp_path / "bad" / f"seed-{seed}", "bad", seed, rate=0.01)
    analysis = analyse(arms_from_runs([tmp_path], "accuracy"), baseline="grpo", metric="accuracy", resamples=50)
    row = next(r for r in csv.DictReader(speedup_table(analysis).to_csv().splitlines()) if r["arm"] == "bad")
    assert (row["arm_hours"], row["speedup"], row["never_reached"]) == ("", "0", "1")


def test_same_runs_give_the_same_bytes_with_a_report_among_them(report: ReportFiles, tmp_path: Path) -> None:
    again = build_report(report.folder.parent, tmp_path, resamples=100)
    for path in (path for path in report.folder.rglob("*") if path.is_file()):
        assert path.read_bytes() == (again.folder / path.relative_to(report.folder)).read_bytes(), path.name


def test_failed_run_is_in_the_table_of_runs(report: ReportFiles) -> None:
    rows = read_csv(report.csv["runs"])
    assert len(rows) == 6
    failed = [row for row in rows if row["state"] == "failed"]
    assert [(row["arm"], row["run"], row["reason"]) for row in failed] == [("pods", "seed-2", "out of memory")]


def test_settings_that_differ_are_listed_and_no_others(report: ReportFiles) -> None:
    assert read_csv(report.csv["config"]) == [{"setting": "num_rollouts", "grpo": "16", "pods": "64"}]


def test_phases_csv(report: ReportFiles) -> None:
    grpo, pods = read_csv(report.csv["phases"])
    assert float(grpo["rollout"]) == pytest.approx(0.10)
    assert float(pods["rollout"]) == pytest.approx(0.19)
    assert float(pods["other"]) == pytest.approx(0.01)


def test_markdown_has_the_headline_and_every_table(report: ReportFiles) -> None:
    text = report.markdown.read_text()
    for title in (
        "reached 99 % of grpo (16)’s peak",
        "## Arms: accuracy",
        "## Runs",
        "## What differs",
        "## How these",
    ):
        assert title in text
    rows = [line for line in text.splitlines() if line.startswith("| pods ")]
    assert all(line.count(" | ") + 1 == text_columns(text, line) for line in rows)


def text_columns(text: str, line: str) -> int:
    """Columns of the table that a line is in: the dashes under its head."""
    before = text[: text.index(line)].splitlines()
    return next(rule for rule in reversed(before) if rule.startswith("|---")).count("|") - 1


def test_a_run_that_has_just_begun_gives_a_report(tmp_path: Path) -> None:
    path = write_run(tmp_path / "pods" / "seed-0", "pods", state="running")
    (path / "evals.jsonl").write_text("")
    (path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"st')
    report = build_report(tmp_path, resamples=50)
    assert "No evaluation of accuracy yet." in report.html.read_text()
    assert report.png.read_bytes().startswith(b"\x89PNG")
    assert read_csv(report.speedup) == []
    print_summary(report, Console(file=io.StringIO()))


def test_bare_run_directory_gives_a_report(tmp_path: Path) -> None:
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "status.json").write_text("{torn")
    report = build_report(tmp_path / "seed-0", resamples=50)
    assert read_csv(report.csv["runs"])[0]["state"] == "unknown"


def test_unknown_metric_is_refused_with_those_there_are(experiment: Path) -> None:
    with pytest.raises(UserError, match=r"No evaluation has a number called 'acc'. Choose one of accuracy, "):
        build_report(experiment, metric="acc")


@pytest.mark.usefixtures("no_rendering")
def test_folder_that_cannot_be_written_is_refused(experiment: Path) -> None:
    (experiment / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot write the report to .*Choose another folder with --output"):
        build_report(experiment, experiment / "file" / "report", resamples=50)


@pytest.mark.usefixtures("no_rendering")
def test_csv_report(tmp_path: Path) -> None:
    lines = ["arm,run,hours,answer_accuracy,rule,n,m"]
    for run in range(3):
        for hour, base, pods in ((1, 0.5, 0.7), (2, 0.6, 0.8), (3, 0.7, 0.8)):
            lines += [f"grpo,{run},{hour},{base},none,16,16", f"pods,{run},{hour},{pods},max_variance,64,16"]
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    report = build_report_from_csv(tmp_path / "runs.csv", tmp_path / "out", resamples=50)
    assert float(read_csv(report.speedup)[4]["speedup"]) == 3
    final = read_csv(report.csv["final"])[1]
    assert (final["arm"], final["n"], final["m"], final["final"]) == ("pods", "64", "16", "0.8")
    with pytest.raises(UserError, match="expected rows with"):
        build_report_from_csv(tmp_path / "runs.csv", tmp_path / "out", metric="nothing")


@pytest.mark.usefixtures("no_rendering")
def test_summary_fits_80_columns_and_escapes(tmp_path: Path) -> None:
    lines = ["arm,run,hours,answer_accuracy"]
    for arm in ("grpo", "[red]pods[/red]", "[/nothing]"):
        lines += [f"{arm},{run},{hour},0.{hour}" for run in (1, 2) for hour in (1, 2)]
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    report = build_report_from_csv(tmp_path / "runs.csv", tmp_path / "out", resamples=50)
    out = io.StringIO()
    print_summary(report, Console(file=out, width=80, force_terminal=False))
    text = out.getvalue()
    table = text[: text.index(str(report.folder))]
    assert max(map(len, table.splitlines())) <= 80
    assert "[red]" in text
    assert "[/nothing]" in text
    assert str(report.html) in text.replace("\n", "")
    assert str(report.speedup) in text.replace("\n", "")


def test_report_loads_neither_torch_nor_trl() -> None:
    code = "import sys, pods_rl.report; print([m for m in ('torch', 'trl', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -------------------------------------------------------------------------------------------- figures

AWKWARD = ["$\\frac{1}{$", "_hidden", "", "日本 🙂", "x" * 40]


@pytest.mark.parametrize("width", [8.4, 4.4])
def test_figures_take_any_name_and_missing_values(width: float) -> None:
    nan = np.nan
    seconds, scores = np.array([[0.0, 10.0], [0.0, nan]]), np.array([[0.2, 0.5], [0.3, nan]])
    lines = [
        Line(name, seconds, scores, role="baseline" if i == 0 else "arm", crossing=5.0 * i)
        for i, name in enumerate(AWKWARD)
    ]
    steps = np.array([1.0, 2.0])
    series = [Series(name, {"reward": [(steps, steps)]}) for name in AWKWARD]
    costs = np.array([[0.1, nan]] * 5)
    for figure in (
        curves_figure(lines, threshold=0.4, threshold_label="$x_", width=width),
        curves_figure([], width=width),
        threshold_figure([Bar(name, np.inf, "never") for name in AWKWARD], horizon=10.0, width=width),
        phases_figure(AWKWARD, ["rollout", "update"], costs, width=width),
        steps_figure(series, {"reward": "$reward", "none": "not logged"}, width=width),
    ):
        assert to_bytes(figure, "svg").startswith(b"<?xml")


def test_main_figure_draws_every_run_and_marks_the_crossing() -> None:
    seconds = np.array([[0.0, 60.0, 120.0]] * 4)
    scores = np.array([[0.2, 0.5, 0.7]] * 4) + np.arange(4)[:, None] / 100
    figure = curves_figure(
        [Line("grpo", seconds, scores, role="baseline", crossing=120.0), Line("pods", seconds, scores + 0.1)],
        threshold=0.69,
        threshold_label="99 % of its peak",
    )
    (axes,) = figure.axes
    thin = [line for line in axes.lines if line.get_linewidth() == 0.8]
    assert len(thin) == 8
    assert len(axes.collections) == 2  # a band for each arm
    assert [text.get_text() for text in axes.texts] == ["120 s"]
    assert axes.get_xlabel() == "training time (s)"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["grpo", "pods", "99 % of its peak"]


def test_steps_that_few_runs_reach_are_left_out() -> None:
    """Three runs of 100, 100 and 200 steps: the mean ends at 100."""
    runs = [(np.arange(1.0, n + 1), np.full(n, float(n))) for n in (100, 100, 200)]
    steps, values = binned(runs, 10)
    assert 90 < steps.max() <= 100
    np.testing.assert_allclose(values, 400 / 3)


def test_time_axis_takes_the_unit_that_fits() -> None:
    seconds, scores = np.array([[0.0, 6 * 3600.0]]), np.array([[0.2, 0.5]])
    assert curves_figure([Line("grpo", seconds, scores)]).axes[0].get_xlabel() == "training time (h)"


@pytest.mark.usefixtures("no_rendering")
def test_what_a_damaged_run_holds_is_skipped_and_said(experiment: Path) -> None:
    run = experiment / "pods" / "seed-0"
    lines = (run / "evals.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {"step": [1]})
    lines[2] = json.dumps(json.loads(lines[2]) | {"accuracy": {"a": 1}})
    lines[3] = "[1, 2]"
    (run / "evals.jsonl").write_text("\n".join(lines) + "\n")
    (run / "status.json").write_text('{"state": ["finished"], "step": [3], "seconds": "soon"}')
    (run / "config.yaml").write_text("num_rollouts: [64]\n1: {2020-01-01: 2, a: 3}\n")
    report = build_report(experiment, resamples=20)
    (note,) = (note for note in report.notes if note.startswith("Skipped"))
    assert note == (
        "Skipped unreadable data: pods/seed-0/config.yaml (num_rollouts [64], 1 time), pods/seed-0/status.json "
        "(step [3], 1 time; seconds 'soon', 1 time), pods/seed-0/evals.jsonl (1 line from 4; step [1], 1 time; "
        "accuracy {'a': 1}, 1 time)."
    )
    assert note.split("(")[0] in report.html.read_text()
    curve = report.analysis.arms[1].curve
    assert curve is not None
    assert np.isnan(curve.scores[0]).sum() == 2


@pytest.mark.parametrize("value", ["[1]", "{1: 2, a: 3}", "true", "0", "-1", ".nan", ".inf", "2020-01-01", "1e400"])
def test_any_value_in_a_stored_recipe_leaves_a_report(experiment: Path, value: str) -> None:
    for run in experiment.glob("*/seed-0"):
        keys = ("num_rollouts", "num_generations", "rule", "advantages", "gradient_accumulation_steps", "seed", "other")
        (run / "config.yaml").write_text("".join(f"{key}: {value}\n" for key in keys))
    analysis = analyse(arms_from_runs([experiment], "accuracy"), baseline="grpo", metric="accuracy", resamples=5)
    assert config_table(analysis).cells() is not None
