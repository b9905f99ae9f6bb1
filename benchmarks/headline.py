"""Draw the README's figure from the curves of a study: python benchmarks/headline.py

Accuracy against the training clock, the mean over seeds of each arm, with Student's 95 % interval at the end, where the
README compares them. A label has the accuracy at the end, and the greatest memory of the update in megabytes.
Writes `docs/results/headline.png`, 1660 pixels wide, to be shown at 830.
"""

from __future__ import annotations

import csv

import matplotlib as mpl
from matplotlib.figure import Figure

from comparisons import RESULTS, curve, read_evaluations
from measuring import command_line
from pods_rl.report.arms import Curve

STUDY = "batch_words_16"
# Name, label, colour as in a report, and where the label stands at the end of the line: two of them end close together
ARMS = (
    ("batch-4x16", "PODS", "#D55E00", "bottom"),
    ("grpo-16", "GRPO, shared prefixes", "#5f6368", "top"),
    ("trl-16", "TRL's GRPO", "#0072B2", "center"),
)
LABEL = 1  # seconds between the end of a line and its label
STYLE = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8ea",
    "axes.edgecolor": "#8a9099",
}


@mpl.rc_context(STYLE)
def draw(curves: dict[str, Curve], megabytes: dict[str, float]) -> Figure:
    """Return the figure."""
    figure = Figure(figsize=(8.3, 4.1), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize=12)
    for name, label, colour, place in ARMS:
        arm = curves[name]
        low, high = arm.interval
        axes.plot(arm.times, arm.mean, color=colour, linewidth=3.4)
        axes.vlines(arm.times[-1], low[-1], high[-1], color=colour, linewidth=1.4)
        text = f"{label}\n{arm.mean[-1]:.0%}, {megabytes[name]:.0f} MB"
        axes.text(arm.times[-1] + LABEL, arm.mean[-1], text, color=colour, fontsize=13, weight="bold", va=place)
    axes.set_xlabel("seconds of training on one CPU core", fontsize=13)
    axes.set_ylabel("accuracy", fontsize=13)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlim(0, 63)  # with room for the labels
    axes.set_xticks(range(0, 41, 8))
    return figure


def main() -> None:
    command_line(__doc__).parse_args()
    arms = read_evaluations(RESULTS / STUDY / "curves.csv")
    with (RESULTS / STUDY / "memory.csv").open(newline="", encoding="utf-8") as file:
        megabytes = {row["arm"]: float(row["greatest_mb"]) for row in csv.DictReader(file)}
    figure = draw({name: curve(evaluated) for name, evaluated in arms.items()}, megabytes)
    figure.savefig(RESULTS / "headline.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
