"""Generation that computes each prompt once, however many rollouts it has, and drops rollouts as they end.

transformers' `generate` prepares everything: settings, logits processors, stopping criteria, masks, positions and the
cache. It then calls `PromptOnce` in place of its own loop (its argument `custom_generate`).

Rounding. A row's logits depend a little on how many rows a matrix product has: in float32 they differ by about 1e-6
between batch sizes, in bfloat16 by about 1e-2. A draw that falls this close to the border of two tokens, or two tokens
that are this close to equal in greedy decoding, can then go either way, and the rest of that row differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import GenerationMode

from .decoding import CannotServeError, check_attended, decoding, rope_types, share_prompts, unshareable

if TYPE_CHECKING:
    from transformers import StoppingCriteriaList

    from .sampling import RowDraws

logger = logging.getLogger(__name__)

_SYNC_EVERY = 8  # tokens between looks at what has ended, on devices where a look waits for all work
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
    otherwise: Mapping[str, Any] = MappingProxyType({}),
) -> Tensor:
    """Return `generate`'s result for `inputs`, each distinct prompt computed once if this model and setting allow.

    If not, the reason is logged once and `generate` runs its own loop.

    Args:
        generate: of a model.
        inputs: its arguments: `input_ids` [rows, W] padded on the left, `attention_mask`, `generation_config`, ...
        draws: of the rows; None: greedy.
        otherwise: arguments that replace some of `inputs` if `generate` runs its own loop.

    Returns:
        Prompts and completions `[rows, W + T]`, padded on the right from each row's end.
    """
    try:
        return generate(**inputs, custom_generate=PromptOnce(draws))
    except CannotServeError as reason:
        if str(reason) not in _said and not (dist.is_initialized() and dist.get_rank()):
            logger.warning("Prompts are computed once for each rollout, and not once for all of them: %s.", reason)
        _said.add(str(reason))
    return generate(**{**inputs, **otherwise})


def complete_prompts(
    model: PreTrainedModel,
    prompts_ids: Sequence[Sequence[int]],
    draws: RowDraws | None,
    *,
    length: int,
    ends: Sequence[int],
    pad: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Tensor:
    """Return completions `[rows, T]` of a batch of prompts, each with its own draws, padded on the right.

    The model's own sampling defaults and penalties are not used.

    Args:
        prompts_ids: tokens of each row's prompt; equal prompts are computed once.
        draws: of the rows; None: greedy.
        length: most tokens of a completion.
        ends: tokens that end a completion.
        pad: the token after a row's end.
        temperature, top_k, top_p: of the draws; a top_k below 1 keeps all tokens.
    """
    width, device = max(map(len, prompts_ids)), model.device
    padded = torch.tensor([[pad] * (width - len(ids)) + list(ids) for ids in prompts_ids], device=device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts_ids], device=device)
    # greedy for `generate`, since draws leave one token
    config = GenerationConfig(
        do_sample=False,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        max_new_tokens=length,
        pad_token_id=pad,
        eos_token_id=sorted(ends) or None,
    )
    inputs: dict[str, Any] = {
        "input_ids": padded,
        "attention_mask": mask,
        "generation_config": config,
        "synced_gpus": False,  # whole weights are here, and processes may have different numbers of batches
    }
    if draws is None:
        return complete(model.generate, inputs)[:, width:]
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    inputs["logits_processor"] = warpers
    drawn = {"logits_processor": LogitsProcessorList([*warpers, draws])}
    return complete(model.generate, inputs, draws, otherwise=drawn)[:, width:]


class PromptOnce:
    """A decoding loop for `generate(custom_generate=...)`; stateless but for the draws.

    Args:
        draws: one row for each row of `generate`'s input; None: greedy, whatever `do_sample` says.
    """

    def __init__(self, draws: RowDraws | None) -> None:
        self._draws = draws

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> Tensor:
        """Return prompts and completions, as `generate` does.

        Raises:
            CannotServeError: see `refusal`.
            RuntimeError: strict draws, and probabilities that are not finite.
        """
        if why := refusal(model, generation_config, logits_processor, inputs):
            raise CannotServeError(why)
        draws, prompt = self._draws, input_ids.size(1)
        if draws is not None and len(draws) != len(input_ids):
            raise ValueError(f"got draws for {len(draws)} rows and {len(input_ids)} rows")
        with decoding(model):
            rows = UnfinishedRows(model, input_ids, generation_config, inputs)
            logits = rows.prefill()
            while True:
                scores = logits_processor(rows.seen, logits)
                at = rows.columns - prompt
                tokens = scores.argmax(dim=-1) if draws is None else draws.tokens(scores, at, rows.kept)
                rows.append(tokens, stopping_criteria)
                if at % rows.look_every == rows.look_every - 1 or rows.columns == generation_config.max_length:
                    if rows.all_ended():
                        break
                    rows.drop_ended(logits_processor)
                logits = rows.next_logits()
            output = rows.output()
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
    mode, cache, positions = config.get_generation_mode(), inputs.get("past_key_values"), inputs.get("position_ids")
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
    if cache is None:
        return "its cache is of another kind than keys and values"
    if why := unshareable(cache):
        return why
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


class UnfinishedRows:
    """The rollouts that are still generated: their tokens, masks, positions and cache.

    Args:
        input_ids: prompts `[rows, W]`, padded on the left.
        config: complete, as `generate` prepares it.
        inputs: the model's other arguments, as `generate` prepares them.
    """

    def __init__(self, model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, inputs: dict[str, Any]):
        self._model, self._inputs = model, inputs
        count, self.columns = input_ids.shape
        assert config.max_length is not None
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        self._pad = config.pad_token_id if config.pad_token_id is not None else ends[0] or 0
        self._output = input_ids.new_full((count, config.max_length), self._pad)
        self._output[:, : self.columns] = input_ids
        self._ids = self._output  # of the rows that are left
        mask = inputs.get("attention_mask")
        self._mask = (
            None if mask is None else torch.nn.functional.pad(mask, (0, config.max_length - mask.size(1)), value=1)
        )
        self._alive = torch.ones(count, dtype=torch.bool, device=input_ids.device)
        self._wasted = 0  # rows computed after their end since the last drop
        self.kept: Tensor | None = None  # numbers of the rows that are left; None: all
        self.look_every = 1 if input_ids.device.type == "cpu" else _SYNC_EVERY

    @property
    def seen(self) -> Tensor:
        """Prompts and tokens so far of the rows that are left."""
        return self._ids[:, : self.columns]

    def prefill(self) -> Tensor:
        """Compute each distinct prompt once; return the logits `[rows, V]` that draw the first tokens."""
        firsts, of_row = distinct(self.seen, self._inputs.get("attention_mask"))
        positions = self._inputs.get("position_ids")
        inputs = dict(self._inputs)
        if positions is not None:
            positions = positions.expand(len(self._ids), -1)
            self._positions = positions[:, -1:] if self._mask is not None else positions[:1, -1:]  # else all are equal
            inputs["position_ids"] = positions[firsts]
        if self._mask is not None:
            inputs["attention_mask"] = inputs["attention_mask"][firsts]
        prepared = self._prepare(self.seen[firsts], self.columns, is_first_iteration=True, **inputs)
        logits = self._model(**prepared, return_dict=True).logits[:, -1].float()
        cache = self._inputs["past_key_values"]
        if cache.get_seq_length() != self.columns:
            raise CannotServeError("the model keeps no cache of the prompts")
        share_prompts(self._model, cache, of_row, self._output.size(1))
        return logits[of_row]

    def next_logits(self) -> Tensor:
        """Return the logits `[rows, V]` after the latest tokens."""
        inputs = dict(self._inputs)
        if self._mask is not None:
            inputs["attention_mask"] = self._mask[:, : self.columns]
        if "position_ids" in inputs:
            self._positions = inputs["position_ids"] = self._positions + 1
        model = self._model
        if getattr(model.prepare_inputs_for_generation, "__func__", None) is _PREPARE and not model.is_remote_code():
            inputs["input_ids"] = self._ids[:, self.columns - 1 : self.columns]  # what it would do, less its checks
        else:
            inputs = self._prepare(self.seen, 1, next_sequence_length=1, **inputs)
        logits: Tensor = model(**inputs, return_dict=True).logits[:, -1].float()
        check_attended(inputs["past_key_values"])
        return logits

    def _prepare(self, ids: Tensor, columns: int, **inputs: Any) -> dict[str, Any]:
        """Return the model's own preparation of its inputs, which must be the latest `columns` and the cache."""
        prepared: dict[str, Any] = self._model.prepare_inputs_for_generation(ids, **inputs)
        latest, cached = prepared.get("input_ids"), prepared.get("past_key_values") is inputs["past_key_values"]
        if not cached or latest is None or latest.shape[1] != columns:
            raise CannotServeError("the model computes other tokens than the latest")
        return prepared

    def append(self, tokens: Tensor, criteria: StoppingCriteriaList) -> None:
        """Add a token to each row, padding to rows that have ended, and see which end with it."""
        self._ids[:, self.columns] = tokens.masked_fill(~self._alive, self._pad)
        self.columns += 1
        self._alive &= ~criteria(self.seen, None)

    def all_ended(self) -> bool:
        """Return whether no row is left, or no column."""
        self._left = int(self._alive.sum())
        return self._left == 0

    def drop_ended(self, processors: LogitsProcessorList) -> None:
        """Drop the ended rows once computing them has cost as much as the copy of the others, which a drop needs.

        A row of the cache is copied in about the time that its next token takes, so this costs at most twice the
        least possible, whatever the lengths.
        """
        self._wasted += (len(self._alive) - self._left) * self.look_every
        if self._wasted < self._left or self._left == len(self._alive):
            return
        self._wasted = 0
        alive = self._alive.nonzero().squeeze(1)
        self._store()
        self.kept = alive if self.kept is None else self.kept[alive]
        self._ids, self._alive = self._ids[alive], self._alive[alive]
        if self._mask is not None:
            self._mask = self._mask[alive]
            if "position_ids" in self._inputs:
                self._positions = self._positions[alive]
        self._inputs["past_key_values"].batch_select_indices(alive)
        for processor in processors:  # the only one of those served that holds a value for each row
            if isinstance(ignored := getattr(processor, "prompt_ignore_length", None), Tensor):
                processor.prompt_ignore_length = ignored[alive]

    def output(self) -> Tensor:
        """Return prompts and completions of all rows."""
        self._store()
        return self._output[:, : self.columns]

    def _store(self) -> None:
        if self.kept is not None:
            self._output[self.kept] = self._ids


_PREPARE = GenerationMixin.prepare_inputs_for_generation


def distinct(ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the first row of each distinct prompt, and for each row the number of its prompt.

    >>> [x.tolist() for x in distinct(torch.tensor([[1, 2], [1, 3], [1, 2]]), None)]
    [[0, 1], [0, 1, 0]]
    """
    table = (ids if mask is None else torch.cat([ids, mask.to(ids)], dim=1)).cpu().numpy()
    numbers: dict[bytes, int] = {}
    of_row = [numbers.setdefault(row.tobytes(), len(numbers)) for row in table]
    firsts = [of_row.index(number) for number in range(len(numbers))]
    return torch.tensor(firsts, device=ids.device), torch.tensor(of_row, device=ids.device)
