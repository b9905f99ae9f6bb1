"""Write an answer in one notation: ASCII and LaTeX, without styles, delimiters and currency."""

from __future__ import annotations

import re
import unicodedata

MAX_LENGTH = 1000  # characters of an answer that is read: bounds the time of every pattern of this package

# -- Unicode -----------------------------------------------------------------------------------------------------------

GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_COMMANDS = {
    "π": "pi", "∞": "infty", "×": "times", "·": "cdot", "⋅": "cdot", "∙": "cdot", "÷": "div", "≤": "le", "⩽": "le",
    "≥": "ge", "⩾": "ge", "≠": "ne", "≈": "approx", "≡": "equiv", "±": "pm", "∓": "mp", "∪": "cup", "∩": "cap",
    "∈": "in", "√": "sqrt", "∅": "emptyset", "∖": "setminus", "∠": "angle", "⟨": "langle", "⟩": "rangle",
    "⌊": "lfloor", "⌋": "rfloor", "⌈": "lceil", "⌉": "rceil", "∴": "therefore", "⇒": "Rightarrow", "℃": "degree C",
    "℉": "degree F",
    **dict(zip("αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΠΣΦΨΩ", GREEK.split(), strict=True)),
}  # fmt: skip
_SIGNS = str.maketrans(
    {sign: rf"\{name} " for sign, name in _COMMANDS.items()}
    | {sign: rf"\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)}
    | dict.fromkeys("−‐‑‒–—―˗➖", "-")
    | dict.fromkeys("“”„‟", '"')
    | dict.fromkeys("‘’‚‛", "'")
    | {"∛": r"\sqrt[3]", "٫": ".", "٬": ",", "٪": "%", "⁄": "/", "∕": "/", "∶": ":", "∣": "|"}
)
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀-₉]+")
_RAISED_MINUS = re.compile(r"(?<![^\s$(\[{,;=])⁻(?=\s*[0-9.])")  # ⁻5, not x⁻
_ONE_FRACTION = re.compile("[¼-¾⅐-⅞↉]")
_HIDDEN = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")  # soft hyphens, marks of direction

# -- LaTeX commands ----------------------------------------------------------------------------------------------------

UPRIGHT = re.compile(
    r"\\(?:text(?:normal|bf|it|rm|sf|tt|up|sl|md|sc)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|emph|bm|bold|boldsymbol)"
    r"(?![A-Za-z])\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"  # \text{ cm}
    r"|\\operatorname\*?\s*\{(?!lcm|gcd|a?r?c?(?:sin|cos|tan|cot|sec|csc)h?\})([^{}]*)\}"  # \operatorname{cm}
)
_DECORATED = re.compile(  # \underline{7}, \textcolor{red}{7}, {\large 7}
    r"\\(?:underline|fbox|uline|smash|(?:text)?color\s*\{[^{}]*\})\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
)
CIRCLE = r"\^\s*+\{?\s*+\\circ\s*+\}?"  # ^{\circ}, of degrees; to try fewer spaces never helps
_SIZED = re.compile(r"\\m?(?:left|right)(?![A-Za-z])")  # \left(
_DROPPED = re.compile(
    r"\\m?(?:left|right)(?![a-zA-Z])\.?"  # \left.
    r"|\\(?:displaystyle|textstyle|[bB]ig{1,2}[lr]?|rm|bf|it|large|Large|LARGE|huge|Huge"
    r"|small|normalsize|checkmark|blacksquare|square|limits|nolimits|ldotp|pounds)(?![a-zA-Z])"  # \displaystyle
    r"|\\color\s*\{[^{}]*\}"  # \color{red}
    r"|\\(?:[hv]space|[hv]?phantom)\*?\s*\{[^{}]*\}"  # \hspace{1em}
    r"|(?<!\\)\\!\s*"  # 1,\!000
    rf"|{CIRCLE}|\\degree(?![a-z])"  # 90^\circ
)
DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]")  # \( and \]
_DASH = re.compile(r"\\text(?:minus|endash|emdash)(?![A-Za-z])\s*(?:\{\s*\})?")  # \textminus{}
_ESCAPED_TWICE = re.compile(r"\\\\(?=[A-Za-z])")  # \\frac, where it is not the end of a row
_NEGATED = re.compile(r"\\not\s*=")
_DEGREES = re.compile(  # of an angle: \cos 60^\circ, \sin(30^\circ)
    r"(\\(?:sin|cos|tan|cot|sec|csc)\s*+(?:\^\s*+\{?\s*+[0-9]\s*+\}?\s*+)?)(\(|\{|)\s*+([0-9]+(?:\.[0-9]+)?)\s*+"
    rf"(?:{CIRCLE}|\\degree(?![a-z])|°)\s*([)}}]?)"
)

# -- spaces, signs and digits ------------------------------------------------------------------------------------------

