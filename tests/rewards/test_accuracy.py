"""Accuracy: worked values, one row each, and what hostile completions cost."""

from __future__ import annotations

import pytest

from pods_rl.rewards import accuracy, accuracy_batch, answers
from pods_rl.rewards.numeric import MAX_LENGTH, read_number

# (completion's answer, gold, right): decided without mathematics.
NUMERIC = [
    ("18", "18", True),
    ("17", "18", False),
    (" 18\n", "18", True),
    ("18.", "18", True),
    ("18.0", "18", True),
    ("18.00", "18", True),
    ("018", "18", True),
    ("+18", "18", True),
    ("-18", "18", False),
    ("-18", "-18", True),
    ("−18", "-18", True),
    ("18", "-18", False),
    ("1,200", "1200", True),
    ("1200", "1,200", True),
    ("109,200,000", "109200000", True),
    ("1{,}200", "1,200", True),
    ("1,20", "120", False),
    ("12,34", "1234", False),
    ("1,2345", "12345", False),
    ("1 200", "1200", True),
    ("$18", "18", True),
    (r"\$18", "18", True),
    ("$18$", "18", True),
    ("-$18", "-18", True),
    ("€18.50", "18.5", True),
    ("18 dollars", "18", True),
    ("18 dollars per day", "18", True),
    ("5kg", "5", True),
    (r"18\text{ eggs}", "18", True),
    ("The answer is 18.", "18", True),
    ("She makes $18 a day", "18", True),
    ("about -5 degrees", "-5", True),
    ("**18**", "18", True),
    ("- 18 eggs", "18", True),
    ("minus 18", "18", False),
    ("1.5 million", "1.5", False),
    ("half of 18", "18", False),
    ("5x", "5", False),
    ("17 or 18", "18", False),
    ("16, 17, 18", "18", False),
    ("17 18", "18", False),
    ("eighteen", "18", False),
    ("H2O", "2", False),
    ("9 * 2 = 18", "18", True),
    ("16 - 3 - 4 = 9 eggs, 9 * 2 = $18 a day", "18", True),
    ("18 = 17", "18", False),
    ("x = 5", "5", True),
    ("50%", "50", True),
    ("50%", "0.5", True),
    (r"50\%", "1/2", True),
    ("50 percent", "50", True),
    ("0.5", "50%", True),
    ("0.5%", "50", False),
    ("50%", "0.5%", False),
    ("1/2", "0.5", True),
    ("2/4", "1/2", True),
    ("-1/2", "-0.5", True),
    (r"\frac{1}{2}", "0.5", True),
    (r"-\dfrac{1}{2}", "-0.5", True),
    (r"\frac12", "1/2", True),
    ("2 1/2", "2.5", True),
    (r"2\frac{1}{2}", "5/2", True),
    ("-2 1/2", "-2.5", True),
    ("0.333", "1/3", False),
    ("0.3333333333333333", "1/3", False),
    ("0.1", "0.1000000000000000055511151231257827", False),
    ("9007199254740993", "9007199254740992", False),
    (".5", "0.5", True),
    ("1e3", "1000", True),
    ("1.5E-1", "0.15", True),
    (r"90^\circ", "90", True),
    ("90°", r"90^{\circ}", True),
    ("90 degrees", r"90^\circ", True),
    ("6", r"6 \text{ cm}", True),
    ("6 cm^2", "6", True),
    ("6 in²", "6", True),
    (r"6\text{ cm}^2", "6", True),
    (r"6\,\mathrm{cm}^{2}.", "6", True),
    (r"6\,\mathrm{m}", "6", True),
    (r"6\,\mathrm{m}^3", "6", True),
    ("6", r"6\text{ units}^2", True),
    (r"6\mathrm{i}", "6", False),
    ("6m", "6", False),
    ("6i", "6", False),
    ("6a", "6", False),
    ("6 eggs I sold", "6", True),
    ("6 cm", r"6\text{ cm}", True),
    ("7", r"6 \text{ cm}", False),
    ("1e999999999", "1", False),
    ("1e-999999999", "0", False),
    ("9" * 900, "9", False),
    ("٥", "5", True),
    ("nan", "5", False),
    ("inf", "5", False),
]
WORDS = [
    ("Evelyn", r"\text{Evelyn}", True),
    ("evelyn", "Evelyn", True),
    ("New  York", "New York", True),
    ("Newyork", "New York", False),
    ("Paris", "Evelyn", False),
    ("(B)", "B", True),
    ("C", "B", False),
    ("listen", "silent", False),
    ("forty-one", "forty-two", False),
    ("p - q", "p-q", True),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
]
SYMBOLIC = [
    ("9*2", "18", True),
    (r"9 \times 2", "18", True),
    (r"\sqrt{9}", "3", True),
    ("10^2", "100", True),
    ("3-5", "-2", True),
    ("1/3+0", "1/3", True),
    ("5!", "120", True),
    ("17+1 or 17*2", "18", False),
    (r"\{17,18\}", "18", False),
    ("[17,18]", "18", False),
    ("(17,18)", "18", False),
    ("17|18", "18", False),
    (r"51^{1/2}", r"\sqrt{51}", True),
    ("9i+6", "6+9i", True),
    (r"\frac{x}{2}", "0.5x", True),
    ("x/3", "0.5x", False),
    ("6m^2", "6", False),
    ("-q+p", "p-q", True),
    ("q-p", "p-q", False),
    ("-1+e", "e-1", True),
    (r"(3,\pi/2)", r"\left( 3, \frac{\pi}{2} \right)", True),
    ("-2, 1", "1,-2", True),
    ("7,5,3", "3, 5, 7", True),
    ("5", "x=5", True),
    ("x=4 or x=5", "x=5", False),
    (r"2\sqrt{2}", r"\sqrt{8}", True),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1\\2 \end{pmatrix}", True),
    (r"\frac{", r"\frac{\pi}{2}", False),
]


