"""The tools of a `verifiers` taskset, called in this process: an environment for each rollout."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, get_type_hints

from ..errors import UserError
from ..rewards.gym import unnumbered
from ..rewards.tasksets import start

Toolsets = Sequence[Any]


def environment_of(name: str, shared: Toolsets, make: Callable[[], Toolsets], task_at: Callable[[int], Any]) -> type:
    """Return the class of a taskset's environments: `reset` sets the toolsets up for a row's task; tools are methods.

    Its attribute `state` is what the task's `setup` and the tools of a rollout share, and the rewards read.

    Args:
        name: of the taskset, for messages.
        shared: toolsets that all rollouts use; they are set up here.
        make: makes the toolsets of one rollout.
        task_at: the task of a row, named by the row's gold answer.

    Raises UserError for toolsets that serve their tools elsewhere, or that give two tools one name.
    """

    class TasksetEnvironment:
        def __init__(self) -> None:
            self.state: Any = None
            self._toolsets: Toolsets = ()

        def reset(self, answer: str, **_: Any) -> None:
            """Start the rollout of a row's task: fresh toolsets, fresh state."""
            task = task_at(unnumbered(answer)[1])
            self.state, own = start(task).state, make()
            for toolset in own:
                _set_up(toolset, self.state, task)
            self._toolsets = (*shared, *own)

    for toolset in shared:
        _set_up(toolset)
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
            if hasattr(TasksetEnvironment, full):
                raise UserError(f"verifiers:{name}: two tools are named {full!r}; rename one")
            setattr(TasksetEnvironment, full, _tool(full, place, method))
    return TasksetEnvironment


def _set_up(toolset: Any, state: Any = None, task: Any = None) -> None:
    async def both() -> None:
        await toolset.setup()
        if task is not None:
            await toolset.setup_task(task)

    _with_state(state, both)


def _tool(name: str, place: int, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of the environment that calls this method of the toolset at a place, described for TRL."""

    def tool(self: Any, **arguments: Any) -> str:
        result = _with_state(self.state, getattr(self._toolsets[place], method.__name__), **arguments)
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


def _with_state(state: Any, function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function, sync or async, that finds this state as its toolset's `state`."""

    async def awaited(result: Any) -> Any:
        return await result

    current = import_module("verifiers.v1.mcp.server")._call_state  # as `ServerBase._with_state` does for one call
    token = current.set(state)
    try:
        result = function(**arguments)
        return asyncio.run(awaited(result)) if inspect.isawaitable(result) else result
    finally:
        current.reset(token)
