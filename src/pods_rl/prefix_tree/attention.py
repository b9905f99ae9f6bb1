"""Attention over a prefix tree: each node attends to the nodes on its way from the root, and to itself.

On a GPU in 16 bits this is one variable-length call of torch (FlashAttention), if the installed torch has it: the
queries of a branch are its new nodes, its keys are gathered along its path. Otherwise it is a call for each block: the
nodes of a small tree are one block under a mask; of other trees, rows of similar length are gathered and padded on the
right, and `scaled_dot_product_attention` computes them together. `choose_kernel` decides.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from .tree import Branch

KEYWORD = "prefix_tree"  # the argument of a model that transformers passes on to the attention function
SPREAD = 2  # rows of one block differ in length by at most this factor
DENSE = 512  # a tree of at most so many nodes is one call under a mask, if it needs half of the pairs of nodes
FEW = 128  # keys up to which matrix products are faster than `scaled_dot_product_attention`
# Keywords of attention functions that change nothing in a pass without a cache, whatever their value.
HARMLESS = {
    "attention_mask",
    "position_ids",
    "cache_position",
    "position_embeddings",
    "use_cache",
    "past_key_values",
    "cache",
}


MOST_HEAD_SIZE = 256  # of FlashAttention, which takes multiples of 8
_failing: set[str] = set()  # types of devices on which a probe found that torch's variable-length call does not work


class UnsupportedAttentionError(Exception):
    """The model's attention takes an argument that a tree does not implement."""


