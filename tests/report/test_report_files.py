"""The files of a report: what is written, what is in the tables, and what damaged runs and full disks do."""

import html
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import write_experiment, write_run
from rich.console import Console
from tests import read_csv
from tests.cli import pods

from pods_rl.errors import UserError
from pods_rl.recipe.schema import fields
from pods_rl.report import ReportFiles, build_report, print_summary
from pods_rl.report.charts import Line
from pods_rl.report.comparable import NO_MATTER, OWN_TO_A_RUN
from pods_rl.runs import Run


def test_every_output_has_the_same_speedup(report: ReportFiles) -> None:
    """The target is reached between two checkpoints: from checkpoint to checkpoint, the same pair had another ratio."""
    base, pods = read_csv(report.csv["final"])
    assert (base["arm"], base["threshold"]) == ("grpo", pods["threshold"])
    ratio = float(base["hours_to_p99"]) / float(pods["hours_to_p99"])
    (pair,) = read_csv(report.csv["pairs"])
    assert ratio == pytest.approx(float(pair["speedup"]))
    assert float(pair["ci_low"]) <= ratio <= float(pair["ci_high"])
    cell = f"{ratio:.2f} [{float(pair['ci_low']):.2f}, {float(pair['ci_high']):.2f}]"
    assert cell in report.account.tables["pairs"].cells[-1]


def test_pairs_csv_has_differences_and_whether_they_are_settled(report: ReportFiles) -> None:
    (row,) = read_csv(report.csv["pairs"])
    final = {arm["arm"]: float(arm["final"]) for arm in read_csv(report.csv["final"])}
    assert (row["arm"], row["other"], row["settled"]) == ("pods", "grpo", "false")
    assert float(row["difference"]) == pytest.approx(final["pods"] - final["grpo"])
    assert (row["runs"], row["other_runs"], row["low"]) == ("2", "3", "")  # two runs reach the end


def test_tables_have_failed_runs_phases_and_differing_settings(report: ReportFiles) -> None:
    runs = read_csv(report.csv["runs"])
    assert [(run["arm"], run["run"]) for run in runs] == [
        (arm, f"seed-{seed}") for arm in ("grpo", "pods") for seed in range(3)
    ]
    assert [run["reason"] for run in runs] == [""] * 5 + ["out of memory"]
    grpo, pods = read_csv(report.csv["final"])
    assert (float(grpo["rollout"]), float(pods["rollout"])) == pytest.approx((0.10, 0.19))
    assert [row["num_rollouts"] for row in read_csv(report.csv["config"])] == ["16", "64"]


def test_same_runs_give_the_same_bytes_with_a_report_among_them(report: ReportFiles, tmp_path: Path) -> None:
    again = build_report(report.folder.parent, tmp_path)
    for path in report.folder.iterdir():
        assert path.read_bytes() == (again.folder / path.name).read_bytes(), path.name


def test_page_markdown_and_terminal_say_the_same_in_the_same_order(report: ReportFiles) -> None:
    """Every finding, note and cell comes from the account; an output only marks it up."""
    account = report.account
    page = html.unescape(report.html.read_text()).replace("\u00a0", " ")
    text = (report.folder / "report.md").read_text().replace("\\", "")
    out = io.StringIO()
    print_summary(report, Console(file=out, width=80))
    terminal = " ".join(out.getvalue().split())
    for sentence in (*(finding.text for finding in account.findings), *account.notes):
        assert sentence in page
        assert sentence in text
        assert sentence in terminal
    shown = [table for table in account.tables.values() if table.cells]
    assert [table.name for table in shown] == ["result", "costs", "final", "pairs", "runs", "config"]
    places_in_text = []
    for table in shown:
        places_in_text.append(text.index(f"## {table.title}"))
        for cells in table.cells:
            assert f"| {' | '.join(cells)} |" in text
            for cell in cells:
                assert f">{cell}<" in page
    assert places_in_text == sorted(places_in_text)
    for cells in account.tables["result"].cells:
        for cell in cells:
            assert cell in terminal
    assert text.startswith(f"# PODS report: quickstart\n\n**{account.findings[0].sentence}**\n\n## Result\n")
    assert terminal.endswith(" ".join(finding.sentence for finding in account.findings))
    parts = ("scores", "result", "costs", "steps", "final", "pairs", "runs", "config", "method", "ledger")
    places = [page.index("<h1>"), *(page.index(f'id="{part}"') for part in parts)]
    assert places == sorted(places)
    assert "Missing" not in page


