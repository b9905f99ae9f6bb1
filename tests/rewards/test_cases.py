"""Grading against labels: completions labelled by hand before any grader saw them, and pairs of gold and answer.

`cases.jsonl` holds 200 completions. `equality.jsonl` holds pairs by family of notation. `math_verify.jsonl` holds the
pairs of math-verify's own tests that state one answer a side (docs/rewards.md has the rule), with the verdicts these
tests expect.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from math_verify import parse, verify

from pods_rl.rewards import accuracy_batch, extract_gold, get_reward

from .data import rows

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "rewards.md"


def table(name):
    return [json.loads(line) for line in (HERE / name).read_text(encoding="utf-8").splitlines()]


CASES = table("cases.jsonl")
DOCUMENTED = {("<think>Let us see.</think>\n<answer>eighteen</answer>", "18")}  # docs/rewards.md
DIFFERENT = {  # docs/rewards.md: from math-verify, on purpose
    (r"$\frac{1}{12}$", "$0.0833333333333333$"),
    ("4.123105625617661", r"$\sqrt{17}$"),
    (r"$x \in [-2,7]$", r"$-2 \\le x \\le 7$"),
    (r"$1 - \frac{1}{\mathrm{e}}$", r"$1 + \frac{1}{\mathrm{e}}$"),
    (r"$1 = \zzz = x = 0$", "$0$"),
    ("$9$", "Answer $ \n 9 \n $"),
    ("$9$", "Answer \\( \n 9 \n \\)"),
    (r"$\\boxed{35 cm} ++++++ \\boxed{4}$", "${35 cm,4}$"),
}


@pytest.fixture(scope="module")
def disagreements():
    found = []
    for name in sorted({case["reward"] for case in CASES}):
        cases = [case for case in CASES if case["reward"] == name]
        scores = get_reward(name).batch([case["completion"] for case in cases], [case["gold"] for case in cases])
        found += [case for case, score in zip(cases, scores, strict=True) if (score >= 1) != bool(case["label"])]
    return found


def graded(pairs):
    return accuracy_batch([f"<answer>{answer}</answer>" for _, answer in pairs], [gold for gold, _ in pairs])


def misjudged(cases):
    pairs = [(case["gold"], case["answer"]) for case in cases]
    assert len(set(pairs)) == len(pairs)
    return {pair for pair, case, score in zip(pairs, cases, graded(pairs), strict=True) if score != case["right"]}


def test_the_cases_are_two_hundred_different_ones_of_either_label():
    assert len({(case["completion"], case["gold"]) for case in CASES}) == len(CASES) == 200
    labels = Counter(case["label"] for case in CASES)
    assert labels[0] >= 60
    assert labels[1] >= 100
    assert Counter(case["reward"] for case in CASES) == {"accuracy": 160, "choice": 22, "equation": 18}


def test_grading_agrees_with_at_least_199_of_200_labels(disagreements):
    print(f"{len(CASES) - len(disagreements)} of {len(CASES)} labels agree")
    assert len(disagreements) <= 0.005 * len(CASES), disagreements


def test_each_disagreement_is_documented(disagreements):
    assert {(case["completion"], case["gold"]) for case in disagreements} == DOCUMENTED
    text = DOCS.read_text(encoding="utf-8")
    for completion, _ in DOCUMENTED:
        assert completion.partition("<answer>")[2].removesuffix("</answer>") in text


def test_every_pair_of_gold_and_answer():
    cases = table("equality.jsonl")
    assert Counter(case["right"] for case in cases).most_common()[1][1] >= 100  # of either label
    assert misjudged(cases) == set()


def test_the_pairs_of_math_verify_s_own_tests():
    cases = table("math_verify.jsonl")
    assert len(cases) == 227
    assert misjudged(cases) == DIFFERENT
    text = DOCS.read_text(encoding="utf-8")
    for pair in DIFFERENT:
        for side in pair:
            assert f"`{' '.join(side.split())}`".replace(r"\\", "\\") in text.replace(r"\\", "\\"), side
    assert f"agrees with {len(cases) - len(DIFFERENT)} of" in text


@pytest.mark.reliability
@pytest.mark.timeout(300)
def test_the_score_of_math_verify_on_these_pairs_is_what_the_documentation_says(capsys):
    cases = table("math_verify.jsonl")
    verdicts = {
        (case["gold"], case["answer"]): verify(
            parse(case["gold"], parsing_timeout=None), parse(case["answer"], parsing_timeout=None), timeout_seconds=None
        )
        == case["right"]
        for case in cases
    }
    ours = set(verdicts) - misjudged(cases)
    theirs = {pair for pair, agrees in verdicts.items() if agrees}
    with capsys.disabled():
        print(f"{len(cases)} pairs of math-verify's tests: accuracy {len(ours)}, math-verify {len(theirs)}")
    assert theirs - ours <= DIFFERENT
    assert f"math-verify's own `verify(parse(gold), parse(answer))` with {len(theirs)}" in DOCS.read_text(
        encoding="utf-8"
    )


def test_gold_answers_of_math_500_meet_themselves_and_no_part_of_themselves():
    golds = list(dict.fromkeys(row["answer"] for row in rows("math500/test.jsonl")))
    for form in ("{}", " {} .", "${}$", r"\boxed{{{}}}", r"\[ {} \]"):
        assert set(graded([(gold, form.format(gold)) for gold in golds])) == {1.0}, form
    equations = [gold for gold in golds if "=" in gold and not re.match(r"[a-z]\s*=", gold)]
    lists = [gold for gold in golds if re.fullmatch(r"[^(\\]*,[^)]*", gold) and ", " in gold]
    parts = [(gold, gold.rpartition("=")[2]) for gold in equations]
    parts += [(gold, gold.rpartition(",")[2]) for gold in lists]
    parts += [(gold.strip("()[] ").rpartition(",")[2], gold) for gold in golds if gold.startswith(("(", "["))]
    assert len(parts) >= 10
    assert set(graded(parts)) == {0.0}


def test_solutions_and_sentences_of_math_500_are_right():
    math = rows("math500/test.jsonl")
    golds = [row["answer"] for row in math]
    assert set(accuracy_batch([row["solution"] for row in math], golds)) == {1.0}
    assert set(graded([(gold, f"Therefore the answer is ${gold}$.") for gold in golds])) == {1.0}


def test_gsm8k_labels_are_right_in_every_form():
    labels = [extract_gold(row["answer"], "####") for row in rows("gsm8k/test.jsonl")]
    assert len(labels) == 1319
    for form in ("#### {}", r"So it is $\boxed{{{}}}$.", "<answer>{}</answer>", "<answer>It is \\${} a day.</answer>"):
        assert sum(accuracy_batch([form.format(label) for label in labels], labels)) == 1319, form


def test_gold_answers_of_math_500_meet_no_other():
    golds = list(dict.fromkeys(row["answer"] for row in rows("math500/test.jsonl")))
    symbolic = [gold for gold in golds if re.search(r"[\\a-z(,]", gold)]
    pairs = [pair for pair in random.Random(0).sample(list(product(symbolic, symbolic)), 300) if pair[0] != pair[1]]
    met = {pair for pair, score in zip(pairs, graded(pairs), strict=True) if score}
    assert met == set()


REWRITES = [
    (r"\\frac\{([0-9]+)\}\{([0-9]+)\}", r"\\dfrac{\1}{\2}"),
    (r"\\frac\{([0-9]+)\}\{([0-9]+)\}", r"(\1 / \2)"),
    (r"\\sqrt\{([0-9]+)\}", r"(\1^{0.5})"),
    (r"\\pi", "π"),
    (r"\\left|\\right|\\!", ""),
    (r"([0-9])\\sqrt", r"\1 \\cdot \\sqrt"),
]


@pytest.mark.parametrize(("pattern", "rewritten"), REWRITES)
def test_gold_answers_of_math_500_meet_their_rewrites(pattern, rewritten):
    golds = list(dict.fromkeys(row["answer"] for row in rows("math500/test.jsonl")))
    pairs = [(gold, re.sub(pattern, rewritten, gold)) for gold in golds if re.search(pattern, gold)]
    assert len(pairs) >= 5
    missed = [pair for pair, score in zip(pairs, graded(pairs), strict=True) if not score]
    assert missed == []