# -- the choice between torch's functions --------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """Which functions of torch compute the attention of a tree.

    Args:
        why_blocks: why blocks of rows are computed by `scaled_dot_product_attention`. If None, all rows are computed by
            one call of `torch.nn.attention.varlen`.
        repeats_heads: whether keys and values are repeated for the query heads that share them.
    """

    why_blocks: str | None
    repeats_heads: bool

    def __str__(self) -> str:
        repeated = " with keys and values repeated for each query head" if self.repeats_heads else ""
        if self.why_blocks is None:
            return f"torch.nn.attention.varlen{repeated}"
        return f"scaled_dot_product_attention over blocks of rows{repeated} ({self.why_blocks})"


def choose_kernel(
    arguments: frozenset[str],
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    head_size: int,
    value_size: int,
    windowed: bool,
) -> Kernel:
    """Return the functions that can compute an attention.

    Args:
        arguments: names of the arguments of torch's variable-length call; empty if the installed torch has none.
        device: the type of the device.
        dtype: of queries, keys and values.
        capability: the compute capability of the GPU; (0, 0) for other devices.
        head_size: the last dimension of queries and keys.
        value_size: the last dimension of values.
        windowed: whether a sliding window limits what a node sees.

    >>> choose_kernel(frozenset(), "cpu", torch.float32, (0, 0), 64, 64, windowed=False).why_blocks
    'the device is a CPU'
    >>> newest = frozenset({"scale", "window_size", "enable_gqa"})
    >>> str(choose_kernel(newest, "cuda", torch.bfloat16, (9, 0), 64, 64, windowed=True))
    'torch.nn.attention.varlen'
    """
    why_blocks = _why_blocks(arguments, device, dtype, capability, head_size, value_size, windowed)
    if why_blocks is None:
        return Kernel(None, repeats_heads="enable_gqa" not in arguments)
    # On a GPU no kernel takes both a mask and grouped heads: torch would write all scores to memory.
    return Kernel(why_blocks, repeats_heads=device != "cpu")


def _why_blocks(
    arguments: frozenset[str],
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    head_size: int,
    value_size: int,
    windowed: bool,
) -> str | None:
    """Return why torch's variable-length call cannot compute an attention; None if it can."""
    if device == "cpu":
        return "the device is a CPU"
    if device != "cuda":
        return f"the device is {device}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the model computes in {str(dtype).removeprefix('torch.')}, and not in 16 bits"
    if capability < (8, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and FlashAttention needs 8.0"
    if head_size > MOST_HEAD_SIZE or head_size % 8:
        return f"FlashAttention does not support a head size of {head_size}"
    if value_size != head_size:
        return f"FlashAttention needs keys and values of one head size, and the model has {head_size} and {value_size}"
    if 192 < head_size <= 224 and capability not in ((8, 0), (9, 0)):
        return f"FlashAttention supports a head size of {head_size} on A100 and H100 only"
    if not arguments:
        return "the installed torch has no torch.nn.attention.varlen"
    if "window_size" not in arguments and (windowed or "is_causal" not in arguments):
        return "the torch.nn.attention.varlen of the installed torch has no window_size"
    return None


def varlen_arguments() -> frozenset[str]:
    """Return the names of the arguments of torch's variable-length call; none if the installed torch has no such call.

    torch 2.10 is the first with it. 2.11 added `scale` and `window_size`, and 2.12 `enable_gqa`.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except (ImportError, AttributeError):  # AttributeError: a build without the operators that the module registers
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def hardware(device: torch.device) -> tuple[str, tuple[int, int]]:
    """Return the type of a device and the compute capability of a GPU, which is (0, 0) for other devices."""
    if device.type != "cuda":
        return device.type, (0, 0)
    return device.type, torch.cuda.get_device_capability(device)


def kernel_for(device: torch.device, dtype: torch.dtype, head_size: int, value_size: int, windowed: bool) -> Kernel:
    """Return the functions that compute an attention on a device with the installed torch: see `choose_kernel`."""
    kind, capability = hardware(device)
    kernel = choose_kernel(varlen_arguments(), kind, dtype, capability, head_size, value_size, windowed)
    if kernel.why_blocks is None and kind in _failing:
        return Kernel("torch.nn.attention.varlen does not work on this device", repeats_heads=True)
    return kernel


def avoid_variable_length(device: torch.device, avoid: bool) -> None:
    """Let this process compute blocks on all devices of this type, or, with `avoid` False, choose again."""
    kind, _ = hardware(device)
    if avoid:
        _failing.add(kind)
    else:
        _failing.discard(kind)


# -- the attention of a tree ---------------------------------------------------------------------------------------


Nodes = slice | Tensor  # numbers of nodes; those that stand side by side as a slice, which copies nothing


@dataclass(frozen=True)
class Block:
    """Rows of nodes that one call computes: each node attends to the `trunk`, which all rows have, and in its row.

    Args:
        trunk: its nodes.
        rows: `[count * width]`, the node of each place; a shorter row repeats its last node at its end.
        count, width: of the rows.
        back: `[width, keys]`, how many nodes each key is before a node on its path, below 0 if it is not on it; None:
            each row is a path.
    """

    trunk: Nodes | None
    rows: Nodes
    count: int
    width: int
    back: Tensor | None = None


class TreeAttention:
    """The attention of one tree.

    Args:
        branches: of the tree.
        device: of the model.

    Attributes:
        nodes: how many there are.
        windows: the sliding windows that the layers asked for, 0 for none.
        kernels: what computed the layers, by data type, head size, size of the values and whether there is a window.
    """

    def __init__(self, branches: list[Branch], device: torch.device) -> None:
        self._branches = branches
        self._device = device
        self._masks: dict[Any, Tensor] = {}
        self.windows: set[int] = set()
        self.kernels: dict[tuple[torch.dtype, int, int, bool], Kernel] = {}
        self.nodes = sum(branch.new for branch in branches)

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
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        compute = self.by_variable_length if self._kernel(q, v, window).why_blocks is None else self.by_blocks
        return compute(q, k, v, scale, window).unsqueeze(0)

    def _kernel(self, q: Tensor, v: Tensor, window: int) -> Kernel:
        """Return what computes these queries and values, `[L, H, D]` and `[L, K, D]`; chosen once for each kind."""
        kind = (q.dtype, q.size(2), v.size(2), window > 0)
        if kind not in self.kernels:
            self.kernels[kind] = kernel_for(self._device, *kind)
        return self.kernels[kind]

    def by_variable_length(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int) -> Tensor:
        """Return `[L, H, D]` by torch's call for sequences of various lengths; q is `[L, H, D]`, k and v `[L, K, D]`.

        Its causal mask is aligned with the end of each path, where the new nodes are.
        """
        from torch.nn.attention.varlen import varlen_attn  # older versions of torch do not have it

        arguments = self._arguments
        options: dict[str, Any] = {}
        if "window_size" in arguments:
            options["window_size"] = (window - 1 if window else -1, 0)
        else:
            options["is_causal"] = True
        if "scale" in arguments:
            options["scale"] = scale
        elif scale is not None:
            q = q * (scale * math.sqrt(q.size(2)))  # the call divides by the root
        paths, of_queries, of_keys, most_queries, most_keys = self._paths
        keys = k.index_select(0, paths)
        values = v.index_select(0, paths)
        if "enable_gqa" in arguments:
            options["enable_gqa"] = q.size(1) > k.size(1)
        else:
            keys = _for_each_head(keys, q.size(1))
            values = _for_each_head(values, q.size(1))
        out = varlen_attn(q.contiguous(), keys, values, of_queries, of_keys, most_queries, most_keys, **options)
        assert isinstance(out, Tensor)
        return out

    @cached_property
    def _arguments(self) -> frozenset[str]:
        return varlen_arguments()

    @cached_property
    def _paths(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Return the paths end to end, where each branch's queries and keys end, and the longest of both."""
        new, lengths = [branch.new for branch in self._branches], [len(branch.path) for branch in self._branches]
        paths = torch.from_numpy(np.concatenate([branch.path for branch in self._branches]))
        queries, keys = (torch.tensor([0, *x]).cumsum(0).to(self._device, torch.int32) for x in (new, lengths))
        return paths.to(self._device), queries, keys, max(new), max(lengths)

    def by_blocks(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int) -> Tensor:
        """Return `[L, H, D]` by a call for each block; in small ones heads that share keys become more queries."""
        blocks, place = self._blocks
        repeats_heads = self._kernel(q, v, window).repeats_heads
        pieces = []
        for block in blocks:
            size = (block.count, block.width)
            keys, values = (_take(x, block.rows).unflatten(0, size).transpose(1, 2) for x in (k, v))
            if block.trunk is not None:
                first = [_take(x, block.trunk).transpose(0, 1).expand(block.count, -1, -1, -1) for x in (k, v)]
                keys, values = torch.cat([first[0], keys], 2), torch.cat([first[1], values], 2)
            fold = q.size(1) // k.size(1) if block.width * keys.size(2) <= DENSE**2 else 1
            query = _take(q, block.rows).unflatten(0, size).unflatten(2, (-1, fold)).transpose(1, 2).flatten(2, 3)
            mask = None
            if block.trunk is not None or block.back is not None or window or fold > 1:
                mask = self._mask(block, keys.size(2), window, fold, q.dtype)
            if repeats_heads:
                keys = _for_each_head(keys, query.size(1))
                values = _for_each_head(values, query.size(1))
            out = _attend(query, keys, values, mask, q.size(2) ** -0.5 if scale is None else scale)
            pieces.append(out.unflatten(2, (block.width, fold)).transpose(1, 2).flatten(2, 3).flatten(0, 1))
        return _take(torch.cat(pieces), place)

    def _mask(self, block: Block, keys: int, window: int, fold: int, dtype: torch.dtype) -> Tensor:
        """Return 0 for the keys that the nodes of a row see, else minus infinity, `[width * fold, keys]`; made once."""
        name = (None if block.back is None else id(block), block.width, keys, window, fold, dtype)
        if name not in self._masks:
            places = torch.arange(keys, device=self._device)
            back = places[keys - block.width :].unsqueeze(1) - places if block.back is None else block.back
            hidden = (back < 0) | (back >= window) if window else back < 0
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(hidden, -torch.inf)
            self._masks[name] = mask.repeat_interleave(fold, 0)
        return self._masks[name]

    @cached_property
    def _blocks(self) -> tuple[list[Block], Nodes]:
        """Return the blocks, and for each node its place among their rows."""
        prompts: list[list[NDArray[np.int64]]] = []
        trunks: list[int] = []  # nodes that all rows of a prompt share
        for branch in self._branches:
            if branch.same_prompt:
                prompts[-1].append(branch.path)
                trunks[-1] = min(trunks[-1], len(branch.path) - branch.new)
            else:
                prompts.append([branch.path])
                trunks.append(len(branch.path))
        none = np.empty(0, np.int64)
        whole: list[NDArray[np.int64]] = []
        parts: list[tuple[NDArray[np.int64], list[NDArray[np.int64]], Tensor | None]] = [(none, whole, None)]
        for paths, trunk in zip(prompts, trunks, strict=True):
            nodes = np.unique(np.concatenate(paths))
            pairs = trunk**2 + sum(len(path) * (len(path) - trunk) for path in paths)
            if len(paths) > 1 and len(nodes) <= DENSE and len(nodes) ** 2 <= 2 * pairs:
                back = np.full((len(nodes), len(nodes)), -1)
                for path in paths:
                    own, depth = np.searchsorted(nodes, path), np.arange(len(path))
                    back[np.ix_(own, own)] = depth[:, None] - depth
                parts.append((none, [nodes], torch.from_numpy(back).to(self._device)))
            else:
                whole.append(paths[0][:trunk])
                parts.append((paths[0][:trunk], [path[trunk:] for path in paths], None))
        place = np.empty(self.nodes, np.int64)
        blocks, at = [], 0
        for first, given, back_of in parts:
            trunk_of = self._nodes(first) if len(first) else None
            rows = sorted((row for row in given if len(row)), key=len, reverse=True)
            while rows:
                width = len(rows[0])
                count = sum(len(row) * SPREAD >= width for row in rows)
                here, rows = rows[:count], rows[count:]
                for row in here:
                    place[row] = np.arange(at, at + len(row))
                    at += width
                padded = np.concatenate([row[np.minimum(np.arange(width), len(row) - 1)] for row in here])
                blocks.append(Block(trunk_of, self._nodes(padded), count, width, back_of))
        return blocks, self._nodes(place)

    def _nodes(self, numbers: NDArray[np.int64]) -> Nodes:
        if (np.diff(numbers) == 1).all():
            return slice(int(numbers[0]), int(numbers[-1]) + 1)
        return torch.from_numpy(numbers).to(self._device)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return what `scaled_dot_product_attention` does; with few keys by matrix products, which take less time."""
    if mask is None or keys.size(2) > FEW or query.size(1) > keys.size(1) or mask.dtype.itemsize < 4:
        causal, grouped = mask is None, query.size(1) > keys.size(1)
        return scaled_dot_product_attention(
            query, keys, values, mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    flat = [x.flatten(0, 1) for x in (query, keys, values)]
    weights = torch.baddbmm(mask, flat[0], flat[1].transpose(1, 2), alpha=scale).softmax(-1)
    return torch.bmm(weights, flat[2]).unflatten(0, query.shape[:2])


def _for_each_head(states: Tensor, heads: int) -> Tensor:
    """Repeat keys or values `[x, K, ...]` to `[x, heads, ...]`: consecutive query heads share one."""
    if states.size(1) == heads:
        return states
    return states.repeat_interleave(heads // states.size(1), 1)


def _take(states: Tensor, nodes: Nodes) -> Tensor:
    return states[nodes] if isinstance(nodes, slice) else states.index_select(0, nodes)


def teach_attention_trees() -> None:
    """Wrap transformers' attention functions once, so that each takes a tree; without one it is called unchanged.

    The wrappers stay until the process ends: gradient checkpointing calls them again in the backward pass.
    """
    from transformers import AttentionInterface  # takes seconds, and `pods doctor` asks for a kernel only

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
