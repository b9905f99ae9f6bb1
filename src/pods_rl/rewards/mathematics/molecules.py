"""Tell text from products of variables: chemical formulas, SMILES and short words, whose letters are not factors.

`ab` and `ba` are one product; `CN` and `NC` are two molecules, `act` and `cat` two words.
"""

from __future__ import annotations

import re
from collections import Counter

_ELEMENTS = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb "
    "Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au "
    "Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr"
)
_SYMBOLS = sorted(_ELEMENTS.split(), key=len, reverse=True)  # Cl before C
_WORDS_WITHOUT_O = (
    "am an as at by he if in is it me up us we any all day dne may six ten yes "
    "act age aid air amy arm art ask ate ave bad bag ban bar bat bed bet big bit bus but can cap car cat cup cut dad "
    "did die dry due ear eat egg end eva eye fat few fit gas get gum gun had has hat hen her him his hit ice ill jar "
    "lab lap law lay led leg let lid lie lip mad man map mat meg men met mix mud mug nap net new nut pal pan pat pay "
    "pea pen per pet pie pig pin pit rat raw red rid rip rub run sad sam sat saw sea see set she sir sit sky sum sun "
    "tan tap tar tea the tie tim tin tip try tub use van war was wax way web wet who why win yen"
)
_SHORT_WORDS = frozenset(_WORDS_WITHOUT_O.split())

_FORMULA = re.compile(
    rf"[0-9]*(?:(?:(?:{'|'.join(_SYMBOLS)})[0-9]{{0,3}}){{2,}}"  # CN, HCl, H2O
    r"|(?P<element>[A-Z][a-z]))"  # Co, which is not CO
)
_COUNT = re.compile(r"(?<=[A-Za-z)])_(?:\{\s*([0-9]{1,3})\s*\}|([0-9]))")  # H_{12}, H_2
_CODON = re.compile(r"[ACGTU]{3}")  # AUG
_ROMAN = re.compile(r"(?=.*[IVX])[IVXLCDM]{2,15}")  # IX

# SMILES with brackets, bonds or rings. Spaces and LaTeX never occur in it.
_ATOM = r"(?:Cl|Br|[BCNOPSFI]|[bcnops]|\[[0-9]{0,3}[A-Za-z][A-Za-z0-9@+-]{0,10}\])"  # C, [Na+]
_SMILES = re.compile(rf"{_ATOM}(?:{_ATOM}|[()]|[=#$:~/\\.-]|%[0-9]{{2}}|[0-9])*(?<![=#$:~/\\.(-])")
_RING = re.compile(r"%[0-9]{2}|[0-9]")  # the digits of a ring's two ends, so each occurs an even number of times
_BRACKETED_ATOM = re.compile(r"\[[^\[\]]*\]")  # [Na+]
_CARBON = re.compile(r"c|C(?!l)")
_MAX_LENGTH = 400  # of a SMILES that is read: bounds the time of its pattern


def is_formula(text: str) -> bool:
    """Whether a text is a chemical formula in letters or a SMILES string, so that order and case count.

    A sum or quotient of variables is not: SMILES needs rings, an atom in brackets, or carbon twice.

    >>> [is_formula(text) for text in ("CN", "HCl", "Co", "c1ccccc1", "CC(=O)O", "N#CC", "[Na+].[Cl-]")]
    [True, True, True, True, True, True, True]
    >>> [is_formula(text) for text in ("ab", "kT", "nRT", "AB", "No", "C", "n(n-1)", "P(B)", "C(n+1)", "P=IV", "x=5")]
    [False, False, False, False, False, False, False, False, False, False, False]
    """
    if text.casefold() in _SHORT_WORDS or text.casefold() in ("no", "on", "so"):
        return False
    if "_" in text:
        text = "".join(text.split())
    counts = [braced or bare for braced, bare in _COUNT.findall(text)]
    if "1" in counts or (len(counts) > 1 and len(set(counts)) == 1):
        return False  # P_1V_1 and P_2V_2 are products
    if counts in (["16"], ["12"]):
        return False  # FB_{16} is a numeral
    written = _COUNT.sub(r"\1\2", text)
    letters = _FORMULA.fullmatch(written)
    if letters:
        return letters["element"] is None or letters["element"] in _SYMBOLS
    return _is_smiles(written)


def without_subscripts(text: str) -> str:
    """Write the counts of a formula without LaTeX and spaces: `C_6 H_{12}` is `C6H12`."""
    return _COUNT.sub(r"\1\2", "".join(text.split()))


def _is_smiles(text: str) -> bool:
    if len(text) > _MAX_LENGTH or text.isalpha() or not _SMILES.fullmatch(text):
        return False
    without_charges = _BRACKETED_ATOM.sub("A", text)
    if without_charges != text and not without_charges.replace("A", ""):
        return False  # [C] alone is a bracket around a variable
    rings = Counter(_RING.findall(without_charges))
    closed = all(count % 2 == 0 for count in rings.values())
    aromatic = re.search("[bcnops]", without_charges.replace("Cl", "").replace("Br", ""))
    if aromatic and not rings:
        return False  # n(p) is a product
    carbons = len(_CARBON.findall(text))
    return closed and (bool(rings) or carbons > 1 or without_charges != text)


def is_word(text: str) -> bool:
    """Whether letters are a word, a formula, a codon or a Roman numeral rather than a product of variables."""
    folded = text.casefold()
    # variables are not called o, so that letters with an o are a word
    if text.isalpha() and ("o" in folded or folded in _SHORT_WORDS):
        return True
    return is_formula(text) or bool(_CODON.fullmatch(text) or _ROMAN.fullmatch(text))
