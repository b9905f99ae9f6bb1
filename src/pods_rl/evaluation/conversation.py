"""Completions that are conversations: the policy calls tools, reads their results, and goes on to its last turn.

The turns are those of TRL's tool loop: results are appended as tokens and nothing is tokenized again; a result that
does not fit into `max_completion_length` ends the conversation before its call is answered.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trl.chat_template_utils import parse_response

from ..policies.loading import encode, render
from ..rollouts.tools import Tool, ToolLimits, close_environment
from ..tasks import Task, conversation_text
from ..tasks.task import ENVIRONMENT, Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .sampling import RowsDone, Sampler, Sampling

Wait = Callable[[Coroutine[Any, Any, Any]], Any]  # runs a coroutine and returns its result


@dataclass
class Conversation:
    """A completion in the making, and at the end.

    Args:
        row: seeds its draws.
        prompt: the text that the policy continues.
        prompt_ids: its tokens.
        tools: those of the task and of its environment.
        limited: the same by name, with limits.
        messages: of all turns, tool results among them.
        ids: tokens of all turns.
        tokens: how many of them are the policy's.
        ended: whether the last turn has an end token.
        reward: what its environment gave, if that grades the task.
    """

    row: int
    prompt: str
    prompt_ids: list[int]
    tools: list[Tool]
    limited: dict[str, Tool]
    messages: Messages = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    tokens: int = 0
    ended: bool = False
    reward: float | None = None

    def to_json(self) -> str:
        """Return the messages as JSON."""
        return json.dumps(self.messages, ensure_ascii=False, default=str)


def converse(
    sampler: Sampler,
    task: Task,
    questions: Sequence[Mapping[str, Any]],
    rows: Sequence[int],
    how: Sampling,
    options: Mapping[str, Any],
    turns: int | None,
    limits: ToolLimits,
    done: RowsDone,
    loop: asyncio.AbstractEventLoop | None = None,
) -> list[Conversation]:
    """Continue each prompt of a task with tools to the end of its conversation, in order, `batch_size` at a time.

    Args:
        sampler: the policy.
        task: its tools and environments; one environment a conversation, closed at its end.
        questions: rows of the data set; `reset` of an environment takes their columns.
        rows: seed the draws.
        how: `max_completion_length` counts the tokens of all turns and results.
        options: arguments of the chat template (`tool_options`).
        turns: most turns with tool calls that are answered; None: any number.
        limits: on the calls of tools.
        done: called with the number of finished conversations.
        loop: an event loop that another thread runs, for tools and rewards that are coroutines: they may hold
            connections that are bound to it. None: a new loop, in this thread.
    """
    found: list[Conversation] = []
    idle: list[Any] = []  # environments that can start again
    with _waiting(loop) as wait:
        for start in range(0, len(rows), how.batch_size):
            part = slice(start, start + how.batch_size)
            with _environments(task, len(rows[part]), idle) as environments:
                batch = [
                    _begin(sampler.tokenizer, task, *given, options, limits)
                    for given in zip(questions[part], rows[part], environments, strict=True)
                ]
                _take_turns(sampler, batch, how, options, turns, wait)
                if task.answer == ENVIRONMENT:
                    for conversation, environment in zip(batch, environments, strict=True):
                        reward = environment.get_reward()
                        conversation.reward = wait(_result(reward)) if inspect.isawaitable(reward) else reward
                elif task.graded_in_conversation:
                    pairs = zip(batch, environments, strict=True)
                    texts = [conversation_text(talk.messages, environment) for talk, environment in pairs]
                    marks = task.scores(task.answer, texts, [question["answer"] for question in questions[part]])
                    for conversation, mark in zip(batch, marks, strict=True):
                        conversation.reward = mark
            found += batch
            done(len(found), len(rows))
    return found


@contextmanager
def _waiting(loop: asyncio.AbstractEventLoop | None) -> Iterator[Wait]:
    """Yield a function that runs a coroutine and returns its result: in another thread's loop or a new one."""
    if loop is not None:
        yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result()
        return
    own = asyncio.new_event_loop()
    try:
        yield own.run_until_complete
    finally:
        own.close()


@contextmanager
def _environments(task: Task, count: int, idle: list[Any]) -> Iterator[list[Any]]:
    """Yield an environment for each conversation, None without; close them at the end and after an error.

    Those that cannot be closed come from the list of idle ones, and go back to it.
    """
    used: list[Any] = []
    try:
        while len(used) < count:
            used.append(idle.pop() if idle else task.environment_factory and task.environment_factory())
        yield used
    finally:
        for environment in used:
            if callable(getattr(environment, "close", None)):
                close_environment(environment)
            else:
                idle.append(environment)


