r"""The choice that an answer names: the letter of an option, or a verdict (yes, no, true, false).

An answer names a choice if it names exactly one. Options that it rejects (`C, not D`, `C because D is wrong`) do not
count. An enumeration (`C or D`), a correction (`C. Actually D`) and a rejected option alone (`C is wrong`) name none.
The text of an option may hold other letters: `B. Vitamin C` names B.

All functions take a text in the notation of `plain`, of at most `numeric.MAX_LENGTH` characters.
"""

from __future__ import annotations

import re
from functools import lru_cache

VERDICTS = {"yes": "yes", "true": "yes", "no": "no", "false": "no"}
LETTERS = "ABCDEFGHIJ"

_END = r"(?![\w'’])"
_OPTION = r"(?i:(?:the\s+)?(?:option|choice|answer|letter)\s+)?"
_REJECTED = (
    r"(?:(?:an?\s+|the\s+)?(?:wrong|incorrect|false)|untrue|impossible|invalid|eliminated|excluded|rejected|unlikely|out|ruled\s+out"
    r"|not\s+(?:right|correct|true|valid|possible|it|(?:the\s+|a\s+)?(?:\w+\s+)?(?:answer|option|choice|one)))"
)
_DENIED = re.compile(  # of a letter or a verdict before it: "is not right"
    rf"\W{{0,4}}(?:(?:is|are|was|were|seems|looks|must\s+be|would\s+be|can\s+be|has\s+been)\s+"
    rf"(?:clearly\s+|definitely\s+|obviously\s+|probably\s+|also\s+)?{_REJECTED}{_END}"
    rf"|(?:isn['’]t|wasn['’]t|aren['’]t|can(?:not|\s+not|['’]t)\s+be)\s+(?:the\s+|a\s+)?"
    rf"(?:right|correct|true|valid|possible|best|answer|option|choice|it|one){_END}"
    rf"|(?:does\s+not|doesn['’]t|will\s+not|won['’]t)\s+(?:work|fit|apply|hold){_END}"
    r"|(?:is\s+not|isn['’]t|can(?:not|['’]t)\s+be)\W*$)",
    re.IGNORECASE,
)
_DENIED_OPTION = re.compile(  # of an option that is named as such, whatever follows: "Option B is not a base"
    rf"\W*\s*(?:is\s+(?:not|{_REJECTED})|isn['’]t|cannot|can['’]t){_END}", re.IGNORECASE
)
_JOINS = r"(?i:or|and|nor|but|also|maybe|perhaps|possibly|alternatively|otherwise|else|then|either|vs|versus|plus)"
_CORRECTS = (
    r"(?i:actually|wait|hmm+|sorry|correction|scratch\s+that|i\s+mean|on\s+second\s+thoughts?|rather(?!\s+than)"
    r"|instead(?!\s+of)|(?:change|changing|changed|switch|switching)\b[^.]{0,20}\bto)"
)
_SAID = r"(?i:(?:it['’]s|it\s+is|(?:the\s+)?answer\s+(?:is|should\s+be)|i\s+choose|i\s+pick|make\s+(?:it|that))\s+)?"
_AFFIRMED = (
    r"(?i:also\s+(?:works|fits)|too|(?:is|are|was|could\s+be|may\s+be|might\s+be|would\s+be|can\s+be|seems|looks|works|fits)"
    r"(?:\s+(?:also|equally|just\s+as|too|the|a|more|most))*\s+"
    r"(?:right|correct|true|possible|plausible|best|better|answer|valid|fine|acceptable|likely))"
)

_LONE = re.compile(r"[^\w]*([A-Za-z])[^\w]*")
_LEADING = re.compile(  # the label that an answer begins with; `weak`: what follows may be another label
    rf"\W*?(?:\((?P<bracketed>[{LETTERS}])\)|(?P<closed>[{LETTERS}])\s*[):\]]|(?P<dotted>[{LETTERS}])\.(?=\s)"
    rf"|(?P<weak>[{LETTERS}])(?:\s*[-–—,;](?=\s)"
    rf"|(?=\s+\((?:not|{_JOINS}|[{LETTERS}])\b)|(?=\s+(?i:because|since|not|and\s+not|rather\s+than|instead\s+of|is\s+(?:the\s+)?(?:right|correct|best|true|answer"
    r")|isn['’]t|is\s+not)\b)))(?P<rest>.*)",
    re.DOTALL,
)  # fmt: skip
_NAMED = re.compile(
    rf"(?P<before>(?i:\b(?:not|except|excluding|eliminate|eliminated|reject|rejected|exclude|rule\s+out|ruled\s+out|nor"
    rf"|neither|than|of|against)\s+(?:the\s+)?)?)"
    rf"(?i:\b(?:answer|option|choice)(?:\s+is)?(?:\s+(?:option|choice))?)"
    rf"\s*[:=]?\s*\W?(?P<letter>[{LETTERS}])\b(?!['’])(?P<rest>.*)",
    re.DOTALL,
)

