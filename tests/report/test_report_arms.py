"""Curves and comparisons from run directories, and what a report may claim of them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import write_run

from pods_rl.errors import UserError
from pods_rl.report.analysis import Analysis, Final, analyse
from pods_rl.report.arms import arms_from_runs, curve_of
from pods_rl.report.ledger import Ledger
from pods_rl.report.notes import notes as notes_of
from pods_rl.report.tables import result_table
from pods_rl.report.wording import findings

CLOCK = [6.0 * k for k in range(11)]


def analysis_of(root: Path, baseline: str | None = "grpo", pairs: Sequence[tuple[str, str, str]] = ()) -> Analysis:
    return analyse(arms_from_runs([root], "accuracy"), baseline=baseline, metric="accuracy", pairs=pairs)


def written(root, arms, pause=10.0, metric="accuracy"):
    """Arms whose runs have these scores, one after each pause."""
    for arm, runs in arms.items():
        for seed, scores in enumerate(runs):
            path = write_run(root / arm / f"seed-{seed}", arm, seed)
            rows = [{"due": pause * k, "seconds": pause * k, metric: score} for k, score in enumerate(scores)]
            (path / "evals.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def notes(analysis: Analysis) -> tuple[str, ...]:
    return notes_of(analysis, Ledger())


def verdicts(analysis: Analysis) -> dict[str, str]:
    """The last cell of each row of the table that opens a report."""
    table = result_table(analysis)
    assert table.titles[-1] == "verdict"
    return dict(zip(table.arms, table.columns["verdict"], strict=True))


def final_of(analysis: Analysis, arm: str) -> Final:
    return analysis.result_of(arm).final


# ---------------------------------------------------------------------------------------------- curves


def test_checkpoints_align_by_nominal_second_and_keep_real_ones() -> None:
    evals = {
        "a": [{"due": 0, "seconds": 0.0, "accuracy": 0.1}, {"due": 10, "seconds": 10.4, "accuracy": 0.3}],
        "b": [{"due": 0, "seconds": 0.0, "accuracy": 0.2}, {"due": 10, "seconds": 11.6, "accuracy": 0.5}],
    }
    curve = curve_of(evals, "accuracy")
    np.testing.assert_allclose(curve.due, [0, 10])
    np.testing.assert_allclose(curve.times, [0, 11])
    np.testing.assert_allclose(curve.mean, [0.15, 0.4])


def test_a_repeated_evaluation_counts_once_and_nonsense_never() -> None:
    rows: list[dict[str, Any]] = [
        {"due": 5, "seconds": 5.5, "accuracy": 0.2},
        {"due": 5, "seconds": 5.6, "accuracy": 0.4},
        {"due": 10, "seconds": 10.0, "accuracy": None},
        {"due": 15, "seconds": 15.0, "accuracy": "high"},
        {"due": 20, "seconds": 20.0, "accuracy": 1e300},
        {"due": 1e308, "seconds": 25.0, "accuracy": 0.5},
        {"accuracy": 0.9},
    ]
    curve = curve_of({"a": rows}, "accuracy")
    np.testing.assert_allclose(curve.scores, [[0.4, 0.5]])
    assert curve_of({"a": [], "b": [{"loss": 1}]}, "accuracy") is None


def test_a_skipped_evaluation_is_missing_and_is_not_interpolated() -> None:
    """A step that is longer than the pause skips an evaluation. One at another time lies on a straight line."""
    full = [{"due": t, "seconds": t + 0.3, "accuracy": 0.01 * t} for t in CLOCK]
    others = {"skips": [*full[:4], *full[5:]], "late": [row | {"due": row["due"] + 1.0} for row in full]}
    curve = curve_of({"full": full, **others}, "accuracy")
    np.testing.assert_allclose(curve.due, CLOCK)
    np.testing.assert_allclose(curve.scores[0], [0.01 * t for t in CLOCK])
    assert np.flatnonzero(np.isnan(curve.scores[1])).tolist() == [4]
    np.testing.assert_allclose(curve.scores[2, 1:], curve.scores[0, 1:] - 0.01)


def test_runs_on_clocks_of_their_own_are_interpolated_and_nothing_is_extrapolated() -> None:
    evals = {"a": [(1.0, 0.1), (3.0, 0.3), (5.0, 0.5)], "b": [(2.0, 0.4), (4.0, 0.6), (6.0, 0.8)]}
    curve = curve_of({run: [{"seconds": t, "accuracy": s} for t, s in rows] for run, rows in evals.items()}, "accuracy")
    known = ~np.isnan(curve.mean)
    assert curve.due[known].min() >= 2
    assert curve.end == 5
    np.testing.assert_allclose(curve.mean[known], 0.1 * curve.due[known] + 0.1)


def test_seeds_that_train_do_not_erase_those_that_ended() -> None:
    def rows(scores: tuple[float, ...]) -> list[dict[str, float]]:
        return [{"due": 10.0 * k, "seconds": 10.0 * k, "accuracy": score} for k, score in enumerate(scores)]

    evals = {"a": rows((0.2, 0.4, 0.6)), "b": rows((0.4,))}
    both = curve_of(evals, "accuracy", running={"b"})
    np.testing.assert_allclose(both.mean, [0.3, 0.4, 0.6])
    assert both.end == 20.0
    # a run that failed is missing, and among runs that all train most must have a score
    for running in ((), ("a", "b")):
        assert curve_of(evals, "accuracy", running=running).end == 0.0


def test_two_arms_with_ends_of_their_own_are_compared_with_all_runs_at_the_earliest(tmp_path: Path) -> None:
    """Evaluated every 15 s and at the end; the scores of a run lie on a line. The table has the same time."""
    ends = {"grpo": [100.0, 100.1, 100.5, 100.3, 100.2], "pods": [99.9, 101.0, 100.4, 100.6, 100.2]}
    for arm, of_arm in ends.items():
        for run, end in enumerate(of_arm):
            path = write_run(tmp_path / arm / f"seed-{run}", arm, run)
            times = [0.0, 15.0, 30.0, 45.0, 60.0, 75.0, end]
            rows = [{"due": t, "seconds": t, "accuracy": 0.01 * run + 0.001 * t} for t in times]
            (path / "evals.jsonl").write_text("\n".join(map(json.dumps, rows)))
    analysis = analysis_of(tmp_path)
    (pair,) = analysis.pairs
    assert pair.due == pytest.approx(99.9)
    assert (pair.runs, pair.rival_runs) == (5, 5)
    assert pair.difference.mean == pytest.approx(0.0, abs=1e-9)
    assert [final_of(analysis, arm).final_runs for arm in ends] == [5, 5]
    assert not any("ended" in note for note in notes(analysis))


# ------------------------------------------------------------------------------------------------ arms


def test_final_scores_are_compared_where_the_baseline_ends(tmp_path: Path) -> None:
    for arm, end in (("grpo", 60), ("pods", 150), ("short", 30)):
        write_run(tmp_path / arm / "seed-0", arm, end=end)
    analysis = analysis_of(tmp_path, pairs=[("pods", "grpo", ""), ("pods", "short", "")])
    assert final_of(analysis, "pods").final_seconds == pytest.approx(60, abs=1)
    assert [pair.due for pair in analysis.pairs] == [60, 30]
    assert any("short" in note and " 30.0 s" in note for note in notes(analysis))


def test_an_unknown_baseline_is_refused_with_the_names(experiment: Path) -> None:
    with pytest.raises(UserError, match=r"'grop'.*grpo, pods.* grpo\?"):
        analysis_of(experiment, baseline="grop")


def test_run_directories_join_the_arms_they_are_named_after(experiment: Path) -> None:
    paths = [experiment / arm / f"seed-{seed}" for seed in (0, 1) for arm in ("grpo", "pods")]
    assert {arm.name: arm.run_count for arm in arms_from_runs(paths, "accuracy")} == {"grpo": 2, "pods": 2}
    folders = [experiment / "pods", experiment / "grpo"]
    assert {arm.name: arm.run_count for arm in arms_from_runs(folders, "accuracy")} == {"pods": 3, "grpo": 3}
    (arm,) = arms_from_runs(paths[1:2], "accuracy")
    assert (arm.name, arm.run_count) == ("pods", 1)
    assert analyse([arm], baseline="grpo", metric="accuracy").baseline is None
    with pytest.raises(UserError, match="rollouts"):
        arms_from_runs([experiment / "pods" / "seed-0" / "rollouts"], "accuracy")


# --------------------------------------------------------------------------------- what is pooled and compared


def names_of(*sources: Path) -> dict[str, int]:
    return {arm.name: arm.run_count for arm in arms_from_runs(sources, "accuracy")}


def test_a_run_that_is_called_no_seed_is_an_arm_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "work" / "runs"
    write_run(folder / "words", "a", 1, config={"task": "words"})
    write_run(folder / "small", "b", 2, config={"num_rollouts": 32})
    write_run(folder / "failed", "c", 3, state="failed", config={"model_name_or_path": "other"})
    assert names_of(tmp_path / "work") == {"failed": 1, "small": 1, "words": 1}
    assert names_of(folder) == {"failed": 1, "small": 1, "words": 1}


def test_only_the_seeds_of_one_recipe_are_one_arm(tmp_path: Path) -> None:
    """What is saved and where does not matter. Other recipes are refused."""
    folder = tmp_path / "work" / "pods"
    for seed in (1, 2):
        write_run(folder / f"seed-{seed}", "pods", seed, config={"output_dir": f"{seed}"})
    same = {"save_seconds": 60, "report_to": "wandb", "run_name": "x"}
    write_run(folder / "seed-3", "pods", 3, config=same)
    assert names_of(tmp_path / "work") == {"pods": 3}
    for seed in (4, 5):
        write_run(folder / f"seed-{seed}", "pods", seed, config={"beta": 0.1})
    with pytest.raises(UserError, match=r"pods.*beta is not set and 0\.1 .*pods/seed-4"):
        names_of(tmp_path / "work")


def test_a_run_counts_once_and_equal_names_are_one_arm(tmp_path: Path) -> None:
    for parent in ("one", "two", "three"):
        write_run(tmp_path / parent / "mine", "mine", 1, config={"lr": 1e-4 if parent == "three" else 1e-5})
    first, second, third = (tmp_path / parent / "mine" for parent in ("one", "two", "three"))
    assert names_of(first, first) == {"mine": 1}
    assert names_of(first, second, first) == {"mine": 2}
    with pytest.raises(UserError, match=r"mine.*lr is 1e-05 and 0\.0001"):
        names_of(first, third)


def write_arm(root, arm, config, environment):
    """Two seeds of an arm."""
    for seed in (1, 2):
        path = write_run(root / arm / f"seed-{seed}", arm, seed, config=config)
        (path / "environment.json").write_text(json.dumps(environment))


TASK = {"name": "sums", "version": "7-1-mark-plain"}


@pytest.mark.parametrize(
    ("config", "task", "reason"),
    [
        ({"task": "words"}, {}, "task"),
        ({"dataset_name": "a/b"}, {}, "dataset_name"),
        ({}, {"version": "8-1-mark-plain"}, "7 and 8 "),
    ],
)
def test_scores_of_different_questions_are_not_compared(tmp_path, config, task, reason):
    """Neither by default nor if the experiment declares the pair."""
    write_arm(tmp_path, "grpo", {}, {"task": TASK})
    write_arm(tmp_path, "pods", config, {"task": TASK | task})
    assert analysis_of(tmp_path).pairs == ()
    analysis = analysis_of(tmp_path, pairs=[("grpo", "pods", "selection")])
    assert analysis.pairs == ()
    ((arm, rival, why),) = analysis.refused
    assert (arm.name, rival.name) == ("grpo", "pods")
    assert reason in why
    assert any(why in note for note in notes(analysis))
    assert verdicts(analysis)["pods"] == "not compared"
    (found,) = findings(analysis)
    assert not found.sentence.startswith("Highest")
    assert found.number == ""
    assert analysis.target
    assert math.isnan(analysis.result_of("pods").time_to_target)


SAME = {"task": "sums", "dataset_name": "rows.jsonl", "task_rewards": {"mine:judge": 1.0}, "data_dir": "one"}
CONTENTS: dict[str, dict[str, str]] = {
    "dataset_name": {"rows.jsonl": "a"},
    "data_dir": {"gsm8k/test.jsonl": "a"},
    "task_rewards": {"mine.py": "a", "helper.py": "a"},
    "prompts": {"train": "a", "test": "a"},
}


def on_contents(root: Path, ours: dict[str, Any], theirs: dict[str, Any], **config: Any) -> Analysis:
    """Two arms, each with contents; the second may have another recipe."""
    write_arm(root, "grpo", SAME, {"contents": CONTENTS | ours})
    write_arm(root, "pods", SAME | config, {"contents": CONTENTS | theirs})
    return analysis_of(root)


@pytest.mark.parametrize(
    ("ours", "theirs", "config", "reason"),
    [
        ({}, {"task_rewards": {"mine.py": "a", "helper.py": "b"}}, {}, "(helper.py)"),
        ({}, {"data_dir": {"gsm8k/test.jsonl": "b"}}, {"data_dir": "two"}, "(gsm8k/test.jsonl)"),
        ({}, {"prompts": {"train": "a", "test": "b"}}, {}, "(test)"),
        # scripts, whose settings do not name their functions
        ({"reward_funcs": {"judge": "a"}}, {"reward_funcs": {"judge": "b"}}, {}, "reward_funcs"),
    ],
)
def test_arms_on_different_contents_are_not_compared(tmp_path, ours, theirs, config, reason):
    analysis = on_contents(tmp_path, ours, theirs, **config)
    assert analysis.pairs == ()
    assert verdicts(analysis)["pods"] == "not compared"
    assert any(reason in note for note in notes(analysis) if "is not compared with" in note)


@pytest.mark.parametrize(
    ("contents", "config"),
    [
        ({}, {"data_dir": "moved"}),
        ({"task_rewards": {"other.py": "b"}}, {"task_rewards": {"other:judge": 1.0}}),  # the arms' own difference
        ({"prompts": {"train": "b", "test": "b"}}, {"system_prompt": "Think."}),  # noted
    ],
)
def test_arms_on_the_same_contents_or_of_other_recipes_are_compared(tmp_path, contents, config):
    assert len(on_contents(tmp_path, {}, contents, **config).pairs) == 1


def test_seeds_on_different_contents_are_not_pooled(tmp_path: Path) -> None:
    """The first has just begun, or is of an earlier version."""
    for seed, digest in ((1, ""), (2, "a"), (3, "b")):
        path = write_run(tmp_path / "pods" / f"seed-{seed}", "pods", seed)
        if digest:
            about = {"contents": {"dataset_name": {"rows.jsonl": digest}, "prompts": {"train": digest}}}
            (path / "environment.json").write_text(json.dumps(about))
    assert names_of(*(tmp_path / "pods" / f"seed-{seed}" for seed in (1, 2))) == {"pods": 2}
    with pytest.raises(UserError, match=r"pods.*contents of dataset_name differ \(rows.jsonl\)"):
        names_of(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"model_name_or_path": "other"},
        {"prompt_style": "chat"},
        {"clock": "cpu"},
        {"eval_prompts": 32},
        {"eval_temperature": 0.0},
    ],
)
def test_other_differences_are_noted(tmp_path: Path, config: dict[str, Any]) -> None:
    usual = {"model_name_or_path": "one", "prompt_style": "plain", "clock": "wall", "task": "sums"}
    for arm in ("grpo", "pods"):
        for seed in (1, 2):
            write_run(tmp_path / arm / f"seed-{seed}", arm, seed, config=usual | (config if arm == "pods" else {}))
    analysis = analysis_of(tmp_path)
    assert len(analysis.pairs) == 1
    (key,) = config
    assert any(f"pods (64→16) and grpo (16) differ in {key} too" in note for note in notes(analysis))


def test_without_a_baseline_every_run_is_shown_to_its_own_end(tmp_path: Path) -> None:
    for name, end in (("long", 150), ("short", 30)):
        write_run(tmp_path / name, name, end=end)
    analysis = analysis_of(tmp_path, baseline=None)
    assert [final_of(analysis, name).final_due for name in ("long", "short")] == [150, 30]
    (highest,) = findings(analysis)
    assert highest.text.startswith("Highest: long")


def test_clocks_that_share_no_checkpoint_are_compared_at_one_time_or_not_at_all(tmp_path: Path) -> None:
    for name, times in {"grpo": [0, 10, 20, 30], "odd": [0, 9, 18, 27], "later": [40, 50]}.items():
        for seed in (1, 2, 3):
            path = write_run(tmp_path / name / f"seed-{seed}", name, seed)
            rows = [{"due": t, "seconds": t, "accuracy": 0.1 * seed + 0.01 * t} for t in times]
            (path / "evals.jsonl").write_text("\n".join(map(json.dumps, rows)))
    analysis = analysis_of(tmp_path)
    (pair,) = analysis.pairs
    assert (pair.arm.name, pair.due) == ("odd", 27)
    assert pair.difference.mean == pytest.approx(0.0)  # one line, read at one time
    assert [(arm.name, why) for arm, _, why in analysis.refused] == [
        ("later", "their evaluations have no time in common")
    ]
    assert final_of(analysis, "later").final_due == 50


# ---------------------------------------------------------------------- the sentences and the table that open


def test_the_largest_settled_difference_comes_first_and_what_is_not_settled_last(tmp_path: Path) -> None:
    """Each settled one with its number and what it shows; a losing arm too."""
    for arm, rate in {"grpo": 0.6, "pods": 1.5, "same": 0.6, "worse": 0.45}.items():
        for seed in range(5):
            write_run(tmp_path / arm / f"seed-{seed}", arm, seed, rate=rate)
    pairs = [("same", "grpo", "nothing"), ("worse", "grpo", ""), ("pods", "grpo", "selection")]
    analysis = analysis_of(tmp_path, pairs=pairs)
    gaps = {pair.arm.name: pair for pair in analysis.pairs}
    first, second, last = findings(analysis)
    gap = gaps["pods"].difference
    assert first.number == f"+{100 * gap.mean:.1f} points"
    assert first.text.startswith("from selection (")
    assert f"(95 % interval +{100 * gap.low:.1f} to +{100 * gap.high:.1f}, 5 runs each)" in first.text
    fast = gaps["pods"].speedup
    assert fast.speedup == pytest.approx(fast.baseline_time / fast.arm_time)
    assert f"{fast.speedup:.2f} times as fast ({fast.ci_low:.2f} to {fast.ci_high:.2f})" in first.text
    assert second.number.startswith("-")
    assert second.text.startswith("for worse")
    assert last.number == ""
    assert "same (64→16) against grpo (16) (nothing)" in last.text


def test_a_pair_that_is_settled_over_the_run_alone_gives_that_number(tmp_path: Path) -> None:
    scores = {"grpo": (0.2, 0.3, 0.4, 0.6), "pods": (0.2, 0.5, 0.6, 0.6)}
    runs = {arm: [tuple(score + 0.01 * seed for score in row) for seed in range(4)] for arm, row in scores.items()}
    runs["pods"] = [(*row[:-1], row[-1] + (-0.1 if seed % 2 else 0.1)) for seed, row in enumerate(runs["pods"])]
    analysis = analysis_of(written(tmp_path, runs))
    (pair,) = analysis.pairs
    assert (pair.difference.settled, pair.over_time.settled, pair.settled) == (False, True, True)
    (found,) = findings(analysis)
    assert found.number == f"+{100 * pair.over_time.mean:.1f} points"


@pytest.mark.parametrize("runs", [1, 2, 4])
def test_what_is_not_settled_is_said_once_with_the_highest_score(tmp_path: Path, runs: int) -> None:
    """Of seven arms; below three seeds there is no interval at all."""
    for rank, arm in enumerate(("grpo", *"abcdef")):
        for seed in range(runs):
            write_run(tmp_path / arm / f"seed-{seed}", arm, seed + 10 * rank, rate=0.6 + 0.01 * rank, noise=0.06)
    analysis = analysis_of(tmp_path)
    assert len(analysis.pairs) == 6
    assert not any(pair.settled or pair.speedup_settled for pair in analysis.pairs)
    (found,) = findings(analysis)
    best = max(analysis.scored, key=lambda result: result.final.final if result.final else 0)
    assert best.arm.label in found.text
    assert found.number == ""
    assert {*verdicts(analysis).values()} == {"baseline", "few runs" if runs < 3 else "not settled"}
    has_interval = runs >= 3
    for pair in analysis.pairs:
        assert math.isfinite(pair.difference.low) == has_interval
    for arm in analysis.arms:
        assert np.isfinite(arm.curve.interval[0]).any() == has_interval
    assert any("[" in cell for cell in result_table(analysis).cells[1]) == has_interval


def test_the_table_that_opens_has_score_cost_time_and_a_verdict_in_a_word(tmp_path: Path) -> None:
    for arm, rate in {"grpo": 0.6, "pods": 1.5, "same": 0.6, "worse": 0.2, "apart": 0.6}.items():
        for seed in range(5):
            write_run(tmp_path / arm / f"seed-{seed}", arm, seed, rate=rate, noise=0.001)
    write_run(tmp_path / "single" / "seed-9", "single", 9)
    write_run(tmp_path / "other" / "seed-0", "other", 0, config={"task": "words"})
    pairs = [(arm, "grpo", "") for arm in ("pods", "same", "single", "other")] + [("grpo", "worse", "")]
    analysis = analysis_of(tmp_path, pairs=pairs)
    expected = {"grpo": "baseline", "pods": "better", "same": "level", "worse": "worse", "single": "few runs"}
    assert verdicts(analysis) == expected | {"other": "not compared", "apart": "–"}
    table = result_table(analysis)
    final = final_of(analysis, "pods")
    time_column = f"time to {100 * analysis.target:.1f} %"
    assert table.titles[1:] == ["final accuracy, 95 % interval", "seconds per step", time_column, "verdict"]
    (cells,) = (cells for cells in table.cells if cells[0].startswith("pods"))
    score = f"{100 * final.final:.1f} % [{100 * final.final_low:.1f}, {100 * final.final_high:.1f}]"
    assert cells[1:] == [score, "0.31 s", f"{analysis.result_of('pods').time_to_target:.1f} s", "better"]


def test_a_metric_that_is_no_share_stays_a_number_and_none_is_better(tmp_path: Path) -> None:
    lengths = {"grpo": 30.0, "pods": 20.0}
    runs = {arm: [(length + seed, length + seed + 2) for seed in range(5)] for arm, length in lengths.items()}
    written(tmp_path, runs, metric="mean_completion_tokens")
    arms = arms_from_runs([tmp_path], "mean_completion_tokens")
    analysis = analyse(arms, baseline="grpo", metric="mean_completion_tokens")
    assert verdicts(analysis)["pods"] == "lower"
    (found,) = findings(analysis)
    assert found.number == "-10.000"
    assert "mean completion length (tokens) 24.0" in found.text


def test_the_difference_over_time_is_of_the_mean_scores_after_the_start(tmp_path: Path) -> None:
    """Seeds are paired: PODS is on average 0.15, 0.2 and 0.175 above GRPO."""
    grpo = [(0.9, 0.2, 0.4), (0.1, 0.5, 0.7), (0.1, 0.2, 0.3)]
    pods = [(0.1, 0.3, 0.6), (0.1, 0.6, 1.0), (0.5, 0.4, 0.45)]
    (pair,) = analysis_of(written(tmp_path, {"grpo": grpo, "pods": pods})).pairs
    assert pair.over_time.mean == pytest.approx(0.175)
    half = 4.302653 * 0.025 / 3**0.5  # Student's t of three pairs, and their standard error
    assert (pair.over_time.low, pair.over_time.high) == pytest.approx((0.175 - half, 0.175 + half), abs=1e-3)


def test_a_baseline_that_peaks_at_its_start_has_no_level_and_no_speedup(tmp_path: Path) -> None:
    scores = {"grpo": (0.5, 0.4, 0.4), "pods": (0.4, 0.5, 0.6)}
    analysis = analysis_of(written(tmp_path, {arm: [row] * 3 for arm, row in scores.items()}))
    assert analysis.target is None
    assert analysis.pairs[0].speedup is None
    assert any("speedup" in note for note in notes(analysis))


def test_runs_on_a_slower_machine_are_named(tmp_path: Path) -> None:
    for arm in ("grpo", "pods"):
        for seed in (1, 2, 3):
            path = write_run(tmp_path / arm / f"seed-{seed}", arm, seed)
            check = 0.0073 if (arm, seed) == ("pods", 2) else 0.005 + 0.0001 * seed
            rows = [
                json.loads(line) | {"speed_check": check} for line in (path / "evals.jsonl").read_text().splitlines()
            ]
            (path / "evals.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (line,) = (note for note in notes(analysis_of(tmp_path)) if "speed check" in note)
    assert "pods/seed-2 1.40" in line
    assert "seed-1" not in line
    assert "seed-3" not in line
