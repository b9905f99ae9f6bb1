"""Turn questions into prompts, and fit prompts to the policy."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, config
from datasets.fingerprint import Hasher

from ..errors import UserError
from ..rewards import GRADER_VERSION
from .sources import column_of
from .task import Messages, Prompt, Settings, Task

PROMPT_STYLES = ("chat", "plain")
_FEW_ROWS = 20_000  # held in memory

# Requests the form that the paper's format reward checks (arXiv 2504.13818), in our own words.
SYSTEM_PROMPT = (
    "Solve the problem you are given. First reason step by step between <think> and </think>, and check your "
    "work there. Then state the final answer alone, without explanation, between <answer> and </answer>:\n"
    "<think>your reasoning</think><answer>your final answer</answer>"
)


@dataclass(frozen=True)
class PromptForm:
    """The form of prompts: `chat` gives messages, `plain` text; an empty system prompt adds none.

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
    def of(cls, settings: Settings) -> PromptForm:
        """Return the form of a recipe's `prompt_style` and `system_prompt`."""
        system = settings.get("system_prompt")
        # an empty one is a choice
        return cls(settings.get("prompt_style") or "chat", SYSTEM_PROMPT if system is None else system)

    def write(self, question: str | Messages) -> Prompt:
        """Write the prompt for a question: text, or chat messages, which keep a system message of their own."""
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        has_system = any(message.get("role") == "system" for message in messages)
        if self.system and not has_system:
            messages = [{"role": "system", "content": self.system}, *messages]
        return plain_prompt(messages) if self.style == "plain" else messages

    def version(self, number: int | str) -> str:
        """Return the version of a task with these prompts: grader, the task's own `number`, system prompt, style."""
        mark = hashlib.sha256(json.dumps(self.system).encode()).hexdigest()[:8]
        return f"{GRADER_VERSION}-{number}-{mark}-{self.style}"


def plain_prompt(prompt: Prompt) -> str:
    r"""Write chat messages as plain text: their contents in order, a blank line between, a line break at the end.

    There is no line break after `=`, as in `37+58=`, which the answer continues. Text stays unchanged.

    Raises UserError for a conversation with other roles than system and user: without a template nothing would separate
    the turns.

    >>> plain_prompt([{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}])
    'Add.\n\n1+1?\n'
    """
    if isinstance(prompt, str):
        return prompt
    roles = {str(message.get("role")) for message in prompt}
    refused = roles - {"system", "user"}
    if refused:
        raise UserError(
            f"a prompt with a turn of {', '.join(sorted(refused))} cannot be written as plain text; use a policy with "
            "a chat template, or prompts of one question"
        )
    text = "\n\n".join(str(message["content"]) for message in prompt if message.get("content"))
    if not text.endswith("="):
        text += "\n"
    return text


@dataclass(frozen=True)
class Fitted:
    """The result of `fit_prompts`: the token limit of training prompts, and the numbers of longer prompts.

    `train_left_out` were dropped from training; `test_over` stay in the test split.
    """

    limit: int
    train_left_out: int
    test_over: int

    def __str__(self) -> str:
        return (
            f"skipped {self.train_left_out} of the training prompts, longer than {self.limit} tokens; kept "
            f"{self.test_over} such test prompts, so that the test set stays as published"
        )


