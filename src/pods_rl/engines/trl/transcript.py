"""Prompts and completions as text, and as the plain data without images that files hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...text import DEEPEST, TOO_DEEP, call_text, content_text, depth


def as_text(value: Any) -> str:
    """Return a prompt or completion as text: messages become `role: content` blocks, one assistant turn its content.

    Tool calls are lines below the content, an image is `[image]`.

    >>> call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    >>> print(as_text([{"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
    ...                {"role": "tool", "name": "add", "content": "3"}]))
    assistant: Let me see.
    tool call: add(a=1, b=2)
    <BLANKLINE>
    tool add: 3
    """
    if isinstance(value, str):
        return value
    if len(value) == 1 and value[0].get("role") == "assistant":
        return _message_text(value[0])
    blocks: list[str] = []
    for message in value:
        speaker = " ".join(str(message[key]) for key in ("role", "name") if message.get(key))  # a tool has a name too
        blocks.append(f"{speaker}: {_message_text(message)}")
    return "\n\n".join(blocks)


def _message_text(message: Mapping[str, Any]) -> str:
    lines = [f"tool call: {call_text(call)}" for call in message.get("tool_calls") or ()]
    content = content_text(message.get("content"))
    if content or not lines:
        lines.insert(0, content)
    return "\n".join(lines)


def has_turns(completion: Any) -> bool:
    """Return whether a completion is more than a text or one assistant message without tool calls."""
    if isinstance(completion, str):
        return False
    return len(completion) > 1 or any(message.get("tool_calls") for message in completion)


def plain_completion(completion: Any) -> Any:
    """Return messages as files hold them: their texts, and tool calls as they are unless they nest too deeply."""
    if isinstance(completion, str):
        return completion
    names = ("role", "name", "reasoning_content", "thinking", "content")
    messages = []
    for message in completion:
        kept: dict[str, Any] = {name: content_text(message[name]) for name in names if message.get(name) is not None}
        for call in message.get("tool_calls") or ():
            if depth(call) > DEEPEST:
                call = {"function": {"name": call_text(call).partition("(")[0], "arguments": TOO_DEEP}}
            kept.setdefault("tool_calls", []).append(call)
        messages.append(kept)
    return messages


def without_images(prompt: Any) -> Any:
    """Return a prompt without the images of its messages, which a chat template does not read."""
    if isinstance(prompt, str):
        return prompt
    messages = []
    for message in prompt:
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                if isinstance(part, Mapping):
                    part = {key: value if isinstance(value, str) else None for key, value in part.items()}
                parts.append(part)
            message = {**message, "content": parts}
        messages.append(message)
    return messages
