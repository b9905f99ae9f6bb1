"""Questions of chemistry: the choice or verdict that an answer names, and balanced equations.

Formulas may have brackets, hydrates and charges; all common arrows are accepted.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from .extraction import extract_answer
from .mathematics import MAX_LENGTH, VERDICTS, is_formula, plain, read_letter, read_verdict, same_text

MAX_DEPTH = 16  # brackets within brackets
CHARGE = "charge"  # counted as if it were an element, so that one balance covers both
Species = frozenset[tuple[str, int]]  # how many atoms of each element, and the charge
Side = Mapping[Species, Fraction]

_ARROW = re.compile(
    r"\\x(?:left|right)+(?:arrow|harpoon)s?\s*(?:\[[^\[\]]*\]\s*)?(?:\{[^{}]*\})?"  # \xrightarrow[heat]{Pt}
    r"|\\(?:long)?(?:left|right)+(?:arrow|harpoon)s?|\\to(?![a-z])"  # \rightarrow, \to
    r"|<?[-=]{1,8}>|={1,8}"  # ->, <=>, =
    r"|[→⟶⇒⟹⇌⇋⇄⇆⟷↔⇔⟺➝➞➔]",
    re.IGNORECASE,
)
_ASCII = str.maketrans("₀₁₂₃₄₅₆₇₈₉−–·•⋅∙×", "0123456789--*****")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹]{0,2}[⁺⁻][⁰¹²³⁴-⁹]{0,2}")  # ²⁺
_NORMAL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_DOT = re.compile(r"\\(?:cdot|bullet|times|ast)(?![a-z])")  # CuSO4 \cdot 5H2O
_FRACTION = re.compile(r"\\[dt]?frac\s*\{?([0-9]{1,6})\}?\s*\{?([0-9]{1,6})\}?")  # \frac{1}{2}, \frac12
_STYLES = re.compile(
    r"\\(?:ce|text(?:rm|bf|it|sf|tt|up|normal)?|math(?:rm|bf|it|sf|tt|normal)|operatorname|bf|rm|left|right"
    r"|displaystyle|uparrow|downarrow|quad)(?![a-z])"  # \ce
    r"|\\[,;:! ()\[\]]|\*\*|[$`~↑↓]"  # \, and \(
)
_CHARGE = re.compile(
    r"\^?\s?\{\s?([0-9]{0,2}\s?[+-]|[+-]\s?[0-9]{1,2})\s?\}"  # ^{2+}, {2+}
    r"|\^\s?\(?([0-9]{0,2}[+-]|[+-][0-9]{1,2})\)?"  # ^2+, ^(2+)
)
_SIGN_FIRST = re.compile(r"(?<=[A-Za-z0-9)\]])([+-][0-9]{1,2})(?=\s?(?:$|[+=]))")  # Mg+2
_STATE_OF_MATTER = re.compile(r"\((?:aq|s|l|g|cr|am|conc|dil)?\)")  # (aq)
_BARE_PLUS = re.compile(r"(?<=\S)\+(?=\s?(?:\+|=|$))")  # of an ion: no term follows it

_PLUS = re.compile(r"\+(?![0-9]*>)")  # between terms, not in a charge
_COEFFICIENT = re.compile(
    r"\(([0-9]{1,6}/[0-9]{1,6})\)"  # (1/2)O2
    r"|([0-9]{1,6}(?:[./][0-9]{1,6})?)(?![0-9])\*?"  # 2O2, 0.5O2, 1/2O2
)
_FORMULA_TOKEN = re.compile(
    r"(?P<element>[A-Z][a-z]?)"
    r"|(?P<opening>[(\[])|(?P<closing>[)\]])"
    r"|<(?P<before>[0-9]{0,2})(?P<sign>[+-])(?P<after>[0-9]{0,2})>"  # <2+>, <+2>
    r"|(?P<subscript>[0-9]{1,6})"
)
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
    answer = extract_answer(text)
    gold = gold.strip()
    if answer is None or not gold:
        return 0.0
    if answer == gold:
        return 1.0
    if len(answer) > MAX_LENGTH or len(gold) > MAX_LENGTH:
        return 0.0
    answer = _statement(answer)
    gold_equation = read_equation(gold)
    if gold_equation is None:
        return float("".join(normalise(answer).split()) == "".join(normalise(gold).split()))
    answer_equation = read_equation(answer, preferred=gold_equation)
    if answer_equation is None or not answer_equation.has_species_of(gold_equation):
        return 0.0
    if gold_equation.balanced:
        return float(answer_equation.balanced)
    return float(answer_equation.proportional(gold_equation))


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
    """Return the last line that holds an arrow, without the words before it."""
    statement = answer
    for line in answer.splitlines():
        if _ARROW.search(line):
            statement = line
    lead = _LEAD.match(statement)
    if lead:
        statement = statement[lead.end() :]
    statement, _, _ = statement.partition(", ")
    return statement.strip()


# -- formulas ---------------------------------------------------------------------------------------------------------


class Equation(NamedTuple):
    """Reactants and products: for each species its coefficient."""

    left: Side
    right: Side

    @property
    def balanced(self) -> bool:
        """Whether every element and the charge balance, with positive coefficients."""
        amounts: dict[str, Fraction] = defaultdict(Fraction)
        for side, sign in ((self.left, 1), (self.right, -1)):
            for species, coefficient in side.items():
                for element, count in species:
                    amounts[element] += sign * count * coefficient
                if coefficient <= 0:
                    return False
        return not any(amounts.values())

    def has_species_of(self, other: Equation) -> bool:
        """Whether both have the same species on each side."""
        return self.left.keys() == other.left.keys() and self.right.keys() == other.right.keys()

    def proportional(self, other: Equation) -> bool:
        """Whether the coefficients are equal up to one positive factor; the species must be the same."""
        ratios = set()
        for side, other_side in zip(self, other, strict=True):
            for species, coefficient in side.items():
                if other_side[species] == 0:
                    return False
                ratios.add(coefficient / other_side[species])
        return len(ratios) == 1 and ratios.pop() > 0


def read_equation(text: str, preferred: Equation | None = None) -> Equation | None:
    """Read an equation; None if the text is not one. The time is linear in the length of the text.

    Any arrow or equals sign separates the sides and a plus sign the terms; states such as `(aq)` are dropped. Charges
    are `{2+}`, `^{2+}`, `^2+`, superscripts or plain signs (`Ag+`, `SO4 2-`). A plain sign can be ambiguous (`Fe3+`: an
    ion of charge 3, or three atoms); the reading whose species is in `preferred` is taken.

    >>> read_equation("2H2 + O2 -> 2 H2O").balanced, read_equation("H2 + O2 = H2O").balanced
    (True, False)
    >>> read_equation("Ag+ + Cl- = AgCl").balanced, read_equation("water") is None
    (True, True)
    """
    sides = _BARE_PLUS.sub("^", normalise(text)).split("=")
    if len(sides) != 2:
        return None
    if preferred is None:
        preferred = Equation({}, {})
    left = _read_side(sides[0], preferred.left)
    right = _read_side(sides[1], preferred.right)
    if not left or not right:
        return None
    return Equation(left, right)


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
        factor = part.removesuffix(atoms)  # 5 of 5H2O
        counts = _count_atoms(atoms)
        if counts is None or len(factor) > 6:
            return None
        _add_atoms(total, counts, int(factor or 1))
    return frozenset(total.items())


def normalise(text: str) -> str:
    r"""Write an equation in one way: `=` between the sides, charges in angle brackets, no LaTeX, states and full stop.

    >>> normalise(r"\ce{Fe^{3+} + 3 OH^- -> Fe(OH)_3(s)}")
    'Fe<3+> + 3 OH<-> = Fe(OH)3'
    """
    text = text.translate(_ASCII)
    text = _SUPERSCRIPT.sub(lambda charge: f"^{{{charge[0].translate(_NORMAL)}}}", text)
    text = " ".join(text.split())
    text = _FRACTION.sub(r"\1/\2 ", text)
    text = _DOT.sub("*", text)
    text = _ARROW.sub(" = ", text)
    text = _STYLES.sub("", text)
    text = _CHARGE.sub(lambda charge: f"<{(charge[1] or charge[2]).replace(' ', '')}>", text)
    text = re.sub("[{}_]", "", text).rstrip().removesuffix(".")
    text = _STATE_OF_MATTER.sub("", text)
    text = _SIGN_FIRST.sub(r"<\1>", text)
    return " ".join(text.split())


def _read_side(text: str, preferred: Side) -> Side | None:
    """Read the terms of one side of an equation, preferring species in `preferred`."""
    side: dict[Species, Fraction] = {}
    for term in _PLUS.split(text):
        formula = "".join(term.split())
        coefficient = Fraction(1)
        number = _COEFFICIENT.match(formula)
        if number:
            formula = formula[number.end() :]
            try:
                coefficient = Fraction(number[1] or number[2])
            except ZeroDivisionError:
                return None
        # the likeliest first; several where a plain sign follows a digit
        readings = [species for species in map(read_formula, _charge_spellings(formula)) if species is not None]
        if not readings:
            return None
        species = next((species for species in readings if species in preferred), readings[0])
        side[species] = side.get(species, Fraction(0)) + coefficient
    return side


def _charge_spellings(formula: str) -> list[str]:
    """Return a formula with its charge in angle brackets, in each way that a plain sign can be meant."""
    if formula.endswith("^"):  # a bare plus
        sign = "+"
    elif formula.endswith("-"):
        sign = "-"
    else:
        return [formula]
    formula = formula[:-1]
    single = f"{formula}<{sign}>"
    bare = formula.rstrip("0123456789")
    digits = formula.removeprefix(bare)
    if not digits:
        return [single]
    multiple = f"{formula[:-1]}<{digits[-1]}{sign}>"  # the last digit belongs to the sign: Fe3+, SO42-
    if len(digits) > 1 or _ION.fullmatch(bare):
        return [multiple, single]
    return [single, multiple]


def _count_atoms(text: str) -> Counter[str] | None:
    """Count the elements of a formula without dots, and its charge; None if it is not a formula."""
    groups: list[Counter[str]] = [Counter()]  # of the open brackets, the innermost last
    pending: Counter[str] = Counter()  # what a subscript would multiply
    for token in _tokens(text) or ():
        if token["subscript"]:
            if not pending:
                return None
            _add_atoms(groups[-1], pending, int(token["subscript"]))
            pending = Counter()
            continue
        _add_atoms(groups[-1], pending, 1)
        pending = Counter()
        if token["element"]:
            pending[token["element"]] = 1
        elif token["opening"]:
            if len(groups) == MAX_DEPTH:
                return None
            groups.append(Counter())
        elif token["closing"]:
            if len(groups) == 1:
                return None
            pending = groups.pop()
        else:
            groups[-1][CHARGE] += int(token["sign"] + (token["before"] or token["after"] or "1"))
    _add_atoms(groups[-1], pending, 1)
    return groups[0] if groups[0] and len(groups) == 1 else None


def _tokens(text: str) -> list[re.Match[str]] | None:
    """Split a formula into elements, brackets, charges and subscripts; None if it has anything else."""
    tokens = []
    position = 0
    while position < len(text):
        token = _FORMULA_TOKEN.match(text, position)
        if token is None:
            return None
        tokens.append(token)
        position = token.end()
    return tokens


def _add_atoms(total: Counter[str], counts: Counter[str], factor: int) -> None:
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
    answer = extract_answer(text)
    gold = gold.strip()
    if not answer or not gold or max(len(answer), len(gold)) > MAX_LENGTH:
        return 0.0
    answer = plain(answer)
    verdict = VERDICTS.get(gold.casefold())
    if verdict:
        return float(read_verdict(answer) == verdict)
    if len(gold) == 1 and gold.isalpha():
        return float(read_letter(answer) == gold.upper())
    gold = plain(gold)
    if is_formula(gold):
        return float(same_text(answer, gold))
    return float(answer.casefold() == gold.casefold())