def fit_prompts(
    task: Task,
    *,
    chat: bool,
    limit: int | None = None,
    count_tokens: Callable[[Prompt], int] = len,
    render: Callable[[Prompt], str] = str,
) -> tuple[Task, Fitted | None]:
    """Fit a task's prompts to a policy: plain text if it has no chat template, and no training prompt too long.

    The test split keeps every prompt, since an accuracy is comparable only on the full set; its long prompts are
    counted.

    Args:
        task: prompts as the recipe writes them.
        chat: whether the policy's tokenizer has a chat template.
        limit: most tokens of a training prompt. If None, any length.
        count_tokens: the length of a prompt in tokens, as the policy reads it.
        render: renders a prompt with the policy's chat template, to check that it accepts the prompts.

    Returns:
        The task, with another version if its prompts were rewritten, and a `Fitted` (None without a limit).

    Raises:
        UserError: every training prompt is too long, or the template rejects a prompt.

    >>> split = Dataset.from_dict({"prompt": ["1+1=", "1+1+1+1="], "answer": ["2", "4"]})
    >>> task, fitted = fit_prompts(Task("sums", "1", split, split, {"accuracy": 1.0}), chat=False, limit=4)
    >>> task.train["prompt"][:], len(task.test), fitted
    (['1+1='], 2, Fitted(limit=4, train_left_out=1, test_over=1))
    """
    if chat:
        _check_template(task, render)
    elif _holds_messages(task.train) or _holds_messages(task.test):
        task = _plain(task)
    if limit is None:
        return task, None
    train_lengths = [count_tokens(prompt) for prompt in column_of(task.train, "prompt")]
    kept = [row for row, length in enumerate(train_lengths) if length <= limit]
    if train_lengths and not kept:
        raise UserError(
            f"max_prompt_length = {limit}: every training prompt of task {task.name!r} is longer (the shortest has "
            f"{min(train_lengths)} tokens); raise it, or shorten system_prompt"
        )
    fitted = Fitted(
        limit=limit,
        train_left_out=len(train_lengths) - len(kept),
        test_over=sum(count_tokens(prompt) > limit for prompt in column_of(task.test, "prompt")),
    )
    if fitted.train_left_out:
        task = dataclasses.replace(task, train=task.train.select(kept))
    return task, fitted


def _holds_messages(split: Dataset) -> bool:
    """Return whether the prompts of a split are chat messages; a column has one type."""
    return len(split) > 0 and not isinstance(split[0]["prompt"], str)


def _plain(task: Task) -> Task:
    """Return the task with every prompt as plain text and other columns unchanged."""
    version = task.version.removesuffix("-chat") + "-plain"

    def rewrite(batch: Mapping[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        return {**batch, "prompt": [plain_prompt(prompt) for prompt in batch["prompt"]]}

    train, test = (mapped(split, rewrite, version) if len(split) else split for split in (task.train, task.test))
    return dataclasses.replace(task, train=train, test=test, version=version)


def _check_template(task: Task, render: Callable[[Prompt], str]) -> None:
    """Raise UserError if the template rejects the first prompt of a split: a template is a program."""
    for name, split in (("training", task.train), ("test", task.test)):
        prompt = split[0]["prompt"] if len(split) else ""
        try:
            render(prompt)
        except Exception as error:  # it may raise anything
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f"the policy's chat template rejects the first {name} prompt: {reason}. For a template without a "
                "system role set system_prompt: ''; else change the prompts, or set prompt_style: plain"
            ) from error


def mapped(rows: Dataset, change: Callable[..., dict[str, list[Any]]], *of: object) -> Dataset:
    """Return the data set that `change` makes of batches of rows; `of` is everything that `change` depends on."""
    fingerprint = Hasher.hash((rows._fingerprint, *of))
    in_memory = len(rows) <= _FEW_ROWS  # many go into a file of the datasets cache, which is read the next time
    cache_file = None if in_memory else str(Path(config.HF_DATASETS_CACHE) / f"pods-rl-{fingerprint}.arrow")
    # `map` gives a new column the type of an old one with its name: rename the old ones.
    renamed = {name: f"original {name}" for name in rows.column_names}

    def change_renamed(batch: Mapping[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        return change({name: batch[original] for name, original in renamed.items()}, numbers)

    return rows.rename_columns(renamed).map(
        change_renamed,
        with_indices=True,
        batched=True,
        remove_columns=list(renamed.values()),
        keep_in_memory=in_memory,
        cache_file_name=cache_file,
        new_fingerprint=fingerprint,
    )
