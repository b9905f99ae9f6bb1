"""``pods select``: down-sample rollouts that any framework wrote, offline."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from ..errors import UserError
from ..text import console

_BAD_LINES_SHOWN = 10
_LONGEST_LINE = 1 << 26  # bytes: the longest completions have a few million
_DEEPEST = 200  # nested lists and objects in a row; Python's own limit depends on who calls
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """A rollout: its place in the input, everything its line says, its group, and its reward (NaN: unscored)."""

    place: int
    values: dict[str, Any]
    group: str
    reward: float


@dataclass(frozen=True)
class Kept:
    """A row to train on: ``rank`` 1 is the highest reward among those kept of its group."""

    row: Row
    rank: int
    advantage: float


def select(
    rollouts: Annotated[
        Path,
        typer.Argument(
            help="A JSONL file with an object per rollout, a Parquet file, or a directory of Parquet files such as "
            "rollouts/ of a run; - reads JSONL from standard input."
        ),
    ],
    rule: Annotated[str, typer.Option(help="A rule's name, or your own as package.module:function.")] = (
        "max_variance"
    ),
    keep: Annotated[int, typer.Option("-m", "--keep", min=1, help="Rollouts to keep of each group.")] = 16,
    group_by: Annotated[str, typer.Option(help="The key whose value tells groups apart.")] = "prompt",
    reward_key: Annotated[str, typer.Option(help="The key of the reward; null and NaN are unscored.")] = "reward",
    output: Annotated[
        Path | None, typer.Option(help="Write the kept rows here, as JSONL; - writes standard output.")
    ] = None,
    advantages: Annotated[
        str, typer.Option(help="Normalise over the kept rollouts (after) or over all (before).")
    ] = "after",
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="For rules that draw at random.")] = 0,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip bad lines, rather than refuse the file.")] = False,
) -> None:
    """Down-sample rollouts that any framework wrote.

    Keeps the m rollouts of each group that the rule chooses. Kept rows gain selected_rank (1:
    highest reward) and advantage, and stay in the file's order. Groups may differ in size; one of fewer than m
    rows is kept whole. A group never spans two files.

    \b
    Examples:
      pods select rollouts.jsonl -m 16 --output kept.jsonl
      pods select rollouts.jsonl --rule percentile -m 4 --group-by prompt_id --reward-key score
      pods select runs/mine/rollouts -m 16 --rule max_variance --output kept.jsonl
    """
    if output is not None and output.is_dir():
        raise UserError(f"--output {output} is a directory: give a file.")
    if str(output) == "-" and sys.__stdout__ is None:
        raise UserError("--output -: standard output is closed. Give a file.")
    rows, bad = read_rows(rollouts, group_by, reward_key)
    if bad and not skip_bad:
        more = f"\n... and {len(bad) - _BAD_LINES_SHOWN} more" if len(bad) > _BAD_LINES_SHOWN else ""
        raise UserError(
            f"{rollouts} has {len(bad)} bad line{'s' * (len(bad) > 1)}; nothing was written. "
            "Correct them, or skip them with --skip-bad:\n" + "\n".join(bad[:_BAD_LINES_SHOWN]) + more
        )
    if not rows:
        raise UserError(f"{rollouts} holds no rollouts: expected a JSON object on each line.")
    kept = keep_best(rows, keep, rule, advantages, seed)
    if output is not None:
        _write(kept, output)
    _summarise(rows, kept, keep, len(bad), output)


def read_rows(path: Path, group_by: str, reward_key: str) -> tuple[list[Row], list[str]]:
    """The rows of a file or a directory of files, and what is wrong with each bad line."""
    rows: list[Row] = []
    bad: list[str] = []
    try:
        for file, where, item in _items(path):
            try:
                values = _parse(item) if isinstance(item, bytes) else item
                rows.append(_row(len(rows), values, file, group_by, reward_key))
            except ValueError as error:  # the text of those that nobody sees is not kept
                bad.append(f"{file} {where}: {error}".lstrip() if len(bad) < _BAD_LINES_SHOWN else "")
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from error
    return rows, bad


def keep_best(rows: list[Row], keep: int, rule: str, when: str, seed: int) -> list[Kept]:
    """Select in every group, groups of one size at once; in the order of the rows."""
    import torch

    from ..selection import Selection, get_rule
    from ..selection import advantages as advantages_of
    from ..selection import select as select_rows

    get_rule(rule)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    by_size: dict[int, list[list[Row]]] = {}
    for group in groups.values():
        by_size.setdefault(len(group), []).append(group)
    generator = torch.Generator().manual_seed(seed)
    kept = []
    for size, same in by_size.items():
        rewards_PN = torch.tensor([[row.reward for row in group] for group in same], dtype=torch.float64)
        try:
            if size <= keep:
                selection = Selection(torch.arange(size).expand(len(same), size))
            else:
                selection = select_rows(rewards_PN, keep, rule, generator)
            advantages_PM = advantages_of(rewards_PN, selection, when=when)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise UserError(f"Cannot select: {error}") from error
        for group, places, values in zip(same, selection.indices.tolist(), advantages_PM.tolist(), strict=True):
            kept += _ranked([group[place] for place in places], values)
    return sorted(kept, key=lambda k: k.row.place)


def _ranked(rows: list[Row], values: list[float]) -> list[Kept]:
    """Highest reward first; unscored rows last, ties in the file's order."""
    order = sorted(range(len(rows)), key=lambda i: (math.isnan(rows[i].reward), -rows[i].reward, rows[i].place))
    return [Kept(rows[i], rank, values[i]) for rank, i in enumerate(order, start=1)]


