"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): replace groups whose rewards are all equal.

TRL's method runs again on new prompts, and the batches are joined: a live group of the new batch takes the place of
a dead one. Groups that are still dead after the last round stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from datasets import IterableDataset
from torch import Tensor

from ...errors import UserError
from ...selection import is_constant
from .batching import Shares
from .compat import Batch, TRLTrainer, grpo_trainer, pad
from .config import group_sizes
from .rollout import Generation, move_rows, stable_seed

Generate = Callable[[list[Batch]], tuple[Batch, Generation]]

_PROMPT = ("prompt_ids", "prompt_mask")  # padded on the left; token types on both sides; all else on the right
_TYPES = ("token_type_ids", "mm_token_type_ids")


class DynamicSampling:
    """Replaces dead groups of a generation by groups of new prompts, at most `dynamic_sampling_rounds` times.

    Raises:
        UserError: `dynamic_sampling` names a reward function that does not exist, or the prompts are a stream.
    """

    def __init__(self, trainer: TRLTrainer) -> None:
        self._trainer = trainer
        name, names = trainer.args.dynamic_sampling, trainer.reward_func_names
        self.rounds = trainer.args.dynamic_sampling_rounds if name else 0
        self.drawn = 0  # new prompts so far; after a resume with the same number it continues with the same prompts
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

    def fill(self, batch: Batch, generation: Generation, generate: Generate) -> Batch:
        """Return the batch with dead groups replaced; its record then holds the rollouts of every round.

        Args:
            generation: whose record is completed.
            generate: runs TRL's method on rows of new prompts.
        """
        record, all_scores = generation.result()
        places, drawn = self._dead(generation).nonzero().flatten(), 0
        for _ in range(self.rounds):
            if not len(places):
                break
            more, other = generate(self._rows(len(places), generation.inputs[0]))
            new, scores = other.result()
            drawn += other.shares.prompts
            live = (~self._dead(other)).nonzero().flatten()[: len(places)]
            filled, places = places[: len(live)], places[len(live) :]
            batch = self._join(batch, generation.shares, filled, more, other.shares, live)
            self._replace_inputs(generation, filled, other, live)
            record.replace_groups(filled, new, live)
            all_scores = torch.cat([all_scores, scores])
        generation.scores = all_scores
        if self.rounds:
            metrics = self._trainer._metrics["train"]
            metrics["pods/dynamic_sampling/prompts_drawn"].append(float(drawn))
            metrics["pods/dynamic_sampling/live_share"].append(1 - len(places) / len(record.groups))
        return batch

    def _dead(self, generation: Generation) -> Tensor:
        """Return which groups have equal rewards, in total or of the named function, bool `[G]`."""
        (record, scores), name = generation.result(), self._trainer.args.dynamic_sampling
        if isinstance(name, str):
            return is_constant(scores[:, record.reward_names.index(name)].view(record.rewards.shape)).cpu()
        return is_constant(record.rewards)

    def _rows(self, count: int, like: Batch) -> list[Batch]:
        """Return TRL's rows of new prompts for this process: m of each prompt, equal numbers on every process."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        n, m = group_sizes(trainer.args)
        unit = accelerator.num_processes // math.gcd(accelerator.num_processes, m, n)
        prompts = self.draw(-(-count // unit) * unit)
        rows = Shares(len(prompts), n, m, accelerator.num_processes).rows(accelerator.process_index)
        found = {row // m: trainer.train_dataset[prompts[row // m]] for row in rows}
        # A column that only `like` has was added by a subclass, which adds it to these rows too.
        columns = [name for name in like if name in trainer.train_dataset.column_names]
        return [{name: found[row // m][name] for name in columns} for row in rows]

    def draw(self, count: int) -> list[int]:
        """Return the data set's indices of the next new prompts, the same on every process: shuffled epoch by epoch."""
        found: list[int] = []
        size = len(self._trainer.train_dataset)
        while len(found) < count:
            epoch, place = divmod(self.drawn, size)
            # Seeded differently from the sampler of the training data, which takes the seed itself.
            generator = torch.Generator().manual_seed(stable_seed(self._trainer.args.seed, epoch))
            some = torch.randperm(size, generator=generator)[place : place + count - len(found)].tolist()
            found += some
            self.drawn += len(some)
        return found

    def _join(self, batch: Batch, own: Shares, places: Tensor, more: Batch, other: Shares, groups: Tensor) -> Batch:
        """Return a batch in which rows of `more` take the places of this process's rows of dead groups.

        Args:
            own, other: who trains the rows of `batch` and of `more`.
            places, groups: int64 `[D]`, dead groups of `batch`, and the group of `more` for each.
        """
        accelerator, m = self._trainer.accelerator, own.num_generations
        here = own.rows(accelerator.process_index)
        to, taken = ((groups_D[:, None] * m + torch.arange(m)).flatten().tolist() for groups_D in (places, groups))
        # A row has its own memory: a pickled part of a tensor holds all of it.
        columns: Batch = {
            name: [value.clone() if isinstance(value, Tensor) else value for value in values]
            for name, values in _by_row(more).items()
        }
        arrived = move_rows(
            columns,
            [row % other.rows_each for row in taken],
            [row // other.rows_each for row in taken],
            [row // own.rows_each for row in to],
            accelerator,
        )
        replaced = {
            row - here.start: {name: values[i] for name, values in arrived.items() if values[i] is not None}
            for i, row in enumerate(row for row in to if row in here)
        }
        joined = join_rows(batch, replaced, self._trainer._tokenizer.pad_token_id)
        mask = joined["completion_mask"]
        tokens = mask * joined["tool_mask"] if "tool_mask" in joined else mask
        joined["num_items_in_batch"] = accelerator.gather(tokens.sum()).sum()
        return joined

    def _replace_inputs(self, generation: Generation, places: Tensor, other: Generation, groups: Tensor) -> None:
        """Replace TRL's rows of dead groups by those of `other`, in place.

        A subclass that reads a column of its rows once the batch is complete reads that of the prompts in the batch.
        """
        m = generation.shares.num_generations
        here = generation.rows
        replaced = _rows_of_groups(places, m)
        taken = _rows_of_groups(groups, m)
        arrived = move_rows(
            {"row": other.inputs},
            [row % other.shares.rows_each for row in taken],
            [row // other.shares.rows_each for row in taken],
            [row // generation.shares.rows_each for row in replaced],
            self._trainer.accelerator,
        )
        rows_here = [row for row in replaced if row in here]
        for row, values in zip(rows_here, arrived.get("row", []), strict=True):
            generation.inputs[row - here.start] = values


def _rows_of_groups(groups_D: Tensor, m: int) -> list[int]:
    """Return the numbers of the m rows of each group, over all processes."""
    return (groups_D[:, None] * m + torch.arange(m)).flatten().tolist()


def _by_row(batch: Batch) -> Batch:
    """Return what a batch has by row: row tensors `[B, ...]`, and lists of a value a row for images."""
    rows = len(batch["completion_ids"])
    split = grpo_trainer.split_pixel_values_by_grid({name: value for name, value in batch.items() if value is not None})
    return {
        name: value
        for name, value in split.items()
        if (isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)) and len(value) == rows
    }


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
    rows, device = _by_row(batch), batch["advantages"].device
    every = [
        replaced.get(i) or {name: values[i] for name, values in rows.items()} for i in range(len(rows["advantages"]))
    ]
    widths = [len(row["prompt_ids"]) for row in every]
    fills = {"prompt_ids": pad_token_id, "completion_ids": pad_token_id, "tool_mask": 1}
    joined = dict(batch)  # TRL reads the number of rows from the first entry
    for name, like in {name: value for row in every for name, value in row.items()}.items():
        # A row without images, where other rows have some, has none of their inputs.
        nothing = like[:0] if isinstance(like, Tensor) and like.ndim else 0
        own = [row.get(name, nothing) for row in every]
        if isinstance(rows.get(name, []), list):  # of images: a value a row
            joined[name] = own
            continue
        own = [one.to(device) for one in own]
        if like.ndim != 1:
            joined[name] = torch.stack(own)
        elif name in _TYPES:
            parts = [one.tensor_split([width]) for one, width in zip(own, widths, strict=True)]
            prompts, completions = zip(*parts, strict=True)
            joined[name] = torch.cat([pad(list(prompts), 0, "left"), pad(list(completions), 0)], dim=1)
        else:
            joined[name] = pad(own, fills.get(name, 0), "left" if name in _PROMPT else "right")
    return grpo_trainer.unsplit_pixel_values_by_grid(joined)
