"""Completions that are conversations: the policy calls tools and reads their results until its last turn.

The turns are those of TRL's tool loop: results are appended as tokens and nothing is tokenized again. A result that
does not fit into `max_completion_length` ends the conversation, and its call has no answer.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import parse_response

from ..policies.loading import encode, render
from ..sandbox.limits import Tool, ToolLimits, close_environment, tokenizable, without_copies
from ..tasks import Task
from ..tasks.task import ENVIRONMENT, Messages
from .sampling import RowsDone, Sampler, Sampling

Wait = Callable[[Coroutine[Any, Any, Any]], Any]  # runs a coroutine and returns its result


@dataclass
class Conversation:
    """A completion with its tool calls and their results, complete or not.

    `row` seeds its draws. `tools` are those of the task and of its environment by name, with limits. `messages` and
    `ids` hold all turns with tool results, and `tokens` counts the ids that the policy generated. `ended` is whether
    the last turn has an end token. `reward` is the environment's, if it grades the task.
    """

    row: int
    prompt: str
    prompt_ids: list[int]
    tools: Mapping[str, Tool]
    messages: Messages = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    tokens: int = 0
    ended: bool = False
    reward: float | None = None


def converse(
    sampler: Sampler,
    task: Task,
    questions: Sequence[Mapping[str, Any]],
    rows: Sequence[int],
    how: Sampling,
    done: RowsDone,
    loop: asyncio.AbstractEventLoop | None = None,
) -> list[Conversation]:
    """Continue each prompt of a task with tools to the end of its conversation, `batch_size` at a time.

    Each conversation of a batch has its own environment. As in TRL, the next batch resets the same environments.

    Args:
        sampler: the policy.
        task: its tools and environments.
        questions: rows of the data set; `reset` of an environment takes their columns.
        rows: seed the draws.
        how: `max_completion_length` counts the tokens of all turns and results; the arguments of the chat template
            include those of `tool_options`.
        done: called with the number of finished conversations.
        loop: an event loop that another thread runs, for tools and rewards that are coroutines: they may hold
            connections that are bound to it. None: a new loop in this thread.
    """
    found: list[Conversation] = []
    environments: list[Any] = []  # None for a task without
    limits = ToolLimits(how.tool_timeout)
    with ExitStack() as stack:
        for _ in range(min(how.batch_size, len(rows))):
            environments.append(task.environment_factory and task.environment_factory())
            stack.callback(close_environment, environments[-1])
        wait: Wait = stack.enter_context(asyncio.Runner()).run
        if loop is not None:
            wait = lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result()  # noqa: E731
        for start in range(0, len(rows), how.batch_size):
            part = slice(start, start + how.batch_size)
            batch = []
            for question, row, environment in zip(questions[part], rows[part], environments, strict=False):
                prompt = question["prompt"]
                if environment is not None and (observed := without_copies(environment.reset)(**question)) is not None:
                    prompt = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observed}]
                text = render(sampler.tokenizer, prompt, **how.chat_template_kwargs)
                tools = limits.of_rollout({tool.__name__: tool for tool in task.tools_of(environment)})
                batch.append(Conversation(row, text, encode(sampler.tokenizer, prompt, text), tools))
            _take_turns(sampler, batch, how, wait)
            if task.answer == ENVIRONMENT:
                for conversation, environment in zip(batch, environments, strict=False):
                    reward = environment.get_reward()
                    conversation.reward = wait(reward) if inspect.iscoroutine(reward) else reward
            found += batch
            done(len(found), len(rows))
    return found


def _take_turns(sampler: Sampler, batch: Sequence[Conversation], how: Sampling, wait: Wait) -> None:
    """Alternate turns of the policy with tool results until no call or no room for tokens remains."""
    turn, open_ones, length = 0, list(batch), how.max_completion_length
    tools = how.chat_template_kwargs.get("tools")
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
            one.messages.append(parse_response(sampler.tokenizer, own, prefix=context, tools=tools))
        calling = [one for one in open_ones if one.messages[-1].get("tool_calls")] if turn != how.tool_turns else []
        open_ones = [one for one in calling if _answer_calls(one, sampler.tokenizer, how, wait)]
        turn += 1


def _answer_calls(one: Conversation, tokenizer: PreTrainedTokenizerBase, how: Sampling, wait: Wait) -> bool:
    """Call the tools of the latest turn and append the results, if they fit; return whether room for a turn remains.

    An exception becomes a result that the policy reads. Coroutines run together, and their results follow the others,
    as in TRL.
    """
    ready: list[tuple[str, Any]] = []
    waiting: list[tuple[str, Awaitable[Any]]] = []
    for call in one.messages[-1]["tool_calls"]:
        function = call.get("function") or {}
        name: str = tokenizable(str(function.get("name")))
        try:
            if name not in one.tools:
                raise ValueError(f"Tool {name} not found.")
            result = one.tools[name](**function["arguments"])
        except Exception as error:
            result = error
        (waiting if inspect.isawaitable(result) else ready).append((name, result))
    if waiting:
        names, coroutines = zip(*waiting, strict=True)
        ready += zip(names, wait(_gather(coroutines)), strict=True)
    results = [
        {"role": "tool", "name": name, "content": str({"error": str(x)}) if isinstance(x, Exception) else x}
        for name, x in ready
    ]
    suffix = _suffix(tokenizer, results, how.chat_template_kwargs)
    room = how.max_completion_length - len(one.ids) - len(suffix)
    if room >= 0:  # otherwise the call has no answer
        one.messages += results
        one.ids += suffix
        one.ended = False
    return room > 0


async def _gather(coroutines: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*coroutines, return_exceptions=True)


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
