"""The tools of a `verifiers` taskset, called in this process: an environment for each rollout."""

from __future__ import annotations

import asyncio
import inspect
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any, get_type_hints

from ..errors import UserError
from ..rewards.gym import unnumbered
from ..rewards.tasksets import start
from .task import NO_TOOLS

Toolsets = Sequence[Any]


def environment_of(name: str, shared: Toolsets, make: Callable[[], Toolsets], task_at: Callable[[int], Any]) -> type:
    """Return the class of a taskset's environments: `reset` sets the toolsets up for a row's task; tools are methods.

    Its attribute `state` is what the task's `setup` and the tools of a rollout share, and the rewards read.
    `close` ends the toolsets of a rollout. The shared ones end with the class, or with the program.

    Args:
        name: of the taskset, for messages.
        shared: toolsets that all rollouts use; they are set up here.
        make: makes the toolsets of one rollout.
        task_at: the task of a row, named by the row's gold answer.

    Raises UserError for toolsets that serve their tools elsewhere, or that give a tool a name that is taken.
    """
    loop = asyncio.new_event_loop()  # what a toolset opens in `setup` belongs to the loop of its calls

    class TasksetEnvironment:
        state: Any = None
        _toolsets: Toolsets = ()
        _session: _Session | None = None

        def reset(self, answer: str, **_: Any) -> None:
            """Start the rollout of a row's task: fresh toolsets, fresh state."""
            self.close()
            task = task_at(unnumbered(answer)[1])
            self.state, own = start(task).state, make()
            with _using(self.state):
                self._session = _Session(loop, own, task)
            self._toolsets = (*shared, *own)

        def close(self) -> None:
            """End the rollout's toolsets, if it has begun."""
            session, self._session = self._session, None
            if session is not None:
                session.close()

    for place, toolset in enumerate((*shared, *make())):
        methods = import_module("verifiers.v1.utils.decorators").discover_decorated(toolset, "tool")
        if getattr(toolset.config, "url", None) or not methods:
            raise UserError(
                f"verifiers:{name}: the toolset {type(toolset).__name__} serves its tools elsewhere, or registers them "
                "itself, which is not supported: expected methods marked @vf.tool"
            )
        for method in methods:
            own_name = getattr(method, "tool_name", None) or method.__name__
            full = f"{toolset.server_name}_{own_name}" if toolset.server_name else own_name
            if full in NO_TOOLS or hasattr(TasksetEnvironment, full):
                raise UserError(f"verifiers:{name}: the name of the tool {full!r} is taken; rename it")
            setattr(TasksetEnvironment, full, _tool(full, place, method, loop))
    weakref.finalize(TasksetEnvironment, _end, loop, _Session(loop, shared))
    return TasksetEnvironment


class _Session:
    """Toolsets that are set up, until `close`: both in one task of a loop, as clients that they open may need.

    Source: `ServerBase._serve` of verifiers, which holds the toolset's `_exit_stack` while it serves.

    Args:
        loop: of the calls.
        toolsets: fresh ones.
        task: of the rollout; None: they are shared.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, toolsets: Toolsets, task: Any = None) -> None:
        self._loop, self._ending = loop, asyncio.Event()
        ready: asyncio.Future[None] = loop.create_future()
        self._held = loop.create_task(self._hold(toolsets, task, ready))
        try:
            loop.run_until_complete(asyncio.wait((ready,)))  # a future that holds an interrupt does not end the loop
            ready.result()
        except BaseException:  # of a setup, or an interrupt: what is set up so far ends
            if not ready.done():
                self._held.cancel()
            with suppress(BaseException):  # it raises the same error again
                loop.run_until_complete(self._held)
            raise

    async def _hold(self, toolsets: Toolsets, task: Any, ready: asyncio.Future[None]) -> None:
        async with AsyncExitStack() as stack:
            try:
                for toolset in toolsets:
                    await stack.enter_async_context(toolset._exit_stack)
                    await toolset.setup()
                    if task is not None:
                        await toolset.setup_task(task)
                ready.set_result(None)
            except BaseException as error:
                ready.set_exception(error)
                raise
            await self._ending.wait()

    def close(self) -> None:
        """Tear the toolsets down, the last one first."""
        self._ending.set()
        self._loop.run_until_complete(self._held)


def _end(loop: asyncio.AbstractEventLoop, shared: _Session) -> None:
    shared.close()
    loop.close()


def _tool(name: str, place: int, method: Callable[..., Any], loop: asyncio.AbstractEventLoop) -> Callable[..., Any]:
    """Return a method of the environment that calls this method of the toolset at a place, described for TRL."""

    def tool(self: Any, **arguments: Any) -> str:
        with _using(self.state):
            result = _call(loop, getattr(self._toolsets[place], method.__name__), arguments)
        return result if isinstance(result, str) else json.dumps(result, default=str)

    hints = get_type_hints(method)
    given = [
        parameter.replace(annotation=hints.get(parameter.name, Any))
        for parameter in inspect.signature(method).parameters.values()
    ]
    tool.__name__ = tool.__qualname__ = name
    tool.__annotations__ = {parameter.name: parameter.annotation for parameter in given}
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    tool.__signature__ = inspect.Signature([itself, *given])  # type: ignore[attr-defined]
    tool.__doc__ = inspect.getdoc(method) or name
    schemas = import_module("transformers.utils.chat_template_utils")
    try:
        schemas.get_json_schema(tool.__get__(object()))
    except schemas.DocstringParsingException:  # the library needs no description of each argument
        about = "\n".join(f"    {parameter.name}: {parameter.name}" for parameter in given)
        tool.__doc__ = f"{tool.__doc__.partition('Args:')[0].strip()}\n\nArgs:\n{about}"
    return tool


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function, sync or async, in a task of the loop; end the task if this call is interrupted."""

    async def call() -> Any:
        result = function(**arguments)
        return await result if inspect.isawaitable(result) else result

    task = loop.create_task(call())
    try:
        return loop.run_until_complete(task)
    except BaseException:
        task.cancel()
        raise


@contextmanager
def _using(state: Any) -> Iterator[None]:
    """Inside, toolsets find this state as their `state`, as `ServerBase._with_state` does for one call."""
    current = import_module("verifiers.v1.mcp.server")._call_state
    token = current.set(state)
    try:
        yield
    finally:
        current.reset(token)
