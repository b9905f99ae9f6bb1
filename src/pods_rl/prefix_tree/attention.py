"""Attention over a prefix tree: each node attends to the nodes on its way from the root, and to itself.

On a GPU in 16 bits this is one variable-length call of torch (FlashAttention): the queries of a branch are its new
nodes, its keys are gathered along its path. Elsewhere rows of similar length are gathered and padded on the right, and
`scaled_dot_product_attention` computes them together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .tree import Branch

KEYWORD = "prefix_tree"  # the argument of a model that transformers passes on to the attention function
SPREAD = 2  # rows of one block differ in length by at most this factor
CALL = 2**21  # multiplications and additions that take as long as one more block, on one core
# Keywords of attention functions that change nothing in a pass without a cache, whatever their value.
HARMLESS = {"attention_mask", "position_ids", "cache_position", "position_embeddings", "use_cache", "past_key_values"}


class UnsupportedAttentionError(Exception):
    """The model's attention takes an argument that a tree does not implement."""


Nodes = slice | Tensor  # numbers of nodes; those that stand side by side as a slice, which copies nothing


@dataclass(frozen=True)
class Block:
    """Rows that one call computes: each attends to the `trunk`, which all of them have, and to itself.

    Args:
        trunk: its nodes.
        rows: `[count * width]`, the node of each place; a shorter row repeats its last node at its end.
        count, width: of the rows.
    """

    trunk: Nodes | None
    rows: Nodes
    count: int
    width: int


