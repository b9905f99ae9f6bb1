"""The cache of the prefix tree: layers with a row for each node, and what a decoder's single queries read of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

_SPARE = 16  # columns that a layer grows by at least
_GROWTH = 4  # it grows by a fourth, so that columns are copied a few times at most, however long the rows are
_LONG = 256  # columns from which these are neighbours in memory: measured, attention takes 0.75 to 0.93 of the time
# Layers of transformers' caches whose `reorder_cache` copies all that a row has; those of other kinds may hold more.
_ATTENTION = frozenset({"DummyLayer", "DynamicLayer", "DynamicSlidingWindowLayer"})
_RECURRENT = frozenset({
    "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer", "LinearAttentionLayer",
})  # fmt: skip
_SHARED_FROM = 2**19  # bytes of a layer's keys, copied for each node of a prompt, from which one copy is faster


class CannotServeError(Exception):
    """Raised before a completion is returned; the message says which part of the model or setting needs `generate`."""


class NodeLayer:
    """The keys and values of a layer, with a row for each node of the tree, which a decoder appends to and reads.

    Spare rows and columns let few steps copy them. While nodes are few each has a copy of its prompt. After `share`
    there is one copy of each prompt for all its nodes.

    Args:
        layer: holds the prompts, a row each: the first nodes. Keys and values have one size.
        rollouts: the most nodes that there can be.
        most: the most columns that there can be.
    """

    def __init__(self, layer: DynamicLayer, rollouts: int, most: int) -> None:
        self.keys: Tensor = layer.keys  # [nodes, K, columns, D]
        self.values: Tensor = layer.values
        self._rollouts = rollouts
        self._most_columns = most
        self.width = self.keys.shape[2]  # of the prompts
        self.slots: PromptSlots | None = None  # of the nodes, once their prompts are shared
        self._make_room(len(self.keys))

    def append(self, states: Tensor) -> None:
        """Append a key and a value for each node, `[nodes, K, 2, D]`."""
        start = self.keys.shape[2]
        if start == self._by_column.shape[3]:
            self._make_room(self._room.shape[1])
        self._by_column[:, : len(states), :, start].copy_(states.movedim(2, 0))
        self._look(len(states), start + 1)

    @property
    def _by_column(self) -> Tensor:
        """A view `[2, rows, K, columns, D]` of the room."""
        return self._room.transpose(3, 4) if self._columns_last else self._room

    def _look(self, rows: int, columns: int) -> None:
        """Let keys and values be these rows and columns of the room."""
        self.keys, self.values = self._by_column[:, :rows, :, :columns]

    def reorder(self, count: int, moved: Tensor, sources: Tensor) -> None:
        """Let `count` nodes be in the first rows, where row `moved[i]` is a copy of row `sources[i]` for every i."""
        columns = self.keys.shape[2]
        if count > self._room.shape[1]:
            # Twice as many, so that a tree that grows copies its cache few times.
            self._make_room(min(2 * count, self._rollouts))
        if len(moved) and columns:
            # Apart, because on a CPU torch selects in the first dimension four times as fast as in the second.
            for states in self._room.narrow(4 if self._columns_last else 3, 0, columns).unbind():
                states.index_copy_(0, moved, states.index_select(0, sources))
        self._look(count, columns)

    def _make_room(self, rows: int) -> None:
        """Copy the states to a room with this many rows and spare columns."""
        count, heads, columns, size = self.keys.shape
        # A CPU reads many keys faster if columns are neighbours in memory. torch's kernels for GPUs would copy them.
        self._columns_last = self.keys.device.type == "cpu" and columns >= _LONG
        spare = max(1, min(max(_SPARE, columns // _GROWTH), self._most_columns - columns))
        sizes = (size, columns + spare) if self._columns_last else (columns + spare, size)
        # Keys and values share a room, so that one operation appends both.
        self._room = self.keys.new_empty(2, rows, heads, *sizes)
        for room, states in zip(self._by_column, (self.keys, self.values), strict=True):
            room[:count, :, :columns] = states
        self._look(count, columns)

    def share(self, nodes: Tensor, prompts: Tensor, slots: PromptSlots) -> None:
        """Keep one copy of each of these prompts, which `nodes` have; `slots` are of the nodes that there will be."""
        if self.slots is None:
            self._prompt_keys = self.keys[nodes, :, : self.width]  # [prompts, K, width, D]
            self._prompt_values = self.values[nodes, :, : self.width]
            self.keys = self.keys[:, :, self.width :]
            self.values = self.values[:, :, self.width :]
            self._most_columns -= self.width
            self._make_room(len(self.keys))
        elif len(prompts) < len(self._prompt_keys):
            self._prompt_keys = self._prompt_keys[prompts]
            self._prompt_values = self._prompt_values[prompts]
        self.slots = slots

    def read(self, queries: Tensor, hidden: Tensor | None, softcap: float | None) -> Tensor:
        """Return what single queries read: see the function `read`; with prompts that are shared, also of these."""
        if self.slots is None:
            return read(queries, self.keys, self.values, hidden, softcap)
        prompts = (self._prompt_keys, self._prompt_values)
        return read_with_prompts(queries, (self.keys, self.values), prompts, self.slots, hidden, softcap)


def read(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, softcap: float | None) -> Tensor:
    """Return what single queries read, `[rows * K, queries that share a key, size of values]`.

    Args:
        queries: `[rows * K, queries that share a key, D]`, scaled.
        keys, values: `[rows, K, columns, D]`.
        hidden: `[rows or 1, 1, 1, columns]`, True where a row does not see the column. If None, nowhere.
        softcap: the bound of the scores, which a hyperbolic tangent keeps. If None, there is none.
    """
    scores = torch.bmm(queries, _as_matrices(keys).transpose(1, 2))
    return torch.bmm(_weights(scores, len(keys), hidden, softcap), _as_matrices(values))


def read_with_prompts(
    queries: Tensor,
    states: tuple[Tensor, Tensor],
    prompt_states: tuple[Tensor, Tensor],
    slots: PromptSlots,
    hidden: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Return what single queries read of their prompt and of their own keys and values: see `read`."""
    keys, values = states  # [rows, K, columns, D]; [prompts, K, columns, D] of prompts
    prompt_keys, prompt_values = prompt_states
    rows, key_heads, columns, _ = keys.shape
    # All rows of a prompt are queries of one product with its keys.
    of_prompts = torch.bmm(slots.by_prompt(queries, key_heads), _as_matrices(prompt_keys).transpose(1, 2))
    of_rows = torch.bmm(queries, _as_matrices(keys).transpose(1, 2))
    scores = torch.cat([slots.by_node(of_prompts, key_heads), of_rows], 2)  # [rows * K, G, columns]
    prompt_weights, row_weights = _weights(scores, rows, hidden, softcap).split([prompt_keys.shape[2], columns], 2)
    from_prompts = torch.bmm(slots.by_prompt(prompt_weights, key_heads), _as_matrices(prompt_values))
    return torch.baddbmm(slots.by_node(from_prompts, key_heads), row_weights, _as_matrices(values))


