"""Generation over the tree of prefixes: the model computes each distinct prefix of a prompt's rollouts once.

What all prompts begin with, such as a system prompt, is computed once for all of them. The rows of `generate` with the
same prompt begin as one node of the tree. Each row draws its next token with numbers of its own from its node's
probabilities; where the tokens differ the node forks. A row leaves its node when it ends.

transformers' `generate` prepares everything: settings, logits processors, stopping criteria, masks, positions and the
cache. It then calls `decode` instead of its own loop (its argument `custom_generate`).

Rounding. A row's logits depend a little on how many rows a matrix product has: in float32 they differ by about 1e-6
between batch sizes, in bfloat16 by about 1e-2. A draw that falls this close to the border of two tokens, or two tokens
that are this close to equal in greedy decoding, can then go either way, and the rest of that row differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
)
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerationMode

from .cache import CannotServeError, NodeLayer, arrange, check_attended, decoding, rope_types

if TYPE_CHECKING:
    from transformers import StoppingCriteriaList

logger = logging.getLogger(__name__)

_TOKENS = 2**32  # more than any vocabulary has
_COMMON = 16  # tokens that all prompts of a batch begin with, from which a pass over them alone is quicker
_PREPARE = GenerationMixin.prepare_inputs_for_generation
_said: set[str] = set()  # reasons that were logged
# Processors that treat each row by itself; others keep the state of a whole batch, from which no row can be dropped.
_ROW_BY_ROW = frozenset({
    "EpsilonLogitsWarper", "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper",
    "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper",
})  # fmt: skip


def complete(
    generate: Callable[..., Any],
    inputs: Mapping[str, Any],
    draws: RowDraws | None = None,
) -> Tensor:
    """Return `generate`'s result for `inputs`, each distinct prefix computed once if this model and setting allow.

    If not, the reason is logged once and `generate` runs its own loop.

    Args:
        generate: of a model.
        inputs: its arguments: `input_ids` [rows, W] padded on the left, `attention_mask`, `generation_config`, ...
        draws: of the rows; None: greedy, whatever `do_sample` says.

    Returns:
        Prompts and completions `[rows, W + T]`, padded on the right from each row's end.
    """
    try:
        return generate(**inputs, custom_generate=partial(decode, draws))
    except CannotServeError as reason:
        if str(reason) not in _said and not (dist.is_initialized() and dist.get_rank()):
            logger.warning("Prefixes are computed once for each rollout, and not once for all of them: %s.", reason)
        _said.add(str(reason))
    return generate(**inputs)


def complete_prompts(
    model: PreTrainedModel,
    prompts_ids: Sequence[Sequence[int]],
    draws: RowDraws | None,
    *,
    length: int,
    ends: Sequence[int],
    pad: int,
    temperature: float = 1.0,
) -> Tensor:
    """Return completions `[rows, T]` of a batch of prompts, each with its own draws, padded on the right.

    The model's own sampling defaults and penalties are not used.

    Args:
        prompts_ids: tokens of each row's prompt.
        draws: of the rows; None: greedy.
        length: most tokens of a completion.
        ends: tokens that end a completion.
        pad: the token after a row's end.
        temperature: of the draws.
    """
    width, device = max(map(len, prompts_ids)), model.device
    padded = torch.tensor([[pad] * (width - len(ids)) + list(ids) for ids in prompts_ids], device=device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts_ids], device=device)
    # greedy for `generate`, since draws leave one token
    config = GenerationConfig(
        do_sample=False, temperature=1.0, top_k=50, top_p=1.0, num_beams=1, repetition_penalty=1.0,
        no_repeat_ngram_size=0, max_new_tokens=length, pad_token_id=pad, eos_token_id=sorted(ends) or None,
    )  # fmt: skip
    inputs: dict[str, Any] = {
        "input_ids": padded,
        "attention_mask": mask,
        "generation_config": config,
        "synced_gpus": False,  # whole weights are here, and processes may have different numbers of batches
    }
    if draws is not None:  # which `generate` reads only if it runs its own loop
        inputs["logits_processor"] = LogitsProcessorList([TemperatureLogitsWarper(float(temperature)), draws])
    return complete(model.generate, inputs, draws)[:, width:]


def decode(
    draws: RowDraws | None,
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **inputs: Any,
) -> Tensor:
    """Return prompts and completions, as `generate` does, which calls this with all that it prepared.

    Args:
        draws: one row for each row of `generate`'s input; None: greedy.

    Raises:
        CannotServeError: see `refusal`.
        RuntimeError: strict draws, and probabilities that are not finite.
    """
    logits_processor = LogitsProcessorList(each for each in logits_processor if each is not draws)
    if why := refusal(model, generation_config, logits_processor, inputs):
        raise CannotServeError(why)
    with decoding(model):
        nodes = Nodes(model, input_ids, generation_config, inputs)
        logits = nodes.prefill(logits_processor)
        while True:
            scores = logits_processor(nodes.prefixes, logits)
            if draws is not None:
                tokens = draws.tokens(scores, nodes.columns - input_ids.size(1), nodes.rows, nodes.of_rows)
            else:
                tokens = scores.argmax(dim=-1) if nodes.of_rows is None else scores.argmax(dim=-1)[nodes.of_rows]
            if not nodes.extend(tokens, stopping_criteria, logits_processor):
                break
            logits = nodes.next_logits()
        output = nodes.output()
    if draws is not None:
        draws.check()
    return output.clone()  # outside of inference mode, so that it may be changed


def refusal(
    model: PreTrainedModel, config: GenerationConfig, processors: LogitsProcessorList, inputs: dict[str, Any]
) -> str | None:
    """Return why `generate` must use its own loop, or None.

    Args:
        model: the policy, without PEFT's wrapper.
        config: complete, as `generate` prepares it.
        inputs: the model's arguments that `generate` prepared, among them the empty cache.
    """
    mode, positions = config.get_generation_mode(), inputs.get("position_ids")
    cache: Any = inputs.get("past_key_values")
    known = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
    if model.config.is_encoder_decoder:
        return "the model is an encoder and a decoder"
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        return f"the generation mode is {mode.value.replace('_', ' ')}"
    for name in ("return_dict_in_generate", "prefill_chunk_size", "token_healing"):
        if getattr(config, name):
            return f"{name} is {getattr(config, name)}"
    if config.num_return_sequences > 1:
        return f"num_return_sequences is {config.num_return_sequences}"
    if not config.use_cache:
        return "use_cache is False"
    if type(cache) is not DynamicCache or cache.offloading:
        return f"its cache ({type(cache).__name__}) is of another kind than keys and values in memory"
    if kinds := {type(layer) for layer in cache.layers} - {DynamicLayer, DynamicSlidingWindowLayer}:
        return f"its cache has layers of the kind {', '.join(sorted(kind.__name__ for kind in kinds))}"
    if others := [type(p).__name__ for p in processors if type(p).__name__ not in _ROW_BY_ROW]:
        return f"a logits processor keeps the state of a whole batch: {', '.join(others)}"
    if others := sorted(name for name, value in inputs.items() if name not in known and value is not None):
        return f"the model takes {', '.join(others)}"
    if "prepare_inputs_for_generation" in vars(model):
        return "an adapter changes the model's inputs (prompt learning)"
    if positions is not None and positions.ndim != 2:
        return "positions have several axes"
    text = model.config.get_text_config(decoder=True)
    switch = getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings
    if rope_types(text) & {"dynamic", "longrope"} and (config.max_length or 0) > switch:
        return "its rotary frequencies change with the longest row of a batch"
    return None


class Nodes:
    """The distinct prefixes of the rows that are still generated: their tokens, masks, positions and cache.

    Args:
        input_ids: prompts `[rows, W]`, padded on the left.
        config: complete, as `generate` prepares it.
        inputs: the model's other arguments, as `generate` prepares them.

    Attributes:
        columns: tokens of each prefix, with the padding.
        rows: the number of each row that has not ended.
        of_rows: the node of each of them; None: each has a node of its own, in the same order.
    """

    def __init__(
        self, model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, inputs: dict[str, Any]
    ) -> None:
        self._model, self._inputs = model, inputs
        count, self.columns = input_ids.shape
        assert config.max_length is not None
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        pad = config.pad_token_id if config.pad_token_id is not None else ends[0] or 0
        self._output = input_ids.new_full((count, config.max_length), pad)
        self._output[:, : self.columns] = input_ids
        mask = inputs.get("attention_mask")
        table = (input_ids if mask is None else torch.cat([input_ids, mask.to(input_ids)], dim=1)).cpu().numpy()
        _, firsts, of_row = np.unique([row.tobytes() for row in table], return_index=True, return_inverse=True)
        self._firsts = self._tensor(firsts)
        self._ids, self._prompt_of = self._output[self._firsts], torch.arange(len(firsts), device=input_ids.device)
        self._rows, self._node = np.arange(count), of_row.reshape(-1)
        self._point(self._rows, self._node)
        own = getattr(model.prepare_inputs_for_generation, "__func__", None) is not _PREPARE
        self._prepares = own or model.is_remote_code()  # else what it would do is known

    @property
    def prefixes(self) -> Tensor:
        """Prompt and tokens so far of each node."""
        return self._ids[:, : self.columns]

    def prefill(self, processors: LogitsProcessorList) -> Tensor:
        """Compute each distinct prompt; return the logits `[nodes, V]` that draw the first tokens."""
        inputs, cache, ids = dict(self._inputs), self._inputs["past_key_values"], self.prefixes
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        self._mask = self._positions = None
        if mask is not None:
            inputs["attention_mask"] = mask = mask[self._firsts]
        if positions is not None:
            inputs["position_ids"] = positions = positions.expand(len(self._output), -1)[self._firsts]
        plain = positions is not None and not self._prepares and {*map(type, cache.layers)} == {DynamicLayer}
        order, common = shared_first(ids, mask) if plain else (ids, 0)
        if common >= _COMMON:
            given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
            tables = {name: table.gather(1, order) for name, table in given.items() if table is not None}
            self._model(**inputs | {name: table[:1, :common] for name, table in tables.items()})
            cache.batch_repeat_interleave(len(ids))
            mask, positions = tables.get("attention_mask"), tables["position_ids"]
            prepared = inputs | {name: table[:, common:] for name, table in tables.items()} | {"attention_mask": mask}
        else:
            prepared = self._prepare(ids, self.columns, is_first_iteration=True, **inputs)
        if mask is not None and mask.all() and not self._prepares:
            mask = self._inputs["attention_mask"] = None  # no padding: one operation less for each token
        if mask is not None:
            self._mask = torch.nn.functional.pad(mask, (0, self._ids.size(1) - mask.size(1)), value=1)
        if positions is not None:
            self._positions = positions[:, -1:] if mask is not None else positions[:1, -1:]  # else all are equal
        logits = self._model(**prepared, return_dict=True).logits[:, -1].float()
        if cache.get_seq_length() != self.columns:
            raise CannotServeError("the model keeps no cache of the prompts")
        for i, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                cache.layers[i] = NodeLayer(layer, *self._output.shape)
        _select_rows(processors, self._firsts)
        return logits

    def next_logits(self) -> Tensor:
        """Return the logits `[nodes, V]` after the latest tokens."""
        inputs = dict(self._inputs)
        if self._mask is not None:
            inputs["attention_mask"] = self._mask[:, : self.columns]
        if self._positions is not None:
            self._positions = inputs["position_ids"] = self._positions + 1
        if self._prepares:
            inputs = self._prepare(self.prefixes, 1, next_sequence_length=1, **inputs)
        else:
            inputs["input_ids"] = self._ids[:, self.columns - 1 : self.columns]
        logits: Tensor = self._model(**inputs, return_dict=True).logits[:, -1].float()
        check_attended(inputs["past_key_values"])
        return logits

    def extend(self, tokens: Tensor, criteria: StoppingCriteriaList, processors: LogitsProcessorList) -> bool:
        """Add a token to each prefix, fork nodes and drop those that end; return whether there are any left.

        Args:
            tokens: of each row.
        """
        before, parents = len(self._ids), np.arange(len(self._ids))
        if self.of_rows is not None:
            of_rows = tokens.cpu().numpy()
            drawn = np.empty(before, np.int64)
            drawn[self._node] = of_rows
            if (drawn[self._node] != of_rows).any():  # rows of a node drew different tokens
                pairs, self._node = np.unique(self._node * _TOKENS + of_rows, return_inverse=True)
                parents, drawn = np.divmod(pairs, _TOKENS)
                self._ids = self._ids[self._tensor(parents)]
            tokens = self._tensor(drawn)
        self._ids[:, self.columns] = tokens
        self.columns += 1
        ended = criteria(self.prefixes, None).cpu().numpy()
        if self.columns == self._ids.size(1) or ended.all():
            return False
        if len(parents) > before or ended.any():
            self._arrange(parents, ended, processors)
        return True

    def output(self) -> Tensor:
        """Return prompts and completions of all rows."""
        self._output[self._tensor(self._rows)] = self._ids[self._tensor(self._node)]
        return self._output[:, : self.columns]

    def _prepare(self, ids: Tensor, columns: int, **inputs: Any) -> dict[str, Any]:
        """Return the model's own preparation of its inputs, which must be the latest `columns` and the cache."""
        prepared: dict[str, Any] = self._model.prepare_inputs_for_generation(ids, **inputs)
        latest, cached = prepared.get("input_ids"), prepared.get("past_key_values") is inputs["past_key_values"]
        if not cached or latest is None or latest.shape[1] != columns:
            raise CannotServeError("the model computes other tokens than the latest")
        return prepared

    def _arrange(self, parents: NDArray[np.int64], ended: NDArray[np.bool_], processors: LogitsProcessorList) -> None:
        """Give each child that has not ended a place, and store the rows of those that have.

        Args:
            parents: the place of each child's parent, ascending.
            ended: of each child.
        """
        alive, left = np.flatnonzero(~ended), ~ended[self._node]
        children = alive[stay(parents[alive])]
        place = np.zeros_like(parents)
        place[children] = np.arange(len(children))
        self._output[self._tensor(self._rows[~left])] = self._ids[self._tensor(self._node[~left])]
        self._ids = self._ids[self._tensor(children)]
        self._point(self._rows[left], place[self._node[left]])
        origin = self._tensor(parents[children])
        if self._mask is not None:
            self._mask = self._mask[origin]
            if self._positions is not None:
                self._positions = self._positions[origin]
        self._prompt_of = arrange(self._model, self._inputs["past_key_values"], origin, self._prompt_of)
        _select_rows(processors, origin)

    def _point(self, rows: NDArray[np.int64], node: NDArray[np.int64]) -> None:
        """Let row `rows[i]` be at `node[i]`; once each has a node of its own they are in the order of the nodes."""
        apart = len(rows) == len(self._ids)
        if apart:
            rows, node = rows[node.argsort()], np.arange(len(rows))
        self._rows, self._node = rows, node
        self.rows = self._tensor(rows)
        self.of_rows = None if apart else self._tensor(node)

    def _tensor(self, numbers: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(numbers).to(self._output.device)


def shared_first(ids: Tensor, mask: Tensor | None) -> tuple[Tensor, int]:
    """Return an order of each row's columns in which the tokens that all rows begin with come before the padding.

    Also returns how many tokens these are. A row's last token is not among them; of a single row none is.

    Args:
        ids: prompts `[rows, W]`, padded on the left, where `mask` is 0. None: no padding.

    >>> ids, mask = torch.tensor([[0, 5, 6, 7], [5, 6, 8, 9]]), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    >>> order, common = shared_first(ids, mask)
    >>> ids.gather(1, order).tolist(), common
    ([[5, 6, 0, 7], [5, 6, 8, 9]], 2)
    """
    (rows, width), columns = ids.shape, torch.arange(ids.size(1), device=ids.device)
    mask = torch.ones_like(ids) if mask is None else mask
    starts = (mask == 0).sum(1, keepdim=True)
    at = starts + columns[: max(0, width - int(starts.max()) - 1)]
    own = ids.gather(1, at).masked_fill(mask.gather(1, at) == 0, -1)
    common = int(((own == own[:1]) & (own >= 0)).all(0).cumprod(0).sum()) if rows > 1 else 0
    return torch.where(columns < common, starts + columns, columns - common * (columns < common + starts)), common


def stay(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the child for each place, such that the first child of a node takes its place if there is still one.

    Args:
        parents: the place of each child's parent, ascending.

    >>> stay(np.array([0, 0, 2, 4])).tolist()  # the second child of node 0 and the child of node 4 take free places
    [0, 1, 2, 3]
    >>> stay(np.array([1, 1, 2])).tolist()
    [1, 0, 2]
    """
    count = len(parents)
    stays = (np.diff(parents, prepend=-1) > 0) & (parents < count)
    order = np.full(count, -1)
    order[parents[stays]] = np.flatnonzero(stays)
    order[order < 0] = np.flatnonzero(~stays)
    return order


def _select_rows(processors: LogitsProcessorList, rows: Tensor) -> None:
    """Select rows of what processors hold for each row; of those served only the repetition penalty does."""
    for processor in processors:
        if isinstance(ignored := getattr(processor, "prompt_ignore_length", None), Tensor):
            processor.prompt_ignore_length = ignored[rows]


def running_sums(values: Tensor) -> Tensor:
    """Return the sums of each row's values up to each column, `[rows, V]`; the values are no longer usable.

    On a GPU torch has no deterministic `cumsum` of floating-point numbers, and raises an error if deterministic
    algorithms are required (`full_determinism`).

    >>> running_sums(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[1., 3., 6.]])
    """
    if values.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return values.cumsum_(dim=-1)
    return sums_by_doubling(values)


def sums_by_doubling(values: Tensor) -> Tensor:
    """Return the sums of each row's values up to each column, `[rows, V]`, by log2(V) additions of tensors.

    >>> sums_by_doubling(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]))
    tensor([[ 1.,  3.,  6., 10., 15.]])
    """
    columns = values.size(1)
    step = 1  # the number of terms that each sum has so far, or all that there are
    while step < columns:
        longer = values.clone()
        longer[:, step:].add_(values[:, :-step])
        values = longer
        step *= 2
    return values


class RowDraws(LogitsProcessor):
    """Samples each row with its own uniform draws, by inverting the cumulative distribution.

    A token depends on the row's key, its position and its scores, so a row's completion does not depend on its batch
    or process, up to rounding. As a logits processor of `generate` it leaves one token a row.

    Args:
        keys: of the rows: integers of at least 0, such as seed, generation, prompt and number.
        length: the most tokens of a completion; with a greater one the first draws are the same.
        device: the device of the scores.
        prompt_width: columns before the first completion token, read by the logits processor.
        strict: let `check` raise if probabilities were not finite; else such a token is arbitrary.

    >>> draws = RowDraws([(0, 1), (0, 1), (0, 2)], length=4)
    >>> tokens = draws.tokens(torch.zeros(3, 1000), at=0)
    >>> bool(tokens[0] == tokens[1] != tokens[2])
    True
    """

    def __init__(
        self,
        keys: Sequence[Sequence[int]],
        length: int,
        device: torch.device | str = "cpu",
        *,
        prompt_width: int = 0,
        strict: bool = False,
    ) -> None:
        draws = [np.random.default_rng(tuple(key)).random(length, dtype=np.float32) for key in keys]
        self._draws = torch.from_numpy(np.stack(draws, axis=1)).to(device)
        self._prompt_width, self._strict = prompt_width, strict
        self._zero = torch.zeros((), device=device)
        self._sum = self._zero.clone()  # of all totals: finite while each was

    def tokens(self, scores: Tensor, at: int, rows: Tensor | None = None, of_rows: Tensor | None = None) -> Tensor:
        """Return a token for each row: the first with a cumulative probability above its draw.

        Args:
            scores: `[rows, V]`, or `[nodes, V]` with `of_rows`.
            at: the position in the completion, from 0.
            rows: which of the keys' rows these are; None: all, in order.
            of_rows: the scores' row of each of these rows; None: the scores are theirs, in order.
        """
        draws = self._draws[at] if rows is None else self._draws[at].index_select(0, rows)
        cumulative = running_sums(torch.softmax(scores, dim=-1, dtype=torch.float32))
        if self._strict:
            self._sum += cumulative[:, -1].sum()
        if of_rows is not None:
            cumulative = cumulative.index_select(0, of_rows)
        total = cumulative[:, -1:]
        # below the total even after rounding, so that a token of probability 0 is never drawn
        below = torch.minimum(draws.unsqueeze(1) * total, torch.nextafter(total, self._zero))
        return torch.searchsorted(cumulative, below, right=True).squeeze(1).clamp_(max=scores.size(1) - 1)

    def check(self) -> None:
        """If strict, raise the RuntimeError of `torch.multinomial` once a row's probabilities were not finite."""
        if self._strict and not torch.isfinite(self._sum):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [rows, V] that allow one token."""
        token = self.tokens(scores, input_ids.size(1) - self._prompt_width)
        return torch.full_like(scores, -torch.inf).scatter_(1, token.unsqueeze(1), 0.0)
