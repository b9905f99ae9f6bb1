"""Curves and comparisons from run directories and CSV files, whole and damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from conftest import write_run

from pods_rl.errors import UserError
from pods_rl.report.analysis import Analysis, analyse, cost_of
from pods_rl.report.arms import arms_from_runs, rollouts_of
from pods_rl.report.curves import curve_of
from pods_rl.report.evaluations_csv import arms_from_csv, curves_from_csv
from pods_rl.report.tables import speedup_table
from pods_rl.report.wording import headlines, notes


def analysis_of(root: Path, baseline: str | None = "grpo", **settings: object) -> Analysis:
    arms = arms_from_runs([root], "accuracy")
    return analyse(arms, baseline=baseline, metric="accuracy", resamples=200, **settings)  # type: ignore[arg-type]


def test_checkpoints_align_by_nominal_second_and_keep_real_ones() -> None:
    evals = {
        "a": [{"due": 0, "seconds": 0.0, "accuracy": 0.1}, {"due": 10, "seconds": 10.4, "accuracy": 0.3}],
        "b": [{"due": 0, "seconds": 0.0, "accuracy": 0.2}, {"due": 10, "seconds": 11.6, "accuracy": 0.5}],
    }
    curve = curve_of(evals, "accuracy")
    assert curve is not None
    np.testing.assert_allclose(curve.due, [0, 10])
    np.testing.assert_allclose(curve.times, [0, 11])
    np.testing.assert_allclose(curve.mean, [0.15, 0.4])


def test_a_repeated_evaluation_counts_once_and_nonsense_never() -> None:
    rows = [
        {"due": 5, "seconds": 5.5, "accuracy": 0.2},
        {"due": 5, "seconds": 5.6, "accuracy": 0.4},
        {"due": 10, "seconds": 10.0, "accuracy": None},
        {"due": 15, "seconds": 15.0, "accuracy": "high"},
        {"accuracy": 0.9},
    ]
    curve = curve_of({"a": rows}, "accuracy")
    assert curve is not None
    np.testing.assert_allclose(curve.scores, [[0.4]])
    assert curve_of({"a": [], "b": [{"loss": 1}]}, "accuracy") is None


def test_failed_run_stays_and_is_said(experiment: Path) -> None:
    analysis = analysis_of(experiment)
    assert [arm.name for arm in analysis.arms] == ["grpo", "pods"]
    assert analysis.finals["pods"].final_runs == 2
    text = " ".join(notes(analysis))
    assert "1 of 6 runs did not finish (1 failed" in text
    assert "mean of the 2 of 3 runs that got so far" in text


def test_run_without_evaluation_is_said(experiment: Path) -> None:
    (experiment / "pods" / "seed-0" / "evals.jsonl").unlink()
    analysis = analysis_of(experiment)
    assert analysis.arms[1].run_count == 3
    assert any("1 of 3 runs have no evaluation of accuracy" in note for note in notes(analysis))


def test_one_seed_says_that_there_is_no_interval(tmp_path: Path) -> None:
    for arm in ("grpo", "pods"):
        write_run(tmp_path / arm / "seed-0", arm)
    analysis = analysis_of(tmp_path)
    assert math.isnan(analysis.finals["pods"].low)
    assert "[" not in headlines(analysis)[0]
    assert "No interval can be given for arms with one run: grpo (16), pods (64→16)." in notes(analysis)


def test_headline_of_a_faster_arm(tmp_path: Path) -> None:
    for arm in ("grpo", "pods"):
        for seed in range(5):
            write_run(tmp_path / arm / f"seed-{seed}", arm, seed)
    analysis = analysis_of(tmp_path)
    result = analysis.speedup_of("pods")
    assert result is not None
    assert result.speedup > 1.5
    (headline,) = headlines(analysis)
    assert headline.startswith("pods (64→16) reached 99 % of grpo (16)’s peak accuracy")
    assert f"{result.speedup:.2f}x sooner [{result.ci_low:.2f}, {result.ci_high:.2f}]" in headline
    assert "s, 5 runs." in headline
    assert "ot settled" not in headline


def test_an_interval_that_includes_1_settles_nothing(experiment: Path) -> None:
    """A run of three died: in 3.5 % of the resamples most runs are copies of it."""
    analysis = analysis_of(experiment)
    result = analysis.speedup_of("pods")
    assert result is not None
    assert (result.ci_low, result.settled) == (0, False)
    (headline,) = headlines(analysis)
    assert headline.startswith("Not settled: pods (64→16) reached 99 % of grpo (16)’s peak accuracy after ")
    assert "3 runs. The interval includes 1. Resamples that never reach it count as 0 (3.5 %; the others give [2.0" in (
        headline
    )
    assert "sooner" not in headline


@pytest.mark.parametrize(
    ("rate", "words"),
    [(0.05, "never reached 99 % of"), (0.4, "never reached"), (0.6, "The interval includes 1.")],
)
def test_headline_of_an_arm_that_is_no_faster(tmp_path: Path, rate: float, words: str) -> None:
    for seed in range(3):
        write_run(tmp_path / "grpo" / f"seed-{seed}", "grpo", seed)
        write_run(tmp_path / "other" / f"seed-{seed}", "other", seed + 10, rate=rate)
    assert words in headlines(analysis_of(tmp_path))[0]


def test_a_later_arm_is_later(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / "grpo" / f"seed-{seed}", "grpo", seed)
        write_run(tmp_path / "slow" / f"seed-{seed}", "slow", seed, rate=0.45, budget=300)
    assert "x later (speedup 0." in headlines(analysis_of(tmp_path))[0]


def test_a_baseline_that_never_improves_is_said(tmp_path: Path) -> None:
    for arm, rate in (("grpo", -0.1), ("pods", 1.0)):
        for seed in range(2):
            write_run(tmp_path / arm / f"seed-{seed}", arm, seed, rate=rate, noise=0)
    analysis = analysis_of(tmp_path)
    assert any("peaks at its first evaluation" in note for note in notes(analysis))
    assert headlines(analysis)[0].startswith("Not settled: ")
    assert "(speedup 1.00 [1.00, 1.00])" in headlines(analysis)[0]


def test_an_arm_that_was_evaluated_at_its_start_only_makes_no_headline(tmp_path: Path) -> None:
    for arm in ("grpo", "pods", "broken"):
        path = write_run(tmp_path / arm / "seed-1", arm, 1)
        if arm == "broken":
            first = (path / "evals.jsonl").read_text().splitlines()[0]
            (path / "evals.jsonl").write_text(first + "\n")
    analysis = analysis_of(tmp_path)
    assert not any("broken" in line for line in headlines(analysis))
    assert any(note.startswith("broken") and "no evaluation after its start" in note for note in notes(analysis))


def test_a_baseline_that_peaks_at_time_zero_leaves_a_sentence(tmp_path: Path) -> None:
    """The ratio of its 0 seconds to any time is 0, which is not the 0 of an arm that never gets there."""
    for arm, scores in (("grpo", (0.5, 0.4, 0.4)), ("pods", (0.4, 0.5, 0.6))):
        for seed in (1, 2):
            path = write_run(tmp_path / arm / f"seed-{seed}", arm, seed)
            rows = [{"due": 10 * k, "seconds": 10.0 * k, "accuracy": score} for k, score in enumerate(scores)]
            (path / "evals.jsonl").write_text("\n".join(map(json.dumps, rows)))
    analysis = analysis_of(tmp_path)
    assert "accuracy after 10.0 s, grpo (16) at its first evaluation" in headlines(analysis)[0]
    assert speedup_table(analysis).cells()[0][2] == "0.00"
    assert any("peaks at its first evaluation" in note for note in notes(analysis))


def test_all_arms_are_in_the_headlines_the_losers_too(tmp_path: Path) -> None:
    rates = {"grpo": 0.6, "worst": 0.01, "slow": 0.05, "a": 1.0, "b": 1.2, "c": 1.4, "d": 1.8, "e": 3.0}
    for arm, rate in rates.items():
        for seed in (1, 2):
            write_run(tmp_path / arm / f"seed-{seed}", arm, seed, rate=rate, noise=0)
    lines = headlines(analysis_of(tmp_path))
    assert len(lines) == 6
    assert lines[0].startswith("e (64→16) reached")
    assert lines[4].startswith("Also reached it: a (64→16) (")
    assert lines[5].startswith("2 arms never reached 99 % of grpo (16)’s peak accuracy (0.")
    assert "final scores: slow (64→16) (0.3" in lines[5]
    assert all(any(arm in line for line in lines) for arm in rates)


def test_no_arm_that_reaches_the_level_is_the_headline(tmp_path: Path) -> None:
    for arm, rate in (("grpo", 0.9), ("slow", 0.05), ("slower", 0.01)):
        write_run(tmp_path / arm / "seed-1", arm, 1, rate=rate, noise=0)
    (line,) = headlines(analysis_of(tmp_path))
    assert line.startswith("None of the 2 arms reached 99 % of grpo (16)’s peak accuracy")


def test_few_runs_are_said_to_be_few(experiment: Path) -> None:
    assert "Intervals over fewer than 5 runs are narrower than they should be: all arms." in notes(
        analysis_of(experiment)
    )


def test_runs_on_different_devices_are_said(experiment: Path) -> None:
    (experiment / "grpo" / "seed-0" / "environment.json").write_text('{"device": "cuda:0"}')
    assert any("different devices (1 on cuda:0, 5 on cpu)" in note for note in notes(analysis_of(experiment)))


def test_final_scores_are_compared_where_the_baseline_ends(tmp_path: Path) -> None:
    write_run(tmp_path / "grpo" / "seed-0", "grpo", end=60)
    write_run(tmp_path / "pods" / "seed-0", "pods", end=150)
    write_run(tmp_path / "short" / "seed-0", "short", end=30)
    analysis = analysis_of(tmp_path)
    assert analysis.horizon == 60
    assert analysis.finals["pods"].final_seconds == pytest.approx(60, abs=1)
    assert any(note.startswith("short (64→16): it ends at 30") for note in notes(analysis))


def test_unknown_baseline_is_refused_with_the_names(experiment: Path) -> None:
    with pytest.raises(UserError, match=r"No arm is called 'grop': the arms are grpo, pods. Did you mean 'grpo'"):
        analysis_of(experiment, baseline="grop")


@pytest.mark.parametrize("baseline", [None, "none"])
def test_no_baseline_gives_no_speedup(experiment: Path, baseline: str | None) -> None:
    analysis = analysis_of(experiment, baseline=baseline)
    assert not analysis.speedups
    assert headlines(analysis)[0].startswith("pods (64→16) went from 0.")


def test_lone_run_directory_is_named_after_its_arm(experiment: Path) -> None:
    (arm,) = arms_from_runs([experiment / "pods" / "seed-1"], "accuracy")
    assert (arm.name, arm.run_count) == ("pods", 1)
    assert analyse([arm], baseline="grpo", metric="accuracy").baseline is None


def test_several_run_directories_join_their_arms(experiment: Path) -> None:
    paths = [experiment / arm / f"seed-{seed}" for seed in (0, 1) for arm in ("grpo", "pods")]
    assert {arm.name: arm.run_count for arm in arms_from_runs(paths, "accuracy")} == {"grpo": 2, "pods": 2}


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No run found in"):
        arms_from_runs([tmp_path], "accuracy")


def test_cost_is_seconds_a_step_by_phase(experiment: Path) -> None:
    cost = cost_of(arms_from_runs([experiment], "accuracy")[1].runs)
    assert cost.phases["rollout"] == pytest.approx(0.19)
    assert cost.seconds_per_step == pytest.approx(0.3062)
    assert cost.other == pytest.approx(0.01, abs=1e-6)


def test_cost_of_runs_without_metrics_is_unknown(experiment: Path) -> None:
    for path in experiment.glob("*/*/metrics.jsonl"):
        path.write_text('{"step": 0}\n{"step"')
    assert math.isnan(cost_of(arms_from_runs([experiment], "accuracy")[0].runs).seconds_per_step)


# ------------------------------------------------------------------------------------------------ CSV

HEAD = "arm,run,hours,answer_accuracy\n"


def test_csv_gives_curves_by_arm(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(HEAD + "grpo,1,0.5,0.4\ngrpo,2,0.5,0.6\npods,1,0.5,0.7\npods,1,1.0,\npods,1,1.5,NaN\n")
    curves = curves_from_csv(path)
    np.testing.assert_allclose(curves["grpo"].mean, [0.5])
    np.testing.assert_allclose(curves["pods"].seconds, [[1800.0]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arm,run,hours\ngrpo,1,0.5\n", "expected rows with arm, run, hours, answer_accuracy"),
        ("", "has no columns: expected rows with"),
        (HEAD + "grpo,1,soon,0.4\n", "line 2: hours is 'soon'"),
        (HEAD + "grpo,1\n", "line 2: hours is None"),
        (HEAD + "grpo,1,1,0.4\ngrpo,1,2,0.5x\n", "line 3: answer_accuracy is '0.5x', expected a number, or nothing"),
        (HEAD + "grpo,1,1,inf\n", "line 2: answer_accuracy is 'inf'"),
        (HEAD + "grpo,1,1,0.4\ngrpo,1,1.0,0.5\n", "line 3: run 1 of arm grpo has a second row at 1.0 h"),
    ],
)
def test_bad_csv_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        arms_from_csv(path)


def test_missing_and_binary_csv_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Cannot read"):
        arms_from_csv(tmp_path / "none.csv")
    (tmp_path / "image.csv").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    with pytest.raises(UserError, match="Cannot read"):
        arms_from_csv(tmp_path / "image.csv")


def test_an_arm_whose_runs_were_planned_says_what_and_when(tmp_path: Path) -> None:
    one = {"label": "64 -> 16", "again": [{"step": 50, "label": "64 -> 16"}, {"step": 100, "label": "16 -> 16"}]}
    for seed, n, plan in ((1, 64, one), (2, 16, {"label": "16 -> 16"}), (3, 16, {"label": "16 -> 16"})):
        config = {"seed": seed, "num_rollouts": n, "num_generations": 16}
        run = write_run(tmp_path / "mine" / f"seed-{seed}", seed=seed, config=config)
        (run / "plan.json").write_text(json.dumps(plan))
    (arm,) = arms_from_runs([tmp_path], "accuracy")
    assert (arm.label, rollouts_of(arm.config)) == ("mine (planned)", (None, 16))
    text = " ".join(notes(analysis_of(tmp_path, None)))
    assert "planned 64 -> 16, after step 100 16 -> 16 (seed-1); 16 -> 16 (seed-2, seed-3)." in text
    assert "unreadable" not in text