_LABEL_GROUPS = ("bracketed", "closed", "dotted", "weak", "letter")
_PROSE = r"(?!(?:sin|cos|tan|log|ln|exp|sqrt|pi)\b)[A-Za-z]{2,}"
_EXPRESSION = re.compile(  # a letter with an operator or in a list of values
    rf"[{LETTERS}]\)?\s*(?:[+*/^_=<>\\]|-(?!\s+{_PROSE})|[,;(](?!\s*(?:{_PROSE}|[{LETTERS}]\s+is\b)))"
)
_SUMMARY = re.compile(r"\W*(?:both|neither|all|none|only)\b", re.IGNORECASE)  # the text of an option: both A and B


@lru_cache(maxsize=len(LETTERS))
def _others(letter: str) -> dict[str, re.Pattern[str]]:
    """Return the patterns that find another label than `letter` in what follows it."""
    other = rf"[{LETTERS.replace(letter, '')}]"
    label = rf"{_OPTION}(?:\({other}\)|{other}){_END}"
    alone = r"\s*(?:$|[^\w\s'’]|(?i:or|and|is|because|since|seems|looks|fits|works)\b)"
    not_denied = rf"(?!{_DENIED.pattern})"
    anywhere = (
        rf"[(\s]{other}\s*:",  # A: no, B: yes
        rf"(?:[,;]|\s(?:or|and))\s*\(?{other}[.)]\s",  # 12, D. 13
        rf"\s{other}\)\s",  # 12 D) 13
        rf"{_JOINS}\W+\({other}\)",  # oxygen or (D) nitrogen
        rf"\b(?:{_CORRECTS}\b\W*|(?i:no)\b\W+)+{_SAID}{label}{alone}{not_denied}",  # Actually D
        rf"(?:→|->|=>|\\(?:to|rightarrow|Rightarrow)(?![a-z]))\s*{label}",
        rf"^\W*{label}\s+(?i:is\s+)?(?i:also|too)\b",  # D also works
        rf"(?:[.,;!?]\s*|\b(?i:but|and|or|though|although|while)\s+){label}\s+{_AFFIRMED}\b",  # but D is also right
    )
    return {
        "first": re.compile(  # ", (D)", "or D", "D, E"
            rf"\W*\({other}\){not_denied}|\W*(?:{_JOINS}\b\W*)+{label}{not_denied}"
            rf"|\W*{other}\s*(?:$|[,;:/&|)?!]|\.\s*(?![a-z\s]))"
        ),
        "next": re.compile(rf"\W*(?:{_JOINS}\b\W*)*{label}{not_denied}"),
        "anywhere": re.compile("|".join(f"(?:{pattern})" for pattern in anywhere)),
        # (C) 12 (D) 13; most questions have five options, and text has symbols such as (F) and (G)
        "bracketed": re.compile(rf"(?:^|\s)\((?!{letter})[A-E]\)\s+\S"),
    }


def read_letter(answer: str) -> str | None:
    """Return the one letter, A to J, that an answer names, or None; a lone letter may be any.

    >>> read_letter("B) Nitrogen"), read_letter("A solvent"), read_letter("Option C"), read_letter("A and C")
    ('B', None, 'C', None)
    >>> read_letter("C, not D"), read_letter("C. Actually D"), read_letter("(C) is not right")
    ('C', None, None)
    """
    lone = _LONE.fullmatch(answer)
    if lone:
        return lone[1].upper()
    return read_label(answer)


def read_label(answer: str) -> str | None:
    """Return the one letter that an answer names in words or with the option's text, or None; not a lone letter.

    >>> read_label("B) Nitrogen"), read_label("Option B"), read_label("B")
    ('B', 'B', None)
    """
    leading = _LEADING.match(answer)
    if leading:
        return _leading_letter(leading)
    return _named_letter(answer)


