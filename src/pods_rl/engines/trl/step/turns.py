"""The turns of a generation, with the policy over the tree of its prefixes or with vLLM, and the tools between them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from transformers import GenerationConfig

from ....distributed.processes import version
from ....errors import UserError
from ....sandbox.limits import ToolLimits, close_environment, parsing_anything, tokenizable
from .. import compat
from ..batching import Shares
from ..compat import Completions, Tokenized, TRLTrainer
from ..config import PODSConfig

CLOSE = "close"  # the method that ends an environment; TRL would offer it to the policy as a tool


class RolloutKey(NamedTuple):
    """What a rollout's random draws depend on: not on its process, nor on the rows that are generated with it."""

    seed: int
    step: int
    generation: int  # of the step, from 0
    prompt: int  # of the generation
    rollout: int  # of the prompt

    def of_turn(self, turn: int) -> tuple[int, ...]:
        """Return the numbers that seed a turn, from 0: those of the first turn are the key itself."""
        return (*self, turn) if turn else tuple(self)


@contextmanager
def over_prefix_tree(trainer: TRLTrainer, keys: Sequence[tuple[int, ...]]) -> Iterator[None]:
    """Inside, `generate` of the policy computes each distinct prefix once, and row i draws by `keys[i]`.

    Nothing changes without keys, with another generator, with `prefix_tree` off, and where ZeRO-3 gathers
    the weights layer by layer: processes would run different numbers of forward passes.
    """
    args = trainer.args
    by_another_generator = trainer.use_vllm or trainer.use_transformers_continuous_batching
    by_layer = trainer._dist.is_zero3 and not args.ds3_gather_for_generation
    if not keys or not args.prefix_tree or by_another_generator or by_layer:
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
            length = generation_config.max_new_tokens or generation_config.max_length or args.max_completion_length
            assert length is not None
            draws = RowDraws(keys, length, trainer.accelerator.device, strict=True)
        return complete(generate, inputs, draws)

    with compat.generating_by(model, once):
        yield


class Turns:
    """The turns of one `_generate`: each in parts of `rollout_batch_size` rows, every row with draws of its own.

    Args:
        trainer: the settings.
        keys: of the rows of the first turn.

    Attributes:
        keys: of the rows of the latest turn; empty once they are not known.
    """

    def __init__(self, trainer: TRLTrainer, keys: list[RolloutKey]) -> None:
        self._trainer = trainer
        self.keys = keys
        self._number = 0
        self._rows: list[list[int]] = []  # of the turn before, its prompts and completions

    def tokenize(self, tokenize: Callable[[list[Any]], Tokenized], prompts: list[Any]) -> Tokenized:
        """Return TRL's tokens of the prompts of the first turn; the copies of a prompt are tokenized once.

        With `exact_trl`, TRL tokenizes each. So it does with environments, where it reads the tools of each prompt
        from a list that has an entry for each.

        Args:
            tokenize: TRL's method.
            prompts: the prompt of each rollout; those of a group are next to each other.
        """
        trainer = self._trainer
        if trainer.args.exact_trl or trainer.environment_factories is not None:
            return tokenize(prompts)
        return tokenize_copies_once(tokenize, prompts)

    def generate(
        self, prompt_ids: list[list[int]], images: bool, sample: Callable[[slice, list[tuple[int, ...]]], Completions]
    ) -> Completions:
        """Call `sample` for the rows of a turn, part by part; for all at once if it is vLLM.

        Raises:
            UserError: rows with `images` would be split.
        """
        if self._number > 0:
            self.keys = self._remaining_keys(prompt_ids)
        keys = [key.of_turn(self._number) for key in self.keys]
        count = len(prompt_ids)
        size = self._trainer.args.rollout_batch_size or count
        if self._trainer.use_vllm or size >= count:  # vLLM has a limit of its own
            completion_ids, logprobs = sample(slice(None), keys)
        elif images:
            raise UserError(
                f"rollout_batch_size is {size}, and {count} rows with images cannot be split. "
                "Set rollout_batch_size: null, and fewer rollouts if memory runs out."
            )
        else:
            completion_ids = []
            for start in range(0, count, size):
                part = slice(start, start + size)
                part_ids, _ = sample(part, keys[part])
                completion_ids.extend(part_ids)
            logprobs = None  # generators that work in parts return none
        self._rows = [[*ids, *new] for ids, new in zip(prompt_ids, completion_ids, strict=True)]
        self._number += 1
        return completion_ids, logprobs

    def _remaining_keys(self, prompt_ids: list[list[int]]) -> list[RolloutKey]:
        """Return the keys of the rows of a later turn; none if they are not known.

        Such a row begins with all tokens of its row of the turn before, and the order stays. Some rows have ended in
        between.
        """
        if not self.keys:
            return []
        remaining: list[RolloutKey] = []
        row_before = 0
        for ids in prompt_ids:
            while row_before < len(self._rows) and not _begins_with(ids, self._rows[row_before]):
                row_before += 1  # it has ended
            if row_before == len(self._rows):
                warnings.warn(
                    "A prompt of a later turn does not begin with the tokens of a row of the turn before. This turn "
                    "and those after it draw without seeds of their own, and not over the tree of prefixes.",
                    UserWarning,
                    stacklevel=3,
                )
                return []
            remaining.append(self.keys[row_before])
            row_before += 1
        return remaining


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
        text = _prompt_text(prompt)
        if text is None:
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


