"""A report as one HTML page (no network, no script but ours, everything from outside escaped) and as Markdown."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from .analysis import Analysis
from .charts import Chart
from .ledger import Ledger
from .tables import Table
from .text import encodable, markdown, plain

_SCRIPTS = ("vendor/uPlot.iife.min.js", "templates/figures.js", "templates/ledger.js", "templates/start.js")
_LIVE = "templates/watch.js"
_FOLDED = 24  # rows of a table from which it is closed at first


@dataclass(frozen=True, eq=False)
class ReportFiles:
    """The content of a report, and the paths of its files; a page that waits for runs has a title and a headline."""

    folder: Path
    title: str
    headlines: tuple[str, ...]
    notes: tuple[str, ...] = ()
    method: tuple[str, ...] = ()
    tables: Mapping[str, Table] = field(default_factory=dict)
    charts: Mapping[str, Sequence[Chart]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    analysis: Analysis | None = None

    @property
    def html(self) -> Path:
        return self.folder / "report.html"

    @property
    def markdown(self) -> Path:
        return self.folder / "report.md"

    @property
    def csv(self) -> dict[str, Path]:
        """By table: final, pairs, speedup, ablations, curves, runs, config."""
        return {name: self.folder / f"{name}.csv" for name, table in self.tables.items() if table.keys}

    @property
    def speedup(self) -> Path:
        return self.csv["speedup"]


def to_html(report: ReportFiles, *, live: bool = False) -> str:
    """Return the page. The template escapes names, logs and model output, and nothing but our own style and scripts.

    Args:
        report: what to show.
        live: with the script that `pods watch` serves, and permission to ask its server.
    """
    style = _asset("vendor/uPlot.min.css") + _asset("templates/report.css")
    scripts = [_asset(name) for name in (*_SCRIPTS, *([_LIVE] if live else []))]
    # trusted: files of the package
    return _render(report, content_security_policy(style, *scripts, live=live), Markup(style), [*map(Markup, scripts)])


def to_parts(report: ReportFiles) -> str:
    """Return the page without style, scripts and data: what `pods watch` exchanges in a page that is open."""
    return _render(report, "", Markup(""), [])


def _render(report: ReportFiles, policy: str, style: Markup, scripts: Sequence[Markup]) -> str:
    text = _template().render(
        report=report,
        tables=report.tables,
        policy=policy,
        style=style,
        scripts=scripts,
        island=island,
        folded=_FOLDED,
    )
    return encodable(text)


def content_security_policy(style: str, *scripts: str, live: bool = False) -> str:
    """Allow data: images and, by their hashes, one style sheet and these scripts; style attributes for the bars.

    >>> content_security_policy("")[:84]
    "default-src 'none'; img-src data:; style-src-attr 'unsafe-inline'; style-src-elem 's"
    """
    parts = ["default-src 'none'", "img-src data:", "style-src-attr 'unsafe-inline'", f"style-src-elem {_hash(style)}"]
    parts += [f"script-src {' '.join(map(_hash, scripts))}", "require-trusted-types-for 'script'"]
    parts += ["connect-src 'self'"] if live else []
    return "; ".join([*parts, "base-uri 'none'", "form-action 'none'"])


def island(name: str, value: object) -> Markup:
    """Return data for the page's scripts; nothing in it ends the element."""
    return Markup(f'<script type="application/json" id="{name}">{to_island(value)}</script>')


def to_island(value: object) -> str:
    """Return JSON without a character that could end an element; NaN and infinity become null."""
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
    try:
        text = encode(value)
    except ValueError:  # rare, so that a large ledger is not copied in vain
        text = encode(_without_nan(value))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return encodable(text)


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"plain": plain}
    return environment.from_string(_asset("templates/report.html.j2"))


def to_markdown(report: ReportFiles, pictures: Sequence[str] = ()) -> str:
    """Return the headlines, the notes, every table that has rows, and pictures by their paths from the report."""
    parts = [f"# PODS report: {markdown(report.title)}", f"**{markdown(report.headlines[0])}**"]
    parts += [_bullets(report.headlines[1:]), _bullets(report.notes)]
    for table in report.tables.values():
        if table.cells():
            parts += [f"## {markdown(table.title)}", table.to_markdown(), markdown(table.note)]
    parts += [f"![{path.rpartition('/')[2]}]({path})" for path in pictures]
    parts += ["## How these numbers were computed", _bullets(report.method)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {markdown(line)}" for line in lines)
