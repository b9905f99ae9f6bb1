"""The attention of a tree on a CPU, by calls that each see a part of a node's keys.

A call returns what its part contributes, and the logarithm of the sum of its weights. These sums join the parts. In the
backward pass each call is given the complete output and the complete sum: its weights are then those of the complete
softmax, so its gradients are exact. Nothing is kept from the forward pass but queries, keys, values, output and sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .blocks import Block, Layout, NodeIndex, for_each_head, take

# Given a block, returns how many heads are folded, and the mask: None if a node sees all nodes before it.
FoldAndMask = Callable[[Block], tuple[int, Tensor | None]]


def attend_merged(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, fold_and_mask: FoldAndMask) -> Tensor:
    """Return what the nodes of a tree read, `[L, H, D]`: see `TreeAttention.attend`."""
    size = max(q.size(2), v.size(2))  # torch's kernel takes keys and values of one size
    states = [x if x.size(2) == size else pad(x, (0, size - x.size(2))) for x in (q, k, v)]
    output: Tensor = _Merged.apply(*states, layout, scale, fold_and_mask)
    return output[..., : v.size(2)]


class _Call:
    """One call of torch's kernel, which computes a block."""

    def __init__(self, block: Block, q: Tensor, k: Tensor, v: Tensor, scale: float, fold_and_mask: FoldAndMask) -> None:
        self._block = block
        self._fold, mask = fold_and_mask(block)
        self._key_heads = k.size(1)
        query = block.queries(q, self._fold)
        keys = for_each_head(block.keys(k), query.size(1))
        values = for_each_head(block.keys(v), query.size(1))
        self._states = (query, keys, values)
        self._options = {"attn_mask": mask, "scale": scale}
        self._is_causal = mask is None and block.sees_row

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return output `[slots, H, D]` and logarithm of the sum of weights `[slots, H, 1]` of each slot."""
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *self._states, 0.0, self._is_causal, **self._options
        )
        by_slot = self._block.by_slot
        return by_slot(output, self._fold), by_slot(log_sum.unsqueeze(3), self._fold)

    def backward(self, gradient: Tensor, output: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the queries `[slots, H, D]`, and of keys and values `[count, K, key_count, D]`.

        The arguments are those of all nodes, `[L, H, D]` and `[L, H, 1]`.
        """
        block = self._block
        upstream = take(gradient, block.rows)
        if block.counted is not None:  # a node with several slots has its gradient in one
            upstream = upstream * block.counted
        of_query, *of_keys = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            block.folded(upstream, self._fold),
            *self._states,
            block.queries(output, self._fold),
            block.queries(log_sum, self._fold).squeeze(3),
            0.0,
            self._is_causal,
            **self._options,
        )
        keys, values = (x.unflatten(1, (self._key_heads, -1)).sum(2) for x in of_keys)
        return block.by_slot(of_query, self._fold), keys, values


class _Merged(torch.autograd.Function):
    """See `attend_merged`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, fold_and_mask: FoldAndMask
    ) -> Tensor:
        of_slots = [_Call(block, q, k, v, scale, fold_and_mask).forward() for block in layout.blocks]
        output = take(torch.cat([x for x, _ in of_slots]), layout.slot_of_node)
        log_sum = take(torch.cat([x for _, x in of_slots]), layout.slot_of_node)
        output = output.to(log_sum.dtype)  # float32 for 16 bits
        # Two parts of a softmax are joined by the share that each has of the weights.
        for span in layout.spans:
            more_output, more_sum = _Call(span, q, k, v, scale, fold_and_mask).forward()
            before = take(log_sum, span.rows)
            both = torch.logaddexp(before, more_sum)
            joined = take(output, span.rows).mul_((before - both).exp()).add_(more_output * (more_sum - both).exp())
            output[span.rows] = joined  # of a slice `joined` is a view, and this copies nothing
            log_sum[span.rows] = both
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, log_sum)
        ctx.options = (layout, scale, fold_and_mask)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        q, k, v, output, log_sum = ctx.saved_tensors
        layout, scale, fold_and_mask = ctx.options
        gradient = gradient.contiguous()
        queries: list[Tensor] = []
        keys: list[Tensor] = []
        of_trunks: list[tuple[NodeIndex, Tensor]] = []
        for block in layout.blocks:
            of_query, *of_keys = _Call(block, q, k, v, scale, fold_and_mask).backward(gradient, output, log_sum)
            queries.append(of_query)
            both = torch.stack(of_keys, 3)  # keys and values together, [count, K, key_count, 2, D]
            before = block.key_count - block.width
            keys.append(both[:, :, before:].transpose(1, 2).flatten(0, 1))
            if block.trunk is not None:
                of_trunks.append((block.trunk, both[:, :, :before].sum(0).transpose(0, 1)))
        of_slots = torch.cat(keys).to(log_sum.dtype)  # [slots, K, 2, D]
        of_q = take(torch.cat(queries).to(log_sum.dtype), layout.slot_of_node)
        of_k_v = take(of_slots, layout.slot_of_node)
        if len(layout.repeats):
            _add_to_nodes(of_k_v, layout.repeated, of_slots.index_select(0, layout.repeats))
        for span in layout.spans:
            of_query, *of_keys = _Call(span, q, k, v, scale, fold_and_mask).backward(gradient, output, log_sum)
            _add_to_nodes(of_q, span.rows, of_query)
            of_trunks.append((span.trunk, torch.stack(of_keys, 3).sum(0).transpose(0, 1)))
        for nodes, more in of_trunks:
            _add_to_nodes(of_k_v, nodes, more)
        of_k, of_v = of_k_v.to(q.dtype).unbind(2)
        return of_q.to(q.dtype), of_k, of_v, None, None, None


def _add_to_nodes(states: Tensor, nodes: NodeIndex, values: Tensor) -> None:
    """Add to what nodes have; a node that is given more than once receives the sum."""
    if isinstance(nodes, slice):
        states[nodes].add_(values)
    else:
        states.index_add_(0, nodes, values.to(states.dtype))
