r"""Write an answer in one notation (ASCII and LaTeX, without styles and delimiters), and read what it is made of.

A unit is taken off its end. The rest is split at the separators, relation signs and brackets outside every bracket:
lists, sets, tuples, intervals and relations, around expressions (`equality.value` evaluates them).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

from .molecules import is_word

_normal = partial(unicodedata.normalize, "NFKC")
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+"), re.compile("[₀-₉]+")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_HIDDEN = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_COMMANDS = {
    "π": "pi", "∞": "infty", "×": "times", "·": "cdot", "⋅": "cdot", "∙": "cdot", "÷": "div", "≤": "le", "⩽": "le",
    "≥": "ge", "⩾": "ge", "≠": "ne", "≈": "approx", "±": "pm", "∓": "mp", "∪": "cup", "∩": "cap", "∈": "in",
    "√": "sqrt", "∅": "emptyset", "∖": "setminus", "∠": "angle", "⟨": "langle", "⟩": "rangle", "⌊": "lfloor",
    "⌋": "rfloor", "⌈": "lceil", "⌉": "rceil", "∴": "therefore", "⇒": "Rightarrow", "℃": "degree C", "℉": "degree F",
    **dict(zip("αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΠΣΦΨΩ", _GREEK.split(), strict=True)),
}  # fmt: skip
_SIGNS = str.maketrans(
    {sign: rf"\{name} " for sign, name in _COMMANDS.items()}
    | {sign: rf"\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)}
    | dict.fromkeys("−‐‑‒–—―˗➖", "-")
    | dict.fromkeys("“”„‟", '"')
    | dict.fromkeys("‘’‚‛", "'")
    | {"∛": r"\sqrt[3]", "٫": ".", "٬": ",", "٪": "%", "⁄": "/", "∕": "/", "∶": ":", "∣": "|"}
)

_UPRIGHT = re.compile(
    r"\\(?:text(?:normal|bf|it|rm|sf|tt|up|sl|md|sc)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|emph|bm|bold|boldsymbol)"
    r"(?![A-Za-z])\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|\\operatorname\*?\s*\{(?!lcm|gcd|a?r?c?(?:sin|cos|tan|cot|sec|csc)h?\})([^{}]*)\}"
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
_DASH = re.compile(r"\\text(?:minus|endash|emdash)(?![A-Za-z])\s*(?:\{\s*\})?")
_RAISED_MINUS = re.compile(r"(?<![^\s$(\[{,;=])⁻(?=\s*[0-9.])")  # ⁻5, not x⁻
_LEADING = re.compile(r"^(?:\s|:|\\(?:therefore|Rightarrow|rightarrow|implies|Longrightarrow|to)(?![a-z])|=(?!=))+")
_DEGREES = re.compile(  # of an angle: \cos 60^\circ, \sin(30^\circ)
    r"(\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\^\s*\{?\s*[0-9]\s*\}?\s*)?)(\(|\{|)\s*([0-9]+(?:\.[0-9]+)?)\s*"
    r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z])|°)\s*([)}]?)"
)
_BOLD = re.compile(r"(?<![\w)\]}])(\*\*|__)([^*_\s](?:[^*]*?[^*\s])?)\1(?![\w(\[{])")
_SPACE = re.compile(
    r"(?<!\\)\\[,;:> ]|\\q?quad|\\(?:(?:neg)?(?:thin|med|thick)|en)space(?![A-Za-z])|\\enskip(?![A-Za-z])|~|\s+"
)

# A sign belongs to the number after it only where no term can be before it: "5 - 3" and "Answer - 3" stay as they are.
_NO_TERM_BEFORE = (
    r"(^|[(\[{,;:=<>&]|(?<![A-Za-z])(?:is|are|was|were|be|it's|equals?|to|or|and|of|at|by|about|approximately"
    r"|least|most|than)(?= ))( *)"
)
_NUMBER_AHEAD = r"\.?[0-9]|\\[dtc]?frac(?![a-z])"
_BRACED_SIGN = re.compile(r"(?<![\^_])\{ *([+-]) *\}")  # {-}3, not 0^{-}
_SIGN_APART = re.compile(rf"{_NO_TERM_BEFORE}([+-]) +(?={_NUMBER_AHEAD})", re.IGNORECASE)
_SIGN_IN_WORDS = re.compile(
    rf"{_NO_TERM_BEFORE}(?:(?:an? )?negative|minus|neg\.?) *(?={_NUMBER_AHEAD}|\\(?:sqrt|pi|infty)(?![a-z]))",
    re.IGNORECASE,
)
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
    "all reals": r"\mathbb{R}", "dne": "does not exist", "infinity": r"\infty", "-infinity": r"-\infty",
    "negative infinity": r"-\infty", "minus infinity": r"-\infty",
    r"\mathbb{r}^+": r"(0, \infty)", r"\mathbb{r}^{+}": r"(0, \infty)",
}  # fmt: skip


def plain(text: str) -> str:
    r"""Write an answer in ASCII and LaTeX, without delimiters, styles and currency.

    >>> plain(r"$\text{about }\$1{,}200$."), plain("90^\\circ"), plain(r"\therefore \underline{7}"), plain("½x²")
    ('about 1,200', '90', '7', '\\frac{1}{2}x^{2}')
    >>> plain("- 3"), plain(r"x = -\,\$3"), plain("negative 3"), plain("5 - 3")
    ('-3', 'x = -3', '-3', '5 - 3')
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
    said = _SAID.get(text.lower())
    if said:
        return said
    return _GROUPED.sub(lambda match: re.sub("[ ']", "", match[0]), _REPEATING.sub(_repeating, _with_signs(text)))


