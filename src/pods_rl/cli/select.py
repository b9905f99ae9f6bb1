"""``pods select``: down-sample rollouts that any framework wrote, offline."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

from typer import Argument, Option

from ..errors import UserError
from ..runs import to_json
from ..runs.files import begins_with, check_output, check_regular, write_output
from ..tables import BATCH
from ..text import DEEPEST, console, counted, depth, safe_text, short, suggest
from .train import Force, working

_HEAD = '{"selected_rank": '  # how a file of kept rows begins


@dataclass
class Rollout:
    """One rollout of the input: its values, the Parquet file and group that it belongs to, and its reward or NaN."""

    values: dict[str, Any]
    file: str
    group: str
    reward: float


def select(
    rollouts: Annotated[
        str,
        Argument(
            help="A JSONL file with an object per rollout, a Parquet file, or a directory of Parquet files such as "
            "rollouts/ of a run; - reads JSONL from standard input."
        ),
    ],
    rule: Annotated[str, Option(help="A rule's name, or your own as package.module:function.")] = "max_variance",
    keep: Annotated[
        int, Option("-m", "--keep", min=1, help="Number of rollouts to keep in each group; of a batch, the mean.")
    ] = 16,
    selection: Annotated[
        str, Option(help="Keep m rollouts of each group (prompt), or as many rows among all groups of a file (batch).")
    ] = "prompt",
    batch_rows: Annotated[
        int | None, Option("--rows", min=2, help="With --selection batch: rows to keep of a file, instead of -m.")
    ] = None,
    group_by: Annotated[str, Option("--group_by", help="The key that identifies the group of a rollout.")] = "prompt",
    reward_key: Annotated[
        str, Option("--reward_key", help="The key of the reward; null and NaN mean unscored.")
    ] = "reward",
    output: Annotated[
        str | None, Option(help="Write the kept rows here, as JSONL; - writes to standard output.")
    ] = None,
    force: Force = False,
    advantages: Annotated[
        str, Option(help="Normalise advantages over the kept rollouts of a group (after), or over all (before).")
    ] = "after",
    seed: Annotated[int, Option(min=0, max=2**32 - 1, help="Random seed, for rules that draw.")] = 0,
) -> None:
    """Down-sample rollouts that any framework wrote.

    Keeps the m rollouts of each group that the rule selects, in the file's order, and adds selected_rank (1: highest
    reward) and advantage to each. Groups may differ in size. If a group has fewer than m rows, all are kept. A group
    does not span several Parquet files. With --selection batch a file is a batch: groups keep different numbers of
    rollouts, and a group of equal rewards keeps none. Values that JSON cannot hold, such as dates and bytes, are
    written as text.

    \b
    Examples:
      pods select rollouts.jsonl -m 16 --output kept.jsonl
      pods select rollouts.jsonl --rule percentile -m 4 --group_by prompt_id
      pods select rollouts.jsonl --selection batch --rows 64 --output kept.jsonl
      pods select runs/mine/rollouts -m 16 --rule max_variance --output kept.jsonl
    """
    if output is not None and output != "-":
        if output.endswith(".parquet"):
            raise UserError(f"--output {output}: kept rows are JSONL. Give a name that ends in .jsonl.")
        check_output(
            Path(output), "--output", inputs=[Path(rollouts)], ours=lambda path: begins_with(path, _HEAD), force=force
        )
    if selection not in ("prompt", "batch"):
        raise UserError(f"--selection {selection}: expected prompt or batch.")
    if batch_rows is not None and selection == "prompt":
        raise UserError("--rows counts the rows of a batch: add --selection batch, or give -m for those of a group.")
    with working("reading the rollouts", in_log=False):
        rows = read_rollouts(rollouts, group_by, reward_key)
        kept = keep_rows(rows, keep, batch_rows, rule, advantages, seed, over_batch=selection == "batch")
    if output is not None:
        # our keys come first, which marks the file as ours, and replace those of the same name in the row
        lines = [additions | rows[index].values | additions for index, additions in kept.items()]
        text = "".join(to_json(line, ascii_only=output == "-") + "\n" for line in lines)
        if output == "-":
            sys.stdout.write(text)
        else:
            write_output(Path(output), "--output", text)
    _summarise(rows, kept, keep if selection == "prompt" else None, output)


def read_rollouts(source: str, group_by: str, reward_key: str) -> list[Rollout]:
    """Return the rollouts of a file or a directory; raise UserError for the first bad line."""
    try:
        rows = [_parse_rollout(item, file, place, group_by, reward_key) for file, place, item in _read_rows(source)]
    except (OSError, UnicodeEncodeError) as error:  # the second: a name that no file can have
        raise UserError(f"Cannot read {source}: {getattr(error, 'strerror', None) or error}. Give a file.") from error
    if not rows:
        raise UserError(f"{source} holds no rollouts: expected a JSON object on each line.")
    return rows


def _read_rows(source: str) -> Iterator[tuple[str, str, bytes | dict[str, Any]]]:
    """Yield each row's file, its place for messages, and its content: a JSON line or a row of Parquet."""
    import pyarrow as pa

    path = Path("/dev/stdin" if source == "-" else source)
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path} holds no Parquet file: expected a run's rollouts/ directory.")
    for file in files:
        if file.suffix != ".parquet":
            with file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():  # no file name, so that rows of several files can belong to one group
                        yield "", f"{file} line {number}", line
            continue
        try:
            for number, row in enumerate(parquet_rows(file), start=1):
                yield file.name, f"{file} row {number}", row
        except UserError:
            raise
        except (pa.ArrowException, MemoryError, ValueError, OverflowError) as error:  # such as a date after 9999
            raise UserError(f"{file} cannot be read as a Parquet file: {short(str(error), 300)}") from error


def parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, with the memory of a batch."""
    import pyarrow.parquet as pq

    check_regular(file)
    with pq.ParquetFile(file) as parquet:
        for batch in parquet.iter_batches(batch_size=BATCH):
            yield from batch.to_pylist()


def _parse_rollout(item: bytes | dict[str, Any], file: str, place: str, group_by: str, reward_key: str) -> Rollout:
    """Return the rollout of a line or row; raise UserError if it is not an object with a group and a reward."""
    try:
        values = json.loads(item) if isinstance(item, bytes) else item
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error}).") from None
    if not isinstance(values, dict) or depth(values) > DEEPEST:
        raise UserError(f"{place} is not a JSON object of at most {DEEPEST} levels, but {short(str(values)[:200])}.")
    for key, option in ((group_by, "--group_by"), (reward_key, "--reward_key")):
        if key not in values:
            keys = short(", ".join(map(repr, values)) or "none", 200)
            raise UserError(
                f"{place} has no key {short(repr(key))}; it has {keys}.{suggest(key, values)} {option} names the key."
            )
    from ..selection import REWARD_LIMIT  # as in training

    reward = math.nan if values[reward_key] is None else values[reward_key]
    if not isinstance(reward, bool | int | float) or abs(reward) > REWARD_LIMIT:
        raise UserError(
            f"{place}: {reward_key} is {short(repr(reward))}, expected a number up to {REWARD_LIMIT:g}, true, false or "
            "null."
        )
    group = json.dumps(values[group_by], sort_keys=True, default=str)
    return Rollout(values, file, file + group, float(reward))


def keep_rows(
    rows: list[Rollout], keep: int, batch_rows: int | None, rule: str, when: str, seed: int, *, over_batch: bool
) -> dict[int, dict[str, Any]]:
    """Select in every group, or over the groups of each file; return rank and advantage of each kept row, by its index.

    A batch keeps `batch_rows`, or `keep` times its groups, or all rows if it has fewer; of a single row it keeps none.
    """
    import torch

    from .. import selection

    if over_batch:
        selection.get_batch_rule(rule)
    else:
        selection.get_rule(rule)
    # A file is a batch. For selection of each prompt, every group is a batch of its own.
    batches: dict[str, dict[str, list[int]]] = {}  # the indices of the rows, by batch and group
    for index, row in enumerate(rows):
        batch = batches.setdefault(row.file if over_batch else row.group, {})
        batch.setdefault(row.group, []).append(index)
    advantage_of: dict[int, float] = {}  # by the index of a kept row
    generator = torch.Generator().manual_seed(seed)
    for batch in batches.values():
        groups = list(batch.values())
        size = sum(map(len, groups))
        if over_batch and size == 1:  # it has no signal, and a batch keeps no such rollout
            continue
        rewards = [torch.tensor([rows[index].reward for index in group], dtype=torch.float64) for group in groups]
        # Groups may differ in size: shorter ones are filled up with unscored rollouts.
        rewards_PN = torch.nn.utils.rnn.pad_sequence(rewards, batch_first=True, padding_value=math.nan)
        chosen: selection.Selection | selection.BatchSelection
        try:
            if over_batch:
                rows_to_keep = min(keep * len(groups), size) if batch_rows is None else batch_rows
                if rows_to_keep > size:
                    raise ValueError(f"--rows {rows_to_keep} is more than the {size} rollouts of a batch. Lower it.")
                chosen = selection.select_batch(rewards_PN, rows_to_keep, rule, generator=generator)
                kept = chosen.mask().nonzero().tolist()
            else:
                chosen = selection.select(rewards_PN, min(keep, size), rule, generator)
                kept = [[0, index] for index in chosen.indices[0].tolist()]
            advantages = selection.advantages(rewards_PN, chosen, when=when)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise UserError(f"Cannot select: {error}") from error
        for (prompt, rollout), advantage in zip(kept, advantages.flatten().tolist(), strict=True):
            # A rule of the user's own may keep unscored rollouts, even those that a shorter group is filled up with.
            if rollout < len(groups[prompt]):
                advantage_of[groups[prompt][rollout]] = advantage
    return _additions(rows, advantage_of)


def _additions(rows: list[Rollout], advantages: dict[int, float]) -> dict[int, dict[str, Any]]:
    """Return rank, within its group, and advantage of each kept row by its index; rank 1 is the highest reward."""

    def order(index: int) -> tuple[float, int]:
        reward = rows[index].reward
        return (math.inf if math.isnan(reward) else -reward, index)  # unscored ones last, ties in the file's order

    added: dict[int, dict[str, Any]] = {}
    ranks: Counter[str] = Counter()
    for index in sorted(advantages, key=order):
        group = rows[index].group
        ranks[group] += 1
        added[index] = {"selected_rank": ranks[group], "advantage": advantages[index]}
    return dict(sorted(added.items()))


def _summarise(rows: list[Rollout], kept: dict[int, dict[str, Any]], keep: int | None, output: str | None) -> None:
    """Print rows, groups, mean rewards and where the kept rows are. Without `keep` they are kept of a batch."""
    out = console(stderr=output == "-")
    for name, part in (("all", rows), ("kept", [rows[index] for index in kept])):
        scored = [row.reward for row in part if not math.isnan(row.reward)]
        out.print(f"{name:<4} {counted(len(part), 'row')}, mean reward {mean(scored or [math.nan]):.4g}")
    sizes = Counter(row.group for row in rows)
    if keep is None:
        without_rows = len(sizes) - len({rows[index].group for index in kept})
        out.print(f"{counted(len(sizes), 'group')}, {without_rows} without kept rows")
    else:
        with_signal = {rows[index].group for index, additions in kept.items() if additions["advantage"] != 0}
        without_signal = len(sizes) - len(with_signal)
        out.print(f"{counted(len(sizes), 'group')}, {without_signal} whose kept rows all have advantage 0 (no signal)")
        small_groups = [group for group, size in sizes.items() if size < keep]
        if small_groups:
            count = counted(len(small_groups), "group")
            out.print(f"[yellow]{count} of fewer than {keep} rows: all rows are kept[/yellow]")
    if output is None:
        out.print("Nothing written: give --output FILE for the kept rows.")
    elif output != "-":
        out.print(f"Kept rows: {safe_text(output)}")
