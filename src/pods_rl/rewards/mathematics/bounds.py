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
    ">=": (
        r"at (?:the )?(?:very )?least|at (?:a )?minimum(?: of)?|minimum of"  # at the very least
        rf"|(?:no|not|never) {_LOW}(?: than)?|{_HIGH} than or equal to"  # no less than
        r"|as (?:few|little|low|short) as"
    ),
    "<=": (
        rf"at (?:the )?(?:very )?most|at (?:a )?maximum(?: of)?|maximum of|{_UP_TO}"  # at most
        rf"|{_LOW} than or equal to|(?:no|not|never) {_HIGH}(?: than)?|not exceeding"  # no more than
        r"|as (?:many|much|high|long|large) as"
    ),
    ">": rf"{_HIGH} than|above|over|exceed(?:s|ed|ing)?|upwards? of|in excess of|beyond",
    "<": rf"{_LOW} than|below|under|beneath|short of",
}
_AFTER = {
    ">=": (
        rf"or (?:{_HIGH}|up|upwards?|better)|and (?:above|over|up|upwards?|older)"  # or more, and above
        r"|at (?:the )?(?:very )?least\W*$|at (?:a )?minimum\W*$|^\W*(?:[a-z]+\s+)?minimum\W*$"  # eggs minimum
    ),
    "<=": (
        rf"or {_LOW}|and (?:below|under|younger)"  # or less, and below
        r"|at (?:the )?(?:very )?most\W*$|at (?:a )?maximum\W*$|^\W*(?:[a-z]+\s+)?max(?:imum)?\W*$|tops\W*$"
    ),
}
_EXCLUDED = (
    r"except(?:ing)?(?: for)?|excluding|but|besides|(?:apart|aside|different) from|other than|rather than"
    r"|instead of|unequal to|without|unlike|outside(?: of)?|within|nearly|almost|close to|near|between|non-?"
    r"|(?:divisible|divided|multiplied) by|modulo|factorial of"
    r"|(?:multiple|factor|divisor|square|cube|power|reciprocal|opposite|inverse|negation|negative|complement|fraction"
    r"|portion|part|logarithm)s? of"  # the square of
    rf"|{_COMPARED} than"  # older than
    r"|(?:some|most|many|few|part|rest|remainder|share|percentage|majority|minority|fifth|sixth|seventh|eighth|ninth"
    r"|tenth|root|absence|lack)s? of"  # most of
    r"|far from|hardly|scarcely|barring|lacking|no|not even|ruling out|minus|less|against|take back|cancel|undo"
    r"|discard|exclude|omit|skip"
    r"|(?:reduc|halv|doubl|tripl|subtract|deduct|remov|reject|ignor|dismiss|exceed|decreas|lower|shrink)(?:e?s|ing)"
)
_LINK = (
    r"(?:\s+(?:exactly|about|approximately|a total of|a value of|(?:the )?(?:number|value|integer|total)s?(?: of)?))?"
)


# Words that make a number conditional, take it back or say that others hold it.
_DISOWNED = re.compile(
    r"(?<![A-Za-z])(?:in case|(?:as|so) long as|on (?:the )?condition|given that|in the event|should it|subject to"
    r"|under the assumption|conditional|but (?:only|not)|according to|ruled? out|nobody|no one"
    r"|(?:first|old|previous|earlier|original|initial|former|wrong)\s+(?:guess|answer|thought|idea|attempt|result|value)"
    r"|(?:some(?:one|body)?|others?|people|they|many|few)\s+(?:else\s+|people\s+)?(?:say|think|claim|believe|guess)s?"
    r"|(?:is|was|are|were|be|been|seems?|looks?|sounds?)\s+(?:[a-z]+ly\s+)?"
    r"(?:no|(?:far |way )?off|out|too [a-z]+|rejected|a (?:bad|poor) [a-z]+|a trap"
    r"|discarded|eliminated|excluded|refuted|disprove[dn]|a mistake|an error|what (?:they|others|some) [a-z]+))"
    r"(?![A-Za-z])",
    re.IGNORECASE,
)
_LIMITED_AFTER = re.compile(
    r"(?<![A-Za-z])(?:when(?:ever)?|while|until)(?![A-Za-z])"  # 12 when it rains
    r"|^\W*(?:[a-z]+\s+)?(?:less|minus)\s+(?!than(?![A-Za-z]))(?:the\s+|a\s+)?[a-z]+"  # 12 less tax
    r"|(?<![A-Za-z])no(?:pe)?\W*$",  # 12? No.
    re.IGNORECASE,
)


def _patterns(phrases: dict[str, str], before: str, after: str) -> dict[str, re.Pattern[str]]:
    """Return by bound the pattern of its phrases, with what must be before and after them."""
    return {bound: re.compile(f"{before}(?:{phrase}){after}", re.IGNORECASE) for bound, phrase in phrases.items()}


_BOUNDS_BEFORE = _patterns(_BEFORE, r"(?<![A-Za-z])(?:an?\s+|the\s+)?", rf"{_LINK}[\s:]*$")  # at least a total of
_BOUNDS_AFTER = _patterns(_AFTER, r"(?<![A-Za-z])", r"(?![A-Za-z])")
_BOUNDS_AT_START = _patterns(_BEFORE, r"\s*(?:an?\s+|the\s+)?", rf"{_LINK}\s+")
_EXCLUDED_AFTER = re.compile(r"^\W*(?:(?:is|are) )?(?:excluded|excepted|omitted)(?![A-Za-z])", re.IGNORECASE)
_EXCLUDED_BEFORE = re.compile(rf"(?<![A-Za-z])(?:{_EXCLUDED}){_LINK}[\s:]*$", re.IGNORECASE)


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
    if _DISOWNED.search(before) or _DISOWNED.search(after) or _LIMITED_AFTER.search(after):
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
    for bound, pattern in _BOUNDS_AT_START.items():
        phrase = pattern.match(text)
        if phrase:
            return bound, text[phrase.end() :]
    for bound, pattern in _BOUNDS_AFTER.items():
        phrase = pattern.search(text)
        if phrase:
            return bound, text[: phrase.start()] + text[phrase.end() :]
    return "", text
