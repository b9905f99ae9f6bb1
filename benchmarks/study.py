"""A study on a shipped policy, from runs to figures: python benchmarks/study.py [paper | chat]

Trains the missing runs of a study, then writes its folder of `docs/results/`: the report, the speedups against each
baseline, what each arm had spent when it reached a baseline's threshold, accuracy against tokens, `claims.csv`:
differences between two arms, paired by seed, and `crossings.csv`: how many times sooner an arm is at two
fixed accuracies. Arms without runs are left out of what it writes.

- paper: the paper's comparison and ablations (`study.yaml`: 13 arms, eight seeds, one core, about 2 hours).
- chat: a chat model of 135 million parameters on the largest of four numbers (`chat.yaml`: 3 arms, eight seeds, 3 hours
  of one core; first `python benchmarks/chat.py runs/chat-model`). `chat_pilots.yaml` chose its settings.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from pods_rl.report import ReportFiles, build_report
from pods_rl.report.arms import Curve, curve_of
from pods_rl.report.charts import line_styles
from pods_rl.report.figures import add_legend, look, new_figure, styled, to_bytes
from pods_rl.runs import Run, find_runs
from regime_runs import write_rows
from regime_statistics import HALFWAY, HIGH, mean_ratio, times_as_soon

HERE = Path(__file__).parent
SPENT = ("seconds", "steps", "tokens generated", "tokens trained", "seconds a step")


@dataclass(frozen=True)
class Study:
    """An experiment file, the arms to compare with, and what to show.

    Args:
        baselines: a table of speedups each; the report is against the first.
        headline: arms of the first figure, its baseline first.
        claims: what, the arm that should be better, and the other.
    """

    config: str
    baselines: tuple[str, ...]
    headline: tuple[str, ...]
    claims: tuple[tuple[str, str, str], ...]


STUDIES = {
    "paper": Study(
        "study",
        baselines=("grpo-16", "grpo-16-trl", "grpo-ga-64"),
        headline=("grpo-ga-64", "grpo-16", "pods-64-16"),
        claims=(
            ("PODS against GRPO", "pods-64-16", "grpo-16"),
            ("PODS against TRL's GRPO", "pods-64-16", "grpo-16-trl"),
            ("PODS against GRPO-GA", "pods-64-16", "grpo-ga-64"),
            ("n = 64 against 32", "pods-64-16", "pods-32-16"),
            ("n = 64 against 128", "pods-64-16", "pods-128-16"),
            ("m = 16 against 8", "pods-64-16", "pods-64-8"),
            ("m = 16 against 4", "pods-64-16", "pods-64-4"),
            ("m = 16 against 2", "pods-64-16", "pods-64-2"),
            ("max-variance against max-reward", "pods-64-16", "max-reward-64-16"),
            ("max-variance against random", "pods-64-16", "random-64-16"),
            ("max-variance against percentile", "pods-64-16", "percentile-64-16"),
            ("advantages after against before", "pods-64-16", "before-64-16"),
        ),
    ),
    "chat": Study(
        "chat",
        baselines=("grpo-8", "grpo-8-trl"),
        headline=("grpo-8", "pods-32-8", "grpo-8-trl"),
        claims=(
            ("PODS against TRL's GRPO", "pods-32-8", "grpo-8-trl"),
            ("PODS against GRPO", "pods-32-8", "grpo-8"),
            ("GRPO against TRL's", "grpo-8", "grpo-8-trl"),
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", choices=STUDIES, default="paper")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: runs/ and the experiment's name)")
    parser.add_argument("--output", type=Path, help="default: its folder of docs/results/")
    parser.add_argument("--parallel", type=int, default=1, help="concurrent runs, one core each")
    parser.add_argument("--report-only", action="store_true", help="train nothing; report on existing runs")
    options = parser.parse_args()
    study = STUDIES[options.study]
    folder = options.runs or Path("runs") / study.config
    output = options.output or HERE.parent / "docs" / "results" / study.config
    if not options.report_only:
        command = ["compare", "--config", str(HERE / f"{study.config}.yaml"), "--output", str(folder)]
        subprocess.run([sys.executable, "-m", "pods_rl", *command, "--parallel", str(options.parallel)], check=True)
    output.mkdir(parents=True, exist_ok=True)
    arms = find_runs(folder)
    study = of_finished(study, arms)
    for stale in (*output.glob("speedup-*.csv"), *output.glob("figures/*.png")):  # of arms that the study lost
        stale.unlink()
    for baseline in study.baselines:
        files = build_report(folder, folder / f"report-{baseline}", baseline=baseline, figures=["png"])
        shutil.copy(files.csv["speedup"], output / f"speedup-{baseline}.csv")
        if baseline == study.baselines[0]:
            keep(files, output)
    headline = build_report(
        [run.path for arm in study.headline for run in arms[arm]],
        folder / "report-headline",
        baseline=study.headline[0],
        figures=["png"],
    )
    keep_picture(headline.folder / "figures" / "curves.png", output / "headline.png")
    (folder / "tokens.png").write_bytes(to_bytes(tokens_figure(arms), "png"))
    keep_picture(folder / "tokens.png", output / "figures" / "tokens.png")
    write_spent(study, arms, output / "spent.csv")
    write_claims(study, arms, output / "claims.csv")
    write_crossings(study, arms, output / "crossings.csv")
    write_curves(study.headline, arms, output / "curves.csv")


def of_finished(study: Study, arms: dict[str, list[Run]]) -> Study:
    """Return the study without what needs arms that have no runs."""
    return replace(
        study,
        baselines=tuple(arm for arm in study.baselines if arm in arms),
        headline=tuple(arm for arm in study.headline if arm in arms),
        claims=tuple(claim for claim in study.claims if {*claim[1:]} <= arms.keys()),
    )


def keep(files: ReportFiles, output: Path) -> None:
    """Copy the report's Markdown, figures and tables, except the long table of every evaluation."""
    shutil.copy(files.markdown, output / files.markdown.name)
    for name in ("final", "pairs", "runs", "ablations"):
        shutil.copy(files.csv[name], output / f"{name}.csv")
    (output / "figures").mkdir(exist_ok=True)
    for picture in sorted((files.folder / "figures").glob("*.png")):
        keep_picture(picture, output / "figures" / picture.name)


