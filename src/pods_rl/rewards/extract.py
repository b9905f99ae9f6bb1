"""Find the final answer in a text: one pass, so that a hostile megabyte costs no more than an honest one."""

from __future__ import annotations

import re

MARKER = "####"
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def extract_answer(text: str) -> str | None:
    r"""Give the final answer a text states, or None where it states none.

    Looked for in this order: the last complete `<answer>...</answer>`; the last balanced `\boxed{...}`; what
    follows the last `####` on its line. Within answer tags, a box or a marker is unwrapped too. An empty
    answer is None, and empty answer tags are not replaced by a box elsewhere.

    The time taken is linear in the length of the text. No evaluation of any kind.

    >>> extract_answer("<think>9*2</think><answer>18</answer>")
    '18'
    >>> extract_answer(r"So it is \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract_answer("She makes 9 * 2 = 18.\n#### 18")
    '18'
    >>> extract_answer("eighteen") is None
    True
    """
    tagged = _last_tagged(text)
    if tagged is None:
        return _unwrap(text)
    return _unwrap(tagged) or tagged.strip() or None


def extract_gold(text: str, after: str | None = None) -> str | None:
    """Give the gold answer that a dataset's answer column holds, or None where there is none.

    `after` is the mark it follows, on the same line, as GSM8K's `####`; the last mark counts. Without it the
    column is read as a completion is (`extract_answer`), and where that finds nothing the whole text is the
    answer.

    >>> extract_gold("9*2 = <<9*2=18>>18\\n#### 1,800", after="####")
    '1,800'
    >>> extract_gold(" 42 ")
    '42'
    >>> extract_gold("no mark here", after="####") is None
    True
    """
    if after:
        return _after(text, after)
    return extract_answer(text) or text.strip() or None


def _unwrap(text: str) -> str | None:
    boxed = _last_boxed(text)
    return _after(text, MARKER) if boxed is None else boxed.strip() or None


def _last_tagged(text: str) -> str | None:
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    start += len("<answer>")
    return text[start : text.find("</answer>", start)]


def _last_boxed(text: str) -> str | None:
    if r"\boxed" not in text:
        return None
    openers: list[int] = []  # where each open brace's content starts; negative for braces that are not a box
    best = (-1, -1)
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            if openers and (start := openers.pop()) > best[0]:
                best = (start, match.start())
        elif token == "{":
            openers.append(-1)
        elif len(token) > 2:  # a box; an escaped character is two long
            openers.append(match.end())
    return text[best[0] : best[1]] if best[0] >= 0 else None


def _after(text: str, mark: str) -> str | None:
    start = text.rfind(mark)
    if start < 0:
        return None
    following = text[start + len(mark) :].lstrip()
    return following.partition("\n")[0].strip() or None
