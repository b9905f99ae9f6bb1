"""The report as one HTML file: no network, no script but ours, everything from outside escaped."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .analysis import Analysis
from .curves import ACCURACIES, LENGTH
from .ledger import Group, Page
from .pictures import Picture
from .tables import Table
from .text import encodable, number, plain
from .wording import words


def render(
    analysis: Analysis,
    tables: Mapping[str, Table],
    images: Mapping[str, Picture],
    page: Page,
    *,
    title: str,
    method: tuple[str, ...],
) -> str:
    """The page. The template escapes names, logs and model output; only our CSS and script go in as is."""
    script, style = _asset("ledger.js"), _asset("report.css")
    ledger_arms = list(dict.fromkeys(group.arm for group in page.groups))
    labels = {arm.name: arm.label for arm in analysis.arms}
    text = _template().render(
        csp=content_security_policy(style, script if page.groups else None),
        title=plain(title),
        style=Markup(style),  # ours, not from outside
        script=Markup(script),
        headline=analysis.headlines[0] if analysis.headlines else f"No evaluation of {analysis.metric} yet.",
        further=analysis.headlines[1:],
        notes=analysis.notes,
        ablation_images=[(f"ablation-{a.axis}", _capital(a.title)) for a in analysis.ablations],
        score_images=[(name, _capital(words(name))) for name in (*ACCURACIES, LENGTH) if name in images],
        sections=_sections(tables, images, page),
        tables=tables,
        images=images,
        page=page,
        labels=labels,
        ledger_arms=[labels[arm] for arm in ledger_arms],
        run_index={run: index for index, run in enumerate(page.runs)},
        ledger_index={arm: index for index, arm in enumerate(ledger_arms)},
        strip=strip,
        environment=_environment(analysis),
        method=method,
    )
    return encodable(text)


def content_security_policy(style: str, script: str | None) -> str:
    """Nothing but data: images and, by their hashes, one style sheet and one script; style attributes for the bars.

    >>> content_security_policy("", None)[:84]
    "default-src 'none'; img-src data:; style-src-attr 'unsafe-inline'; style-src-elem 's"
    """
    parts = ["default-src 'none'", "img-src data:", "style-src-attr 'unsafe-inline'", f"style-src-elem {_hash(style)}"]
    if script is not None:
        parts += [f"script-src {_hash(script)}", "require-trusted-types-for 'script'"]
    return "; ".join([*parts, "base-uri 'none'", "form-action 'none'"])


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def strip(group: Group) -> list[tuple[int, bool]]:
    """Height in percent and kept or not, for the bar of each rollout; equal rewards are half height."""
    rewards = [rollout.reward for rollout in group.rollouts if not math.isnan(rollout.reward)]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    span = high - low

    def height(reward: float) -> int:
        if math.isnan(reward):
            return 0
        return round(12 + 88 * (reward - low) / span) if span > 0 else 50

    return [(height(rollout.reward), rollout.kept) for rollout in group.rollouts]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["num"] = number
    return environment.from_string(_asset("report.html.j2"))


def _sections(tables: Mapping[str, Table], images: Mapping[str, Picture], page: Page) -> list[tuple[str, str]]:
    shown = [
        ("arms", "Arms", True),
        ("speedup", "Speedup", tables["speedup"].cells()),
        ("ablations", "Ablations", tables["ablations"].rows),
        ("scores", "Scores", tables["scores"].cells()),
        ("phases", "Phases", tables["phases"].rows),
        ("steps", "Steps", "steps" in images),
        ("ledger", "Ledger", page.groups or page.unreadable),
        ("runs", "Runs", tables["runs"].rows),
        ("config", "Settings", tables["config"].rows),
        ("method", "Method", True),
    ]
    return [(key, name) for key, name, there in shown if there]


def _environment(analysis: Analysis) -> list[tuple[str, str]]:
    """The first run's environment.json, one level deep."""
    first = next((run.environment for arm in analysis.arms for run in arm.runs if run.environment), {})
    flat: list[tuple[str, str]] = []
    for key, value in first.items():
        entries = value.items() if isinstance(value, dict) else [("", value)]
        flat += [(plain(f"{key} {name}"), plain(entry, limit=300)) for name, entry in entries]
    return flat