def _with_signs(text: str) -> str:
    """Write the sign of a number next to it: `- 3`, `{-}3` and `negative 3` are `-3`."""
    if "{" in text:
        text = _BRACED_SIGN.sub(r"\1", text)
    text = _SIGN_IN_WORDS.sub(r"\1\2-", text)
    return _SIGN_APART.sub(r"\1\2\3", text)


def _without_commands(text: str) -> str:
    if "matrix" not in text and "array" not in text and "cases" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
    text = _DASH.sub("-", text.replace(r"\$", "").replace(r"\%", "%"))
    text = re.sub(r"\\not\s*=", r"\\ne ", _DELIMITERS.sub("", text))
    for _ in range(2):  # a style within a style
        text = _DECORATED.sub(r"\1", _UPRIGHT.sub(_content, text))
    text = _DEGREES.sub(r"\1\2\\frac{\3\\pi}{180}\4", re.sub(r"\\m?(?:left|right)(?![A-Za-z])", "", text))
    return _DROPPED.sub("", text)


def _content(styled: re.Match[str]) -> str:
    content = styled[1] or styled[2] or ""
    return content if content in (",", ".", ":") else f" {content} "


def _ascii(text: str) -> str:
    text = _RAISED_MINUS.sub("-", _HIDDEN.sub("", text))
    text = _RAISED.sub(lambda match: f"^{{{_normal(match[0]).translate(_SIGNS)}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{_normal(match[0])}}}", text)
    text = _VULGAR.sub(lambda half: r"\frac{{{}}}{{{}}}".format(*_normal(half[0]).split("⁄")), text)
    text = _normal(text.translate(_SIGNS)).translate(_SIGNS)
    return "".join(str(unicodedata.decimal(sign)) if sign.isdecimal() else sign for sign in text)


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


# -- structure ---------------------------------------------------------------------------------------------------------

BRACKETS = ("()", "[]", "(]", "[)")


class Node(NamedTuple):
    """An expression ("value": its text), a chain of sides with signs ("relation"), or a group of answers.

    A group is a "list", a list joined by "and" or "or", a "set", "union", "minus", "ratio", or a pair of brackets.
    """

    kind: str
    items: tuple[Any, ...] = ()
    signs: tuple[str, ...] = ()
    text: str = ""

    @property
    def equation(self) -> bool:
        return self.kind == "relation" and set(self.signs) <= {"=", "in"}


