"""Attention over a prefix tree: each node attends to the nodes on its way from the root, and to itself.

On a GPU in 16 bits this is one variable-length call of torch (FlashAttention), if the installed torch has it: the
queries of a branch are its new nodes, its keys are gathered along its path. Otherwise it is a call for each block
(`blocks`): the nodes of a small tree are one block under a mask; of other trees, rows of similar length are gathered,
and `scaled_dot_product_attention` computes them together. On a CPU, what long rows share is computed apart from them
(`merged`). `choose_kernel` decides.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from transformers import AttentionInterface

from .blocks import DENSE, LONG, Block, Layout, for_each_head, lay_out, take, take_shared
from .merged import attend_merged
from .tree import Branch

_EAGER = "eager_attention_forward"
KEYWORD = "prefix_tree"  # the argument of a model that transformers passes on to the attention function
MOST_HEAD_SIZE = 256  # of FlashAttention, which takes multiples of 8
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
    "output_router_logits",
    "prefix_tree_recurrence",  # the tree for the layers that are not attention
}

failing: set[str] = set()  # types of devices on which a probe found that torch's variable-length call does not work


class UnsupportedAttentionError(Exception):
    """The model's attention takes an argument that a tree does not implement."""


# -- the choice between torch's functions --------------------------------------------------------------------------


class Special(NamedTuple):
    """What an attention has that not every function of torch computes."""

    window: bool = False
    softcap: bool = False
    dropout: bool = False
    sinks: bool = False


PLAIN = Special()


@dataclass(frozen=True)
class Kernel:
    """Which functions of torch compute the attention of a tree."""

    why_blocks: str | None  # if None, one call of `torch.nn.attention.varlen` computes all rows
    repeats_heads: bool  # keys and values are repeated for the query heads that share them
    by_products: bool = False  # matrix products compute the blocks, since no function of torch does
    merges: bool = False  # nodes that long rows share may be computed apart from them, and joined by `merged`

    def __str__(self) -> str:
        function = "torch.nn.attention.varlen"
        details = []
        if self.repeats_heads:
            details.append("keys and values are repeated for each query head")
        if self.why_blocks is not None:
            function = "matrix products" if self.by_products else "scaled_dot_product_attention"
            function += " over blocks of rows"
            details.append(self.why_blocks)
        return f"{function} ({'; '.join(details)})" if details else function


def choose_kernel(
    arguments: frozenset[str],
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    head_size: int,
    value_size: int,
    special: Special = PLAIN,
) -> Kernel:
    """Return the functions that can compute an attention: see `varlen_arguments` and `hardware`."""
    why_blocks = _why_blocks(arguments, device, dtype, capability, head_size, value_size, special)
    if why_blocks is None:
        return Kernel(None, repeats_heads="enable_gqa" not in arguments)
    on_cpu = device == "cpu"
    by_products = special.softcap or special.sinks
    # On a GPU no kernel takes both a mask and grouped heads: torch would write all scores to memory.
    return Kernel(why_blocks, repeats_heads=not on_cpu, by_products=by_products, merges=on_cpu and not by_products)