def _as_matrices(states: Tensor) -> Tensor:
    """View `[rows, K, columns, D]` as `[rows * K, columns, D]`: matrices, for which torch has one product."""
    return states.flatten(0, 1)


def _weights(scores: Tensor, rows: int, hidden: Tensor | None, softcap: float | None) -> Tensor:
    if softcap is not None:
        scores = (scores / softcap).tanh_() * softcap
    if hidden is not None:
        scores.view(rows, -1, *scores.shape[1:]).masked_fill_(hidden, -torch.inf)
    return torch.softmax(scores, dim=-1)  # torch sums in 32 bits


class PromptSlots:
    """Nodes in the order of their prompts, with as many slots for each prompt as the most nodes of one.

    >>> slots = PromptSlots(np.array([0, 1, 0]))
    >>> slots.by_prompt(torch.tensor([5, 6, 7]).view(3, 1, 1), 1)[:, :, 0]
    tensor([[5, 7],
            [6, 5]])
    """

    def __init__(self, prompt_of: NDArray[np.int64], device: torch.device | str = "cpu") -> None:
        counts = np.bincount(prompt_of)
        self._prompts = len(counts)
        self._most = int(counts.max())  # slots of each prompt
        by_prompt = prompt_of.argsort(kind="stable")  # the nodes
        first_of_prompt = np.cumsum(counts) - counts
        slots = (prompt_of * self._most)[by_prompt] + np.arange(len(prompt_of)) - first_of_prompt[prompt_of[by_prompt]]
        self._slot_of = np.empty_like(slots)
        self._slot_of[by_prompt] = slots
        self._node_at = np.zeros(self._prompts * self._most, np.int64)
        self._node_at[slots] = by_prompt
        # Whether the slots are the nodes in their order.
        self._ordered = np.array_equal(self._node_at, np.arange(len(prompt_of)))
        self._device = device
        self._indices: dict[int, tuple[Tensor, Tensor]] = {}  # by the number of key heads

    def by_prompt(self, states: Tensor, key_heads: int) -> Tensor:
        """From `[nodes * K, G, x]` to `[prompts * K, slots * G, x]`; empty slots repeat a node."""
        if not (self._ordered and key_heads == 1):
            states = states.index_select(0, self._index(key_heads)[0])
        return states.reshape(self._prompts * key_heads, -1, states.shape[-1])

    def by_node(self, states: Tensor, key_heads: int) -> Tensor:
        """The inverse of `by_prompt`."""
        states = states.view(self._prompts * key_heads * self._most, -1, states.shape[-1])
        if not (self._ordered and key_heads == 1):
            states = states.index_select(0, self._index(key_heads)[1])
        return states

    def _index(self, key_heads: int) -> tuple[Tensor, Tensor]:
        """Return which of the nodes' key heads each slot has, `[prompts * K * slots]`, and the inverse."""
        if key_heads not in self._indices:
            heads = np.arange(key_heads)
            nodes = self._node_at.reshape(-1, 1, self._most) * key_heads + heads[:, None]  # [prompts, K, slots]
            prompts, slots = np.divmod(self._slot_of, self._most)
            inverse = (prompts[:, None] * key_heads + heads) * self._most + slots[:, None]  # [nodes, K]
            self._indices[key_heads] = (
                on_device(nodes.ravel(), self._device), on_device(inverse.ravel(), self._device)
            )  # fmt: skip
        return self._indices[key_heads]


