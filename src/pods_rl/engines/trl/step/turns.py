"""The turns of a generation, with the policy over the tree of its prefixes or with vLLM."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from .. import compat
from ..batching import Shares
from ..compat import Tokenized, TRLTrainer
from ..config import PODSConfig, group_sizes

# What a row's random draws depend on: seed, step, how many generations the step had before, prompt of the generation
# and rollout of the prompt. They depend neither on its process nor on other rows. Later turns add their number.
Key = tuple[int, ...]


def other_generator(trainer: TRLTrainer) -> str | None:
    """Return what generates, and why, where it is not `prefix_tree.decoding`; otherwise None."""
    args = trainer.args
    if trainer.use_vllm:
        return "vLLM"
    if trainer.use_transformers_continuous_batching:
        return "transformers' continuous batching"
    if not args.prefix_tree:
        return "rows, each with its prompt: prefix_tree is false"
    if trainer._dist.is_zero3 and not args.ds3_gather_for_generation:
        # ZeRO-3 gathers the weights layer by layer, and processes would run different numbers of forward passes.
        return "rows, each with its prompt: ds3_gather_for_generation is false"
    return None


@contextmanager
def over_prefix_tree(trainer: TRLTrainer, keys: Sequence[Key]) -> Iterator[None]:
    """Inside, `generate` of the policy computes each distinct prefix once, and row i draws by `keys[i]`.

    Nothing changes without keys, and with another generator: see `other_generator`.
    """
    args = trainer.args
    if not keys or other_generator(trainer) is not None:
        yield
        return
    # Here, since a trainer that generates with vLLM never needs it.
    from ....prefix_tree.decoding import RowDraws, complete

    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)  # as TRL unwraps it
    generate = model.generate

    def once(input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any) -> Tensor:
        inputs |= {"input_ids": input_ids, "generation_config": generation_config}
        if len(input_ids) != len(keys):  # a user's `_generate` asks for other rows
            return generate(**inputs)
        draws = None
        if generation_config.do_sample:
            # `generation_kwargs` may set another length. A greater one changes no draw.
            length = generation_config.max_new_tokens or generation_config.max_length or args.max_completion_length
            assert length is not None
            draws = RowDraws(keys, length, trainer.accelerator.device, strict=True)
        return complete(generate, inputs, draws)

    with compat.replacing(model, generate=once):
        yield


class Turns:
    """The rows of one `_generate` over its turns: which keys they draw by.

    `keys` are those of the rows of the latest turn; empty once they are not known.
    """

    def __init__(self, keys: list[Key]) -> None:
        self.keys = keys
        self._number = 0
        self._rows: list[list[int]] = []  # of the turn before, its prompts and completions

    def begin(self, prompt_ids: list[list[int]]) -> list[Key]:
        """Return the keys by which the rows of the next turn draw; none if they are not known."""
        if self._number == 0 or not self.keys:
            return self.keys
        remaining: list[Key] = []
        row_before = 0
        for ids in prompt_ids:
            # A row begins with all tokens of its row of the turn before, and the order stays.
            while row_before < len(self._rows) and ids[: len(self._rows[row_before])] != self._rows[row_before]:
                row_before += 1  # it has ended
            if row_before == len(self._rows):
                warnings.warn(
                    "A prompt of a later turn does not begin with the tokens of a row of the turn before. This turn "
                    "and those after it draw without seeds of their own, and not over the tree of prefixes.",
                    UserWarning,
                    stacklevel=2,
                )
                remaining = []
                break
            remaining.append(self.keys[row_before])
            row_before += 1
        self.keys = remaining
        return [(*key, self._number) for key in self.keys]

    def end(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> None:
        """Take what the rows of a turn have generated, by which the next turn finds them again."""
        self._rows = [[*ids, *new] for ids, new in zip(prompt_ids, completion_ids, strict=False)]
        self._number += 1


def tokenize_copies_once(tokenize: Callable[[list[Any]], Tokenized], prompts: list[Any]) -> Tokenized:
    """Return what `tokenize` returns for prompts, with each run of equal prompts tokenized once.

    Prompts with images, and those of which a processor makes more than tokens, are tokenized one by one.

    >>> calls = []
    >>> def tokenize(prompts):
    ...     calls.append(prompts)
    ...     return [[len(prompt)] for prompt in prompts], None, {}
    >>> tokenize_copies_once(tokenize, ["1+2=", "1+2=", "60+60="])
    ([[4], [4], [6]], None, {})
    >>> calls
    [['1+2=', '60+60=']]
    """
    distinct_prompts: list[Any] = []
    distinct_of: list[int] = []  # the distinct prompt of each prompt
    text_before = None
    for prompt in prompts:
        # Two prompts share this text only if the chat template renders both alike.
        try:
            text = prompt if isinstance(prompt, str) else json.dumps(prompt)  # where 1, 1.0 and true differ
        except (TypeError, ValueError, RecursionError):  # such as images in memory
            return tokenize(prompts)
        if text != text_before:
            distinct_prompts.append(prompt)
            text_before = text
        distinct_of.append(len(distinct_prompts) - 1)
    if len(distinct_prompts) == len(prompts):  # TRL's own call, with its own list
        return tokenize(prompts)
    prompt_ids, images, fields = tokenize(distinct_prompts)
    if images is not None or fields:  # some processors return these for all prompts together, not one for each
        return tokenize(prompts)
    return [list(prompt_ids[number]) for number in distinct_of], images, fields


def sequences_at_once(args: PODSConfig) -> int:
    """Return how many rollouts colocated vLLM works on at once: a generation's, or `rollout_batch_size`."""
    assert args.generation_batch_size is not None
    n, m = group_sizes(args)
    prompts = args.num_prompts or args.generation_batch_size // m
    rollouts = Shares(prompts, n, args.world_size).rollouts_each
    return min(rollouts, args.rollout_batch_size or rollouts) * args.vllm_tensor_parallel_size
