"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): replace groups whose rewards are all equal.

TRL's method runs again on new prompts, and the batches are joined: a live group of the new batch takes the place of
a dead one. Old and reference log-probabilities are then computed again at the padding of the joined batch. Groups that
are still dead after the last round stay, with advantages of 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from datasets import IterableDataset
from torch import Tensor

from ....errors import UserError
from ....selection import is_constant
from ...measuring import gives_up
from ...seeds import seeded_generator
from ..batching import Shares
from ..compat import IMAGE_INPUTS, Batch, TRLTrainer, disable_gradient_checkpointing, grpo_trainer, pad, use_adapter
from ..config import group_sizes
from .generation import Built, Generation, Moves, Selected, move_rows

logger = logging.getLogger(__name__)

WARN_AFTER = 8  # rounds in a row without a live group
_ADVICE = (
    "Use prompts that the policy answers right sometimes, another reward or more rollouts (num_rollouts), or lower "
    "dynamic_sampling_rounds."
)

Generate = Callable[[list[Batch]], Built]

# How TRL pads: prompts on the left, token types on both sides, all else on the right.
_PROMPT = ("prompt_ids", "prompt_mask")
_TYPES = ("token_type_ids", "mm_token_type_ids")


class DynamicSampling:
    """Replaces dead groups of a generation by groups of new prompts, at most `dynamic_sampling_rounds` times.

    It stops earlier after one pass over the prompts, and at least 256 of them, without a live group.

    Raises:
        UserError: `dynamic_sampling` names a reward function that does not exist, or the prompts are a stream.
    """

    def __init__(self, trainer: TRLTrainer) -> None:
        self._trainer = trainer
        name = trainer.args.dynamic_sampling
        names = trainer.reward_func_names
        self.rounds = trainer.args.dynamic_sampling_rounds if name else 0
        self.drawn = 0  # new prompts so far; after a resume with the same number it continues with the same prompts
        self._rounds_in_vain = 0  # in a row, over all steps
        self._gave_up = False
        if isinstance(name, str) and name not in names:
            raise UserError(
                f"dynamic_sampling = {name!r} is not a reward function: got {', '.join(names)}. Name one of them, "
                "or set true for the total reward."
            )
        if name and isinstance(trainer.train_dataset, IterableDataset):
            raise UserError(
                "dynamic_sampling draws new prompts by their index, and a stream (IterableDataset) has none: pass "
                "a Dataset, or set dynamic_sampling: false."
            )

    def fill(self, built: Built, generate: Generate) -> None:
        """Replace dead groups of a batch; its record then holds the rollouts of every round.

        Args:
            built: gets the joined batch, the record and scores of all rounds, and which groups were not replaced.
            generate: runs TRL's method on rows of new prompts.
        """
        if not self.rounds:
            return
        selected = built.selected
        is_dead = self._is_dead(selected)
        dead_groups = is_dead.nonzero().flatten()
        drawn = 0
        drawn_in_vain = 0  # since the last live group
        has_joined = False
        for number in range(1, self.rounds + 1):
            if not len(dead_groups) or self._gives_up(drawn_in_vain):
                break
            new = generate(self.new_rows(len(dead_groups), built.generation.inputs[0]))
            prompts = new.generation.shares.prompts
            live_groups = (~self._is_dead(new.selected)).nonzero().flatten()[: len(dead_groups)]
            replaced = dead_groups[: len(live_groups)]
            if len(live_groups):
                self._join(built, replaced, new, live_groups)
                has_joined = True
            selected.record.replace_groups(replaced, new.selected.record, live_groups)
            selected.scores = torch.cat([selected.scores, new.selected.scores])
            dead_groups = dead_groups[len(live_groups) :]
            drawn += prompts
            drawn_in_vain = 0 if len(live_groups) else drawn_in_vain + prompts
            self._report(number, live_groups=len(live_groups), dead_groups=len(dead_groups), groups=len(is_dead))
        if has_joined:
            self._compute_again(built.batch)
        selected.unreplaced[dead_groups] = True
        metrics = self._trainer._metrics["train"]
        metrics["pods/dynamic_sampling/prompts_drawn"].append(float(drawn))
        metrics["pods/dynamic_sampling/live_share"].append(1 - len(dead_groups) / len(is_dead))

    def _is_dead(self, selected: Selected) -> Tensor:
        """Return which groups have equal rewards, in total or of the named function, bool `[G]`."""
        record = selected.record
        name = self._trainer.args.dynamic_sampling
        if not isinstance(name, str):
            return is_constant(record.scored_rewards(), self._trainer.args.reward_tolerance)
        named_GN = selected.scores[:, record.reward_names.index(name)].cpu().view(record.rewards.shape)
        if record.masked is not None:
            named_GN = named_GN.masked_fill(record.masked, torch.nan)
        return is_constant(named_GN, self._trainer.args.reward_tolerance)

    def _gives_up(self, drawn_in_vain: int) -> bool:
        """Return whether `drawn_in_vain` prompts without a live group are enough to stop; log it once."""
        if not gives_up(drawn_in_vain, len(self._trainer.train_dataset)):
            return False
        if not self._gave_up and self._trainer.is_world_process_zero():
            logger.warning(
                "Dynamic sampling in step %d: %d new prompts in a row had equal rewards (%s), as many as one pass over "
                "the data. No more are drawn for this batch; its other groups stay, with advantage 0. %s Logged once.",
                self._trainer.state.global_step + 1, drawn_in_vain, self._judge, _ADVICE,
            )  # fmt: skip
        self._gave_up = True
        return True

    def _report(self, number: int, *, live_groups: int, dead_groups: int, groups: int) -> None:
        """Log when rounds in a row, over all steps, found no live group: after 8, and at each doubling."""
        if live_groups:
            self._rounds_in_vain = 0
            return
        self._rounds_in_vain += 1
        is_power_of_two = self._rounds_in_vain & (self._rounds_in_vain - 1) == 0
        if self._rounds_in_vain < WARN_AFTER or not is_power_of_two or not self._trainer.is_world_process_zero():
            return
        logger.warning(
            "Dynamic sampling in step %d, round %d of %d: the last %d rounds found no prompt whose rewards differ "
            "(%s); %d of the batch's %d groups have equal rewards. %s",
            self._trainer.state.global_step + 1, number, self.rounds, self._rounds_in_vain, self._judge, dead_groups,
            groups, _ADVICE,
        )  # fmt: skip

    @property
    def _judge(self) -> str:
        name = self._trainer.args.dynamic_sampling
        return f"of the reward function {name!r}" if isinstance(name, str) else "in total"

    def _compute_again(self, batch: Batch) -> None:
        """Compute old and reference log-probabilities at the padding of a joined batch. Call this on every process.

        Each round computed them at its own padding. Padding on the left shifts the positions of a model whose positions
        are absolute (GPT-2), and the length of the batch changes some rotary frequencies.
        """
        trainer = self._trainer
        if "old_per_token_logps" not in batch and "ref_per_token_logps" not in batch:
            return
        with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
            if "old_per_token_logps" in batch:
                batch["old_per_token_logps"] = self._log_probs(trainer.model, batch)
            if "ref_per_token_logps" in batch:
                batch["ref_per_token_logps"] = self._reference_log_probs(batch)

    def _reference_log_probs(self, batch: Batch) -> Tensor:
        """Return log-probabilities of TRL's reference: a model, or an adapter's policy without it."""
        trainer = self._trainer
        if trainer.ref_model is not None:
            return self._log_probs(trainer.ref_model, batch)
        policy = trainer.accelerator.unwrap_model(trainer.model)
        adapter = "ref" if "ref" in policy.peft_config else None
        with use_adapter(policy, adapter_name=adapter):
            return self._log_probs(trainer.model, batch)

    def _log_probs(self, model: Any, batch: Batch) -> Tensor:
        """Return the log-probability of each completion token, `[B, T]`, by the trainer's own method."""
        trainer = self._trainer
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        images = {name: batch[name] for name in IMAGE_INPUTS if name in batch}
        log_probs, *_ = trainer._get_per_token_logps_and_entropies(
            model,
            ids,
            mask,
            batch["completion_ids"].size(1),
            batch_size=trainer.args.per_device_train_batch_size,
            **images,
        )
        return log_probs

    def new_rows(self, count: int, example: Batch) -> list[Batch]:
        """Return TRL's rows of new prompts for this process: m of each prompt, equal numbers on every process.

        Args:
            count: the least number of prompts; more are drawn if the processes could not share these equally.
            example: a row of TRL's, for the columns.
        """
        trainer = self._trainer
        accelerator = trainer.accelerator
        n, m = group_sizes(trainer.args)
        # With a multiple of `unit` prompts, all processes train equally many rows and generate equally many.
        unit = accelerator.num_processes // math.gcd(accelerator.num_processes, m, n)
        numbers = self.draw(math.ceil(count / unit) * unit)
        rows_here = Shares(len(numbers), n, m, accelerator.num_processes).rows(accelerator.process_index)
        # A column that only `example` has was added by a subclass, which adds it to these rows too.
        columns = [name for name in example if name in trainer.train_dataset.column_names]
        read: dict[int, Batch] = {}  # by prompt, its row of the data
        rows: list[Batch] = []
        for row in rows_here:
            prompt = row // m
            if prompt not in read:
                read[prompt] = trainer.train_dataset[numbers[prompt]]
            rows.append({name: read[prompt][name] for name in columns})
        return rows

    def draw(self, count: int) -> list[int]:
        """Return the data set's indices of the next new prompts, the same on every process: shuffled epoch by epoch."""
        numbers: list[int] = []
        size = len(self._trainer.train_dataset)
        while len(numbers) < count:
            epoch, start = divmod(self.drawn, size)
            # Seeded differently from the sampler of the training data, which takes the seed itself.
            generator = seeded_generator(self._trainer.args.seed, epoch)
            order = torch.randperm(size, generator=generator)
            of_this_epoch = order[start : start + count - len(numbers)].tolist()
            numbers += of_this_epoch
            self.drawn += len(of_this_epoch)
        return numbers

    def _join(self, built: Built, replaced: Tensor, new: Built, groups: Tensor) -> None:
        """Let rows of a new batch replace this process's rows of dead groups, in the batch and in TRL's rows.

        A subclass that reads a column of its rows once the batch is complete reads that of the prompts in the batch.

        Args:
            replaced: int64 `[D]`, dead groups of the batch.
            groups: int64 `[D]`, the group of the new batch for each.
        """
        accelerator = self._trainer.accelerator
        generation = built.generation
        shares = generation.shares
        m = shares.num_generations
        new_rows = _rows_of_groups(groups, m)
        moves = Moves.of(new_rows, new.generation.shares.rows_each, _rows_of_groups(replaced, m), shares.rows_each)
        rows_here = _rows_here(generation, replaced)
        # A row has its own memory: a pickled part of a tensor holds all of it.
        columns: Batch = {name: _copied_rows(values) for name, values in _by_row(new.batch).items()}
        arrived = move_rows(columns, moves, accelerator)
        values_of_row: dict[int, Batch] = {}
        for i, row in enumerate(rows_here):
            # A row of another process lacks the columns that only this process has.
            values_of_row[row] = {name: values[i] for name, values in arrived.items() if values[i] is not None}
        joined = join_rows(built.batch, values_of_row, self._trainer._tokenizer.pad_token_id)
        tokens = joined["completion_mask"]
        if "tool_mask" in joined:
            tokens = tokens * joined["tool_mask"]
        joined["num_items_in_batch"] = accelerator.gather(tokens.sum()).sum()
        built.batch = joined
        arrived_inputs = move_rows({"row": new.generation.inputs}, moves, accelerator).get("row", [])
        for row, values in zip(rows_here, arrived_inputs, strict=True):
            generation.inputs[row] = values


