"""How far the tools of a rollout may go, in training and in evaluation: seconds a call, calls a rollout."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..sandbox.processes import no_copies
from ..text import plain_text

logger = logging.getLogger(__name__)
Tool = Callable[..., Any]


class ToolLimits:
    """Limits on tools: one that raises or takes too long gives the policy an error to read, and is named in the log.

    Args:
        seconds: `tool_timeout`, of one call; None: no limit.
        most: `max_tool_calls`, of one rollout; None: no limit.

    >>> tools = ToolLimits(60, most=1).of_rollout({"double": lambda number: 2 * number})
    >>> tools["double"](number=4)
    '8'
    >>> tools["double"](number=4)
    Traceback (most recent call last):
    RuntimeError: no call of double is left: a rollout may make 1 (max_tool_calls)
    """

    def __init__(self, seconds: float | None = None, most: int | None = None) -> None:
        self._seconds, self._most = seconds, most
        self._named: set[tuple[str, str]] = set()

    def of_rollout(self, tools: Mapping[str, Tool]) -> dict[str, Tool]:
        """Return the tools of one rollout with limits; they count their calls together."""
        calls = _Calls(self._most)
        return {
            name: (self._limited_async if inspect.iscoroutinefunction(tool) else self._limited)(name, tool, calls)
            for name, tool in tools.items()
        }

    def _limited(self, name: str, tool: Callable[..., Any], calls: _Calls) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            with self._naming(name):
                calls.take(name)
                with time_limit(self._seconds, f"tool {name}"), no_copies():
                    return _content(tool(**arguments))

        return call

    def _limited_async(self, name: str, tool: Callable[..., Any], calls: _Calls) -> Callable[..., Any]:
        async def finish(coroutine: Any) -> Any:
            with self._naming(name):
                try:
                    with no_copies():
                        return _content(await asyncio.wait_for(coroutine, self._seconds))
                except TimeoutError as error:
                    raise _too_long(f"tool {name}", self._seconds) from error

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
                reason = plain_text(_said(error))[:200]
                logger.warning(
                    "tool %s failed: %s: %s. The policy reads the error. Logged once; see tools/failure_frequency.",
                    name, kind, reason,
                )  # fmt: skip
            if isinstance(error, Exception) and _readable(error):
                raise
            raise RuntimeError(f"{kind}: {_said(error)}") from error


def close_environment(environment: Any) -> None:
    """Call the method `close` of an environment, if it has one; an error is logged."""
    if callable(close := getattr(environment, "close", None)):
        try:
            close()
        except Exception as error:
            logger.warning("%s.close failed: %s", type(environment).__name__, plain_text(str(error)))


class _Calls:
    """The calls of one rollout."""

    def __init__(self, most: int | None) -> None:
        self.most, self.made = most, 0

    def take(self, name: str) -> None:
        """Count a call of a tool; raise RuntimeError if none is left."""
        self.made += 1
        if self.most is not None and self.made > self.most:
            raise RuntimeError(f"no call of {name} is left: a rollout may make {self.most} (max_tool_calls)")


def _content(result: Any) -> Any:
    """Return a tool's result as TRL would write it; a list that is not of message parts as text.

    Half of a surrogate pair, which a policy can write in arguments, becomes a question mark: tokenizers refuse it.

    >>> _content("\\ud83d!"), _content([{"type": "text", "text": "\\ud83d"}])
    ('?!', [{'type': 'text', 'text': '?'}])
    """
    if isinstance(result, list) and all(isinstance(part, Mapping) and "type" in part for part in result):
        return [
            {key: _text(value) if isinstance(value, str) else value for key, value in part.items()} for part in result
        ]
    return _text(str(result))


def _text(value: str) -> str:
    return value.encode("utf-8", "replace").decode()


def _said(error: BaseException) -> str:
    """Return an exception's message; it may not have one that can be read."""
    try:
        return _text(str(error))
    except Exception as other:
        return f"its message cannot be read ({type(other).__name__})"


def _readable(error: BaseException) -> bool:
    """Return whether TRL can show the message of an exception to the policy."""
    try:
        return _text(str(error)) == str(error)
    except Exception:
        return False


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
