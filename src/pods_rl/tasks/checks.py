r"""Check prompts and gold answers before anything is trained.

A gold answer that no completion can match is never rewarded, and a prompt that ends with the assistant's turn gives the
answer away. Refused are such prompts, and gold answers that are missing, that hold an empty box or unbalanced braces,
that the task's own grader does not accept, or that lost a backslash when they were written: `"\frac12"` in JSON is a
form feed and `rac12`. Prose is only noted: it is compared word for word, so a completion could match it.
"""

from __future__ import annotations

import datetime
import decimal
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UserError
from ..rewards import extract_answer, extract_gold, get_reward
from ..text import counted, describe, short
from .files import with_numbers
from .sources import column_of
from .task import GRADERS, Task

SHOWN = 5  # rows that a message names
_EXACT = 2.0**53  # from here on floats skip whole numbers
_EXACT_DIGITS = 15  # significant digits that every float keeps

# What is left of a LaTeX command whose backslash and first letter were read as an escape: `\times` is a tab and `imes`.
_REST_OF_COMMAND = re.compile(
    r"\t(?:ext[a-z]{0,6}\s*\{|imes(?![a-z])|heta(?![a-z])|frac(?![a-z])|riangle|ilde(?![a-z])|binom(?![a-z])"
    r"|anh?(?=\s*[({\\^0-9])|au(?![a-z])|herefore|o(?=\s*(?:\\|-?[0-9]|[a-z]\b)))"
    r"|\n(?:eq(?![a-z])|abla(?![a-z])|otin(?![a-z])|eg(?![a-z])|ot(?=\\)|e(?=\s+[-\\0-9]))"
    r"|\r(?:ight|ho(?![a-z])|angle(?![a-z])|floor|ceil|brace|brack)"
)
_CONTROL_OF_COMMAND = re.compile("[\x07\x08\x0b\x0c](?=[a-z])")  # as in \\alpha, \\beta, \\vec, \\frac
_LOST = "\ufffc"  # stands for a lost backslash while the gold answer is extracted
_ANSWER_MARKS = (r"\boxed", "<answer>", "####")
_NOTHING = re.compile(r"\\(?:[()\[\],;:! ]|text|mathrm|textbf|mathbf|boxed)|[\s$~{}\"'`*]")
_SIDES = re.compile(r"\\(left|right)(?![A-Za-z])")
_MISSING = frozenset(("nan", "null", "n/a", "<na>", "#n/a", "nat", "tbd", "todo", "?"))
_VAGUE = re.compile(
    r"\banswers?\s+(?:may |will |can )?var(?:y|ies)\b|\bsee (?:the )?(?:solution|explanation|above|below)\b"
    r"|\b(?:sample|possible) answers?\b|\bopen[- ]ended\b",
    re.IGNORECASE,
)
_PROSE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z][a-z'’]+")
_PLAIN = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")  # most gold answers of large data sets
_MANY_WORDS = 9
# roles of a chat template whose turn, at the end of a prompt, leaves nothing to answer
_ASSISTANT = frozenset(("assistant", "gpt", "model", "bot", "chatbot"))
_INSTRUCTIONS = frozenset(("system", "developer"))


def answer_text(value: object) -> str:
    """Return an answer as text, exactly as it is stored.

    >>> answer_text(27), answer_text(0.5), answer_text(" x ")
    ('27', '0.5', ' x ')
    """
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool) or value is None:
        raise UserError(f"the answer is {describe(value)}; expected text or a number")
    if isinstance(value, (datetime.date, datetime.time)):
        raise UserError(
            f"the answer was read as a {type(value).__name__}, {value}; store the column as text, as a completion "
            "should write it"
        )
    if isinstance(value, (int, decimal.Decimal)):
        return str(value)
    if isinstance(value, (float, np.float16, np.float32)):
        return _float_text(value)
    raise UserError(f"the answer is {describe(with_numbers(value))}; expected text or a number")


