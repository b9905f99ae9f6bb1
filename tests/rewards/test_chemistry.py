"""Chemistry: what a formula counts, which answers match a gold equation, and which choice an answer names."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pods_rl.rewards import chemistry, choice, equation
from pods_rl.rewards.chemistry import CHARGE, MAX_DEPTH, read_equation, read_formula

from .data import FOLDER, rows

WATER = "2H2 + O2 = 2H2O"
FORMULAS = {
    "H2O": {"H": 2, "O": 1},
    "HOH": {"H": 2, "O": 1},
    "[Co(C2H4(NH2)2)3]Cl3": {"Co": 1, "C": 6, "H": 24, "N": 6, "Cl": 3},
    "CuSO4.5H2O": {"Cu": 1, "S": 1, "O": 9, "H": 10},
    "SO4<2->": {"S": 1, "O": 4, CHARGE: -2},
    "I(<->)": {"I": 1, CHARGE: -1},
    "(NH4<+>)2SO4<2->": {"N": 2, "H": 8, "S": 1, "O": 4, CHARGE: 0},
    "Mg<+2>": {"Mg": 1, CHARGE: 2},
    "e<->": {CHARGE: -1},
    "KBr0": {"K": 1, "Br": 0},
}
NO_FORMULAS = ["", "h2o", "2", "()", "(H", "H)", "H2O)(", "(2)", "H-O", "H2O*", "*", "H1234567", "e", "H²"]


def test_formulas():
    assert {text: dict(read_formula(text)) for text in FORMULAS} == FORMULAS
    assert [text for text in NO_FORMULAS if read_formula(text) is not None] == []


def test_every_gold_equation_of_the_chemistry_set_meets_itself():
    published = rows("sciknoweval_chemistry/L3_balancing_chemical_equation.jsonl")
    equations = [(row["question"].split("\n")[1], row["answer"]) for row in published]
    read = [read_equation(gold) for _, gold in equations]
    assert len(read) == 300
    assert sum(found is not None for found in read) == 300
    assert sum(found.balanced for found in read) == 299  # one has a formula with no atoms of an element
    for unbalanced, gold in equations:
        assert chemistry(f"<answer>{gold}</answer>", gold) == 1.0
        assert equation(f"<answer>{gold.replace('=', '→').replace(' ', '  ')}</answer>", gold) == 1.0
        assert equation(f"<answer>{unbalanced}</answer>", gold) == 0.0


@given(st.text("H2O+-=>()[]{}^_*.0123 e", max_size=60))
@settings(max_examples=60)
def test_any_text_is_read_or_refused(text):
    assert equation(f"<answer>{text}</answer>", WATER) in (0.0, 1.0)


def test_a_plain_charge_that_nothing_settles_is_read_as_chemists_write_it():
    found = read_equation("Fe3+ + SO42- + NO3- + NH4+ + O2 = H2O")
    assert [dict(species).get(CHARGE) for species in found.left] == [3, -2, -1, 1, None]


def test_brackets_are_bounded():
    deepest = MAX_DEPTH - 1
    assert dict(read_formula("(" * deepest + "H" + ")2" * deepest)) == {"H": 2**deepest}
    assert read_formula("(" * (deepest + 1) + "H" + ")" * (deepest + 1)) is None
    assert read_formula("(" * 100_000) is None


@pytest.mark.slow
def test_every_option_of_the_chemistry_set_is_read_with_its_text():
    """Of every fifth row."""
    names = sorted(path.name for path in (FOLDER / "sciknoweval_chemistry").glob("*.jsonl"))
    if not names:
        pytest.skip("sciknoweval_chemistry is not in ../shared/data")
    published = [row for name in names for row in rows(f"sciknoweval_chemistry/{name}") if row["choices"]["label"]]
    asked = read = 0
    for row in published[::5]:
        for letter, text in zip(row["choices"]["label"], row["choices"]["text"], strict=True):
            other = "ABCDA"["ABCD".index(letter) + 1]
            for form in (
                f"{letter}. {text}",
                f"({letter}) {text}",
                f"{letter}: {text}",
                f"The answer is {letter}: {text}",
            ):
                asked += 1
                read += choice(f"<answer>{form}</answer>", letter) == 1.0
                assert choice(f"<answer>{form}</answer>", other) == 0.0
    assert asked > 4 * 4 * 500
    assert asked - read <= 9  # options that are themselves a lone capital letter


def test_molecules_in_letters_are_compared_as_text():
    for gold, wrong in (("C=CN", "C=NC"), ("CN", "NC"), ("c1ccccc1", "C1CCCCC1"), ("CC(=O)O", "OC(=O)C"), ("Co", "CO")):
        assert chemistry(f"<answer>{gold}</answer>", gold) == 1.0
        assert chemistry(f"<answer>{wrong}</answer>", gold) == 0.0