def _why_blocks(
    arguments: frozenset[str],
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    head_size: int,
    value_size: int,
    special: Special,
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
    return _why_not_special(arguments, special)


def _why_not_special(arguments: frozenset[str], special: Special) -> str | None:
    """Return which part of an attention torch's variable-length call cannot compute; None if it computes all."""
    if special.softcap:
        return "FlashAttention does not bound scores"
    if special.dropout:
        return "torch.nn.attention.varlen has no dropout"
    if special.sinks and "return_aux" not in arguments:
        return "the torch.nn.attention.varlen of the installed torch returns no sums, which sinks need"
    if "window_size" not in arguments and (special.window or "is_causal" not in arguments):
        return "the torch.nn.attention.varlen of the installed torch has no window_size"
    return None


def varlen_arguments() -> frozenset[str]:
    """Return the names of the arguments of torch's variable-length call; none if the installed torch lacks it."""
    # torch 2.10 is the first with it. 2.11 added `scale` and `window_size`, and 2.12 `enable_gqa`.
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


def kernel_for(
    device: torch.device, dtype: torch.dtype, head_size: int, value_size: int, special: Special = PLAIN
) -> Kernel:
    """Return the functions that compute an attention on a device with the installed torch: see `choose_kernel`."""
    kind, capability = hardware(device)
    kernel = choose_kernel(varlen_arguments(), kind, dtype, capability, head_size, value_size, special)
    if kernel.why_blocks is None and kind in failing:
        return Kernel("torch.nn.attention.varlen does not work on this device", True, by_products=special.sinks)
    return kernel


def avoid_variable_length(device: torch.device, avoid: bool) -> None:
    """Let this process compute blocks on all devices of this type, or, with `avoid` False, choose again."""
    kind, _ = hardware(device)
    if avoid:
        failing.add(kind)
    else:
        failing.discard(kind)


# -- the attention of a tree ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scoring:
    """How scores are computed from queries and keys, and weights from scores."""

    scale: float  # of the products
    window: int = 0  # how many nodes back a node sees, itself included; 0 for all
    softcap: float = 0.0  # the bound of the scores, which a hyperbolic tangent keeps; 0 for none
    dropout: float = 0.0  # the share of the weights that are set to 0


class TreeAttention:
    """The attention of one tree."""

    def __init__(self, branches: list[Branch], device: torch.device) -> None:
        self._branches = branches
        self._device = device
        self._longest = max(len(branch.path) for branch in branches)
        self._masks: dict[Any, Tensor] = {}
        self._layouts: dict[bool, Layout] = {}  # by whether they have spans
        self.windows: set[int] = set()  # the sliding windows that the layers requested, 0 for none
        # What computed the layers, by data type, size of a head and of its values, and `Special`.
        self.kernels: dict[tuple[torch.dtype, int, int, Special], Kernel] = {}
        self.nodes = sum(branch.new for branch in branches)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int = 0,
        softcap: float = 0.0,
        dropout: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return what the nodes read, `[1, L, H, D]`.

        Args:
            query: `[1, H, L, D]`.
            key, value: `[1, K, L, D]`, where K divides H.
            scale: see `Scoring`, as for `window`, `softcap` and `dropout`. If None, one over the root of D.
            sinks: `[H]`, the score of one more key, whose value is 0. If None, there is none.
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
        if scale is None:
            scale = q.size(2) ** -0.5
        scoring = Scoring(scale, window if window < self._longest else 0, softcap, dropout)
        return self.attend(q, k, v, sinks, scoring).unsqueeze(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scoring: Scoring) -> Tensor:
        """Return `[L, H, D]`; q is `[L, H, D]`, k and v `[L, K, D]`, sinks `[H]`."""
        kernel = self._kernel(q, v, sinks, scoring)
        if kernel.why_blocks is None:
            return self.by_variable_length(q, k, v, sinks, scoring)
        spans = kernel.merges and scoring.window == 0 and not scoring.dropout
        if spans not in self._layouts:
            self._layouts[spans] = lay_out(self._branches, self.nodes, self._device, spans)
        layout = self._layouts[spans]
        if layout.spans:
            fold_and_mask = partial(self._fold_and_mask, scoring.window, q.size(1) // k.size(1), q.dtype)
            return attend_merged(q, k, v, layout, scoring.scale, fold_and_mask)
        # Long rows that share a few nodes repeat them: a causal call takes a third of the time of one under a mask.
        return self.by_blocks(q, k, v, sinks, scoring, layout)

    def _kernel(self, q: Tensor, v: Tensor, sinks: Tensor | None, scoring: Scoring) -> Kernel:
        """Return what computes these queries and values, `[L, H, D]` and `[L, K, D]`; chosen once for each kind."""
        special = Special(scoring.window > 0, scoring.softcap > 0, scoring.dropout > 0, sinks is not None)
        kind = (q.dtype, q.size(2), v.size(2), special)
        if kind not in self.kernels:
            self.kernels[kind] = kernel_for(self._device, *kind)
        return self.kernels[kind]

    def by_variable_length(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scoring: Scoring) -> Tensor:
        """Return `[L, H, D]` by torch's call for sequences of various lengths; q is `[L, H, D]`, k and v `[L, K, D]`.

        Its causal mask is aligned with the end of each path, where the new nodes are.
        """
        from torch.nn.attention.varlen import varlen_attn  # older versions of torch do not have it

        arguments = self._arguments
        options: dict[str, Any] = {}
        if "window_size" in arguments:
            nodes_before = scoring.window - 1 if scoring.window else -1  # -1: no limit
            options["window_size"] = (nodes_before, 0)
        else:
            options["is_causal"] = True
        scale = scoring.scale
        if "scale" in arguments:
            options["scale"] = scale
        else:
            q = q * (scale * math.sqrt(q.size(2)))  # the call divides by the root
            scale = q.size(2) ** -0.5
        paths, query_ends, key_ends, most_queries, most_keys = self._paths
        keys = take_shared(k, paths)  # [nodes of all paths, K, D]
        values = take_shared(v, paths)
        if "enable_gqa" in arguments:
            options["enable_gqa"] = q.size(1) > k.size(1)
        else:
            keys = for_each_head(keys, q.size(1))
            values = for_each_head(values, q.size(1))
        q = q.contiguous()
        lengths = (query_ends, key_ends, most_queries, most_keys)
        if sinks is None:
            outputs = varlen_attn(q, keys, values, *lengths, **options)
            assert isinstance(outputs, Tensor)
            return outputs
        from torch.nn.attention.varlen import AuxRequest

        outputs, log_sum = varlen_attn(q, keys, values, *lengths, return_aux=AuxRequest(lse=True), **options)
        assert isinstance(log_sum, Tensor)
        if log_sum.shape[0] == q.size(1):  # torch returns [H, L], and its page says [L, H]
            log_sum = log_sum.transpose(0, 1)
        log_sum = log_sum.detach()
        if torch.is_grad_enabled() and (q.requires_grad or keys.requires_grad):
            # torch returns no gradient of the sum. A second call, with the keys as values, has it: the gradient is
            # the weighted mean of the keys for a query, and for a key what it receives as a value.
            mean_keys = varlen_attn(q.detach(), keys.detach(), keys, *lengths, **options)
            assert isinstance(mean_keys, Tensor)
            products = q.float() * mean_keys.detach().float() + q.detach().float() * mean_keys.float()
            change = scale * products.sum(2)
            log_sum = log_sum + (change - change.detach())
        share = torch.sigmoid(log_sum - sinks.float())  # of the weights that is not the sink's, [L, H]
        return outputs * share.unsqueeze(2).to(outputs.dtype)

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

    def by_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scoring: Scoring, layout: Layout
    ) -> Tensor:
        """Return `[L, H, D]` by a call for each block; q is `[L, H, D]`, k and v `[L, K, D]`."""
        # Without gradients, the copies that a block needs are freed before the next block.
        outputs = [self._attend_in_block(block, q, k, v, sinks, scoring) for block in layout.blocks]
        return take(torch.cat(outputs), layout.slot_of_node)

    def _attend_in_block(
        self, block: Block, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scoring: Scoring
    ) -> Tensor:
        """Return what the nodes of a block read, `[count * width, H, D]`."""
        keys = block.keys(k)  # [count, K, keys, D]
        values = block.keys(v)
        fold, mask = self._fold_and_mask(scoring.window, q.size(1) // k.size(1), q.dtype, block)
        query = block.queries(q, fold)  # [count, H / fold, width * fold, D]
        kernel = self._kernel(q, v, sinks, scoring)
        if kernel.repeats_heads or kernel.by_products:
            keys = for_each_head(keys, query.size(1))
            values = for_each_head(values, query.size(1))
        if not kernel.by_products:
            return block.by_slot(_attend(query, keys, values, mask, scoring), fold)
        if mask is None:
            mask = self._mask(block, scoring.window, fold, q.dtype)
        if sinks is not None:
            sinks = sinks.view(-1, 1, fold).expand(-1, block.width, -1).flatten(1)  # [H / fold, width * fold]
        return block.by_slot(_attend_by_products(query, keys, values, mask, sinks, scoring), fold)

    def _fold_and_mask(self, window: int, sharing: int, dtype: torch.dtype, block: Block) -> tuple[int, Tensor | None]:
        """Return how many of the `sharing` heads are folded, and the mask; None if a node sees all nodes before it."""
        if not block.sees_row:
            return sharing, None
        is_causal = block.trunk is None and block.distance_to_key is None and window == 0
        # In a small block heads that share keys become more queries, which is faster than heads of their own. Their
        # mask costs more than that in long rows, which need none.
        is_small = block.width * block.key_count <= DENSE**2
        fold = sharing if is_small and not (is_causal and block.width > LONG) else 1
        if is_causal and fold == 1:
            return fold, None
        return fold, self._mask(block, window, fold, dtype)

    def _mask(self, block: Block, window: int, fold: int, dtype: torch.dtype) -> Tensor:
        """Return 0 for the keys that the nodes of a row see, else minus infinity, `[width * fold, keys]`; made once."""
        # Blocks whose rows are paths and that have one shape share a mask.
        own_mask = None if block.distance_to_key is None else id(block)
        kind = (own_mask, block.width, block.key_count, window, fold, dtype)
        if kind not in self._masks:
            distance = block.distance_to_key
            if distance is None:
                columns = torch.arange(block.key_count, device=self._device)
                distance = columns[block.key_count - block.width :].unsqueeze(1) - columns  # [width, keys]
            hidden = distance < 0
            if window:
                hidden |= distance >= window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(hidden, -torch.inf)
            self._masks[kind] = mask.repeat_interleave(fold, 0)
        return self._masks[kind]


def move_together(arrays: list[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Return one-dimensional arrays as tensors on a device, with one copy for all: each copy waits for the device."""
    together = torch.from_numpy(np.concatenate(arrays)).to(device)
    return list(together.split([len(array) for array in arrays]))


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Return what `scaled_dot_product_attention` does; with few keys by matrix products, which take less time."""
    grouped = query.size(1) > keys.size(1)
    if mask is None or keys.size(2) > FEW or grouped or mask.dtype.itemsize < 4 or scoring.dropout:
        options: dict[str, Any] = {"dropout_p": scoring.dropout, "is_causal": mask is None, "scale": scoring.scale}
        return scaled_dot_product_attention(query, keys, values, mask, enable_gqa=grouped, **options)
    flat_query = query.flatten(0, 1)  # [count * heads, queries, D]
    flat_keys = keys.flatten(0, 1)
    flat_values = values.flatten(0, 1)
    weights = torch.baddbmm(mask, flat_query, flat_keys.transpose(1, 2), alpha=scoring.scale).softmax(-1)
    return torch.bmm(weights, flat_values).unflatten(0, query.shape[:2])


def _attend_by_products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor | None, scoring: Scoring
) -> Tensor:
    """Return what no function of torch computes: scores that are bounded, or a sink `[heads, queries]`."""
    scores = query @ keys.transpose(2, 3) * scoring.scale
    if scoring.softcap:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores + mask
    if sinks is not None:
        of_sinks = sinks.to(scores.dtype).unsqueeze(2).expand(len(scores), -1, -1, 1)
        scores = torch.cat([scores, of_sinks], 3)
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = dropout(scores.softmax(3, dtype=exact), scoring.dropout)
    return weights[..., : keys.size(2)].to(values.dtype) @ values


def register_tree_attention(model: nn.Module) -> None:
    """Wrap the attention functions of transformers and a model once, so that each takes a tree.

    The wrappers stay until the process ends: gradient checkpointing calls them again in the backward pass.
    """
    for name, function in list(AttentionInterface().items()):
        if "paged" not in name and not hasattr(function, "takes_trees"):
            AttentionInterface.register(name, _wrap_attention(function))
    # Eager attention is not in transformers' table: the layers of a model look it up in their own file.
    for name in {type(part).__module__ for part in model.modules()}:
        file = sys.modules.get(name)
        function = getattr(file, _EAGER, None)
        if callable(function) and not hasattr(function, "takes_trees"):
            setattr(file, _EAGER, _wrap_attention(function))


def _wrap_attention(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        tree = options.pop(KEYWORD, None)
        if tree is None:
            return function(module, query, key, value, *args, **options)
        if options.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
            raise UnsupportedAttentionError("its attention is not causal")
        arguments = {
            "scale": options.pop("scaling", None),
            "window": options.pop("sliding_window", None) or 0,
            "softcap": options.pop("softcap", None) or 0.0,
            "dropout": options.pop("dropout", None) or 0.0,
            "sinks": options.pop("s_aux", None),
        }
        for name, option in options.items():
            is_off = option is None or (isinstance(option, int | float) and not option)
            if name not in HARMLESS and not is_off:
                raise UnsupportedAttentionError(f"its attention takes {name}")
        mask = args[0] if args else options.get("attention_mask")
        # The placeholder of the tree has one element. More are a term for each key, such as Doge's.
        if mask is not None and not (isinstance(mask, Tensor) and mask.numel() == 1):
            raise UnsupportedAttentionError("its layers change the attention mask, which a tree does not have")
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            # By the number of a node in the tree, which is not its column.
            raise UnsupportedAttentionError("its layers scale queries by their position")
        return tree(query, key, value, **arguments), None

    attention.takes_trees = True  # type: ignore[attr-defined]
    return attention
