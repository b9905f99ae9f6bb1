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
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
)
from transformers.generation import GenerationMode

from ..sums import running_sums
from .cache import CannotServeError, decoding, rope_types, why_not_copied
from .images import ENCODED
from .nodes import CACHES, EVERY, PER_TOKEN, Nodes, cache_argument, known_ends

if TYPE_CHECKING:
    from transformers import StoppingCriteriaList

logger = logging.getLogger(__name__)

_logged_reasons: set[str] = set()
# Arguments of a model that nodes are prepared for; any other would need code of its own.
_ARGUMENTS = {"position_ids", *CACHES, "use_cache", "logits_to_keep", ENCODED, *PER_TOKEN}
# Processors that treat each row by itself; others keep the state of a whole batch, from which no row can be dropped.
_ROW_BY_ROW = frozenset({
    "EpsilonLogitsWarper", "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper",
    "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper",
})  # fmt: skip

_OF_SCORES = frozenset({  # those of them that read the scores alone
    "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper",
    "TopPLogitsWarper", "TypicalLogitsWarper",
})  # fmt: skip
_ON_HOST = frozenset({  # those of them that compare tokens on the host
    "NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "TopHLogitsWarper",
})  # fmt: skip


class Path(Enum):
    """How `decode` generates."""

    TREE = "prefix trees"  # the host reads each token, and each distinct prefix is computed once
    ROWS = f"rows, each prompt once; the host reads one in {EVERY} tokens"


