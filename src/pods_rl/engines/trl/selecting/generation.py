"""One generation: n rollouts of each prompt, of which m are kept and trained.

TRL's method runs once, on n rows a prompt. Between its generation and its log-probabilities the rollouts are scored and
selected, and its lists are shortened to the kept rows. A kept row moves to the process that trains it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ....errors import UserError
from ....tables import columns_of
from ..batching import Shares
from ..compat import Batch, Generated, TRLTrainer
from .record import Rollouts, total_reward

Columns = dict[Any, Sequence[Any]]  # by name, a value for each rollout of this process


def copies(values: Sequence[Any]) -> list[Any]:
    """Copy each value by itself: `copy.deepcopy` of the list would keep objects that two values share."""
    return [copy.deepcopy(value) for value in values]


@dataclass
class Generation:
    """The rollouts of one run of TRL's method.

    Rollouts are numbered over all processes: rollout i of group g is number g n + i. Rows are the kept ones, P x m.

    Args:
        shares: the rollouts that each process generates, and the rows that it trains.
        process: this one.
        inputs: TRL's rows of this process, m of each prompt.
        key: of this generation's random draws; seed, step, and how many generations the step had before.
        calculate_rewards: TRL's method, or a subclass's.
    """

    shares: Shares
    process: int
    inputs: list[Batch]
    key: tuple[int, int, int]
    calculate_rewards: Callable[..., Tensor]
    rollouts: list[Batch] = field(init=False)  # the list that TRL's method runs on
    selected: Selected | None = None  # once `_generate` has scored and selected

    def __post_init__(self) -> None:
        # Each rollout has its own objects, as TRL's rows have: a tool or a reward may change its arguments.
        self.rollouts = copies(self.data_rows())

    @property
    def numbers(self) -> range:
        """The rollouts that this process generates."""
        return self.shares.rollouts(self.process)

    @property
    def rows(self) -> range:
        """The rows that this process trains."""
        return self.shares.rows(self.process)

    def data_rows(self) -> list[Batch]:
        """Return TRL's row of the prompt of each rollout of this process."""
        return [self.row_of(number) for number in self.numbers]

    def row_of(self, number: int) -> Batch:
        """Return TRL's row of a rollout's prompt; this process trains rows of every prompt that it generates for."""
        group = number // self.shares.num_rollouts
        first_row = group * self.shares.num_generations
        # The first rows of the group may be another process's.
        return self.inputs[max(first_row, self.rows.start) - self.rows.start]

    def index_here(self, number: int) -> int:
        """Return a rollout's index in the lists of this process.

        A rollout of another process has the index of one of the same prompt.
        """
        numbers_here = self.numbers
        if number in numbers_here:
            return number - numbers_here.start
        first_of_group = number // self.shares.num_rollouts * self.shares.num_rollouts
        return max(first_of_group, numbers_here.start) - numbers_here.start

    def add_fields(self, output: Generated) -> None:
        """Add the fields that a rollout function returned to the rollouts, as TRL passes them to reward functions."""
        for name, values in output.extra_fields.items():
            for i, row in enumerate(self.rollouts):
                row[name] = values[i] if isinstance(values, list) else values

    def columns(self, prompts: list[Any], output: Generated, logged: Mapping[str, list[Any]]) -> Columns:
        """Return all that TRL has of each rollout of this process; `output_of` makes results of them again.

        Args:
            prompts: TRL's argument of `_generate`, with images and with what the environment said first.
            output: its results.
            logged: columns that reward functions logged.
        """
        rows = len(prompts)
        columns: dict[Any, Any] = {"prompt": prompts}
        for name, values in output._asdict().items():
            if name != "extra_fields" and values is not None:
                columns[name] = values
        # Without images from `_generate`, TRL would take those of all n rows from the data set.
        columns["images"] = output.images or [_data_images(row) for row in self.rollouts]
        columns["tool_images"] = output.tool_images or [[]] * rows
        for name, values in output.extra_fields.items():
            columns["field", name] = values if isinstance(values, list) else [values] * rows
        for name, values in logged.items():
            if len(values) == rows:
                columns["logged", name] = values
        return columns

    def moves(self, kept: Sequence[int]) -> Moves:
        """Return how each kept rollout moves to the process that trains it.

        Args:
            kept: the numbers of the kept rollouts of all processes, in the order of the rows.
        """
        return Moves.of(kept, self.shares.rollouts_each, range(len(kept)), self.shares.rows_each)

    def scores_of_kept_rows(self, *columns: Sequence[Any]) -> Tensor:
        """Return the scores where TRL calls `_calculate_rewards`, after `_generate`: the kept rows have theirs."""
        if self.selected is None:  # a subclass's `_generate` that did not call ours: `result_of` raises
            return self.calculate_rewards(*columns)
        return self.selected.kept_scores

    def result_of(self, batch: Batch, name: str) -> Selected:
        """Return what was selected; raise UserError unless TRL built its batch from the kept rows.

        Args:
            name: of the trainer's class.
        """
        if self.selected is None or len(batch["completion_ids"]) != len(self.rows):
            raise UserError(
                f"{name}._generate returned {len(batch['completion_ids'])} rows without a selection; PODSTrainer keeps "
                f"{len(self.rows)} of them in its own `_generate`. Call super()._generate(prompts) with TRL's list of "
                "prompts, or override `_generate_single_turn`."
            )
        return self.selected


