"""Take the unit or the currency off the end of an answer, and write it in one spelling. Nothing is converted."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from .bounds import split_bound
from .notation import CIRCLE, DELIMITERS, UPRIGHT, to_ascii
from .unit_names import CURRENCY, PRODUCTS, in_one_word, unit_named
from .words import WORDS_THAT_CHANGE_A_NUMBER, may_change

# Patterns read a text in which <...> stands for upright text and \degree for \circ (`_flat`).
_GAP = r"(?:\\[,;:! ]|[~\s<>])"
_GAPS = rf"{_GAP}*+"  # all of them: to try fewer never helps, and takes hours where a text has long runs of spaces
_NAME = (
    rf"(?:(?:[kMGmunp]|\\mu){_GAPS})?\\Omega(?![A-Za-z])"  # k\Omega
    rf"|\\mu{_GAPS}[A-Za-z]{{1,5}}(?![A-Za-z'])"  # \mu m
    r"|\\degree(?![A-Za-z])|\\AA(?![A-Za-z])|[%Å]|[A-Za-z]+(?![A-Za-z'])"  # cm
)
_ONE_UNIT = rf"(?:{_NAME}){_GAPS}(?:\^\s*+\{{?\s*+-?\s*+[1-4]\s*+\}}?|squared|cubed)?"  # m^2
_BETWEEN_UNITS = r"(?:\\cdot(?![a-z])|\*|/|-|(?<![A-Za-z])per(?![a-z])|a(?=\s)|)"  # N \cdot m, m/s, dollars a day
_SQUARE = r"square|sq\.?|cubic|cu\.?"
_UNITS = (
    rf"{_GAPS}(?P<square>(?:{_SQUARE})(?![A-Za-z]))?{_GAPS}{_ONE_UNIT}"  # square cm
    rf"(?:{_GAPS}{_BETWEEN_UNITS}{_GAPS}{_ONE_UNIT}){{0,3}}{_GAPS}"
)
_AFTER_A_VALUE = r"(?:(?<=[0-9})!])|(?<=[^A-Za-z]pi))"  # after 5, x^{2}, (x), 5! and \pi
_UNITS_AT_END = re.compile(rf"{_AFTER_A_VALUE}{_UNITS}(?=[.,;]?\s*$)")
_UNIT_TOKEN = re.compile(
    r"(?P<power>\^\s*\{?\s*-?\s*[1-4]|squared|cubed)"  # ^2, ^{-1}
    r"|(?P<down>/|(?<![A-Za-z])per(?![A-Za-z])|(?<![A-Za-z])a(?=\s))"  # /s, per day
    rf"|(?P<square>(?:{_SQUARE})(?![A-Za-z]))"
    rf"|(?<![A-Za-z\\])(?P<name>{_NAME})"  # cm
)
_SLASH_AT_END = re.compile(  # 40 pages/hour, $3/lb; a short name may be a product of variables
    r"(?<=[0-9])((?:\s+[A-Za-z]{2,}){0,3})\s*/\s*(?=(?:\\text\{\s*)?([A-Za-z]{3,}|lb|kg|oz|hr|km)\}?[\s.$]*$)"
)
_DIGITS = re.compile(r"\s*[-+]?[0-9][0-9.,]*")
_ONE_LETTER = re.compile(  # m^2, \mu m: may be variables unless upright
    rf"{_GAPS}(?:\\mu{_GAPS})?[A-Za-z]{_GAPS}(?:\^\s*+\{{?\s*+-?[1-4]\s*+\}}?)?{_GAPS}"
)
_WORDS_AT_END = re.compile(  # \text{ eggs}; not \text{ or }
    rf"{_AFTER_A_VALUE}(?:\\[,;: ]|[~\s]){{0,4}}<(?P<words>\s*(?!(?:and|or|for|is|are|where|with|base|to"
    r"|[mbtr]illion|percent|[AaPp]\.?\s?[Mm]|[A-Za-z])\b)[A-Za-z][A-Za-z ./]*)>"
    r"(?:\s*+\^\s*+\{?\s*+[23]\s*+\}?)?[\s.]*$"
)
_STYLED_FRACTION = re.compile(
    r"\\[dt]?frac\s*\{\s*(<[^{}]*>)\s*\}\s*\{\s*(<[^{}]*>[^{}]*)\}"
)  # \frac{\text{m}}{\text{s}}
_TEMPERATURE = re.compile(  # ^\circ F, degrees Celsius
    rf"(?:{CIRCLE}|°|\\degree|(?<![A-Za-z])degrees?)[\s<>]*(F|C)(?:ahrenheit|elsius)?(?![A-Za-z])"
)
_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")


class _Units(NamedTuple):
    """Where units start in a flat text, how they are written, and their one spelling."""

    start: int
    written: str
    name: str


def split_unit(text: str, *, loose: bool = False) -> tuple[str, str | None]:
    r"""Return an answer without the unit at its end (or a currency sign), and the unit in one spelling or None.

    A single letter that is not upright may be a variable: it is a unit only if `loose`. A percent sign stays.

    >>> split_unit(r"9.8\text{ m/s}^2"), split_unit(r"5\,\mathrm{N\cdot m}"), split_unit(r"\$5"), split_unit("5\\%")
    (('9.8', 'm s-2'), ('5', 'N m'), ('\\$5', 'dollar'), ('5\\%', 'percent'))
    >>> split_unit("6m"), split_unit("6m", loose=True), split_unit(r"6\text{ eggs}"), split_unit("3 kilowatt-hours")
    (('6m', None), ('6', 'm'), ('6', None), ('3', 'h kW'))
    """
    currency = _currency(text)
    bare = _bare(text)
    if not re.search(r"[A-Za-z%°Å]", bare):  # most numbers
        return text, currency
    flat = _flat(bare)
    units = _units_at_end(flat)
    if units is None or (not loose and _may_be_variable(units.written, flat[: units.start])):
        words = _WORDS_AT_END.search(flat)
        if words and _only_describe(words["words"]):
            text = _unflat(flat[: words.start()])
        return text, currency
    if units.name.startswith("percent"):
        return text, currency or "percent"
    if units.name == "degree" and _ANGLE_FUNCTION.search(text):  # \sin 30^\circ
        return text, currency
    return _unflat(flat[: units.start]), currency or units.name


def with_per(text: str) -> str:
    """Write "per" for a slash before a unit at the end: `40 pages/hour` as `40 pages per hour`, but not `18/x`."""
    return _SLASH_AT_END.sub(lambda slash: f"{slash[1]} per " if unit_named(slash[2]) else slash[0], text)


def _only_describe(words: str) -> bool:
    """Whether words after a number leave it as it is."""
    changes = may_change(re.findall("[A-Za-z]+", words), WORDS_THAT_CHANGE_A_NUMBER)
    return not changes and split_bound("", words) == ("", "", words)


def _bare(text: str) -> str:
    """Return a text in ASCII without the dollar signs and delimiters of a formula around it."""
    bare = text if r"\$" in text else text.strip().strip("$").strip()
    return DELIMITERS.sub("", to_ascii(bare)).strip()


def _currency(text: str) -> str | None:
    for sign, name in CURRENCY.items():
        if sign in text:
            return name
    if r"\$" in text or text.count("$") % 2:  # an even number of $ is around formulas
        return "dollar"
    return None


def _units_at_end(flat: str) -> _Units | None:
    """Return the longest run of units at the end of a text."""
    units = _UNITS_AT_END.search(flat)
    while units:
        name = _in_one_spelling(units[0])
        if name:
            return _Units(units.start(), units[0], name)
        units = _UNITS_AT_END.search(flat, units.start() + 1)
    return None


def _may_be_variable(units: str, value: str) -> bool:
    """Whether a unit is a single letter that is not upright, unless a space separates it from digits: `12 m`."""
    if "<" in units or _ONE_LETTER.fullmatch(units) is None:
        return False
    return not units[0].isspace() or _DIGITS.fullmatch(value.rpartition("=")[2]) is None


def _flat(text: str) -> str:
    r"""Write upright text in angle brackets, where no braces hinder the patterns: `5<cm>` for `5\text{cm}`."""
    text = text.replace("<", r"\lt ").replace(">", r"\gt ")
    text = UPRIGHT.sub(lambda upright: f"<{upright[1] or upright[2] or ''}>", text.replace(r"\%", "%"))
    text = _STYLED_FRACTION.sub(r"\1/\2", text.replace("°", r"^\circ "))
    text = _TEMPERATURE.sub(r" degree\1 ", in_one_word(text))
    return re.sub(CIRCLE, r" \\degree ", text)


def _unflat(flat: str) -> str:
    text = re.sub(r"<([^<>]*)>?", r"\\text{\1}", flat)
    return text.replace(r"\lt ", "<").replace(r"\gt ", ">").replace(r"\degree", r"^\circ")


def _in_one_spelling(units: str) -> str | None:
    """Return units as names with powers, sorted (`m s-2` for meters per second squared), or None if one is unknown."""
    powers: Counter[str] = Counter()
    sign = 1
    next_power = 1  # of square meters
    last: dict[str, int] = {}  # what a power after it applies to
    for token in _UNIT_TOKEN.finditer(units):
        if token["down"]:
            sign = -1
        elif token["square"]:
            next_power = 2 if token["square"].startswith("sq") else 3
        elif token["power"]:
            power = _power(token["power"])
            for name, exponent in last.items():
                powers[name] += exponent * (power - 1)
        else:
            unit = unit_named(token["name"])
            if unit is None:
                return None
            last = {name: exponent * sign * next_power for name, exponent in _factors(unit).items()}
            next_power = 1
            for name, exponent in last.items():
                powers[name] += exponent
    names = [unit if power == 1 else f"{unit}{power}" for unit, power in sorted(powers.items())]
    return " ".join(names) or None


def _power(written: str) -> int:
    if written in ("squared", "cubed"):
        return 2 if written == "squared" else 3
    return int(re.sub(r"[^-0-9]", "", written))


def _factors(unit: str) -> dict[str, int]:
    """Return a unit as a product of others: kWh is kW h."""
    if unit.endswith(("Wh", "Ah")):
        return {unit[:-1]: 1, "h": 1}
    return PRODUCTS.get(unit, {unit: 1})


# -- what a number counts ----------------------------------------------------------------------------------------------

_WORDS_AFTER = re.compile(rf"{_AFTER_A_VALUE}{_GAP}+(?P<words>[A-Za-z](?:[A-Za-z'./-]|{_GAP})*)$")  # not ab of 2ab
_MOST_WORDS = 5
_FILLING = (
    "a an the of in all total altogether overall left remaining more each away only exactly about approximately there "
    "roughly just per long tall wide high deep old and for exact"
)
_SAYS_NOTHING = frozenset(_FILLING.split())
_NOT_A_THING = (  # verbs and links of a sentence, and numbers
    "is are was were has have had will can it she he they we i because since so as that which who when if or "
    "hundred thousand million billion trillion dozen"
)
_SENTENCE = frozenset(_NOT_A_THING.split())
_PLURALS = {"people": "person", "persons": "person", "men": "man", "women": "woman", "children": "child",
            "feet": "ft", "mice": "mouse", "geese": "goose", "teeth": "tooth"}  # fmt: skip


def counted_thing(text: str) -> str | None:
    r"""Return what the words after a number say that it counts, in one spelling, or None.

    >>> counted_thing("5 red balls"), counted_thing(r"5\text{ boxes}"), counted_thing("5 gallons of water")
    ('ball red', 'box', 'gal')
    >>> counted_thing("5 in total"), counted_thing("5 is the answer"), counted_thing("5x")
    (None, None, None)
    """
    flat = _flat(_bare(text)).strip(" .,;")
    after = _WORDS_AFTER.search(flat)
    if after is None or "\\" in after["words"]:
        return None
    words = re.findall("[A-Za-z]+", after["words"])
    if len(words) > _MOST_WORDS or may_change(words, WORDS_THAT_CHANGE_A_NUMBER):
        return None
    if not _SENTENCE.isdisjoint(word.lower() for word in words):
        return None
    for start in range(len(words)):
        if words[start].lower() not in _SAYS_NOTHING or words[start:] == ["in"]:
            words = words[start:]
            break
    else:
        return None
    for size in range(min(4, len(words)), 0, -1):
        units = _in_one_spelling(" ".join(words[:size]))
        if units and len(words[0]) > 1:
            return units
    kept = {_singular(word.lower()) for word in words if word.lower() not in _SAYS_NOTHING}
    if not kept or min(map(len, kept)) == 1:
        return None
    return " ".join(sorted(kept))


def _singular(word: str) -> str:
    if word in _PLURALS:
        return _PLURALS[word]
    if word.endswith("ies") and len(word) > 4:
        return f"{word[:-3]}y"
    if word.endswith(("sses", "xes", "ches", "shes", "zes")):
        return word[:-2]
    if word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    return word


def same_thing(one: str, other: str) -> bool:
    """Whether two results of `counted_thing` may be the same: one is the other with more words."""
    words = set(one.split())
    other_words = set(other.split())
    return words <= other_words or other_words <= words
