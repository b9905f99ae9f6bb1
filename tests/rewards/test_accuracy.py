"""Accuracy against labels: completions and pairs of gold answer and answer, labelled by hand.

`cases.jsonl` holds 200 completions. `equality.jsonl` holds right and wrong answers for gold answers, by family of
notation; its families `choice` and `equation` are for these rewards. `math_verify.jsonl` holds the pairs of
math-verify's own tests that state one answer a side (docs/rewards.md has the rule), with the verdicts these tests
expect.
"""

import json
import random
import re
from itertools import product
from pathlib import Path

import pytest

from pods_rl.rewards import accuracy, accuracy_batch, answers, extract_gold, get_reward, verifier
from pods_rl.rewards.mathematics import MAX_LENGTH, read_number

from .data import rows

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "rewards.md"
DIFFERENT = {  # from math-verify, on purpose
    (r"$\frac{1}{12}$", "$0.0833333333333333$"),  # 0: rounded
    ("4.123105625617661", r"$\sqrt{17}$"),  # 0: rounded
    (r"$x \in [-2,7]$", r"$-2 \\le x \\le 7$"),  # 1: the same set
    (r"$1 - \frac{1}{\mathrm{e}}$", r"$1 + \frac{1}{\mathrm{e}}$"),  # 0: not equal
    (r"$1 = \zzz = x = 0$", "$0$"),  # 0: the chain is false
    ("$9$", "Answer $ \n 9 \n $"),  # 1: line breaks do not count
    ("$9$", "Answer \\( \n 9 \n \\)"),  # 1: likewise
    (r"$\\boxed{35 cm} ++++++ \\boxed{4}$", "${35 cm,4}$"),  # 0: the last box counts
}


def table(name):
    return [json.loads(line) for line in (HERE / name).read_text(encoding="utf-8").splitlines()]


def graded(pairs):
    return accuracy_batch([f"<answer>{answer}</answer>" for _, answer in pairs], [gold for gold, _ in pairs])


def labelled(*families):
    """The pairs of `equality.jsonl` with their labels; those of mathematics if no family is named."""
    labels = {}
    for row in table("equality.jsonl"):
        is_mathematics = row["family"] not in ("choice", "equation")
        if row["family"] in families or (not families and is_mathematics):
            labels |= {(row["gold"], answer): 1.0 for answer in row["right"]}
            labels |= {(row["gold"], answer): 0.0 for answer in row["wrong"]}
    return labels


