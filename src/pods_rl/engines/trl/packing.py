"""Pack kept rows for the forward passes: micro-batches of rows of similar length, without padding.

Rows are `[B, T]` tensors as TRL lays them out: prompts padded on the left, completions on the right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .compat import Batch, grpo_trainer

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
    compute: Callable[..., Passes],
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    batch_size: int,
    multiple_of: int | None = None,
    left: bool = True,
    *,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Passes:
    """Call `compute` in passes of `batch_size` rows of similar length without padding; return the results of all rows.

    Args:
        compute: token ids `[B, T]`, mask `[B, T]`, how many last columns to keep, and what `more` has of these rows;
            returns TRL's per-token log-probabilities, entropies (or None) and auxiliary loss (or None).
        logits_to_keep: columns of the completion.
        multiple_of, left: as in `real_columns`.
        more: inputs of images, as in `chosen_inputs`.
    """
    rows = input_ids.size(0)
    lengths = attention_mask.sum(dim=1)
    order = lengths.argsort(stable=True) if batch_size < rows else torch.arange(rows, device=input_ids.device)
    prompt_width = input_ids.size(1) - logits_to_keep
    parts: list[Passes] = []
    for chunk in order.split(batch_size):
        columns = real_columns(attention_mask[chunk], prompt_width, multiple_of, left=left)
        keep = columns.stop - prompt_width
        own = chosen_inputs(more, chunk, columns)
        logps, entropies, aux = compute(input_ids[chunk, columns], attention_mask[chunk, columns], keep, **own)
        right = (0, logits_to_keep - keep)
        parts.append((pad(logps, right), None if entropies is None else pad(entropies, right), aux))
    back = order.argsort()
    logps = torch.cat([p[0] for p in parts])[back]
    entropies = None if parts[0][1] is None else torch.cat([p[1] for p in parts if p[1] is not None])[back]
    aux = None if parts[0][2] is None else torch.stack([p[2] for p in parts if p[2] is not None]).mean()
    return logps, entropies, aux


def live_passes(
    compute: Callable[..., Passes],
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    batch: Batch,
    more: Mapping[str, Any],
) -> Passes:
    """Call `compute` for the live rows, the shortest one if there is none; the others have no gradient.

    Args:
        compute, logits_to_keep, more: as in `trimmed_passes`.
        batch: `live` `[B]` says whose results are read; the others have the `old_per_token_logps` if there are any.
    """
    live, unread = batch["live"], batch.get("old_per_token_logps")
    chosen = live.nonzero().flatten()
    if not len(chosen):
        chosen = attention_mask.sum(dim=1).argmin().unsqueeze(0)
    own = chosen_inputs(more, chosen, slice(None))
    logps, entropies, aux = compute(input_ids[chosen], attention_mask[chosen], logits_to_keep, **own)

    def back(values: Tensor) -> Tensor:
        return values.new_zeros(len(live), logits_to_keep).index_copy(0, chosen, values)

    logps = back(logps)
    if unread is not None:
        logps = torch.where(live.unsqueeze(1), logps, unread.to(logps.dtype))
    return logps, None if entropies is None else back(entropies), aux


# -- inputs of images: some are indexed by token, some by row, some by image, patch or tile --------------------------


def chosen_inputs(more: Mapping[str, Any], rows: Tensor, columns: slice) -> dict[str, Any]:
    """Return the inputs of images of some rows, in their order, and of some columns.

    Args:
        more: arguments of TRL's `_get_per_token_logps_and_entropies` for a batch, by name.
        rows: numbers of rows, each at most once.
        columns: of the token types `[B, T]`.

    Example:
        >>> more = {"pixel_values": torch.arange(3), "num_images": [1, 2], "token_type_ids": torch.eye(2)}
        >>> chosen_inputs(more, torch.tensor([1]), slice(1, 2))
        {'pixel_values': tensor([1, 2]), 'num_images': [2], 'token_type_ids': tensor([[1.]])}
    """
    cut = {name: value[:, columns] if name.endswith("token_type_ids") else value for name, value in more.items()}
    picked = {name: _pick(value, rows) for name, value in grpo_trainer.split_pixel_values_by_grid(cut).items()}
    return grpo_trainer.unsplit_pixel_values_by_grid(picked)


def present_images(more: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs of images; if no row has an image, only the token types: models fail on tensors of no image."""
    if any(more.get("num_images") or [True]):
        return dict(more)
    return {name: value if name.endswith("token_type_ids") else None for name, value in more.items()}


