"""Write the tables of the pages from the CSV files in docs/results/: python benchmarks/pages.py [--check]

A comment before a table names a file, and what the table's rows and columns are in it:

    <!-- table of equal_memory_4/comparisons.csv
    rows: grpo-4, pods-16-4
    columns: -, seconds a step, final accuracy, pods-16-4: final accuracy
    -->

A column `-`, titles and other text are written by hand. In `comparisons.csv` a row is an arm, a column is a measure,
and `ARM: measure` is ARM against the arm of the row, with its interval. In a table of several studies a row is the
folder of one, and a column `KIND against KIND: measure` takes the first arms whose names begin so. In other files the
words of a row, then those of the column but the last, are the first cells of a line, and the last word is one of its
columns, or `range`: `median (least-greatest)`. A row may begin with the folder of its file.

A column `OTHER.csv: ...` is of another file in the same folder.

Then checks the rest of the page: a value with an interval or a range, `1.63 [1.27, 2.19]` or `0.33 (0.33-0.34)`, must
be in one of the files, perhaps with its two arms swapped. A section that has a table or names a file has no other
number with decimals or of megabytes, but those of a paper: what was measured comes from a file. With `--check` nothing
is written, and a table that would change is an error too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from comparisons import RESULTS
from measuring import command_line, read_csv

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("results", "how-it-works", "how-do-i"))]
TABLE = re.compile(
    r"<!-- table of (?P<file>\S+)\nrows: (?P<rows>[^:]+)\ncolumns: (?P<columns>[^<>]+)\n-->\n\n"
    r"\|.*\n\|[-|]+\n(?P<body>(?:\|.*\n)+)"
)
NUMBER = r"-?\d+(?:\.\d+)?"
PLAIN = re.compile(r"\d[\d,]* MB|\d+\.\d+")
NOT_MEASURED = re.compile(
    r"<!--.*?-->|```.*?```|`[^`]*`|\]\([^)]*\)|arXiv [\d.]+|\([^()]+ in the paper\)|Qwen[\d.]+", re.DOTALL
)
SPREAD = re.compile(rf"({NUMBER})[^\d\[()]*[\[(]({NUMBER})(?:, |-)({NUMBER})[\])]")
SPREADS = (("value", "low", "high"), ("median", "least", "greatest"), ("difference", "ci_low", "ci_high"))

Line = dict[str, str]


# ------------------------------------------------------------------------------------------- tables


def written(page: str) -> str:
    """Return a page with the numbers of its tables from the files."""
    return TABLE.sub(with_numbers, page)


def with_numbers(table: re.Match[str]) -> str:
    file, rows, columns, body = table.groups()
    names = " ".join(columns.split()).split(", ")
    filled = []
    for row, text in zip(" ".join(rows.split()).split(", "), body.splitlines(), strict=True):
        path = RESULTS / file
        if not path.exists():
            study, _, row = row.partition(" ")
            path = RESULTS / study / file
        cells = [cell.strip() for cell in text.split("|")[1:-1]]
        for place, name in enumerate(names):
            if name == "-":
                continue
            other, _, column = name.rpartition(".csv: ")
            lines = read_csv(path.with_name(f"{other}.csv") if other else path)
            cell = cell_of_arm if "measure" in lines[0] else cell_of_line
            cells[place] = cell(lines, row, column)
        filled.append(f"| {' | '.join(cells)} |\n")
    return table[0].removesuffix(body) + "".join(filled)


def cell_of_arm(lines: list[Line], arm: str, column: str) -> str:
    """Return a cell from the comparisons of a study."""
    rival, pair, measure = column.rpartition(": ")
    ours, of_kinds, theirs = rival.partition(" against ")
    for line in lines:
        if line["measure"] != measure:
            continue
        if of_kinds and line["arm"].startswith(f"{ours}-") and line["rival"].startswith(f"{theirs}-"):
            return interval_of(line, 3 if "accuracy" in measure else 2)
        if pair and (line["arm"], line["rival"]) == (rival, arm):
            return interval_of(line, 3 if "accuracy" in measure else 2)
        if not pair and arm in (line["arm"], line["rival"]):
            return shown(measure, line["arm_value" if arm == line["arm"] else "rival_value"])
    if not pair:
        raise LookupError(f"no {measure} of {arm}")
    return "-"


def interval_of(line: Line, digits: int) -> str:
    value, low, high = (f"{float(line[name]):.{digits}f}" for name in ("value", "low", "high"))
    if value in ("inf", "nan"):  # the rival does not get there
        return "-" if low in ("inf", "nan") else f"over {low}"
    return f"{value} [{low}, {high}]"


def cell_of_line(lines: list[Line], row: str, column: str) -> str:
    """Return a cell from a file whose first columns are the keys of its lines."""
    *more, name = column.split()
    keys = [*row.split(), *more]
    for line in lines:
        if list(line.values())[: len(keys)] != keys:
            continue
        if name == "range":
            return f"{line['median']} ({line['least']}-{line['greatest']})".removesuffix(" (-)")
        return shown(name, line[name])
    return "-"


def shown(name: str, text: str) -> str:
    """Return a value as a page shows it, by the name of what was measured."""
    if name == "shared":
        return f"{float(text) * 100:.0f} %"
    if name.endswith("_mb"):
        return f"{float(text):,.0f}"
    if "steps to" in name:
        return f"{float(text):.0f}".replace("inf", "never")
    if "seconds to" in name:
        return f"{float(text):.1f}".replace("inf", "never")
    if name in ("seconds a step", "accuracy over time", "final accuracy"):
        return f"{float(text):.3f}"
    return text or "-"


# ------------------------------------------------------------------------------------------- sentences


def spreads() -> list[tuple[float, float, float]]:
    """Return every value with its interval or range in the files, also with the two arms of a pair swapped."""
    found = []
    for path in sorted(RESULTS.rglob("*.csv")):
        for line in read_csv(path):
            for names in SPREADS:
                if not all(map(line.get, names)):
                    continue
                value, low, high = (float(line[name]) for name in names)
                found.append((value, low, high))
                found.append((-value, -high, -low))
                if min(value, low) > 0:
                    found.append((1 / value, 1 / high, 1 / low))
    return found


def unknown(page: str, known: list[tuple[float, float, float]]) -> Iterator[str]:
    """Yield each value with an interval or a range in a page, outside of its written tables, that no file has."""
    for found in SPREAD.finditer(" ".join(TABLE.sub("", page).split())):
        if not any(all(map(is_printed, found.groups(), numbers)) for numbers in known):
            yield found[0]


def without_a_file(page: str) -> Iterator[str]:
    """Yield each measured number of a page that neither a table nor an interval or a range has."""
    for section in page.split("\n## "):
        if ".csv" in section:
            text = NOT_MEASURED.sub("", TABLE.sub("", section))
            yield from PLAIN.findall(SPREAD.sub("", " ".join(text.split())))


def is_printed(text: str, number: float) -> bool:
    """Whether a number is printed like this. One that lies half-way may be rounded either way."""
    digits = len(text.partition(".")[2])
    return abs(float(text) - number) <= 0.5 * 10**-digits * (1 + 1e-4)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    known = spreads()
    wrong = []
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        filled = written(page)
        if check and filled != page:
            wrong.append(f"{path.name}: python benchmarks/pages.py changes its tables")
        elif filled != page:
            path.write_text(filled, encoding="utf-8")
        wrong += [f"{path.name}: no file has {text}" for text in unknown(filled, known)]
        wrong += [f"{path.name}: {text} is in no table, and has no interval" for text in without_a_file(filled)]
    print("\n".join(wrong))
    raise SystemExit(min(len(wrong), 1))


if __name__ == "__main__":
    main()
