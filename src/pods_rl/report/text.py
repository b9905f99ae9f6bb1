"""Formatting and parsing of names, numbers and times. Names may be hostile: each output escapes them in its own way."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup

from ..text import safe_text

_NOT_ON_A_LINE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+")
_CSV_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]#|~$])")

# what a spreadsheet runs as a formula, and what is already marked as text
_SPREADSHEET_FORMULA = re.compile(r"'*\s*[=+\-@＝＋－＠]")

_METRIC_WORDS = {
    "both_accuracy": "answer and format right",
    "mean_completion_tokens": "mean completion length (tokens)",
}
_LARGEST_NUMBER = 1e15  # squares and sums of logged numbers below it stay finite
_LONGEST_LINE = 2000  # characters of a line

TIME_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}  # seconds in each unit of time


def one_line(text: object, limit: int = 60) -> str:
    """Return a name on one line. Control characters, marks of direction and lone surrogates become spaces.

    >>> one_line("grpo" + chr(10) + chr(27) + "[31m"), one_line("abcdef", limit=4)
    ('grpo [31m', 'abc…')
    """
    line = _NOT_ON_A_LINE.sub(" ", str(text)).strip()
    return line if len(line) <= limit else line[: limit - 1] + "…"


def html_text(value: Any) -> Any:
    """Return text of the page on one line, which the template escapes; our own markup and numbers as they are."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    # no line ends between a number and its percent sign
    return one_line(value, _LONGEST_LINE).replace(" %", "\u00a0%")


def markdown(text: object) -> str:
    """Return text for Markdown, on one line.

    >>> markdown("a|b <i>")
    'a\\\\|b &lt;i&gt;'
    """
    return _MARKDOWN.sub(r"\\\1", html.escape(one_line(text, _LONGEST_LINE), quote=False))


def terminal(text: object) -> str:
    """Return text for `console().print`, on one line."""
    return safe_text(one_line(text, _LONGEST_LINE))


def csv_text(text: str) -> str:
    """Return text for a CSV: one that a spreadsheet would run as a formula begins with an apostrophe."""
    return f"'{text}" if _SPREADSHEET_FORMULA.match(text) and not _CSV_NUMBER.fullmatch(text) else text


def as_text(value: Any) -> str:
    """Return a setting as text: any other value as JSON with sorted keys, or as Python writes it."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def words(metric: str) -> str:
    """Return a metric's name for display."""
    return _METRIC_WORDS.get(metric) or one_line(metric).replace("_", " ")


def unit_for(seconds: float) -> str:
    """Return the unit in which a range of time reads best: s below 5 minutes, min below 3 hours, h from there.

    >>> unit_for(150), unit_for(1800), unit_for(21600)
    ('s', 'min', 'h')
    """
    if seconds >= 3 * 3600:
        return "h"
    if seconds > 300:
        return "min"
    return "s"  # also for NaN


def duration(seconds: float, unit: str | None = None) -> str:
    """Return a time with its unit. Give ``unit`` if several times are compared; by default the unit fits the time.

    >>> duration(42.31), duration(5400), duration(5400, "h"), duration(float("nan"))
    ('42.3 s', '90.0 min', '1.50 h', '–')
    """
    if not math.isfinite(seconds):
        return "–"
    unit = unit or unit_for(seconds)
    digits = 2 if unit == "h" else 1
    return f"{seconds / TIME_UNITS[unit]:.{digits}f} {unit}"


def finite(value: object) -> float | None:
    """Return a logged value as a number; None for null, text, NaN, infinity and numbers of more than 15 digits.

    >>> finite("0.5"), finite(None), finite("x"), finite(float("nan")), finite(True)
    (0.5, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < _LARGEST_NUMBER else None  # false for NaN


def tally(counts: Iterable[tuple[str, int]]) -> str:
    """Return how many there are of each state, such as ``2 failed, 1 stopped``."""
    return ", ".join(f"{count} {one_line(state, limit=20)}" for state, count in counts)


def listed(names: Sequence[str]) -> str:
    """Return the first six names on one line, and how many more there are."""
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(map(one_line, names[:6])) + more


def finite_numbers(values: Iterable[object]) -> list[float]:
    """Return the numbers among logged values."""
    return [number for number in map(finite, values) if number is not None]


def rounded(value: object, digits: int = 5) -> float | None:
    """Return a number rounded to significant digits; None if the value is not a number."""
    number = finite(value)
    return None if number is None else significant(number, digits)


def significant(number: float, digits: int = 5) -> float:
    """Return a number rounded to significant digits."""
    return float(f"{number:.{digits}g}")


def number_text(value: object, digits: int = 3) -> str:
    """Format a number, or a dash if there is none.

    >>> number_text(0.80761, 4), number_text(float("nan")), number_text(None), number_text(12), number_text(-0.0001)
    ('0.8076', '–', '–', '12', '0.000')
    """
    if value is None or value == "":
        return "–"
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    text = f"{value:.{digits}f}"
    return text if text.strip("-0.") else text.removeprefix("-")  # no negative zero


def signed(value: float, digits: int) -> str:
    """Format a difference with its sign.

    >>> signed(5.25, 1), signed(-0.5, 1), signed(-0.01, 1)
    ('+5.2', '-0.5', '0.0')
    """
    text = number_text(value, digits)
    return f"+{text}" if value > 0 and text.strip("0.") else text


def interval(low: float, high: float, digits: int) -> str:
    """Format an interval, such as ``[1.00, 2.67]``."""
    return f"[{number_text(float(low), digits)}, {number_text(float(high), digits)}]"


def with_interval(value: str, low: float, high: float, digits: int) -> str:
    """Return a formatted number, followed by its interval if it has one."""
    return value if math.isnan(low) or math.isnan(high) else f"{value} {interval(low, high, digits)}"
