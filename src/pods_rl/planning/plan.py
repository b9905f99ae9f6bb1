"""The text of a plan: the cost of a step by prompts and rollouts, and the steps that our studies saved."""

from __future__ import annotations

import csv
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LEGEND = """\
Selection: none trains every rollout (GRPO); prompt keeps the same number of
each prompt's rollouts; batch keeps rows of all prompts together. No signal:
trained rows whose advantage is 0. Cost: seconds a step, as a multiple of the
first line's in the same round: the median, and the quartiles of all rounds. A
setting pays off if it reaches an accuracy in that many steps fewer than the
first line. How many it saves only training shows: pods compare."""


@dataclass(frozen=True)
class Setting:
    """The prompts of a step, n rollouts of each, and m: the rows of a prompt where each keeps as many.

    Args:
        prompts: P.
        n: rollouts of each prompt.
        m: TRL's `num_generations`.
        selection: `none`, `prompt` or `batch`.
    """

    prompts: int
    n: int
    m: int
    selection: str

    @property
    def keys(self) -> dict[str, int | str | None]:
        """Return the recipe keys."""
        over_batch = self.selection == "batch"
        return {
            "num_generations": self.m,
            "num_rollouts": self.n,
            "selection": "batch" if over_batch else "prompt",
            "num_prompts": self.prompts if over_batch else None,
        }


@dataclass(frozen=True)
class Step:
    """A measured step: its seconds, and the share of its trained rows whose advantage is 0."""

    seconds: float
    without_signal: float


def studies_near(rows: int) -> list[dict[str, str]]:
    """Return the lines of `studies.csv` on steps that trained nearest to `rows` rows, by ratio.

    A line says how many times fewer steps one arm of a study needed than another, to an accuracy that both reach.

    >>> {study["rows"] for study in studies_near(20)}
    {'16'}
    """
    with Path(__file__).with_name("studies.csv").open(encoding="utf-8", newline="") as file:
        studies = list(csv.DictReader(file))
    # By ratio, 16 rows are as near to 8 as to 32.
    nearest = min((study["rows"] for study in studies), key=lambda count: abs(math.log(int(count) / rows)))
    return [study for study in studies if study["rows"] == nearest]


@dataclass(frozen=True)
class Plan:
    """The measurements of a plan.

    Args:
        rows: trained in a step.
        steps: of each setting, in rounds; the first setting is plain GRPO.
        facts: of the policy and its rollouts, as text by name.
        memory: of a GPU, the peak of each setting in GiB.
    """

    rows: int
    steps: Mapping[Setting, Sequence[Step]]
    facts: Mapping[str, str]
    memory: Mapping[Setting, float]

    def cost(self, setting: Setting) -> tuple[float, float, float]:
        """Return how many times as long a step takes as one of plain GRPO in the same round.

        The median of the rounds, and their first and third quartile.

        >>> grpo, prompt = Setting(1, 8, 8, "none"), Setting(1, 32, 8, "prompt")
        >>> plan = Plan(8, {grpo: [Step(1.0, 0), Step(2.0, 0)], prompt: [Step(1.5, 0), Step(3.0, 0)]}, {}, {})
        >>> plan.cost(prompt)
        (1.5, 1.5, 1.5)
        """
        base = next(iter(self.steps.values()))
        # The steps of a round follow each other, so a slower machine slows both sides of a ratio.
        ratios = [step.seconds / first.seconds for step, first in zip(self.steps[setting], base, strict=True)]
        low, median, high = np.percentile(ratios, (25, 50, 75)).tolist()
        return median, low, high

    def lines(self) -> list[str]:
        """Return the plan as text of 80 columns."""
        lines = []
        for name, text in self.facts.items():
            lines += textwrap.wrap(text, 80, initial_indent=f"{name:<12} ", subsequent_indent=" " * 13)
        titles = ["selection", "prompts x n", "no signal", "s a step", "cost", "pays off with"]
        widths = [11, 13, 11, 10, 19, 11]
        if self.memory:
            titles.append("GiB")
            widths.append(5)
        lines += ["", f"Steps that train {self.rows} rows, measured here:", _aligned_row(titles, widths)]
        for setting, steps in self.steps.items():
            cells = [setting.selection, f"{setting.prompts} x {setting.n}"]
            cells.append(f"{np.mean([step.without_signal for step in steps]):.0%}")
            cells.append(f"{np.mean([step.seconds for step in steps]):.3g}")
            if setting.selection != "none":
                cost, low, high = self.cost(setting)
                # A step that takes 1.25 times as long pays off with 20 % fewer steps.
                cells += [f"{cost:.2f} ({low:.2f}-{high:.2f})", f"{max(1 - 1 / cost, 0):.0%} fewer"]
            else:
                cells += ["1.00", ""]
            if self.memory:
                cells.append(f"{self.memory[setting]:.1f}")
            lines.append(_aligned_row(cells, widths))
        lines += ["", *LEGEND.splitlines()]
        studies = studies_near(self.rows)
        lines += ["", f"In our studies with {studies[0]['rows']} rows a step (one small policy, docs/results.md):"]
        widths = [18, 18, 20, 14]
        lines.append(_aligned_row(["this selection", "against", "times fewer steps", "study"], widths))
        for study in studies:
            fewer, least, most = (f"{float(study[name]):.2f}" for name in ("fewer_steps", "low", "high"))
            cells = [study["arm"], study["rival"], f"{fewer} [{least}, {most}]", study["study"]]
            lines.append(_aligned_row(cells, widths))
        return lines

    def experiment(self, base: str) -> list[str]:
        """Return an experiment that compares the settings over a recipe."""
        lines = ["name: settings", f"base: {base}", "baseline: none", "seeds: 3", "arms:"]
        for setting in self.steps:
            name = "none" if setting.selection == "none" else f"{setting.selection}-{setting.prompts}x{setting.n}"
            keys = ", ".join(f"{key}: {'null' if value is None else value}" for key, value in setting.keys.items())
            lines.append(f"  {name}: {{{keys}}}")
        return lines


def _aligned_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
