"""Thinking: the thought that a prompt opens for the model, and what follows the thought of a completion."""

from __future__ import annotations

OPENING = "<think>"
CLOSING = "</think>"


def opened_thought(prompt: str) -> str:
    r"""Return the `<think>` at the end of a rendered prompt, with the line break after it, or an empty text.

    Chat templates such as those of DeepSeek-R1 and Qwen3.5 write it, so the completion starts inside the thought.

    >>> opened_thought("<|im_start|>assistant\n<think>\n"), opened_thought("<think>\n\n</think>\n\n")
    ('<think>\n', '')
    """
    text = prompt.rstrip()
    if not text.endswith(OPENING):
        return ""
    return prompt[len(text) - len(OPENING) :]


def graded_text(prompt: str, completion: str) -> str:
    r"""Return the text that rewards grade: the completion, after the `<think>` that its rendered prompt opens, if any.

    `pods train` and `pods eval` do this. Call it where you grade completions yourself.

    >>> graded_text("<|im_start|>assistant\n<think>", "9*2=18</think><answer>18</answer>")
    '<think>9*2=18</think><answer>18</answer>'
    """
    return opened_thought(prompt) + completion


def after_thought(text: str) -> str | None:
    """Return what follows the last thought of a text, or None if that thought is not closed."""
    _, _, rest = text.rpartition(CLOSING)
    if OPENING in rest:
        return None
    return rest