def test_an_experiment_declares_its_baseline_and_its_pairs(experiment: Path, tmp_path: Path) -> None:
    """`--baseline` compares every arm with another one instead."""
    write_run(experiment / "other" / "seed-0", "other")
    declared = "pairs: [{arm: grpo, shows: no selection}, {arm: pods, against: other}, {arm: pods, against: gone}, 3]"
    (experiment / "experiment.yaml").write_text(f"baseline: pods\n{declared}\n")
    for baseline, expected in (
        (None, [("grpo", "pods", "no selection"), ("pods", "other", "")]),
        ("grpo", [("other", "grpo", ""), ("pods", "grpo", "")]),
        ("none", []),
    ):
        analysis = build_report(experiment, tmp_path / "out", baseline=baseline).account.analysis
        assert [(pair.arm.name, pair.rival.name, pair.shows) for pair in analysis.pairs] == expected
        name = analysis.baseline.name if analysis.baseline else "none"
        assert name == (baseline or "pods")


def test_an_unknown_metric_is_refused_before_anything_is_written(experiment: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'acc'.*accuracy"):
        build_report(experiment, tmp_path / "out", metric="acc")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------ logged metrics


def test_every_logged_metric_is_drawn_over_steps_and_time_with_a_band(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        path = write_run(tmp_path / "pods" / f"seed-{seed}", "pods", seed, end=30)
        rows = []
        for step in range(1, 11):
            row = {"step": step, "seconds": 2.0 * step, "elapsed": 3.0 * step, "num_tokens": 100.0 * step}
            rows.append(row | {"zebra": 1, "loss": seed / step, "kl": None, "entropy": 0.5, "text": "x"})
        rows[9]["kl"] = 0.25
        (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    account = build_report(tmp_path, tmp_path / "out").account
    panels = {panel.metric: panel for panel in account.charts["steps"]}
    assert [*panels] == ["loss", "entropy", "kl", "num_tokens", "zebra"]
    assert panels["loss"].x == [("step", "step"), ("time", "training time (s)")]
    (arm,) = panels["loss"].arms
    over_steps = arm.lines["step"]
    assert over_steps.x == [*range(1, 11)]
    assert arm.lines["time"] == Line([2.0 * step for step in range(1, 11)])
    assert over_steps.mean[:2] == [2.0, 1.0]
    # Student's t of three runs, 1, 2 and 3
    assert over_steps.high[0] == pytest.approx(2 + 4.303 / 3**0.5, abs=0.01)
    assert panels["kl"].arms[0].lines["time"].x == [20.0]
    assert [key for key, _ in account.charts["scores"][0].x] == ["time", "step"]
    # the page's script reads what is missing over time from the first axis
    (drawn,) = account.points["steps"][0]["arms"]
    assert drawn["lines"]["time"].keys() == {"x"}
    assert drawn["lines"]["step"].keys() == {"x", "mean", "low", "high", "seeds"}


def test_many_steps_are_drawn_as_means_within_equal_intervals(tmp_path: Path) -> None:
    path = write_run(tmp_path / "pods" / "seed-1", "pods", 1, end=30)
    rows = [{"step": step, "seconds": step, "loss": float(step % 2)} for step in range(1, 3001)]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (panel,) = build_report(tmp_path, tmp_path / "out").account.charts["steps"]
    line = panel.arms[0].lines["step"]
    assert 100 < len(line.mean) <= 151
    assert all(mean is not None and 0.4 < mean < 0.6 for mean in line.mean[1:-1])
    assert line.x == sorted(line.x)  # type: ignore[type-var]


@pytest.mark.parametrize("runs", [2, 3])
def test_few_seeds_give_no_impossible_scores(tmp_path: Path, runs: int) -> None:
    for arm in ("grpo", "pods"):
        for seed in range(runs):
            path = write_run(tmp_path / arm / f"seed-{seed}", arm, seed)
            rows = [{"due": k, "seconds": k, "accuracy": [0.02, 0.5, 0.9][k] + 0.05 * seed} for k in range(3)]
            (path / "evals.jsonl").write_text("\n".join(map(json.dumps, rows)))
    account = build_report(tmp_path, tmp_path / "out").account
    panel = account.points["scores"][0]
    assert (panel["y"], panel["bounds"]) == ("accuracy (%)", (0.0, 100.0))
    for arm in panel["arms"]:
        line = arm["lines"]["time"]
        assert len(line["seeds"]) == runs
        edges = [*line["low"], *line["high"]]
        if runs == 2:
            assert edges == [None] * len(edges)
        else:
            assert (min(edges), max(edges)) == (0, 100)


# ------------------------------------------------------------------------------- damaged run directories

FILES = ("config.yaml", "environment.json", "status.json", "metrics.jsonl", "evals.jsonl")
HAZARDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "loop of links": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("hazard", HAZARDS)
@pytest.mark.timeout(120)
def test_any_file_of_a_run_may_be_anything(experiment: Path, hazard: str) -> None:
    """Each file in its own run, and the plan of the experiment; the report opens, and names what it skipped."""
    HAZARDS[hazard](experiment / "experiment.yaml")
    for name, run in zip(FILES, sorted(experiment.glob("*/seed-*")), strict=False):
        (run / name).unlink()
        HAZARDS[hazard](run / name)
    report = build_report(experiment)
    assert report.html.read_text().rstrip().endswith("</html>")
    print_summary(report, Console(file=io.StringIO()))
    (note,) = (note for note in report.account.notes if note.startswith("Skipped unreadable data"))
    assert "config.yaml" in note
    assert "evals.jsonl" in note


def test_what_is_skipped_within_a_file_is_named(experiment: Path) -> None:
    run = experiment / "pods" / "seed-0"
    lines = (run / "evals.jsonl").read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {"accuracy": {"a": 1}})
    lines[3] = "[1, 2]"
    (run / "evals.jsonl").write_text("\n".join(lines) + "\n")
    (run / "status.json").write_text("[]")
    (note,) = (note for note in build_report(experiment).account.notes if note.startswith("Skipped"))
    assert "pods/seed-0/status.json (all of it), pods/seed-0/evals.jsonl (line 4)" in note


def test_the_report_of_an_experiment_takes_the_declared_runs_and_names_the_others(tmp_path: Path) -> None:
    """An arm was renamed and two seeds were dropped; the runs of earlier calls are still there."""
    root = write_experiment(tmp_path / "mine")
    write_run(root / "plain" / "seed-0", "plain")
    (root / "experiment.yaml").write_text("baseline: plain\narms: {plain: {}, pods: {}}\nseeds: [0]\n")
    account = build_report(root).account
    assert [(arm.name, arm.run_count) for arm in account.analysis.arms] == [("plain", 1), ("pods", 1)]
    ignored = "grpo/seed-0, grpo/seed-1, grpo/seed-2, pods/seed-1, pods/seed-2"
    assert ignored in account.notes[0]
    # what is named is not ignored
    both = build_report([root, root / "grpo"], tmp_path / "out").account
    assert any(": pods/seed-1, pods/seed-2." in note for note in both.notes)
    assert {arm.name: arm.run_count for arm in both.analysis.arms} == {"plain": 1, "pods": 1, "grpo": 3}
    # what is declared and missing is named too
    (root / "experiment.yaml").write_text("arms: {plain: {}, pods: {}, more: {}}\nseeds: [0, 7]\n")
    notes = build_report(root).account.notes
    assert (
        "4 runs that experiment.yaml declares are missing: plain/seed-7, pods/seed-7, more/seed-0, more/seed-7."
        in notes
    )
    (root / "experiment.yaml").write_text("arms: {other: {}}\nseeds: [0]\n")
    with pytest.raises(UserError, match=r"experiment\.yaml"):
        build_report(root)


FORMULAS = ["=1+1", "+cmd", "-2+3", "@SUM(A1)", " =1", "'=1", "''@x", "\uff1d1"]
HARMLESS = ["-5", "+2.5e3", "a=b", "'t is", "grpo"]


def test_no_text_in_a_csv_is_a_formula(tmp_path: Path) -> None:
    for name in [*FORMULAS, *HARMLESS]:
        write_run(tmp_path / "runs" / name / "seed-1", name, 1, config={"rule": name}, end=30)
    report = build_report(tmp_path / "runs", tmp_path / "out", baseline="none")
    written = {row["arm"] for row in read_csv(report.csv["final"])}
    assert written == {*HARMLESS, *(f"'{name}" for name in FORMULAS)}
    assert {row["rule"] for row in read_csv(report.csv["final"])} == written


def test_numbers_of_a_csv_stay_numbers(tmp_path: Path) -> None:
    settings = {"pods": {"a": -1.5, "b": "=x", "c": [1], "d": -3}, "grpo": {}}
    for arm, config in settings.items():
        path = write_run(tmp_path / arm / "seed-1", arm, 1, config=config)
        (path / "evals.jsonl").write_text('{"due": 0, "seconds": 0, "accuracy": -0.25}\n')
    report = build_report(tmp_path)
    assert [float(row["final"]) for row in read_csv(report.csv["final"])] == [-0.25, -0.25]
    _, config = read_csv(report.csv["config"])
    assert [config[key] for key in "abcd"] == ["-1.5", "'=x", "[1]", "-3"]


# ---------------------------------------------------------------------- what a run of the real command writes

NOT_OF_A_RECIPE = {"output_dir", "logging_dir", "resume"}


def test_keys_that_do_not_tell_recipes_apart_exist() -> None:
    assert set(fields()) >= (OWN_TO_A_RUN | NO_MATTER) - NOT_OF_A_RECIPE


def test_the_tables_have_what_a_real_run_is(tmp_path: Path) -> None:
    """The real command trains for two steps."""
    keys = {"max_steps": 2, "eval_prompts": 8, "ledger_every": 1, "num_rollouts": 16, "num_generations": 8}
    keys |= {"per_device_train_batch_size": 8, "max_completion_length": 24, "eval_repeats": 2, "seed": 1}
    words = [word for key, value in keys.items() for word in (f"--{key}", value)]
    done = pods("train", "tiny-pods", "--output", tmp_path / "runs" / "pods" / "seed-1", *words)
    assert done.exit_code == 0, done.output
    report = build_report(tmp_path / "runs", tmp_path / "out")
    run = Run(tmp_path / "runs" / "pods" / "seed-1")
    (row,) = read_csv(report.csv["runs"])
    assert row["dtype"] == run.environment["precision"] == "float32"
    assert (row["device"], row["processor"]) == ("cpu", run.environment["processor"])
    assert all(row[key] for key in ("arm", "run", "seed", "state", "steps", "seconds", "evaluations", "last_score"))
    (final,) = read_csv(report.csv["final"])
    empty = {key for key, value in final.items() if not value}
    # of one run without a baseline
    assert empty == {"unfinished", "final_low", "final_high", "threshold", "hours_to_p99"}
    assert final["task"] == "arithmetic"
    assert report.account.ledger.rollouts == 32  # two steps
