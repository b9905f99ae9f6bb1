"""Check the numbers of the pages against the CSV files that they rest on: python benchmarks/pages.py

Reads the README and the pages below. Two kinds of numbers are checked, by what is printed:

- an interval with its value, such as `1.63 [1.27, 2.19]`: a row of some `comparisons.csv` or of `predictions.csv` has
  these three numbers, or those of the two arms swapped;
- a row of a table of arms: one arm of the study has all of its numbers, by the titles of their columns.

Prints what no CSV has, and the nearest rows of the same value. `docs/results.md` names the commands that make the
files.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from comparisons import AT_END, COST, OVER_TIME, RESULTS, STUDIES
from measuring import command_line

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/results.md", "docs/how-it-works.md", "docs/metrics.md")
NUMBER = r"-?\d+\.\d+"
INTERVAL = re.compile(rf"\[({NUMBER}|inf), ({NUMBER}|inf)\]")
_BEFORE = 60  # characters before an interval in which its value stands
_TITLES = {COST: r"step, s$", AT_END: r"after \d+ s$", OVER_TIME: "accuracy over time$"}


class Source(NamedTuple):
    """A value with its interval, and where it comes from."""

    value: float
    low: float
    high: float
    place: str

    def readings(self) -> Iterator[tuple[float, float, float]]:
        """Yield the three numbers as they are, and with the two arms swapped: as a difference and as a ratio."""
        yield self.value, self.low, self.high
        yield -self.value, -self.high, -self.low
        if min(self.value, self.low) > 0:
            yield 1 / self.value, 1 / self.high, 1 / self.low


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sources() -> list[Source]:
    """Return every value with an interval in the results."""
    found = []
    files = [(study, RESULTS / study / "comparisons.csv") for study in STUDIES]
    files.append(("equal_rows_32, quiet seeds", RESULTS / "equal_rows_32" / "quiet.csv"))
    for study, path in files:
        for row in rows_of(path):
            place = f"{study}: {row['arm']} against {row['rival']}, {row['measure']}"
            found.append(Source(float(row["value"]), float(row["low"]), float(row["high"]), place))
    for row in rows_of(RESULTS / "plan" / "predictions.csv"):
        place = f"plan/predictions.csv: {row['study']}, {row['arm']}"
        found.append(Source(float(row["value"]), float(row["low"]), float(row["high"]), place))
    return found


def is_printed(text: str, number: float) -> bool:
    """Whether a number is printed like this. One that lies half-way may be rounded either way."""
    digits = len(text.partition(".")[2])
    if math.isinf(number) or math.isnan(number):
        return text == str(number)
    return abs(float(text) - number) <= 0.5 * 10**-digits * (1 + 1e-4)


def wrong_intervals(text: str, known: Sequence[Source]) -> Iterator[str]:
    """Yield each interval of a page that no source has."""
    for match in INTERVAL.finditer(text):
        before = text[max(0, match.start() - _BEFORE) : match.start()]
        numbers = re.findall(NUMBER, before)
        value = numbers[-1] if numbers else "nan"
        printed = (value, *match.groups())
        near = []
        for source in known:
            for reading in source.readings():
                if all(map(is_printed, printed, reading)):
                    break
                if is_printed(value, reading[0]):
                    near.append(f"{source.place} [{reading[1]:.4f}, {reading[2]:.4f}]")
            else:
                continue
            break
        else:
            yield f"{value} {match.group()}; with this value: {'; '.join(near[:3]) or 'nothing'}"


def values_by_arm(study: str) -> dict[str, dict[str, set[float]]]:
    """Return the values of each arm of a study by measure. One measure may have several, in pairs of other lengths."""
    arms: dict[str, dict[str, set[float]]] = {}
    for row in rows_of(RESULTS / study / "comparisons.csv"):
        for arm in ("arm", "rival"):
            of_arm = arms.setdefault(row[arm], {})
            of_arm.setdefault(row["measure"], set()).add(float(row[f"{arm}_value"]))
    return arms


def measure_of(title: str) -> str:
    """Return the measure that a column of a table has; empty if it has none."""
    target = re.fullmatch(r"(?:seconds )?to (\d+) %", title)
    if target:
        return f"seconds to {int(target[1]) / 100:g}"
    for measure, pattern in _TITLES.items():
        if re.search(pattern, title):
            return measure
    return ""


def wrong_rows(text: str) -> Iterator[str]:
    """Yield each row of a table of arms whose numbers no arm has of the study that is named before it."""
    study = ""
    measures: list[str] = []
    for line in text.splitlines():
        named = re.search(r"\(results/([\w/]+)/comparisons\.csv\)", line)
        if line.startswith("#"):
            study = ""
        if named:
            study = named[1]
        if not line.startswith("|"):
            measures = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not measures:  # the titles
            measures = [measure_of(cell) for cell in cells]
            continue
        if not study or not any(measures) or set(line) <= set("|- :"):
            continue
        if not any(_has(arm, measures, cells) for arm in values_by_arm(study).values()):
            yield f"{study}: {line}"


def _has(arm: dict[str, set[float]], measures: Sequence[str], cells: Sequence[str]) -> bool:
    """Whether an arm has all the numbers of a row."""
    for measure, cell in zip(measures, cells, strict=True):
        text = "inf" if cell == "never" else cell
        if measure and not any(is_printed(text, value) for value in arm.get(measure, ())):
            return False
    return True


def count(text: str) -> int:
    return len(INTERVAL.findall(text))


def main() -> None:
    command_line(__doc__).parse_args()
    known = sources()
    wrong = 0
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        lines = [*wrong_intervals(text, known), *wrong_rows(text)]
        wrong += len(lines)
        print(f"{name}: {count(text)} intervals, {len(lines)} numbers that no CSV has")
        for line in lines:
            print(f"  {line}")
    raise SystemExit(min(wrong, 1))


if __name__ == "__main__":
    main()
