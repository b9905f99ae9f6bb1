"""How a question becomes a prompt, and how prompts are fitted to the policy that reads them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from ..errors import UserError
from ..rewards import GRADER_VERSION
from .base import Task

PROMPT_STYLES = ("chat", "plain")

# Asks for the form that the paper's format reward looks for (arXiv 2504.13818), in our own words.
SYSTEM_PROMPT = (
    "Solve the problem you are given. First reason step by step between <think> and </think>, and check your "
    "work there. Then state the final answer alone, without explanation, between <answer> and </answer>:\n"
    "<think>your reasoning</think><answer>your final answer</answer>"
)

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class PromptForm:
    """How a question becomes a prompt: `chat` gives messages, `plain` text; an empty system prompt is none.

    Raises UserError for an unknown style.

    >>> PromptForm("chat", "Add.").write("1+1?")
    [{'role': 'system', 'content': 'Add.'}, {'role': 'user', 'content': '1+1?'}]
    >>> PromptForm("plain", "").write("1+1?")
    '1+1?\\n'
    """

    style: str = "chat"
    system: str = SYSTEM_PROMPT

    def __post_init__(self) -> None:
        if self.style not in PROMPT_STYLES:
            raise UserError(f"prompt_style is {self.style!r}; expected one of {', '.join(PROMPT_STYLES)}")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> PromptForm:
        """The form that a recipe's `prompt_style` and `system_prompt` ask for."""
        system = settings.get("system_prompt")
        return cls(settings.get("prompt_style") or "chat", SYSTEM_PROMPT if system is None else system)

    def write(self, question: str) -> Prompt:
        """Write the prompt for one question."""
        messages = self.prepend([{"role": "user", "content": question}])
        return messages if self.style == "chat" else plain_prompt(messages)

    def prepend(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Put the system prompt before chat messages that have none of their own."""
        if not self.system or any(message.get("role") == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def version(self, number: int | str) -> str:
        """The version of a task whose prompts this writes: grader, the task's own `number`, system prompt, style.

        >>> PromptForm("plain").version(3).split("-")[1::2]
        ['3', 'plain']
        """
        mark = hashlib.sha256(json.dumps(self.system).encode()).hexdigest()[:8]
        return f"{GRADER_VERSION}-{number}-{mark}-{self.style}"


def plain_prompt(prompt: Prompt) -> str:
    r"""Write chat messages as plain text: their contents in order, a blank line between, a line break at the end.

    Text stays as it is. Raises UserError for a conversation that somebody else than system and user speaks in: without
    a template nothing would tell the turns apart.

    >>> plain_prompt([{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}])
    'Add.\n\n1+1?\n'
    """
    if isinstance(prompt, str):
        return prompt
    others = {str(message.get("role")) for message in prompt} - {"system", "user"}
    if others:
        raise UserError(
            f"a prompt with a turn of {', '.join(sorted(others))} cannot be written as plain text; use a policy with a "
            "chat template, or prompts of one question"
        )
    return "\n\n".join(str(message["content"]) for message in prompt if message.get("content")) + "\n"


@dataclass(frozen=True)
class Fitted:
    """What `fit_prompts` found: the longest prompt allowed (tokens), and how many prompts are longer.

    `train_left_out` were taken out of training; `test_over` stay in the test split.
    """

    limit: int
    train_left_out: int
    test_over: int

    def __str__(self) -> str:
        if not (self.train_left_out or self.test_over):
            return f"no prompt is longer than {self.limit} tokens"
        return (
            f"skipped {self.train_left_out} of the training prompts, longer than {self.limit} tokens; kept "
            f"{self.test_over} such of the test prompts, so that the test set stays as published"
        )


def fit_prompts(
    task: Task,
    *,
    chat: bool,
    limit: int | None = None,
    count_tokens: Callable[[Sequence[Prompt]], Sequence[int]] | None = None,
    render: Callable[[Prompt], str] | None = None,
) -> tuple[Task, Fitted | None]:
    """Fit a task's prompts to a policy: plain text where it has no chat template, and none too long to train on.

    Where its template takes no system message, that becomes the start of the first user message. The test split keeps
    every prompt: an accuracy is comparable only on the whole set. Its long ones are counted.

    Args:
        chat: whether the policy's tokenizer has a chat template.
        limit: most tokens of a training prompt. None: any length.
        count_tokens: the length of each prompt in tokens, as the policy reads it; needed with `limit`.
        render: writes a prompt by the policy's chat template; None: no prompt is tried.

    Returns:
        The task, with another version where its prompts were rewritten, and what was found (None without a limit).

    Raises:
        UserError: every training prompt is too long, or the template refuses a prompt.
        ValueError: a limit came without a way to count.

    >>> split = Dataset.from_dict({"prompt": ["1+1=", "1+1+1+1="], "answer": ["2", "4"]})
    >>> task, found = fit_prompts(
    ...     Task("sums", "1", split, split, {"accuracy": 1.0}),
    ...     chat=False, limit=4, count_tokens=lambda prompts: [len(prompt) for prompt in prompts],
    ... )
    >>> task.train["prompt"][:], len(task.test), found
    (['1+1='], 2, Fitted(limit=4, train_left_out=1, test_over=1))
    """
    if not chat:
        task = _as_plain(task)
    elif render is not None:
        task = _as_rendered(task, render)
    if limit is None:
        return task, None
    if count_tokens is None:
        raise ValueError(f"a limit of {limit} tokens came without count_tokens; give a function that counts them")
    lengths = [list(count_tokens(split["prompt"][:])) if len(split) else [] for split in (task.train, task.test)]
    short = [row for row, length in enumerate(lengths[0]) if length <= limit]
    found = Fitted(limit, len(lengths[0]) - len(short), sum(length > limit for length in lengths[1]))
    if lengths[0] and not short:
        raise UserError(
            f"max_prompt_length = {limit}: every training prompt of task {task.name!r} is longer (the shortest has "
            f"{min(lengths[0])} tokens); raise it, or shorten system_prompt"
        )
    if found.train_left_out:
        task = dataclasses.replace(task, train=task.train.select(short))
    return task, found


def _as_plain(task: Task) -> Task:
    """The task with its chat prompts as text; the same task where they are text already."""
    if all(isinstance(split[0]["prompt"], str) for split in (task.train, task.test) if len(split)):
        return task
    splits = {name: _plain_split(split) for name, split in (("train", task.train), ("test", task.test))}
    return dataclasses.replace(task, version=task.version.removesuffix("-chat") + "-plain", **splits)


def _plain_split(split: Dataset) -> Dataset:
    columns = {name: split[name][:] for name in split.column_names}
    return Dataset.from_dict({**columns, "prompt": [plain_prompt(prompt) for prompt in columns["prompt"]]})


def fold_system(prompt: Prompt) -> Prompt:
    r"""Put system messages at the start of the first user message, for a template that takes none.

    >>> fold_system([{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}])
    [{'role': 'user', 'content': 'Add.\n\n1+1?'}]
    """
    if isinstance(prompt, str):
        return prompt
    system = [message["content"] for message in prompt if message.get("role") == "system" and message.get("content")]
    others = [dict(message) for message in prompt if message.get("role") != "system"]
    first = next((message for message in others if message.get("role") == "user"), None)
    if first is None or not isinstance(first.get("content"), str):
        return prompt
    first["content"] = "\n\n".join([*system, first["content"]])
    return others


def _as_rendered(task: Task, render: Callable[[Prompt], str]) -> Task:
    """The task with prompts that the template takes: a prompt of each sequence of roles is tried.

    Raises UserError for a prompt that it refuses also without a system message.
    """
    fold = False
    for name, split in (("training", task.train), ("test", task.test)):
        for row, prompt in _shapes(split["prompt"][:] if len(split) else []).items():
            refused = _refusal(prompt, render)
            if refused is None:
                continue
            if fold_system(prompt) == prompt or _refusal(fold_system(prompt), render) is not None:
                raise UserError(
                    f"the policy's chat template refuses the {name} prompt in row {row} (counted from 1; roles "
                    f"{', '.join(str(turn.get('role')) for turn in prompt)}): {refused}. Change the prompt, or set "
                    "prompt_style: plain"
                )
            fold = True
    if not fold:
        return task
    splits = {}
    for name, split in (("train", task.train), ("test", task.test)):
        columns = {column: split[column][:] for column in split.column_names}
        splits[name] = Dataset.from_dict({**columns, "prompt": [fold_system(prompt) for prompt in columns["prompt"]]})
    return dataclasses.replace(task, version=task.version + "-folded", **splits)


def _shapes(prompts: Sequence[Prompt]) -> dict[int, list[dict[str, Any]]]:
    """The first chat prompt of each sequence of roles, by its row counted from 1."""
    found: dict[tuple[str, ...], tuple[int, list[dict[str, Any]]]] = {}
    for row, prompt in enumerate(prompts, start=1):
        if not isinstance(prompt, str):
            found.setdefault(tuple(str(turn.get("role")) for turn in prompt), (row, prompt))
    return dict(found.values())


def _refusal(prompt: Prompt, render: Callable[[Prompt], str]) -> str | None:
    """What a template says of a prompt that it refuses; it is a program of the policy's, and may fail in any way."""
    try:
        render(prompt)
    except Exception as error:
        return " ".join(str(error).split())[:200] or type(error).__name__
    return None
