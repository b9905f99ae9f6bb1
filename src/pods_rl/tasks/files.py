"""Read JSON, JSON Lines and CSV files with every number and date as it is written.

The readers of pyarrow and pandas convert values by column: `9007199254740993` next to `2.5` loses its last digit,
`2024-05-01` becomes a date, `007` becomes 7. An answer is text, so here each row stays the text of a JSON object, in
one column, until it is needed.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from datasets import Dataset, Features, Value

from ..errors import UserError
from ..runs.sources import file_hashes
from ..text import TOO_DEEP, describe, short

ENDINGS = (".jsonl", ".json", ".csv")
ROW = "row as text"  # the column of `read_files`
_IN_MEMORY = 64 << 20  # bytes of files; the rows of larger ones are kept in the datasets cache
_LONGEST_VALUE = 2**31 - 1  # characters of a value in a CSV file; the csv module's own limit is 131,072


class NumberText(str):
    """A number of a JSON file as it is written, such as `2.50`, `9007199254740993` or `1e400`."""

    __slots__ = ()

    @property
    def number(self) -> int | float:
        """Its value; infinite beyond what Python reads."""
        try:
            return int(self)
        except ValueError:  # a fraction, an exponent, or more than 4,300 digits
            return float(self)


# `json.loads` with these options would make a decoder for every row.
_DECODER = json.JSONDecoder(parse_int=NumberText, parse_float=NumberText)


def read_files(paths: Sequence[Path]) -> Dataset:
    """Return the rows of files of one kind, in order, in the column `ROW`; `parse_row` reads each."""
    if sum(path.stat().st_size for path in paths) <= _IN_MEMORY:
        return Dataset.from_dict({ROW: [text for path in paths for text in _rows(path)]})
    # The cache is keyed by the arguments: with the hash of its contents, a changed file is read again.
    hashes = file_hashes({str(path): path for path in paths})
    rows = Dataset.from_generator(
        _hashed_rows, features=Features({ROW: Value("string")}), gen_kwargs={"hashes": list(hashes.items())}
    )
    assert isinstance(rows, Dataset)
    return rows


def parse_row(text: str) -> dict[str, Any]:
    """Return the values of a row by column; numbers are `NumberText`."""
    row: dict[str, Any] = _DECODER.decode(text)
    return row


def with_numbers(value: Any) -> Any:
    """Return a value of `parse_row` with Python's numbers instead of `NumberText`, in its lists and mappings too.

    >>> with_numbers([NumberText("2.50"), {"n": NumberText("3")}, "4"])
    [2.5, {'n': 3}, '4']
    """
    if isinstance(value, NumberText):
        return value.number
    if isinstance(value, list):
        return [with_numbers(part) for part in value]
    if isinstance(value, dict):
        return {key: with_numbers(part) for key, part in value.items()}
    return value


def _hashed_rows(hashes: Sequence[tuple[str, str]]) -> Iterator[dict[str, str]]:
    for path, _ in hashes:
        for text in _rows(Path(path)):
            yield {ROW: text}


def _rows(path: Path) -> Iterator[str]:
    """Yield each row of a file as the text of a JSON object."""
    is_csv = path.suffix.lower() == ".csv"
    newline = "" if is_csv else None  # a value in a CSV file may have line breaks, which its reader must see unchanged
    try:
        # "utf-8-sig" also reads files that begin with a byte order mark, as Excel writes them.
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            yield from _csv_rows(file, path) if is_csv else _json_rows(file, path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8 ({error.reason}); save it as UTF-8") from error
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV file: {error}. Fix it, or save it again from its program") from error


def _json_rows(file: IO[str], path: Path) -> Iterator[str]:
    """Yield the objects of JSON Lines or of a JSON list; blank lines are skipped."""
    is_first = True
    for number, line in enumerate(file, start=1):
        text = line.strip()
        if not text:
            continue
        if is_first and text.startswith("["):
            yield from _list_rows(line + file.read(), path)
            return
        is_first = False
        place = f"{path}, line {number}"
        try:
            row = parse_row(text)
        except (ValueError, RecursionError) as error:
            raise _not_json(error, place) from error
        _check_object(row, place)
        yield text


def _list_rows(text: str, path: Path) -> Iterator[str]:
    """Yield the objects of a JSON list."""
    start = _skip_space(text, text.index("[") + 1)
    if text[start : start + 1] == "]":
        return
    number = 0
    while True:
        number += 1
        place = f"{path}, row {number} (counted from 1)"
        try:
            row, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            raise _not_json(error, place) from error
        _check_object(row, place)
        yield text[start:end]
        after = _skip_space(text, end)
        following = text[after : after + 1]
        if following == "]":
            return
        if following != ",":
            raise UserError(f"{place}: is followed by {short(repr(text[after : after + 20]))}; expected , or ]")
        start = _skip_space(text, after + 1)


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    return start


def _check_object(row: object, place: str) -> None:
    if not isinstance(row, dict):
        raise UserError(f"{place}: is {describe(with_numbers(row))}; expected an object for each row")


def _not_json(error: Exception, place: str) -> UserError:
    """Return the error of text that is not JSON, with what to do."""
    if isinstance(error, RecursionError):
        return UserError(f"{place}: is {TOO_DEEP}")
    reason = str(error).partition(": line ")[0]
    in_text = 'A backslash in JSON is written twice, as in "\\\\sqrt"'
    advice = in_text if "escape" in reason else "Fix it, or write the file with a JSON library"
    return UserError(f"{place}: is not JSON ({reason}). {advice}")


def _csv_rows(file: IO[str], path: Path) -> Iterator[str]:
    """Yield the rows of a CSV file with a header; every value is text, and a missing one is null."""
    csv.field_size_limit(_LONGEST_VALUE)
    reader = csv.reader(file, strict=True, skipinitialspace=True)
    names: list[str] = []
    for values in reader:
        if not values:
            continue
        place = f"{path}, line {reader.line_num}"
        if not names:
            names = [value.strip() for value in values]
            for name in names:
                if name and names.count(name) > 1:
                    raise UserError(f"{path} has two columns named {name!r}; rename or remove one of them")
            continue
        if len(values) > len(names):
            raise UserError(
                f"{place}: has {len(values)} values for the columns {', '.join(names)}. Put text that contains commas "
                "in double quotes"
            )
        missing = [None] * (len(names) - len(values))  # a short line has no values for the last columns
        row: Mapping[str, str | None] = dict(zip(names, [*values, *missing], strict=True))
        yield json.dumps(row)