def _float_text(value: float | np.float16 | np.float32) -> str:
    number = float(value)
    if not math.isfinite(number):
        raise UserError(f"the answer is {number}, which is not a number; expected text or a number")
    text = str(value)  # the shortest text that reads as this float in its own precision
    digits = text.partition("e")[0].replace(".", "").strip("-0")
    if abs(number) >= _EXACT and len(digits) > _EXACT_DIGITS:
        raise UserError(
            f"the answer is the float {text}, whose last digits may be lost (another row has a fraction or no value); "
            "store the column as text"
        )
    return text


def read_gold(value: object, grader: str | None) -> str:
    r"""Return the gold answer in a value of the answer column; raise UserError if no completion can match it.

    `grader` is one of `GRADERS`, or None for a reward of the user's own, which may read gold answers of any form.

    >>> read_gold("2 + 2 = 4\n#### 4", "accuracy"), read_gold(1.5, "accuracy")
    ('4', '1.5')
    """
    text = answer_text(value)
    if _PLAIN.fullmatch(text):  # it has no mark, brace or backslash, so the extraction returns it and nothing is wrong
        return text
    # Mark the places first, because the extraction strips a tab or a form feed at the start of an answer.
    marked = text
    for lost in (_CONTROL_OF_COMMAND, _REST_OF_COMMAND):
        marked = lost.sub(lambda match: _LOST + match[0], marked)
    gold = extract_gold(marked)
    if gold is None:
        raise UserError(f"no gold answer in {describe(text)}; fix the row")
    problem = gold_problem(gold, grader)
    # a box or a tag for the answer, but none with an answer in it
    if problem is None and grader and any(mark in gold for mark in _ANSWER_MARKS) and extract_answer(marked) is None:
        problem = "its box or answer tag is empty or not closed"
    if problem:
        shown = describe(gold.replace(_LOST, ""))
        raise UserError(f"no completion can match the gold answer, {shown}: {problem}")
    return gold


def gold_problem(gold: str, grader: str | None) -> str | None:
    r"""Return why no completion can match a gold answer, and what to do; None if one may.

    >>> gold_problem("x\x01", "accuracy")
    'it holds the control character U+0001; remove it'
    >>> gold_problem("1/2", "accuracy")
    """
    if _LOST in gold or _CONTROL_OF_COMMAND.search(gold) or _REST_OF_COMMAND.search(gold):
        return "a backslash was lost: in JSON and in Python text it is written twice, as in \\\\frac"
    for character in gold:
        category = unicodedata.category(character)
        if category == "Cc" and character not in "\t\n\r":
            return f"it holds the control character U+{ord(character):04X}; remove it"
        if character == "\ufffd" or category == "Cs":
            return f"it holds U+{ord(character):04X}, which replaces a damaged character; save the file as UTF-8"
    if grader is None:
        return None
    braces = re.sub(r"\\.", "", gold, flags=re.DOTALL)
    if braces.count("{") != braces.count("}"):
        return "its braces are not balanced; close them"
    sides = _SIDES.findall(gold)
    if sides.count("left") != sides.count("right"):
        return r"its \left and \right are not balanced; add the missing one"
    if not _NOTHING.sub("", gold.replace(r"\{\}", "∅")):
        return "it is empty; give an answer or remove the row"
    return None


def check_golds(golds: Sequence[str], places: Sequence[str], grader: str) -> None:
    """Raise UserError if the grader does not accept gold answers as right; `places` names the row of each."""
    marks = get_reward(grader).batch([f"<answer>{gold}</answer>" for gold in golds], golds)
    marked = zip(golds, places, marks, strict=True)
    refused = [(place, gold) for gold, place, mark in marked if not mark >= 1]  # also true of NaN
    text = "{}: the grader does not accept {} as its own answer; fix the row"
    raise_listed([text.format(place, describe(gold)) for place, gold in refused])


