"""``pods select``: down-sample rollouts that any framework wrote, offline."""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated

from typer import Argument, Option

from ..engines.trl.batching import counted
from ..errors import UserError
from ..text import console, safe_text
from .rows import BAD_LINES_SHOWN, Rollout, check_rows_output, read_rollouts, write_rows
from .train import Force


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
    group_by: Annotated[str, Option("--group_by", help="The key that identifies the group of a rollout.")] = "prompt",
    reward_key: Annotated[
        str, Option("--reward_key", help="The key of the reward; null and NaN mean unscored.")
    ] = "reward",
    output: Annotated[
        str | None,
        Option(
            help="Write the kept rows here: a name that ends in .parquet is Parquet, hf://owner/name a data set of the "
            "hub, anything else JSONL; - writes JSONL to standard output."
        ),
    ] = None,
    force: Force = False,
    split: Annotated[str, Option(help="The split of a data set of the hub, to read and to write.")] = "train",
    advantages: Annotated[
        str, Option(help="Normalise advantages over the kept rollouts of a group (after), or over all (before).")
    ] = "after",
    seed: Annotated[int, Option(min=0, max=2**32 - 1, help="Random seed, for rules that draw.")] = 0,
    skip_bad: Annotated[
        bool, Option("--skip_bad", help="Skip bad lines; without it, any bad line is an error.")
    ] = False,
) -> None:
    """Down-sample rollouts that any framework wrote.

    Keeps the m rollouts of each group that the rule selects, in the file's order, and adds selected_rank (1: highest
    reward) and advantage to each. Groups may differ in size. If a group has fewer than m rows, all are kept. A group
    does not span several Parquet files.

    \b
    Examples:
      pods select rollouts.jsonl -m 16 --output kept.jsonl
      pods select rollouts.jsonl --rule percentile -m 4 --group_by prompt_id --reward_key score
      pods select runs/mine/rollouts -m 16 --rule max_variance --output kept.parquet
      pods select hf://me/rollouts --split train --output hf://me/kept
    """
    if output is not None:
        check_rows_output(output, rollouts, force=force)
    rows, bad = read_rollouts(rollouts, group_by, reward_key, split)
    _check_rows(rollouts, rows, [] if skip_bad else bad)
    kept = keep_best(rows, keep, rule, advantages, seed)
    if output is not None:
        rows_kept = ({**row.values, "selected_rank": row.rank, "advantage": row.advantage} for row in kept)
        write_rows(rows_kept, output, rollouts, split)
    _summarise(rows, kept, keep, len(bad), output)


def _check_rows(source: str, rows: list[Rollout], bad: list[str]) -> None:
    more = f"\n... and {len(bad) - BAD_LINES_SHOWN} more" if len(bad) > BAD_LINES_SHOWN else ""
    if bad:
        raise UserError(
            f"{source} has {len(bad)} bad line{'s' * (len(bad) > 1)}; nothing was written. "
            "Correct them, or skip them with --skip_bad:\n" + "\n".join(bad[:BAD_LINES_SHOWN]) + more
        )
    if not rows:
        raise UserError(f"{source} holds no rollouts: expected a JSON object on each line.")


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

    out = console(stderr=output in ("-", "/dev/stdout"))
    table = Table("", "rows", "reward mean", "reward sd", box=None)
    for name, some in (("all", rows), ("kept", kept)):
        scored = torch.tensor([row.reward for row in some if not math.isnan(row.reward)], dtype=torch.float64)
        deviation = scored.std().item() if len(scored) > 1 else 0.0
        table.add_row(name, str(len(some)), f"{scored.mean().item():.4g}", f"{deviation:.4g}")
    out.print(table)
    sizes = Counter(row.group for row in rows)
    spread = {row.group for row in kept if row.advantage != 0}
    out.print(f"{counted(len(sizes), 'group')}, {len(sizes) - len(spread)} with equal rewards (no signal)")
    if small := sum(size < keep for size in sizes.values()):
        out.print(f"[yellow]{counted(small, 'group')} of fewer than {keep} rows: all rows are kept[/yellow]")
    if bad:
        out.print(f"[yellow]{counted(bad, 'bad line')} skipped[/yellow]")
    if output is None:
        out.print("Nothing written: give --output FILE for the kept rows.")
    elif output not in ("-", "/dev/stdout"):
        out.print(f"Kept rows: {safe_text(output)}")