@dataclass
class Selected:
    """What a generation holds once its rollouts are scored and selected.

    Args:
        record: of its rollouts, and of those that dynamic sampling adds.
        scores: `[G * n, F]` of all processes, as the method that calculates rewards returned them.
        kept_scores: `[P * m, F]`, from which TRL computes advantages; NaN for a row that is masked out, so that it has
            advantage 0 and does not count in its group's mean.
        unreplaced: bool `[P]`, groups that dynamic sampling found dead and could not replace.
    """

    record: Rollouts
    scores: Tensor
    kept_scores: Tensor
    unreplaced: Tensor

    @classmethod
    def of(cls, record: Rollouts, scores: Tensor) -> Selected:
        """Return it for a record whose rows are selected, before dynamic sampling."""
        kept = record.kept_numbers()
        kept_scores = scores[kept]  # [P * n, F] -> [P * m, F]
        if record.masked is not None:
            masked = record.masked.flatten()[kept].to(scores.device)  # [P, N] -> [P * m]
            kept_scores = kept_scores.masked_fill(masked.unsqueeze(1), torch.nan)
        return cls(record, scores, kept_scores, torch.zeros(len(record.groups), dtype=torch.bool))


@dataclass
class Built:
    """A generation that is selected, and the batch that TRL built of the rows of this process."""

    batch: Batch
    generation: Generation
    selected: Selected


# -- the rollouts that TRL generated -----------------------------------------------------------------------------------


def record_of(
    generation: Generation, trainer: TRLTrainer, prompts: Sequence[Any], output: Generated, scores: Tensor
) -> Rollouts:
    """Return the record of a generation that is scored, before its lists are shortened; nothing is kept yet.

    Args:
        scores: `[P * n, F]` of all processes.
    """
    n = generation.shares.num_rollouts
    numbers = list(generation.numbers)
    return Rollouts(
        step=trainer.state.global_step + 1,
        inputs=generation.data_rows(),
        prompts=list(prompts),
        completions=list(output.completions),
        completion_tokens=[len(ids) for ids in output.completion_ids],
        reward_names=list(trainer.reward_func_names),
        rewards_per_func=scores[numbers],
        numbers=numbers,
        rewards=total_reward(scores.cpu(), trainer.reward_weights, n, trainer.multi_objective_aggregation),
        kept=torch.empty(0, dtype=torch.int64),
        groups=torch.arange(generation.shares.prompts),
        turn_rewards=_turn_rewards(trainer, output),
        masked=masked_rollouts(generation.shares, output, trainer),
    )


