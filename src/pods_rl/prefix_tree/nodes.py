"""The distinct prefixes of the rows that are being generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from .cache import CannotServeError, NodeLayer, check_filled, move_nodes, on_device
from .images import ENCODED, Images, images_of
from .plain_decoder import CacheMemory, PlainDecoder, cast_cache

if TYPE_CHECKING:
    from transformers import StoppingCriteriaList

_TOKENS = 2**32  # more than any vocabulary has
EVERY = 8  # tokens after which a host that waits for its device reads which rows ended
_PREPARE = GenerationMixin.prepare_inputs_for_generation
TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")  # arguments with the kind of each token
PER_TOKEN = ("attention_mask", *TYPES)  # arguments of the form [rows, columns]
# Layers of a cache that a decoder without modules continues.
_READ_BY_DECODER = {"DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer"}
# Families whose preparation only handles frequencies that change with the length, which generation over trees refuses.
_PREPARES_NOTHING = {"phi3"}
# Arguments for the cache: from transformers 5.24 on, of Mamba before, and of the others before.
CACHES = ("cache", "cache_params", "past_key_values")


def cache_argument(inputs: dict[str, Any]) -> str:
    """Return the name of the model's argument for its cache."""
    return next((name for name in CACHES if name in inputs), "past_key_values")


