"""Completions that are conversations: the policy calls tools and reads their results until its last turn.

The turns are those of TRL's tool loop: results are appended as tokens and nothing is tokenized again. A result that
does not fit into `max_completion_length` ends the conversation, and its call has no answer.
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
from ..rollouts.tools import Tool, ToolLimits, close_environment, tokenizable, without_copies
from ..tasks import Task
from ..tasks.task import ENVIRONMENT, Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .sampling import RowsDone, Sampler, Sampling

Wait = Callable[[Coroutine[Any, Any, Any]], Any]  # runs a coroutine and returns its result


@dataclass(frozen=True)
class Talking:
    """How conversations run.

    Args:
        turns: the most turns with tool calls that are answered. None: no limit.
        limits: on the calls of tools.
        loop: an event loop that another thread runs, for tools and rewards that are coroutines: they may hold
            connections that are bound to it. None: a new loop in this thread.
    """

    turns: int | None = None
    limits: ToolLimits = field(default_factory=ToolLimits)
    loop: asyncio.AbstractEventLoop | None = None


@dataclass
class Conversation:
    """A completion with its tool calls and their results, complete or not.

    Args:
        row: seeds its draws.
        prompt: the text that the policy continues.
        prompt_ids: its tokens.
        tools: those of the task and of its environment.
        limited: the same by name, with limits.
        messages: of all turns, with tool results.
        ids: tokens of all turns.
        tokens: the number of them that the policy generated.
        ended: whether the last turn has an end token.
        reward: the environment's, if it grades the task.
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
    talking: Talking,
    done: RowsDone,
) -> list[Conversation]:
    """Continue each prompt of a task with tools to the end of its conversation, `batch_size` at a time.

    Each conversation of a batch has its own environment. As in TRL, the next batch resets the same environments.

    Args:
        sampler: the policy.
        task: its tools and environments.
        questions: rows of the data set; `reset` of an environment takes their columns.
        rows: seed the draws.
        how: `max_completion_length` counts the tokens of all turns and results.
        options: arguments of the chat template (`tool_options`).
        talking: limits and the event loop.
        done: called with the number of finished conversations.
    """
    found: list[Conversation] = []
    with _waiting(talking.loop) as wait, _environments(task, min(how.batch_size, len(rows))) as environments:
        for start in range(0, len(rows), how.batch_size):
            part = slice(start, start + how.batch_size)
            batch = [
                _begin(sampler.tokenizer, task, *given, options, talking.limits)
                for given in zip(questions[part], rows[part], environments, strict=False)
            ]
            _take_turns(sampler, batch, how, options, talking.turns, wait)
            if task.answer == ENVIRONMENT:
                for conversation, environment in zip(batch, environments, strict=False):
                    reward = environment.get_reward()
                    conversation.reward = wait(_result(reward)) if inspect.isawaitable(reward) else reward
            found += batch
            done(len(found), len(rows))
    return found


@contextmanager
def _waiting(loop: asyncio.AbstractEventLoop | None) -> Iterator[Wait]:
    """Yield a function that runs a coroutine in another thread's loop, or in a new one, and returns its result."""
    if loop is not None:
        yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result()
        return
    own = asyncio.new_event_loop()
    try:
        yield own.run_until_complete
    finally:
        own.close()


@contextmanager
def _environments(task: Task, count: int) -> Iterator[list[Any]]:
    """Yield an environment for each conversation of a batch, None for a task without; close them at the end."""
    made: list[Any] = []
    try:
        while len(made) < count:
            made.append(task.environment_factory and task.environment_factory())
        yield made
    finally:
        for environment in made:
            close_environment(environment)


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
    observed = without_copies(environment.reset)(**question) if environment is not None else None
    if observed is not None:
        prompt = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observed}]
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
    """Alternate turns of the policy with tool results until no call or no room for tokens remains."""
    turn, open_ones, length = 0, list(batch), how.max_completion_length
    while open_ones:
        keys = [one.row + (turn << 32) for one in open_ones]  # each turn has its own draws
        most = max(length - len(one.ids) for one in open_ones)
        contexts = [one.prompt_ids + one.ids for one in open_ones]
        completions = sampler.sample(contexts, keys, replace(how, max_completion_length=most), lambda *_: None)
        for one, context, completion in zip(open_ones, contexts, completions, strict=True):
            own = list(completion.ids)[: length - len(one.ids)]
            one.ids += own
            one.tokens += len(own)
            one.ended = completion.ended and len(own) == len(completion.ids)
            one.messages.append(parse_response(sampler.tokenizer, own, prefix=context, tools=one.tools))
        calling = [one for one in open_ones if one.messages[-1].get("tool_calls")] if turn != turns else []
        turn += 1
        results = [_results(one, wait) for one in calling]
        open_ones = []
        for one, messages in zip(calling, results, strict=True):
            suffix = _suffix(sampler.tokenizer, messages, options)
            room = length - len(one.ids) - len(suffix)
            if room >= 0:  # otherwise the call has no answer
                one.messages += messages
                one.ids += suffix
                one.ended = False
            if room > 0:
                open_ones.append(one)


def _results(conversation: Conversation, wait: Wait) -> Messages:
    """Call the tools of the latest turn; an exception becomes a result that the policy reads.

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
            result = _error_text(error)
        (waiting if inspect.isawaitable(result) else ready).append((name, result))
    if waiting:
        names, coroutines = zip(*waiting, strict=True)
        results = wait(_gather(coroutines))
        ready += zip(names, [_error_text(x) if isinstance(x, Exception) else x for x in results], strict=True)
    return [{"role": "tool", "name": tokenizable(name), "content": tokenizable(result)} for name, result in ready]


async def _gather(coroutines: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*coroutines, return_exceptions=True)


async def _result(waiting: Awaitable[Any]) -> Any:
    return await waiting


def _error_text(error: Exception) -> str:
    """Return what the policy reads of a tool that failed, in TRL's form."""
    try:
        return str({"error": str(error)})
    except Exception:  # the error's own __str__ raised
        return str({"error": type(error).__name__})


def _suffix(tokenizer: PreTrainedTokenizerBase, results: Messages, options: Mapping[str, Any]) -> list[int]:
    """Return the tokens of tool results after a turn, up to the start of the next turn.

    Templates write a line break or nothing after the end token, so the results begin directly after it.
    """
    given = {name: value for name, value in options.items() if name != "tools"}
    call = {"type": "function", "function": {"name": results[0]["name"], "arguments": {}}}
    before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    head, complete = (
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=messages is not before, tokenize=True, return_dict=False, **given
        )
        for messages in (before, [*before, *results])
    )
    ends = [place for place, token in enumerate(head, start=1) if token == tokenizer.eos_token_id]
    return list(complete[ends[-1] if ends else len(head) :])
