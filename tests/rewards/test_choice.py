"""Which choice does an answer name? Worked values, and every option of the chemistry set."""

from __future__ import annotations

from pods_rl.rewards import choice
from pods_rl.rewards.chemistry import read_letter, read_verdict

from .data import chemistry_rows


def test_the_answer_is_the_extracted_one():
    assert choice(r"A or B? \boxed{B}", "B") == 1.0
    assert choice("#### (B)", "B") == 1.0


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
