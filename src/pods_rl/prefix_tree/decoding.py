"""Generation over the tree of prefixes: the model computes each distinct prefix of a prompt's rollouts once.

The rows of `generate` with the same prompt begin as one node of the tree. Each row draws its next token with numbers of
its own from its node's probabilities; where the tokens differ the node forks. A row leaves its node when it ends.

transformers' `generate` prepares everything: settings, logits processors, stopping criteria, masks, positions and the
cache. It then calls `decode` instead of its own loop (its argument `custom_generate`).

Rounding. A row's logits depend a little on how many rows a matrix product has: in float32 they differ by about 1e-6
between batch sizes, in bfloat16 by about 1e-2. A draw that falls this close to the border of two tokens, or two tokens
that are this close to equal in greedy decoding, can then go either way, and the rest of that row differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper
from transformers.generation import GenerationMode

from .cache import CannotServeError, rope_types, why_not_copied
from .captured import SCORES_ALONE, complete_rows, decoder_to_keep
from .draws import RowDraws
from .images import ENCODED
from .nodes import CACHES, EVERY, PER_TOKEN, Nodes, cache_argument, known_ends
from .plain_decoder import plain_decoder

if TYPE_CHECKING:
    from transformers import StoppingCriteriaList

logger = logging.getLogger(__name__)

_logged_paths: set[str] = set()
# Arguments of a model that nodes are prepared for; any other would need code of its own.
_ARGUMENTS = {"position_ids", *CACHES, "use_cache", "logits_to_keep", ENCODED, *PER_TOKEN}
_ON_HOST = frozenset({  # processors that compare tokens on the host
    "NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "TopHLogitsWarper",
})  # fmt: skip
# Processors that treat each row by itself; others keep the state of a whole batch, from which no row can be dropped.
_ROW_BY_ROW = SCORES_ALONE | _ON_HOST | {
    "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "RepetitionPenaltyLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
}  # fmt: skip


class Path(Enum):
    """How `decode` generates."""

    TREE = "prefix trees"
    ROWS = f"rows, each prompt once; the host reads one in {EVERY} tokens"
    CAPTURED = f"{ROWS}; a token is one CUDA graph"


_paths: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()  # how each model generated last


def choose_path(model: PreTrainedModel, processors: set[str], ends: Tensor | None) -> Path:
    """Return how to generate with this model, kinds of processors and tokens that end a row (see `known_ends`)."""
    # On a CPU a read does not wait, and the tree is smallest where rows part and end at once.
    if model.device.type == "cpu" or ends is None or processors & _ON_HOST:
        return Path.TREE
    # Weights that processes share are gathered at other addresses each time.
    is_sharded = any(hasattr(weight, "ds_id") or type(weight).__name__ == "DTensor" for weight in model.parameters())
    if model.device.type != "cuda" or is_sharded or processors - SCORES_ALONE:
        return Path.ROWS
    return Path.CAPTURED


def generation_path(model: PreTrainedModel) -> str | None:
    """Return how a model, without PEFT's wrapper, generated last, and why if it did by itself; None if it did not."""
    return _paths.get(model)


def complete(generate: Callable[..., Any], inputs: Mapping[str, Any], draws: RowDraws | None = None) -> Tensor:
    """Return prompts and completions `[rows, W + T]` of a model's `generate`, each distinct prefix computed once.

    If this model or a setting does not allow it, the reason is logged once and `generate` runs its own loop.

    Args:
        inputs: arguments of `generate`: `input_ids` [rows, W] padded on the left, `attention_mask`, ...
        draws: of the rows. If None, greedy, whatever `do_sample` says.
    """
    try:
        return generate(**inputs, custom_generate=partial(decode, draws))
    except CannotServeError:  # `decode` has logged it
        return generate(**inputs)


def try_generation(model: PreTrainedModel) -> str:
    """Return how a model generates, which it does for two tokens: see `generation_path`."""
    ids = torch.ones(2, 2, dtype=torch.int64, device=model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "do_sample": False}
    complete(model.generate, inputs)
    return _paths[model]


