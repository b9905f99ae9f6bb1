"""Which arms a figure draws, which of them it names, and which are grey."""

from __future__ import annotations

import math

from .ablations import setting_of
from .analysis import Analysis
from .arms import Arm
from .figures import CROWD, MOST_BARS, Line
from .style import Role


def roles_of(analysis: Analysis) -> dict[str, Role]:
    """The role of each arm, by name.

    Up to ``CROWD`` arms all are named. Beyond, named are the baseline, the arm that the ablations vary, the other
    arms of plain GRPO, the one that reaches the level soonest and the one that ends highest (so that the best are never
    grey), then others in their order: five at most.
    """
    reference = analysis.ablations[0].reference if analysis.ablations else None
    named = [analysis.baseline, reference, *_plain(analysis), *_best(analysis), *analysis.arms]
    curved = [arm for arm in dict.fromkeys(named) if arm and arm.curve]
    shown = {arm.name for arm in (curved if len(curved) <= CROWD else curved[: CROWD - 1])}

    def role(arm: Arm) -> Role:
        if arm is analysis.baseline:
            return "baseline"
        if arm is reference and (arm.name in shown or not arm.curve):
            return "reference"
        return "arm" if arm.name in shown or not arm.curve else "other"

    return {arm.name: role(arm) for arm in analysis.arms}


def _plain(analysis: Analysis) -> list[Arm]:
    settings = {arm.name: setting_of(arm.config) for arm in analysis.arms}
    return [arm for arm in analysis.arms if (setting := settings[arm.name]) and setting.is_plain][:2]


def _best(analysis: Analysis) -> list[Arm]:
    curved = [arm for arm in analysis.arms if arm.name in analysis.finals]
    soonest = [arm for arm in curved if arm is not analysis.baseline and analysis.speedup_of(arm.name)]
    best = [max(soonest, key=lambda arm: _speed(analysis, arm))] if soonest else []
    return [*best, *([max(curved, key=lambda arm: analysis.finals[arm.name].final)] if curved else [])]


def _speed(analysis: Analysis, arm: Arm) -> float:
    result = analysis.speedup_of(arm.name)
    return result.speedup if result else 0.0


def lines_of(analysis: Analysis, metric: str) -> list[Line]:
    """The arms that a figure of a metric over training time draws."""
    lines = []
    roles = roles_of(analysis)
    for arm in analysis.arms:
        curve, result = arm.curves(analysis.metric).get(metric), analysis.speedup_of(arm.name)
        if curve:
            crossing = result.arm_time if result and metric == analysis.metric else math.inf
            lines.append(Line(arm.label, curve.seconds, curve.scores, roles[arm.name], crossing, curve.errors))
    return lines


def bars_of(analysis: Analysis) -> list[Arm]:
    """The arms that a figure of bars draws: all, or of very many those that are named, then others in their order."""
    roles = roles_of(analysis)
    chosen = sorted(analysis.arms, key=lambda arm: roles[arm.name] == "other")[:MOST_BARS]
    return [arm for arm in analysis.arms if arm in chosen]
