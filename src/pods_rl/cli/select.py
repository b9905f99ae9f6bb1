"""``pods select``: down-sample rollouts that any framework wrote, offline."""

from __future__ import annotations

import math
from collections import Counter
from statistics import mean, stdev
from typing import Annotated

from typer import Argument, Option

from ..engines.trl.batching import counted
from ..errors import UserError
from ..text import console, safe_text
from .rows import Rollout, check_rows_output, read_rollouts, write_rows
from .train import Force

_SHOWN = 10  # bad lines


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
            help="Write the kept rows here, as Parquet if the name ends in .parquet, as JSONL otherwise; - writes "
            "JSONL to standard output."
        ),
    ] = None,
    force: Force = False,
    split: Annotated[str, Option(help="The split of a data set of the hub.")] = "train",
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
      pods select hf://me/rollouts --split train --output kept.jsonl
    """
    if output is not None:
        check_rows_output(output, rollouts, force=force)
    rows, bad = read_rollouts(rollouts, group_by, reward_key, split)
    if bad and not skip_bad:
        shown = [*bad[:_SHOWN], f"... and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else bad
        head = f"{rollouts} has {counted(len(bad), 'bad line')}. Correct them, or skip them with --skip_bad:"
        raise UserError("\n".join([head, *shown]))
    if not rows:
        raise UserError(f"{rollouts} holds no rollouts: expected a JSON object on each line.")
    kept = keep_best(rows, keep, rule, advantages, seed)
    if output is not None:
        rows_kept = ({**row.values, "selected_rank": row.rank, "advantage": row.advantage} for row in kept)
        write_rows(rows_kept, output, rollouts)
    _summarise(rows, kept, keep, len(bad), output)


def keep_best(rows: list[Rollout], keep: int, rule: str, when: str, seed: int) -> list[Rollout]:
    """Select in every group; return the kept rollouts, with rank and advantage, in the order of the rows."""
    import torch

    from .. import selection

    selection.get_rule(rule)
    groups: dict[str, list[Rollout]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    generator = torch.Generator().manual_seed(seed)
    for group in groups.values():
        rewards_1N = torch.tensor([[row.reward for row in group]], dtype=torch.float64)
        try:
            if len(group) <= keep:
                chosen = selection.Selection(torch.arange(len(group))[None])
            else:
                chosen = selection.select(rewards_1N, keep, rule, generator)
            advantages_1M = selection.advantages(rewards_1N, chosen, when=when)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise UserError(f"Cannot select: {error}") from error
        kept = sorted(zip(chosen.indices[0].tolist(), advantages_1M[0].tolist(), strict=True))
        # highest reward first, unscored ones last, ties in the file's order
        kept.sort(key=lambda one: (math.isnan(group[one[0]].reward), -group[one[0]].reward))
        for rank, (place, advantage) in enumerate(kept, start=1):
            group[place].rank, group[place].advantage = rank, advantage
    return [row for row in rows if row.rank]


def _summarise(rows: list[Rollout], kept: list[Rollout], keep: int, bad: int, output: str | None) -> None:
    from rich.table import Table

    out = console(stderr=output in ("-", "/dev/stdout"))
    table = Table("", "rows", "reward mean", "reward sd", box=None)
    for name, some in (("all", rows), ("kept", kept)):
        scored = [row.reward for row in some if not math.isnan(row.reward)]
        average, deviation = mean(scored or [math.nan]), stdev(scored) if len(scored) > 1 else 0.0
        table.add_row(name, str(len(some)), f"{average:.4g}", f"{deviation:.4g}")
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
