"""Graded rewards without mathematics: form, length, choices, arithmetic on given numbers, sequences."""

from __future__ import annotations

import re
from fractions import Fraction

from .extract import extract_answer
from .notation import plain
from .numeric import MAX_LENGTH, read_expression

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PENALTY_PER_CHARACTER = 0.01
REWARD_PER_TAG = 0.025
MAX_EXPRESSION = 400  # characters of an expression: bounds depth, size of numbers and time
USES_THE_NUMBERS = Fraction(1, 10)  # partial credit: every number used once, at any distance
CLOSENESS = Fraction(1, 5)  # plus up to this much, the nearer to the target
MAX_SEQUENCE = 20_000  # characters of an answer that are read

_BETWEEN = re.compile(r"[\s,;|<>(){}\[\]→]+")
_DRESS = re.compile(r"\\(?:left|right|text|quad|langle|rangle)(?![a-z])|\\[,;:! {}]|->|[$`*'\"]")


def format_reward(text: str, gold: str = "") -> float:
    """Return 1.0 for `<think>...</think><answer>...</answer>` and nothing else, minus 0.01 per stray character.

    Source: arXiv 2504.13818, single-GPU experiments, where it is weighted by 0.1. Range [0, 1].

    The think block runs from the first `<think>` to the first `</think>` after it, the answer block from the
    first `<answer>` after that to the first `</answer>` after it; without both, 0.0. Every character outside
    the two blocks (before, between, after) that is not whitespace is stray. `gold` is not used.

    >>> format_reward("<think>9*2=18</think>\\n<answer>18</answer>")
    1.0
    >>> format_reward("Sure: <think>9*2=18</think><answer>18</answer>")
    0.95
    """
    outside = _outside_blocks(text)
    if outside is None:
        return 0.0
    stray = sum(len(part) for part in outside.split())
    return max(0.0, round(1.0 - PENALTY_PER_CHARACTER * stray, 2))


def tag_count(text: str, gold: str = "") -> float:
    """Return 0.025 for each of the four tags that occurs exactly once.

    Source: arXiv 2504.13818, single-GPU experiments. Range [0, 0.1]. `gold` is not used.

    >>> tag_count("<think>a</think><answer>1</answer><answer>2</answer>")
    0.05
    """
    return round(REWARD_PER_TAG * sum(text.count(tag) == 1 for tag in TAGS), 3)


def _outside_blocks(text: str) -> str | None:
    outside, rest = "", text
    for opening, closing in (TAGS[:2], TAGS[2:]):
        before, found, block = rest.partition(opening)
        _, closed, rest = block.partition(closing)
        if not (found and closed):
            return None
        outside += before + " "
    return outside + rest


def overlong(tokens: int, limit: int, buffer: int | None = None) -> float:
    """Return 0.0 for a completion of up to `limit - buffer` tokens, falling linearly to -1.0 at `limit`.

    Source: DAPO (arXiv 2503.14476), equation 13. Range [-1, 0].

    `tokens` is the length of a completion, `limit` the most it can have, `buffer` the tokens before that over which the
    penalty grows: a fifth of the limit if None (DAPO: 4096 before 20480). A buffer beyond the limit is
    cut to it. Raises ValueError if the limit or buffer is below 1.

    >>> overlong(80, 100), overlong(90, 100), overlong(100, 100), overlong(90, 100, buffer=40)
    (0.0, -0.5, -1.0, -0.75)
    """
    buffer = max(1, limit // 5) if buffer is None else min(buffer, limit)
    if limit < 1 or buffer < 1:
        raise ValueError(f"overlong needs a limit and a buffer of at least 1 token: got {limit} and {buffer}")
    return max(-1.0, min(0.0, (limit - buffer - tokens) / buffer))


def countdown(text: str, gold: str) -> float:
    r"""Return 1.0 if the final answer of `text` makes the target from the given numbers, less if it only uses them.

    Source: arXiv 2504.13818 asks for verifiable rewards; this one is graded. Range [0, 1].

    `text` is a completion, its answer found by `extract_answer`; `gold` is one right expression: its numbers are the
    given ones and its value is the target. An answer may contain numbers, `+ - * / ( )`, `× ÷` and their LaTeX; a
    trailing `= 24` must be true. One with exactly the given numbers but another value v scores
    0.1 + 0.2 / (1 + |v - target|), so 0.2 if it is off by one and 0.1 far away; anything else scores 0.0.

    >>> countdown("<answer>(5 - 1) * 6 = 24</answer>", "6*(5-1)"), countdown(r"\boxed{5 \times 6 - 1}", "6*(5-1)")
    (1.0, 0.1333)
    >>> countdown("<answer>4 * 6</answer>", "6*(5-1)")
    0.0
    """
    answer = extract_answer(text)
    if answer is None or len(answer) > MAX_EXPRESSION:
        return 0.0
    wanted, found = read_expression(gold), read_expression(answer)
    if wanted is None or found is None or wanted[1] != found[1]:
        return 0.0
    miss = abs(found[0] - wanted[0])
    return 1.0 if miss == 0 else round(float(USES_THE_NUMBERS + CLOSENESS / (1 + miss)), 4)


def positions(text: str, gold: str) -> float:
    """Return the share of positions at which the final answer of `text` has the same item as `gold`.

    Source: arXiv 2504.13818 asks for verifiable rewards; this one is graded. Range [0, 1].

    `text` is a completion, its answer found by `extract_answer`; `gold` holds the items in order, separated by
    spaces. Commas, semicolons, arrows and brackets may separate an answer's items too; words count in any case. The
    share is of the longer of the two, so that 1.0 means the same sequence. An answer that has more than a quarter of
    the gold items too many or too few (one is always allowed) scores 0.0.

    >>> positions("<answer>[1, 2, 4, 3]</answer>", "1 2 3 4"), positions("<answer>1 2 3</answer>", "1 2 3 4")
    (0.5, 0.75)
    >>> positions("<answer>1</answer>", "1 2 3 4")
    0.0
    """
    answer = extract_answer(text)
    if answer is None or len(answer) > MAX_SEQUENCE:
        return 0.0
    found, wanted = _items(answer), _items(gold)
    if not wanted or abs(len(found) - len(wanted)) > max(1, len(wanted) // 4):
        return 0.0
    right = sum(mine == theirs for mine, theirs in zip(found, wanted, strict=False))
    return right / max(len(found), len(wanted))


def _items(text: str) -> list[str]:
    text = _DRESS.sub(" ", text.strip().removesuffix("."))
    return [item.casefold() for item in _BETWEEN.split(text) if item]


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
