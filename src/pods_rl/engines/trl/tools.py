"""Tools and environments of a trainer: limits on calls, and environments that end with their rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ...errors import UserError
from ...rollouts.tools import ToolLimits, close_environment, tokenizable, without_copies
from ...sandbox.worker import no_copies
from .compat import TRLTrainer, standing_in

CLOSE = "close"  # the method that ends an environment; TRL would offer it to the policy as a tool


class Tools:
    """The tools and environments of a trainer, in training and in evaluation.

    A tool that raises, or runs for longer than `tool_timeout`, gives the policy an error in place of its result, as in
    TRL, and is named once in the log. An environment with a method `close` is closed once its rollout is scored, and
    after an error or an interrupt; TRL makes a new one for the next rollout. Others are used again after a reset.
    """

    def __init__(self, trainer: TRLTrainer) -> None:
        self._trainer = trainer
        self._limits = ToolLimits(trainer.args.tool_timeout)
        if trainer.rollout_func is not None:
            trainer.rollout_func = counted(trainer.rollout_func)
        if trainer.environment_factories:
            factories = trainer.environment_factories.items()
            trainer.environment_factories = {name: _with_safe_reset(factory) for name, factory in factories}
            for pool in trainer._environment_pool.values():
                pool[:] = map(_safe_reset, pool)  # TRL has made one of each
            for tools in (trainer.tools, *trainer._env_tools.values()):
                tools[:] = [tool for tool in tools if not _closes(tool)]

    def limit(self) -> None:
        """Put limits on the tools of the rows that TRL has prepared."""
        if not self._trainer.tools:
            return
        for plain, asynchronous in zip(self._trainer._sync_tool_dicts, self._trainer._async_tool_dicts, strict=True):
            for tools in (plain, asynchronous):
                for name in [name for name, tool in tools.items() if _closes(tool)]:
                    del tools[name]
            limited = self._limits.of_rollout({**plain, **asynchronous})
            for tools in (plain, asynchronous):
                tools |= {name: limited[name] for name in tools}

    # -- environments ------------------------------------------------------------------------------------------------

    def close(self, used: Sequence[Any] | None) -> None:
        """Close these environments if they can be and are open, and take them out of TRL's pool."""
        asked, closing = {id(one) for one in used or () if callable(getattr(type(one), CLOSE, None))}, []
        if not asked:
            return
        for pool in self._trainer._environment_pool.values():
            closing += [one for one in pool if id(one) in asked]
            pool[:] = [one for one in pool if id(one) not in asked]
        for one in closing:
            close_environment(one)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, TRL uses environments; close those in use at the end, and all after an error or an interrupt.

        TRL tokenizes what environments, tools and the policy's calls of tools say through the chat template.
        """
        processor = self._trainer.processing_class
        render = processor.apply_chat_template

        def rendered(*args: Any, **how: Any) -> Any:
            return render(*tokenizable(list(args)), **tokenizable(how))

        try:
            with standing_in(processor, apply_chat_template=rendered):
                yield
        except BaseException:
            self.close_all()
            raise
        self.close(self._trainer.environments)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close every environment at the end of training, however it ends."""
        try:
            yield
        finally:
            self.close_all()

    def close_all(self) -> None:
        """Close every environment that was made."""
        if self._trainer.environment_factories:
            self.close([one for pool in self._trainer._environment_pool.values() for one in pool])


def _closes(tool: Any) -> bool:
    """Return whether a tool is an environment's own `close`."""
    return getattr(tool, "__name__", None) == CLOSE and getattr(tool, "__self__", None) is not None


def _with_safe_reset(factory: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: _safe_reset(factory())


def _safe_reset(environment: Any) -> Any:
    """Return an environment whose `reset` may fork, and may return any text."""
    environment.reset = without_copies(environment.reset)
    return environment


def counted(rollout_func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rollout function whose results are checked: a row for each prompt in everything it returns.

    Raises:
        UserError: when called: a list of another length, a completion without tokens, or a mask that does not fit.
    """

    def call(prompts: list[Any], trainer: Any) -> Any:
        with no_copies():
            output = rollout_func(prompts, trainer)
        if not isinstance(output, Mapping):
            raise UserError(f"rollout_func must return a dictionary, and returned {type(output).__name__}")
        for name, values in output.items():
            if isinstance(values, Sequence) and not isinstance(values, str) and len(values) != len(prompts):
                raise UserError(
                    f"rollout_func returned {len(values)} {name} for {len(prompts)} prompts: return one for each, in "
                    "their order (PODS asks for num_rollouts of each prompt)"
                )
        for row, ids in enumerate(output.get("completion_ids", ())):
            if len(ids) == 0:
                raise UserError(f"rollout_func returned no tokens in row {row} of completion_ids: return one at least")
            for name in ("env_mask", "logprobs"):
                values = output.get(name)
                if values is not None and len(values[row]) != len(ids):
                    raise UserError(
                        f"rollout_func returned {len(values[row])} values in row {row} of {name}, and {len(ids)} "
                        "tokens in completion_ids: return one value for each token"
                    )
        return output

    return call