def _begin(
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    question: Mapping[str, Any],
    row: int,
    environment: Any,
    options: Mapping[str, Any],
    limits: ToolLimits,
) -> Conversation:
    prompt = question["prompt"]
    said = environment.reset(**question) if environment is not None else None
    if said is not None:  # what it observes follows the prompt
        prompt = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + said}]
    text = render(tokenizer, prompt, **options)
    tools = task.tools_of(environment)
    limited = limits.of_rollout({tool.__name__: tool for tool in tools})
    return Conversation(row, text, encode(tokenizer, prompt, text), tools, limited)


def _take_turns(
    sampler: Sampler,
    batch: Sequence[Conversation],
    how: Sampling,
    options: Mapping[str, Any],
    turns: int | None,
    wait: Wait,
) -> None:
    """Let the policy and the tools take turns until no call is left, or no room."""
    turn, talking = 0, list(batch)
    while talking:
        # a turn has draws of its own
        keys = [conversation.row + (turn << 32) for conversation in talking]
        most = max(how.max_completion_length - len(conversation.ids) for conversation in talking)
        contexts = [conversation.prompt_ids + conversation.ids for conversation in talking]
        completions = sampler.sample(contexts, keys, replace(how, max_completion_length=most), lambda *_: None)
        for conversation, context, completion in zip(talking, contexts, completions, strict=True):
            own = list(completion.ids)[: how.max_completion_length - len(conversation.ids)]
            conversation.ids += own
            conversation.tokens += len(own)
            conversation.ended = completion.ended and len(own) == len(completion.ids)
            said = parse_response(sampler.tokenizer, own, prefix=context, tools=conversation.tools)
            conversation.messages.append(said)
        talking = [one for one in talking if one.messages[-1].get("tool_calls")] if turn != turns else []
        turn += 1
        results = [_results(conversation, wait) for conversation in talking]
        suffixes = [_suffix(sampler.tokenizer, messages, options) for messages in results]
        fitting = []
        for conversation, messages, suffix in zip(talking, results, suffixes, strict=True):
            room = how.max_completion_length - len(conversation.ids) - len(suffix)
            if room >= 0:  # else the call stays without an answer
                conversation.messages += messages
                conversation.ids += suffix
                conversation.ended = False
            if room > 0:
                fitting.append(conversation)
        talking = fitting


def _results(conversation: Conversation, wait: Wait) -> Messages:
    """Call the tools of the latest turn; what one raises is the result that the policy reads.

    Coroutines run together, and their results follow the others, as in TRL.
    """
    ready: list[tuple[str, Any]] = []
    waiting: list[tuple[str, Awaitable[Any]]] = []
    for call in conversation.messages[-1]["tool_calls"]:
        function = call.get("function") or {}
        name = str(function.get("name"))
        try:
            if name not in conversation.limited:
                raise ValueError(f"Tool {name} not found.")
            result = conversation.limited[name](**function["arguments"])
        except Exception as error:
            result = _named(error)
        (waiting if inspect.isawaitable(result) else ready).append((name, result))
    if waiting:
        names, coroutines = zip(*waiting, strict=True)
        results = wait(_gather(coroutines))
        ready += zip(names, [_named(x) if isinstance(x, Exception) else x for x in results], strict=True)
    return [{"role": "tool", "name": name, "content": result} for name, result in ready]


async def _gather(coroutines: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*coroutines, return_exceptions=True)


async def _result(waiting: Awaitable[Any]) -> Any:
    return await waiting


def _named(error: Exception) -> str:
    """Return what the policy reads of a tool that failed, as TRL writes it."""
    return str({"error": str(error)})


def _suffix(tokenizer: PreTrainedTokenizerBase, results: Messages, options: Mapping[str, Any]) -> list[int]:
    """Return the tokens of tool results after a turn, up to the start of the next turn.

    Templates write a line break or nothing after the end token, so the results begin right behind it.
    """
    given = {name: value for name, value in options.items() if name != "tools"}
    call = {"type": "function", "function": {"name": results[0]["name"], "arguments": {}}}
    before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    head, whole = (
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=messages is not before, tokenize=True, return_dict=False, **given
        )
        for messages in (before, [*before, *results])
    )
    ends = [place for place, token in enumerate(head, start=1) if token == tokenizer.eos_token_id]
    return list(whole[ends[-1] if ends else len(head) :])
