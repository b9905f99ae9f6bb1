"""Questions of chemistry: the choice or verdict that an answer names, and balanced equations.

Formulas may have brackets, hydrates and charges; all common arrows are accepted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from .answers import extract_answer, same_text
from .choices import VERDICTS, read_letter, read_verdict
from .molecules import is_formula
from .notation import plain
from .numeric import MAX_LENGTH

MAX_DEPTH = 16  # brackets within brackets
CHARGE = "charge"  # counted as if it were an element, so that one balance covers both
Species = frozenset[tuple[str, int]]  # how many atoms of each element, and the charge
Side = Mapping[Species, Fraction]

_ARROW = re.compile(
    r"\\x(?:left|right)+(?:arrow|harpoon)s?\s*(?:\[[^\[\]]*\]\s*)?(?:\{[^{}]*\})?"
    r"|\\(?:long)?(?:left|right)+(?:arrow|harpoon)s?|\\to(?![a-z])"
    r"|<?[-=]{1,8}>|={1,8}|[→⟶⇒⟹⇌⇋⇄⇆⟷↔⇔⟺➝➞➔]",
    re.IGNORECASE,
)
_SMALL = str.maketrans("₀₁₂₃₄₅₆₇₈₉−–·•⋅∙×", "0123456789--*****")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹]{0,2}[⁺⁻][⁰¹²³⁴-⁹]{0,2}")
_NORMAL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_DOT = re.compile(r"\\(?:cdot|bullet|times|ast)(?![a-z])")
_HALF = re.compile(r"\\[dt]?frac\s*\{?([0-9]{1,6})\}?\s*\{?([0-9]{1,6})\}?")
_DRESS = re.compile(
    r"\\(?:ce|text|textbf|mathrm|mathbf|bf|rm|left|right|displaystyle|uparrow|downarrow|quad)(?![a-z])"
    r"|\\[,;:! ]|\*\*|[$`~↑↓]"
)
_CHARGE = re.compile(
    r"\^?\s?\{\s?([0-9]{0,2}\s?[+-]|[+-]\s?[0-9]{1,2})\s?\}|\^\s?\(?([0-9]{0,2}[+-]|[+-][0-9]{1,2})\)?"
)
_SIGN_FIRST = re.compile(r"(?<=[A-Za-z0-9)\]])([+-][0-9]{1,2})(?=\s?(?:$|[+=]))")  # Mg+2
_STATE = re.compile(r"\((?:aq|s|l|g|cr|am|conc|dil)?\)")
_BARE_PLUS = re.compile(r"(?<=\S)\+(?=\s?(?:\+|=|$))")  # of an ion: no term follows it

_PLUS = re.compile(r"\+(?![0-9]*>)")  # between terms, not in a charge
_COEFFICIENT = re.compile(r"\(([0-9]{1,6}/[0-9]{1,6})\)|([0-9]{1,6}(?:[./][0-9]{1,6})?)(?![0-9])\*?")
_TOKEN = re.compile(r"([A-Z][a-z]?)|([(\[])|([)\]])|<([0-9]{0,2})([+-])([0-9]{0,2})>|([0-9]{1,6})")
_ION = re.compile(r"[A-Z][a-z]?")
_LEAD = re.compile(r".*(?:\bis\b|\bequation\b|[a-z]:)\s*:?", re.DOTALL)  # "The balanced equation is:"


def equation(text: str, gold: str) -> float:
    """Return 1.0 if the final answer of `text` is the equation `gold` in a balanced form, else 0.0.

    Source: arXiv 2504.13818, experiments in chemistry: reward 1.0 for a right answer. Range {0.0, 1.0}.

    `text` is a completion, its answer found by `extract_answer`; `gold` is the balanced equation. An answer is right
    if it has the species of `gold` on each side, in any order and spelling (`HOH` is `H2O`; states do not count), and
    if its positive coefficients balance every element and the charge; they need not be the smallest. If `gold`
    itself does not balance, the coefficients must equal its own up to a common factor; if it is not an equation, the
    text must be equal.

    >>> equation("<answer>2H2 + O2 -> 2H2O</answer>", "2H2(g) + O2(g) = 2H2O(l)")
    1.0
    >>> equation("<answer>H2 + O2 -> H2O2</answer>", "2H2 + O2 = 2H2O")
    0.0
    """
    answer, gold = extract_answer(text), gold.strip()
    if answer is None or not gold:
        return 0.0
    if answer == gold:
        return 1.0
    if len(answer) > MAX_LENGTH or len(gold) > MAX_LENGTH:
        return 0.0
    answer, wanted = _statement(answer), read_equation(gold)
    if wanted is None:
        return float("".join(normalise(answer).split()) == "".join(normalise(gold).split()))
    found = read_equation(answer, like=wanted)
    if found is None or found.left.keys() != wanted.left.keys() or found.right.keys() != wanted.right.keys():
        return 0.0
    return float(found.balanced if wanted.balanced else found.proportional(wanted))


def chemistry(text: str, gold: str) -> float:
    """Grade by `equation` if `gold` has an arrow or an equals sign and is not SMILES (`C=CN`), else by `choice`.

    Source: arXiv 2504.13818, experiments in chemistry: reward 1.0 for a right answer. Range {0.0, 1.0}.

    >>> chemistry("<answer>2H2 + O2 = 2H2O</answer>", "2H2 + O2 = 2H2O"), chemistry("<answer>(b)</answer>", "B")
    (1.0, 1.0)
    """
    if _ARROW.search(gold) and not is_formula(gold.strip()):
        return equation(text, gold)
    return choice(text, gold)


def _statement(answer: str) -> str:
    """The last line that holds an arrow, without the words before it and the full stop."""
    line = next((line for line in reversed(answer.splitlines()) if _ARROW.search(line)), answer)
    lead = _LEAD.match(line)
    return line[lead.end() if lead else 0 :].partition(", ")[0].strip().removesuffix(".")


# -- formulas ---------------------------------------------------------------------------------------------------------


class Equation(NamedTuple):
    """Reactants and products: for each species its coefficient."""

    left: Side
    right: Side

    @property
    def balanced(self) -> bool:
        """Whether every element and the charge balance, with positive coefficients."""
        amounts: Counter[str] = Counter()
        for side, sign in ((self.left, 1), (self.right, -1)):
            for species, coefficient in side.items():
                for element, count in species:
                    amounts[element] += sign * count * coefficient  # type: ignore[assignment]
        positive = all(coefficient > 0 for side in self for coefficient in side.values())
        return positive and not any(amounts.values())

    def proportional(self, other: Equation) -> bool:
        """Whether the coefficients are equal up to one positive factor; the species must be the same."""
        ratios = set()
        for mine, theirs in zip(self, other, strict=True):
            ratios |= {mine[key] / theirs[key] if theirs[key] else Fraction(0) for key in mine}
        return len(ratios) == 1 and ratios.pop() > 0


def read_equation(text: str, like: Equation | None = None) -> Equation | None:
    """Read an equation; None if the text is not one. The time is linear in the length of the text.

    Any arrow or equals sign separates the sides and a plus sign the terms; states such as `(aq)` are dropped. Charges
    are `{2+}`, `^{2+}`, `^2+`, superscripts or plain signs (`Ag+`, `SO4 2-`). A plain sign can be ambiguous (`Fe3+`: an
    ion of charge 3, or three atoms); the reading whose species is in `like` is preferred.

    >>> read_equation("2H2 + O2 -> 2 H2O").balanced, read_equation("H2 + O2 = H2O").balanced
    (True, False)
    >>> read_equation("Ag+ + Cl- = AgCl").balanced, read_equation("water") is None
    (True, True)
    """
    sides = _BARE_PLUS.sub("^", normalise(text)).split("=")
    if len(sides) != 2:
        return None
    left = _side(sides[0], like.left if like else {})
    right = _side(sides[1], like.right if like else {})
    return Equation(left, right) if left and right else None


def read_formula(text: str) -> Species | None:
    """Count the atoms of a formula, and its charge, given in angle brackets; None if it is not a formula.

    >>> sorted(read_formula("Ca(HCO3)2"))
    [('C', 2), ('Ca', 1), ('H', 2), ('O', 6)]
    >>> sorted(read_formula("CuSO4*5H2O"))
    [('Cu', 1), ('H', 10), ('O', 9), ('S', 1)]
    """
    if text == "e<->":
        return frozenset({(CHARGE, -1)})
    total: Counter[str] = Counter()
    for part in re.split(r"[*.]", text):
        atoms = part.lstrip("0123456789")
        factor, counts = part[: len(part) - len(atoms)], _atoms(atoms)
        if counts is None or len(factor) > 6:
            return None
        _add(total, counts, int(factor or 1))
    return frozenset(total.items())


def normalise(text: str) -> str:
    r"""Write an equation in one way: `=` between the sides, charges in angle brackets, no LaTeX and no states.

    >>> normalise(r"\ce{Fe^{3+} + 3 OH^- -> Fe(OH)_3(s)}")
    'Fe<3+> + 3 OH<-> = Fe(OH)3'
    """
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_NORMAL)}}}", text.translate(_SMALL))
    text = _DOT.sub("*", _HALF.sub(r"\1/\2 ", " ".join(text.split())))
    text = _DRESS.sub("", _ARROW.sub(" = ", text))
    text = _CHARGE.sub(lambda match: f"<{(match[1] or match[2]).replace(' ', '')}>", text)
    text = _STATE.sub("", re.sub("[{}_]", "", text))
    return " ".join(_SIGN_FIRST.sub(r"<\1>", text).split())


def _side(text: str, like: Side) -> Side | None:
    side: dict[Species, Fraction] = {}
    for term in _PLUS.split(text):
        term = "".join(term.split())
        number = _COEFFICIENT.match(term)
        formula = term[number.end() :] if number else term
        readings = [species for species in _readings(formula) if species is not None]
        if not readings:
            return None
        try:
            coefficient = Fraction(next(filter(None, number.groups()))) if number else Fraction(1)
        except ZeroDivisionError:
            return None
        species = next((reading for reading in readings if reading in like), readings[0])
        side[species] = side.get(species, Fraction(0)) + coefficient
    return side


def _readings(formula: str) -> list[Species | None]:
    """The possible readings of a formula, the likeliest first; several where a plain sign follows a digit."""
    if not formula.endswith(("^", "-")):
        return [read_formula(formula)]
    formula, sign = formula[:-1], "-" if formula[-1] == "-" else "+"
    bare = formula.rstrip("0123456789")
    digits = formula[len(bare) :]
    readings = [read_formula(f"{formula}<{sign}>")]
    if digits:  # the last digit belongs to the sign: Fe3+, SO42-
        charged = read_formula(f"{formula[:-1]}<{digits[-1]}{sign}>")
        likely = len(digits) > 1 or _ION.fullmatch(bare)
        readings.insert(0 if likely else 1, charged)
    return readings


def _atoms(text: str) -> Counter[str] | None:
    groups: list[Counter[str]] = [Counter()]
    pending: Counter[str] = Counter()  # what a subscript would multiply
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            return None
        position = token.end()
        element, opening, closing, before, sign, after, subscript = token.groups()
        if subscript:
            if not pending:
                return None
            _add(groups[-1], pending, int(subscript))
            pending = Counter()
            continue
        _add(groups[-1], pending, 1)
        pending = Counter([element]) if element else Counter()
        if opening:
            groups.append(Counter())
        elif closing and len(groups) > 1:
            pending = groups.pop()
        elif sign:
            groups[-1][CHARGE] += int(f"{sign}{before or after or 1}")
        elif closing:
            return None
        if len(groups) > MAX_DEPTH:
            return None
    _add(groups[-1], pending, 1)
    return groups[0] if len(groups) == 1 and groups[0] else None


def _add(total: Counter[str], counts: Counter[str], factor: int) -> None:
    for element, count in counts.items():
        total[element] += count * factor


# -- choices -----------------------------------------------------------------------------------------------------------


def choice(text: str, gold: str) -> float:
    r"""Return 1.0 if the final answer of `text` names the choice `gold`, else 0.0.

    Source: arXiv 2504.13818, experiments in chemistry: reward 1.0 for a right answer. Range {0.0, 1.0}.

    `text` is a completion, its answer found by `extract_answer`; `gold` is a letter, or `Yes` or `No` (`True` and
    `False` mean the same). A letter may be the whole answer, in either case, or as a capital begin it ("B. text",
    "(B) text", "B: text") or be named in it ("Option B", "the answer is B"). An answer that names two choices, corrects
    itself or rejects the choice scores 0.0 (see `choices`). Any other gold answer is compared as text; case counts only
    in a chemical formula.

    >>> choice("<answer>(b)</answer>", "B"), choice(r"So \boxed{\text{B. Oxygen}}", "B")
    (1.0, 1.0)
    >>> choice("<answer>A or B</answer>", "B"), choice("<answer>True</answer>", "Yes")
    (0.0, 1.0)
    """
    answer, gold = extract_answer(text), gold.strip()
    if not answer or not gold or len(answer) > MAX_LENGTH:
        return 0.0
    answer = plain(answer)
    if gold.casefold() in VERDICTS:
        return float(read_verdict(answer) == VERDICTS[gold.casefold()])
    if len(gold) == 1 and gold.isalpha():
        return float(read_letter(answer) == gold.upper())
    gold = plain(gold)
    if is_formula(gold):
        return float(same_text(answer, gold))
    return float(answer.casefold() == gold.casefold())
