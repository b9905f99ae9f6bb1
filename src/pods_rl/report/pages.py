"""A report as one HTML page (no network, no script but ours, everything from outside escaped) and as Markdown."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from .analysis import Analysis
from .curves import ACCURACIES, LENGTH
from .figures import Picture
from .interactive import Chart
from .ledger import Page
from .reasons import NOTE
from .tables import Table
from .text import capital, encodable, markdown, number, plain, words


@dataclass(frozen=True, eq=False)
class ReportFiles:
    """The content of a report, and the paths of its files."""

    folder: Path
    title: str
    analysis: Analysis
    headlines: tuple[str, ...]
    notes: tuple[str, ...]
    method: tuple[str, ...]
    tables: Mapping[str, Table]
    images: Mapping[str, Picture]
    charts: Mapping[str, Sequence[Chart]]
    ledger: Page

    @property
    def html(self) -> Path:
        return self.folder / "report.html"

    @property
    def png(self) -> Path:
        return self.folder / "report.png"

    @property
    def markdown(self) -> Path:
        return self.folder / "report.md"

    @property
    def figures(self) -> dict[str, Path]:
        """PNG by name: curves, threshold, phases, steps, format_accuracy, ablation-n, ..."""
        return {name: self.folder / "figures" / f"{name}.png" for name in self.images}

    @property
    def csv(self) -> dict[str, Path]:
        """By table: speedup, final, scores, ablations, curves, phases, runs, config."""
        return {name: self.folder / f"{name}.csv" for name in self.tables}

    @property
    def speedup(self) -> Path:
        return self.csv["speedup"]


def to_html(report: ReportFiles) -> str:
    """The page. The template escapes names, logs and model output; only style sheets and scripts are inserted whole."""
    style = _asset("vendor/uPlot.min.css") + _asset("templates/report.css")
    scripts = [_asset("vendor/uPlot.iife.min.js"), _asset("templates/figures.js")] if report.charts else []
    scripts += [_asset("templates/ledger.js")] if report.ledger.groups else []
    scripts += [_START] if scripts else []
    ledger = report.ledger
    labels = {arm.name: arm.label for arm in report.analysis.arms}
    text = _template().render(
        report=report,
        tables=report.tables,
        images=report.images,
        page=ledger,
        csp=content_security_policy(style, *scripts),
        style=Markup(style),  # trusted: files of the package
        scripts=[Markup(script) for script in scripts],
        island=island,
        sections=_sections(report),
        score_metrics=[name for name in (*ACCURACIES, LENGTH) if name in report.images],
        labels=labels,
        variance_note=NOTE,
        environment=_environment(report.analysis),
    )
    return encodable(text)


def content_security_policy(style: str, *scripts: str) -> str:
    """Allow only data: images and, by their hashes, one style sheet and these scripts; style attributes for the bars.

    >>> content_security_policy("")[:84]
    "default-src 'none'; img-src data:; style-src-attr 'unsafe-inline'; style-src-elem 's"
    """
    parts = ["default-src 'none'", "img-src data:", "style-src-attr 'unsafe-inline'", f"style-src-elem {_hash(style)}"]
    if scripts:
        parts += [f"script-src {' '.join(map(_hash, scripts))}", "require-trusted-types-for 'script'"]
    return "; ".join([*parts, "base-uri 'none'", "form-action 'none'"])


def island(name: str, value: object) -> Markup:
    """Return data for the page's scripts; nothing in it ends the element, and NaN and infinity become null."""
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
    try:
        text = encode(value)
    except ValueError:  # rare, so that a large ledger is not walked through in vain
        text = encode(_without_nan(value))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{name}">{text}</script>')


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_START = "for (const start of window.pods ?? []) start(document);"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"num": number, "plain": plain, "words": words, "capital": capital}
    return environment.from_string(_asset("templates/report.html.j2"))


def _sections(report: ReportFiles) -> list[tuple[str, str]]:
    tables, ledger = report.tables, report.ledger
    shown = [
        ("arms", "Arms", True),
        ("speedup", "Speedup", tables["speedup"].cells()),
        ("ablations", "Ablations", tables["ablations"].rows),
        ("scores", "Scores", tables["scores"].cells()),
        ("phases", "Phases", tables["phases"].rows),
        ("steps", "Steps", "steps" in report.images),
        ("ledger", "Ledger", ledger.groups or ledger.unreadable),
        ("runs", "Runs", tables["runs"].rows),
        ("config", "Settings", tables["config"].rows),
        ("method", "Method", True),
    ]
    return [(key, name) for key, name, there in shown if there]


def _environment(analysis: Analysis) -> list[tuple[str, str]]:
    """Return the first run's environment.json, one level deep."""
    first = next((run.environment for run in analysis.runs if run.environment), {})
    flat: list[tuple[str, str]] = []
    for key, value in first.items():
        entries = value.items() if isinstance(value, dict) else [("", value)]
        flat += [(plain(f"{key} {name}"), plain(entry, limit=300)) for name, entry in entries]
    return flat


def to_markdown(report: ReportFiles) -> str:
    """The headline, the notes, every table that has rows and every figure, each with its note."""
    images = report.images
    parts = [f"# PODS report: {markdown(report.title)}", f"**{markdown(report.headlines[0])}**"]
    parts += _bullets(report.headlines[1:])
    parts += ["![main figure](figures/curves.png)", markdown(images["curves"].note), *_bullets(report.notes)]
    for table in report.tables.values():
        if table.cells():
            parts += [f"## {markdown(table.title)}", table.to_markdown()]
            parts += [markdown(table.note)] if table.note else []
    parts += ["## Figures"]
    for name, image in images.items():
        if name != "curves":
            parts += [f"![{markdown(image.alt)}](figures/{name}.png)", markdown(image.note)]
    parts += ["## How these numbers were computed", *_bullets(report.method)]
    return "\n\n".join(parts) + "\n"


def _bullets(lines: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {markdown(line)}" for line in lines)] if lines else []