def _rows_here(generation: Generation, groups: Tensor) -> list[int]:
    """Return the rows of some groups that this process trains, numbered in its batch."""
    rows_here = generation.rows
    rows = _rows_of_groups(groups, generation.shares.num_generations)
    return [row - rows_here.start for row in rows if row in rows_here]


def _copied_rows(values: Any) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def _rows_of_groups(groups_D: Tensor, m: int) -> list[int]:
    """Return the numbers of the m rows of each group, over all processes."""
    return (groups_D[:, None] * m + torch.arange(m)).flatten().tolist()


def _by_row(batch: Batch) -> Batch:
    """Return what a batch has by row: row tensors `[B, ...]`, and lists of a value a row for images."""
    rows = len(batch["completion_ids"])
    present = {name: value for name, value in batch.items() if value is not None}
    columns: Batch = {}
    for name, value in grpo_trainer.split_pixel_values_by_grid(present).items():
        is_column = isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)
        if is_column and len(value) == rows:
            columns[name] = value
    return columns


def join_rows(batch: Batch, replaced: dict[int, Batch], pad_token_id: int) -> Batch:
    """Return TRL's batch with some rows replaced, padded as TRL pads.

    Args:
        batch: of TRL.
        replaced: by row, its values as `_by_row` splits them; on any device.
        pad_token_id: fills token ids.

    Example:
        >>> batch = {"prompt_ids": torch.tensor([[1], [2]]), "completion_ids": torch.tensor([[5, 6], [7, 0]])}
        >>> batch["advantages"] = torch.tensor([0.5, 0.0])
        >>> row = {"prompt_ids": torch.tensor([3]), "completion_ids": torch.tensor([4, 4, 4])}
        >>> joined = join_rows(batch, {1: row | {"advantages": torch.tensor(1.0)}}, pad_token_id=0)
        >>> joined["completion_ids"].tolist(), joined["advantages"].tolist()
        ([[5, 6, 0], [4, 4, 4]], [0.5, 1.0])
    """
    device = batch["advantages"].device
    columns = _by_row(batch)
    rows: list[Batch] = []
    examples: Batch = {}  # of each column, a value
    for i in range(len(columns["advantages"])):
        row = replaced.get(i) or {name: values[i] for name, values in columns.items()}
        rows.append(row)
        examples.update(row)
    widths = [len(row["prompt_ids"]) for row in rows]
    joined = dict(batch)  # TRL reads the number of rows from the first entry
    for name, example in examples.items():
        # A row without images, where other rows have some, has none of their inputs.
        empty = example[:0] if isinstance(example, Tensor) and example.ndim else 0
        values = [row.get(name, empty) for row in rows]
        if isinstance(columns.get(name, []), list):  # of images: a value a row
            joined[name] = values
        else:
            joined[name] = _joined_column(name, [value.to(device) for value in values], widths, pad_token_id)
    return grpo_trainer.unsplit_pixel_values_by_grid(joined)


def _joined_column(name: str, values: list[Tensor], widths: list[int], pad_token_id: int) -> Tensor:
    """Return a column of a batch, `[B, ...]`, from the value of each row, padded as TRL pads it.

    Args:
        widths: of each row's prompt.
    """
    if values[-1].ndim != 1:
        return torch.stack(values)
    if name in _TYPES:
        prompts: list[Tensor] = []
        completions: list[Tensor] = []
        for value, width in zip(values, widths, strict=True):
            prompts.append(value[:width])
            completions.append(value[width:])
        return torch.cat([pad(prompts, 0, "left"), pad(completions, 0)], dim=1)
    fill = 0
    if name in ("prompt_ids", "completion_ids"):
        fill = pad_token_id
    elif name == "tool_mask":
        fill = 1
    return pad(values, fill, "left" if name in _PROMPT else "right")
