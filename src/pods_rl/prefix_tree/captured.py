"""Rows whose tokens have fixed shapes and fixed addresses, so that a CUDA graph computes one with a single launch.

Between launches of single operations a GPU waits for the host. Here a token of all rows is one graph, captured with
the first token of its shape and replayed for the others. At every `EVERY`th token the host reads whether all rows have
ended. Rows of a prompt share its keys.

A graph holds addresses. It is kept for the next generation with its buffers and with the decoder, which writes its
copies of the weights again in place, unless these take much of the device's memory.

`decode` calls `complete_rows` on CUDA. Without a graph, as on a CPU, the same steps run as operations.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from .cache import NodeLayer, PromptSlots, on_device, read_with_prompts
from .draws import RowDraws, draw_tokens
from .nodes import EVERY, Nodes
from .plain_decoder import PlainDecoder, plain_decoder, plain_type, product_type

logger = logging.getLogger(__name__)

SCORES_ALONE = frozenset({  # processors that read no tokens
    "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper",
    "TypicalLogitsWarper",
})  # fmt: skip
_WIDTH_STEP = 64  # the prompts' columns are a multiple, so that prompts of other lengths find the same graph
_COLUMNS = 128  # columns of the completions at first; they double, and keys are copied then
_MOST_DIFFERING = 0.1  # tokens of a graph from those of the operations: rounding may move a draw to the next token
_KEPT_SHARE = 0.1  # of a device's memory, which buffers and copies of weights may take between generations


class Shape(NamedTuple):
    """What the addresses and the operations of a step depend on."""

    prompts: int
    most: int  # rows of each prompt
    width: int  # columns of the prompts
    columns: int  # of the completions
    draws: bool  # whether tokens are drawn
    processors: Hashable  # of the scores, with their settings


class Slots:
    """The buffers of a step, which is the memory of a decoder: see `fused_layers.Memory`.

    Slot `i` is a row of prompt `i // most`.

    Args:
        layers: of a cache that the model filled with the prompts, which have the forms of the states.
        length: the most tokens of a completion.
        pools: the memory of the graphs of a model: none, or one. What a graph leaves is in these buffers, so that
            graphs can share it.
    """

    def __init__(
        self,
        shape: Shape,
        decoder: PlainDecoder,
        processors: LogitsProcessorList,
        layers: list[NodeLayer],
        length: int,
        pools: list[Any],
    ) -> None:
        device = layers[0].keys.device
        slots = shape.prompts * shape.most
        self.shape = shape
        self._decoder = decoder
        self._processors = processors
        self._by_prompt = PromptSlots(np.arange(shape.prompts).repeat(shape.most), device)
        self._prompt_states: list[Tensor] = []  # of each layer, [2, prompts, K, width, D]: keys and values
        self._states: list[Tensor] = []  # [2, slots, K, columns, D]
        for layer in layers:
            _, heads, _, size = layer.keys.shape
            self._prompt_states.append(layer.keys.new_zeros(2, shape.prompts, heads, shape.width, size))
            self._states.append(layer.keys.new_zeros(2, slots, heads, shape.columns, size))
        self._hidden = torch.ones(slots, 1, 1, shape.width + shape.columns, dtype=torch.bool, device=device)
        self._positions = torch.zeros(slots, dtype=torch.int64, device=device)  # of the latest token
        self._latest = torch.zeros(1, dtype=torch.int64, device=device)  # the number of the latest token
        self._column = torch.zeros(1, dtype=torch.int64, device=device)  # of its keys, after the prompts'
        self.tokens = torch.zeros(length, slots, dtype=torch.int64, device=device)
        self._draws = torch.zeros(length, slots, device=device)
        self.below = torch.zeros(slots, 1, device=device)  # finite while all probabilities are: see `draw_tokens`
        self._pools = pools
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_checked = False  # whether a token of the graph was compared with that of the operations
        self._is_warm = False

    def begin(
        self, layers: list[NodeLayer], mask: Tensor | None, positions: Tensor, draws: Tensor | None, logits: Tensor
    ) -> None:
        """Read the prompts, and draw the first token of each row.

        Args:
            mask: `[prompts, columns]`, 0 at padding. If None, there is none.
            positions: `[prompts or 1]`, of the prompts' last tokens.
            draws: `[length, slots]`. If None, greedy.
            logits: `[prompts, V]`.
        """
        shape = self.shape
        width = layers[0].width
        for states, prompt_states, layer in zip(self._states, self._prompt_states, layers, strict=True):
            states.zero_()  # what no row sees must be finite
            prompt_states.zero_()
            prompt_states[0, :, :, -width:] = layer.keys
            prompt_states[1, :, :, -width:] = layer.values
        self._hidden.fill_(True)
        seen = torch.ones_like(self._hidden[: shape.prompts, 0, 0, :width]) if mask is None else mask[:, :width] != 0
        start = shape.width - width
        self._hidden[:, 0, 0, start : shape.width] = ~seen.repeat_interleave(shape.most, 0)
        self._positions.copy_(positions.expand(shape.prompts).repeat_interleave(shape.most))
        self._latest.zero_()
        self._column.fill_(shape.width)
        self.below.zero_()
        if draws is not None:
            self._draws[: len(draws)] = draws[: len(self._draws)]
        self._draw(logits.repeat_interleave(shape.most, 0))

    def take_over(self, before: Slots, count: int) -> None:
        """Continue the rows of slots with fewer columns, which have `count` tokens."""
        columns = min(before.shape.columns, count)
        seen_columns = self.shape.width + columns
        for states, states_before in zip(self._states, before._states, strict=True):
            states.zero_()
            states[:, :, :, :columns] = states_before[:, :, :, :columns]
        for states, states_before in zip(self._prompt_states, before._prompt_states, strict=True):
            states.copy_(states_before)
        self._hidden.fill_(True)
        self._hidden[..., :seen_columns] = before._hidden[..., :seen_columns]
        self._positions.copy_(before._positions)
        self._latest.copy_(before._latest)
        self._column.copy_(before._column)
        self.tokens[:count] = before.tokens[:count]
        self._draws[: len(before._draws)] = before._draws[: len(self._draws)]
        self.below.copy_(before.below)

    def step(self) -> None:
        """Compute the latest token of each row, and draw the next."""
        latest = self.tokens.index_select(0, self._latest).squeeze(0)
        self._hidden.index_fill_(3, self._column, False)
        # The position that follows the prompt's last is that of the first token.
        self._positions.add_(1)
        self.rotations = self._decoder.rotations_at(self._positions)
        logits = self._decoder(latest, self).float()
        self._latest.add_(1)
        self._column.add_(1)
        self._draw(logits)

    def _draw(self, logits: Tensor) -> None:
        scores = logits
        no_prefixes: Any = None
        for processor in self._processors:
            scores = processor(no_prefixes, scores)
        if self.shape.draws:
            tokens, below = draw_tokens(scores, self._draws.index_select(0, self._latest).squeeze(0))
            self.below.add_(below)
        else:
            tokens = scores.argmax(dim=-1)
        self.tokens.index_copy_(0, self._latest, tokens.unsqueeze(0))

    def attend(self, layer: int, heads: Tensor, group: int, softcap: float | None) -> Tensor:
        states = self._states[layer]
        latest = heads[:, :, group : group + 2].movedim(2, 0).unsqueeze(3)  # [2, slots, K, 1, D]
        states.index_copy_(3, self._latest, latest)  # the first token has the first column
        queries = heads[:, :, :group].flatten(0, 1)
        own = (states[0], states[1])
        of_prompts = (self._prompt_states[layer][0], self._prompt_states[layer][1])
        return read_with_prompts(queries, own, of_prompts, self._by_prompt, self._hidden, softcap)

    def states(self, layer: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("models with recurrent layers are not captured")

    def next_token(self) -> None:
        """Compute a token: by the graph, which is captured after the first."""
        if self._graph is not None:
            if self._is_checked:
                self._graph.replay()
            else:
                self._check(self._graph)
            return
        if self._is_warm or not _can_capture(self.tokens.device):
            self.step()
            return
        self._is_warm = True
        device = self.tokens.device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self.step()  # libraries prepare themselves at their first call, which a graph could not hold
        torch.cuda.current_stream(device).wait_stream(stream)
        try:
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as those of NCCL, may call CUDA meanwhile.
            pool = self._pools[0] if self._pools else None
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                self.step()
            self._graph = graph
            self._pools[:] = [graph.pool()]
        except RuntimeError as error:  # capturing computes nothing, so nothing is lost
            _log_failure(error)

    def _check(self, graph: torch.cuda.CUDAGraph) -> None:
        """Compute a token by the graph, and again by operations; leave the graph if their tokens differ."""
        changed = (self._positions, self._latest, self._column, self.below)
        before = [buffer.clone() for buffer in changed]
        graph.replay()
        of_graph = self.tokens.index_select(0, self._latest)
        for buffer, value in zip(changed, before, strict=True):
            buffer.copy_(value)
        self.step()
        differing = (self.tokens.index_select(0, self._latest) != of_graph).double().mean().item()
        self._is_checked = True
        if differing > _MOST_DIFFERING:
            self._graph = None
            _log_failure(RuntimeError(f"{differing:.0%} of its tokens were not those of the operations"))

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for states in (*self._states, *self._prompt_states, self.tokens, self._draws))


def _setting(attribute: tuple[str, Any]) -> str:
    """Return an attribute of a processor as text; torch abbreviates long tensors."""
    name, value = attribute
    return f"{name} = {value.tolist() if isinstance(value, Tensor) else value!r}"


def _can_capture(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def _memory_of(device: torch.device) -> float:
    """Return the bytes of a device's memory; a CPU's do not count."""
    return torch.cuda.get_device_properties(device).total_memory if _can_capture(device) else float("inf")


class Kept(NamedTuple):
    """The decoder and the slots of a model, kept from one generation to the next."""

    decoder: PlainDecoder
    length: int  # the most tokens of a prompt and its completion
    weights: Hashable  # what the addresses in `decoder` depend on
    slots: dict[Shape, Slots]  # each with its graph
    pools: list[Any]  # see `Slots`

    def nbytes(self) -> int:
        buffers = sum(slots.nbytes for slots in self.slots.values())
        return buffers + sum(copy.tensor.nbytes for copy in self.decoder.copies)


_kept: WeakKeyDictionary[PreTrainedModel, Kept] = WeakKeyDictionary()
_logged: set[str] = set()


def _log_failure(error: RuntimeError) -> None:
    reason = str(error).partition("\n")[0]
    if reason not in _logged:
        logger.warning("No CUDA graph was captured, so that a token is many launches: %s", reason)
    _logged.add(reason)


def decoder_to_keep(model: PreTrainedModel, length: int) -> PlainDecoder | None:
    """Return `plain_decoder`'s, if possible that of the generation before, with the weights as they are now."""
    weights = (product_type(model), *(weight.data_ptr() for weight in model.parameters()))
    kept = _kept.get(model)
    if kept is not None and kept.weights == weights and kept.length >= length and plain_type(model) is not None:
        with torch.no_grad():
            kept.decoder.refill()
        return kept.decoder
    _kept.pop(model, None)
    longest = length + _WIDTH_STEP  # the next prompts may be longer
    decoder = plain_decoder(model, longest)
    if decoder is not None:
        _kept[model] = Kept(decoder, longest, weights, {}, [])
    return decoder