_LEADING = re.compile(  # \therefore 7, = 7
    r"^(?:\s|:|\\(?:therefore|Rightarrow|rightarrow|implies|Longrightarrow|to)(?![a-z])|=(?!=))+"
)
_BOLD = re.compile(  # **7**, __7__
    r"(?<![\w)\]}])(?:\*\*([^*_\s][^*]*)(?<!\s)\*\*|__([^*_\s][^*]*?)(?<!\s)__)(?![\w(\[{])"
)
_SPACE = re.compile(
    r"(?<!\\)\\[,;:> ]"  # 5\,cm
    r"|\\q?quad"
    r"|\\(?:(?:neg)?(?:thin|med|thick)|en)space(?![A-Za-z])|\\enskip(?![A-Za-z])"
    r"|(?<!~)~(?!~)|\s+"
)
# A sign belongs to the number after it only where no term can be before it: "5 - 3" and "Answer - 3" stay as they are.
_NO_TERM_BEFORE = (
    r"(^|[(\[{,;:=<>&]|(?<![A-Za-z])(?:is|are|was|were|be|it's|equals?|to|or|and|of|at|by|about|approximately"
    r"|least|most|than)(?= ))( *)"
)
_NUMBER_AHEAD = r"\.?[0-9]|\\[dtc]?frac(?![a-z])"
_BRACED_SIGN = re.compile(r"(?<![\^_])\{ *([+-]) *\}")  # {-}3, not 0^{-}
_SIGN_APART = re.compile(rf"{_NO_TERM_BEFORE}([+-]) +(?={_NUMBER_AHEAD})", re.IGNORECASE)  # x = - 3
_SIGN_IN_WORDS = re.compile(  # negative 3, minus \pi
    rf"{_NO_TERM_BEFORE}(?:(?:an? )?negative|minus|neg\.?) *(?={_NUMBER_AHEAD}|\\(?:sqrt|pi|infty)(?![a-z]))",
    re.IGNORECASE,
)
_EQUALS = re.compile(
    r"(?<=[\w)}] )(?<![Ii]t )(?:is equal to|equals(?: to)?)(?= )|(?<=^[A-Za-z] )is(?= [-0-9.\\])"
)  # x equals 5
_BARE_EXPONENT = re.compile(  # 10^-2, e^-x
    r"\^\s*([+-])(?:(?<=-)\s*)?"
    r"([0-9]+(?:\.[0-9]+)?|\\[dt]?frac\s*(?:[0-9]{2}|\{[^{}]*\}\s*\{[^{}]*\})|\\sqrt\s*\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z]|\([^()]*\))"
)
_GROUPED = re.compile(  # 1 200 000, 1'200
    r"(?<![\w.,'])(?<![0-9] )[1-9][0-9]{0,2}(?:(?: [0-9]{3})+|(?:'[0-9]{3})+)(?![\w,']|\.[0-9]{3} |\s*/| [0-9])"
)
_DOTTED_DIGIT = r"\\dot\s*\{?\s*[0-9]\s*\}?"
_REPEATING = re.compile(
    rf"(?<![\w.])([0-9]*)\.([0-9]*)(?:({_DOTTED_DIGIT}[0-9]*{_DOTTED_DIGIT})"  # 0.\dot1 2\dot3
    r"|\\(?:overline|bar|dot)\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))"  # 0.\overline{3}
    r"|\(([0-9]+)\)"  # 0.(3)
    r"|(?:\.\.\.+|\\[lc]?dots(?![a-z])))"  # 0.333...
)
_COPIES = 3  # of a period before dots
_US_DOLLARS = re.compile(r"(?<![A-Za-z$])US ?\\?\$(?=[0-9.])")  # US$25
_BRACED_MARK = re.compile(r"\{([,.:])\}")  # 1{,}200
_UNWRITTEN = str.maketrans("", "", "$`°€£¥₹¢")
_QUOTES = ("'", '"')
_IN_WORDS = {
    "no solution": r"\emptyset", "no solutions": r"\emptyset", "no real solutions": r"\emptyset",
    "empty set": r"\emptyset", "the empty set": r"\emptyset", "all real numbers": r"\mathbb{R}",
    "all reals": r"\mathbb{R}", "dne": "does not exist", "infinity": r"\infty", "-infinity": r"-\infty",
    "negative infinity": r"-\infty", "minus infinity": r"-\infty",
    r"\mathbb{r}^+": r"(0, \infty)", r"\mathbb{r}^{+}": r"(0, \infty)",
}  # fmt: skip


