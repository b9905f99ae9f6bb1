"""The names of units and currencies: every prefix of the SI before every base unit, and the units without prefixes.

A library of units such as pint is not used: nothing is converted here, so only names matter, and its registry reads
words as units (`cats` as centi-atmospheres, `pins` as pico-inches) and does not know currencies.
"""

from __future__ import annotations

import re

_PREFIXES = {
    "Y": "yotta", "Z": "zetta", "E": "exa", "P": "peta", "T": "tera", "G": "giga", "M": "mega", "k": "kilo",
    "h": "hecto", "da": "deca", "d": "deci", "c": "centi", "m": "milli", "u": "micro", "n": "nano", "p": "pico",
    "f": "femto", "a": "atto", "z": "zepto", "y": "yocto",
}  # fmt: skip

# Symbols first, then names. Plurals are generated.
_WITH_PREFIXES = """
m meter metre; g gram gramme; s second sec; A ampere amp; K kelvin; mol mole; cd candela; Hz hertz; N newton; Pa pascal
J joule; W watt; V volt; C coulomb; F farad; ohm \\Omega; S siemens; Wb weber; T tesla; H henry; lm lumen; lx lux
Bq becquerel; Gy gray; Sv sievert; kat katal; L liter litre; eV electronvolt; bar; cal calorie; Wh watthour
Ah amphour amperehour; B byte; bit; bps; t tonne; M molar; pc parsec; G gauss; Da dalton; Torr torr; dyn dyne; erg
"""
_WITHOUT_PREFIXES = r"""
in inch inches; ft foot feet; yd yard; mi mile; nmi nauticalmile; ly lightyear; au AU; fathom; furlong; league; rod
angstrom Å \AA; micron; ton; oz ounce; lb pound lbs; stone; grain; carat ct; amu; gal gallon; qt quart; pt pint; cup
tbsp tablespoon; tsp teaspoon; floz fluidounce; cc; barrel bbl; bushel; peck; acre; hectare ha
min minute; h hr hour; day; week wk; fortnight; month mo; year yr; decade; century centuries; millennium millennia
atm atmosphere; mmHg; psi; hp horsepower; Btu BTU; ftlb footpound; lbf; knot kn; mph; kmh kmph kph; rpm; mpg; dB decibel
percent pct percentage %; degree deg \degree ^\circ; rad radian; arcmin arcminute; arcsec arcsecond
degreeF Fahrenheit; degreeC Celsius; unit; pixel px
dollar USD; cent; euro EUR; rupee INR; yen JPY; peso MXN; franc CHF; won KRW; ruble rouble RUB; krona kronor krone; lira
yuan renminbi RMB CNY; rand ZAR; dinar; dirham; riyal; shekel; zloty; baht; ringgit; rupiah; penny pennies pence
shilling; nickel; dime; guinea; florin; ducat; rial; naira; cedi; taka; forint; bitcoin BTC
"""
# The pound is both a mass and a currency.
_OTHER_NAMES = {
    "GBP": "lb", "hz": "Hz", "khz": "kHz", "mhz": "MHz", "ghz": "GHz", "kwh": "kWh", "ml": "mL", "cl": "cL", "dl": "dL",
    "mcg": "ug", "fps": "fps", "kilohm": "kohm", "megohm": "Mohm", "dekameter": "dam", "dekagram": "dag",
    "days": "day", "hrs": "h", "mins": "min", "secs": "s", "gals": "gal", "yrs": "year",
}  # fmt: skip
# Read as an hour of the day or as words, not as a picometer, an attosecond or a decitonne.
_NOT_UNITS = ("am", "pm", "AM", "PM", "as", "at", "dat", "das", "ht", "pH", "hbar")
_IN_ANY_CASE = frozenset(("km", "kg", "cm", "mm", "ft", "yd", "lb", "oz", "hr"))  # of the short ones: Km, FT

