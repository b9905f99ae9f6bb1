r"""Write an answer in one notation: Unicode signs as LaTeX, without delimiters, styles, currency and units.

The meaning stays: fractions, powers and relations are not rewritten here.
"""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+"), re.compile("[₀-₉]+")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_ROOT = re.compile(r"([√∛])\s*(?:([0-9]+(?:\.[0-9]+)?|\\?[A-Za-z]+(?![A-Za-z]))|\(([^()]*)\)|\{([^{}]*)\})")
_HIDDEN = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_COMMANDS = {
    "π": "pi", "∞": "infty", "×": "times", "·": "cdot", "⋅": "cdot", "∙": "cdot", "÷": "div", "≤": "le", "⩽": "le",
    "≥": "ge", "⩾": "ge", "≠": "ne", "≈": "approx", "±": "pm", "∓": "mp", "∪": "cup", "∩": "cap", "∈": "in",
    "∅": "emptyset", "∖": "setminus", "∠": "angle", "⟨": "langle", "⟩": "rangle", "⌊": "lfloor", "⌋": "rfloor",
    "⌈": "lceil", "⌉": "rceil", **dict(zip("αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΠΣΦΨΩ", _GREEK.split(), strict=True)),
}  # fmt: skip
_SIGNS = str.maketrans(
    {sign: rf"\{name} " for sign, name in _COMMANDS.items()}
    | {sign: rf"\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)}
    | dict.fromkeys("−‐‑‒–—", "-")
    | dict.fromkeys("“”„‟", '"')
    | dict.fromkeys("‘’‚‛", "'")
    | {"٫": ".", "٬": ",", "٪": "%", "⁄": "/", "∕": "/", "∶": ":", "∣": "|"}
)

# Units that would be read as variables or powers: an upright single letter but i, e and d, a squared length.
_UPRIGHT = r"\\(?:text(?:rm|up|normal|sf|tt|bf|it)?|math(?:rm|sf|bf|it)|mbox|hbox)\s*"
_LENGTH = r"mm|cm|dm|km|in|ft|yd|mi|units?|inch(?:es)?|f(?:ee|oo)t|met(?:er|re)s?|miles?|yards?"
_POWER = r"\s*\^\s*\{?\s*[23]\s*\}?"
_NO_UNIT = (
    r"(?:and|or|if|for|is|are|when|where|with|not|mod|base|to|million|billion|trillion|thousand|hundred|dozen|half|"
    r"percent(?:age)?|pct|squared|cubed|plus|minus|times|over|[A-Za-z])\b"
)
_UNIT = re.compile(
    rf"(?:(?<=[0-9}})])|(?<=\\pi))(?:\\[,;: ]|[~\s]){{0,4}}"
    rf"(?:{_UPRIGHT}\{{\s*(?!{_NO_UNIT})[A-Za-z][A-Za-z ./]*\}}(?:{_POWER})?"
    rf"|{_UPRIGHT}\{{\s*[mgshLNJWVAKCF]\s*\}}(?:{_POWER})?|(?:{_LENGTH})(?![A-Za-z]){_POWER})(?=[\s.$]*$)"
)
_STYLED = re.compile(
    r"\\(?:text(?:normal|bf|it|rm|sf|tt|up|sl|md|sc)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|emph|bm|boldsymbol)"
    r"(?![A-Za-z])\s*\{([^{}]*)\}|\\operatorname\*?\s*\{(?!lcm|gcd|a?r?c?(?:sin|cos|tan|cot|sec|csc)h?\})([^{}]*)\}"
)
_PERCENT = re.compile(rf"\s*{_UPRIGHT}\{{\s*(?:percent(?:age)?|pct)\s*\}}")
_DROPPED = re.compile(
    r"\\m?(?:left|right)(?![a-zA-Z])\.?|\\(?:displaystyle|textstyle|[bB]ig{1,2}[lr]?|rm|bf|it)(?![a-zA-Z])"
    r"|(?<!\\)\\!\s*|\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z])|[°$€£¥₹`]"
)
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]")
_BOLD = re.compile(r"(?<![\w)\]}])\*\*([^*\s](?:[^*]*[^*\s])?)\*\*(?![\w(\[{])")
_SPACE = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad|~|\s+")
_GROUPED = re.compile(
    r"(?<![\w.,'])(?<![0-9] )[1-9][0-9]{0,2}(?:(?: [0-9]{3})+|(?:'[0-9]{3})+)(?![\w,']|\.[0-9]{3} |\s*/| [0-9])"
)
_REPEATING = re.compile(
    r"(?<![\w.])([0-9]*)\.([0-9]*)(?:\\(?:overline|bar|dot)\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))|\(([0-9]+)\)"
    r"|([0-9])\6\6+(?:\.\.\.+|\\[lc]?dots(?![a-z])))"
)
_QUOTED = re.compile(r"(['\"])(.*)\1", re.DOTALL)


