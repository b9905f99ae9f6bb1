"""Faster parts of transformers' decoding: layers of its cache, and attention of a single query on a CPU.

They have the same results up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SINGLE_QUERY = "pods_single_query"  # the name of `attend` in transformers' tables
_SPARE = 16  # columns that a full layer grows by: few compared with the cache, and they make copies rare
_CHANGED = "the model changes the cache's keys before it attends to them"
_SHARED_FROM = 2**19  # bytes of a layer's keys of prompts, a copy for each rollout, from which one for all is quicker


class CannotServeError(Exception):
    """Raised before a completion is returned; the message says which part of the model or setting needs `generate`."""


class GrowingLayer(DynamicLayer):
    """A cache layer that writes new tokens into spare columns; `DynamicLayer` copies all of itself for each token.

    Args:
        layer: holds the prompts, a row each.
        rows: for each row of the new layer, its prompt's row in `layer`.
        most: columns it will ever need; it keeps no spare ones beyond.

    >>> prompts = DynamicLayer()
    >>> _ = prompts.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))
    >>> layer = GrowingLayer(prompts, torch.tensor([0, 0, 1]), most=9)
    >>> layer.update(torch.ones(3, 1, 1, 4), torch.ones(3, 1, 1, 4))[0].shape
    torch.Size([3, 1, 4, 4])
    """

    def __init__(self, layer: DynamicLayer, rows: Tensor, most: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self._most = most
        self._key_room, self._value_room = self._with_room(layer.keys, rows), self._with_room(layer.values, rows)
        self._show(layer.keys.shape[-2])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens' states; return all."""
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if end > self._key_room.shape[-2]:
            self._key_room = self._with_room(self.keys)
            self._value_room = self._with_room(self.values)
        self._key_room[:, :, start:end] = key_states
        self._value_room[:, :, start:end] = value_states
        self._show(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; one may be given several times."""
        columns = self.keys.shape[-2]
        self._key_room = self._with_room(self.keys, indices)
        self._value_room = self._with_room(self.values, indices)
        self._show(columns)

    def _show(self, columns: int) -> None:
        self.keys, self.values = self._key_room[:, :, :columns], self._value_room[:, :, :columns]

    def _with_room(self, states: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return a copy of `[rows, heads, columns, size]` with spare columns."""
        batch, heads, columns, size = states.shape
        spare = max(1, min(_SPARE, self._most - columns))
        room = states.new_empty(batch if rows is None else len(rows), heads, columns + spare, size)
        room[:, :, :columns] = states if rows is None else states.index_select(0, rows)
        return room


class SharedLayer(GrowingLayer):
    """A cache layer with one copy of each prompt for all its rollouts; `attend` puts the two together.

    `keys` and `values` hold the rollouts' own tokens. The keys that `update` returns lead `attend` to this layer.

    Args:
        layer: holds the prompts, a row each.
        rows: for each row of the new layer, its prompt's row in `layer`; ascending.
        most: columns it will ever need, with the prompts'.
    """

    def __init__(self, layer: DynamicLayer, rows: Tensor, most: int) -> None:
        self.prompts = layer.keys, layer.values
        own = DynamicLayer()
        own.update(layer.keys[:, :, :0], layer.values[:, :, :0])
        super().__init__(own, rows, most - layer.keys.shape[-2])
        self.attended = True  # whether `attend` has seen the keys of the latest update
        self._set_rows(rows)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens' states; return those of the rollouts, which `attend` completes."""
        keys, values = super().update(key_states, value_states)
        keys.layer = ref(self)  # type: ignore[attr-defined]  # not the layer itself: a cycle would keep the cache
        self.attended = False
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of columns, the prompts' and the rollouts' own."""
        return self.prompts[0].shape[-2] + self.keys.shape[-2]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in ascending order."""
        super().batch_select_indices(indices)
        self._set_rows(self._rows[indices])

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the prompts and the rollouts, a copy for each row."""
        first, own = self.prompts, (self.keys, self.values)
        keys, values = (torch.cat([a[self._rows], b], dim=-2) for a, b in zip(first, own, strict=True))
        return keys, values

    def attend(self, query: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return what single queries `[rows, key heads, heads a key head, size]`, already scaled, read."""
        parts = []
        for rows, first_keys, first_values in self._runs:
            own_keys, own_values = self.keys[rows], self.values[rows]
            groups, columns = len(first_keys), first_keys.shape[2]
            count = len(own_keys) // groups  # rollouts of each prompt

            def by_prompt(states: Tensor, groups: int = groups, count: int = count) -> Tensor:
                """From `[rows, key heads, ...]` to `[prompts, key heads, rollouts, ...]`."""
                return states.unflatten(0, (groups, count)).transpose(1, 2)

            mine = query[rows]
            first = by_prompt(mine).flatten(2, 3) @ first_keys.transpose(2, 3)
            own = mine @ own_keys.transpose(2, 3)
            scores = torch.cat([first.unflatten(2, (count, -1)), by_prompt(own)], dim=-1)
            if attention_mask is not None:
                mask = attention_mask.expand(len(query), -1, -1, -1)[rows]
                scores = scores.masked_fill(~by_prompt(mask), -torch.inf)
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(own_values.dtype)
            read = (weights[..., :columns].flatten(2, 3) @ first_values).unflatten(2, (count, -1))
            own_weights = weights[..., columns:].transpose(1, 2).flatten(0, 1)
            parts.append(read.transpose(1, 2).flatten(0, 1) + own_weights @ own_values)
        self.attended = True
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _set_rows(self, rows: Tensor) -> None:
        """Find the runs of prompts with equally many rollouts: their rows, and their prompts' keys and values."""
        self._rows, self._runs = rows, []
        prompts, counts = (x.tolist() for x in rows.unique_consecutive(return_counts=True))
        start = 0
        for count, run in groupby(zip(prompts, counts, strict=True), key=lambda pair: pair[1]):
            numbers = [prompt for prompt, _ in run]
            end, whole = start + count * len(numbers), len(numbers) == len(self.prompts[0])
            keys, values = (states if whole else states[numbers] for states in self.prompts)
            self._runs.append((slice(start, end), keys, values))
            start = end


def check_attended(cache: Cache) -> None:
    """Raise CannotServeError if keys of a `SharedLayer` did not reach `attend`: then the prompts were not read."""
    if not all(layer.attended for layer in cache.layers if isinstance(layer, SharedLayer)):
        raise CannotServeError(_CHANGED)


def unshareable(cache: Any) -> str | None:
    """Return what in a cache cannot be handed to other rows, or None."""
    if type(cache) is not DynamicCache or cache.offloading:
        return f"its cache is {type(cache).__name__}" + (", offloaded" if getattr(cache, "offloading", False) else "")
    other = next(
        (layer for layer in cache.layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)), None
    )
    return None if other is None else f"its cache has a layer of the kind {type(other).__name__}"


