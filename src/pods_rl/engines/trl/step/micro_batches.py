"""The micro-batches of an optimizer step: which rows share one, and TRL's metrics of them as means over the step."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..compat import CLIP_RATIO, ENTROPY, EXTREMES, LOSS_METRICS, PHI, Batch, TRLTrainer

Gather = Callable[[list[int]], list[list[int]]]
"""Returns the numbers of every process; called with as many numbers on each of them."""

Divide = Callable[[NDArray[np.int64], int], list[list[int]]]
"""Returns the rows of each pass; called with the tokens of all rows, and the rows of a micro-batch of TRL."""

MEANS_OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
"""The losses of TRL that divide a sum over rows by the rows of the micro-batch."""

LOSS_SHARE = "loss_share"
"""The column of a packed pass that has the number of TRL's micro-batches that it stands for."""

REPEATED_ROWS = "repeated_rows"
"""The column of a packed pass that has the number of its last rows that only fill it."""

ROW_SCALE = "row_scale"
"""The groups of a generation, divided by those that are not masked: the factor of a loss that is a mean over rows."""


def mask_constant_groups(batch: Batch, trainer: TRLTrainer) -> None:
    """Mask groups whose advantages are all 0 out of TRL's batch, as TRL masks truncated completions.

    Call this on every process, with the rows of a generation before TRL shuffles them. Losses that are means over
    tokens divide by `num_items_in_batch`. Those over rows divide by all rows, so `ROW_SCALE` corrects them.
    """
    m = trainer.num_generations
    is_live_R = trainer.accelerator.gather(batch["advantages"]) != 0  # of all processes, [P * M]
    is_live_P = is_live_R.view(-1, m).any(dim=1)
    rows = len(batch["advantages"])
    start = trainer.accelerator.process_index * rows
    live_B1 = is_live_P.repeat_interleave(m)[start : start + rows].unsqueeze(1)  # [P] -> [P * M] -> [B, 1]
    for name in ("completion_mask", "tool_mask"):
        if name in batch:
            batch[name] = batch[name] * live_B1
    tokens = (batch["completion_mask"] * batch.get("tool_mask", 1)).sum()
    batch["num_items_in_batch"] = trainer.accelerator.gather(tokens).sum()
    if trainer.loss_type in MEANS_OVER_ROWS:
        # Without a live group the loss is 0, whatever the scale.
        batch[ROW_SCALE] = len(is_live_P) / is_live_P.sum().clamp(min=1)


def pack_rows(batches: Sequence[Batch], computed: Tensor | None, divide: Divide, gather: Gather) -> list[Batch] | None:
    """Return the rows of a window as passes, None if a column is neither one value for each row nor one for all rows.

    The gradient of the window is a sum over its rows, so it does not change. All processes have the same number of
    passes, and the same number of rows in each: where rows are missing, the first row of the pass is repeated, without
    a token in the loss. `computed`, `[R]`, says which rows are computed; None means all.
    """
    lengths = [len(batch["completion_ids"]) for batch in batches]
    shared: Batch = {}  # what all rows have in common
    columns: Batch = {}  # a value for each row of the window
    is_known = True
    for name in sorted(batches[0].keys() - {LOSS_SHARE, REPEATED_ROWS}):
        parts = [batch[name] for batch in batches]
        first = parts[0]
        is_tensor = isinstance(first, Tensor) and first.dim() > 0
        if not is_tensor and not isinstance(first, list):
            shared[name] = first
            is_known &= all(part is first for part in parts)  # TRL gives the same object to every micro-batch
        elif [len(part) for part in parts] == lengths:
            columns[name] = torch.cat(parts) if is_tensor else list(chain(*parts))
        else:
            is_known = False
    if not all(flag for (flag,) in gather([int(is_known)])):
        return None
    # The rows of a micro-batch of TRL. Passes are packed again if one ran out of memory: their share says how many
    # micro-batches they stand for.
    size = round(lengths[0] / batches[0].get(LOSS_SHARE, 1))
    passes = divide(tokens_of(columns, computed), size)
    sizes = [max(of_processes) for of_processes in zip(*gather([len(members) for members in passes]), strict=True)]
    padded = [members + members[:1] * (count - len(members)) for members, count in zip(passes, sizes, strict=True)]
    order = [row for members in padded for row in members]
    packed: list[Batch] = [dict(shared) for _ in passes]
    # One copy to the device, and one selection for each column.
    index = torch.tensor(order, device=batches[0]["completion_ids"].device)
    for name, column in columns.items():
        of_passes: Sequence[Any]
        if isinstance(column, Tensor):
            of_passes = column[index.to(column.device)].split(sizes)  # a copy only for a column on another device
        else:
            of_passes = [[column[row] for row in members] for members in padded]
        for batch, values in zip(packed, of_passes, strict=True):
            batch[name] = values
    for batch, members, count in zip(packed, passes, sizes, strict=True):
        repeated = count - len(members)
        if repeated:
            batch["completion_mask"][len(members) :] = 0  # of this pass alone, because `index` has copied its rows
        batch[LOSS_SHARE] = count / size
        batch[REPEATED_ROWS] = repeated
    return packed