@pytest.fixture
def no_pool(monkeypatch):
    """Fail as soon as an answer asks for a process."""

    def refuse():
        raise AssertionError("this answer started a verifier process")

    monkeypatch.setattr(answers, "default_pool", refuse)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Verdicts are tested here, and not the limits, which a slow or busy processor reaches in batches of thousands."""
    monkeypatch.setattr(verifier, "FIRST_LIMIT", verifier.DEFAULT_LIMIT)


@pytest.mark.parametrize(
    "remainders",
    [pytest.param([0], marks=pytest.mark.slow), pytest.param([1, 2, 3], marks=pytest.mark.reliability)],
    ids=["a quarter of each family", "the others"],
)
def test_every_pair_has_its_label(remainders):
    """A minute on two cores, so three quarters of the pairs are graded at night."""
    pairs = {pair: label for row, (pair, label) in enumerate(labelled().items()) if row % 4 in remainders}
    wrong = {pair: score for pair, score in zip(pairs, graded(list(pairs)), strict=True) if score != pairs[pair]}
    assert wrong == {}
    assert min(list(pairs.values()).count(label) for label in (0.0, 1.0)) > 800


@pytest.mark.parametrize("name", ["choice", "equation"])
def test_every_pair_of_chemistry_has_its_label(name):
    pairs = labelled(name)
    scores = get_reward(name).batch([f"<answer>{answer}</answer>" for _, answer in pairs], [gold for gold, _ in pairs])
    assert {pair for pair, score in zip(pairs, scores, strict=True) if score != pairs[pair]} == set()


def test_numbers_and_words_need_no_process(no_pool):
    pairs = labelled("numbers alone", "strings")
    assert graded(list(pairs)) == list(pairs.values())


def test_every_completion_has_its_label():
    cases = table("cases.jsonl")
    assert len({(case["completion"], case["gold"]) for case in cases}) == len(cases) == 200
    for name in sorted({case["reward"] for case in cases}):
        chosen = [case for case in cases if case["reward"] == name]
        scores = get_reward(name).batch([case["completion"] for case in chosen], [case["gold"] for case in chosen])
        assert [case for case, score in zip(chosen, scores, strict=True) if (score >= 1) != bool(case["label"])] == []


def test_the_pairs_of_math_verify_s_own_tests():
    cases = {(case["gold"], case["answer"]): case["right"] for case in table("math_verify.jsonl")}
    assert len(cases) == 227
    assert {pair for pair, score in zip(cases, graded(list(cases)), strict=True) if score != cases[pair]} == DIFFERENT
    assert f"agrees with {len(cases) - len(DIFFERENT)} of" in DOCS.read_text(encoding="utf-8")


def test_gold_answers_of_math_500_equal_themselves_and_neither_a_part_of_themselves_nor_another():
    golds = list(dict.fromkeys(row["answer"] for row in rows("math500/test.jsonl")))
    for form in ("{}", " {} .", "${}$", r"\boxed{{{}}}", r"\[ {} \]"):
        scores = graded([(gold, form.format(gold)) for gold in golds])
        assert [gold for gold, score in zip(golds, scores, strict=True) if not score] == [], form
    equations = [gold for gold in golds if "=" in gold and not re.match(r"[a-z]\s*=", gold)]
    lists = [gold for gold in golds if re.fullmatch(r"[^(\\]*,[^)]*", gold) and ", " in gold]
    parts = [(gold, gold.rpartition("=")[2]) for gold in equations]
    parts += [(gold, gold.rpartition(",")[2]) for gold in lists]
    parts += [(gold.strip("()[] ").rpartition(",")[2], gold) for gold in golds if gold.startswith(("(", "["))]
    assert len(parts) >= 10
    assert set(graded(parts)) == {0.0}
    symbolic = [gold for gold in golds if re.search(r"[\\a-z(,]", gold)]
    pairs = [pair for pair in random.Random(0).sample(list(product(symbolic, symbolic)), 300) if pair[0] != pair[1]]
    assert {pair for pair, score in zip(pairs, graded(pairs), strict=True) if score} == set()


def test_solutions_and_sentences_of_math_500_are_right():
    math = rows("math500/test.jsonl")
    golds = [row["answer"] for row in math]
    assert set(accuracy_batch([row["solution"] for row in math], golds)) == {1.0}
    assert set(graded([(gold, f"Therefore the answer is ${gold}$.") for gold in golds])) == {1.0}


def test_gsm8k_labels_are_right_in_every_form():
    labels = [extract_gold(row["answer"]) for row in rows("gsm8k/test.jsonl")]
    assert len(labels) == 1319
    for form in ("#### {}", r"So it is $\boxed{{{}}}$.", "<answer>{}</answer>", "<answer>It is \\${} a day.</answer>"):
        assert sum(accuracy_batch([form.format(label) for label in labels], labels)) == 1319, form


MINUS_SIGNS = (
    "-{}", "- {}", r"-\,{}", r"-\;{}", r"-\!{}", r"-\ {}", r"-\quad {}", "-~{}", "−{}", "− {}", "– {}", "—{}",
    "-\u00a0{}", "-\u2009{}", "{{-}}{}", "-{{{}}}", r"\mathbf{{- {}}}", r"\text{{-}}{}", r"\displaystyle - {}",
    "-${}", "$-{}", "- $ {}", "-€{}", "- {} dollars", "negative {}", "minus {}", "x = - {}", "The answer is - {}.",
    r"\fbox{{- {}}}",
)  # fmt: skip


def test_the_sign_of_every_number_of_math_500_and_gsm8k_counts_and_so_does_every_spelling():
    golds = [row["answer"] for row in rows("math500/test.jsonl")]
    golds += [extract_gold(row["answer"]) for row in rows("gsm8k/test.jsonl")]
    golds = [gold.removeprefix("-") for gold in dict.fromkeys(golds)]
    numbers = []
    for gold in golds:
        number = read_number(gold)
        if number and number.value:
            numbers.append(gold)
    assert len(numbers) > 400
    signed = [f"-{number}" for number in numbers]
    assert set(graded(list(zip(signed, numbers, strict=True)))) == {0.0}
    for start, form in enumerate(MINUS_SIGNS):
        some = numbers[start % 16 :: 16]
        negatives = [form.format(number) for number in some]
        assert set(graded(list(zip(some, negatives, strict=True)))) == {0.0}, form
        signed = [f"-{number}" for number in some]
        assert set(graded(list(zip(signed, negatives, strict=True)))) == {1.0}, form


def test_long_answers_are_right_only_to_the_letter(no_pool):
    gold = "x+" * MAX_LENGTH
    assert accuracy(f"<answer>{gold}</answer>", gold) == 1.0
    assert accuracy(f"<answer>{gold}y</answer>", gold) == 0.0


def test_a_pair_is_asked_once_and_an_absurd_answer_only_of_an_absurd_gold_answer(monkeypatch):
    asked = []

    class Recorder:
        def verify(self, pairs):
            asked.extend(pairs)
            return [True] * len(pairs)

    monkeypatch.setattr(answers, "default_pool", Recorder)
    assert graded([("18", "9*2"), ("18", "18"), ("18", "9*2"), ("2^{100}", "2^{100000}")]) == [1.0, 1.0, 1.0, 0.0]
    assert graded([("2^{100000}", r"2^{50000} \cdot 2^{50000}")]) == [1.0]
    assert asked == [("18", "9*2"), ("2^{100000}", r"2^{50000} \cdot 2^{50000}")]