def rope_types(config: Any) -> set[str | None]:
    """Return the kinds of rotary positions of a text model's configuration; some have one for each kind of layer.

    >>> from transformers import Qwen2Config
    >>> rope_types(Qwen2Config())
    {'default'}
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return {part.get("rope_type") for part in (rope.values() if "rope_type" not in rope else [rope]) if part}


def share_prompts(model: PreTrainedModel, cache: Cache, rows: Tensor, most: int) -> None:
    """Replace the prompts of a cache by their rollouts: `rows[i]` is the prompt of rollout i.

    With `attend`, long prompts stay as they are, one copy for all rollouts.
    """
    ordered = model.config.get_text_config(decoder=True)._attn_implementation == SINGLE_QUERY
    ordered = ordered and bool((rows.diff() >= 0).all())
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            copied = layer.keys[0].nbytes * len(rows)
            kind = SharedLayer if ordered and copied >= _SHARED_FROM else GrowingLayer
            cache.layers[i] = kind(layer, rows, most)
        else:  # of a sliding window, which does not grow
            layer.batch_select_indices(rows)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attend with one query a row: transformers' `sdpa_attention_forward`, written for that case on a CPU.

    There torch's kernel splits the work into single heads, and with a mask every key is first copied for each head
    that shares it. Anything but one query goes to `sdpa_attention_forward`.

    Args:
        query: `[rows, heads, 1, size]`.
        key: `[rows, key heads, columns, size]`, like `value`; consecutive heads share a key head.
        attention_mask: `[rows or 1, 1, 1, columns]`, True where a row sees the column; None: everywhere.

    Returns:
        `[rows, 1, heads, size]`, and None for the attention weights.

    Raises:
        CannotServeError: the keys are those of a `SharedLayer`, and no longer lead to it.
    """
    rows, heads, queries, size = query.shape
    found = getattr(key, "layer", None)
    layer: SharedLayer | None = found and found()
    plain = attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1:3] == (1, 1))
    special = any(other.get(name) is not None for name in ("softcap", "position_bias", "cache"))
    if queries != 1 or dropout or special or not plain:
        if layer is not None:
            layer.attended = True
            key, value = layer.whole()
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **other
        )
    shared = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    shared = shared * (size**-0.5 if scaling is None else scaling)
    if layer is not None:
        return layer.attend(shared, attention_mask).reshape(rows, 1, heads, value.shape[-1]), None
    if attention_mask is not None and attention_mask.shape[-1] != key.shape[-2]:
        raise CannotServeError(_CHANGED)
    scores = shared @ key.transpose(2, 3)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(SINGLE_QUERY, attend)
AttentionMaskInterface.register(SINGLE_QUERY, sdpa_mask)


@contextmanager
def decoding(model: PreTrainedModel) -> Iterator[None]:
    """Prepare a model to decode: without dropout, which rollouts of a prompt would share.

    On a CPU also with `attend`, and in torch's inference mode, where each of many small operations costs less. Not so
    with several processes, which may share the weights, and for models outside transformers, which may keep tensors of
    a forward pass for the next: those of inference mode cannot be trained with.
    """
    training = [module for module in model.modules() if module.training]
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    on_cpu = model.device.type == "cpu" and model._supports_attention_backend and not model.is_remote_code()
    quicker = on_cpu and before == "sdpa"
    for module in training:
        module.training = False
    if quicker:
        config._attn_implementation = SINGLE_QUERY
    try:
        with torch.inference_mode() if on_cpu and not dist.is_initialized() else nullcontext():
            yield
    finally:
        for module in training:
            module.training = True
        if quicker:
            config._attn_implementation = before