_PIECE = re.compile(
    r"(?P<open>\\\{|\\(?:langle|lfloor|lceil|begin)(?![a-z])|[({\[])"
    r"|(?P<close>\\\}|\\(?:rangle|rfloor|rceil|end)(?![a-z])|[)}\]])"
    r"|(?P<list>(?:[,;]\s*)?(?:(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\(?:land|lor|wedge|vee)(?![a-z]))|,)|(?P<rows>;)"
    r"|(?P<relation>\\(?:leq?|geq?|leqslant|geqslant|lt|gt|neq?|in|approx)(?![a-z])|:=|<=|>=|!=|=|<|>)"
    r"|(?P<group>\\(?:cup|cap|setminus|backslash)(?![a-z]))"
    r"|(?P<ratio>:|(?<![A-Za-z\\])to(?![A-Za-z]))|\\[A-Za-z]+|.",
    re.DOTALL,
)
_RELATIONS = {
    r"\leq": "<=", r"\le": "<=", r"\leqslant": "<=", r"\geq": ">=", r"\ge": ">=", r"\geqslant": ">=",
    r"\lt": "<", r"\gt": ">", r"\ne": "!=", r"\neq": "!=", r"\in": "in", ":=": "=",
}  # fmt: skip
_PAIRS = {
    ("(", ")"): "()", ("[", "]"): "[]", ("(", "]"): "(]", ("[", ")"): "[)",
    (r"\{", r"\}"): "set", (r"\langle", r"\rangle"): "()", ("{", "}"): "braces",
}  # fmt: skip
_GROUPS = {r"\cup": "union", r"\cap": "cap", r"\setminus": "minus", r"\backslash": "minus"}
_BASE_WORDS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_IN_BASE = re.compile(
    r"\(?\s*([0-9][0-9A-Fa-f]*)\s*\)?\s*_\s*\{?\s*\(?([0-9]+|" + "|".join(_BASE_WORDS) + r")\)?\s*\}?"
)
_THOUSANDS = re.compile(r"(?<![0-9.,_^])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])")
_BUILDER = re.compile(r"\s*([^,:|]*?)\s*(?:\\mid|:|\|)\s*(.*[<>=].*|.*\\(?:le|ge|lt|gt|ne).*)", re.DOTALL)
_SIGNED = re.compile(r"\\(?:pm|mp)(?![a-z])")
_INTERVAL = re.compile(r"([\](\[])([^\[\]()]*,[^\[\]()]*)([\[\])])")  # also ]2, 5[
_POINT = re.compile(r"[ABD-OQ-Z]\s*=?\s*(\((?:[-+0-9.,;/ ]|\\frac|\\sqrt|[{}])+\))")  # A(2, 3)


def structure(text: str) -> Node:
    r"""Return the structure of a `plain` text.

    >>> [structure(text).kind for text in ("x < 3", "1, 2 and 3", r"\{1, 2\}", "[0,1)", "2x+1")]
    ['relation', 'list', 'set', '[)', 'value']
    """
    return read(_INTERVAL.sub(_pointing_in, _ungrouped(text)))


def read(text: str) -> Node:
    """Return the structure of a text whose commas separate items and whose brackets point inwards."""
    text = text.strip()
    if point := _POINT.fullmatch(text):
        text = point[1]
    if base := _IN_BASE.fullmatch(text):
        number = str(_BASE_WORDS.index(base[2]) + 2) if base[2].isalpha() else base[2]
        return Node("base", text=f"{base[1].lstrip('0').upper()}_{number}")
    rows, separators = _split(text, "rows")
    if separators:  # p=5, q=2; p=7, q=2
        return Node("list", tuple(Node("()", row.items) if row.kind == "list" else row for row in map(read, rows)))
    parts, separators = _split(text, "list")
    if separators:
        kinds = {"list" if sign == "," else "and" if sign.endswith(("and", "wedge")) else "or" for sign in separators}
        return Node(kinds.pop() if len(kinds) == 1 else "list", _all(parts))
    parts, signs = _split(text, "relation")
    if signs:
        return _relation(parts, signs)
    parts, signs = _split(text, "group")
    if signs:
        kind = _GROUPS[signs[-1]]
        earlier = text[: -len(parts[-1]) - len(signs[-1])]
        return Node(kind, (read(earlier), read(parts[-1])) if kind == "minus" else _all(parts))
    inner = _bracketed(text)
    if inner is not None:
        return _group(text, *inner)
    if _SIGNED.search(text):
        return Node("list", tuple(read(_signed(text, *both)) for both in ((" + ", " - "), (" - ", " + "))))
    first, *others = parts = _split(text, "ratio")[0]
    if others and all(part.strip()[:1].isupper() and is_name(part) for part in parts):
        return Node("value", text="ratio of " + re.sub("[^A-Za-z ]", "", " ".join(parts)))  # A:B = 1:2
    if len(others) > 1:
        return Node("ratio", tuple(Node("value", text=rf"\frac{{{other}}}{{{first}}}") for other in others))
    return Node("value", text=rf"\frac{{{first}}}{{{others[0]}}}" if others else text)


