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

from ...errors import UserError
from ...selection import is_constant
from .batching import Shares
from .compat import Batch, TRLTrainer, disable_gradient_checkpointing, grpo_trainer, pad, use_adapter
from .config import group_sizes
from .generation import IMAGE_INPUTS
from .rollout import Generation, move_rows, stable_seed

logger = logging.getLogger(__name__)

WARN_AFTER = 8  # rounds in a row without a live group
GIVE_UP_AFTER = 256  # prompts in a row without a live group, and at least one pass over the prompts
_ADVICE = (
    "Use prompts that the policy answers right sometimes, another reward or more rollouts (num_rollouts), or lower "
    "dynamic_sampling_rounds."
)

Generate = Callable[[list[Batch]], tuple[Batch, Generation]]

_PROMPT = ("prompt_ids", "prompt_mask")  # padded on the left; token types on both sides; all else on the right
_TYPES = ("token_type_ids", "mm_token_type_ids")


class DynamicSampling:
    """Replaces dead groups of a generation by groups of new prompts, at most `dynamic_sampling_rounds` times.

    It stops earlier after one pass over the prompts, and at least 256 of them, without a live group.

    Raises:
        UserError: `dynamic_sampling` names a reward function that does not exist, or the prompts are a stream.
    """

    def __init__(self, trainer: TRLTrainer) -> None:
        self._trainer = trainer
        name, names = trainer.args.dynamic_sampling, trainer.reward_func_names
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

    def fill(self, batch: Batch, generation: Generation, generate: Generate) -> Batch:
        """Return the batch with dead groups replaced; its record then holds the rollouts of every round.

        Args:
            generation: whose record is completed; its `dead` then marks the groups that could not be replaced.
            generate: runs TRL's method on rows of new prompts.
        """
        if not self.rounds:
            return batch
        record, all_scores = generation.result()
        dead = self._dead(generation)
        places = dead.nonzero().flatten()
        drawn = 0
        drawn_in_vain = 0  # since the last live group
        joined = False
        for number in range(1, self.rounds + 1):
            if not len(places) or self._gives_up(drawn_in_vain):
                break
            more, other = generate(self._rows(len(places), generation.inputs[0]))
            new, scores = other.result()
            live = (~self._dead(other)).nonzero().flatten()[: len(places)]
            filled = places[: len(live)]
            if len(live):
                batch = self._join(batch, generation.shares, filled, more, other.shares, live)
                self._replace_inputs(generation, filled, other, live)
                joined = True
            record.replace_groups(filled, new, live)
            all_scores = torch.cat([all_scores, scores])
            places = places[len(live) :]
            drawn += other.shares.prompts
            drawn_in_vain = 0 if len(live) else drawn_in_vain + other.shares.prompts
            self._report(number, live_groups=len(live), dead_groups=len(places), groups=len(dead))
        if joined:
            self._compute_again(batch)
        generation.scores = all_scores
        generation.dead = torch.zeros_like(dead)
        generation.dead[places] = True
        metrics = self._trainer._metrics["train"]
        metrics["pods/dynamic_sampling/prompts_drawn"].append(float(drawn))
        metrics["pods/dynamic_sampling/live_share"].append(1 - len(places) / len(dead))
        return batch

    def _dead(self, generation: Generation) -> Tensor:
        """Return which groups have equal rewards, in total or of the named function, bool `[G]`."""
        record, scores = generation.result()
        name = self._trainer.args.dynamic_sampling
        if not isinstance(name, str):
            return is_constant(record.scored_rewards())
        named_GN = scores[:, record.reward_names.index(name)].cpu().view(record.rewards.shape)
        if record.masked is not None:
            named_GN = named_GN.masked_fill(record.masked, torch.nan)
        return is_constant(named_GN)

    def _gives_up(self, drawn_in_vain: int) -> bool:
        """Return whether so many prompts in a row had equal rewards that others will hardly differ; log it once."""
        most = max(len(self._trainer.train_dataset), GIVE_UP_AFTER)
        if drawn_in_vain < most:
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