def raise_listed(problems: Sequence[str]) -> None:
    """Raise a UserError that lists the first problems, a line each; do nothing if there are none."""
    if not problems:
        return
    lines = list(problems[:SHOWN])
    if len(problems) > SHOWN:
        lines.append(f"and {counted(len(problems) - SHOWN, 'more row')} with such a problem")
    raise UserError("\n".join(lines))


def gold_notes(golds: Iterable[str], source: str, grader: str | None) -> tuple[str, ...]:
    """Return a note on gold answers of a split that are prose, which is matched word for word, or missing values.

    >>> gold_notes(["4", "Answers vary"], "train.jsonl", "accuracy")
    ("train.jsonl: 1 gold answer is prose or a missing value, which completions are unlikely to match: row 2 (counted \
from 1), 'Answers vary'. Shorten or remove it, or grade it with a reward of your own.",)
    """
    if grader != "accuracy":
        return ()
    unlikely: list[str] = []
    for row, gold in enumerate(golds, start=1):  # once over the rows, which may not fit in memory
        if _PLAIN.fullmatch(gold):
            continue
        is_prose = _VAGUE.search(gold) or len(_PROSE_WORD.findall(gold)) >= _MANY_WORDS
        if is_prose or gold.strip().casefold() in _MISSING:
            unlikely.append(f"row {row} (counted from 1), {short(gold)!r}")
    if not unlikely:
        return ()
    several = len(unlikely) > 1
    return (
        f"{source}: {counted(len(unlikely), 'gold answer')} {'are' if several else 'is'} prose or a missing value, "
        f"which completions are unlikely to match: {'; '.join(unlikely[:SHOWN])}. Shorten or remove "
        f"{'them, or grade them' if several else 'it, or grade it'} with a reward of your own.",
    )


def last_turn_problem(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why chat messages cannot be a prompt: their last turn is not one to answer. None if they can.

    >>> last_turn_problem([{"role": "user", "content": "2+2?"}])
    >>> last_turn_problem([{"role": "system", "content": "Add."}])
    'the last message is of the role system, so there is no question to answer; end the prompt with a user message'
    """
    role = str(messages[-1].get("role")).casefold()
    if role in _ASSISTANT:
        return (
            f"the last message is of the role {role}, which gives the answer away; end the prompt with a user message "
            "and store the answer in the answer column"
        )
    if role in _INSTRUCTIONS:
        return (
            f"the last message is of the role {role}, so there is no question to answer; end the prompt with a user "
            "message"
        )
    return None


def check_own_task(task: Task) -> None:
    """Check the prompts and gold answers of a task that a user's function made, as those of files are checked."""
    grader = task.answer if task.answer in GRADERS else None
    for name, split in (("train", task.train), ("test", task.test)):
        places = [f"task {task.name}, {name} split, row {row} (counted from 1)" for row in range(1, len(split) + 1)]
        problems: list[str] = []
        for place, prompt, gold in zip(places, column_of(split, "prompt"), column_of(split, "answer"), strict=True):
            # a prompt of text has no turns
            problem = last_turn_problem(prompt) if prompt and not isinstance(prompt, str) else None
            if problem is None and grader:
                problem = _stored_gold_problem(gold, grader)
            if problem:
                problems.append(f"{place}: {problem}")
        raise_listed(problems)
        if grader:
            check_golds(list(split["answer"]), places, grader)


def _stored_gold_problem(gold: object, grader: str) -> str | None:
    """Return what is wrong with the gold answer of a task, which is graded as it is stored."""
    if not isinstance(gold, str):
        return f"the gold answer is {describe(gold)}; expected text"
    if not gold.strip():
        return f"the gold answer is {describe(gold)}; expected an answer"
    problem = gold_problem(gold, grader)
    if problem is None:
        return None
    return f"no completion can match the gold answer, {describe(gold)}: {problem}"