def _pointing_in(interval: re.Match[str]) -> str:
    left, inner, right = interval.groups()
    return ("[" if left == "[" else "(") + inner + ("]" if right == "]" else ")")


def named(node: Node) -> str | None:
    """Return the name whose value a relation states (`x` of `x = 5` and `x in S`), or None."""
    if not node.equation:
        return None
    first = node.items[0]
    items = first.items if first.kind == "()" else (first,)  # (p, q) = (3, 2)
    texts = ["".join(item.text.split()) for item in items if item.kind == "value" and is_name(item.text)]
    between = any(side.kind == "value" and is_name(side.text) for side in node.items[1:-1])
    return ",".join(texts) if len(texts) == len(items) and not between else None


def _all(parts: list[str]) -> tuple[Node, ...]:
    """Read each part. A part that is a list itself, as of `\\pm`, gives several items."""
    found: list[Node] = []
    for node in map(read, parts):
        found += node.items if node.kind == "list" else (node,)
    return tuple(found)


def _relation(parts: list[str], signs: list[str]) -> Node:
    if r"\approx" in signs:  # the exact part counts: x = 1/3 \approx 0.33
        end = signs.index(r"\approx")
        if end == 0 and is_name(parts[0]):
            parts, signs = parts[:2], ["="]
        else:
            parts, signs = parts[: end + 1], signs[:end]
    sides = tuple(map(read, parts))
    if len(sides) == 2 and signs == ["="] and sides[1].kind == "value" and is_name(sides[1].text):  # 5 = x
        sides = sides if sides[0].kind == "value" and is_name(sides[0].text) else sides[::-1]
    return Node("relation", sides, tuple(_RELATIONS.get(sign, sign) for sign in signs)) if signs else sides[0]


def _group(text: str, kind: str, content: str) -> Node:
    if kind == "set" and (builder := _BUILDER.fullmatch(content)):
        return read(builder[2])
    parts, separators = _split(content.replace(";", ","), "list")
    if not separators and kind != "set":
        inner = read(content)
        return Node("value", text=text) if inner.kind == "value" and kind == "()" else inner
    if kind == "braces":
        return read(content)
    return Node(kind, _all(parts) if content.strip() else ())


def _bracketed(text: str) -> tuple[str, str] | None:
    """Return the kind and the content of the brackets around an entire text."""
    stack, tokens = 0, list(_PIECE.finditer(text))
    for index, token in enumerate(tokens):
        stack += bool(token["open"]) - bool(token["close"])
        if stack == 0 and index < len(tokens) - 1:
            return None
    kind = _PAIRS.get((tokens[0][0], tokens[-1][0])) if tokens and stack == 0 else None
    return (kind, text[tokens[0].end() : tokens[-1].start()]) if kind else None


def _split(text: str, kind: str) -> tuple[list[str], list[str]]:
    """Return the parts of a text between the tokens of a kind outside every bracket, and these tokens."""
    parts, found, start, depth = [], [], 0, 0
    for token in _PIECE.finditer(text):
        depth += bool(token["open"]) - bool(token["close"])
        if depth == 0 and token[kind]:
            parts.append(text[start : token.start()])
            found.append(token[kind])
            start = token.end()
    return [*parts, text[start:]], found


def _ungrouped(text: str) -> str:
    """Drop the commas within numbers, if a space follows every other comma. The lone comma of (1,200) stays."""
    grouped = _THOUSANDS.search(text)
    if grouped is None:
        return text
    rest = _THOUSANDS.sub("", text)
    in_brackets = re.search(r"(?:[(\[]|\\\{|_\{)[^()\[\]{}]*$", text[: grouped.start()])
    if re.search(r",(?!\s)", rest) or ("," not in rest and in_brackets):
        return text
    return _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)


