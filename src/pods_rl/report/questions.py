"""Where the question of a prompt is, for previews: after a system text and the marks of a chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence

# the marks that common chat templates write before a user's turn and after it
_USER = re.compile(
    r"<\|im_start\|>user\n|<\|start_header_id\|>user<\|end_header_id\|>|<start_of_turn>user\n"
    r"|<\|user\|>|\[INST\]|(?:^|\n)(?:user|User|Human): "
)
_END = re.compile(
    r"<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\|end\|>|<\|assistant\|>|</s>|\[/INST\]|\n(?:assistant|Assistant): ?"
)
_LINE = re.compile(r"\n|\|>|\]")  # an end of a part that prompts share
_SENTENCE = re.compile(r"\n|\|>|\]|[.:?!] ")
_MANY = 8  # prompts: the questions of fewer may begin with the same sentence by chance


def question_places(prompts: Sequence[str]) -> list[tuple[int, int]]:
    """Return start and end of the question in each prompt.

    The question begins after the last mark of a user's turn, and after the text with which all prompts begin, as far as
    that is complete lines, or of many prompts complete sentences. It ends at the next mark of a template.

    Args:
        prompts: different prompts of one task, as the policy reads them.

    >>> prompts = ["Add.\\n\\n1+1?\\n", "Add.\\n\\n1+2?\\n"]
    >>> [prompt[start:end] for prompt, (start, end) in zip(prompts, question_places(prompts))]
    ['1+1?', '1+2?']
    """
    boundary = _LINE
    if len(prompts) >= _MANY:
        boundary = _SENTENCE
    shared = 0
    if len(prompts) > 1:
        shared = _last_end(boundary, _common_start(prompts))
    return [_place(prompt, shared) for prompt in prompts]


def _common_start(texts: Sequence[str]) -> str:
    """Return what all texts begin with."""
    first = min(texts)
    last = max(texts)  # what these two share, every text between them shares
    for place, (ours, theirs) in enumerate(zip(first, last, strict=False)):
        if ours != theirs:
            return first[:place]
    return first


def _place(prompt: str, shared: int) -> tuple[int, int]:
    start = max(shared, _last_end(_USER, prompt))
    if not prompt[start:].strip():
        start = 0
    while prompt[start : start + 1].isspace():
        start += 1
    end = len(prompt)
    mark = _END.search(prompt, start)
    if mark and mark.start() > start:
        end = mark.start()
    return start, start + len(prompt[start:end].rstrip())


def _last_end(pattern: re.Pattern[str], text: str) -> int:
    """Return where the last match ends; 0 without a match."""
    end = 0
    for match in pattern.finditer(text):
        end = match.end()
    return end
