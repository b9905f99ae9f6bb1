"""Tools and environments: how far a call may go, and environments that end with their rollouts."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ...errors import UserError
from ...text import plain_text
from .compat import Batch, TRLTrainer

logger = logging.getLogger(__name__)
CLOSE = "close"  # the method that ends an environment; TRL would offer it to the policy as a tool


class Ended:
    """Stands in the place of a kept rollout's environment while TRL builds its batch: nothing is reset again."""

    def reset(self, **_: Any) -> None:
        """Return no observation: the prompt has it."""


class Tools:
    """The tools and environments of a trainer, in training and in evaluation.

    A tool that raises, or runs for longer than `tool_timeout`, gives the policy an error in place of its result, as in
    TRL, and is named once in the log. An environment with a method `close` is closed once its rollout is scored, and
    after an error or an interrupt; TRL makes a new one for the next rollout. Others are used again after a reset.
    """

    def __init__(self, trainer: TRLTrainer) -> None:
        self._trainer = trainer
        self._named: set[tuple[str, str]] = set()
        if trainer.rollout_func is not None:
            trainer.rollout_func = counted(trainer.rollout_func)
        self.carries = bool(
            trainer.tools or trainer.environment_factories or trainer.rollout_func or trainer._is_vlm
        )  # whether kept rows have more than a completion
        if trainer.environment_factories:
            for tools in (trainer.tools, *trainer._env_tools.values()):
                tools[:] = [tool for tool in tools if not _closes(tool)]

    def limit(self) -> None:
        """Put limits on the tools of the rows that TRL has prepared."""
        if not self._trainer.tools:
            return
        args = self._trainer.args
        for plain, asynchronous in zip(self._trainer._sync_tool_dicts, self._trainer._async_tool_dicts, strict=True):
            calls = _Calls(args.max_tool_calls)
            for tools in (plain, asynchronous):
                for name in [name for name, tool in tools.items() if _closes(tool)]:
                    del tools[name]
            plain |= {name: self._limited(name, tool, calls) for name, tool in plain.items()}
            asynchronous |= {name: self._limited_async(name, tool, calls) for name, tool in asynchronous.items()}

    def _limited(self, name: str, tool: Callable[..., Any], calls: _Calls) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            with self._naming(name):
                calls.take(name)
                with time_limit(self._trainer.args.tool_timeout, f"tool {name}"):
                    return _content(tool(**arguments))

        return call

    def _limited_async(self, name: str, tool: Callable[..., Any], calls: _Calls) -> Callable[..., Any]:
        async def finish(coroutine: Any) -> Any:
            seconds = self._trainer.args.tool_timeout
            with self._naming(name):
                try:
                    return _content(await asyncio.wait_for(coroutine, seconds))
                except asyncio.TimeoutError as error:
                    raise _too_long(f"tool {name}", seconds) from error

        def call(**arguments: Any) -> Any:
            with self._naming(name):
                calls.take(name)
                return finish(tool(**arguments))

        return call

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Log the first failure of each kind of a tool; turn what would end the run into a failure."""
        try:
            yield
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            kind = type(error).__name__
            if (name, kind) not in self._named:
                self._named.add((name, kind))
                reason = plain_text(str(error))[:200]
                logger.warning(
                    "tool %s failed: %s: %s. The policy reads the error. Logged once; see pods/tool_failures.",
                    name, kind, reason,
                )  # fmt: skip
            if isinstance(error, Exception):
                raise
            raise RuntimeError(f"{kind}: {error}") from error

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
            try:
                one.close()
            except Exception as error:
                logger.warning("%s.close failed: %s", type(one).__name__, plain_text(str(error)))

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, TRL uses environments; close those in use at the end, and all after an error or an interrupt."""
        try:
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

    def ended(self, rows: Sequence[Batch]) -> dict[str, Any]:
        """Return what stands in for the environments of these rows while TRL builds their batch."""
        if not self._trainer.environment_factories:
            return {}
        names = self._trainer.environment_factories
        pools = {name: [Ended() for _ in rows] for name in names}
        return {"environments": None, "_environment_pool": pools}


class _Calls:
    """The calls of one rollout."""

    def __init__(self, most: int | None) -> None:
        self.most, self.made = most, 0

    def take(self, name: str) -> None:
        """Count a call of a tool; raise RuntimeError if none is left."""
        self.made += 1
        if self.most is not None and self.made > self.most:
            raise RuntimeError(f"no call of {name} is left: a rollout may make {self.most} (max_tool_calls)")


def _closes(tool: Any) -> bool:
    """Return whether a tool is an environment's own `close`."""
    return getattr(tool, "__name__", None) == CLOSE and getattr(tool, "__self__", None) is not None


def _content(result: Any) -> Any:
    """Return a tool's result as TRL would write it; a list that is not of message parts as text."""
    if isinstance(result, list) and all(isinstance(part, Mapping) and "type" in part for part in result):
        return result
    return str(result)


def counted(rollout_func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rollout function whose results are checked: a row for each prompt in everything it returns.

    Raises:
        UserError: when called: a list of another length, a completion without tokens, or a mask that does not fit.
    """

    def call(prompts: list[Any], trainer: Any) -> Any:
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


# -- time ------------------------------------------------------------------------------------------------------------


class _TimeUpError(BaseException):
    """Raised in a call that runs too long; not an Exception, which the call may handle."""


def _too_long(what: str, seconds: float | None) -> TimeoutError:
    return TimeoutError(f"{what} took longer than {seconds:g} s (tool_timeout)")


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """End the work inside after some seconds, wherever Python runs it: on the main thread of a system with timers.

    Elsewhere, and within one long call of compiled code, nothing is limited.

    Raises:
        TimeoutError: it took longer.
    """
    if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TimeUpError

    handler = signal.signal(signal.SIGALRM, stop)
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again each second, if the call holds it up
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _TimeUpError:
        raise _too_long(what, seconds) from None
    finally:
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, every)