def tokens_of(columns: Mapping[str, Any], computed: Tensor | None = None) -> NDArray[np.int64]:
    """Return prompts and completions, `[R, T]`, with -1 around them and for rows that are not `computed`, `[R]`."""
    ids = torch.cat([columns["prompt_ids"], columns["completion_ids"]], dim=1)
    mask = torch.cat([columns["prompt_mask"], columns["completion_mask"]], dim=1)
    if computed is not None:
        mask = mask * computed.unsqueeze(1)
    rows: NDArray[np.int64] = ids.masked_fill(mask == 0, -1).cpu().numpy()
    return rows


# -- metrics -----------------------------------------------------------------------------------------------------------

Metrics = dict[str, list[float]]  # by name, the values since the last line of the log


class StepMetrics:
    """TRL's metrics of the micro-batches of a step, which become one value for the step.

    TRL appends a value for each micro-batch and logs their mean, which depends on which rows share one. Here means are
    weighted by tokens or rows, minima and maxima are those of the step, and entropy is the mean over the computed
    tokens. In a step of one micro-batch the values are TRL's.

    The `counts` of a micro-batch are over all processes: its `rows`, of which `repeated_rows` only fill it, and the
    policy's `tokens`, of which `computed` are in rows that are computed.

    Args:
        by_row: whether importance weights are those of complete rows, so that shares of clipped ones count rows.
    """

    def __init__(self, by_row: bool) -> None:
        self._by_row = by_row
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self._sums: defaultdict[str, float] = defaultdict(float)  # over tokens or rows, by metric
        self._extremes: defaultdict[str, list[float]] = defaultdict(list)  # of the micro-batches, by metric
        self._totals: Counter[str] = Counter()  # of the counts
        self._has_skipped = False

    def take(self, metrics: Metrics, before: Mapping[str, int], counts: Mapping[str, int]) -> None:
        """Take out of TRL's metrics what its loss has appended for a micro-batch since `before`."""
        self._totals.update(counts)
        for name in list(metrics):
            values = metrics[name]
            if name not in LOSS_METRICS or len(values) == before.get(name, 0):
                continue
            value = values.pop()
            if not values:  # TRL would log None for an empty list
                del metrics[name]
            if name in EXTREMES:
                self._extremes[name].append(value)
            else:
                self._sums[name] += value * counts["rows" if self._counts_rows(name) else "tokens"]

    def skip(self, counts: Mapping[str, int]) -> None:
        """Count a micro-batch that is not computed: nothing of it is clipped."""
        self._totals.update(counts)
        self._has_skipped = True

    def put(self, metrics: Metrics) -> None:
        """Append the step's values to TRL's metrics."""
        rows = self._totals["rows"] - self._totals["repeated_rows"]
        for name, total in self._sums.items():
            count = rows if self._counts_rows(name) else self._totals["tokens"]
            if name == ENTROPY:
                count = self._totals["computed"]  # rows that are left out have entropy 0 in TRL's mean
                if count == 0:
                    continue  # of no token
            metrics[name].append(total / max(1, count))
        for name, values in self._extremes.items():
            if self._has_skipped:
                values.append(0.0)
            numbers = [value for value in values if not math.isnan(value)]  # NaN: a micro-batch without a token
            metrics[name].append(EXTREMES[name](numbers) if numbers else math.nan)

    def _counts_rows(self, name: str) -> bool:
        """Return whether a metric is a mean over rows; else over tokens."""
        return name == PHI or (self._by_row and CLIP_RATIO in name)
