"""Calls of tools and environments, in training and in evaluation: their limits, and text that can be tokenized."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

from ..text import change_text, depth, plain_text
from .worker import no_copies

logger = logging.getLogger(__name__)
Tool = Callable[..., Any]
MOST_LEVELS = 64  # of lists and objects in a message of a policy


class ToolLimits:
    """Limits on tools: one that raises or takes too long gives the policy an error to read, and is named in the log.

    Args:
        seconds: `tool_timeout`, of one call. If None, no limit.

    >>> tools = ToolLimits(60).of_rollout({"double": lambda number: 2 * number})
    >>> tools["double"](number=4)
    '8'
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._named: set[tuple[str, str]] = set()

    def of_rollout(self, tools: Mapping[str, Tool]) -> dict[str, Tool]:
        """Return the tools of one rollout with limits."""
        limited = {}
        for name, tool in tools.items():
            limit = self._limited_async if inspect.iscoroutinefunction(tool) else self._limited
            limited[name] = limit(name, tool)
        return limited

    def _limited(self, name: str, tool: Tool) -> Tool:
        def call(**arguments: Any) -> Any:
            with self._naming(name), time_limit(self._seconds, f"tool {name}"), no_copies():
                return _content(tool(**arguments))

        return call

    def _limited_async(self, name: str, tool: Tool) -> Tool:
        async def finish(coroutine: Any) -> Any:
            with self._naming(name):
                try:
                    with no_copies():
                        return _content(await asyncio.wait_for(coroutine, self._seconds))
                except TimeoutError as error:
                    raise _too_long(f"tool {name}", self._seconds) from error

        def call(**arguments: Any) -> Any:
            with self._naming(name):
                return finish(tool(**arguments))

        return call

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Log the first failure of each kind of a tool; turn what would end the run into a failure."""
        try:
            yield
        except (KeyboardInterrupt, GeneratorExit):  # Ctrl-C, or a coroutine that is closed: not the tool's failure
            raise
        except BaseException as error:
            kind = type(error).__name__
            message, is_readable = _message_of(error)
            if (name, kind) not in self._named:
                self._named.add((name, kind))
                logger.warning(
                    "tool %s failed: %s: %s. The policy reads the error. Logged once; see tools/failure_frequency.",
                    name, kind, plain_text(message)[:200],
                )  # fmt: skip
            if isinstance(error, Exception) and is_readable:
                raise
            raise RuntimeError(f"{kind}: {message}") from error


def without_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the user's whose forked children end when they leave it; what it returns can be tokenized.

    >>> without_copies(lambda start: f"{start} \\ud83d")(start=1)
    '1 ?'
    """

    @wraps(function)
    def call(*args: Any, **arguments: Any) -> Any:
        with no_copies():
            return tokenizable(function(*args, **arguments))

    return call


def parsing_anything(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return TRL's `parse_response` for any text of a policy: what cannot be parsed becomes a message of plain text.

    So do arguments of tools that are nested more than `MOST_LEVELS` deep, on which copies and JSON fail later. TRL
    itself expects a ValueError or a TypeError, and a RecursionError ends the run.

    Args:
        parse: takes a tokenizer, tokens, and more.
    """

    @wraps(parse)
    def call(tokenizer: Any, ids: Any, *args: Any, **options: Any) -> Any:
        try:
            message = parse(tokenizer, ids, *args, **options)
            is_readable = depth(message) <= MOST_LEVELS
        except Exception:  # of a parser, for text that it does not expect
            is_readable = False
        if is_readable:
            return message
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}

    return call


def close_environment(environment: Any) -> None:
    """Call the method `close` of an environment, if it has one; an error is logged."""
    close = getattr(environment, "close", None)
    if not callable(close):
        return
    try:
        without_copies(close)()
    except (Exception, SystemExit) as error:
        message, _ = _message_of(error)
        logger.warning("%s.close failed: %s", type(environment).__name__, plain_text(message))


def tokenizable(value: Any) -> Any:
    """Return text, or messages with text, that a tokenizer accepts: half of a surrogate pair becomes a question mark.

    A policy can write one as an argument of a tool, and a tool or an environment can return one.
    """
    return change_text(value, lambda text: text.encode("utf-8", "replace").decode())


def _content(result: Any) -> Any:
    """Return a tool's result as TRL would write it: a list of message parts as it is, anything else as text."""
    if isinstance(result, list) and all(isinstance(part, Mapping) and "type" in part for part in result):
        return tokenizable(result)
    return tokenizable(str(result))


def _message_of(error: BaseException) -> tuple[str, bool]:
    """Return an exception's message, and whether TRL can show it to the policy as it is."""
    try:
        text = str(error)
        readable_text = tokenizable(text)
    except Exception as error_of_message:
        return f"its message cannot be read ({type(error_of_message).__name__})", False
    return readable_text, readable_text == text


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
    has_timer = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if seconds is None or not has_timer:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TimeUpError

    handler = signal.signal(signal.SIGALRM, stop)
    # It fires again each second, since code inside may catch the first exception. Returns the user's own timer.
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _TimeUpError:
        raise _too_long(what, seconds) from None
    finally:
        # An alarm may have come just before the timer was stopped above. The next one would go to the user's handler.
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, remaining, interval)
