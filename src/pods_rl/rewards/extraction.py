"""Find the final answer of a completion: in answer tags, in a box or after a marker."""

from __future__ import annotations

import re
from typing import NamedTuple

from .mathematics import plain, read_number
from .thinking import after_thought

MARKER = "####"
ANSWER_OPENS = "<answer>"
ANSWER_CLOSES = "</answer>"
MAX_BETWEEN = 60  # characters between two boxes that are one answer
MAX_FORMS = 8  # in which one value is written

_BOXES = (r"\boxed", r"\fbox", r"\framebox")
_MARKS = (ANSWER_OPENS, MARKER, *_BOXES)
_BEGUN_MARKS = tuple(mark[:size] for mark in _MARKS for size in range(2, len(mark) + 1))
_END_LENGTH = 40  # characters at the end of a text that may announce an answer
_ANNOUNCED = re.compile(  # The answer is
    r"\banswer(?:\s{1,9}(?:is|should\sbe|must\sbe)|\s{0,9}[:=])[\s:$*(\[\\]*$", re.IGNORECASE
)
_BRACES = re.compile(
    r"\\{1,2}(?:boxed|fbox|framebox)\s*\{"  # \boxed{
    r"|\\."  # an escaped brace, \{
    r"|[{}]",
    re.DOTALL,
)
_ESCAPED_LENGTH = 2  # characters of an escaped one
_LATEX_TEXT = r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{"
_AND = (
    r"(?:(?:and|or)(?: maybe| perhaps| possibly| also)?"  # or maybe
    r"|[&/|]|\\(?:land|lor|wedge|vee)(?![a-z])"
    rf"|{_LATEX_TEXT}[^{{}}0-9]{{0,30}}?(?:,|(?<![A-Za-z])(?:and|or))\s*\}})"  # \text{ and }
)
_SPACING = r"(?:[\s$~*]|\\[,;:! ]|\\\\(?![A-Za-z])|\\[()\[\]]|\\q?quad)*"  # $, \quad
_ASSIGNED_NAME = r"[A-Za-z](?:_\{?[0-9a-z]\}?)?\s*=\s*"  # y =
_BETWEEN = re.compile(  # 1 and 2; 1 papers and 2 bins; x = 1 and y = 2
    rf"\}}?{_SPACING}(?:(?:[A-Za-z]+ ){{0,2}}{_AND}|[,;]{_SPACING}{_AND}?)?{_SPACING}(?:{_ASSIGNED_NAME})?\{{?"
)


class _Box(NamedTuple):
    """Where a box starts in a text, and where its content starts and ends."""

    start: int
    content: int
    end: int


def extract_answer(text: str) -> str | None:
    r"""Return the final answer of a text, or None if there is none.

    Only the text after the last `</think>` counts, and a text that ends within a thought has no answer. A text that
    begins an answer after the last complete one and does not finish it has no answer either: it was cut off.
    Searched in this order: the last complete `<answer>...</answer>`; the last balanced `\boxed{...}` or
    `\fbox{...}`; the text after the last `####` on its line. Within answer tags, a box or a marker is unwrapped too.
    Boxes with nothing but commas, `and`, `or` or two words such as a unit between them are one answer, a list. An
    empty answer is None, and empty answer tags are not replaced by a box elsewhere.

    The time taken is linear in the length of the text. Nothing is evaluated.

    >>> extract_answer("<think>9*2</think><answer>18</answer>")
    '18'
    >>> extract_answer(r"So it is \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract_answer(r"\boxed{-1} and $\boxed{2}$.")
    '-1, 2'
    >>> extract_answer("She makes 9 * 2 = 18.\n#### 18")
    '18'
    >>> extract_answer("eighteen") is None, extract_answer(r"<think>so \boxed{18}") is None
    (True, True)
    >>> extract_answer(r"\boxed{17}. No: \boxed{18") is None
    True
    """
    text = after_thought(text) or ""
    if _is_cut_off(text):
        return None
    last_closing = text.rfind(ANSWER_CLOSES)
    opening = text.rfind(ANSWER_OPENS, 0, last_closing) if last_closing >= 0 else -1
    if opening < 0:
        return _unwrap(text)
    start = opening + len(ANSWER_OPENS)
    tagged = text[start : text.find(ANSWER_CLOSES, start)]
    return _unwrap(tagged) or tagged.strip() or None


def extract_gold(text: str) -> str | None:
    """Return the gold answer in a data set's answer column, or None if it is empty.

    The column is read like a completion (`extract_answer`). A text without any mark is the answer itself.

    >>> extract_gold("9*2 = <<9*2=18>>18\\n#### 1,800"), extract_gold(" 42 ")
    ('1,800', '42')
    """
    answer = extract_answer(text)
    if answer is not None or MARKER in text:
        return answer
    return (after_thought(text) or "").strip() or None


def _unwrap(text: str) -> str | None:
    """Return the answer in the last box, or else after the last marker."""
    boxes, _ = _read_boxes(text)
    if boxes:
        contents: list[str] = []  # of the last box and of those before it that belong to the same answer, backwards
        next_start = len(text)  # where the next box starts
        for box in reversed(boxes):
            if contents:
                # Boxes are one answer if the text between them only joins them.
                is_near = 0 < next_start - box.end <= MAX_BETWEEN
                if not is_near or _BETWEEN.fullmatch(text, box.end + 1, next_start) is None:
                    break
            contents.append(text[box.content : box.end].strip())
            next_start = box.start
        items = [content for content in reversed(contents) if content]
        answer = items[-1] if _are_one_value(items) else ", ".join(items)
        return answer.strip() or None
    _, marker, following = text.rpartition(MARKER)
    if not marker:
        return None
    line, _, _ = following.lstrip().partition("\n")
    return line.strip() or None


def _is_cut_off(text: str) -> bool:
    """Whether a text begins an answer after its last complete one, and does not finish it."""
    _, _, rest = text.rpartition(ANSWER_CLOSES)
    if ANSWER_OPENS in rest:
        return True
    end = rest.rstrip()[-_END_LENGTH:]
    if end.endswith(_BEGUN_MARKS) or _ANNOUNCED.search(end):
        return True
    boxes, open_boxes = _read_boxes(rest)
    last_content = boxes[-1].content if boxes else 0
    if max(map(rest.rfind, _BOXES)) >= last_content:  # also without braces: \\boxed 8
        return True
    # a box that is not closed by the end of its line has lost its brace, and what follows is another answer
    line = rest.rfind("\n", 0, last_content) + 1
    return bool(open_boxes) and open_boxes[-1] >= line


def _read_boxes(text: str) -> tuple[list[_Box], list[int]]:
    """Return the boxes whose braces are balanced, in the order of their starts, and the starts of the others."""
    boxes: list[_Box] = []
    if not any(box in text for box in _BOXES):
        return boxes, []
    openers: list[tuple[int, int] | None] = []  # of each open box, where it and its content start; None: other braces
    for match in _BRACES.finditer(text):
        token = match[0]
        if token == "{":
            openers.append(None)
        elif token == "}":
            opener = openers.pop() if openers else None
            if opener:
                boxes.append(_Box(*opener, match.start()))
        elif len(token) > _ESCAPED_LENGTH:
            openers.append(match.span())
    return sorted(boxes), [opener[0] for opener in openers if opener]


def _are_one_value(items: list[str]) -> bool:
    r"""Whether all items are forms of one value: `15\frac{39}{40}` and `\frac{639}{40}`."""
    texts = set(items)
    if len(texts) == 1:
        return True
    if len(texts) > MAX_FORMS:
        return False
    values: set[object] = set()
    for text in texts:
        number = read_number(plain(text))
        value = number.fraction if number else None
        values.add(value or text)  # a zero as its text
    return len(values) == 1
