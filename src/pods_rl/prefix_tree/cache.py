"""The cache of the prefix tree: layers with a row for each node, and attention of a single query on a CPU.

The results are those of transformers' own cache and attention, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
_SPARE = 16  # columns that a layer grows by: few compared with the cache, and they make copies rare
_CHANGED = "the model changes the cache's keys before it attends to them"
_SHARED_FROM = 2**19  # bytes of a layer's keys, copied for each rollout of a prompt, from which one copy is faster


class CannotServeError(Exception):
    """Raised before a completion is returned; the message says which part of the model or setting needs `generate`."""


class NodeLayer(DynamicLayer):
    """A cache layer with a row for each node of the tree, and spare rows and columns, so that few steps copy it.

    A `DynamicLayer` copies all of itself for each token, and for each change of its rows.

    Args:
        layer: holds the prompts, a row each: the first nodes.
        rollouts: the most nodes that there can be.
        most: the most columns that there can be.

    >>> prompts = DynamicLayer()
    >>> _ = prompts.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))
    >>> layer = NodeLayer(prompts, rollouts=8, most=9)
    >>> layer.arrange(torch.tensor([0, 1, 0]), torch.tensor([2]), rollouts=8)  # prompt 0 has a second node
    >>> layer.update(torch.ones(3, 1, 1, 4), torch.ones(3, 1, 1, 4))[0].shape
    torch.Size([3, 1, 4, 4])
    """

    def __init__(self, layer: DynamicLayer, rollouts: int, most: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self._rollouts, self._most = rollouts, most
        self.keys, self.values = layer.keys, layer.values
        self._make_room()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens' states, one for each node; return all."""
        start = self.keys.shape[2]
        if start == self._rows[0].shape[2]:
            self._make_room()
        end = start + key_states.shape[2]
        for rows, states in zip(self._rows, (key_states, value_states), strict=True):
            rows[:, :, start:end] = states
        self.keys, self.values = (rows[:, :, :end] for rows in self._rows)
        return self.keys, self.values

    def arrange(self, parents: Tensor, moved: Tensor, rollouts: int) -> None:
        """Let node `parents[i]` be at place i, for every i; only the places `moved` change.

        Args:
            parents: a node may be at several places, where its children fork, and at none, where it ended.
            moved: the places i where `parents[i]` is not i, ascending.
            rollouts: the most nodes that there can be from now on.
        """
        self._rollouts, columns = rollouts, self.keys.shape[2]
        if len(moved) and columns:
            sources = parents[moved]
            for room in self._rooms:
                states = room[:, :, :columns]
                states.index_copy_(0, moved, states.index_select(0, sources))
        self._rows = [room[: len(parents)] for room in self._rooms]
        self.keys, self.values = (rows[:, :, :columns] for rows in self._rows)

    def _make_room(self) -> None:
        """Copy the states to rooms with a row for each rollout and spare columns."""
        count, heads, columns, _ = self.keys.shape
        length = columns + max(1, min(_SPARE, self._most - columns))
        before = (self.keys, self.values)
        self._rooms = [states.new_empty(self._rollouts, heads, length, states.shape[3]) for states in before]
        self._rows = [room[:count] for room in self._rooms]
        for rows, states in zip(self._rows, before, strict=True):
            rows[:, :, :columns] = states
        self.keys, self.values = (rows[:, :, :columns] for rows in self._rows)


class Places:
    """The order of nodes by prompt, in which each prompt has as many places as the one with the most nodes.

    Args:
        prompt_of: the number of each node's prompt; every prompt has a node.

    >>> places = Places(torch.tensor([0, 1, 0]))
    >>> places.by_prompt(torch.tensor([[[5]], [[6]], [[7]]]))[:, 0, :, 0]
    tensor([[5, 7],
            [6, 5]])
    """

    def __init__(self, prompt_of: Tensor) -> None:
        counts = prompt_of.bincount()
        self.prompt_of, self.prompts, self._most = prompt_of, len(counts), int(counts.max())
        self._ordered = self.prompts == 1
        if self._ordered:
            return
        nodes = torch.arange(len(prompt_of), device=prompt_of.device)
        before = torch.nn.functional.one_hot(prompt_of).cumsum(0).gather(1, prompt_of.unsqueeze(1)).squeeze(1) - 1
        self._place_of = prompt_of * self._most + before
        self._node_at = nodes.new_zeros(self.prompts * self._most).index_copy_(0, self._place_of, nodes)
        self._ordered = len(nodes) == len(self._node_at) and torch.equal(self._place_of, nodes)

    def by_prompt(self, states: Tensor) -> Tensor:
        """From `[nodes, key heads, ...]` to `[prompts, key heads, places, ...]`; empty places repeat a node."""
        states = states if self._ordered else states.index_select(0, self._node_at)
        return states.unflatten(0, (self.prompts, self._most)).transpose(1, 2)

    def by_node(self, states: Tensor) -> Tensor:
        """The inverse of `by_prompt`."""
        states = states.transpose(1, 2).flatten(0, 1)
        return states if self._ordered else states.index_select(0, self._place_of)