class Nodes:
    """The distinct prefixes of the rows that are still generated: their tokens, masks, positions and cache.

    If the host reads every token, rows that drew different tokens part at once, and rows that ended are dropped. Where
    a read waits for the device it does not: rows part at their first token, and the host drops those that ended at
    every `EVERY`th. What they draw until then is replaced by padding.

    Args:
        input_ids: prompts `[rows, W]`, padded on the left.
        config: complete, as `generate` prepares it.
        inputs: the model's other arguments, as `generate` prepares them.
        ends: the tokens that end a row, if these are all that `criteria` read but the length.
        draws: whether rows of a node can draw different tokens.
        reads_every_token: whether the host does. It must if there are no `ends`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        config: GenerationConfig,
        inputs: dict[str, Any],
        criteria: StoppingCriteriaList,
        ends: Tensor | None,
        *,
        draws: bool,
        reads_every_token: bool,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._cache_name = cache_argument(inputs)
        self.cache = inputs[self._cache_name]
        self._criteria = criteria
        self.ends = ends
        self._draws = draws
        self._reads_every_token = reads_every_token
        count, self.columns = input_ids.shape  # tokens of each prefix, with the padding
        self.width = self.columns  # of the prompts
        assert config.max_length is not None
        # The token that fills a row after its end, as `generate` chooses it.
        if config.pad_token_id is not None:
            self._pad = int(config.pad_token_id)
        else:
            end = config.eos_token_id
            self._pad = (end[0] if isinstance(end, list) else end) or 0
        self.table = input_ids.new_full((count, config.max_length), self._pad)  # [rows, W + T]
        self.table[:, : self.columns] = input_ids
        self._images = images_of(model.config, input_ids, inputs.get(ENCODED))
        self._prompts = HostPrompts.read(input_ids, inputs)
        first_rows, prompt_of_row = self._prompts.distinct(self._images)
        self._first_rows = first_rows  # one row of each prompt
        self._prompt_of = np.arange(len(first_rows))  # of each node
        self._rows: NDArray[np.int64]  # the number of each row that has not ended
        self.node: NDArray[np.int64]  # of each of these rows
        self.rows: Tensor  # the same as `_rows`, on the device
        self.of_rows: Tensor | None  # the same as `node`. If None, each row has a node of its own, in the same order
        self._row_of_node: Tensor  # one row of each node
        self._assign_rows(np.arange(count), prompt_of_row)
        overridden = getattr(model.prepare_inputs_for_generation, "__func__", None) is not _PREPARE
        # Otherwise what the model would prepare is known, and need not be computed for each token.
        self._prepares = overridden or model.is_remote_code()

    @property
    def prefixes(self) -> Tensor:
        """Prompt and tokens so far of each node."""
        return self.table.index_select(0, self._row_of_node)[:, : self.columns]

    def prefill(
        self, processors: LogitsProcessorList, decoder_of: Callable[[PreTrainedModel, int], PlainDecoder | None]
    ) -> Tensor:
        """Compute each distinct prompt; return the logits `[nodes, V]` that draw the first tokens."""
        inputs = dict(self._inputs)
        first_rows = self._tensor(self._first_rows)
        ids = self.table.index_select(0, first_rows)[:, : self.columns]
        for name in PER_TOKEN:
            if inputs.get(name) is not None:
                inputs[name] = inputs[name].index_select(0, first_rows)
        if self._images is not None:
            inputs[ENCODED] = {"image": self._images.of_rows(self._first_rows.tolist())}
        positions = inputs.get("position_ids")
        if positions is not None:
            # [rows, W], or [axes, rows, W] where images have rows and columns.
            positions = positions.expand(*positions.shape[:-2], len(self.table), -1)
            inputs["position_ids"] = positions.index_select(-2, first_rows)
        prepared = self._prepare(ids, self.columns, is_first_iteration=True, **inputs)
        self._keep(inputs)
        logits = self._model(**prepared, return_dict=True).logits[:, -1].float()
        check_filled(self.cache, self.columns)
        _select_rows(processors, first_rows)
        self.decoder = self._choose_decoder(decoder_of)
        return logits

    def _choose_decoder(self, decoder_of: Callable[[PreTrainedModel, int], PlainDecoder | None]) -> PlainDecoder | None:
        """Return what computes single tokens with fewer operations than the model; None if the model must do it."""
        kinds = {type(layer).__name__ for layer in self.cache.layers}
        prepares = self._prepares and self._model.config.model_type not in _PREPARES_NOTHING
        needs_model = prepares or bool(self._types) or not kinds <= _READ_BY_DECODER
        if self.positions is None or self.positions.ndim != 2 or needs_model:
            return None
        decoder = decoder_of(self._model, self.table.shape[1])
        if decoder is not None:
            cast_cache(self.cache, decoder.dtype)
            for i, layer in enumerate(self.cache.layers):
                if type(layer) is DynamicLayer:
                    self.cache.layers[i] = NodeLayer(layer, *self.table.shape)
        return decoder

    def _keep(self, inputs: dict[str, Any]) -> None:
        """Keep what the next tokens need of the prompts' inputs."""
        mask = inputs.get("attention_mask")
        if mask is not None and self._prompts.mask.all() and not self._prepares:
            # Without padding a mask would only cost an operation for each token.
            mask = None
        self._inputs.pop("attention_mask", None)
        # [nodes, W + T]: every token that follows is seen.
        self.mask = None if mask is None else pad(mask, (0, self.table.size(1) - mask.size(1)), value=1)
        self._types = {name: inputs[name][:, -1:] for name in TYPES if inputs.get(name) is not None}
        if "mm_token_type_ids" in self._types:
            # As `generate` does: what the model writes is text.
            self._types["mm_token_type_ids"] = torch.zeros_like(self._types["mm_token_type_ids"])
        positions = inputs.get("position_ids")
        self.positions = None
        if positions is not None:
            positions = positions[..., -1:]
            self.positions = positions[..., :1, :] if self._prompts.end_at_one_position else positions
        self._inputs.pop(ENCODED, None)  # the prompts' images have been read
        self._images = None

    @property
    def have_fixed_shapes(self) -> bool:
        """Whether prompts are in layers whose keys and values `captured` can hold."""
        return self.decoder is not None and all(isinstance(layer, NodeLayer) for layer in self.cache.layers)

    def next_logits(self) -> Tensor:
        """Return the logits `[nodes, V]` after the latest tokens."""
        inputs = dict(self._inputs)
        if self.mask is not None:
            inputs["attention_mask"] = self.mask[:, : self.columns]
        if self.positions is not None:
            self.positions = self.positions + 1
            inputs["position_ids"] = self.positions
        latest = self.table[:, self.columns - 1].index_select(0, self._row_of_node)
        if self.decoder is not None:
            memory = CacheMemory(self.decoder, inputs["position_ids"][:, 0], inputs.get("attention_mask"), self.cache)
            return self.decoder(latest, memory).float()
        inputs |= self._types
        if self._prepares:
            inputs = self._prepare(self.prefixes, 1, next_sequence_length=1, **inputs)
        else:
            inputs["input_ids"] = latest.unsqueeze(1)
        logits: Tensor = self._model(**inputs, return_dict=True).logits[:, -1].float()
        return logits

    def extend(self, tokens: Tensor, processors: LogitsProcessorList) -> bool:
        """Add a token to each row, or to each node if none is drawn; return whether any row has not ended."""
        row_tokens = tokens if self._draws or self.of_rows is None else tokens.index_select(0, self.of_rows)
        self.table[:, self.columns].index_copy_(0, self.rows, row_tokens)
        self.columns += 1
        if self.columns == self.table.size(1):
            return False
        nodes_before = len(self._row_of_node)
        if self._reads_every_token:
            parents, ended = self._fork(tokens.cpu().numpy())
        else:
            parents, ended = self._part()
        if ended.all():
            return False
        if len(parents) == nodes_before and not ended.any():
            return True
        # The children that have not ended become the nodes.
        unfinished = np.flatnonzero(~ended)
        row_continues = ~ended[self.node]
        children = unfinished[order_of_children(parents[unfinished])]  # by their new number
        number_of_child = np.zeros_like(parents)
        number_of_child[children] = np.arange(len(children))
        self._assign_rows(self._rows[row_continues], number_of_child[self.node[row_continues]])
        origin = self._tensor(parents[children])
        if self.mask is not None:
            self.mask = self.mask.index_select(0, origin)
        if self.positions is not None and self.positions.size(-2) > 1:
            self.positions = self.positions.index_select(-2, origin)
        self._types = {name: types.index_select(0, origin) for name, types in self._types.items()}
        self._prompt_of = move_nodes(self.cache, parents[children], self._prompt_of, origin.device)
        _select_rows(processors, origin)
        return True

    def _fork(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Split nodes whose rows drew different tokens; return each node's parent, ascending, and whether it ended."""
        parents = np.arange(len(self._row_of_node))
        if self._draws and self.of_rows is not None:
            node_tokens = np.empty_like(parents)
            node_tokens[self.node] = tokens
            if (node_tokens[self.node] != tokens).any():
                pairs, node = np.unique(self.node * _TOKENS + tokens, return_inverse=True)
                self.node = node
                parents, node_tokens = np.divmod(pairs, _TOKENS)
            tokens = node_tokens
        if self.ends is not None:
            return parents, np.isin(tokens, self.ends.cpu().numpy())
        row_of_node = np.empty_like(parents)
        row_of_node[self.node] = self._rows
        prefixes = self.table.index_select(0, self._tensor(row_of_node))[:, : self.columns]
        return parents, self._criteria(prefixes, None).cpu().numpy()

    def _part(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """As `_fork`, but each row that draws gets a node of its own, and ends are read at every `EVERY`th token."""
        parents = np.arange(len(self._row_of_node))
        if self._draws and self.of_rows is not None:
            order = self.node.argsort(kind="stable")
            parents = self.node[order]
            self.node = order.argsort()
        ended = np.zeros(len(parents), bool)
        assert self.ends is not None
        if len(self.ends) and (self.columns - self.width) % EVERY == 0:
            latest = self.table[:, self.columns - EVERY : self.columns].index_select(0, self.rows)
            ended[self.node] = torch.isin(latest, self.ends).any(1).cpu().numpy()
        return parents, ended

    def output(self) -> Tensor:
        """Return prompts and completions of all rows."""
        if self._reads_every_token:
            return self.table[:, : self.columns]
        assert self.ends is not None
        longest = end_rows(self.table[:, self.width : self.columns], self.ends, self._pad)
        return self.table[:, : self.width + longest]

    def _prepare(self, ids: Tensor, columns: int, **inputs: Any) -> dict[str, Any]:
        """Return the model's own preparation of its inputs, which must be the latest `columns` and the cache."""
        prepared: dict[str, Any] = self._model.prepare_inputs_for_generation(ids, **inputs)
        latest = prepared.get("input_ids")
        has_cache = prepared.get(self._cache_name) is self.cache
        if not has_cache or latest is None or latest.shape[1] != columns:
            raise CannotServeError("the model computes other tokens than the latest")
        return prepared

    def _assign_rows(self, rows: NDArray[np.int64], node: NDArray[np.int64]) -> None:
        """Let row `rows[i]` be at `node[i]`; once each has a node of its own they are in the order of the nodes."""
        nodes = int(node.max()) + 1
        apart = len(rows) == nodes
        if apart:
            rows = rows[node.argsort()]
            node = np.arange(nodes)
        self._rows = rows
        self.node = node
        self.rows = self._tensor(rows)
        self.of_rows = None if apart else self._tensor(node)
        row_of_node = np.empty(nodes, np.int64)
        row_of_node[node] = rows
        self._row_of_node = self.rows if apart else self._tensor(row_of_node)

    def _tensor(self, numbers: NDArray[np.int64]) -> Tensor:
        return on_device(numbers, self.table.device)


class HostPrompts(NamedTuple):
    """The prompts of all rows, where the host can compare them; read from a device at once."""

    ids: NDArray[np.int64]  # [rows, W]
    mask: NDArray[np.int64]  # [rows, W], 0 at padding
    end_at_one_position: bool  # whether the last token of every prompt has the same position

    @classmethod
    def read(cls, input_ids: Tensor, inputs: dict[str, Any]) -> HostPrompts:
        rows, width = input_ids.shape
        mask = inputs.get("attention_mask")
        positions = inputs.get("position_ids")
        parts = [input_ids, torch.ones_like(input_ids) if mask is None else mask.to(input_ids)]
        if positions is not None:
            last = positions[..., -1]  # [rows or 1], or [axes, rows or 1]
            parts.append(last.expand(*last.shape[:-1], rows).reshape(-1, rows).T.to(input_ids))
        ids, mask, last = np.split(torch.cat(parts, dim=1).cpu().numpy(), [width, 2 * width], axis=1)
        return cls(ids, mask, bool((last == last[:1]).all()))

    def distinct(self, images: Images | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first row of each distinct prompt, and the number of each row's prompt."""
        rows = [row.tobytes() for row in np.concatenate([self.ids, self.mask], axis=1)]
        _, first_rows, prompt_of_row = np.unique(rows, return_index=True, return_inverse=True)
        prompt_of_row = prompt_of_row.reshape(-1)
        if images is None:
            return first_rows, prompt_of_row
        # Rows with the same tokens may have other images.
        firsts_of_text: dict[int, list[int]] = {}
        first_of_row = np.empty_like(prompt_of_row)
        for row, text in enumerate(prompt_of_row.tolist()):
            firsts = firsts_of_text.setdefault(text, [])
            for first in reversed(firsts):  # rows of a prompt follow each other: it is mostly the latest
                if images.are_equal(first, row):
                    first_of_row[row] = first
                    break
            else:
                firsts.append(row)
                first_of_row[row] = row
        return np.unique(first_of_row, return_inverse=True)


def known_ends(criteria: StoppingCriteriaList, config: GenerationConfig, device: torch.device) -> Tensor | None:
    """Return the tokens that end a row; None if rows also end for other reasons than these and their length."""
    ends = [torch.empty(0, dtype=torch.int64, device=device)]
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            ends.append(criterion.eos_token_id.to(device))
        elif type(criterion) is not MaxLengthCriteria or criterion.max_length != config.max_length:
            return None
    return torch.cat(ends)


def end_rows(completions: Tensor, ends: Tensor, pad: int) -> int:
    """Replace what follows the first end of each row `[rows, T]` by padding; return the most tokens of a row."""
    is_end = torch.isin(completions, ends).int()
    has_ended = is_end.cumsum(1) > is_end
    completions.masked_fill_(has_ended, pad)
    return int((~has_ended).sum(1).max())


def order_of_children(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the children in the order of their new numbers: the first child of a node keeps its number if it can.

    >>> order_of_children(np.array([0, 0, 2, 4])).tolist()  # two take free numbers
    [0, 1, 2, 3]
    >>> order_of_children(np.array([1, 1, 2])).tolist()
    [1, 0, 2]
    """
    count = len(parents)
    is_first_child = np.diff(parents, prepend=-1) > 0
    stays = is_first_child & (parents < count)
    child_of_number = np.full(count, -1)
    child_of_number[parents[stays]] = np.flatnonzero(stays)
    child_of_number[child_of_number < 0] = np.flatnonzero(~stays)
    return child_of_number


def _select_rows(processors: LogitsProcessorList, rows: Tensor) -> None:
    """Select rows of what processors hold for each row; of those served only the repetition penalty does."""
    for processor in processors:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):
            processor.prompt_ignore_length = ignored[rows]