class TreeAttention:
    """The attention of one tree.

    Args:
        branches: of the tree.
        device: of the model.

    Attributes:
        windows: the sliding windows that the layers asked for, 0 for none.
    """

    def __init__(self, branches: list[Branch], device: torch.device) -> None:
        self._branches, self._device = branches, device
        self.windows: set[int] = set()
        self._masks: dict[tuple[int, int, int], Tensor] = {}
        self._blocks: tuple[list[Block], Nodes] | None = None
        self._gathered: tuple[Tensor, Tensor, Tensor, int, int] | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int = 0) -> Tensor:
        """Return what the nodes read, `[1, L, H, D]`.

        Args:
            query: `[1, H, L, D]`.
            key, value: `[1, K, L, D]`, where K divides H.
            scale: of the products; None: one over the root of D.
            window: how many nodes back a node sees, itself included; 0: all.
        """
        self.windows.add(window)
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        compute = self.by_variable_length if takes_variable_length(query) else self.by_blocks
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return compute(q, k, v, scale, window).unsqueeze(0)

    def by_variable_length(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int) -> Tensor:
        """Return `[L, H, D]` by torch's call for sequences of various lengths; q is `[L, H, D]`, k and v `[L, K, D]`.

        Its causal mask is aligned with the end of each path, where the new nodes are.
        """
        from torch.nn.attention.varlen import varlen_attn  # of a torch that is built for a GPU

        if self._gathered is None:
            self._gathered = self._paths()
        paths, of_queries, of_keys, most_queries, most_keys = self._gathered
        keys, values = k.index_select(0, paths), v.index_select(0, paths)
        out = varlen_attn(
            q.contiguous(), keys, values, of_queries, of_keys, most_queries, most_keys, scale=scale,
            window_size=(window - 1 if window else -1, 0), enable_gqa=q.size(1) != k.size(1),
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    def _paths(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Return the paths end to end, where each branch's queries and keys end, and the longest of both."""
        new, lengths = [branch.new for branch in self._branches], [len(branch.path) for branch in self._branches]
        paths = torch.from_numpy(np.concatenate([branch.path for branch in self._branches]))
        queries, keys = (torch.tensor([0, *x]).cumsum(0).to(self._device, torch.int32) for x in (new, lengths))
        return paths.to(self._device), queries, keys, max(new), max(lengths)

    def by_blocks(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int) -> Tensor:
        """Return `[L, H, D]` by calls of `scaled_dot_product_attention`; a node that rows share is read from one."""
        if self._blocks is None:
            self._blocks = self._plan(q.size(1) * q.size(2))
        blocks, place = self._blocks
        pieces = []
        for block in blocks:
            query, keys, values = (
                _take(x, block.rows).unflatten(0, (block.count, block.width)).transpose(1, 2) for x in (q, k, v)
            )
            mask = None
            if block.trunk is not None:
                first = [_take(x, block.trunk).transpose(0, 1).expand(block.count, -1, -1, -1) for x in (k, v)]
                keys, values = torch.cat([first[0], keys], 2), torch.cat([first[1], values], 2)
            if block.trunk is not None or window:
                mask = self._mask(block.width, keys.size(2), window)
            out = scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
            pieces.append(out.transpose(1, 2).flatten(0, 1))
        return _take(torch.cat(pieces), place)

    def _mask(self, width: int, keys: int, window: int) -> Tensor:
        """Return which of the keys each of the last `width` nodes sees, `[width, keys]`; made once."""
        name = (width, keys, window)
        if name not in self._masks:
            before = keys - width
            seen = torch.ones(width, keys, dtype=torch.bool, device=self._device).tril(before)
            self._masks[name] = seen.triu(before - window + 1) if window else seen
        return self._masks[name]

    def _plan(self, size: int) -> tuple[list[Block], Nodes]:
        """Return the blocks, and for each node its place among their rows."""
        prompts: list[list[Branch]] = []
        for branch in self._branches:
            prompts.append([]) if not branch.same_prompt else None
            prompts[-1].append(branch)
        whole: list[NDArray[np.int64]] = []
        parts: list[tuple[NDArray[np.int64] | None, list[NDArray[np.int64]]]] = [(None, whole)]
        for group in prompts:
            paths = [branch.path for branch in group]
            trunk = min((len(branch.path) - branch.new for branch in group[1:]), default=0)
            after = sum(len(path) * (len(path) - trunk) for path in paths)
            if (sum(_seen(len(path)) for path in paths) - _seen(trunk) - after) * size > CALL:
                whole.append(paths[0][:trunk])
                parts.append((paths[0][:trunk], [path[trunk:] for path in paths]))
            else:
                whole.extend(paths)
        place = np.empty(sum(branch.new for branch in self._branches), np.int64)
        blocks, at = [], 0
        for first, given in parts:
            before = None if first is None else self._nodes(first)
            rows = sorted((row for row in given if len(row)), key=len, reverse=True)
            while rows:
                width = len(rows[0])
                count = sum(len(row) * SPREAD >= width for row in rows)
                here, rows = rows[:count], rows[count:]
                for i, row in enumerate(here):
                    place[row] = np.arange(at + i * width, at + i * width + len(row))
                padded = np.concatenate([np.pad(row, (0, width - len(row)), mode="edge") for row in here])
                blocks.append(Block(before, self._nodes(padded), count, width))
                at += count * width
        return blocks, self._nodes(place)

    def _nodes(self, numbers: NDArray[np.int64]) -> Nodes:
        if (np.diff(numbers) == 1).all():
            return slice(int(numbers[0]), int(numbers[-1]) + 1)
        return torch.from_numpy(numbers).to(self._device)


def _seen(length: int) -> int:
    """Return how many pairs of nodes a causal call computes: the kernel on a CPU skips blocks of keys, of 512 each."""
    return length * min(length, (length + 512) // 2)


def _take(states: Tensor, nodes: Nodes) -> Tensor:
    return states[nodes] if isinstance(nodes, slice) else states.index_select(0, nodes)


def takes_variable_length(query: Tensor) -> bool:
    """Return whether torch's variable-length call takes these queries, `[1, H, L, D]`."""
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    return query.size(3) <= 256 and query.size(3) % 8 == 0 and torch.cuda.get_device_capability(query.device)[0] >= 8


# -- attention functions of transformers -----------------------------------------------------------------------------


def teach_attention_trees() -> None:
    """Wrap transformers' attention functions once, so that each takes a tree; without one it is called unchanged.

    The wrappers stay until the process ends: gradient checkpointing calls them again in the backward pass.
    """
    for name, function in list(AttentionInterface().items()):
        if "paged" not in name and not hasattr(function, "takes_trees"):
            AttentionInterface.register(name, _taking_trees(function))


def _taking_trees(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **how: Any) -> Any:
        tree = how.pop(KEYWORD, None)
        if tree is None:
            return function(module, query, key, value, *args, **how)
        if how.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
            raise UnsupportedAttentionError("its attention is not causal")
        known = {"scale": how.pop("scaling", None), "window": how.pop("sliding_window", None) or 0}
        for name, given in how.items():
            if name not in HARMLESS and not (given is None or (isinstance(given, int | float) and not given)):
                raise UnsupportedAttentionError(f"its attention takes {name}")
        return tree(query, key, value, **known), None

    attention.takes_trees = True  # type: ignore[attr-defined]
    return attention