def on_device(numbers: NDArray[np.int64], device: torch.device | str) -> Tensor:
    """Copy numbers of the host to a device, without waiting for it."""
    return torch.from_numpy(numbers).to(device, non_blocking=True)


def move_nodes(
    cache: Cache, parents: NDArray[np.int64], prompt_of: NDArray[np.int64], device: torch.device
) -> NDArray[np.int64]:
    """Let node i of a cache continue node `parents[i]`, for every i; return the number of each node's prompt.

    Prompts without a node are no longer counted; `prompt_of` has the numbers of the parents' prompts.
    """
    prompts, prompt_of_node = np.unique(prompt_of[parents], return_inverse=True)
    copies = len(parents) - len(prompts)
    is_moved = parents != np.arange(len(parents))
    origin = on_device(parents, device)
    moved = on_device(np.flatnonzero(is_moved), device)
    sources = on_device(parents[is_moved], device)
    shared: tuple[Tensor, Tensor, PromptSlots] | None = None  # the arguments of `NodeLayer.share`
    for layer in cache.layers:
        if not isinstance(layer, NodeLayer):
            layer.reorder_cache(origin)  # copies the states of all nodes
            continue
        # Once copies of the prompts would be large there is one copy for all nodes.
        copied_bytes = layer.keys[0, :, :1].nbytes * layer.width * copies
        if layer.slots is not None or copied_bytes >= _SHARED_FROM:
            if shared is None:
                node_of_prompt = (prompt_of == prompts[:, None]).argmax(1)
                slots = PromptSlots(prompt_of_node, device)
                shared = on_device(node_of_prompt, device), on_device(prompts, device), slots
            layer.share(*shared)
        layer.reorder(len(parents), moved, sources)
    return prompt_of_node


def why_not_copied(model: PreTrainedModel, cache: Any, implementation: str | None) -> str | None:
    """Return why the rows of a model's cache, of the setting `cache_implementation`, cannot be copied and dropped."""
    if cache is None:
        return "it makes its own cache, and not transformers' DynamicCache"
    if type(cache) is not DynamicCache or cache.offloading:
        kind = f"its cache is a {type(cache).__name__}, and not a DynamicCache in memory"
        return f"{kind}; leave cache_implementation out, which is {implementation}" if implementation else kind
    kinds = {type(layer) for layer in cache.layers}
    names = {kind.__name__ for kind in kinds}
    unknown = names - _ATTENTION - _RECURRENT
    unknown |= {kind.__name__ for kind in kinds if not kind.__module__.startswith("transformers.")}
    if unknown:
        return f"its cache has layers of the kind {', '.join(sorted(unknown))}"
    if model._is_stateful and names <= _ATTENTION:
        return "it keeps states outside of its cache"
    return None


def check_filled(cache: Cache, columns: int) -> None:
    """Raise CannotServeError if the model did not leave its states after this many columns of prompts in its cache."""
    # Layers without keys have no length. Some of those that have keep none, where they read another layer's.
    lengths = [layer.get_seq_length() for layer in cache.layers if hasattr(layer, "get_seq_length")]
    recurrent = [layer for layer in cache.layers if type(layer).__name__ in _RECURRENT]
    states = [(*layer.conv_states.values(), *layer.recurrent_states.values()) for layer in recurrent]
    has_states = all(any(state is not None for state in of_layer) for of_layer in states)
    if not cache.layers or max(lengths, default=columns) != columns or not has_states:
        raise CannotServeError("the model keeps no cache of the prompts")


def rope_types(config: Any) -> set[str | None]:
    """Return the kinds of rotary positions of a text model's configuration; some have one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope] if "rope_type" in rope else rope.values()
    return {part.get("rope_type") for part in parts if part}
