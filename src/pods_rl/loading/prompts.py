"""Prompts as a policy's chat template renders them, with the options and the tools that the template takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
)

from ..errors import UserError, first_line, users_code
from ..recipe import Recipe
from ..tasks import Prompt, Task


def template_options(recipe: Recipe) -> Mapping[str, Any]:
    """A recipe's `chat_template_kwargs`, a mapping or its JSON, as TRL takes it; raises UserError for anything else."""
    value = recipe.values.get("chat_template_kwargs") or {}
    options = value
    if isinstance(value, str):
        try:
            options = json.loads(value)
        except ValueError:
            options = None
    if not isinstance(options, dict):
        raise UserError(f"chat_template_kwargs = {value}: expected a mapping, as in {{enable_thinking: false}}.")
    return options


def tool_options(tokenizer: PreTrainedTokenizerBase, task: Task) -> dict[str, Any]:
    """Return the arguments of the chat template for a task with tools, as TRL renders it; none for other tasks.

    They are the tools, and a template that keeps earlier turns as they were if the policy's own does not. The tokenizer
    gets the response template that finds tool calls in its text, if it has none.

    Raises UserError if the policy cannot call tools.
    """
    if not task.converses:
        return {}
    if isinstance(task.test[0]["prompt"], str):
        raise UserError(f"The task {task.name} has tools, and prompts of plain text: tools need chat messages.")
    tools = task.list_tools()
    for tool in tools:
        with users_code(f"the task {task.name}: the description of its tool {tool.__name__}"):
            get_json_schema(tool)  # as the chat template will
    options: dict[str, Any] = {"tools": tools or None}
    try:
        if not supports_tool_calling(tokenizer):
            raise ValueError("it has no chat template that writes tool calls and their results.")
        has_template = getattr(tokenizer, "response_template", None) is not None
        has_schema = getattr(tokenizer, "response_schema", None) is not None
        if not has_template and not has_schema:
            add_response_schema(tokenizer)
        if not is_chat_template_prefix_preserving(tokenizer):
            options["chat_template"] = get_training_chat_template(tokenizer)
    except Exception as error:  # a template is a program, and may raise anything
        raise UserError(
            f"The task {task.name} has tools, and the policy {tokenizer.name_or_path or 'given'} cannot call them: "
            f"{first_line(error)} Use a chat model whose template has tools, such as Qwen3."
        ) from error
    return options


def render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, **options: Any) -> str:
    """Return the text that the model continues: text unchanged, chat messages rendered with the model's template."""
    if isinstance(prompt, str):
        return prompt
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(
            f"The tokenizer of {tokenizer.name_or_path or 'this policy'} has no chat template, and the task's prompts "
            "are chat messages: set prompt_style: plain to write them as text."
        )
    return str(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **options))


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, text: str) -> list[int]:
    """Return the tokens of a rendered prompt; a chat template has written its special tokens already."""
    return list(tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"])
