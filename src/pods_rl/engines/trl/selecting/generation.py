"""One generation: n rollouts of each prompt, of which some are kept and trained.

TRL's method runs once, on n rows a prompt. Between its generation and its log-probabilities the rollouts are scored and
selected, and its lists are shortened to the kept rows. A kept row moves to the process that trains it. If dynamic
sampling generates further prompts, their rollouts join before the lists are shortened.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ....errors import UserError
from ....tables import columns_of
from ..batching import Shares
from ..compat import Batch, Generated, TRLTrainer, row_lists
from .record import Rollouts, total_reward

Columns = dict[Any, Sequence[Any]]  # by name, a value for each rollout of this process


def copies(values: Sequence[Any]) -> list[Any]:
    """Copy each value by itself: `copy.deepcopy` of the list would keep objects that two values share."""
    return [copy.deepcopy(value) for value in values]


@dataclass
class Round:
    """The rollouts of one call of TRL's `_generate`: all of a generation, or those of further prompts.

    Rollouts are numbered over all processes and rounds: rollout i of prompt p is number p n + i.

    Args:
        shares: the rollouts that each process generates.
        process: this one.
        inputs: TRL's rows of this process, equally many of each prompt.
        key: of the rule's random draws; seed, step, and how many rounds the step had before.
        first_group: the groups of the rounds before it.
        offset: the rollouts of this process in the rounds before it.
    """

    shares: Shares
    process: int
    inputs: list[Batch]
    key: tuple[int, int, int]
    first_group: int
    offset: int
    rollouts: list[Batch] = field(init=False)  # the list that TRL's method runs on
    # Set by `take`, once it is generated and scored:
    columns: Columns = field(init=False)  # of each rollout of this process
    lists: list[list[Any]] = field(init=False)  # TRL's lists of rows (`ROW_LISTS`), before they are shortened
    scores: Tensor = field(init=False)  # [P * n, F] of all processes
    record: Rollouts = field(init=False)  # nothing is kept yet

    def __post_init__(self) -> None:
        # Each rollout has its own objects, as TRL's rows have: a tool or a reward may change its arguments.
        self.rollouts = copies(self.data_rows())

    @property
    def numbers(self) -> range:
        """The rollouts that this process generates, counted in this round."""
        return self.shares.rollouts(self.process)

    def data_rows(self) -> list[Batch]:
        """Return TRL's row of the prompt of each rollout of this process."""
        rows_of_all = len(self.inputs) * self.shares.processes
        each = rows_of_all // self.shares.prompts  # of each prompt
        first = self.process * len(self.inputs)
        rows: list[Batch] = []
        for number in self.numbers:
            row = number // self.shares.num_rollouts * each  # the first rows of the group may be another process's
            rows.append(self.inputs[max(row, first) - first])
        return rows

    def take(self, trainer: TRLTrainer, prompts: list[Any], output: Generated, scores: Tensor) -> None:
        """Keep all that TRL has of each rollout of this process as columns, and make the record.

        Args:
            prompts: TRL's argument of `_generate`, with images and the first observation of an environment.
            output: its results. `output_of` makes them of columns again.
            scores: `[P * n, F]` of all processes.
        """
        rows = len(prompts)
        columns: dict[Any, Any] = {"prompt": list(prompts), "data": self.data_rows()}
        for name, values in output._asdict().items():
            if name != "extra_fields" and values is not None:
                columns[name] = values
        # Without images from `_generate`, TRL would take those of all n rows from the data set.
        columns["images"] = output.images or [_data_images(row) for row in self.rollouts]
        columns["tool_images"] = output.tool_images or [[]] * rows
        for name, values in output.extra_fields.items():
            columns["field", name] = values if isinstance(values, list) else [values] * rows
        for name, values in list(trainer._pending_extra_logs.items()):
            if len(values) == rows:  # logged by reward functions
                columns["logged", name] = trainer._pending_extra_logs.pop(name)
        self.columns = columns
        self.lists = [list(values) for values in row_lists(trainer, rows)]
        self.scores = scores
        n = self.shares.num_rollouts
        here = list(self.numbers)
        self.record = Rollouts(
            step=trainer.state.global_step + 1,
            inputs=self.data_rows(),
            prompts=list(prompts),
            completions=list(output.completions),
            completion_tokens=[len(ids) for ids in output.completion_ids],
            reward_names=list(trainer.reward_func_names),
            rewards_per_func=scores[here],
            numbers=[self.first_group * n + number for number in here],
            rewards=total_reward(scores.cpu(), trainer.reward_weights, n, trainer.multi_objective_aggregation),
            kept=torch.empty(0, dtype=torch.int64),
            masked=masked_rollouts(self.shares, output, trainer),
        )