def by_prompt(
    fields: Mapping[str, Any], images: Sequence[Any] | None, prompt_ids: Sequence[list[int]], image_token: int | None
) -> dict[str, Any] | None:
    """Return a processor's inputs for prompts with images, by prompt; None if they cannot be told apart.

    Args:
        fields: TRL's `multimodal_fields` of a turn: inputs of images, and lists of token types.
        images: of each prompt, None without.
        prompt_ids: tokens of each prompt.
        image_token: which of them stand for images.
    """
    if "spatial_shapes" in fields:  # of tiles that have various numbers of tokens
        return None
    found = {name: _by_prompt_or_tensor(value) for name, value in fields.items()}
    pixels = found.get("pixel_values")
    found["num_images"] = counts = [len(own or ()) for own in images or [()] * len(prompt_ids)]
    if pixels is not None and pixels.ndim == 4 and "image_position_ids" not in found and len(pixels) != sum(counts):
        tokens = [ids.count(image_token) for ids in prompt_ids]  # type: ignore[arg-type]
        found["num_tiles"] = [count * len(pixels) // sum(tokens) for count in tokens]  # all tiles have as many
    found = grpo_trainer.split_pixel_values_by_grid(found)
    return found if all(len(values) == len(prompt_ids) for values in found.values()) else None


def _by_prompt_or_tensor(value: Any) -> Any:
    """Return a list of lists, of token types by prompt, as it is, and anything else as a tensor, as TRL does."""
    by_prompt = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    return value if by_prompt or isinstance(value, Tensor) else torch.tensor(np.array(value))


def of_prompts(found: Mapping[str, Any], prompts: slice) -> dict[str, Any]:
    """Return TRL's `multimodal_fields` of some prompts, from the result of `by_prompt`.

    Example:
        >>> pixels, own = torch.arange(3), [["an image"], ["two", "images"]]
        >>> found = by_prompt({"pixel_values": pixels, "token_type_ids": [[0, 1], [1, 1]]}, own, [[4, 5], [5, 5]], 5)
        >>> of_prompts(found, slice(1, 2))
        {'pixel_values': tensor([1, 2]), 'token_type_ids': [[1, 1]]}
    """
    cut = grpo_trainer.unsplit_pixel_values_by_grid({name: values[prompts] for name, values in found.items()})
    cut = present_images(cut)
    return {name: value for name, value in cut.items() if value is not None and name not in ("num_images", "num_tiles")}


def _pick(value: Any, rows: Tensor) -> Any:
    return [value[row] for row in rows.tolist()] if isinstance(value, list) else value[rows]


# -- micro-batches ---------------------------------------------------------------------------------------------------


def completion_lengths(batch: Batch) -> Tensor:
    """Return the tokens of each row's completion, `[B]`; a masked-out row has 0."""
    return batch["completion_mask"].sum(dim=1)


def _by_row(batch: Batch) -> Batch:
    """Return what a batch has by row: row tensors `[B, ...]`, and lists of a value a row, also of images."""
    rows = len(batch["completion_ids"])
    given = grpo_trainer.split_pixel_values_by_grid({name: value for name, value in batch.items() if value is not None})
    return {
        name: value
        for name, value in given.items()
        if (isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)) and len(value) == rows
    }


def _join(parts: list[Any]) -> Any:
    """Join what micro-batches have by row; a list if any has one, with the rows of tensors as tensors of one row."""
    if all(isinstance(part, Tensor) for part in parts):
        return torch.cat(parts)
    return [row for part in parts for row in (part.split(1) if isinstance(part, Tensor) else part)]


def sort_windows(micro_batches: list[Batch], window: int, *, by_prompt: bool = False) -> list[Batch]:
    """Regroup the rows of each run of `window` micro-batches: dead rows first, then by completion length.

    A window is one optimizer step: the same rows are trained in it, so its gradient is the same up to rounding;
    only their split into micro-batches changes. Ties keep their order.

    Args:
        micro_batches: equal-sized dictionaries of row tensors `[B, ...]` (0-dim tensors are shared), and of images as
            TRL lays them out; `live` among them says which rows have a gradient, all if it is missing.
        window: micro-batches per optimizer step; the list's length is a multiple of it.
        by_prompt: keep the rows of a prompt together, for passes that compute each prompt once.
    """
    arranged: list[Batch] = []
    for start in range(0, len(micro_batches), window):
        step = micro_batches[start : start + window]
        rows = step[0]["completion_ids"].size(0)
        parts = [_by_row(batch) for batch in step]
        joined = {name: _join([part[name] for part in parts]) for name in parts[0]}
        order = completion_lengths(joined).argsort(stable=True)
        if by_prompt:
            prompts = joined["prompt_ids"].unique(dim=0, return_inverse=True)[1]
            order = order[prompts[order].argsort(stable=True)]
        if "live" in joined:
            order = order[joined["live"][order].int().argsort(stable=True)]
        for i, batch in enumerate(step):
            picked = {name: _pick(value, order[i * rows : (i + 1) * rows]) for name, value in joined.items()}
            arranged.append({**batch, **grpo_trainer.unsplit_pixel_values_by_grid(picked)})
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
