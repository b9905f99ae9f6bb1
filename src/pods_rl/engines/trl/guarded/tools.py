"""Tools and environments with limits; checks of what rollout functions, generators and policies return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ....errors import UserError
from ....sandbox.limits import ToolLimits, close_environment, parsing_anything, tokenizable
from .. import compat
from ..compat import TRLTrainer

CLOSE = "close"  # the method that ends an environment; TRL would offer it to the policy as a tool


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
            trainer.rollout_func = checked_rollouts(trainer.rollout_func)
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

        with compat.replacing(processor, apply_chat_template=rendered), compat.parsing_by(parsing_anything):
            yield

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close every environment at the end of training, however it ends; TRL makes new ones for the next."""
        try:
            yield
        finally:
            pools = self._trainer._environment_pool.values() if self._trainer.environment_factories else ()
            for pool in pools:
                for environment in list(pool):
                    if callable(getattr(type(environment), CLOSE, None)):
                        pool.remove(environment)  # before it is closed, which may raise
                        close_environment(environment)


def _closes(tool: Any) -> bool:
    """Return whether a tool is an environment's own `close`."""
    return getattr(tool, "__name__", None) == CLOSE and getattr(tool, "__self__", None) is not None


def checked_rollouts(rollout_func: Callable[..., Any]) -> Callable[..., Any]:
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