def choose_path(device: torch.device, ends_by_tokens: bool) -> Path:
    """Return how to generate: where the host would wait for each token of a device it reads few.

    Args:
        ends_by_tokens: whether tokens alone end a row, and no logits processor reads tokens on the host.
    """
    # On a CPU a read does not wait, and the tree is smaller where rows part and end at once.
    return Path.ROWS if device.type != "cpu" and ends_by_tokens else Path.TREE


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
        draws: of the rows. If None, greedy, whatever `do_sample` says.

    Returns:
        Prompts and completions `[rows, W + T]`, padded on the right from each row's end.
    """
    try:
        return generate(**inputs, custom_generate=partial(decode, draws))
    except CannotServeError as error:
        _log_once(str(error))
    return generate(**inputs)


def why_generates_rows(model: PreTrainedModel) -> str | None:
    """Return why a model generates each rollout by itself, None if over trees; found by generating two tokens."""
    ids = torch.ones(2, 2, dtype=torch.int64, device=model.device)
    try:
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False,
            custom_generate=partial(decode, None),
        )  # fmt: skip
    except CannotServeError as error:
        return str(error)
    return None


def _log_once(reason: str) -> None:
    is_main_process = not dist.is_initialized() or dist.get_rank() == 0
    if is_main_process and reason not in _logged_reasons:
        logger.warning("Prefixes are computed once for each rollout, and not once for all of them: %s.", reason)
    _logged_reasons.add(reason)


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
        draws: of the rows. If None, greedy.
        length: most tokens of a completion.
        ends: tokens that end a completion.
        pad: the token after a row's end.
        temperature: of the draws.
    """
    width = max(len(ids) for ids in prompts_ids)
    device = model.device
    padded = torch.full((len(prompts_ids), width), pad, device=device)
    mask = torch.zeros_like(padded)
    for row, ids in enumerate(prompts_ids):
        if len(ids):
            padded[row, -len(ids) :] = torch.tensor(list(ids), device=device)
            mask[row, -len(ids) :] = 1
    # Greedy for `generate`, since draws leave one token.
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
        draws: one row for each row of `generate`'s input. If None, greedy.

    Raises:
        CannotServeError: see `refusal`.
        RuntimeError: strict draws, and probabilities that are not finite.
    """
    # Draws are made by row below, and not by node.
    logits_processor = LogitsProcessorList(each for each in logits_processor if each is not draws)
    reason = refusal(model, generation_config, logits_processor, inputs)
    if reason is not None:
        raise CannotServeError(reason)
    prompt_width = input_ids.size(1)  # draws count from the first token of the completions
    ends = known_ends(stopping_criteria, generation_config, input_ids.device)
    processors = {type(processor).__name__ for processor in logits_processor}
    path = choose_path(input_ids.device, ends is not None and not processors & _ON_HOST)
    reads_prefixes = bool(processors - _OF_SCORES)
    with decoding(model, inputs[cache_argument(inputs)]):
        nodes = Nodes(
            model, input_ids, generation_config, inputs, stopping_criteria, ends,
            draws=draws is not None, reads_every_token=path is Path.TREE,
        )  # fmt: skip
        scores = nodes.prefill(logits_processor)  # [nodes, V]
        while True:
            prefixes = nodes.prefixes if reads_prefixes else None
            for processor in logits_processor:
                scores = processor(prefixes, scores)
            if draws is not None:
                tokens = draws.tokens(scores, nodes.columns - prompt_width, nodes.rows, nodes.of_rows)
            else:
                tokens = scores.argmax(dim=-1)
            if not nodes.extend(tokens, logits_processor):
                break
            scores = nodes.next_logits()
        output = nodes.output()
    if draws is not None:
        draws.check()
    return output.clone()  # made outside of inference mode, so that it may be changed


def refusal(
    model: PreTrainedModel, config: GenerationConfig, processors: LogitsProcessorList, inputs: dict[str, Any]
) -> str | None:
    """Return why `generate` must use its own loop, or None.

    Args:
        model: the policy, without PEFT's wrapper.
        config: complete, as `generate` prepares it.
        inputs: the model's arguments that `generate` prepared, among them the empty cache.
    """
    if model.config.is_encoder_decoder:
        return "the model is an encoder and a decoder"
    return (
        _refused_setting(config)
        or why_not_copied(model, inputs.get(cache_argument(inputs)), config.cache_implementation)
        or _refused_processor(processors)
        or _refused_input(model, inputs)
        or _refused_positions(model, config, inputs.get("position_ids"))
    )


def _refused_setting(config: GenerationConfig) -> str | None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        return f"the generation mode is {mode.value.replace('_', ' ')}; sampling and greedy decoding are served"
    for name in ("return_dict_in_generate", "prefill_chunk_size", "token_healing"):
        value = getattr(config, name)
        if value:
            return f"{name} is {value}; leave it out of generation_kwargs"
    if config.num_return_sequences > 1:
        return f"num_return_sequences is {config.num_return_sequences}; leave it out, and set num_rollouts"
    if not config.use_cache:
        return "use_cache is False; set it to true in generation_kwargs or in the model's generation_config.json"
    return None


def _refused_processor(processors: LogitsProcessorList) -> str | None:
    names = [type(processor).__name__ for processor in processors]
    batch_wise = [name for name in names if name not in _ROW_BY_ROW]
    if batch_wise:
        return f"a logits processor keeps the state of a whole batch: {', '.join(batch_wise)}"
    return None


def _refused_input(model: PreTrainedModel, inputs: dict[str, Any]) -> str | None:
    names = {name for name, value in inputs.items() if value is not None}
    unknown = sorted(names - _ARGUMENTS)
    if unknown:
        return f"the model takes {', '.join(unknown)}, whose rows are not known; without images it may take less"
    if "prepare_inputs_for_generation" in vars(model):
        return "an adapter changes the model's inputs (prompt learning)"
    return None


def _refused_positions(model: PreTrainedModel, config: GenerationConfig, positions: Tensor | None) -> str | None:
    if positions is None and any(hasattr(module, "rope_deltas") for module in model.modules()):
        return "it keeps positions of a whole batch; later versions of transformers (5.23) pass them row by row"
    text = model.config.get_text_config(decoder=True)
    if rope_types(text) & {"dynamic", "longrope"}:
        switch = getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings
        if (config.max_length or 0) > switch:
            return (
                "its rotary frequencies change with the longest row of a batch; prompt and completion of at most "
                f"{switch} tokens keep them"
            )
    return None


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
        # The greatest draw times a total is less than the total, in float32 too.
        below_one = np.minimum(np.stack(draws, axis=1), np.float32(1 - 2**-23))
        self._draws = torch.from_numpy(below_one).to(device)  # [length, rows]
        self.prompt_width = prompt_width
        self._strict = strict
        self._below: list[Tensor] = []  # if strict: finite where the probabilities are; read once, at the end

    def tokens(self, scores: Tensor, at: int, rows: Tensor | None = None, of_rows: Tensor | None = None) -> Tensor:
        """Return a token for each row: the first with a cumulative probability above its draw.

        Args:
            scores: `[rows, V]`, or `[nodes, V]` with `of_rows`.
            at: the position in the completion, from 0.
            rows: which of the keys' rows these are. If None, all, in order.
            of_rows: the scores' row of each of these rows. If None, the scores are theirs, in order.
        """
        draws = self._draws[at]
        if rows is not None:
            draws = draws.index_select(0, rows)
        cumulative = running_sums(torch.softmax(scores, dim=-1, dtype=torch.float32))  # [rows or nodes, V]
        if of_rows is not None:
            cumulative = cumulative.index_select(0, of_rows)  # [rows, V]
        # Below the total even after rounding (see `__init__`), so that a token of probability 0 is never drawn.
        below = draws.unsqueeze(1) * cumulative[:, -1:]
        if self._strict:
            self._below.append(below)
        tokens = torch.searchsorted(cumulative, below, right=True).squeeze(1)
        return tokens.clamp_(max=scores.size(1) - 1)

    def check(self) -> None:
        """If strict, raise the RuntimeError of `torch.multinomial` once a row's probabilities were not finite."""
        if self._below and not torch.isfinite(torch.cat(self._below)).all():
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [rows, V] that allow one token."""
        token = self.tokens(scores, input_ids.size(1) - self.prompt_width)
        return torch.full_like(scores, -torch.inf).scatter_(1, token.unsqueeze(1), 0.0)
