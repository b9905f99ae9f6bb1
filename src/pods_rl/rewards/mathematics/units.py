"""Take the unit or the currency off the end of an answer, and write it in one spelling. Nothing is converted."""

from __future__ import annotations

import re
from collections import Counter

from .notation import DELIMITERS, UPRIGHT, to_ascii

_SPELLINGS = r"""
mm millimeter millimetre; cm centimeter centimetre; dm decimeter decimetre; m meter metre; km kilometer kilometre
in inch inches; ft foot feet; yd yard; mi mile; mg milligram; g gram; kg kilogram; t ton tonne; oz ounce; pound lb lbs
ml mL milliliter millilitre; L liter litre gallon; s sec second; ms millisecond; min minute; h hr hour; day; week
month; year yr; N newton; kN; J joule; kJ; cal calorie; kcal; W watt; kW; V volt; A amp ampere; Pa pascal; kPa; Hz hertz
K kelvin; C coulomb; mol mole; ohm \Omega; dollar USD; cent; euro EUR; rupee; yen; degree deg \degree ^\circ; rad radian
degreeF Fahrenheit; degreeC Celsius; unit; mph; kmh kmph; acre; hectare; percent pct percentage %
"""
_CURRENCY = {"€": "euro", "£": "pound", r"\pounds": "pound", "¥": "yen", "₹": "rupee", "¢": "cent"}
_QUOTIENTS = {"mph": ("mi", "h"), "kmh": ("km", "h")}


def _unit_names() -> dict[str, str]:
    """Return the unit of each of its names, plurals among them."""
    units = {}
    for names in re.split("[;\n]", _SPELLINGS):
        for name in names.split():
            units[name] = names.split()[0]
    for name, unit in list(units.items()):
        if len(name) > 3 and name.isalpha():
            units[f"{name}s"] = unit
    plurals = {"cents": "cent", "days": "day", "ohms": "ohm", "units": "unit", "hrs": "h", "mins": "min", "secs": "s"}
    return units | plurals


_UNITS = _unit_names()

# Patterns read a text in which <...> stands for upright text and \degree for \circ (`_flat`).
_NAME = "|".join(sorted(map(re.escape, _UNITS), key=len, reverse=True))
_GAP = r"(?:\\[,;:! ]|[~\s<>])"
_ONE_UNIT = rf"(?:{_NAME})(?![A-Za-z']){_GAP}*(?:(?:\^\s*\{{?\s*(-?\s*[1-4])\s*\}}?)|squared|cubed)?"  # m^2
_BETWEEN_UNITS = r"(?:\\cdot(?![a-z])|\*|/|(?<![A-Za-z])per(?![a-z])|a(?=\s)|)"  # N \cdot m, m/s, dollars a day
_UNITS_AT_END = re.compile(
    rf"(?:(?<=[0-9}})!])|(?<=\\pi)){_GAP}*"  # after 5, x^{2}, (x), 5! and \pi
    rf"(?P<square>square|sq\.?|cubic|cu\.?)?{_GAP}*{_ONE_UNIT}"  # square cm
    rf"(?:{_GAP}*{_BETWEEN_UNITS}{_GAP}*{_ONE_UNIT}){{0,3}}{_GAP}*(?=[.,;]?\s*$)"
)
_UNIT_TOKEN = re.compile(
    rf"(?<![A-Za-z\\])(?P<name>{_NAME})(?![A-Za-z'])"  # cm
    r"|(?P<power>\^\s*\{?\s*-?\s*[1-4])"  # ^2, ^{-1}
    r"|(?P<down>/|(?<![A-Za-z])per|a\s)"  # /s, per day
)
_ONE_LETTER = re.compile(  # m^2: may be a variable unless it is upright
    rf"{_GAP}*[A-Za-z]{_GAP}*(?:\^\s*\{{?\s*-?[1-4]\s*\}}?)?{_GAP}*"
)
_WORDS_AT_END = re.compile(  # \text{ eggs}; not \text{ or }
    r"(?:(?<=[0-9})])|(?<=\\pi))(?:\\[,;: ]|[~\s]){0,4}<\s*(?!(?:and|or|if|for|is|are|when|where|with|not|mod|base|to"
    r"|[mbtr]illion|thousand|hundred|dozen|half|squared|cubed|plus|minus|times|over|percent|[AaPp]\.?\s?[Mm]|"
    r"[A-Za-z])\b)[A-Za-z][A-Za-z ./]*>(?:\s*\^\s*\{?\s*[23]\s*\}?)?[\s.]*$"
)
_STYLED_FRACTION = re.compile(
    r"\\[dt]?frac\s*\{\s*(<[^{}]*>)\s*\}\s*\{\s*(<[^{}]*>[^{}]*)\}"
)  # \frac{\text{m}}{\text{s}}
_TEMPERATURE = re.compile(  # ^\circ F, degrees Celsius
    r"(?:\^\s*\{?\s*\\circ\s*\}?|°|\\degree|(?<![A-Za-z])degrees?)[\s<>]*(F|C)(?:ahrenheit|elsius)?(?![A-Za-z])"
)
_RAISED_CIRCLE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?")  # ^{\circ}
_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")


