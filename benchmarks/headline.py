"""Draw the README's figure from the study's curves: python benchmarks/headline.py

Accuracy against the training clock, one line an arm: the mean over seeds, with Student's 95 % interval as a band.
Writes `docs/results/headline.png`, 1660 pixels wide, to be shown at 830.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from comparisons import RESULTS, curve, read_evaluations
from measuring import command_line
from pods_rl.report.arms import Curve
from pods_rl.report.figures import styled

STUDY = "equal_memory_4"
# in the order of the lines' ends; PODS and the baseline have their colours of a report
ARMS = {
    "grpo-16": ("GRPO 16, all 16 rows at once", "#009E73"),
    "pods-16-4": ("PODS 16 \u2192 4", "#D55E00"),
    "grpo-16-accumulated": ("GRPO 16, four rows at a time", "#CC79A7"),
    "grpo-4": ("GRPO 4", "#5f6368"),
    "grpo-4-trl": ("GRPO 4 with TRL's own step", "#0072B2"),
}


@styled
def draw(curves: dict[str, Curve]) -> Figure:
    """Return the figure."""
    figure = Figure(figsize=(8.3, 4.1), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize=12)
    for name, (label, colour) in ARMS.items():
        arm = curves[name]
        low, high = arm.interval
        axes.plot(arm.times, arm.mean, color=colour, linewidth=2.6, label=label)
        axes.fill_between(arm.times, low, high, color=colour, alpha=0.14, linewidth=0)
    axes.set_xlabel("seconds of training on one CPU core", fontsize=13)
    axes.set_ylabel("accuracy", fontsize=13)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlim(left=0)
    axes.legend(fontsize=12.5, loc="upper left")
    return figure


def main() -> None:
    command_line(__doc__).parse_args()
    arms = read_evaluations(RESULTS / STUDY / "curves.csv")
    figure = draw({name: curve(evaluated) for name, evaluated in arms.items()})
    figure.savefig(RESULTS / "headline.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
