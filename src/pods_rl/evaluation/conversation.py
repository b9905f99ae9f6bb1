"""Completions that are conversations: the policy calls tools and reads their results until its last turn.

The turns are those of TRL's tool loop: results are appended as tokens and nothing is tokenized again. A result that
does not fit into `max_completion_length` ends the conversation, and its call has no answer.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import parse_response

from ..errors import UserError, users_code
from ..loading.prompts import encode, render
from ..sandbox import as_score
from ..sandbox.limits import Tool, ToolLimits, close_environment, parsing_anything, tokenizable, without_copies
from ..tasks import Task
from ..tasks.task import BY_ENVIRONMENT, Messages
from .sampling import RowsDone, Sampler, Sampling

logger = logging.getLogger(__name__)
Wait = Callable[[Coroutine[Any, Any, Any]], Any]  # runs a coroutine and returns its result


@dataclass
class Conversation:
    """A completion with its tool calls and their results, complete or not."""

    row: int  # seeds its draws
    prompt: str
    prompt_ids: list[int]
    tools: Mapping[str, Tool]  # of the task and of its environment by name, with limits
    messages: Messages = field(default_factory=list)  # of all turns, with tool results
    ids: list[int] = field(default_factory=list)  # likewise
    tokens: int = 0  # of the ids those that the policy generated
    ended: bool = False  # whether the last turn has an end token
    reward: float | None = None  # the environment's, if it has one that the evaluation shows


def converse(
    sampler: Sampler,
    task: Task,
    questions: Sequence[Mapping[str, Any]],
    rows: Sequence[int],
    sampling: Sampling,
    done: RowsDone,
    loop: asyncio.AbstractEventLoop | None = None,
) -> list[Conversation]:
    """Continue each prompt of a task with tools to the end of its conversation, `batch_size` at a time.

    Each conversation of a batch has its own environment. As in TRL, the next batch resets the same environments, with
    the columns of their questions. `max_completion_length` counts the tokens of all turns and results.

    Args:
        rows: seed the draws.
        loop: an event loop that another thread runs, for tools and rewards that are coroutines: they may hold
            connections that are bound to it. If None, a new loop in this thread.
    """
    conversations: list[Conversation] = []
    environments: list[Any] = []  # None for a task without
    limits = ToolLimits(sampling.tool_timeout)
    with ExitStack() as stack:
        for _ in range(min(sampling.batch_size, len(rows))):
            environment = task.new_environment()
            environments.append(environment)
            stack.callback(close_environment, environment)
        wait = _waiting_in(loop) if loop is not None else stack.enter_context(asyncio.Runner()).run
        for start in range(0, len(rows), sampling.batch_size):
            part = slice(start, start + sampling.batch_size)
            batch = []
            # The last batch may have fewer rows than there are environments.
            for question, row, environment in zip(questions[part], rows[part], environments, strict=False):
                tools = limits.of_rollout({tool.__name__: tool for tool in task.tools_of(environment)})
                prompt = question["prompt"]
                if environment is not None:
                    with users_code(f"the task {task.name}: {type(environment).__name__}.reset"):
                        observation = without_copies(environment.reset)(**question)
                        if observation is not None:  # it is added to the prompt
                            last_message = prompt[-1]
                            prompt = [*prompt[:-1], {**last_message, "content": last_message["content"] + observation}]
                text = render(sampler.tokenizer, prompt, **sampling.chat_template_kwargs)
                batch.append(Conversation(row, text, encode(sampler.tokenizer, prompt, text), tools))
            _take_turns(sampler, batch, sampling, wait)
            for conversation, environment in zip(batch, environments, strict=False):
                # without a reward that says which answers are right, all rewards are shown
                is_shown = task.answer is None and hasattr(environment, "get_reward")
                if is_shown or task.answer == BY_ENVIRONMENT:
                    conversation.reward = _reward_of(environment, task, wait)
            conversations += batch
            done(len(conversations), len(rows))
    return conversations


def _waiting_in(loop: asyncio.AbstractEventLoop) -> Wait:
    """Return a function that runs a coroutine in another thread's loop and waits for its result."""

    def wait(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    return wait


def _reward_of(environment: Any, task: Task, wait: Wait) -> float:
    """Return an environment's reward; NaN if it is None, or, with a warning, if its code fails and that is allowed."""
    try:
        with users_code(f"the task {task.name}: {type(environment).__name__}.get_reward"):
            reward = without_copies(environment.get_reward)()
            score = as_score(wait(reward) if inspect.iscoroutine(reward) else reward)
            return math.nan if score is None else score
    except UserError as error:
        if task.reward_errors == "raise":
            raise UserError(
                f"{error}. Fix the method, or set reward_errors: zero or drop (the conversation counts as wrong)"
            ) from error
        logger.warning("%s. The conversation counts as wrong.", error)
        return math.nan


def _take_turns(sampler: Sampler, batch: Sequence[Conversation], sampling: Sampling, wait: Wait) -> None:
    """Alternate turns of the policy with tool results until no call or no room for tokens remains."""
    turn = 0
    open_conversations = list(batch)
    length = sampling.max_completion_length
    parse = parsing_anything(parse_response)
    tools = sampling.chat_template_kwargs.get("tools")
    while open_conversations:
        keys = [conversation.row + (turn << 32) for conversation in open_conversations]  # each turn has its own draws
        contexts = [conversation.prompt_ids + conversation.ids for conversation in open_conversations]
        # The turn may be as long as the largest room left. Each conversation keeps what fits into its own.
        most_room = max(length - len(conversation.ids) for conversation in open_conversations)
        of_turn = replace(sampling, max_completion_length=most_room)
        completions = sampler.sample(contexts, keys, of_turn, lambda *_: None)
        for conversation, context, completion in zip(open_conversations, contexts, completions, strict=True):
            turn_ids = list(completion.ids)[: length - len(conversation.ids)]
            conversation.ids += turn_ids
            conversation.tokens += len(turn_ids)
            conversation.ended = completion.ended and len(turn_ids) == len(completion.ids)
            conversation.messages.append(parse(sampler.tokenizer, turn_ids, prefix=context, tools=tools))
        if turn == sampling.tool_turns:
            return
        still_open = []
        for conversation in open_conversations:
            calls = conversation.messages[-1].get("tool_calls")
            if calls and _answer_calls(conversation, sampler.tokenizer, sampling, wait):
                still_open.append(conversation)
        open_conversations = still_open
        turn += 1


def _answer_calls(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, wait: Wait
) -> bool:
    """Call the tools of the latest turn and append the results, if they fit; return whether room for a turn remains."""
    ready: list[tuple[str, Any]] = []
    waiting: list[tuple[str, Awaitable[Any]]] = []
    for call in conversation.messages[-1]["tool_calls"]:
        function = call.get("function") or {}
        name: str = tokenizable(str(function.get("name")))
        try:
            if name not in conversation.tools:
                raise ValueError(f"Tool {name} not found.")
            result = conversation.tools[name](**function["arguments"])
        except Exception as error:  # the policy reads it
            result = error
        if inspect.isawaitable(result):
            waiting.append((name, result))
        else:
            ready.append((name, result))
    if waiting:  # they run together, and their results follow the others, as in TRL
        names, coroutines = zip(*waiting, strict=True)
        ready += zip(names, wait(_gather(coroutines)), strict=True)
    results = []
    for name, result in ready:
        content = str({"error": str(result)}) if isinstance(result, Exception) else result
        results.append({"role": "tool", "name": name, "content": content})
    suffix = _suffix(tokenizer, results, sampling.chat_template_kwargs)
    room = sampling.max_completion_length - len(conversation.ids) - len(suffix)
    if room >= 0:  # otherwise the call has no answer
        conversation.messages += results
        conversation.ids += suffix
        conversation.ended = False
    return room > 0


async def _gather(coroutines: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*coroutines, return_exceptions=True)


def _suffix(tokenizer: PreTrainedTokenizerBase, results: Messages, options: Mapping[str, Any]) -> list[int]:
    """Return the tokens of tool results after a turn, up to the start of the next turn."""
    template_options = {name: value for name, value in options.items() if name != "tools"}
    # A short stand-in for the conversation: only what follows the end of its last turn is used.
    call = {"type": "function", "function": {"name": results[0]["name"], "arguments": {}}}
    before: Messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [call]}]

    def tokens(messages: Messages, next_turn: bool) -> list[int]:
        return list(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=next_turn, tokenize=True, return_dict=False, **template_options
            )
        )

    head = tokens(before, next_turn=False)
    complete = tokens([*before, *results], next_turn=True)
    end_of_turn = len(head)  # templates write a line break or nothing after the end token
    for count, token in enumerate(head, start=1):
        if token == tokenizer.eos_token_id:
            end_of_turn = count
    return complete[end_of_turn:]
