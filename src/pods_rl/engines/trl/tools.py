"""Tools and environments of a trainer: limits on calls, text that can be tokenized, and the end of environments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...errors import UserError
from ...sandbox.limits import ToolLimits, close_environment, tokenizable
from .compat import TRLTrainer, standing_in

CLOSE = "close"  # the method that ends an environment; TRL would offer it to the policy as a tool


class Tools:
    """The tools and environments of a trainer, in training and in evaluation.

    A tool that raises, or runs for longer than `tool_timeout`, gives the policy an error in place of its result, as in
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
        for plain, asynchronous in zip(self._trainer._sync_tool_dicts, self._trainer._async_tool_dicts, strict=True):
            limited = self._limits.of_rollout({**plain, **asynchronous})
            for tools in (plain, asynchronous):
                own = [name for name, tool in tools.items() if not _closes(tool)]
                tools.clear()
                tools |= {name: limited[name] for name in own}

    @contextmanager
    def tokenizable(self) -> Iterator[None]:
        """Inside, the chat template takes any text that environments, tools and the policy's calls of tools contain."""
        processor = self._trainer.processing_class
        render = processor.apply_chat_template

        def rendered(*args: Any, **how: Any) -> Any:
            return render(*tokenizable(list(args)), **tokenizable(how))

        with standing_in(processor, apply_chat_template=rendered):
            yield

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close every environment at the end of training, however it ends; TRL makes new ones for the next."""
        try:
            yield
        finally:
            pools = self._trainer._environment_pool.values() if self._trainer.environment_factories else ()
            for pool in pools:
                for environment in [one for one in pool if callable(getattr(type(one), CLOSE, None))]:
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