def complete_rows(
    model: PreTrainedModel, nodes: Nodes, draws: RowDraws | None, processors: LogitsProcessorList, logits: Tensor
) -> None:
    """Complete rows in the table of `nodes`, whose decoder is of `decoder_to_keep`.

    Args:
        draws: of the rows. If None, greedy: then a prompt has one slot.
        logits: `[prompts, V]`, after the prompts.
    """
    kept = _kept[model]
    rows = _Rows(nodes, kept, draws, processors)
    rows.begin(draws, logits)
    while rows.advance():
        pass
    rows.finish()
    if draws is not None:
        draws.note(rows.slots.below)
    # On a device that buffers would fill, those that this generation did not need are dropped, or all.
    most = _KEPT_SHARE * _memory_of(rows.slots.tokens.device)
    if kept.nbytes() > most:
        for shape in kept.slots.keys() - rows.used:
            del kept.slots[shape]
    if kept.nbytes() > most:
        del _kept[model]


class _Rows:
    """The rows of a generation, and the slots that they are in."""

    def __init__(self, nodes: Nodes, kept: Kept, draws: RowDraws | None, processors: LogitsProcessorList) -> None:
        assert nodes.ends is not None
        self._nodes = nodes
        self._ends = nodes.ends
        self._kept = kept
        self._processors = processors
        self._layers: list[NodeLayer] = list(nodes.cache.layers)
        self._length = nodes.table.shape[1] - nodes.width
        prompt_of_row = nodes.node
        order = prompt_of_row.argsort(kind="stable")
        counts = np.bincount(prompt_of_row)
        most = int(counts.max()) if draws is not None else 1
        number = np.arange(len(order)) - (np.cumsum(counts) - counts)[prompt_of_row[order]]  # within its prompt
        self._rows: NDArray[np.int64] = order
        self._slot: NDArray[np.int64] = prompt_of_row[order] * most + (number if draws is not None else 0)
        self._has_ended = np.zeros(len(order), bool)
        self._count = 1  # tokens of each row
        settings = tuple((type(each).__name__, *map(_setting, vars(each).items())) for each in processors)
        width = -(-nodes.width // _WIDTH_STEP) * _WIDTH_STEP
        columns = min(_COLUMNS, max(1, self._length - 1))
        self.slots = self._slots_of(Shape(len(counts), most, width, columns, draws is not None, settings))
        self.used = {self.slots.shape}

    def _slots_of(self, shape: Shape) -> Slots:
        slots = self._kept.slots.get(shape)
        if slots is None or len(slots.tokens) < self._length:
            slots = Slots(shape, self._kept.decoder, self._processors, self._layers, self._length, self._kept.pools)
            self._kept.slots[shape] = slots
        return slots

    def begin(self, draws: RowDraws | None, logits: Tensor) -> None:
        """Draw the first token of each row."""
        nodes = self._nodes
        assert nodes.positions is not None
        row_of_slot = np.zeros(self.slots.tokens.shape[1], np.int64)  # slots without a row draw what is not read
        row_of_slot[self._slot] = self._rows
        table = None if draws is None else draws.table(self._tensor(row_of_slot))
        self.slots.begin(self._layers, nodes.mask, nodes.positions[:, 0], table, logits)

    def advance(self) -> bool:
        """Compute a token of each row; return whether any row can have another."""
        if self._count >= self._length:
            return False
        shape = self.slots.shape
        if self._count > shape.columns:
            before = self.slots
            self.slots = self._slots_of(shape._replace(columns=min(2 * shape.columns, self._length - 1)))
            self.slots.take_over(before, self._count)
            self.used.add(self.slots.shape)
        self.slots.next_token()
        self._count += 1
        if self._count % EVERY == 0 and len(self._ends) and self._count < self._length:
            latest = self.slots.tokens[self._count - EVERY : self._count]
            ended = torch.isin(latest, self._ends).any(0).cpu().numpy()
            self._has_ended |= ended[self._slot]
            return not self._has_ended.all()
        return True

    def finish(self) -> None:
        """Write all rows to the table."""
        tokens = self.slots.tokens[: self._count].index_select(1, self._tensor(self._slot)).T
        end = self._nodes.width + self._count
        self._nodes.table[:, self._nodes.width : end].index_copy_(0, self._tensor(self._rows), tokens)
        self._nodes.columns = end

    def _tensor(self, numbers: NDArray[np.int64]) -> Tensor:
        return on_device(numbers, self._nodes.table.device)
