"""Attention over a prefix tree: each node attends to the nodes on its way from the root, and to itself.

On a GPU in 16 bits this is one variable-length call of torch (FlashAttention), if the installed torch has it: the
queries of a branch are its new nodes, its keys are gathered along its path. Otherwise it is a call for each block: the
nodes of a small tree are one block under a mask; of other trees, rows of similar length are gathered and padded on the
right, and `scaled_dot_product_attention` computes them together. `choose_kernel` decides.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
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
DENSE = 512  # a tree of at most this many nodes is one call under a mask, if it needs half of the pairs of nodes
FEW = 128  # keys up to which matrix products are faster than `scaled_dot_product_attention`
MOST_HEAD_SIZE = 256  # of FlashAttention, which takes multiples of 8
# Keywords of attention functions that change nothing in a pass without a cache, whatever their value.
HARMLESS = {
    "attention_mask",
    "position_ids",
    "cache_position",
    "position_embeddings",
    "use_cache",
    "past_key_values",
    "cache",
    "prefix_tree_recurrence",  # the tree for the layers that are not attention
}

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
        function = "torch.nn.attention.varlen"
        details = []
        if self.repeats_heads:
            details.append("keys and values are repeated for each query head")
        if self.why_blocks is not None:
            function = "scaled_dot_product_attention over blocks of rows"
            details.append(self.why_blocks)
        return f"{function} ({'; '.join(details)})" if details else function


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
class Part:
    """Rows of nodes that have the same nodes before them.

    Args:
        trunk: the nodes before each row; empty if there are none.
        rows: nodes; each attends to the trunk and in its row.
        back: as in `Block`.
    """

    trunk: NDArray[np.int64]
    rows: list[NDArray[np.int64]]
    back: Tensor | None = None


@dataclass(frozen=True)
class Block:
    """Rows of nodes that one call computes: each node attends to the `trunk`, which all rows have, and in its row.

    Args:
        trunk: its nodes. If None, the tree has no trunk.
        rows: `[count * width]`, the node of each place; a shorter row repeats its last node at its end.
        count: the number of rows.
        width: the length of each row.
        back: `[width, keys]`, how many nodes each key is before a node on its path, below 0 if it is not on it; None:
            each row is a path.
    """

    trunk: Nodes | None
    rows: Nodes
    count: int
    width: int
    back: Tensor | None = None

    def queries(self, q: Tensor, fold: int) -> Tensor:
        """Return the queries `[count, H / fold, width * fold, D]` of q `[L, H, D]`.

        Args:
            q: the queries of all nodes.
            fold: consecutive heads that become more queries of one head.
        """
        rows = _take(q, self.rows).unflatten(0, (self.count, self.width))  # [count, width, H, D]
        return rows.unflatten(2, (-1, fold)).transpose(1, 2).flatten(2, 3)

    def keys(self, states: Tensor) -> Tensor:
        """Return the keys or values `[count, K, trunk + width, D]` of `states` `[L, K, D]`."""
        rows = _take_shared(states, self.rows).unflatten(0, (self.count, self.width)).transpose(1, 2)
        if self.trunk is None:
            return rows  # [count, K, width, D]
        trunk = _take(states, self.trunk).transpose(0, 1)  # [K, trunk, D]
        return torch.cat([trunk.expand(self.count, -1, -1, -1), rows], 2)

    def by_place(self, outputs: Tensor, fold: int) -> Tensor:
        """Return the outputs `[count * width, H, D]` of those of the `queries`."""
        heads = outputs.unflatten(2, (self.width, fold))  # [count, H / fold, width, fold, D]
        return heads.transpose(1, 2).flatten(2, 3).flatten(0, 1)


class TreeAttention:
    """The attention of one tree.

    Args:
        branches: of the tree.
        device: of the model.

    Attributes:
        nodes: how many there are.
        windows: the sliding windows that the layers requested, 0 for none.
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
            scale: of the products. If None, one over the root of D.
            window: how many nodes back a node sees, itself included; 0: all.
        """
        self.windows.add(window)
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query = query.to(dtype)
            key = key.to(dtype)
            value = value.to(dtype)
        q = query[0].transpose(0, 1)  # [L, H, D]
        k = key[0].transpose(0, 1)  # [L, K, D]
        v = value[0].transpose(0, 1)
        if self._kernel(q, v, window).why_blocks is None:
            outputs = self.by_variable_length(q, k, v, scale, window)
        else:
            outputs = self.by_blocks(q, k, v, scale, window)
        return outputs.unsqueeze(0)

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
            nodes_before = window - 1 if window else -1  # -1 is no limit
            options["window_size"] = (nodes_before, 0)
        else:
            options["is_causal"] = True
        if "scale" in arguments:
            options["scale"] = scale
        elif scale is not None:
            q = q * (scale * math.sqrt(q.size(2)))  # the call divides by the root
        paths, query_ends, key_ends, most_queries, most_keys = self._paths
        keys = _take_shared(k, paths)  # [nodes of all paths, K, D]
        values = _take_shared(v, paths)
        if "enable_gqa" in arguments:
            options["enable_gqa"] = q.size(1) > k.size(1)
        else:
            keys = _for_each_head(keys, q.size(1))
            values = _for_each_head(values, q.size(1))
        outputs = varlen_attn(q.contiguous(), keys, values, query_ends, key_ends, most_queries, most_keys, **options)
        assert isinstance(outputs, Tensor)
        return outputs

    @cached_property
    def _arguments(self) -> frozenset[str]:
        return varlen_arguments()

    @cached_property
    def _paths(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Return the paths end to end, where each branch's queries and keys end, and the longest of both."""
        paths = [branch.path for branch in self._branches]
        query_counts = [branch.new for branch in self._branches]
        key_counts = [len(path) for path in paths]
        all_nodes, query_ends, key_ends = move_together(
            [np.concatenate(paths), np.cumsum([0, *query_counts]), np.cumsum([0, *key_counts])], self._device
        )
        return all_nodes, query_ends.int(), key_ends.int(), max(query_counts), max(key_counts)

    def by_blocks(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int) -> Tensor:
        """Return `[L, H, D]` by a call for each block; q is `[L, H, D]`, k and v `[L, K, D]`."""
        blocks, place = self._blocks
        if scale is None:
            scale = q.size(2) ** -0.5
        outputs = [self._attend_in_block(block, q, k, v, scale, window) for block in blocks]
        return _take(torch.cat(outputs), place)

    def _attend_in_block(self, block: Block, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Return what the nodes of a block read, `[count * width, H, D]`."""
        keys = block.keys(k)  # [count, K, keys, D]
        values = block.keys(v)
        key_count = keys.size(2)
        fold = 1
        if block.width * key_count <= DENSE**2:
            # In a small block heads that share keys become more queries, which is faster than heads of their own.
            fold = q.size(1) // k.size(1)
        query = block.queries(q, fold)  # [count, H / fold, width * fold, D]
        mask = None
        is_causal = block.trunk is None and block.back is None and window == 0 and fold == 1
        if not is_causal:
            mask = self._mask(block, key_count, window, fold, q.dtype)
        if self._kernel(q, v, window).repeats_heads:
            keys = _for_each_head(keys, query.size(1))
            values = _for_each_head(values, query.size(1))
        return block.by_place(_attend(query, keys, values, mask, scale), fold)

    def _mask(self, block: Block, key_count: int, window: int, fold: int, dtype: torch.dtype) -> Tensor:
        """Return 0 for the keys that the nodes of a row see, else minus infinity, `[width * fold, keys]`; made once."""
        # Blocks whose rows are paths and that have one shape share a mask.
        own_back = None if block.back is None else id(block)
        kind = (own_back, block.width, key_count, window, fold, dtype)
        if kind not in self._masks:
            back = block.back
            if back is None:
                places = torch.arange(key_count, device=self._device)
                back = places[key_count - block.width :].unsqueeze(1) - places  # [width, keys]
            hidden = back < 0
            if window:
                hidden |= back >= window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(hidden, -torch.inf)
            self._masks[kind] = mask.repeat_interleave(fold, 0)
        return self._masks[kind]

    @cached_property
    def _blocks(self) -> tuple[list[Block], Nodes]:
        """Return the blocks, and for each node its place among their rows."""
        blocks: list[Block] = []
        place = np.empty(self.nodes, np.int64)
        first_place = 0  # of the next row
        for part in self._parts():
            trunk = self._nodes(part.trunk) if len(part.trunk) else None
            for rows in _of_similar_length(part.rows):
                width = len(rows[0])
                padded = []
                for row in rows:
                    place[row] = np.arange(first_place, first_place + len(row))
                    first_place += width
                    padded.append(row[np.minimum(np.arange(width), len(row) - 1)])
                blocks.append(Block(trunk, self._nodes(np.concatenate(padded)), len(rows), width, part.back))
        return blocks, self._nodes(place)

    def _parts(self) -> list[Part]:
        """Return parts that have each node in a row: the trunks of prompts, and the nodes after each trunk.

        The nodes of a small tree are one row.
        """
        no_nodes = np.empty(0, np.int64)
        trunks: list[NDArray[np.int64]] = []
        parts: list[Part] = []
        for branches in _by_prompt(self._branches):
            paths = [branch.path for branch in branches]
            trunk = len(paths[0])  # the nodes that all rows of the prompt share
            for branch in branches[1:]:
                trunk = min(trunk, len(branch.path) - branch.new)
            nodes = np.unique(np.concatenate(paths))
            if _is_dense(paths, trunk, len(nodes)):
                back = torch.from_numpy(_nodes_back(nodes, paths)).to(self._device)
                parts.append(Part(no_nodes, [nodes], back))
            else:
                trunks.append(paths[0][:trunk])
                parts.append(Part(paths[0][:trunk], [path[trunk:] for path in paths]))
        return [Part(no_nodes, trunks), *parts]

    def _nodes(self, numbers: NDArray[np.int64]) -> Nodes:
        if (np.diff(numbers) == 1).all():
            return slice(int(numbers[0]), int(numbers[-1]) + 1)
        return torch.from_numpy(numbers).to(self._device)


def _by_prompt(branches: list[Branch]) -> list[list[Branch]]:
    """Return the branches of each prompt."""
    prompts: list[list[Branch]] = []
    for branch in branches:
        if branch.same_prompt:
            prompts[-1].append(branch)
        else:
            prompts.append([branch])
    return prompts


def _is_dense(paths: list[NDArray[np.int64]], trunk: int, count: int) -> bool:
    """Return whether the `count` nodes of a prompt's paths, which share `trunk` nodes, are one row under a mask."""
    if len(paths) == 1 or count > DENSE:
        return False
    pairs_by_rows = trunk**2 + sum(len(path) * (len(path) - trunk) for path in paths)
    return count**2 <= 2 * pairs_by_rows


def _nodes_back(nodes: NDArray[np.int64], paths: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return how many nodes each key is before a node on its path, -1 if it is not on it, `[nodes, nodes]`."""
    back = np.full((len(nodes), len(nodes)), -1)
    for path in paths:
        places = np.searchsorted(nodes, path)
        depth = np.arange(len(path))
        back[np.ix_(places, places)] = depth[:, None] - depth
    return back


def _of_similar_length(rows: list[NDArray[np.int64]]) -> Iterator[list[NDArray[np.int64]]]:
    """Yield the rows that are not empty, longest first, in groups whose lengths differ at most by the factor SPREAD."""
    filled = [row for row in rows if len(row)]
    group: list[NDArray[np.int64]] = []
    for row in sorted(filled, key=len, reverse=True):
        if group and len(row) * SPREAD < len(group[0]):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def move_together(arrays: list[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Return one-dimensional arrays as tensors on a device, with one copy for all: each copy waits for the device."""
    together = torch.from_numpy(np.concatenate(arrays)).to(device)
    return list(together.split([len(array) for array in arrays]))


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return what `scaled_dot_product_attention` does; with few keys by matrix products, which take less time."""
    grouped = query.size(1) > keys.size(1)
    if mask is None or keys.size(2) > FEW or grouped or mask.dtype.itemsize < 4:
        causal = mask is None
        return scaled_dot_product_attention(
            query, keys, values, mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    flat_query = query.flatten(0, 1)  # [count * heads, queries, D]
    flat_keys = keys.flatten(0, 1)
    flat_values = values.flatten(0, 1)
    weights = torch.baddbmm(mask, flat_query, flat_keys.transpose(1, 2), alpha=scale).softmax(-1)
    return torch.bmm(weights, flat_values).unflatten(0, query.shape[:2])


def _for_each_head(states: Tensor, heads: int) -> Tensor:
    """Repeat keys or values `[x, K, ...]` to `[x, heads, ...]`: consecutive query heads share one."""
    if states.size(1) == heads:
        return states
    return states.repeat_interleave(heads // states.size(1), 1)


def _take(states: Tensor, nodes: Nodes) -> Tensor:
    """Select nodes, each of which receives a gradient from one place only."""
    if isinstance(nodes, slice):
        return states[nodes]
    return states.index_select(0, nodes)


def _take_shared(states: Tensor, nodes: Nodes) -> Tensor:
    """Select nodes that may be on many paths, and receive the sum of the gradients of all."""
    if isinstance(nodes, slice) or states.dtype.itemsize >= 4:
        return _take(states, nodes)
    selected: Tensor = _SharedNodes.apply(states, nodes)
    return selected


class _SharedNodes(torch.autograd.Function):
    """`index_select` whose gradients are added up in float32.

    On a GPU torch rounds each sum to 16 bits: with 16 to 64 paths the gradient of a shared node is off by 0.5 to 1 %.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, nodes: Tensor) -> Tensor:
        ctx.save_for_backward(nodes)
        ctx.shape = states.shape
        return states.index_select(0, nodes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (nodes,) = ctx.saved_tensors
        sums = torch.zeros(ctx.shape, dtype=torch.float32, device=gradient.device)
        sums.index_add_(0, nodes, gradient.float())
        return sums.to(gradient.dtype), None


def register_tree_attention() -> None:
    """Wrap transformers' attention functions once, so that each takes a tree; without one it is called unchanged.

    The wrappers stay until the process ends: gradient checkpointing calls them again in the backward pass.
    """
    from transformers import AttentionInterface  # takes seconds, and `pods doctor` asks for a kernel only

    for name, function in list(AttentionInterface().items()):
        if "paged" not in name and not hasattr(function, "takes_trees"):
            AttentionInterface.register(name, _taking_trees(function))


def _taking_trees(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        tree = options.pop(KEYWORD, None)
        if tree is None:
            return function(module, query, key, value, *args, **options)
        if options.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
            raise UnsupportedAttentionError("its attention is not causal")
        scale = options.pop("scaling", None)
        window = options.pop("sliding_window", None) or 0
        for name, option in options.items():
            if name not in HARMLESS and not _is_off(option):
                raise UnsupportedAttentionError(f"its attention takes {name}")
        return tree(query, key, value, scale=scale, window=window), None

    attention.takes_trees = True  # type: ignore[attr-defined]
    return attention


def _is_off(option: Any) -> bool:
    """Return whether an option of an attention has a value that changes nothing: None, False or 0."""
    if option is None:
        return True
    return isinstance(option, int | float) and not option
