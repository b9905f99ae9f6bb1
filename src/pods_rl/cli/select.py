"""``pods select``: down-sample rollouts that any framework wrote, offline."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from typer import Argument, Option

from ..errors import UserError
from ..text import DEEPEST, console, depth, safe_text
from .rows import HUB, check_output, hub_name, hub_rows, write_rows

_BAD_LINES_SHOWN = 10
_QUOTED = 43  # characters to quote of a bad line
_LONGEST_LINE = 1 << 26  # bytes: the longest completions have a few million
_BOM = b"\xef\xbb\xbf"


@dataclass
class Rollout:
    """One rollout of the input: its values, group and reward (NaN: unscored).

    ``rank`` and ``advantage`` are set for kept rollouts; rank 1 is the highest reward among those kept in a group.
    """

    values: dict[str, Any]
    group: str
    reward: float
    rank: int = 0
    advantage: float = 0.0


def select(
    rollouts: Annotated[
        str,
        Argument(
            help="A JSONL file with an object per rollout, a Parquet file, a directory of Parquet files such as "
            "rollouts/ of a run, or a data set of the hub as hf://owner/name; - reads JSONL from standard input."
        ),
    ],
    rule: Annotated[str, Option(help="A rule's name, or your own as package.module:function.")] = "max_variance",
    keep: Annotated[int, Option("-m", "--keep", min=1, help="Number of rollouts to keep in each group.")] = 16,
    group_by: Annotated[str, Option(help="The key that identifies the group of a rollout.")] = "prompt",
    reward_key: Annotated[str, Option(help="The key of the reward; null and NaN mean unscored.")] = "reward",
    output: Annotated[
        str | None,
        Option(
            help="Write the kept rows here: a name that ends in .parquet is Parquet, hf://owner/name a data set of the "
            "hub, anything else JSONL; - writes JSONL to standard output."
        ),
    ] = None,
    split: Annotated[str, Option(help="The split of a data set of the hub, to read and to write.")] = "train",
    advantages: Annotated[
        str, Option(help="Normalise advantages over the kept rollouts of a group (after), or over all (before).")
    ] = "after",
    seed: Annotated[int, Option(min=0, max=2**32 - 1, help="Random seed, for rules that draw.")] = 0,
    skip_bad: Annotated[
        bool, Option("--skip-bad", help="Skip bad lines; without it, any bad line is an error.")
    ] = False,
) -> None:
    """Down-sample rollouts that any framework wrote.

    Keeps m rollouts of each group, as the rule selects, in the file's order. Adds selected_rank (1: highest
    reward) and advantage to each. Groups may differ in size; a group of fewer than m rows is kept whole. Each Parquet
    file has groups of its own.

    \b
    Examples:
      pods select rollouts.jsonl -m 16 --output kept.jsonl
      pods select rollouts.jsonl --rule percentile -m 4 --group-by prompt_id --reward-key score
      pods select runs/mine/rollouts -m 16 --rule max_variance --output kept.parquet
      pods select hf://me/rollouts --split train --output hf://me/kept
    """
    check_output(output)
    if output == "-" and sys.__stdout__ is None:
        raise UserError("--output -: standard output is closed. Give a file.")
    rows, bad = read_rollouts(rollouts, group_by, reward_key, split)
    _check_rows(rollouts, rows, [] if skip_bad else bad)
    kept = keep_best(rows, keep, rule, advantages, seed)
    if output is not None:
        rows_kept = ({**row.values, "selected_rank": row.rank, "advantage": row.advantage} for row in kept)
        write_rows(rows_kept, output, split)
    _summarise(rows, kept, keep, len(bad), output)


def _check_rows(source: str, rows: list[Rollout], bad: list[str]) -> None:
    more = f"\n... and {len(bad) - _BAD_LINES_SHOWN} more" if len(bad) > _BAD_LINES_SHOWN else ""
    if bad:
        raise UserError(
            f"{source} has {len(bad)} bad line{'s' * (len(bad) > 1)}; nothing was written. "
            "Correct them, or skip them with --skip-bad:\n" + "\n".join(bad[:_BAD_LINES_SHOWN]) + more
        )
    if not rows:
        raise UserError(f"{source} holds no rollouts: expected a JSON object on each line.")


def read_rollouts(source: str, group_by: str, reward_key: str, split: str = "train") -> tuple[list[Rollout], list[str]]:
    """Return the rollouts of a file, a directory or a data set of the hub, and the problem of each bad line."""
    rows: list[Rollout] = []
    bad: list[str] = []
    try:
        for file, place, item in _items(source, split):
            try:
                values = _parse(item) if isinstance(item, bytes) else item
                rows.append(_rollout(values, file, group_by, reward_key))
            except ValueError as error:  # keep the text of those that are shown
                bad.append(f"{file} {place}: {error}".lstrip() if len(bad) < _BAD_LINES_SHOWN else "")
    except OSError as error:
        hint = f" For a data set of the hub, give {HUB}{source}." if _may_be_hub(source, error) else ""
        raise UserError(f"Cannot read {source}: {error.strerror or error}.{hint}") from error
    except UnicodeEncodeError as error:
        raise UserError(f"Cannot read {source}: no file has such a name.") from error
    return rows, bad


def _may_be_hub(source: str, error: OSError) -> bool:
    return isinstance(error, FileNotFoundError) and re.fullmatch(r"[\w-]+/[\w-]+", source, re.ASCII) is not None


def _items(source: str, split: str) -> Iterator[tuple[str, str, bytes | dict[str, Any]]]:
    """Yield each row's file (empty unless there are several), position, and content: a JSON line or a row."""
    path = Path(source)
    if source.startswith(HUB):
        for number, row in enumerate(hub_rows(hub_name(source, "pods select"), split), start=1):
            yield "", f"row {number}", row
    elif source == "-":
        if sys.stdin is None:
            raise UserError("Standard input is closed: name a file, or pipe the rollouts in.")
        yield from _lines(sys.stdin.buffer, path)
    elif path.is_dir():
        files = sorted(path.glob("*.parquet"))
        if not files:
            raise UserError(f"{path} holds no Parquet file: expected a run's rollouts/ directory.")
        for file in files:
            yield from _parquet(file, file.name)
    else:
        with path.open("rb") as lines:
            if not (lines.seekable() and lines.peek(4).startswith(b"PAR1")):
                yield from _lines(lines, path)
                return
        yield from _parquet(path, "")


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[str, str, bytes]]:
    for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
        if len(line) == _LONGEST_LINE:
            raise UserError(
                f"{path}: line {number} has {_LONGEST_LINE:,} bytes or more: expected a rollout on each line."
            )
        text = line.removeprefix(_BOM) if number == 1 else line
        if text.strip():
            yield "", f"line {number}", text


