"""Draw the README's figure from the study's curves: python benchmarks/headline.py

Accuracy against the training clock, one line an arm: the mean over seeds, with Student's 95 % interval as a band.
Writes `docs/results/headline.png`, 1660 pixels wide, to be shown at 830.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from comparisons import RESULTS, Curves, read_curves
from measuring import command_line
from pods_rl.report.figures import styled
from pods_rl.report.intervals import t_band
from pods_rl.report.statistics import mean_curve

END = 60  # seconds; TRL's runs went on to 120
SEEDS = (1, 2, 3, 4, 5)  # those that all arms have
# in the order of the lines' ends; PODS and the baseline have their colours of a report
ARMS = {
    "1x16-n16@0.0002": ("GRPO 16: trains on 16 rows", "#009E73"),
    "1x4-n16@0.0002": ("PODS 16 \u2192 4: trains on 4 rows", "#D55E00"),
    "1x4-n4@0.0002": ("GRPO 4: trains on 4 rows", "#5f6368"),
    "1x16-n16-trl@0.0002": ("GRPO 16 with TRL's own step", "#0072B2"),
}


@styled
def draw(curves: dict[str, Curves]) -> Figure:
    """Return the figure."""
    figure = Figure(figsize=(8.3, 4.1), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize=12)
    for name, (label, colour) in ARMS.items():
        arm = curves[name].of(SEEDS)
        seconds = mean_curve(arm.seconds)
        accuracy = mean_curve(arm.accuracy)
        low, high = t_band(arm.accuracy)
        axes.plot(seconds, accuracy, color=colour, linewidth=2.6, label=label)
        axes.fill_between(seconds, low, high, color=colour, alpha=0.14, linewidth=0)
    axes.set_xlabel("seconds of training on one CPU core", fontsize=13)
    axes.set_ylabel("accuracy", fontsize=13)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlim(0, END)
    axes.legend(fontsize=12.5, loc="upper left")
    return figure


def main() -> None:
    command_line(__doc__).parse_args()
    draw(read_curves(RESULTS / "regimes" / "curves.csv")).savefig(RESULTS / "headline.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