def keep_picture(source: Path, target: Path) -> None:
    """Reduce a picture to 128 colours: enough for lines and bands at a third of the size."""
    Image.open(source).convert("RGB").quantize(128).save(target, optimize=True)


def checkpoints(runs: Sequence[Run]) -> list[list[dict[str, Any]]]:
    """Return each run's evaluations at the times that all of them have: a slow step skips some times."""
    shared = set.intersection(*({row["due"] for row in run.evals} for run in runs))
    return [[row for row in run.evals if row["due"] in shared] for run in runs]


def scores(runs: Sequence[Run]) -> np.ndarray:
    """Return accuracy `[runs, checkpoints]`."""
    return np.array([[row["accuracy"] for row in rows] for rows in checkpoints(runs)])


def bootstrap(values: np.ndarray, resamples: int = 2000) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean over resampled seeds."""
    drawn = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def paired(arms: dict[str, list[Run]], *names: str) -> list[list[Run]]:
    """Return the runs of each arm on the seeds that all of them have, in order of these seeds."""
    shared = set.intersection(*({run.path.name for run in arms[name]} for name in names))
    return [sorted((run for run in arms[name] if run.path.name in shared), key=lambda run: run.path) for name in names]


def write_claims(study: Study, arms: dict[str, list[Run]], path: Path) -> None:
    """Differences of paired seeds: the score at the last time at which both arms were evaluated, and over time."""
    rows = []
    for claim, arm, other in study.claims:
        arm_curve, other_curve = (curve_over(runs, "seconds") for runs in paired(arms, arm, other))
        arm_scores = arm_curve.scores[:, np.isin(arm_curve.due, other_curve.due)]
        other_scores = other_curve.scores[:, np.isin(other_curve.due, arm_curve.due)]
        difference = arm_scores - other_scores
        difference = difference[:, ~np.isnan(difference).any(axis=0)]
        for measure, values in (("at the end", difference[:, -1]), ("mean over time", difference.mean(axis=1))):
            low, high = bootstrap(values)
            wins = f"{(values > 0).sum()}/{len(values)}"
            rows.append([claim, arm, other, measure, *(f"{v:+.4f}" for v in (values.mean(), low, high)), wins])
    write(path, ["claim", "arm", "against", "accuracy", "difference", "ci_low", "ci_high", "seeds won"], rows)


@styled
def tokens_figure(arms: dict[str, list[Run]]) -> Figure:
    """Return mean accuracy against the tokens generated and the tokens trained, means over runs."""
    figure = new_figure(8.4, 3.9)
    entries = []
    panels = figure.subplots(1, 2, sharey=True)
    for (arm, runs), style in zip(arms.items(), line_styles(len(arms)), strict=True):
        accuracy = scores(runs).mean(axis=0)
        spent = [[spent_at(run, at)[2:4] for at in rows] for run, rows in zip(runs, checkpoints(runs), strict=True)]
        tokens = np.array(spent).mean(axis=0) / 1e3
        for axes, values, what in zip(panels, tokens.T, SPENT[2:4], strict=True):
            (line,) = axes.plot(values, accuracy, **look(style))
            axes.set_xlabel(f"{what} (thousands)")
        entries.append((line, arm))
    panels[0].set_ylabel("accuracy")
    add_legend(figure, entries)
    return figure


def write_spent(study: Study, arms: dict[str, list[Run]], path: Path) -> None:
    """Write what each arm had spent when its mean accuracy first reached 99 % of each baseline's peak."""
    curves = {arm: scores(runs).mean(axis=0) for arm, runs in arms.items()}
    rows = []
    for baseline in study.baselines:
        threshold = 0.99 * curves[baseline].max()
        for arm, runs in arms.items():
            reached = np.flatnonzero(curves[arm] >= threshold)
            pairs = zip(runs, checkpoints(runs), strict=True)
            spent = [spent_at(run, rows_of_run[reached[0]]) for run, rows_of_run in pairs] if len(reached) else []
            means = [f"{statistics.mean(values):.4g}" for values in zip(*spent, strict=True)]
            rows.append([baseline, f"{threshold:.4f}", arm, *(means or ["never"] * len(SPENT))])
    write(path, ["baseline", "threshold", "arm", *SPENT], rows)