def _items(path: Path) -> Iterator[tuple[str, str, bytes | dict[str, Any]]]:
    """File (empty where there is one), place in it, and content of each row: a line of JSON, or a row of Parquet."""
    if str(path) == "-":
        if sys.stdin is None:
            raise UserError("Standard input is closed: name a file, or pipe the rollouts in.")
        yield from _lines(sys.stdin.buffer, path)
        return
    if path.is_dir():
        files = sorted(path.glob("*.parquet"))
        if not files:
            raise UserError(f"{path} holds no Parquet file: expected those of a run's rollouts/ directory.")
        for file in files:
            yield from _parquet(file, file.name)
        return
    with path.open("rb") as lines:
        if not (lines.seekable() and lines.peek(4).startswith(b"PAR1")):
            yield from _lines(lines, path)
            return
    yield from _parquet(path, "")


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[str, str, bytes]]:
    number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE:
            raise UserError(
                f"{path}: line {number} has {_LONGEST_LINE:,} bytes or more: expected a rollout on each line."
            )
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.strip():
            yield "", f"line {number}", line


def _parquet(path: Path, name: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield name, f"row {number}", row
    except pa.ArrowException as error:
        raise UserError(f"{path} is not a whole Parquet file: {str(error).splitlines()[0]}") from error


def _parse(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {line[error.start]:#04x} at position {error.start + 1})") from None
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"is not a JSON object but {_short(values)}")
    return values


def _row(place: int, values: dict[str, Any], file: str, group_by: str, reward_key: str) -> Row:
    if _depth(values) > _DEEPEST:
        raise ValueError(f"is nested too deeply: expected {_DEEPEST} levels at most")
    for key, option in ((group_by, "--group-by"), (reward_key, "--reward-key")):
        if key not in values:
            from ..recipe.fields import suggest

            there = _short(", ".join(map(repr, values)) or "none", 200)
            raise ValueError(
                f"has no key {_short(repr(key))}; it has {there}.{suggest(key, values)} {option} names the key"
            )
    reward = values[reward_key]
    if reward is None:
        reward = math.nan
    try:
        number = float(reward) if isinstance(reward, (bool, int, float)) else math.inf  # true and false: right or wrong
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise ValueError(f"its {reward_key} is {_short(repr(reward))}, expected a finite number, true, false or null")
    return Row(place, values, file + json.dumps(values[group_by], sort_keys=True, default=str), number)


def _short(value: object, most: int = 40) -> str:
    text = str(value)
    return text if len(text) <= most else text[:most] + "..."


def _depth(value: object) -> int:
    """How deep lists and objects nest, 1 for a flat row; without recursion."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def _write(kept: list[Kept], output: Path) -> None:
    from ..runs import to_json, write_atomic

    printed = str(output) == "-"
    rows = ({**k.row.values, "selected_rank": k.rank, "advantage": k.advantage} for k in kept)
    text = "".join(to_json(row, ascii_only=printed) + "\n" for row in rows)
    if printed:
        sys.stdout.write(text)
        return
    try:
        write_atomic(output, text, follow=True)
    except OSError as error:
        raise UserError(f"Cannot write {output}: {error.strerror}.") from error


def _summarise(rows: list[Row], kept: list[Kept], keep: int, bad: int, output: Path | None) -> None:
    from rich.table import Table

    from ..text import safe_text

    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.group] = sizes.get(row.group, 0) + 1
    spread = {k.row.group for k in kept if k.advantage != 0}
    table = Table("", "rows", "reward mean", "reward sd", box=None)
    for name, rewards in (("all", [r.reward for r in rows]), ("kept", [k.row.reward for k in kept])):
        mean, deviation = _moments(rewards)
        table.add_row(name, str(len(rewards)), f"{mean:.4g}", f"{deviation:.4g}")
    out = console(stderr=str(output) == "-")
    out.print(table)
    out.print(f"{len(sizes)} groups, {len(sizes) - len(spread)} of them without spread (they teach nothing)")
    small = sum(size < keep for size in sizes.values())
    if small:
        out.print(f"[yellow]{small} groups had fewer than {keep} rows and are kept whole[/yellow]")
    if bad:
        out.print(f"[yellow]{bad} bad lines skipped[/yellow]")
    if output is None:
        out.print("Nothing written: give --output FILE for the kept rows.")
    elif str(output) != "-":
        out.print(f"Kept rows: {safe_text(output)}")


def _moments(rewards: list[float]) -> tuple[float, float]:
    """Mean and standard deviation (ddof = 1) of the scored ones."""
    import torch

    scored = torch.tensor([reward for reward in rewards if not math.isnan(reward)], dtype=torch.float64)
    return scored.mean().item(), scored.std().item() if len(scored) > 1 else 0.0
