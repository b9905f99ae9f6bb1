r"""The choice that an answer names: the letter of an option, or a verdict (yes, no, true, false).

An answer names a choice if it names exactly one. Options that it rejects (`C, not D`, `C because D is wrong`) do not
count. An enumeration (`C or D`), a correction (`C. Actually D`) and a rejected option alone (`C is wrong`) name none.
The text of an option may hold other letters: `B. Vitamin C` names B.

All functions take a text in the notation of `plain`, of at most `numerals.MAX_LENGTH` characters.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

VERDICTS = {"yes": "yes", "true": "yes", "no": "no", "false": "no"}
LETTERS = "ABCDEFGHIJKLMNOP"

_END = r"(?![\w'’])"  # of a word
_OPTION = r"(?i:(?:the\s+)?(?:option|choice|answer|letter)\s+)?"
_REJECTED = (
    r"(?:(?:an?\s+|the\s+)?(?:wrong|incorrect|false)"  # a wrong
    r"|untrue|impossible|invalid|eliminated|excluded|rejected|unlikely|out|ruled\s+out"
    r"|not\s+(?:right|correct|true|valid|possible|it"
    r"|(?:the\s+|a\s+)?(?:\w+\s+)?(?:answer|option|choice|one)))"  # not the best answer
)
_DENIED = re.compile(  # of a letter or a verdict before it
    r"\W{0,4}(?:(?:is|are|was|were|seems|looks|must\s+be|would\s+be|can\s+be|has\s+been)\s+"
    rf"(?:clearly\s+|definitely\s+|obviously\s+|probably\s+|also\s+)?{_REJECTED}{_END}"  # is clearly wrong
    r"|(?:isn['’]t|wasn['’]t|aren['’]t|can(?:not|\s+not|['’]t)\s+be)\s+(?:the\s+|a\s+)?"
    rf"(?:right|correct|true|valid|possible|best|answer|option|choice|it|one){_END}"  # cannot be right
    rf"|(?:does\s+not|doesn['’]t|will\s+not|won['’]t)\s+(?:work|fit|apply|hold){_END}"  # does not work
    r"|(?:is\s+not|isn['’]t|can(?:not|['’]t)\s+be)\W*$)",  # is not.
    re.IGNORECASE,
)
_DENIED_OPTION = re.compile(  # of an option that is named as such, whatever follows: "Option B is not a base"
    rf"\W*\s*(?:is\s+(?:not|{_REJECTED})|isn['’]t|cannot|can['’]t){_END}", re.IGNORECASE
)
_JOINS = r"(?i:or|and|nor|but|also|maybe|perhaps|possibly|alternatively|otherwise|else|then|either|vs|versus|plus)"
_CHANGE = r"\b(?:change|changing|changed|switch|switching)\b"
_CORRECTS = (
    r"(?i:actually|wait|hm{2,9}|sorry|correction|scratch\s+that|that\s+is|i\s+mean|on\s+second\s+thoughts?"
    r"|rather(?!\s+than)|instead(?!\s+of)"
    # Changing my answer to. One change does not reach beyond the next: there would be 2^n ways to read n of them.
    rf"|{_CHANGE}(?:(?!{_CHANGE})[^.]){{0,20}}\bto)"
)
_SAID = r"(?i:(?:it['’]s|it\s+is|(?:the\s+)?answer\s+(?:is|should\s+be)|i\s+choose|i\s+pick|make\s+(?:it|that))\s+)?"
_AFFIRMED = (
    r"(?i:also\s+(?:works|fits)|too"
    r"|(?:is|are|was|could\s+be|may\s+be|might\s+be|would\s+be|can\s+be|seems|looks|works|fits)"
    r"(?:\s+(?:also|equally|just\s+as|too|the|a|more|most))*\s+"  # is also
    r"(?:right|correct|true|possible|plausible|best|better|answer|valid|fine|acceptable|likely))"
)

_AROUND = r"[\s()\[\]{}<>.,:;*_\"'`$\\|✓✔✅☑?-]*"
_LONE = re.compile(rf"{_AROUND}([A-Za-z]){_AROUND}!?{_AROUND}")  # (b), B.
_REJECTING_SIGN = re.compile("[✗✘❌✕✖⛔🚫👎☒⊗¬]|~~|(?<!\\w)!")  # B ✗
_ANNOUNCEMENT = (  # "I'd go with B", "Therefore, B", "B only"
    "therefore so thus hence then now finally it it's its is must be should would has have to the answer final correct "
    "right best option choice letter response result solution ans i i'd i'll i'm will go going with choose choosing "
    "select selecting pick picking say think believe conclude that that's which my our we clearly definitely certainly "
    "surely obviously only just alone"
)
_ANNOUNCING = frozenset(_ANNOUNCEMENT.split())
_LEADING_LABEL = re.compile(  # the label that an answer begins with; `weak`: what follows may be another label
    rf"\W*?(?:\((?P<bracketed>[{LETTERS}])\)"  # (B) Oxygen
    rf"|(?P<closed>[{LETTERS}])\s*[):\]]"  # B) Oxygen
    rf"|(?P<dotted>[{LETTERS}])\.(?=\s)"  # B. Oxygen
    rf"|(?P<weak>[{LETTERS}])(?:\s*[-–—,;](?=\s)"  # B - Oxygen
    rf"|(?=\s+\((?:not|{_JOINS}|[{LETTERS}])\b)"  # B (not C)
    r"|(?=\s+(?i:because|since|not|and\s+not|rather\s+than|instead\s+of"  # B because
    r"|is\s+(?:the\s+)?(?:right|correct|best|true|answer)"  # B is right
    r"|isn['’]t|is\s+not)\b)))(?P<rest>.*)",  # B is not
    re.DOTALL,
)
_NAMED = re.compile(
    r"(?P<before>(?i:\b(?:not|except|excluding|eliminate|eliminated|reject|rejected|exclude|rule\s+out|ruled\s+out|nor"
    r"|neither|than|of|against|wrong|incorrect|false|worst)\s+(?:the\s+)?)?)"  # not the
    r"(?i:\b(?:answer|option|choice)(?:\s+is)?(?:\s+(?:option|choice))?)"  # answer is option
    rf"\s*[:=]?\s*\W?(?P<letter>[{LETTERS}])\b(?!['’])(?P<rest>.*)",  # : B
    re.DOTALL,
)
_BEGINS_A_TEXT = re.compile(  # the text of an option after a dash or a comma: "A polygenic score", "A and B", "E. coli"
    rf"\s*(?P<sign>[-–—,;])\s+[{LETTERS}][0-9]?\.?\s+"
    r"(?!(?i:(?:is|was|are)\s+(?:also|too|the|an?|not|right|correct|true|best|better|possible|likely|wrong|incorrect"
    r"|false|it)|isn['’]t|seems|looks|works|fits|also|too|because|since|as\s+well|instead|maybe|perhaps|would|could"
    r"|may|might|can|must|should|either|then|but|not)\b)(?P<word>[A-Za-z]{2,})"
)
_JOINED_TO_NEXT = re.compile(rf"\s*\)?\s*(?:[,;/&|?]|\(?\s*{_JOINS}\b)")  # ", D" and " or D" after an option

_LETTER_GROUPS = ("bracketed", "closed", "dotted", "weak", "letter")
_PROSE = r"(?!(?:sin|cos|tan|log|ln|exp|sqrt|pi)\b)[A-Za-z]{2,}"
_TEXT = rf"(?:{_PROSE}|[A-Z][0-9]?\.?\s+{_PROSE})"  # Oxygen, A solvent
_EXPRESSION = re.compile(
    rf"[{LETTERS}]\)?\s*(?:[+*/^_=<>\\]"  # B + C
    rf"|-(?!\s+{_TEXT})"  # B - 4ac, but not B - Oxygen
    rf"|[,;(](?!\s*(?:{_TEXT}|[{LETTERS}]\s+is\b)))"  # B, 12
)
_ONE_CAPITAL = re.compile(r"\s*[F-P]")  # the text of an option: B) K, of potassium; A to E may be a second answer
_SUMMARY = re.compile(r"\W*(?:both|neither|all|none|only)\b", re.IGNORECASE)  # the text of an option: both A and B


class _OtherLabels(NamedTuple):
    """Patterns that find another label in the text after a label."""

    first: re.Pattern[str]  # right after it: ", (D)", "or D", "D, E"
    next: re.Pattern[str]  # right after it, in a text that goes on: "D", "or (D)"
    anywhere: re.Pattern[str]
    bracketed: re.Pattern[str]  # (D) 13


@lru_cache(maxsize=len(LETTERS))
def _labels_except(letter: str) -> _OtherLabels:
    """Return the patterns that find another label than `letter` in what follows it."""
    another = rf"[{LETTERS.replace(letter, '')}]"
    label = rf"{_OPTION}(?:\({another}\)|{another}){_END}"
    alone = r"\s*(?:$|[^\w\s'’]|(?i:or|and|is|because|since|seems|looks|fits|works)\b)"
    not_denied = rf"(?!{_DENIED.pattern})"
    anywhere = (
        rf"[(\s]{another}\s*:",  # A: no, B: yes
        rf"(?:[,;]|\s(?:or|and))\s*\(?{another}[.)]\s",  # 12, D. 13
        rf"\s{another}\)\s",  # 12 D) 13
        rf"{_JOINS}\W+\({another}\)",  # oxygen or (D) nitrogen
        rf"\b(?:{_CORRECTS}\b\W*|(?i:no)\b\W+)+{_SAID}{label}{alone}{not_denied}",  # Actually D
        rf"(?:→|->|=>|\\(?:to|rightarrow|Rightarrow)(?![a-z]))\s*{label}",
        rf"^\W*{label}\s+(?i:is\s+)?(?i:also|too)\b",  # D also works
        rf"(?:[.,;!?]\s*|\b(?i:but|and|or|though|although|while)\s+){label}\s+{_AFFIRMED}\b",  # but D is also right
    )
    return _OtherLabels(
        first=re.compile(
            rf"\W*\({another}\){not_denied}"  # , (D)
            rf"|\W*(?:{_JOINS}\b\W*)+{label}{not_denied}"  # or D
            rf"|\W*{another}\s*(?:$|[,;:/&|)?!]|\.\s*(?![a-z\s]))"  # D, E
        ),
        next=re.compile(rf"\W*(?:{_JOINS}\b\W*)*{label}{not_denied}"),
        anywhere=re.compile("|".join(f"(?:{pattern})" for pattern in anywhere)),
        # most questions have five options, and text has symbols such as (F) and (G)
        bracketed=re.compile(rf"(?:^|\s)\((?!{letter})[A-E]\)\s+\S"),
    )


def read_letter(answer: str) -> str | None:
    """Return the one letter, A to P, that an answer names, or None; a lone letter may be any.

    >>> read_letter("B) Nitrogen"), read_letter("A solvent"), read_letter("Option C"), read_letter("A and C")
    ('B', None, 'C', None)
    >>> read_letter("C, not D"), read_letter("C. Actually D"), read_letter("(C) is not right")
    ('C', None, None)
    """
    lone = _LONE.fullmatch(answer)
    if lone:
        return lone[1].upper()
    return read_label(answer)


def _announced_letter(answer: str) -> str | None:
    """Return the one letter of an answer of which every other word only announces it."""
    words = re.findall(r"[^\s()\[\]{}.,:;*_\"`$|✓✔✅☑-]+", answer.replace("’", "'"))
    others = [word for word in words if word.lower() not in _ANNOUNCING]
    if not others and words and words[-1] == "I":
        return "I"
    if len(others) != 1 or len(words) < 2 or others[0] not in LETTERS:
        return None
    following = words[words.index(others[0]) + 1 :]
    if following and following[0] not in ("is", "only", "alone"):  # A solution
        return None
    return others[0]


def read_label(answer: str) -> str | None:
    """Return the one letter that an answer names in words or with the option's text, or None; not a lone letter.

    >>> read_label("B) Nitrogen"), read_label("Option B"), read_label("B")
    ('B', 'B', None)
    """
    if _REJECTING_SIGN.search(answer):
        return None
    announced = _announced_letter(answer)
    if announced:
        return announced
    leading = _LEADING_LABEL.match(answer)
    if leading:
        return _leading_letter(leading)
    return _named_letter(answer)


def has_label(answer: str) -> bool:
    """Whether an answer begins with the label of an option, or names one, and not a variable of an expression.

    >>> has_label("B: Oxygen"), has_label("Option B"), has_label("B - 4ac"), has_label("B, 12")
    (True, True, False, False)
    """
    if _announced_letter(answer):
        return True
    label = _LEADING_LABEL.match(answer) or _NAMED.search(answer)
    if label is None:
        return False
    groups = label.groupdict()
    group = next(name for name in _LETTER_GROUPS if groups.get(name))
    return not _EXPRESSION.match(answer, label.start(group))


def _leading_letter(leading: re.Match[str]) -> str | None:
    """Return the letter of the label that an answer begins with, unless what follows names another or rejects it."""
    letter = leading["bracketed"] or leading["closed"] or leading["dotted"] or leading["weak"]
    rest = leading["rest"]
    if not leading["weak"] and (_SUMMARY.match(rest) or _ONE_CAPITAL.fullmatch(rest)):
        return letter
    another = _labels_except(letter)
    if _DENIED.match(rest) or another.first.match(rest) or another.anywhere.search(rest):
        return None
    if leading["weak"] and another.next.match(rest) and not _begins_a_text(leading):
        return None
    if leading["bracketed"] and another.bracketed.search(rest):
        return None
    return letter


def _begins_a_text(leading: re.Match[str]) -> bool:
    """Whether the text of an option begins after the dash or comma that follows its letter."""
    text = _BEGINS_A_TEXT.match(leading.string, leading.end("weak"))
    if text is None:
        return False
    is_list = text["sign"] in ",;" and text["word"].lower() in ("and", "or")  # B, D and E
    return not is_list


def _named_letter(answer: str) -> str | None:
    """Return the letter of the options that an answer names as such ("the answer is B"), if it is one."""
    letters: set[str] = set()
    named = _NAMED.search(answer)
    while named:
        letter = named["letter"]
        rest = named["rest"]
        if not named["before"]:  # not after "not option B"
            another = _labels_except(letter)
            if _DENIED_OPTION.match(rest):
                return None
            # once for each letter, since it reads all that follows
            if letter not in letters and another.anywhere.search(rest):
                return None
            if _JOINED_TO_NEXT.match(rest) and another.next.match(rest):
                return None
            letters.add(letter)
        named = _NAMED.search(rest)
    if len(letters) != 1:
        return None
    return letters.pop()


# -- verdicts ----------------------------------------------------------------------------------------------------------

_VERDICT = r"(yes|no|true|false)"
_FIRST_WORD = re.compile(rf"\W*{_VERDICT}{_END}(.*)", re.DOTALL | re.IGNORECASE)
_STATED = re.compile(
    r"\b(?:answer(?:\s+is)?\s*:?"  # the answer is yes
    r"|is\s*:?(?=\s*(?:true|false)))"  # it is true
    rf"\s*\W?{_VERDICT}{_END}(.*)",
    re.DOTALL | re.IGNORECASE,
)
_NEXT_VERDICT = re.compile(rf"\s*(?:,|/|\bor\b|\band\b)?\s*{_VERDICT}{_END}", re.IGNORECASE)  # (yes) or no
_BEFORE_A_VERDICT = rf"(?:(?:or|and|but|maybe|perhaps|possibly|{_CORRECTS})\b\W*)"
_LATER_VERDICT = re.compile(
    rf"(?:(?:^|(?<=\w))(?!\s+\w)\W+{_BEFORE_A_VERDICT}*|\b{_BEFORE_A_VERDICT}+)"  # (yes). Actually
    rf"{_SAID}{_VERDICT}\s*(?:$|[^\w\s'’-])"  # it is no.
    rf"|(?:it|this|that|statement|claim|answer)\s+(?:is|was)\s+{_VERDICT}\W*$",  # the statement is false.
    re.IGNORECASE,
)
_OR_NOT = re.compile(r"\W*or\s+not\b", re.IGNORECASE)  # yes or not


def read_verdict(answer: str) -> str | None:
    """Return `yes` (or true) or `no` (or false), whichever an answer states, or None.

    >>> read_verdict("TRUE."), read_verdict("No, it burns."), read_verdict("yes or no")
    ('yes', 'no', None)
    >>> read_verdict("Yes? No."), read_verdict("Yes is wrong"), read_verdict("Yes, there is no oxygen")
    (None, None, 'yes')
    """
    first = _FIRST_WORD.match(answer) or _STATED.search(answer)
    if first is None or _REJECTING_SIGN.search(answer):
        return None
    verdict = VERDICTS[first[1].lower()]
    rest = first[2]
    if _DENIED.match(rest) or _OR_NOT.match(rest):
        return None
    following = list(_LATER_VERDICT.finditer(rest))
    adjacent = _NEXT_VERDICT.match(rest)
    if adjacent:
        following.append(adjacent)
    for later in following:
        word = later[later.lastindex or 0]
        if VERDICTS[word.lower()] != verdict:
            return None
    return verdict