def _note_path(model: PreTrainedModel, path: str, level: int) -> None:
    """Keep how a model generates; log it once."""
    _paths[model] = path
    is_main_process = not dist.is_initialized() or dist.get_rank() == 0
    if is_main_process and path not in _logged_paths:
        logger.log(level, "Rollouts are generated as %s.", path)
    _logged_paths.add(path)


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
        draws: of the rows. If None, greedy.
        length: most tokens of a completion.
        ends: tokens that end a completion.
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

    Raises:
        CannotServeError: see `why_own_loop`.
        RuntimeError: strict draws, and probabilities that are not finite.
    """
    # Draws are made by row below, and not by node.
    logits_processor = LogitsProcessorList(each for each in logits_processor if each is not draws)
    try:
        reason = why_own_loop(model, generation_config, logits_processor, inputs)
        if reason is not None:
            raise CannotServeError(reason)
        with _evaluation(model):
            output = _complete(draws, model, input_ids, logits_processor, stopping_criteria, generation_config, inputs)
    except CannotServeError as error:
        _note_path(model, f"rows, each with its prompt, and not as prefix trees: {error}", logging.WARNING)
        raise
    if draws is not None:
        draws.check()
    return output.clone()  # made outside of inference mode, so that it may be changed


@contextmanager
def _evaluation(model: PreTrainedModel) -> Iterator[None]:
    """Set a model to evaluation: without dropout, which rollouts of a prompt would share."""
    in_training = [module for module in model.modules() if module.training]
    # In inference mode each of many small operations costs less. It is off with several processes (shared weights), and
    # for remote or old code, which may keep tensors of a pass for the next: tensors made in it cannot be trained.
    is_known = model._supports_attention_backend and not model.is_remote_code()
    takes_inference_mode = model.device.type == "cpu" and is_known and not dist.is_initialized()
    for module in in_training:
        module.training = False
    try:
        with torch.inference_mode() if takes_inference_mode else nullcontext():
            yield
    finally:
        for module in in_training:
            module.training = True


def _complete(
    draws: RowDraws | None,
    model: PreTrainedModel,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    inputs: dict[str, Any],
) -> Tensor:
    """Return prompts and completions by the path that `choose_path` returns: see `decode`."""
    ends = known_ends(criteria, config, input_ids.device)
    kinds = {type(processor).__name__ for processor in processors}
    path = choose_path(model, kinds, ends)
    nodes = Nodes(
        model, input_ids, config, inputs, criteria, ends,
        draws=draws is not None, reads_every_token=path is Path.TREE,
    )  # fmt: skip
    scores = nodes.prefill(processors, decoder_to_keep if path is Path.CAPTURED else plain_decoder)  # [nodes, V]
    if path is Path.CAPTURED and not nodes.have_fixed_shapes:
        path = Path.ROWS
    _note_path(model, path.value, logging.INFO if model.device.type == "cpu" else logging.WARNING)
    if path is Path.CAPTURED:
        complete_rows(model, nodes, draws, processors, scores)
        return nodes.output()
    reads_prefixes = bool(kinds - SCORES_ALONE)
    while True:
        prefixes: Any = nodes.prefixes if reads_prefixes else None
        for processor in processors:
            scores = processor(prefixes, scores)
        if draws is not None:
            # Draws count from the first token of the completions.
            tokens = draws.tokens(scores, nodes.columns - nodes.width, nodes.rows, nodes.of_rows)
        else:
            tokens = scores.argmax(dim=-1)
        if not nodes.extend(tokens, processors):
            return nodes.output()
        scores = nodes.next_logits()


def why_own_loop(
    model: PreTrainedModel, config: GenerationConfig, processors: LogitsProcessorList, inputs: dict[str, Any]
) -> str | None:
    """Return why `generate`, which prepared these arguments, must use its own loop; None if it need not."""
    if model.config.is_encoder_decoder:
        return "the model is an encoder and a decoder"
    return (
        _refused_setting(config)
        or why_not_copied(model, inputs.get(cache_argument(inputs)), config.cache_implementation)
        or _refused_input(model, inputs, processors)
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


def _refused_input(model: PreTrainedModel, inputs: dict[str, Any], processors: LogitsProcessorList) -> str | None:
    kinds = [type(processor).__name__ for processor in processors]
    batch_wise = [kind for kind in kinds if kind not in _ROW_BY_ROW]
    if batch_wise:
        return f"a logits processor keeps the state of a whole batch: {', '.join(batch_wise)}"
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