@pytest.fixture
def no_pool(monkeypatch):
    """Fail as soon as an answer asks for a process."""

    def refuse():
        raise AssertionError("this answer started a verifier process")

    monkeypatch.setattr(answers, "default_pool", refuse)


@pytest.mark.parametrize(("answer", "gold", "right"), NUMERIC + WORDS)
def test_numbers_and_words_need_no_process(no_pool, answer, gold, right):
    assert accuracy(f"<think>so</think><answer>{answer}</answer>", gold) == float(right)


def test_symbolic_answers():
    texts = [f"<answer>{answer}</answer>" for answer, _, _ in SYMBOLIC]
    golds = [gold for _, gold, _ in SYMBOLIC]
    assert accuracy_batch(texts, golds) == [float(right) for _, _, right in SYMBOLIC]
    assert accuracy(texts[0], golds[0]) == 1.0


@pytest.mark.parametrize("unit", ["9", "9^", "(", "{", "\\frac{", "$", "1,", "1/", "- ", "e", "a ", "\\text{"])
def test_a_megabyte_never_reaches_the_verifier(no_pool, unit):
    answer = unit * (1_000_000 // len(unit))
    assert accuracy(f"<answer>{answer}</answer>", "18") == 0.0
    assert accuracy(answer, "18") == 0.0


@pytest.mark.parametrize("unit", ["9", "9,", "9.", "9 ", "9/", "9e", "a", "a9", "-", "$", "=", "\\frac"])
def test_the_longest_answer_that_is_read(no_pool, unit):
    # At the length limit the patterns themselves must not blow up; mathematics is not asked for here.
    assert accuracy(f"<answer>{unit * (MAX_LENGTH // len(unit))}</answer>", "Evelyn") == 0.0


def test_long_answers_are_right_only_to_the_letter(no_pool):
    gold = "x+" * MAX_LENGTH
    assert accuracy(f"<answer>{gold}</answer>", gold) == 1.0
    assert accuracy(f"<answer>{gold} </answer>", gold) == 1.0
    assert accuracy(f"<answer>{gold}y</answer>", gold) == 0.0


def test_numbers_too_long_to_read_are_none():
    assert read_number("9" * (MAX_LENGTH + 1)) is None
    assert read_number(f"1/{'9' * 5000}") is None
    assert read_number(f"1e{'9' * 900}") is None
    assert read_number("1/0") is None


def test_no_answer_or_no_gold_is_wrong(no_pool):
    assert accuracy("", "18") == 0.0
    assert accuracy("18", "18") == 0.0  # an answer must be marked as one
    assert accuracy("<answer></answer>", "") == 0.0
    assert accuracy("<answer>18</answer>", " ") == 0.0


def test_a_batch_asks_for_each_pair_once(monkeypatch):
    asked = []

    class Recorder:
        def verify(self, pairs):
            asked.extend(pairs)
            return [True] * len(pairs)

    monkeypatch.setattr(answers, "default_pool", Recorder)
    texts = ["<answer>9*2</answer>", "<answer>18</answer>", "<answer>9*2</answer>"]
    assert accuracy_batch(texts, ["18"] * 3) == [1.0, 1.0, 1.0]
    assert asked == [("18", "9*2")]


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="got 2 texts and 1 gold"):
        accuracy_batch(["a", "b"], ["a"])