def _parquet(path: Path, name: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = (row for batch in pq.ParquetFile(path).iter_batches() for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield name, f"row {number}", row
    except pa.ArrowException as error:
        raise UserError(f"{path} is not a complete Parquet file: {str(error).splitlines()[0]}") from error


def _parse(line: bytes) -> dict[str, Any]:
    from ..recipe.reading import short

    try:
        values = json.loads(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {line[error.start]:#04x} at position {error.start + 1})") from None
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"is not a JSON object but {short(str(values), _QUOTED)}")
    return values


def _rollout(values: dict[str, Any], file: str, group_by: str, reward_key: str) -> Rollout:
    """Return the rollout of a line's values; raise ValueError if a key is missing or wrong."""
    from ..recipe.fields import suggest
    from ..recipe.reading import short

    if depth(values) > DEEPEST:
        raise ValueError(f"is nested too deeply: expected {DEEPEST} levels at most")
    for key, option in ((group_by, "--group-by"), (reward_key, "--reward-key")):
        if key not in values:
            there = short(", ".join(map(repr, values)) or "none", 200)
            raise ValueError(
                f"has no key {short(repr(key), _QUOTED)}; it has {there}.{suggest(key, values)} {option} names the key"
            )
    reward = values[reward_key]
    try:
        number = math.nan if reward is None else float(reward) if isinstance(reward, bool | int | float) else math.inf
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise ValueError(
            f"its {reward_key} is {short(repr(reward), _QUOTED)}, expected a finite number, true, false or null"
        )
    return Rollout(values, file + json.dumps(values[group_by], sort_keys=True, default=str), number)


def keep_best(rows: list[Rollout], keep: int, rule: str, when: str, seed: int) -> list[Rollout]:
    """Select in every group, batched by group size; return the kept rollouts in the order of the rows."""
    import torch

    from ..selection import Selection, get_rule
    from ..selection import advantages as advantages_of
    from ..selection import select as select_rollouts

    get_rule(rule)
    groups: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row.group, []).append(place)
    by_size: dict[int, list[list[int]]] = {}
    for places in groups.values():
        by_size.setdefault(len(places), []).append(places)
    generator = torch.Generator().manual_seed(seed)
    kept: list[int] = []
    for size, same in by_size.items():
        rewards_PN = torch.tensor([[rows[place].reward for place in places] for places in same], dtype=torch.float64)
        try:
            if size <= keep:
                selection = Selection(torch.arange(size).expand(len(same), size))
            else:
                selection = select_rollouts(rewards_PN, keep, rule, generator)
            advantages_PM = advantages_of(rewards_PN, selection, when=when)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise UserError(f"Cannot select: {error}") from error
        for places, indices, values in zip(same, selection.indices.tolist(), advantages_PM.tolist(), strict=True):
            chosen = [places[index] for index in indices]
            for place, value in zip(chosen, values, strict=True):
                rows[place].advantage = value
            # highest reward first, unscored ones last, ties in the file's order
            chosen.sort(key=lambda place: (math.isnan(rows[place].reward), -rows[place].reward, place))
            for rank, place in enumerate(chosen, start=1):
                rows[place].rank = rank
            kept += chosen
    return [rows[place] for place in sorted(kept)]


def _summarise(rows: list[Rollout], kept: list[Rollout], keep: int, bad: int, output: str | None) -> None:
    import torch
    from rich.table import Table

    out = console(stderr=output == "-")
    table = Table("", "rows", "reward mean", "reward sd", box=None)
    for name, some in (("all", rows), ("kept", kept)):
        scored = torch.tensor([row.reward for row in some if not math.isnan(row.reward)], dtype=torch.float64)
        deviation = scored.std().item() if len(scored) > 1 else 0.0
        table.add_row(name, str(len(some)), f"{scored.mean().item():.4g}", f"{deviation:.4g}")
    out.print(table)
    sizes = Counter(row.group for row in rows)
    spread = {row.group for row in kept if row.advantage != 0}
    out.print(f"{len(sizes)} groups, {len(sizes) - len(spread)} of them with equal rewards (no learning signal)")
    if small := sum(size < keep for size in sizes.values()):
        out.print(f"[yellow]{small} groups had fewer than {keep} rows and were kept whole[/yellow]")
    if bad:
        out.print(f"[yellow]{bad} bad lines skipped[/yellow]")
    if output is None:
        out.print("Nothing written: give --output FILE for the kept rows.")
    elif output != "-":
        out.print(f"Kept rows: {safe_text(output)}")