CURRENCY = {
    "€": "euro", "£": "lb", r"\pounds": "lb", "¥": "yen", "₹": "rupee", "¢": "cent", "₩": "won", "₽": "ruble",
    "₱": "peso", "₪": "shekel", "₺": "lira", "₿": "bitcoin", "฿": "baht", "₦": "naira",
}  # fmt: skip
# Units that are products of others.
PRODUCTS: dict[str, dict[str, int]] = {
    "mph": {"mi": 1, "h": -1},
    "kmh": {"km": 1, "h": -1},
    "mpg": {"mi": 1, "gal": -1},
    "fps": {"ft": 1, "s": -1},
    "bps": {"bit": 1, "s": -1},
    "ftlb": {"ft": 1, "lb": 1},
    "M": {"mol": 1, "L": -1},
}
_IN_TWO_WORDS = re.compile(
    r"(?<![A-Za-z])(?:(?P<first>[a-z]*(?:watt|ampere|amp|light|electron|nautical|fluid|foot)|fl\.?)[ -]"
    r"(?P<second>hours?|years?|volts?|miles?|ounces?|pounds?|oz\.?)|metric (?P<ton>tons?))(?![A-Za-z])"
)


def _spellings(table: str) -> list[list[str]]:
    return [names.split() for names in re.split("[;\n]", table) if names.strip()]


def _plural(name: str) -> str | None:
    """Return the plural of a name of more than three letters; symbols have none."""
    if len(name) < 4 or not name.isalpha() or name.endswith("s"):
        return None
    if name.endswith("y") and name[-2] not in "aeiou":
        return f"{name[:-1]}ies"
    return f"{name}s"


def _prefixed(symbol: str, names: list[str]) -> dict[str, str]:
    """Return the names of a base unit with each prefix: km, kilometer and kilometre."""
    units = {}
    for prefix, prefix_name in _PREFIXES.items():
        unit = prefix + symbol
        units[unit] = unit
        for name in names:
            units[(prefix if name.startswith("\\") else prefix_name) + name] = unit  # k\Omega
        if len(symbol) > 2:  # kilobar
            units[prefix_name + symbol] = unit
    return units


def _unit_names() -> dict[str, str]:
    """Return the unit of each of its names."""
    units: dict[str, str] = {}
    for symbol, *names in _spellings(_WITH_PREFIXES):
        units |= _prefixed(symbol, names)
    for name in _NOT_UNITS:
        units.pop(name, None)
    # units without a prefix are read first: ft is not a femtotonne
    for names in _spellings(_WITH_PREFIXES) + _spellings(_WITHOUT_PREFIXES):
        units |= dict.fromkeys(names, names[0])
    units |= _OTHER_NAMES
    for name, unit in list(units.items()):
        plural = _plural(name)
        if plural and plural not in units:
            units[plural] = unit
    return units


UNITS = _unit_names()


def unit_named(name: str) -> str | None:
    r"""Return the unit that a name stands for, or None. Case counts, except where only one reading is left.

    >>> unit_named("kilometers"), unit_named("kWh"), unit_named("Hours"), unit_named("mW"), unit_named("MW")
    ('km', 'kWh', 'h', 'mW', 'MW')
    >>> unit_named("eggs") is None, unit_named(r"k\Omega"), unit_named(r"\mu m")
    (True, 'kohm', 'um')
    """
    name = re.sub(r"[\s<>~{}]|\\[,;:! ]", "", name).replace(r"\mu", "u").replace("µ", "u")
    unit = UNITS.get(name)
    if unit is None and (len(name) > 2 or name.lower() in _IN_ANY_CASE):
        unit = UNITS.get(name.lower())
    return unit


def in_one_word(text: str) -> str:
    """Write units of two words as one: `kilowatt-hours` as `kilowatthours`.

    >>> in_one_word("3 kilowatt-hours"), in_one_word("2 fluid ounces"), in_one_word("1 metric ton")
    ('3 kilowatthours', '2 fluidounces', '1 tonne')
    """
    return _IN_TWO_WORDS.sub(_joined, text)


def _joined(words: re.Match[str]) -> str:
    if words["ton"]:
        return words["ton"].replace("ton", "tonne")
    first = "fluid" if words["first"].startswith("fl") else words["first"]
    second = words["second"].rstrip(".")
    return first + ("ounce" if second == "oz" else second)
