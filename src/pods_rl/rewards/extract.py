"""Find the final answer in a text: one pass, in linear time, also for hostile input."""

from __future__ import annotations

import re

from .notation import plain
from .numeric import read_number

MARKER = "####"
MAX_BETWEEN = 60  # characters between two boxes that are one answer
MAX_FORMS = 8  # in which one value is written
_BRACES = re.compile(r"\\{1,2}boxed\s*\{|\\.|[{}]", re.DOTALL)
_TEXT = r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{"
_AND = (
    r"(?:(?:and|or)(?: maybe| perhaps| possibly| also)?|[&/|]|\\(?:land|lor|wedge|vee)(?![a-z])"
    rf"|{_TEXT}[^{{}}0-9]{{0,30}}?(?:,|(?<![A-Za-z])(?:and|or))\s*\}})"
)
_SIGNS = r"(?:[\s$~*]|\\[,;:! ]|\\\\(?![A-Za-z])|\\[()\[\]]|\\q?quad)*"
_NAME = r"[A-Za-z](?:_\{?[0-9a-z]\}?)?\s*=\s*"
_BETWEEN = re.compile(  # 1 and 2; 1 papers and 2 bins; x = 1 and y = 2
    rf"\}}?{_SIGNS}(?:(?:[A-Za-z]+ ){{0,2}}{_AND}|[,;]{_SIGNS}{_AND}?)?{_SIGNS}(?:{_NAME})?\{{?"
)


def extract_answer(text: str) -> str | None:
    r"""Return the final answer of a text, or None if there is none.

    Searched in this order: the last complete `<answer>...</answer>`; the last balanced `\boxed{...}`; what
    follows the last `####` on its line. Within answer tags, a box or a marker is unwrapped too. Boxes with nothing
    but commas, `and`, `or` or two words such as a unit between them are one answer, a list. An empty answer is
    None, and empty answer tags are not replaced by a box elsewhere.

    The time taken is linear in the length of the text. No evaluation of any kind.

    >>> extract_answer("<think>9*2</think><answer>18</answer>")
    '18'
    >>> extract_answer(r"So it is \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract_answer(r"\boxed{-1} and $\boxed{2}$.")
    '-1, 2'
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
    """Return the gold answer in a data set's answer column, or None if there is none.

    `after` is the mark before it on the same line, such as GSM8K's `####`; the last mark counts. Without it, the
    column is read like a completion (`extract_answer`), and if that finds nothing the whole text is the
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
    openers: list[tuple[int, int] | None] = []  # of each open box, where it and its content start; None: other braces
    boxes: list[tuple[int, int, int]] = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            if openers and (opener := openers.pop()):
                boxes.append((*opener, match.start()))
        elif token == "{":
            openers.append(None)
        elif len(token) > 2:  # a box; an escaped character is two long
            openers.append(match.span())
    return _joined(text, sorted(boxes)) if boxes else None


def _joined(text: str, boxes: list[tuple[int, int, int]]) -> str:
    """The content of the last box, after those of the boxes before it that belong to the same answer."""
    found: list[str] = []
    following = len(text)
    for opening, start, end in reversed(boxes):
        far = not 0 < following - end <= MAX_BETWEEN
        if found and (far or not _BETWEEN.fullmatch(text, end + 1, following)):
            break
        found.append(text[start:end].strip())
        following = opening
    found = [content for content in reversed(found) if content]
    return found[-1] if _alike(found) else ", ".join(found)


def _alike(contents: list[str]) -> bool:
    """Whether boxes state one value, the same text or the same number; many different ones are not looked into."""
    if not 1 < len(set(contents)) <= MAX_FORMS:
        return len(set(contents)) == 1
    numbers = [read_number(plain(content)) for content in set(contents)]
    return all(number and numbers[0] and number.fraction == numbers[0].fraction for number in numbers)


def _after(text: str, mark: str) -> str | None:
    start = text.rfind(mark)
    if start < 0:
        return None
    following = text[start + len(mark) :].lstrip()
    return following.partition("\n")[0].strip() or None