def split_unit(text: str, *, loose: bool = False) -> tuple[str, str | None]:
    r"""Return an answer without the unit at its end (or a currency sign), and the unit in one spelling or None.

    A single letter that is not upright may be a variable: it is a unit only if `loose`. A percent sign stays.

    >>> split_unit(r"9.8\text{ m/s}^2"), split_unit(r"5\,\mathrm{N\cdot m}"), split_unit(r"\$5"), split_unit("5\\%")
    (('9.8', 'm s-2'), ('5', 'N m'), ('\\$5', 'dollar'), ('5\\%', 'percent'))
    >>> split_unit("6m"), split_unit("6m", loose=True), split_unit(r"6\text{ eggs}")
    (('6m', None), ('6', 'm'), ('6', None))
    """
    currency = _currency(text)
    bare = text if r"\$" in text else text.strip().strip("$").strip()
    if not bare.isascii():
        bare = to_ascii(bare)
    bare = DELIMITERS.sub("", bare).strip()
    if not re.search(r"[A-Za-z%°]", bare):  # most numbers
        return text, currency
    flat = _flat(bare)
    with_degrees = _RAISED_CIRCLE.sub(r" \\degree ", flat)
    units = _UNITS_AT_END.search(with_degrees)
    if units is None or (not loose and _may_be_variable(units[0])):
        words = _WORDS_AT_END.search(flat)
        if words:
            text = _unflat(flat[: words.start()])
        return text, currency
    name = _in_one_spelling(units[0], units["square"] or "")
    if name.startswith("percent"):
        return text, currency or "percent"
    if name == "degree" and _ANGLE_FUNCTION.search(text):  # \sin 30^\circ
        return text, currency
    return _unflat(with_degrees[: units.start()]), currency or name


def _currency(text: str) -> str | None:
    for sign, name in _CURRENCY.items():
        if sign in text:
            return name
    if r"\$" in text or text.count("$") % 2:  # an even number of $ is around formulas
        return "dollar"
    return None


def _may_be_variable(units: str) -> bool:
    return "<" not in units and _ONE_LETTER.fullmatch(units) is not None


def _flat(text: str) -> str:
    r"""Write upright text in angle brackets, where no braces hinder the patterns: `5<cm>` for `5\text{cm}`."""
    text = text.replace("<", r"\lt ").replace(">", r"\gt ")
    text = UPRIGHT.sub(lambda upright: f"<{upright[1] or upright[2] or ''}>", text.replace(r"\%", "%"))
    text = _STYLED_FRACTION.sub(r"\1/\2", text.replace("°", r"^\circ "))
    return _TEMPERATURE.sub(r" degree\1 ", text)


def _unflat(flat: str) -> str:
    text = re.sub(r"<([^<>]*)>?", r"\\text{\1}", flat)
    return text.replace(r"\lt ", "<").replace(r"\gt ", ">").replace(r"\degree", r"^\circ")


def _in_one_spelling(units: str, square: str) -> str:
    """Return units as names with powers, sorted: `m s-2` for meters per second squared."""
    powers: Counter[str] = Counter()
    sign = 1
    last = ""  # the base unit that a power after it belongs to
    for token in _UNIT_TOKEN.finditer(units):
        if token["down"]:
            sign = -1
        elif token["power"]:
            power = int(re.sub(r"[^-0-9]", "", token["power"]))
            powers[last] *= power
        else:
            last = _UNITS[token["name"]]
            if last in _QUOTIENTS:
                top, bottom = _QUOTIENTS[last]
                powers[top] += sign
                powers[bottom] -= sign
                last = f"{top}/{bottom}"
            else:
                powers[last] += sign
    if square or re.search("squared|cubed", units):
        is_square = square.startswith("sq") or "squared" in units
        powers[last] *= 2 if is_square else 3
    names = []
    for unit, power in sorted(powers.items()):
        names.append(unit if power == 1 else f"{unit}{power}")
    return " ".join(names)
