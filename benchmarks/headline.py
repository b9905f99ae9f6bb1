"""Draw the README's figure from the study's curves: python benchmarks/headline.py

Accuracy against the training clock, the mean over seeds of each arm, with Student's 95 % interval at the end, where the
README compares them. Three arms have the same memory; the dashed one needs that of 16 rows.
Writes `docs/results/headline.png`, 1660 pixels wide, to be shown at 830.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from comparisons import RESULTS, curve, read_evaluations
from measuring import command_line
from pods_rl.report.arms import Curve
from pods_rl.report.figures import styled

STUDY = "equal_memory_4"
DASHED = ("grpo-16", "GRPO 16, which needs\n16 rows at once", "#80868b")
# PODS and the baseline have their colours of a report
BOLD = (
    ("pods-16-4", "PODS 16 \u2192 4", "#D55E00"),
    ("grpo-4", "GRPO 4", "#5f6368"),
    ("grpo-4-trl", "TRL's GRPO 4", "#0072B2"),
)
LABEL = 3  # seconds between the end of a line and its label


@styled
def draw(curves: dict[str, Curve]) -> Figure:
    """Return the figure."""
    figure = Figure(figsize=(8.3, 4.1), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize=12)
    name, label, colour = DASHED
    arm = curves[name]
    axes.plot(arm.times, arm.mean, color=colour, linewidth=1.6, linestyle=(0, (4, 3)))
    axes.text(arm.times[-1] + LABEL, arm.mean[-1] + 0.01, label, color=colour, fontsize=12, va="bottom")
    for name, label, colour in BOLD:
        arm = curves[name]
        low, high = arm.interval
        axes.plot(arm.times, arm.mean, color=colour, linewidth=3.4)
        axes.vlines(arm.times[-1], low[-1], high[-1], color=colour, linewidth=1.4)
        text = f"{label}: {arm.mean[-1]:.0%}"
        axes.text(arm.times[-1] + LABEL, arm.mean[-1], text, color=colour, fontsize=14, weight="bold", va="center")
    axes.set_xlabel("seconds of training on one CPU core", fontsize=13)
    axes.set_ylabel("accuracy", fontsize=13)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlim(0, 148)  # with room for the labels
    axes.set_xticks(range(0, 101, 20))
    axes.set_ylim(0.15, 0.8)
    return figure


def main() -> None:
    command_line(__doc__).parse_args()
    arms = read_evaluations(RESULTS / STUDY / "curves.csv")
    figure = draw({name: curve(evaluated) for name, evaluated in arms.items()})
    figure.savefig(RESULTS / "headline.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
