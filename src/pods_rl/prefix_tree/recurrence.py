"""Recurrent layers over a prefix tree: each node continues from the state of the node before it in its rows.

Gated DeltaNet, Kimi's delta attention and short convolutions. Projections, norms and gates work on each node by
itself. Only the functions of transformers that mix neighbouring tokens need the tree, and they receive it as a keyword
of the model: a convolution reads the last nodes of a path, and a recurrence runs in waves. Rows of a prompt share
the state after their common part, and a later wave starts from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from .attention import KEYWORD as ATTENTION_KEYWORD
from .attention import move_together
from .blocks import take_shared
from .tree import Branch, by_prompt, common_nodes

RECURRENCE_KEYWORD = "prefix_tree_recurrence"  # the argument of a model that its layers pass on to the functions below
LAYER_TYPES = {"linear_attention", "conv"}  # names that configurations give to recurrent layers

Scan = Callable[[list[Tensor], Tensor | None, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Wave:
    """Sequences of nodes that one call of a recurrence computes."""

    nodes: Tensor  # [count * width], the node of each slot; the number of nodes of the tree is padding at an end
    count: int  # of sequences
    width: int  # of each
    parents: Tensor | None  # [count], as in `Sequence`. If None, all begin in the empty state
    has_children: bool  # whether a later call begins in one of its states


class TreeRecurrence:
    """The recurrences and convolutions of one tree.

    Args:
        call_tokens: as in `scan`. If None, each layer decides.

    Attributes:
        layers: how many convolutions were computed, one for each recurrent layer.
    """

    def __init__(self, branches: list[Branch], device: torch.device, call_tokens: int | None = None) -> None:
        self._branches = branches
        self._device = device
        self._nodes = sum(branch.new for branch in branches)
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}
        self._plans: dict[int, tuple[list[Wave], Tensor]] = {}
        self._call_tokens = call_tokens
        self.layers = 0

    def convolve(self, convolution: Callable[[Tensor], Tensor], states: Tensor, width: int) -> Tensor:
        """Return a causal convolution of states `[1, D, L]` along the paths of the tree.

        Args:
            convolution: of one sequence, `[1, D, x]` to `[1, D, x]`.
            width: how many nodes back it reads, the node itself included.
        """
        self.layers += 1
        if width not in self._windows:
            # Each branch's new nodes after the `width` - 1 before them, end to end, and where the new nodes are.
            sequences: list[NDArray[np.int64]] = []
            kept_numbers: list[NDArray[np.int64]] = []
            count = 0
            for branch in self._branches:
                history = branch.path[: -branch.new][-(width - 1) :] if width > 1 else branch.path[:0]
                # Before the root there is padding, which has the number after the last node.
                missing = np.full(width - 1 - len(history), self._nodes)
                sequences += [missing, history, branch.path[-branch.new :]]
                kept_numbers.append(np.arange(count + width - 1, count + width - 1 + branch.new))
                count += width - 1 + branch.new
            all_nodes, new_nodes = move_together(
                [np.concatenate(sequences), np.concatenate(kept_numbers)], self._device
            )
            self._windows[width] = (all_nodes, new_nodes)
        nodes, kept = self._windows[width]
        rows = take_shared(_with_padding(states[0].transpose(0, 1)), nodes)  # [x, D]
        outputs = convolution(rows.transpose(0, 1).unsqueeze(0))
        return outputs[0].transpose(0, 1).index_select(0, kept).transpose(0, 1).unsqueeze(0)

    def scan(self, scan: Scan, inputs: list[Tensor], call_tokens: int) -> Tensor:
        """Return the outputs `[1, L, ...]` of a recurrence.

        Args:
            scan: takes a batch of the inputs, `[N, T, ...]` each, which are 0 after the end of a sequence, the states
                in which the sequences begin, `[N, ...]` or None, and whether to return the states in which they end.
            inputs: `[1, L, ...]` each. An input of 0 must leave the state as it is.
            call_tokens: the tokens that take as long as one more call does.
        """
        if self._call_tokens is not None:
            call_tokens = self._call_tokens
        if call_tokens not in self._plans:
            self._plans[call_tokens] = self._plan(call_tokens)
        waves, slot_of_node = self._plans[call_tokens]
        padded = [_with_padding(x[0]) for x in inputs]
        outputs: list[Tensor] = []
        states: list[Tensor] = []
        for wave in waves:
            batch = [take_shared(x, wave.nodes).unflatten(0, (wave.count, wave.width)) for x in padded]
            initial = None
            if wave.parents is not None:
                empty = torch.zeros_like(states[0][:1])
                initial = torch.cat([empty, *states]).index_select(0, wave.parents)
            output, final = scan(batch, initial, wave.has_children)
            outputs.append(output.flatten(0, 1))
            if final is not None:
                states.append(final)
        return torch.cat(outputs).index_select(0, slot_of_node).unsqueeze(0)

    def _plan(self, call_tokens: int) -> tuple[list[Wave], Tensor]:
        """Return the calls of a recurrence, in order, and the slot of each node among those of all calls, `[L]`."""
        waves: list[Wave] = []
        slot_of_node = np.full(self._nodes, -1)
        arrays: list[NDArray[np.int64]] = [slot_of_node]
        first_slot = 0
        calls = plan_sequences(self._branches, call_tokens)
        for sequences in calls:
            width = max(len(sequence.nodes) for sequence in sequences)
            padded = np.full((len(sequences), width), self._nodes)
            for number, sequence in enumerate(sequences):
                padded[number, : len(sequence.nodes)] = sequence.nodes
                is_first = slot_of_node[sequence.nodes] < 0  # nodes that several sequences compute have equal outputs
                slots = first_slot + number * width + np.arange(len(sequence.nodes))
                slot_of_node[sequence.nodes[is_first]] = slots[is_first]
            first_slot += padded.size
            arrays += [padded.ravel(), np.array([sequence.parent for sequence in sequences])]
        slots_tensor, *tensors = move_together(arrays, self._device)
        last = max(max(sequence.parent for sequence in sequences) for sequences in calls)
        done = 0
        for number, sequences in enumerate(calls):
            nodes = tensors[2 * number]
            parents = tensors[2 * number + 1]
            begins_empty = all(sequence.parent == 0 for sequence in sequences)
            has_children = done < last
            done += len(sequences)
            count = len(sequences)
            waves.append(Wave(nodes, count, len(nodes) // count, None if begins_empty else parents, has_children))
        return waves, slots_tensor


def _with_padding(states: Tensor) -> Tensor:
    """Return `[L, ...]` with 0 after the last node."""
    return pad(states, (0, 0) * (states.ndim - 1) + (0, 1))


# -- which parts of rows are computed together ---------------------------------------------------------------------


@dataclass(frozen=True)
class Sequence:
    """Nodes of a path that follow each other, computed by one call."""

    nodes: NDArray[np.int64]
    parent: int  # the sequence in whose last state it begins, counted from 1 over all calls; 0 for the empty state


def plan_sequences(branches: list[Branch], call_tokens: int) -> list[list[Sequence]]:
    """Return the sequences of each call: what all rows of a prompt have in common, then the rest of each row.

    The common parts are calls of their own only if that spares the rows `call_tokens` in all.

    >>> branches = [Branch(np.arange(6), 6, False), Branch(np.array([0, 1, 2, 3, 6]), 1, True)]
    >>> [[sequence.nodes.tolist() for sequence in call] for call in plan_sequences(branches, call_tokens=3)]
    [[[0, 1, 2, 3]], [[4, 5], [6]]]
    >>> [[sequence.nodes.tolist() for sequence in call] for call in plan_sequences(branches, call_tokens=5)]
    [[[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6]]]
    """
    prompts = sorted(by_prompt(branches), key=common_nodes, reverse=True)
    saved = sum(common_nodes(rows) * (len(rows) - 1) for rows in prompts)
    common: list[Sequence] = []
    rests: list[Sequence] = []
    for rows in prompts:
        depth = common_nodes(rows) if len(rows) > 1 and saved >= call_tokens else 0
        state = 0
        if depth > 0:
            common.append(Sequence(rows[0].path[:depth], 0))
            state = len(common)
        # a row without a rest is the beginning of others
        rests += [Sequence(row.path[depth:], state) for row in rows if len(row.path) > depth]
    rests.sort(key=lambda sequence: len(sequence.nodes), reverse=True)
    calls = _split_by_length(common, call_tokens) if common else []
    return calls + _split_by_length(rests, call_tokens)


def _split_by_length(sequences: list[Sequence], call_tokens: int) -> list[list[Sequence]]:
    """Return the sequences of each call, longest first, split where this saves padding that is worth a call."""
    lengths = np.array([len(sequence.nodes) for sequence in sequences])
    # All sequences of a call are padded to the first, so a split spares those after it the difference.
    saved = (lengths[0] - lengths) * np.arange(len(lengths), 0, -1)  # by a split before each sequence
    split = int(saved.argmax())
    if saved[split] < call_tokens:
        return [sequences]
    longer = _split_by_length(sequences[:split], call_tokens)
    return longer + _split_by_length(sequences[split:], call_tokens)


# -- transformers' functions ---------------------------------------------------------------------------------------


def _convolve(
    tree: TreeRecurrence, function: Any, hidden_states: Tensor, weight: Tensor, *args: Any, **options: Any
) -> Tensor:
    """Stand in for `causal_conv1d_fn`."""
    return tree.convolve(lambda rows: function(rows, weight, *args, **options), hidden_states, weight.size(-1))


def _scan_delta_rule(
    tree: TreeRecurrence,
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """Stand in for the gated delta rule, in which padding with `g` and `beta` of 0 leaves the state as it is."""
    # The states are those of the tree, and its sequences are rows of a batch and not parts of one.
    options.pop("initial_state", None)
    options.pop("output_final_state", None)
    options.pop("cu_seqlens", None)
    work = value.size(2) * (key.size(3) + _CHUNK) * (key.size(3) + value.size(3))

    def scan(batch: list[Tensor], initial: Tensor | None, has_children: bool) -> Any:
        q, k, v, decay, rate = batch
        if q.device.type == "cpu":  # chunks of equal length need no padding; a kernel has its own
            chunks = -(-q.size(1) // _CHUNK)
            options["chunk_size"] = -(-q.size(1) // chunks)
        return function(q, k, v, g=decay, beta=rate, initial_state=initial, output_final_state=has_children, **options)

    outputs = tree.scan(scan, [query, key, value, g, beta], call_tokens(query, work))
    return outputs, None


# How a tree is computed, by the names that functions have in the files of transformers' models.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _scan_delta_rule,
    "chunk_kimi_delta_attention": _scan_delta_rule,
}

OTHERS = ("mamba_selective_scan", "mamba2_chunk_scan")  # scans that are not computed over trees

_CHUNK = 64  # tokens that torch's functions compute at once


def call_tokens(states: Tensor, work: int) -> int:
    """Return how many tokens of `work` products take as long as one more call, as a power of 2."""
    if states.device.type != "cpu":
        return 65536  # a call of a kernel takes milliseconds of its caller, and a token a fraction of a microsecond
    # A call takes as long as about six million products. Powers of 2, so that few plans are made.
    return max(16, 1 << (6_000_000 // work).bit_length())


def recurrence_modules(model: nn.Module) -> set[ModuleType]:
    """Return the modules of Python that define a part of a model and have a function that computes trees."""
    names = {type(part).__module__ for part in model.modules()}
    modules = [sys.modules[name] for name in names if name in sys.modules]
    return {
        module
        for module in modules
        if any(hasattr(module, name) for name in FUNCTIONS) and not any(hasattr(module, name) for name in OTHERS)
    }


def register_tree_recurrence(model: nn.Module) -> None:
    """Wrap the functions of a model's recurrent layers once, so that each takes a tree.

    The wrappers stay until `unregister_tree_recurrence`: gradient checkpointing calls them again in the backward pass.
    """
    for module in recurrence_modules(model):
        for name, compute in FUNCTIONS.items():
            function = getattr(module, name, None)
            if function is not None and (module, name) not in _wrapped:
                wrapper = _wrap_recurrence(function, compute)
                _wrapped[module, name] = (function, wrapper)
                setattr(module, name, wrapper)


def unregister_tree_recurrence() -> None:
    """Put transformers' own functions back. Call this when no backward pass over a tree follows."""
    for (module, name), (function, wrapper) in _wrapped.items():
        if getattr(module, name) is wrapper:  # else another library has wrapped it since
            setattr(module, name, function)
    _wrapped.clear()


_wrapped: dict[tuple[ModuleType, str], tuple[Any, Any]] = {}  # transformers' functions and ours, by module and name


def _wrap_recurrence(function: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def recurrence(*args: Any, **options: Any) -> Any:
        tree = options.pop(RECURRENCE_KEYWORD, None)
        if tree is None:
            return function(*args, **options)
        options.pop(ATTENTION_KEYWORD, None)
        return compute(tree, function, *args, **options)

    return recurrence