class SharedLayer(NodeLayer):
    """A `NodeLayer` of the completions, with one copy of each prompt for all its nodes; `attend` reads both.

    The keys that `update` returns lead `attend` to this layer.

    Args:
        layer: holds the prompts, a row each: the first nodes.
        rollouts: the most nodes that there can be.
        most: the most columns that there can be, with the prompts'.
    """

    def __init__(self, layer: DynamicLayer, rollouts: int, most: int) -> None:
        self._prompts = layer.keys, layer.values
        own = DynamicLayer()
        own.update(layer.keys[:, :, :0], layer.values[:, :, :0])
        super().__init__(own, rollouts, most - layer.keys.shape[2])
        self.attended = True  # whether `attend` has seen the keys of the latest update
        self.places = Places(torch.arange(len(layer.keys), device=layer.keys.device))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens' states; return those of the nodes, which `attend` completes."""
        keys, values = super().update(key_states, value_states)
        keys.layer = ref(self)  # type: ignore[attr-defined]  # not the layer itself: a cycle would keep the cache
        self.attended = False
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of columns, the prompts' and the nodes' own."""
        return self._prompts[0].shape[2] + self.keys.shape[2]

    def keep_prompts(self, prompts: Tensor, places: Places) -> None:
        """Drop all prompts but these; `places` are those of the nodes among them."""
        if len(prompts) < len(self._prompts[0]):
            self._prompts = self._prompts[0][prompts], self._prompts[1][prompts]
        self.places = places

    def attend(self, query: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return what single queries `[nodes, key heads, heads a key head, size]`, already scaled, read."""
        (keys, values), places = self._prompts, self.places
        columns, by_prompt = keys.shape[2], places.by_prompt(query)
        first = (by_prompt.flatten(2, 3) @ keys.transpose(2, 3)).unflatten(2, by_prompt.shape[2:4])
        scores = torch.cat([first, places.by_prompt(query @ self.keys.transpose(2, 3))], dim=-1)
        if attention_mask is not None:
            mask = attention_mask.expand(len(query), -1, -1, -1)
            scores = scores.masked_fill(~places.by_prompt(mask), -torch.inf)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        read = (weights[..., :columns].flatten(2, 3) @ values).unflatten(2, by_prompt.shape[2:4])
        self.attended = True
        return places.by_node(weights[..., columns:]) @ self.values + places.by_node(read)


def share_prompts(model: PreTrainedModel, cache: Cache, rollouts: int, most: int) -> None:
    """Let the rows of a cache, one for each prompt, be the first nodes of a tree.

    Long prompts of several rollouts stay as they are, one copy for all nodes, where `attend` reads them.

    Args:
        rollouts: the most nodes that there can be.
        most: the most columns that there can be.
    """
    attends = model.config.get_text_config(decoder=True)._attn_implementation == SINGLE_QUERY
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:  # that of a sliding window does not grow
            copied = layer.keys[0].nbytes * (rollouts - len(layer.keys))
            kind = SharedLayer if attends and copied >= _SHARED_FROM else NodeLayer
            cache.layers[i] = kind(layer, rollouts, most)


def arrange(cache: Cache, parents: Tensor, rollouts: int) -> None:
    """Let node `parents[i]` of a cache be at place i, for every i: see `NodeLayer.arrange`."""
    moved = (parents != torch.arange(len(parents), device=parents.device)).nonzero().squeeze(1)
    shared = [layer for layer in cache.layers if isinstance(layer, SharedLayer)]
    if shared:
        prompts, prompt_of = shared[0].places.prompt_of[parents].unique(return_inverse=True)
        places = Places(prompt_of)
    for layer in cache.layers:
        if isinstance(layer, NodeLayer):
            layer.arrange(parents, moved, rollouts)
        else:
            layer.batch_select_indices(parents)
    for layer in shared:
        layer.keep_prompts(prompts, places)


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
        CannotServeError: the keys are those of a `SharedLayer`, and no longer lead to it, or the mask is not boolean.
    """
    rows, heads, queries, size = query.shape
    found = getattr(key, "layer", None)
    layer: SharedLayer | None = found and found()
    plain = attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1:3] == (1, 1))
    if queries != 1 or dropout or not plain:
        if layer is not None:
            raise CannotServeError("its attention takes a mask of its own")
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
