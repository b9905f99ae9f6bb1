"""The rewards of a `verifiers` taskset, as the work of processes that are killed when they hang."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from ..sandbox.pool import Work

Chat = Sequence[Mapping[str, Any]]  # messages with role and content, as TRL's


def start(task: Any) -> Any:
    """Return the empty trace of a rollout of a task, after the task's own `setup`."""
    vf = _vf()
    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    state = import_module("verifiers.v1.state").state_cls(type(task))()
    trace = vf.Trace(task=about, state=state, agent=vf.AgentInfo(config=vf.AgentConfig()))
    run(task, "setup", trace)
    return trace


def run(task: Any, hook: str, trace: Any) -> None:
    """Call a task's own `setup` or `finalize`, if it has one."""
    if getattr(type(task), hook) is not getattr(_vf().Task, hook):
        asyncio.run(getattr(task, hook)(trace))


def needs_runtime(function: Callable[..., Any]) -> bool:
    """Return whether a hook must be given the runtime, the box in which an agent's program runs.

    >>> needs_runtime(lambda trace, runtime: 0), needs_runtime(lambda trace, runtime=None: 0)
    (True, False)
    """
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def scoring(given: str) -> Work:
    """Return the work of a process: score a completion by the rewards of its task, given as JSON of the task's data.

    A completion is text, or, of a taskset with tools, JSON of its `messages` and of the `state` that its tools left.
    The score is the taskset's: the sum of its rewards, each with its weight.

    Args:
        given: JSON of the taskset's name and options, and of whether it has tools.
    """
    name, options, has_tools = json.loads(given)
    config, kind = _vf().taskset_config_type(name).model_validate({**options, "id": name}).task, _vf().task_type(name)

    def mark(pair: tuple[str, str]) -> float:
        said = json.loads(pair[0]) if has_tools else {"messages": [{"role": "assistant", "content": pair[0]}]}
        task = kind(kind.data_type().model_validate_json(pair[1]), config)
        trace = start(task)
        if said.get("state") is not None:
            trace.state = type(trace.state).model_validate(said["state"])
        record(trace, said["messages"])
        run(task, "finalize", trace)
        asyncio.run(task.score(trace))
        return float(trace.reward)

    return Work(mark)


def record(trace: Any, messages: Chat) -> None:
    """Append the task's prompt and a rollout's messages to a trace, as if its model had been called."""
    vf, data = _vf(), trace.task.data
    asked = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
    if data.system_prompt is not None:
        asked.insert(0, vf.SystemMessage(content=data.system_prompt))
    open_calls: list[str] = []
    for message in [*asked, *messages]:
        sampled = isinstance(message, Mapping) and message["role"] == "assistant"
        if isinstance(message, Mapping):
            message = _message(message, open_calls, f"call_{len(trace.nodes)}")
        parent = len(trace.nodes) - 1 if trace.nodes else None
        trace.nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))
    trace.ok = True
    trace.stop("agent_completed")


def _message(message: Mapping[str, Any], open_calls: list[str], name: str) -> Any:
    """Return a message in the library's type. Results answer the calls before them, in order."""
    vf, content = _vf(), message.get("content") or ""
    if message["role"] == "tool":
        call = open_calls.pop(0) if open_calls else name
        return vf.ToolMessage(tool_call_id=call, content=str(content), name=message.get("name"))
    calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        function, identity = call.get("function", call), f"{name}_{number}"
        arguments = function.get("arguments", {})
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(vf.ToolCall(id=identity, name=str(function.get("name")), arguments=arguments))
    open_calls[:] = [call.id for call in calls]
    reasoning = message.get("reasoning_content")
    return vf.AssistantMessage(content=str(content), reasoning_content=reasoning, tool_calls=calls or None)


def _vf() -> Any:
    return import_module("verifiers.v1")