@dataclass
class Generation:
    """The rollouts from which one batch of TRL's is selected.

    Args:
        rows: R, over all processes.
        calculate_rewards: TRL's method, or a subclass's.
        rounds: the first one, and those of further prompts.
    """

    rows: int
    calculate_rewards: Callable[..., Tensor]
    rounds: list[Round] = field(default_factory=list)
    record: Rollouts = field(init=False)  # of all rounds, set by `keep`
    # `[R, F]`, from which TRL computes advantages; NaN for a row that is empty or masked out, so that it has advantage
    # 0 and does not count in its group's mean.
    kept_scores: Tensor | None = None

    @property
    def scores(self) -> Tensor:
        """The scores of all rounds as the method that calculates rewards returned them, `[P * n, F]`."""
        return torch.cat([round_.scores for round_ in self.rounds])

    @property
    def rows_here(self) -> range:
        """The rows that this process trains."""
        shares = self.rounds[0].shares
        each = self.rows // shares.processes
        return range(self.rounds[0].process * each, (self.rounds[0].process + 1) * each)

    def keep(self, kept: Tensor, is_ragged: bool) -> None:
        """Record which rollouts are kept, in the order of the rows.

        Args:
            kept: int64, at most R numbers.
            is_ragged: whether prompts may have different numbers of rows.
        """
        record = Rollouts.joined([round_.record for round_ in self.rounds])
        record.kept = kept
        record.is_ragged = is_ragged
        scores = self.scores
        kept_scores = scores[kept]
        if record.masked is not None:
            masked = record.masked.flatten()[kept].to(scores.device)
            kept_scores = kept_scores.masked_fill(masked.unsqueeze(1), torch.nan)
        # TRL expects the scores of R rows, also of those that no rollout fills.
        empty = scores.new_full((self.rows - len(kept), scores.size(1)), torch.nan)
        self.record = record
        self.kept_scores = torch.cat([kept_scores, empty])

    def shorten(self, trainer: TRLTrainer, prompts: list[Any]) -> tuple[Generated, int]:
        """Shorten TRL's lists, and `prompts`, to the rows that this process trains, in place.

        Returns:
            The results of TRL's `_generate` for these rows, and how many rows changed their process.
        """
        record = self.record
        process = trainer.accelerator.process_index
        each = self.rows // trainer.accelerator.num_processes
        n = self.rounds[0].shares.num_rollouts
        # The rounds become one; a column that a round does not have is None there.
        columns: dict[Any, Any] = {}
        for name in dict.fromkeys(name for round_ in self.rounds for name in round_.columns):
            columns[name] = []
            for round_ in self.rounds:
                columns[name] += round_.columns.get(name, [None] * len(round_.rollouts))
        lists = [list(chain(*parts)) for parts in zip(*(round_.lists for round_ in self.rounds), strict=True)]
        rollouts = [row for round_ in self.rounds for row in round_.rollouts]
        # In one round with the same number of rows of each prompt, rows have the data that TRL gave them.
        has_other_data = len(self.rounds) > 1 or record.is_ragged
        if not has_other_data:
            del columns["data"]
        group_here: dict[int, int] = {}  # by group, the index of one of its rollouts on this process
        for index, number in enumerate(record.numbers):
            group_here.setdefault(number // n, index)
        lengths = [len(ids) for ids in columns["completion_ids"]]
        shortest = min(range(len(lengths)), key=lengths.__getitem__)
        moves: list[tuple[int, int, int]] = []  # of each row: its process, its index there, the process that trains it
        # Of each row of this process, a rollout of this process, of the same prompt if any. A row that comes from
        # another process gets its row of the data, its environment and its tools, which are not sent.
        stand_ins: list[int] = []
        for row in range(self.rows):
            target = row // each
            if row >= len(record.kept):
                # An empty row is masked out of the loss once TRL has built the batch. Until then it is a copy of the
                # shortest rollout of its process, which alone reads the index.
                moves.append((target, shortest, target))
                stand_in = shortest
            else:
                number = int(record.kept[row])
                # Numbers continue from round to round: the last round that begins at or before it has it.
                round_ = next(r for r in reversed(self.rounds) if number >= r.first_group * n)
                source, index = divmod(number - round_.first_group * n, round_.shares.rollouts_each)
                index += round_.offset
                moves.append((source, index, target))
                stand_in = index if source == process else group_here.get(number // n, shortest)
            if target == process:
                stand_ins.append(stand_in)
        columns = dict(move_rows(columns, moves, trainer.accelerator))
        prompts[:] = columns["prompt"]
        trainer._pending_extra_logs.update(columns_of_kind(columns, "logged"))
        self.rounds[0].rollouts[:] = [rollouts[index] for index in stand_ins]
        for current, joined in zip(row_lists(trainer, None), lists, strict=True):
            current[:] = [joined[index] for index in stand_ins]
        if has_other_data:
            self.rounds[0].inputs[:] = columns["data"]  # a subclass reads columns of its rows once the batch is built
        return output_of(columns), sum(source != target for source, _, target in moves)

    def scores_of_kept_rows(self, trainer: TRLTrainer, *columns: Sequence[Any]) -> Tensor:
        """Return the scores where TRL calls `_calculate_rewards`, after `_generate`: the kept rows have theirs.

        Raises:
            UserError: a subclass's `_generate` returned other rows than ours.
        """
        rows = len(columns[-1])
        if self.kept_scores is None or rows != len(self.rows_here):
            raise UserError(
                f"{type(trainer).__name__}._generate returned {rows} rows without a selection; PODSTrainer keeps "
                f"{len(self.rows_here)} of them in its own `_generate`. Call super()._generate(prompts) with TRL's "
                "list of prompts, or override `_generate_single_turn`."
            )
        return self.kept_scores

    def empty_rows(self, batch: Batch, trainer: TRLTrainer) -> None:
        """Mask rows without a rollout out of the loss; means over rows count them. Call this on every process."""
        kept = len(self.record.kept)
        if kept == self.rows:
            return
        is_empty = torch.tensor([row >= kept for row in self.rows_here], device=batch["completion_mask"].device)
        tokens = batch["completion_mask"].masked_fill(is_empty.unsqueeze(1), 0)
        batch["completion_mask"] = tokens
        if "tool_mask" in batch:
            tokens = tokens * batch["tool_mask"]
        # The divisor of losses over tokens, in which TRL has counted the tokens of these rows.
        batch["num_items_in_batch"] = trainer.accelerator.gather(tokens.sum()).sum()
        trainer._metrics["train"]["pods/rows/empty"].append(float(self.rows - kept))


# -- the rollouts that TRL generated -----------------------------------------------------------------------------------


def masked_rollouts(shares: Shares, output: Generated, trainer: TRLTrainer) -> Tensor | None:
    """Return which rollouts have no token in the loss, over all processes, bool `[P, N]`.

    These are truncated ones with `mask_truncated_completions`, empty ones, and those of which a tool or the mask of a
    rollout function (`env_mask`) leaves no token of the policy.

    None if every rollout is trained: there is nothing to select, and the rows stay TRL's. Call this on every process.

    Args:
        output: of this process's rollouts.
    """
    n = shares.num_rollouts
    if trainer.args.keeps_all:
        return None
    ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}  # as TRL decides
    flags: list[int] = []
    for ids, tokens in zip(output.completion_ids, output.policy_tokens(), strict=True):
        is_cut = trainer.mask_truncated_completions and (not ids or ids[-1] not in ends)
        flags.append(int(is_cut or tokens == 0))
    flags_here = torch.tensor(flags, device=trainer.accelerator.device)
    masked_PN = trainer.accelerator.gather(flags_here).view(-1, n).bool().cpu()
    trainer._metrics["train"]["pods/masked_rollouts"].append(float(masked_PN.sum()))
    return masked_PN


# -- kept rollouts: from TRL's lists to those of the process that trains them ------------------------------------------


def _data_images(row: Batch) -> list[Any] | None:
    if "images" in row:
        return row["images"]
    if row.get("image") is None:
        return None
    return [row["image"]]


def output_of(columns: Columns) -> Generated:
    """Return the results of TRL's `_generate`, from the columns of `Round.take`."""
    results: dict[str, Any] = {name: columns.get(name) for name in Generated._fields}
    results["extra_fields"] = columns_of_kind(columns, "field")
    if not any(results["images"]):
        results["images"] = None
    if not any(results["tool_images"]):
        results["tool_images"] = []
    return Generated(**results)


def columns_of_kind(columns: Columns, kind: str) -> dict[str, Any]:
    """Return the columns of one kind by their own names.

    >>> columns_of_kind({"prompt": [1], ("logged", "length"): [7]}, "logged")
    {'length': [7]}
    """
    return {name[1]: values for name, values in columns.items() if isinstance(name, tuple) and name[0] == kind}


def move_rows(columns: Columns, moves: Sequence[tuple[int, int, int]], accelerator: Accelerator) -> Columns:
    """Return the columns of the rows whose target is this process. Call this on every process.

    Rows that change their process travel to all of them as pickles, as accelerate sends objects. A move is the process
    that has the row, its index there, and the process that trains it.

    Example:
        >>> from accelerate import Accelerator
        >>> move_rows({"text": ["a", "b", "c"]}, [(0, 2, 0), (0, 0, 0)], Accelerator(cpu=True))
        {'text': ['c', 'a']}
    """
    process = accelerator.process_index
    rows_here: dict[int, Batch] = {}
    for row, (source, index, _) in enumerate(moves):
        if source == process:
            rows_here[row] = {name: values[index] for name, values in columns.items()}
    if any(source != target for source, _, target in moves):
        # Only these: most rows stay, and rows with images are large.
        leaving = [(row, values) for row, values in rows_here.items() if moves[row][2] != process]
        rows_here |= dict(gather_object(leaving))
    # another process may have columns of its own, logged for some rows only
    return columns_of([rows_here[row] for row, (_, _, target) in enumerate(moves) if target == process])