def has_label(answer: str) -> bool:
    """Whether an answer begins with the label of an option, or names one, and not a variable of an expression.

    >>> has_label("B: Oxygen"), has_label("Option B"), has_label("B - 4ac"), has_label("B, 12")
    (True, True, False, False)
    """
    label = _LEADING.match(answer) or _NAMED.search(answer)
    if label is None:
        return False
    letter = next(name for name in _LABEL_GROUPS if label.groupdict().get(name))
    return not _EXPRESSION.match(answer, label.start(letter))


def _leading_letter(leading: re.Match[str]) -> str | None:
    letter = leading["bracketed"] or leading["closed"] or leading["dotted"] or leading["weak"]
    rest = leading["rest"]
    others = _others(letter)
    if _SUMMARY.match(rest) and not leading["weak"]:
        return letter
    if _DENIED.match(rest) or others["first"].match(rest) or others["anywhere"].search(rest):
        return None
    if leading["weak"] and others["next"].match(rest):
        return None
    if leading["bracketed"] and others["bracketed"].search(rest):
        return None
    return letter


def _named_letter(answer: str) -> str | None:
    """Return the letter of the options that an answer names as such ("the answer is B"), if it is one."""
    named = set()
    while match := _NAMED.search(answer):
        letter = match["letter"]
        answer = match["rest"]
        if match["before"]:  # not option B
            continue
        others = _others(letter)
        if _DENIED_OPTION.match(answer):
            return None
        if letter not in named and others["anywhere"].search(answer):  # once for each letter: it reads all that follows
            return None
        if _AGAIN.match(answer) and others["next"].match(answer):
            return None
        named.add(letter)
    return named.pop() if len(named) == 1 else None


_AGAIN = re.compile(rf"\s*\)?\s*(?:[,;/&|?]|\(?\s*{_JOINS}\b)")  # what joins a named option to the next letter

# -- verdicts ----------------------------------------------------------------------------------------------------------

_VERDICT = r"(yes|no|true|false)"
_FIRST_WORD = re.compile(rf"\W*{_VERDICT}{_END}(.*)", re.DOTALL | re.IGNORECASE)
_STATED = re.compile(
    rf"\b(?:answer(?:\s+is)?\s*:?|is\s*:?(?=\s*(?:true|false)))\s*\W?{_VERDICT}{_END}(.*)", re.DOTALL | re.IGNORECASE
)
_NEXT_VERDICT = re.compile(rf"\s*(?:,|/|\bor\b|\band\b)?\s*{_VERDICT}{_END}", re.IGNORECASE)
_BEFORE_A_VERDICT = rf"(?:(?:or|and|but|maybe|perhaps|possibly|{_CORRECTS})\b\W*)"
_LATER_VERDICT = re.compile(
    rf"(?:(?:^|(?<=\w))(?!\s+\w)\W+{_BEFORE_A_VERDICT}*|\b{_BEFORE_A_VERDICT}+){_SAID}{_VERDICT}\s*(?:$|[^\w\s'’-])"
    rf"|(?:it|this|that|statement|claim|answer)\s+(?:is|was)\s+{_VERDICT}\W*$",
    re.IGNORECASE,
)  # fmt: skip
_OR_NOT = re.compile(r"\W*or\s+not\b", re.IGNORECASE)


def read_verdict(answer: str) -> str | None:
    """Return `yes` (or true) or `no` (or false), whichever an answer states, or None.

    >>> read_verdict("TRUE."), read_verdict("No, it burns."), read_verdict("yes or no")
    ('yes', 'no', None)
    >>> read_verdict("Yes? No."), read_verdict("Yes is wrong"), read_verdict("Yes, there is no oxygen")
    (None, None, 'yes')
    """
    match = _FIRST_WORD.match(answer) or _STATED.search(answer)
    if match is None:
        return None
    verdict = VERDICTS[match[1].lower()]
    rest = match[2]
    if _DENIED.match(rest) or _OR_NOT.match(rest):
        return None
    following = [_NEXT_VERDICT.match(rest), *_LATER_VERDICT.finditer(rest)]
    for found in following:
        word = found and next(filter(None, found.groups()))
        if word and VERDICTS[word.lower()] != verdict:
            return None
    return verdict
