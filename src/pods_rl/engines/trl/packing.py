"""Pack kept rows for the forward passes: micro-batches of rows of similar length, without padding.

Rows are `[B, T]` tensors as TRL lays them out: prompts padded on the left, completions on the right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .compat import Batch

Passes = tuple[Tensor, Tensor | None, Tensor | None]  # log-probabilities, entropies, auxiliary loss


def trimmed_sides(config: Any) -> str:
    """Return which padding can be cut with no change beyond rounding: `both` sides, the `right` one, or `none`.

    TRL passes no positions, so a row's tokens are numbered from the first column of its batch. Rotary embeddings see
    differences of positions alone; learned positions would change with the padding on the left, and frequencies that
    depend on the length of the batch with any padding.

    Args:
        config: the configuration of the text model.

    Example:
        >>> from transformers import GPT2Config, Qwen2Config
        >>> trimmed_sides(Qwen2Config()), trimmed_sides(GPT2Config())
        ('both', 'right')
    """
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return "right"
    kinds = {part.get("rope_type") for part in (rope.values() if "rope_type" not in rope else [rope]) if part}
    return "none" if kinds & {"dynamic", "longrope"} else "both"


def real_columns(
    attention_mask: Tensor, prompt_width: int, multiple_of: int | None = None, *, left: bool = True
) -> slice:
    """Return the columns of `[B, T]` between the first and the last token of any row.

    Args:
        attention_mask: `[B, T]`, 0 on padding.
        prompt_width: columns of the prompt; one column of it and one of the completion are always kept.
        multiple_of: widen the completion's part to a multiple of this, if there are enough columns.
        left: cut columns on the left too.

    Example:
        >>> real_columns(torch.tensor([[0, 0, 1, 1, 0], [0, 1, 1, 0, 0]]), prompt_width=3)
        slice(1, 4, None)
    """
    width = attention_mask.size(1)
    used = attention_mask.any(dim=0).nonzero().flatten()
    start, stop = (int(used[0]), int(used[-1]) + 1) if len(used) else (prompt_width - 1, width)
    start, stop = min(start, prompt_width - 1) if left else 0, max(stop, prompt_width + 1)
    if multiple_of:
        stop = min(width, prompt_width - (prompt_width - stop) // multiple_of * multiple_of)
        start = max(0, prompt_width - -(-(prompt_width - start) // multiple_of) * multiple_of)
    return slice(start, stop)


def trimmed_passes(
    compute: Callable[[Tensor, Tensor, int], Passes],
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    *,
    batch_size: int,
    multiple_of: int | None = None,
    left: bool = True,
) -> Passes:
    """Call `compute` in passes of `batch_size` rows of similar length without padding; return the results of all rows.

    Args:
        compute: token ids `[B, T]`, mask `[B, T]` and how many last columns to keep; returns TRL's per-token
            log-probabilities, entropies (or None) and auxiliary loss (or None).
        logits_to_keep: columns of the completion.
        multiple_of, left: as in `real_columns`.
    """
    rows = input_ids.size(0)
    lengths = attention_mask.sum(dim=1)
    order = lengths.argsort(stable=True) if batch_size < rows else torch.arange(rows, device=input_ids.device)
    prompt_width = input_ids.size(1) - logits_to_keep
    parts: list[Passes] = []
    for chunk in order.split(batch_size):
        columns = real_columns(attention_mask[chunk], prompt_width, multiple_of, left=left)
        keep = columns.stop - prompt_width
        logps, entropies, aux = compute(input_ids[chunk, columns], attention_mask[chunk, columns], keep)
        right = (0, logits_to_keep - keep)
        parts.append((pad(logps, right), None if entropies is None else pad(entropies, right), aux))
    back = order.argsort()
    logps = torch.cat([p[0] for p in parts])[back]
    entropies = None if parts[0][1] is None else torch.cat([p[1] for p in parts if p[1] is not None])[back]
    aux = None if parts[0][2] is None else torch.stack([p[2] for p in parts if p[2] is not None]).mean()
    return logps, entropies, aux


def completion_lengths(batch: Batch) -> Tensor:
    """Return the tokens of each row's completion, `[B]`; a masked-out row has 0."""
    return batch["completion_mask"].sum(dim=1)


def _row_keys(batch: Batch, rows: int) -> list[str]:
    return [k for k, v in batch.items() if isinstance(v, Tensor) and v.ndim > 0 and v.size(0) == rows]


def sort_windows(micro_batches: list[Batch], window: int, *, by_prompt: bool = False) -> list[Batch]:
    """Regroup the rows of each run of `window` micro-batches: dead rows first, then by completion length.

    A window is one optimizer step: the same rows are trained in it, so its gradient is the same up to rounding;
    only their split into micro-batches changes. Ties keep their order.

    Args:
        micro_batches: equal-sized dictionaries of row tensors `[B, ...]` (0-dim tensors are shared); `live` among them
            says which rows have a gradient, all if it is missing.
        window: micro-batches per optimizer step; the list's length is a multiple of it.
        by_prompt: keep the rows of a prompt together, for passes that compute each prompt once.
    """
    arranged: list[Batch] = []
    for start in range(0, len(micro_batches), window):
        step = micro_batches[start : start + window]
        rows = step[0]["completion_ids"].size(0)
        keys = _row_keys(step[0], rows)
        joined = {k: torch.cat([b[k] for b in step]) for k in keys}
        order = completion_lengths(joined).argsort(stable=True)
        if by_prompt:
            prompts = joined["prompt_ids"].unique(dim=0, return_inverse=True)[1]
            order = order[prompts[order].argsort(stable=True)]
        if "live" in joined:
            order = order[joined["live"][order].int().argsort(stable=True)]
        for i, batch in enumerate(step):
            chosen = order[i * rows : (i + 1) * rows]
            arranged.append({**batch, **{k: joined[k][chosen] for k in keys}})
    return arranged


def steps_window(steps_per_generation: int, gradient_accumulation_steps: int) -> int | None:
    """Return how many micro-batches of a generation lie in one optimizer step; None if a step spans generations.

    Example:
        >>> steps_window(8, 4), steps_window(2, 4), steps_window(4, 3)
        (4, 2, None)
    """
    if steps_per_generation % gradient_accumulation_steps == 0:
        return gradient_accumulation_steps
    if gradient_accumulation_steps % steps_per_generation == 0:
        return steps_per_generation
    return None