def _prompt_text(prompt: Any) -> str | None:
    """Return a text that two prompts share only if the chat template renders both alike; None if there is none.

    Messages are compared as JSON, where 1, 1.0 and true differ. Images in memory have no JSON.
    """
    if isinstance(prompt, str):
        return prompt
    try:
        return json.dumps(prompt)
    except (TypeError, ValueError, RecursionError):
        return None


def _begins_with(ids: list[int], beginning: list[int]) -> bool:
    return ids[: len(beginning)] == beginning


def sequences_at_once(args: PODSConfig) -> int:
    """Return how many rollouts colocated vLLM works on at once: a generation's, or `rollout_batch_size`."""
    assert args.generation_batch_size is not None
    m = args.num_generations
    n = args.num_rollouts or m
    rollouts = Shares(args.generation_batch_size // m, n, m, args.world_size).rollouts_each
    return min(rollouts, args.rollout_batch_size or rollouts) * args.vllm_tensor_parallel_size


def check_completions(prompts: int, completion_ids: Sequence[Sequence[int]]) -> None:
    """Raise RuntimeError unless there is one completion for each prompt, with a token at least.

    Continuous batching logs a request that failed and skips it; those after it would then be scored against the answers
    of other prompts.
    """
    empty = sum(len(ids) == 0 for ids in completion_ids)
    if len(completion_ids) != prompts or empty:
        raise RuntimeError(
            f"the generator returned {len(completion_ids)} completions for {prompts} prompts, {empty} of them without "
            "a token, so they cannot be matched to prompts. The generator's log above says why; if it ran out of "
            "memory, set a smaller rollout_batch_size."
        )


def describe_vllm(trainer: TRLTrainer) -> dict[str, dict[str, str | None]]:
    """Return vLLM's version and, of a colocated engine, the dtype it computes in: by default not that of training."""
    if not trainer.use_vllm:
        return {}
    description = {"version": version("vllm")}
    engine = getattr(trainer.vllm_generation, "llm", None)  # a server does not report its dtype
    if engine:
        description["dtype"] = str(engine.llm_engine.model_config.dtype)
    return {"vllm": description}


# -- tools and environments --------------------------------------------------------------------------------------------


class Tools:
    """The tools and environments of a trainer, in training and in evaluation.

    A tool that raises, or runs for longer than `tool_timeout`, gives the policy an error instead of its result, as in
    TRL, and is named once in the log. TRL resets environments and uses them again; those with a method `close` are
    closed when training ends, also by an error or an interrupt.
    """

    def __init__(self, trainer: TRLTrainer) -> None:
        self._trainer = trainer
        self._limits = ToolLimits(trainer.args.tool_timeout)
        if trainer.rollout_func is not None:
            trainer.rollout_func = counted(trainer.rollout_func)
        if trainer.environment_factories:
            for tools in (trainer.tools, *trainer._env_tools.values()):
                tools[:] = [tool for tool in tools if not _closes(tool)]

    def limit(self) -> None:
        """Put limits on the tools of the rows that TRL has prepared."""
        if not self._trainer.tools:
            return
        # In place, since TRL finds a row's tools in these dictionaries.
        for plain, asynchronous in zip(self._trainer._sync_tool_dicts, self._trainer._async_tool_dicts, strict=True):
            limited = self._limits.of_rollout({**plain, **asynchronous})
            for tools in (plain, asynchronous):
                names = [name for name, tool in tools.items() if not _closes(tool)]
                tools.clear()
                tools |= {name: limited[name] for name in names}

    @contextmanager
    def reading_anything(self) -> Iterator[None]:
        """Inside, the parser of turns and the chat template take any text of the policy, environments and tools."""
        processor = self._trainer.processing_class
        render = processor.apply_chat_template

        def rendered(*args: Any, **kwargs: Any) -> Any:
            return render(*tokenizable(list(args)), **tokenizable(kwargs))

        with compat.rendering_by(processor, rendered), compat.parsing_by(parsing_anything):
            yield

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close every environment at the end of training, however it ends; TRL makes new ones for the next."""
        try:
            yield
        finally:
            if self._trainer.environment_factories:
                for pool in self._trainer._environment_pool.values():
                    _close_all(pool)


def _close_all(pool: list[Any]) -> None:
    """Close the environments of a pool that have a method `close`, and take each out before it is closed."""
    for environment in list(pool):
        if callable(getattr(type(environment), CLOSE, None)):
            pool.remove(environment)
            close_environment(environment)


def _closes(tool: Any) -> bool:
    """Return whether a tool is an environment's own `close`."""
    return getattr(tool, "__name__", None) == CLOSE and getattr(tool, "__self__", None) is not None


def counted(rollout_func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rollout function that raises UserError unless all that it returns has a row for each prompt.

    TRL would train the wrong pairs.
    """

    def call(prompts: list[Any], trainer: Any) -> Any:
        output = rollout_func(prompts, trainer)
        for name, values in output.items():
            if isinstance(values, Sequence) and not isinstance(values, str) and len(values) != len(prompts):
                raise UserError(
                    f"rollout_func returned {len(values)} {name} for {len(prompts)} prompts: return one for each, in "
                    "their order (PODS passes num_rollouts copies of each prompt)"
                )
        return output

    return call