def plain(text: str) -> str:
    r"""Write an answer in ASCII and LaTeX, without delimiters, styles and currency.

    The result is empty beyond `MAX_LENGTH` characters.

    >>> plain(r"$\text{about }\$1{,}200$."), plain("90^\\circ"), plain(r"\therefore \underline{7}"), plain("½x²")
    ('about 1,200', '90', '7', '\\frac{1}{2}x^{2}')
    >>> plain("- 3"), plain(r"x = -\,\$3"), plain("negative 3"), plain("5 - 3")
    ('-3', 'x = -3', '-3', '5 - 3')
    >>> plain("10^-2"), plain("e^-x")
    ('10^{-2}', 'e^{-x}')
    """
    text = _US_DOLLARS.sub("", to_ascii(text))
    if "\\" in text:
        text = _without_commands(text)
    text = _BRACED_MARK.sub(r"\1", text).translate(_UNWRITTEN)
    text = _BOLD.sub(r"\1\2", text).replace("**", "^")
    # Long runs would take the patterns below hours. Two spaces stay: "1 \quad 200" is not 1200, as "1\,200" is.
    text = re.sub(" {3,}", "  ", _SPACE.sub(" ", text))
    text = _LEADING.sub("", text)
    # the mark that ends a sentence and the backslashes of a line break; dots (0.333...) stay
    text = text.strip().rstrip("\\").strip()
    if text.endswith((".", ",", ";", ":")) and not text.endswith(".."):
        text = text[:-1].rstrip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in _QUOTES:
        text = text[1:-1].strip()
    in_symbols = _IN_WORDS.get(text.lower())
    if in_symbols:
        return in_symbols
    text = _with_signs(_EQUALS.sub("=", text))
    text = _BARE_EXPONENT.sub(r"^{\1\2}", text)
    text = _REPEATING.sub(_as_fraction, text)
    return _GROUPED.sub(lambda number: re.sub("[ ']", "", number[0]), text)


def to_ascii(text: str) -> str:
    """Write the signs and digits of Unicode in ASCII and LaTeX. The result is empty beyond `MAX_LENGTH` characters.

    >>> to_ascii("√x₁ ≤ ½"), to_ascii("10⁻³")
    ('\\\\sqrt x_{1} \\\\le  \\\\frac{1}{2}', '10^{-3}')
    """
    if len(text) > MAX_LENGTH:
        return ""
    if text.isascii():
        return text
    text = _HIDDEN.sub("", text)
    text = _RAISED_MINUS.sub("-", text)
    text = _RAISED.sub(lambda raised: f"^{{{_compatible(raised[0]).translate(_SIGNS)}}}", text)
    text = _LOWERED.sub(lambda lowered: f"_{{{_compatible(lowered[0])}}}", text)
    text = _ONE_FRACTION.sub(_in_latex, text)
    # twice: the normal form of a sign may be another sign
    text = _compatible(text.translate(_SIGNS)).translate(_SIGNS)
    text = "".join(str(unicodedata.decimal(sign)) if sign.isdecimal() else sign for sign in text)
    return text if len(text) <= MAX_LENGTH else ""  # a sign may become 18 characters


def _compatible(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _in_latex(fraction: re.Match[str]) -> str:
    top, bottom = _compatible(fraction[0]).split("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _without_commands(text: str) -> str:
    if r"\begin" not in text and "matrix" not in text and "array" not in text and "cases" not in text:
        text = _ESCAPED_TWICE.sub(r"\\", text)
    text = text.replace(r"\$", "").replace(r"\%", "%")
    text = _DASH.sub("-", text)
    text = DELIMITERS.sub("", text)
    text = _NEGATED.sub(r"\\ne ", text)
    for _ in range(2):  # a style within a style
        text = UPRIGHT.sub(_styled_text, text)
        text = _DECORATED.sub(r"\1", text)
    text = _DEGREES.sub(r"\1\2\\frac{\3\\pi}{180}\4", _SIZED.sub("", text))
    return _DROPPED.sub("", text)


def _styled_text(styled: re.Match[str]) -> str:
    content = styled[1] or styled[2] or ""
    return content if content in (",", ".", ":") else f" {content} "


def _with_signs(text: str) -> str:
    """Write the sign of a number next to it: `- 3`, `{-}3` and `negative 3` are `-3`."""
    if "{" in text:
        text = _BRACED_SIGN.sub(r"\1", text)
    text = _SIGN_IN_WORDS.sub(r"\1\2-", text)
    return _SIGN_APART.sub(r"\1\2\3", text)


def _as_fraction(repeating: re.Match[str]) -> str:
    """Write a repeating decimal as its fraction; the last digits before dots repeat if there are three copies."""
    units, once, *marked = repeating.groups()
    period = "".join(re.findall("[0-9]", "".join(filter(None, marked))))
    if not period:
        period = _last_period(once)
        once = once[: len(once) - _COPIES * len(period)]
    if not period:
        return repeating[0]
    bottom = (10 ** len(period) - 1) * 10 ** len(once)
    top = int(units + once + period) - int(units + once or 0)
    return rf"\frac{{{top}}}{{{bottom}}}"


def _last_period(digits: str) -> str:
    """Return the shortest text of which `digits` ends with three copies, or an empty text."""
    for size in range(1, len(digits) // _COPIES + 1):
        period = digits[-size:]
        if digits.endswith(period * _COPIES):
            return period
    return ""
