"""Words next to a number that change what it says: bounds ("at least 12") and words that exclude it ("all but 12").

A bound is written as its relation: `>=`, `<=`, `>` or `<`. "about 12" and "approximately 12" still state 12.
"""

from __future__ import annotations

import re

_COMPARED = r"(?:more|less|[a-z]{3,}er)(?:\s+[a-z]+)?"  # more than, less likely than, older than
_HIGH = r"(?:more|greater|larger|higher|bigger|longer|older|taller|later|heavier|above|over)"
_LOW = r"(?:less|fewer|smaller|lower|shorter|younger|earlier|lighter|below|under)"
_SUMMING = ("add", "adds", "adding", "sum", "sums", "come", "comes", "round", "rounds")  # it adds up to 12
_UP_TO = "".join(f"(?<!{verb} )" for verb in _SUMMING) + "up to"

# In order: "no less than" is read before "less than".
_BEFORE = {
    ">=": rf"at (?:the )?(?:very )?least|at (?:a )?minimum(?: of)?|minimum of|(?:no|not|never) {_LOW}(?: than)?"
    rf"|{_HIGH} than or equal to|as (?:few|little|low|short) as",
    "<=": rf"at (?:the )?(?:very )?most|at (?:a )?maximum(?: of)?|maximum of|{_UP_TO}|{_LOW} than or equal to"
    rf"|(?:no|not|never) {_HIGH}(?: than)?|not exceeding|as (?:many|much|high|long|large) as",
    ">": rf"{_HIGH} than|above|over|exceed(?:s|ed|ing)?|upwards? of|in excess of|beyond",
    "<": rf"{_LOW} than|below|under|beneath|short of",
}
_AFTER = {
    ">=": rf"or (?:{_HIGH}|up|upwards?|better)|and (?:above|over|up|upwards?|older)"
    r"|at (?:the )?(?:very )?least\W*$|at (?:a )?minimum\W*$|^\W*(?:[a-z]+\s+)?minimum\W*$",
    "<=": rf"or {_LOW}|and (?:below|under|younger)"
    r"|at (?:the )?(?:very )?most\W*$|at (?:a )?maximum\W*$|^\W*(?:[a-z]+\s+)?max(?:imum)?\W*$|tops\W*$",
}
_EXCLUDED = (
    r"except(?:ing)?(?: for)?|excluding|but|besides|(?:apart|aside|different) from|other than|rather than"
    r"|instead of|unequal to|without|unlike|outside(?: of)?|within|nearly|almost|close to|near|between|non-?"
    r"|(?:divisible|divided|multiplied) by|modulo|factorial of"
    r"|(?:multiple|factor|divisor|square|cube|power|reciprocal|opposite|inverse|negation|negative|complement|fraction"
    rf"|portion|part|logarithm)s? of|{_COMPARED} than"
)
_LINK = (
    r"(?:\s+(?:exactly|about|approximately|a total of|a value of|(?:the )?(?:number|value|integer|total)s?(?: of)?))?"
)

_BOUNDS_BEFORE = {
    bound: re.compile(rf"(?<![A-Za-z])(?:an?\s+|the\s+)?(?:{phrase}){_LINK}[\s:]*$", re.IGNORECASE)
    for bound, phrase in _BEFORE.items()
}
_BOUNDS_AFTER = {
    bound: re.compile(rf"(?<![A-Za-z])(?:{phrase})(?![A-Za-z])", re.IGNORECASE) for bound, phrase in _AFTER.items()
}
_EXCLUDED_AFTER = re.compile(r"^\W*(?:(?:is|are) )?(?:excluded|excepted|omitted)(?![A-Za-z])", re.IGNORECASE)
_EXCLUDED_BEFORE = re.compile(rf"(?<![A-Za-z])(?:{_EXCLUDED}){_LINK}[\s:]*$", re.IGNORECASE)
_OPENING = {
    bound: re.compile(rf"\s*(?:an?\s+|the\s+)?(?:{phrase}){_LINK}\s+", re.IGNORECASE)
    for bound, phrase in _BEFORE.items()
}


def split_bound(before: str, after: str) -> tuple[str, str, str] | None:
    """Take a bound off the words around a number. Return it ("" if there is none) and the words that are left.

    Return None if the words before the number exclude it or name another number, as in "all except" and "square of".

    >>> split_bound("at least ", " eggs"), split_bound("", " eggs or more"), split_bound("all but ", "")
    (('>=', '', ' eggs'), ('>=', '', ' eggs '), None)
    >>> split_bound("It is ", " more eggs")
    ('', 'It is ', ' more eggs')
    """
    for bound, pattern in _BOUNDS_BEFORE.items():
        phrase = pattern.search(before)
        if phrase:
            return bound, before[: phrase.start()], after
    if _EXCLUDED_BEFORE.search(before) or _EXCLUDED_AFTER.search(after):
        return None
    for bound, pattern in _BOUNDS_AFTER.items():
        phrase = pattern.search(after)
        if phrase:
            return bound, before, after[: phrase.start()] + after[phrase.end() :]
    return "", before, after


def split_bound_in_words(text: str) -> tuple[str, str]:
    """Take a bound off a number in words. Return it ("" if there is none) and the rest of the text.

    >>> split_bound_in_words("at least twelve"), split_bound_in_words("twelve eggs or more")
    (('>=', 'twelve'), ('>=', 'twelve eggs '))
    """
    for bound, pattern in _OPENING.items():
        phrase = pattern.match(text)
        if phrase:
            return bound, text[phrase.end() :]
    for bound, pattern in _BOUNDS_AFTER.items():
        phrase = pattern.search(text)
        if phrase:
            return bound, text[: phrase.start()] + text[phrase.end() :]
    return "", text