def plain(text: str) -> str:
    r"""Write an answer in ASCII and LaTeX, without delimiters, styles, currency and units.

    >>> plain(r"$\text{about }\$1{,}200$."), plain("90^\\circ"), plain(r"6\text{ cm}^2"), plain("½x²")
    ('about 1,200', '90', '6', '\\frac{1}{2}x^{2}')
    """
    text = text if text.isascii() else _ascii(text)
    if "matrix" not in text and "array" not in text and "cases" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
    text = text.replace(r"\$", "").replace(r"\%", "%").replace("{,}", ",")
    text = _PERCENT.sub("%", _DELIMITERS.sub("", text))
    text = _UNIT.sub("", text)
    for _ in range(2):  # a style within a style
        text = _STYLED.sub(lambda match: f" {match[1] or match[2] or ''} ", text)
    text = _DROPPED.sub("", _BOLD.sub(r"\1", text)).replace("**", "^")
    text = _SPACE.sub(" ", text).strip().rstrip("\\").strip()
    text = text[:-1].rstrip() if text.endswith((".", ",", ";", ":")) and not text.endswith("..") else text
    if quoted := _QUOTED.fullmatch(text):
        text = quoted[2].strip()
    return _GROUPED.sub(lambda match: re.sub("[ ']", "", match[0]), _REPEATING.sub(_repeating, text))


def _ascii(text: str) -> str:
    text = _HIDDEN.sub("", text)
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{match[0].translate(_SUBSCRIPTS)}}}", text)
    text = _VULGAR.sub(_vulgar, text.translate(_SIGNS))
    text = unicodedata.normalize("NFKC", _ROOT.sub(_root, text)).translate(_SIGNS)
    return "".join(str(unicodedata.decimal(sign)) if sign.isdecimal() else sign for sign in text)


def _vulgar(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _root(match: re.Match[str]) -> str:
    return rf"\sqrt{'[3]' if match[1] == '∛' else ''}{{{match[2] or match[3] or match[4] or ''}}}"


def _repeating(match: re.Match[str]) -> str:
    """Write a repeating decimal as its fraction; the last digits before dots repeat if there are three copies."""
    whole, once = match[1], match[2]
    period = match[3] or match[4] or match[5] or match[6]
    bottom = (10 ** len(period) - 1) * 10 ** len(once)
    top = int(whole + once + period) - int(whole + once or 0)
    return rf"\frac{{{top}}}{{{bottom}}}"


_SPELLINGS = """
mm millimeter millimeters millimetre millimetres; cm centimeter centimeters centimetre centimetres
dm decimeter decimeters decimetre decimetres; m meter meters metre metres
km kilometer kilometers kilometre kilometres; inch inches; ft foot feet; yd yard yards; mi mile miles
mg milligram milligrams; g gram grams; kg kilogram kilograms; lb lbs pound pounds; oz ounce ounces
ml mL milliliter milliliters millilitre millilitres; L liter liters litre litres
s sec second seconds; min minute minutes; h hr hour hours; day days; week weeks; year years
cent cents; dollar dollars; degree degrees; rad radian radians
"""
_UNITS = {word: words.split()[0] for words in re.split("[;\n]", _SPELLINGS) for word in words.split()}
_SPELT = "|".join(sorted(_UNITS, key=len, reverse=True))
_STATED_UNIT = re.compile(
    rf"(?:[0-9]|[}})])(?:\\[,;: ]|[~\s]|{_UPRIGHT}\{{){{0,4}}({_SPELT})(?![A-Za-z'])\s*\}}?"
    rf"(?:\s*(?:\^\s*\{{?\s*([23])|([²³])))?(?:\s*(?:/|per\s)\s*({_SPELT})(?![A-Za-z']))?"
    r"(?=[\s}.,;$`]*(?:$|\s(?:[a-z]{2,}|a\s)))"
)


def unit(text: str) -> str | None:
    r"""Return the unit right after the number of an answer, if it is a common one.

    >>> unit("6 cm"), unit(r"6\text{ metres}"), unit("60 km/h"), unit(r"6\,\mathrm{m}^2"), unit("6 eggs")
    ('cm', 'm', 'km/h', 'm2', None)
    """
    found = _STATED_UNIT.search(text)
    if found is None:
        return None
    power = (found[2] or found[3] or "").translate(str.maketrans("²³", "23"))
    return _UNITS[found[1]] + power + (f"/{_UNITS[found[4]]}" if found[4] else "")
