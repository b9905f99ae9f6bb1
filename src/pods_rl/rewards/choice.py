"""Multiple choice, and true or false: read which letter or verdict an answer names."""

from __future__ import annotations

import re

from .extract import extract_answer
from .notation import plain
from .numeric import MAX_LENGTH

_VERDICTS = {"yes": "yes", "true": "yes", "no": "no", "false": "no"}
_LETTER = r"[A-J]"
_END = r"(?![\w'’])"
_LONE = re.compile(r"[^\w]*([A-Za-z])[^\w]*")
_LEADING = re.compile(
    rf"\W*?(?:\(({_LETTER})\)|({_LETTER})\s*[):\]]|({_LETTER})(?:\.|\s*[-–—,])(?=\s))\s*(.*)", re.DOTALL
)
_NAMED = re.compile(
    rf"(?i:\b(?<!not )(?:answer|option|choice)(?:\s+is)?(?:\s+(?:option|choice))?)"
    rf"\s*[:=]?\s*\W?({_LETTER})\b(?!['’])(.*)",
    re.DOTALL,
)
_AGAIN = re.compile(rf"\s*\W?\s*(?:(?:,|/|&|\bor\b|\band\b)\s*)+\(?{_LETTER}{_END}")
_ANOTHER = re.compile(rf"\(?{_LETTER}\)?\s*(?:$|[:)])|(?:or|and)\s+\(?{_LETTER}{_END}|.*[(\s]{_LETTER}\s*:", re.DOTALL)
_DENIED = re.compile(r"\W*\s*is\s+(?:not|wrong|incorrect|false)\b")
_WORD = r"(yes|no|true|false)"
_FIRST_WORD = re.compile(rf"\W*{_WORD}{_END}(.*)", re.DOTALL | re.IGNORECASE)
_STATED = re.compile(
    rf"\b(?:answer(?:\s+is)?\s*:?|is\s*:?(?=\s*(?:true|false)))\s*\W?{_WORD}{_END}(.*)", re.DOTALL | re.IGNORECASE
)
_OTHER_WORD = re.compile(rf"\s*(?:,|/|\bor\b|\band\b)?\s*{_WORD}{_END}", re.IGNORECASE)


def choice(text: str, gold: str) -> float:
    r"""Return 1.0 if the final answer of `text` names the choice `gold`, else 0.0.

    Source: arXiv 2504.13818, experiments in chemistry: reward 1.0 for a right answer. Range {0.0, 1.0}.

    `text` is a completion, its answer found by `extract_answer`; `gold` is a letter, or `Yes` or `No` (`True` and
    `False` mean the same). A letter may be the whole answer, in either case, or as a capital begin it ("B. text",
    "(B) text", "B: text") or be named in it ("Option B", "the answer is B"). An answer that names two choices scores
    0.0. Any other gold answer is compared as text, without regard to case.

    >>> choice("<answer>(b)</answer>", "B"), choice(r"So \boxed{\text{B. Oxygen}}", "B")
    (1.0, 1.0)
    >>> choice("<answer>A or B</answer>", "B"), choice("<answer>True</answer>", "Yes")
    (0.0, 1.0)
    """
    answer, gold = extract_answer(text), gold.strip()
    if answer is None or not gold:
        return 0.0
    if answer == gold:
        return 1.0
    if len(answer) > MAX_LENGTH:
        return 0.0
    answer = plain(answer)
    if gold.casefold() in _VERDICTS:
        return float(read_verdict(answer) == _VERDICTS[gold.casefold()])
    if len(gold) == 1 and gold.isalpha():
        return float(read_letter(answer) == gold.upper())
    return float(answer.casefold() == plain(gold).casefold())


def read_letter(answer: str) -> str | None:
    """Return the one letter, A to J, that an answer names, or None; a lone letter may be any.

    >>> read_letter("B) Nitrogen"), read_letter("A solvent"), read_letter("Option C"), read_letter("A and C")
    ('B', None, 'C', None)
    """
    if lone := _LONE.fullmatch(answer):
        return lone[1].upper()
    if leading := _LEADING.match(answer):
        *letters, rest = leading.groups()
        return None if _ANOTHER.match(rest) else next(letter for letter in letters if letter)
    named = set()
    while match := _NAMED.search(answer):
        letter, answer = match.groups()
        if _AGAIN.match(answer) or _DENIED.match(answer):
            return None
        named.add(letter)
    return named.pop() if len(named) == 1 else None


def read_verdict(answer: str) -> str | None:
    """Return `yes` (or true) or `no` (or false), whichever an answer states, or None.

    >>> read_verdict("TRUE."), read_verdict("No, it burns."), read_verdict("yes or no")
    ('yes', 'no', None)
    """
    match = _FIRST_WORD.match(answer) or _STATED.search(answer)
    if match is None:
        return None
    other = _OTHER_WORD.match(match[2])
    if other and _VERDICTS[other[1].lower()] != _VERDICTS[match[1].lower()]:
        return None
    return _VERDICTS[match[1].lower()]
