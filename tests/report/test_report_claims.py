"""What a report may claim: only what the runs settle, and captions of only what is drawn."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import unrendered, write_run

from pods_rl.report import ReportFiles, build_report, speedup
from pods_rl.report.analysis import Analysis, analyse
from pods_rl.report.arms import arms_from_runs
from pods_rl.report.curves import MOST_CHECKPOINTS, curve_of
from pods_rl.report.figures import sketch_curves, sketch_threshold
from pods_rl.report.speedups import Speedup
from pods_rl.report.wording import headlines

CLOCK = np.arange(11) * 6.0
GRPO = (0.21, 0.37, 0.52, 0.60, 0.68, 0.72, 0.76, 0.79, 0.80, 0.82, 0.836)
PODS = (0.21, 0.33, 0.46, 0.55, 0.61, 0.69, 0.74, 0.78, 0.83, 0.81, 0.812)  # one evaluation just over the level


def write_scores(path: Path, arm: str, scores: object, seed: int = 1, error: float | None = 0.024) -> Path:
    """A run with given scores, evaluated every 6 seconds."""
    write_run(path, arm, seed)
    rows = [{"due": t, "seconds": t, "accuracy": s} for t, s in zip(CLOCK.tolist(), scores, strict=True)]  # type: ignore[call-overload]
    own = {} if error is None else {"accuracy_se": error, "prompts": 256}
    (path / "evals.jsonl").write_text("".join(json.dumps(row | own) + "\n" for row in rows))
    return path


def analysis_of(root: Path) -> Analysis:
    return analyse(arms_from_runs([root], "accuracy"), baseline="grpo", metric="accuracy", resamples=500)


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    """The quickstart: three arms of one seed, of which one evaluation passes the level by a quarter of a prompt."""
    root = tmp_path_factory.mktemp("lone")
    configs = {"grpo": {"num_rollouts": 16}, "pods": {}, "grpo-64": {"num_generations": 64}}
    for (arm, config), scores in zip(configs.items(), (GRPO, PODS, np.array(GRPO) * 0.9), strict=True):
        write_scores(root / arm / "seed-1", arm, scores)
        settings = {"num_rollouts": 64, "num_generations": 16, "rule": "max_variance", "seed": 1}
        (root / arm / "seed-1" / "config.yaml").write_text(json.dumps(settings | config))
    with unrendered():
        return build_report(root, resamples=100)


def test_one_seed_settles_nothing_and_gives_the_numbers(lone: ReportFiles) -> None:
    pods, never = lone.headlines
    assert pods == (
        "Not settled: pods (64→16) reached 99 % of grpo (16)’s peak accuracy after 48.0 s, grpo (16) after 60.0 s "
        "(speedup 1.25), 1 run. One run of an arm cannot tell a difference from chance. At 60.0 s: 0.812 ± 0.047 "
        "against 0.836 ± 0.047 (± 1.96 standard errors of the evaluation)."
    )
    assert never.endswith("1 run. Not settled: one run of an arm cannot tell a difference from chance.")
    text = lone.html.read_text() + lone.markdown.read_text()
    for claim in ("sooner", "largest of", "Ablations", "Thin lines", "over runs;", "95 % interval"):
        assert claim not in text, claim
    cells = {row[0]: row[2] for row in lone.tables["final"].cells()}
    assert cells["pods (64→16)"] == "0.812 ±0.047"
    assert "1.25x, not settled" in threshold_texts(lone.analysis)
    with lone.csv["final"].open() as file:
        assert [row["settled"] for row in csv.DictReader(file)] == ["", "false", "false"]


def threshold_texts(analysis: Analysis) -> str:
    sketch = sketch_threshold(analysis)
    assert sketch is not None
    return " ".join(text.get_text() for text in sketch.draw(8.4).axes[0].texts)


def test_a_lone_run_is_drawn_with_the_standard_error_of_its_evaluations(lone: ReportFiles) -> None:
    (axes,) = sketch_curves(lone.analysis, "accuracy").draw(8.4).axes
    assert len(axes.collections) == 3
    assert not [line for line in axes.lines if line.get_linewidth() == 0.8]
    assert (
        "Each line is one run, bands are 1.96 standard errors of the evaluation over its prompts, not over runs. Dots: "
        "where a line first reaches the dashed level." in lone.html.read_text()
    )


@pytest.mark.parametrize("error", [None, 0.0])
def test_without_a_standard_error_it_is_that_of_the_prompts_or_none(tmp_path: Path, error: float | None) -> None:
    for arm, scores in (("grpo", GRPO), ("pods", PODS)):
        write_scores(tmp_path / arm / "seed-1", arm, scores, error=error)
    (headline,) = headlines(analysis_of(tmp_path))
    shown = "0.812 against 0.836." if error is None else "0.812 ± 0.048 against 0.836 ± 0.045"
    assert headline.startswith("Not settled: ")
    assert shown in headline


def simulated(random: np.random.Generator, runs: int, spread: float, rate: float = 0.05) -> np.ndarray:
    """Runs whose rate and level differ by chance, evaluated on 256 prompts."""
    rates = rate * np.exp(random.normal(0, spread, (runs, 1)))
    level = 0.62 + random.normal(0, spread / 7, (runs, 1))
    return random.binomial(256, np.clip(0.2 + level * (1 - np.exp(-rates * CLOCK)), 0, 1)) / 256


def compared(base: np.ndarray, arm: np.ndarray, **errors: np.ndarray) -> Speedup:
    clocks = [np.broadcast_to(CLOCK, scores.shape) for scores in (base, arm)]
    return speedup(base, clocks[0], arm, clocks[1], resamples=200, **errors)


@pytest.mark.parametrize("trials", [60, pytest.param(1000, marks=pytest.mark.reliability)])
@pytest.mark.parametrize("runs", [2, 3, 4, 5, 8])
def test_noise_is_hardly_ever_declared_sooner_or_later(runs: int, trials: int) -> None:
    """Arms of one distribution: at most the nominal 5 % of them, plus two standard errors of that share."""
    random = np.random.default_rng(runs)
    for spread in (0.0, 0.2):
        results = [compared(simulated(random, runs, spread), simulated(random, runs, spread)) for _ in range(trials)]
        allowed = 0.05 + 2 * np.sqrt(0.05 * 0.95 / trials)
        assert np.mean([result.settled and result.speedup > 1 for result in results]) <= allowed
        assert np.mean([result.settled and result.speedup < 1 for result in results]) <= allowed


def test_a_real_difference_of_eight_seeds_is_declared() -> None:
    random = np.random.default_rng(1)
    errors = np.full((8, len(CLOCK)), 0.024)
    results = [compared(simulated(random, 8, 0.1, 0.03), simulated(random, 8, 0.1, 0.09),
                        baseline_errors_RC=errors, arm_errors_RC=errors) for _ in range(20)]  # fmt: skip
    assert sum(result.settled and result.speedup > 1 for result in results) >= 18


def test_a_crossing_within_the_standard_error_of_the_evaluation_is_not_settled(tmp_path: Path) -> None:
    """Three runs that hardly differ: the interval excludes 1, but the arm passes the level by less than its noise."""
    for arm, scores in (("grpo", GRPO), ("pods", PODS)):
        for seed in range(3):
            write_scores(tmp_path / arm / f"seed-{seed}", arm, np.array(scores) + 1e-5 * seed, seed)
    analysis = analysis_of(tmp_path)
    result = analysis.speedup_of("pods")
    assert result is not None
    assert result.ci_low > 1
    assert not result.settled
    (headline,) = headlines(analysis)
    assert "Allowing for so few runs and the evaluation’s standard error, the interval is [0.00, " in headline
    for path in tmp_path.glob("*/*/evals.jsonl"):
        path.write_text(path.read_text().replace('"accuracy_se": 0.024, "prompts": 256', '"other": 0'))
    assert "1.25x sooner [1.25, 1.25]" in headlines(analysis_of(tmp_path))[0]


@pytest.mark.usefixtures("no_rendering")
def test_what_never_reaches_the_level_is_said_beside_the_interval(experiment: Path) -> None:
    report = build_report(experiment, resamples=200)
    titles = [column.title.replace("\u00a0", " ") for column in report.tables["speedup"].columns]
    assert titles == [
        "arm", "to 99 %",
        "speedup to 99 %", "to 99 %, at the crossing", "never reach 99 %",
        "speedup to the peak", "to the peak, at the crossing", "never reach the peak",
    ]  # fmt: skip
    (cells,) = report.tables["speedup"].cells()
    assert cells[4].startswith("3.5 %; others [2.0")
    assert any("counts as 0: pods (64→16) (3.5 %; the others give [2.0" in note for note in report.notes)
    with report.csv["final"].open() as file:
        row = [*csv.DictReader(file)][1]
    assert float(row["ci_low"]) == 0
    assert float(row["reached_low"]) > 1.9


def test_ablations_need_two_runs_of_each_arm(tmp_path: Path) -> None:
    for arm, n, seeds in (("grpo", 16, 2), ("pods", 64, 2), ("pods-32", 32, 2), ("pods-128", 128, 1)):
        for seed in range(seeds):
            write_run(tmp_path / arm / f"seed-{seed}", arm, seed, config={"num_rollouts": n})
    (ablation,) = analysis_of(tmp_path).ablations
    assert [arm.name for arm in ablation.arms] == ["grpo", "pods-32", "pods"]
    for path in tmp_path.glob("*/seed-1"):
        shutil.rmtree(path)
    assert analysis_of(tmp_path).ablations == ()


# ----------------------------------------------------------------------------------------------- clocks


@pytest.mark.usefixtures("no_rendering")
def test_runs_on_clocks_of_their_own_are_interpolated_and_compared(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for arm, rate in (("grpo", 0.03), ("pods", 0.09)):
        for seed in range(5):
            path = write_run(tmp_path / arm / f"seed-{seed}", arm, seed)
            times = np.sort(random.uniform(0, 120, 200))
            rows = [{"seconds": t, "accuracy": 0.2 + 0.6 * (1 - np.exp(-rate * t))} for t in times]
            (path / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = build_report(tmp_path, resamples=200)
    (headline,) = report.headlines
    assert "2.9" in headline
    assert "x sooner [" in headline
    curve = report.analysis.arms[0].curve
    assert curve is not None
    assert 190 <= len(curve.due) <= 202
    assert any(note.startswith("grpo (16): its runs were evaluated at different times") for note in report.notes)
    text = report.html.read_text()
    assert "Interpolated to common times: grpo (16), pods (64→16)." in text
    assert "On a shared clock nothing is interpolated." in text


def test_a_shared_clock_is_never_interpolated() -> None:
    """Not where all but one run died early, and not where the last evaluation of each has a time of its own."""
    whole = [{"due": t, "seconds": t + 0.3, "accuracy": 0.5} for t in CLOCK.tolist()]
    for others in (
        [whole[:2]],
        [whole[:1], whole[:3]],
        [[*whole[:5], {"due": 25.5, "seconds": 25.5, "accuracy": 0.4}]],
    ):
        curve = curve_of({"a": whole, **{str(k): rows for k, rows in enumerate(others)}}, "accuracy")
        assert curve is not None
        assert not curve.interpolated


def test_nothing_is_extrapolated() -> None:
    evals = {"a": [(1.0, 0.1), (3.0, 0.3), (5.0, 0.5)], "b": [(2.0, 0.4), (4.0, 0.6), (6.0, 0.8)]}
    curve = curve_of({run: [{"seconds": t, "accuracy": s} for t, s in rows] for run, rows in evals.items()}, "accuracy")
    assert curve is not None
    assert (curve.due[0], curve.due[-1]) == (2, 5)
    np.testing.assert_allclose(curve.scores[:, 0], [0.2, 0.4])
    np.testing.assert_allclose(curve.mean[-1], (0.5 + 0.7) / 2)


def test_runs_at_different_times_altogether_have_no_mean() -> None:
    rows = {str(k): [{"seconds": 10.0 * k + t, "accuracy": 0.5} for t in range(3)] for k in range(2)}
    curve = curve_of(rows, "accuracy")
    assert curve is not None
    assert not curve.has_mean


def test_a_very_long_curve_keeps_an_even_choice_of_its_checkpoints(tmp_path: Path) -> None:
    rows = [{"due": t, "seconds": t, "accuracy": 1 - 1 / (t + 2)} for t in range(5000)]
    curve = curve_of({"a": rows, "b": rows[:4000]}, "accuracy")
    assert curve is not None
    assert (len(curve.due), curve.thinned_from) == (MOST_CHECKPOINTS, 5000)
    assert (curve.due[0], curve.due[-1]) == (0, 3999)  # those that most runs have


MEASURE = r"""
import re, resource, sys, time
from pods_rl.report import build_report_from_csv
build_report_from_csv(sys.argv[1], sys.argv[2], "grpo", "answer_accuracy")
seconds = time.process_time()
sum(float(str(number / 7)) for number in range(200_000))
own = re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())  # Linux' getrusage has the parent's peak too
print((int(own[1]) if own else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) // 1024)
print(seconds / (time.process_time() - seconds))
"""


@pytest.mark.parametrize(
    ("shape", "own"),
    [
        ((2, 5, 4000), False),
        pytest.param((2, 10, 50_000), False, marks=pytest.mark.reliability),
        pytest.param((2, 10, 50_000), True, marks=pytest.mark.reliability),
        pytest.param((4, 25_000, 10), False, marks=pytest.mark.reliability),
        pytest.param((2, 500_000, 1), False, marks=pytest.mark.reliability),
        pytest.param((250, 8, 500), False, marks=pytest.mark.reliability),
    ],
    ids=str,
)
@pytest.mark.timeout(600)
def test_a_csv_of_a_million_rows_takes_less_than_a_gigabyte_and_time_in_proportion(
    shape: tuple[int, int, int], own: bool, tmp_path: Path
) -> None:
    arms, runs, checkpoints = shape
    random, out = np.random.default_rng(0), io.StringIO("arm,run,hours,answer_accuracy\n")
    out.seek(0, io.SEEK_END)
    for arm in range(arms):
        for run in range(runs):
            times = np.sort(random.uniform(0, 6, checkpoints)) if own else np.linspace(0, 6, checkpoints)
            scores = 0.2 + 0.6 * (1 - np.exp(-(1 + 0.1 * arm) * times)) + random.normal(0, 0.02, checkpoints)
            name = f"pods-{arm}" if arm else "grpo"
            out.writelines(f"{name},{run},{t:.12g},{s:.5f}\n" for t, s in zip(times, scores, strict=True))
    (tmp_path / "runs.csv").write_text(out.getvalue())
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "runs.csv"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**_one_core()})
    mib, ratio = map(float, done.stdout.split())
    assert mib < 1000
    assert ratio < 600  # to writing and reading 200,000 numbers on the same core: some tenth of a second


def _one_core() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
