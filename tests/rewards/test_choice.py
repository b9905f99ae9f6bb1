"""Which choice does an answer name? Worked values, and every option of the chemistry set."""

from __future__ import annotations

from pods_rl.rewards import choice
from pods_rl.rewards.choice import read_letter, read_verdict

from .data import chemistry_rows

# (answer, gold, right)
LETTERS = [
    ("B", "B", True),
    ("b", "B", True),
    ("(B)", "B", True),
    ("B.", "B", True),
    ("**B**", "B", True),
    ("$B$", "B", True),
    (r"\text{B}", "B", True),
    (r"\mathrm{(B)}", "B", True),
    ("B: Oxygen", "B", True),
    ("B) Oxygen", "B", True),
    ("(B) Oxygen", "B", True),
    ("B - Oxygen", "B", True),
    ("B, because it burns", "B", True),
    ("B. Vitamin C", "B", True),
    ("Option B", "B", True),
    ("Choice B: Oxygen", "B", True),
    ("Answer: B", "B", True),
    ("The answer is B.", "B", True),
    ("The correct answer is option B because A reacts.", "B", True),
    ("The answer is B, so I choose option B", "B", True),
    ("C", "B", False),
    ("AB", "B", False),
    ("A or B", "B", False),
    ("A, B", "A", False),
    ("A/B", "A", False),
    ("(A) (B)", "A", False),
    ("A: no, B: yes", "A", False),
    ("option A or option B", "A", False),
    ("The answer is not B", "B", False),
    ("Option B is wrong", "B", False),
    ("A solvent", "A", False),
    ("A-type granite", "A", False),
    ("answer is a good one", "A", False),
    ("Oxygen", "B", False),
    ("Yes", "B", False),
    ("", "B", False),
    ("B", "", False),
    ("В", "B", False),  # the Cyrillic letter
]
VERDICTS = [
    ("Yes", "Yes", True),
    ("True", "Yes", True),
    ("False", "No", True),
    ("**No**", "No", True),
    ("No, it is flammable", "No", True),
    ("Yes, because there is no oxygen", "Yes", True),
    ("The answer is No.", "No", True),
    ("The statement is false.", "No", True),
    ("True, yes", "Yes", True),
    ("No", "Yes", False),
    ("yes or no", "Yes", False),
    ("Yes and no", "Yes", False),
    ("yes/no", "Yes", False),
    ("not true", "Yes", False),
    ("It is not false", "No", False),
    ("Nobody", "No", False),
    ("yesterday", "Yes", False),
    ("B", "Yes", False),
    ("There is no danger", "No", False),
]


def test_worked_values():
    for answer, gold, right in LETTERS + VERDICTS:
        assert choice(f"<think>A? B? Yes? No?</think><answer>{answer}</answer>", gold) == float(right), answer


def test_the_answer_is_the_extracted_one():
    assert choice(r"A or B? \boxed{B}", "B") == 1.0
    assert choice("#### (B)", "B") == 1.0
    assert choice("B", "B") == 0.0  # an answer must be marked as one


def test_a_gold_answer_that_is_neither_is_met_by_its_words():
    assert choice("<answer>sodium  chloride.</answer>", "Sodium chloride") == 1.0
    assert choice("<answer>sodium</answer>", "Sodium chloride") == 0.0


def test_readings():
    assert (read_letter("z"), read_letter("Z. text"), read_letter("")) == ("Z", None, None)
    assert (read_verdict("TRUE"), read_verdict("nil")) == ("yes", None)


def test_every_option_of_the_chemistry_set_is_read_with_its_text():
    asked = read = 0
    for row in chemistry_rows():
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
    assert asked == 4 * 4 * 2954
    assert asked - read <= 6  # options that are themselves a lone capital letter