def spent_at(run: Run, at: dict[str, Any]) -> tuple[float, ...]:
    rows = [row for row in run.metrics if row["step"] <= at["step"]]
    generated = sum(row["pods/tokens/generated"] for row in rows)
    trained = sum(row["pods/tokens/trained"] for row in rows)
    return at["seconds"], at["step"], generated, trained, at["seconds"] / max(1, at["step"])


def write_crossings(study: Study, arms: dict[str, list[Run]], path: Path) -> None:
    """How many times sooner, and in how many times fewer steps, an arm is at the accuracies of `regimes.py`.

    The last row of a pair is the seconds of a step: also the other arm's over this arm's.
    """
    rows = []
    for claim, *pair in study.claims:
        runs = paired(arms, *pair)
        measures = []
        for level, unit in product((HALFWAY, HIGH), ("seconds", "step")):
            curves = [curve_over(runs_of_arm, unit) for runs_of_arm in runs]
            measures.append((f"{level:g}", unit, times_as_soon(claim, *curves, level)))
        arm_cost, other_cost = (seconds_a_step(runs_of_arm) for runs_of_arm in runs)
        cost = mean_ratio(claim, other_cost, arm_cost)._replace(first=arm_cost.mean(), second=other_cost.mean())
        measures.append(("", "seconds a step", cost))
        for level, unit, measure in measures:
            values = (measure.first, measure.second, measure.value, measure.low, measure.high)
            rows.append([claim, *pair, level, unit, str(len(runs[0])), *(f"{value:.4g}" for value in values)])
    header = ["claim", "arm", "against", "accuracy", "of", "seeds", "arm needs", "other needs", "ratio", "low", "high"]
    write(path, header, rows)


def seconds_a_step(runs: Iterable[Run]) -> np.ndarray:
    return np.array([spent_at(run, run.evals[-1])[-1] for run in runs])


def write_curves(names: Iterable[str], arms: dict[str, list[Run]], path: Path) -> None:
    """Write every evaluation of the arms of the first figure."""
    keys = ("due", "seconds", "step", "accuracy")
    rows = []
    for name in names:
        for run in sorted(arms[name], key=lambda run: run.path):
            about = {"arm": name, "seed": str(run.config["seed"])}
            rows += [about | {key: f"{point[key]:.6g}" for key in keys} for point in run.evals]
    write_rows(path, ("arm", "seed", *keys), rows)


def curve_over(runs: Iterable[Run], unit: str) -> Curve:
    """Return accuracy over seconds or steps."""
    curve = curve_of({run.path.name: [row | {"seconds": row[unit]} for row in run.evals] for run in runs}, "accuracy")
    assert curve is not None
    return curve


def write(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    print(path.name)
    for row in [header, *rows]:
        print("  ".join(f"{cell:>16}" for cell in row))


if __name__ == "__main__":
    main()