def _signed(text: str, plus_minus: str, minus_plus: str) -> str:
    return _SIGNED.sub(lambda sign: plus_minus if sign[0][1] == "p" else minus_plus, text)


# -- names -------------------------------------------------------------------------------------------------------------

_SYMBOL = (
    rf"(?:[A-Za-z]|[A-Z]{{2,5}}|\\(?:ell|(?:var)?(?:{_GREEK.replace(' ', '|')}))(?![a-z])"
    r"|\\(?:vec|bar|hat|overline|tilde|dot|overrightarrow|mathbf|mathcal)\s*\{[^{}]*\})"
    r"\s*(?:_\s*(?:\{[^{}]*\}|[A-Za-z0-9]))?'*"
)
_ARGUMENT = rf"\s*-?\s*(?:[0-9]+(?:\.[0-9]+)?|{_SYMBOL})\s*"
_NAMED = re.compile(
    r"\s*(?:\|\s*[A-Z]{2,5}\s*\|"
    r"|\\[dtc]?frac\s*\{\s*(?:[A-Z]{1,5}\s*\}\s*\{\s*[A-Z]{1,5}|d[a-z]\s*\}\s*\{\s*d[a-z])\s*\}"
    rf"|(?:m?\s*\\angle\s*)?{_SYMBOL}(?:\s*\^\s*\{{\s*-1\s*\}}(?=\s*\())?(?:\s*\({_ARGUMENT}(?:,{_ARGUMENT})*\))?)\s*:?\s*"
)
_PHRASE = re.compile(r"\s*(?!(?i:.*(?:\b(?:not|never|nor|cannot)\b|n't)))[A-Za-z]{3,}(?:[\s'-]+[A-Za-z]+)*\s*:?\s*")


_LEAD_IN = re.compile(
    r"^\s*(?:(?:so|thus|hence|therefore|then|finally|and|the|our|final|answer|value|sum|is|of|that|we|get|have|find)"
    r"(?![A-Za-z])[\s:,]*)*",
    re.IGNORECASE,
)
_COEFFICIENT = re.compile(r"\s*[0-9]{1,4}\s*(?:\\cdot(?![a-z])|\*)?\s*(?=[A-Za-z\\])")
_LETTERS_MULTIPLIED = re.compile(r"\s*[a-z](?:(?:\s*(?:\\cdot(?![a-z])|\\times(?![a-z])|\*)\s*)?[a-z]){1,3}\s*")


def is_asked_for(text: str) -> bool:
    r"""Whether a `plain` text combines names as questions do that ask for one number: `m+n`, `100p+q`, `a-b`, `mn`.

    Equations that more often state a problem (`2x`, `5x-7y`, `x^2+y^2`) are not.

    >>> [is_asked_for(text) for text in ("m+n", "100p+q", "f(1)+f(2)", "a-b", "mn", "Thus m+n")]
    [True, True, True, True, True, True]
    >>> [is_asked_for(text) for text in ("2x", "5x-7y", "x^2+y^2", "m", "5+3", "not m+n")]
    [False, False, False, False, False, False]
    """
    text = _LEAD_IN.sub("", text, count=1)
    if _LETTERS_MULTIPLIED.fullmatch(text):
        return not is_word(text.strip())
    terms = re.split("[+-]", text)
    names = [_COEFFICIENT.sub("", term, count=1) for term in terms]
    if len(terms) < 2 or not all(map(is_name, names)):
        return False
    return "-" not in text or names == terms


def is_name(text: str) -> bool:
    r"""Whether a `plain` text names one quantity: a variable, a function of some, segments, or words.

    >>> [is_name(text) for text in ("x", "x_1", "f(x)", r"\theta", "AB", "Total cost")]
    [True, True, True, True, True, True]
    >>> [is_name(text) for text in ("2x", "xy", "x+y", "x^2", "|x|", "x(x+1)", r"\pi")]
    [False, False, False, False, False, False, False]
    """
    return bool(_NAMED.fullmatch(text) or _PHRASE.fullmatch(text))