def _turn_rewards(trainer: TRLTrainer, output: Generated) -> list[Any]:
    """Return the rewards by turn that environments hold, or else those that a rollout function returned."""
    # copies: the environment's next rollout may change its own
    held = copies([getattr(environment, "turn_rewards", None) for environment in trainer.environments or ()])
    if any(rewards is not None for rewards in held):
        return held
    return list(output.extra_fields.get("turn_rewards") or ())


def masked_rollouts(shares: Shares, output: Generated, trainer: TRLTrainer) -> Tensor | None:
    """Return which rollouts have no token in the loss, over all processes, bool `[P, N]`.

    These are truncated ones with `mask_truncated_completions`, empty ones, and those of which a tool or the mask of a
    rollout function (`env_mask`) leaves no token of the policy.

    None with n = m: there is nothing to select, and the rows stay TRL's. Call this on every process.

    Args:
        output: of this process's rollouts.
    """
    n = shares.num_rollouts
    if n == shares.num_generations:
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
    """Return the results of TRL's `_generate`, from the columns of `Generation.columns`."""
    results: dict[str, Any] = {name: columns.get(name) for name in Generated._fields}
    results["extra_fields"] = named(columns, "field")
    if not any(results["images"]):
        results["images"] = None
    if not any(results["tool_images"]):
        results["tool_images"] = []
    return Generated(**results)


def named(columns: Columns, kind: str) -> dict[str, Any]:
    """Return the columns of one kind by their own names.

    >>> named({"prompt": [1], ("logged", "length"): [7]}, "logged")
    {'length': [7]}
    """
    return {name[1]: values for name, values in columns.items() if isinstance(name, tuple) and name[0] == kind}


class Moves(NamedTuple):
    """Where each row is and where it is trained, over all processes."""

    indices: list[int]  # in the lists of its source
    sources: list[int]  # the process that has it
    targets: list[int]  # the process that trains it

    @classmethod
    def of(cls, numbers: Sequence[int], numbers_each: int, rows: Sequence[int], rows_each: int) -> Moves:
        """Return the moves of rows, each process having a contiguous range.

        Args:
            numbers: of each row, its number where it was generated, over all processes.
            numbers_each: how many of these a process has.
            rows: of each, the row that it becomes, over all processes.
            rows_each: how many of these a process trains.

        >>> Moves.of([1, 6], 4, [0, 1], 1)
        Moves(indices=[1, 2], sources=[0, 1], targets=[0, 1])
        """
        return cls(
            indices=[number % numbers_each for number in numbers],
            sources=[number // numbers_each for number in numbers],
            targets=[row // rows_each for row in rows],
        )

    def changing(self) -> int:
        """Return how many rows change their process."""
        return sum(source != target for source, target in zip(self.sources, self.targets, strict=True))


def move_rows(columns: Columns, moves: Moves, accelerator: Accelerator) -> Columns:
    """Return the columns of the rows whose target is this process. Call this on every process.

    Rows that change their process travel to all of them as pickles, as accelerate sends objects.

    Args:
        columns: of this process's rows.
        moves: of all rows.
        accelerator: of this process.

    Example:
        >>> from accelerate import Accelerator
        >>> moves = Moves(indices=[2, 0], sources=[0, 0], targets=[0, 0])
        >>> move_rows({"text": ["a", "b", "c"]}, moves, Accelerator(cpu=True))
        {'text': ['c', 'a']}
    """
    process = accelerator.process_index
    rows_here: dict[int, Batch] = {}
    for row, source in enumerate(moves.sources):
        if source == process:
            index = moves.indices[row]
            rows_here[row] = {name: values[index] for name, values in columns.items()}
    if moves.changing():
        # Only these: most rows stay, and rows with images are large.
        leaving = [(row, values) for row, values in rows_here.items() if moves.targets[row] != process]
        rows_here |= dict(gather_object(leaving))
    # another process may have columns of its own, logged for some rows only
    return columns_of([rows_here[row] for row, target in enumerate(moves.targets) if target == process])
