r"""Write an answer in one notation (ASCII and LaTeX, without styles and delimiters), and take the unit off it."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

_RAISED, _LOWERED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+"), re.compile("[₀-₉]+")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_ROOT = re.compile(r"([√∛])\s*(?:([0-9]+(?:\.[0-9]+)?|\\?[A-Za-z]+(?![A-Za-z]))|\(([^()]*)\)|\{([^{}]*)\})")
_HIDDEN = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_COMMANDS = {
    "π": "pi", "∞": "infty", "×": "times", "·": "cdot", "⋅": "cdot", "∙": "cdot", "÷": "div", "≤": "le", "⩽": "le",
    "≥": "ge", "⩾": "ge", "≠": "ne", "≈": "approx", "±": "pm", "∓": "mp", "∪": "cup", "∩": "cap", "∈": "in",
    "∅": "emptyset", "∖": "setminus", "∠": "angle", "⟨": "langle", "⟩": "rangle", "⌊": "lfloor", "⌋": "rfloor",
    "⌈": "lceil", "⌉": "rceil", "∴": "therefore", "⇒": "Rightarrow", "℃": "degree C", "℉": "degree F", "Ω": "Omega",
    **dict(zip("αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΠΣΦΨΩ", GREEK.split(), strict=True)),
}  # fmt: skip
_SIGNS = str.maketrans(
    {sign: rf"\{name} " for sign, name in _COMMANDS.items()}
    | {sign: rf"\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)}
    | dict.fromkeys("−‐‑‒–—", "-")
    | dict.fromkeys("“”„‟", '"')
    | dict.fromkeys("‘’‚‛", "'")
    | {"٫": ".", "٬": ",", "٪": "%", "⁄": "/", "∕": "/", "∶": ":", "∣": "|"}
)

_UPRIGHT = re.compile(
    r"\\(?:text(?:normal|bf|it|rm|sf|tt|up|sl|md|sc)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|emph|bm|bold|boldsymbol)"
    r"(?![A-Za-z])\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)?)\}|\\operatorname\*?\s*\{(?!lcm|gcd|a?r?c?(?:sin|cos|tan|cot|sec|csc)h?\})([^{}]*)\}"
)
_DECORATED = re.compile(  # \underline{7}, \textcolor{red}{7}, {\large 7}
    r"\\(?:underline|fbox|uline|smash|(?:text)?color\s*\{[^{}]*\})\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
)
_DROPPED = re.compile(
    r"\\m?(?:left|right)(?![a-zA-Z])\.?|\\(?:displaystyle|textstyle|[bB]ig{1,2}[lr]?|rm|bf|it|large|Large|LARGE|huge|Huge"
    r"|small|normalsize|checkmark|blacksquare|square|limits|nolimits|ldotp|pounds)(?![a-zA-Z])|\\color\s*\{[^{}]*\}"
    r"|\\(?:[hv]space|[hv]?phantom)\*?\s*\{[^{}]*\}|(?<!\\)\\!\s*|\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z])"
)
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]")
_LEADING = re.compile(r"^(?:\s|:|\\(?:therefore|Rightarrow|rightarrow|implies|Longrightarrow|to)(?![a-z])|=(?!=))+")
_DEGREES = re.compile(  # of an angle: \cos 60^\circ, \sin(30^\circ)
    r"(\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\^\s*\{?\s*[0-9]\s*\}?\s*)?)(\(|\{|)\s*([0-9]+(?:\.[0-9]+)?)\s*"
    r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z])|°)\s*([)}]?)"
)
_BOLD = re.compile(r"(?<![\w)\]}])(\*\*|__)([^*_\s](?:[^*]*?[^*\s])?)\1(?![\w(\[{])")
_SPACE = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad|~|\s+")
_GROUPED = re.compile(
    r"(?<![\w.,'])(?<![0-9] )[1-9][0-9]{0,2}(?:(?: [0-9]{3})+|(?:'[0-9]{3})+)(?![\w,']|\.[0-9]{3} |\s*/| [0-9])"
)
_REPEATING = re.compile(
    r"(?<![\w.])([0-9]*)\.([0-9]*)(?:\\(?:overline|bar|dot)\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))|\(([0-9]+)\)"
    r"|([0-9])\6\6+(?:\.\.\.+|\\[lc]?dots(?![a-z])))"
)
_COMMA = re.compile(r"\{([,.:])\}")
_UNWRITTEN = str.maketrans("", "", "$`°€£¥₹¢")
_QUOTED = re.compile(r"(['\"])(.*)\1", re.DOTALL)
_SAID = {
    "no solution": r"\emptyset", "no solutions": r"\emptyset", "no real solutions": r"\emptyset",
    "empty set": r"\emptyset", "the empty set": r"\emptyset", "all real numbers": r"\mathbb{R}",
    "all reals": r"\mathbb{R}", "dne": "does not exist", "infinity": r"\infty",
    r"\mathbb{r}^+": r"(0, \infty)", r"\mathbb{r}^{+}": r"(0, \infty)",
}  # fmt: skip


def plain(text: str) -> str:
    r"""Write an answer in ASCII and LaTeX, without delimiters, styles and currency.

    >>> plain(r"$\text{about }\$1{,}200$."), plain("90^\\circ"), plain(r"\therefore \underline{7}"), plain("½x²")
    ('about 1,200', '90', '7', '\\frac{1}{2}x^{2}')
    """
    if not text.isascii():
        text = _ascii(text)
    if "\\" in text:
        text = _without_commands(text)
    text = _BOLD.sub(r"\2", _COMMA.sub(r"\1", text).translate(_UNWRITTEN)).replace("**", "^")
    text = _LEADING.sub("", _SPACE.sub(" ", text)).strip().rstrip("\\").strip()
    text = text[:-1].rstrip() if text.endswith((".", ",", ";", ":")) and not text.endswith("..") else text
    if quoted := _QUOTED.fullmatch(text):
        text = quoted[2].strip()
    return _SAID.get(text.lower()) or _GROUPED.sub(
        lambda match: re.sub("[ ']", "", match[0]), _REPEATING.sub(_repeating, text)
    )


def _without_commands(text: str) -> str:
    if "matrix" not in text and "array" not in text and "cases" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
    text = text.replace(r"\$", "").replace(r"\%", "%")
    text = re.sub(r"\\not\s*=", r"\\ne ", _DELIMITERS.sub("", text))
    for _ in range(2):  # a style within a style
        text = _DECORATED.sub(r"\1", _UPRIGHT.sub(_content, text))
    text = _DEGREES.sub(r"\1\2\\frac{\3\\pi}{180}\4", re.sub(r"\\m?(?:left|right)(?![A-Za-z])", "", text))
    return _DROPPED.sub("", text)


def _content(styled: re.Match[str]) -> str:
    content = styled[1] or styled[2] or ""
    return content if content in (",", ".", ":") else f" {content} "


def _ascii(text: str) -> str:
    text = _HIDDEN.sub("", text)
    text = _RAISED.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0]).translate(_SIGNS)}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{unicodedata.normalize('NFKC', match[0])}}}", text)
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
    start, once = match[1], match[2]
    period = match[3] or match[4] or match[5] or match[6]
    bottom = (10 ** len(period) - 1) * 10 ** len(once)
    top = int(start + once + period) - int(start + once or 0)
    return rf"\frac{{{top}}}{{{bottom}}}"


# -- units ------------------------------------------------------------------------------------------------------------

_SPELLINGS = r"""
mm millimeter millimetre; cm centimeter centimetre; dm decimeter decimetre; m meter metre; km kilometer kilometre
in inch inches; ft foot feet; yd yard; mi mile; mg milligram; g gram; kg kilogram; t ton tonne; oz ounce; pound lb lbs
ml mL milliliter millilitre; L liter litre gallon; s sec second; ms millisecond; min minute; h hr hour; day; week
month; year yr; N newton; kN; J joule; kJ; cal calorie; kcal; W watt; kW; V volt; A amp ampere; Pa pascal; kPa; Hz hertz
K kelvin; C coulomb; mol mole; ohm \Omega; dollar USD; cent; euro EUR; rupee; yen; degree deg \degree ^\circ; rad radian
degreeF Fahrenheit; degreeC Celsius; unit; mph; kmh kmph; acre; hectare; percent pct percentage %
"""
_UNITS = {name: names.split()[0] for names in re.split("[;\n]", _SPELLINGS) for name in names.split()}
_UNITS |= {f"{name}s": unit for name, unit in _UNITS.items() if len(name) > 3 and name.isalpha()}
_UNITS |= {"cents": "cent", "days": "day", "ohms": "ohm", "units": "unit", "hrs": "h", "mins": "min", "secs": "s"}
_CURRENCY = {"€": "euro", "£": "pound", r"\pounds": "pound", "¥": "yen", "₹": "rupee", "¢": "cent"}
_NAME = "|".join(sorted(map(re.escape, _UNITS), key=len, reverse=True))
_GAP = r"(?:\\[,;:! ]|[~\s<>])"  # < and > are around upright text here
_ONE = rf"(?:{_NAME})(?![A-Za-z']){_GAP}*(?:(?:\^\s*\{{?\s*(-?\s*[1-4])\s*\}}?)|squared|cubed)?"
_BETWEEN = r"(?:\\cdot(?![a-z])|\*|/|(?<![A-Za-z])per(?![a-z])|a(?=\s)|)"
_TAIL = re.compile(
    rf"(?:(?<=[0-9}})!])|(?<=\\pi)){_GAP}*(?P<square>square|sq\.?|cubic|cu\.?)?{_GAP}*{_ONE}"
    rf"(?:{_GAP}*{_BETWEEN}{_GAP}*{_ONE}){{0,3}}{_GAP}*(?=[.,;]?\s*$)"
)
_TOKEN = re.compile(
    rf"(?<![A-Za-z\\])(?P<name>{_NAME})(?![A-Za-z'])|(?P<power>\^\s*\{{?\s*-?\s*[1-4])|(?P<down>/|(?<![A-Za-z])per|a\s)"
)
_LONE = re.compile(
    rf"{_GAP}*[A-Za-z]{_GAP}*(?:\^\s*\{{?\s*-?[1-4]\s*\}}?)?{_GAP}*"
)  # may be a variable unless it is upright
_WORDS = re.compile(  # \text{ eggs}; not \text{ or }
    r"(?:(?<=[0-9})])|(?<=\\pi))(?:\\[,;: ]|[~\s]){0,4}<\s*(?!(?:and|or|if|for|is|are|when|where|with|not|mod|base|to"
    r"|[mbtr]illion|thousand|hundred|dozen|half|squared|cubed|plus|minus|times|over|percent|[AaPp]\.?\s?[Mm]|"
    r"[A-Za-z])\b)[A-Za-z][A-Za-z ./]*>(?:\s*\^\s*\{?\s*[23]\s*\}?)?[\s.]*$"
)
_STYLED_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(<[^{}]*>)\s*\}\s*\{\s*(<[^{}]*>[^{}]*)\}")
_DEGREE = re.compile(
    r"(?:\^\s*\{?\s*\\circ\s*\}?|°|\\degree|(?<![A-Za-z])degrees?)[\s<>]*(F|C)(?:ahrenheit|elsius)?(?![A-Za-z])"
)


def split_unit(text: str, *, loose: bool = False) -> tuple[str, str | None]:
    r"""Return an answer without the unit at its end (or a currency sign), and the unit in one spelling or None.

    A single letter that is not upright may be a variable: it is a unit only if `loose`. A percent sign stays.

    >>> split_unit(r"9.8\text{ m/s}^2"), split_unit(r"5\,\mathrm{N\cdot m}"), split_unit(r"\$5"), split_unit("5\\%")
    (('9.8', 'm s-2'), ('5', 'N m'), ('\\$5', 'dollar'), ('5\\%', 'percent'))
    >>> split_unit("6m"), split_unit("6m", loose=True), split_unit(r"6\text{ eggs}")
    (('6m', None), ('6', 'm'), ('6', None))
    """
    sign = next((name for sign, name in _CURRENCY.items() if sign in text), None)
    if sign is None and (r"\$" in text or text.count("$") % 2):
        sign = "dollar"
    bare = text.strip().strip("$").strip() if r"\$" not in text else text
    bare = _DELIMITERS.sub("", bare if bare.isascii() else _ascii(bare)).strip()
    if not re.search(r"[A-Za-z%°]", bare):  # most numbers
        return text, sign
    flat = re.sub(r"[<>]", lambda found: r"\lt " if found[0] == "<" else r"\gt ", bare)
    flat = _UPRIGHT.sub(lambda styled: f"<{styled[1] or styled[2] or ''}>", flat.replace(r"\%", "%"))
    flat = _DEGREE.sub(r" degree\1 ", _STYLED_FRACTION.sub(r"\1/\2", flat.replace("°", r"^\circ ")))
    found = _TAIL.search(re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r" \\degree ", flat))
    if found is None or (not loose and _LONE.fullmatch(found[0]) and "<" not in found[0]):
        words = _WORDS.search(flat)
        return (_unflat(flat[: words.start()]) if words else text), sign
    name = _canonical(found[0], found["square"] or "")
    if name.startswith("percent") or (name == "degree" and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text)):
        return text, sign or ("percent" if name.startswith("percent") else None)
    return _unflat(found.string[: found.start()]), sign or name


def _unflat(flat: str) -> str:
    flat = re.sub(r"<([^<>]*)>?", r"\\text{\1}", flat).replace(r"\lt ", "<").replace(r"\gt ", ">")
    return flat.replace(r"\degree", r"^\circ")


def _canonical(text: str, square: str) -> str:
    powers: Counter[str] = Counter()
    sign, last = 1, ""
    for token in _TOKEN.finditer(text):
        if token["down"]:
            sign = -1
        elif token["power"]:
            powers[last] *= abs(int(re.sub(r"[^-0-9]", "", token["power"])))
            powers[last] *= -1 if "-" in token["power"] else 1
        else:
            last = {"mph": "mi/h", "kmh": "km/h"}.get(_UNITS[token["name"]], _UNITS[token["name"]])
            for part, direction in zip(last.split("/"), (sign, -sign), strict=False):
                powers[part] += direction
    if square or re.search("squared|cubed", text):
        powers[last] *= 2 if square.startswith("sq") or "squared" in text else 3
    return " ".join(f"{unit}{power if power != 1 else ''}" for unit, power in sorted(powers.items()))
