"""``pods select``: down-sample rollouts that any framework wrote, offline."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UserError
from ..terminal import console

_BAD_LINES_SHOWN = 10


@dataclass(frozen=True)
class Row:
    """A rollout: its line in the file, everything the line says, its group, and its reward (NaN: unscored)."""

    line: int
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
    rollouts: Annotated[Path, typer.Argument(help="JSONL: a JSON object per rollout; - reads standard input.")],
    rule: Annotated[str, typer.Option(help="A rule's name, or your own as package.module:function.")] = (
        "max_variance"
    ),
    keep: Annotated[int, typer.Option("-m", "--keep", min=1, help="Rollouts to keep of each group.")] = 16,
    group_by: Annotated[str, typer.Option(help="The key whose value tells groups apart.")] = "prompt",
    reward_key: Annotated[str, typer.Option(help="The key of the reward; null: nobody could score it.")] = ("reward"),
    output: Annotated[Path | None, typer.Option(help="Write the kept rows here; - writes standard output.")] = None,
    advantages: Annotated[
        str, typer.Option(help="Normalise over the kept rollouts (after) or over all (before).")
    ] = "after",
    seed: Annotated[int, typer.Option(help="For rules that draw at random.")] = 0,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad lines out, rather than refuse the file.")
    ] = False,
) -> None:
    """Down-sample rollouts that any framework wrote.

    Keeps the m rollouts of each group that the rule chooses. Kept rows gain selected_rank (1:
    highest reward) and advantage, and stay in the file's order. Groups may differ in size; one of fewer than m
    rows is kept whole.

    \b
    Examples:
      pods select rollouts.jsonl -m 16 --output kept.jsonl
      pods select rollouts.jsonl --rule percentile -m 4 --group-by prompt_id --reward-key score
    """
    rows, bad = read_rows(rollouts, group_by, reward_key)
    if bad and not skip_bad:
        more = f"\n... and {len(bad) - _BAD_LINES_SHOWN} more" if len(bad) > _BAD_LINES_SHOWN else ""
        raise UserError(
            f"{rollouts} has {len(bad)} bad line{'s' * (len(bad) > 1)}; nothing was written. "
            "Mend them, or leave them out with --skip-bad:\n" + "\n".join(bad[:_BAD_LINES_SHOWN]) + more
        )
    if not rows:
        raise UserError(f"{rollouts} holds no rollouts: expected a JSON object on each line.")
    kept = keep_best(rows, keep, rule, advantages, seed)
    if output is not None:
        _write(kept, output)
    _summarise(rows, kept, keep, len(bad), output)


def read_rows(path: Path, group_by: str, reward_key: str) -> tuple[list[Row], list[str]]:
    """The rows of a JSONL file, and what is wrong with each bad line."""
    rows, bad = [], []
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            rows.append(_row(number, line, group_by, reward_key))
        except ValueError as error:
            bad.append(f"line {number}: {error}")
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
    return sorted(kept, key=lambda k: k.row.line)


def _ranked(rows: list[Row], values: list[float]) -> list[Kept]:
    """Highest reward first; unscored rows last, ties in the file's order."""
    order = sorted(range(len(rows)), key=lambda i: (math.isnan(rows[i].reward), -rows[i].reward, rows[i].line))
    return [Kept(rows[i], rank, values[i]) for rank, i in enumerate(order, start=1)]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if str(path) == "-":
        yield from enumerate(sys.stdin, start=1)
        return
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from enumerate(file, start=1)
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error


def _row(number: int, line: str, group_by: str, reward_key: str) -> Row:
    try:
        values = json.loads(line)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"is no JSON object but {line.strip()[:40]}")
    for key in (group_by, reward_key):
        if key not in values:
            raise ValueError(f"has no key {key!r}; it has {', '.join(map(repr, values)) or 'none'}")
    reward = values[reward_key]
    if reward is None:
        reward = math.nan
    if isinstance(reward, bool):
        reward = float(reward)  # right or wrong
    if not isinstance(reward, (int, float)) or math.isinf(reward):
        raise ValueError(f"its {reward_key} is {reward!r}, expected a finite number, true, false or null")
    group = values[group_by]
    return Row(number, values, json.dumps(group, sort_keys=True), float(reward))


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

    from ..terminal import safe_text

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
        out.print(f"[yellow]{bad} bad lines left out[/yellow]")
    if output is None:
        out.print("Nothing written: give --output FILE for the kept rows.")
    elif str(output) != "-":
        out.print(f"Kept rows: {safe_text(output)}")


def _moments(rewards: list[float]) -> tuple[float, float]:
    """Mean and standard deviation (ddof = 1) of the scored ones."""
    import statistics

    scored = [reward for reward in rewards if not math.isnan(reward)]
    mean = statistics.fmean(scored) if scored else math.nan
    return mean, statistics.stdev(scored) if len(scored) > 1 else 0.0
