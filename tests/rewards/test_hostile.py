"""Answers made to break a grader cost nothing but zeros, and a megabyte costs no more than a glance."""

import random

import pytest

from pods_rl.rewards import REWARDS, VerifierPool, accuracy_batch, answers, verifier
from pods_rl.rewards.mathematics.comparison import decide, is_too_large

GOLDS = {
    "accuracy": "18",
    "format": "",
    "tag_count": "",
    "choice": "B",
    "equation": "2H2 + O2 = 2H2O",
    "chemistry": "2H2 + O2 = 2H2O",
}
ANY = (  # each reaches another pattern of the extraction
    "(", "9", " ", "<answer>", "</answer><answer>", "\\boxed{", "\\boxed{1},", "\\boxed{1}\\text{", "\\",
)  # fmt: skip
OWN = {
    "accuracy": (
        "A. ", "(A) ", "9^", "9!", "1,", "1/", "-", "\\frac{", "{", "$", "e", "a ", "\\text{", "cm ", "at least ",
        "minus ", "is - ", "- 3\n", "{-}", "half a ", "C(", "c1", "[C", "H_2", "m+", "\\fbox{", "(mod 7)",
        "k \\in Z, ", "9-9 ", "5 ft ", "5 pi ", "^-", "\\max(", "2 million ", "5 (five) ", "max 5, ", "C_5^2",
        "\\over ", "1+",
    ),
    "format": ("</think>", "</answer>"),
    "tag_count": ("</think>", "</answer>"),
    "choice": ("answer A ", "is true ", "A: ", "A. ", "or ", "A no ", "wait, ", "(A) ", "A, ", "not answer A "),
    "equation": ("H(", "((1)", "Ag+ + ", "²⁺", "\\xright[", "->", "="),
    "chemistry": ("->", "A: "),
}  # fmt: skip
ABSURD = [
    "9^{9^{9^9}}", "9^9^9^9", "10^{999999999}", "(10^{10^{10}})!", "((9!)!)!", "99999!", "9!!!!", "(((9^9)^9)^9)",
    "2^{100000}", "[" * 900, "(" * 25, r"\frac{" * 30, "1234567!",
]  # fmt: skip
HONEST = [
    "2^{2^5}", "2^{2024}", "(2^3)!", "5!!", "100!", "(n+1)!", "(3!)!", "x^{2^n}", "10^{23}", "e^{-x^2}",
    r"\frac{10!}{5!5!}", "3^{100}-1", "(" * 24 + ")" * 24, ")" * 900, r"2^{\frac{1}{3}}", "9^x^9^y",
]  # fmt: skip


def test_what_is_obviously_too_large_is_refused_and_nothing_else():
    assert [answer for answer in ABSURD if not is_too_large(answer)] == []
    assert [answer for answer in HONEST if is_too_large(answer)] == []


RUNS = [  # the text that is repeated stands at each _
    "5 aa_bb_cc_dd!", "5m_!", "5m_m_!", "5m^_2_!", r"5\text{ eggs}^_2_!", r"5^_\circ_x", r"\sin ^_2_x", "5 (mod_!",
    "C. x _zz", "Yes. _zz",
]  # fmt: skip


@pytest.mark.timeout(60)
def test_a_long_run_within_an_answer_costs_milliseconds():
    """Patterns that try every way to divide a run take from seconds to years, and end at the timeout."""
    for form in RUNS:
        for repeated in (" ", r"\,", "change to "):
            answer = form.replace("_", repeated * (900 // (form.count("_") * len(repeated))))
            decide(answer, "5")
            decide(answer, "C")
            REWARDS["choice"](f"<answer>{answer}</answer>", "Yes")


NESTED = [
    "(" * 400 + "1" + ")" * 400, r"\frac{1}{1+" * 80 + "1" + "}" * 80, r"\sqrt{" * 120 + "2" + "}" * 120,
    "9^" * 400 + "9", "1+" * 499 + "1", r"\left(" * 150 + "x", "((" * 200 + "x^2" + "))^2" * 50, "|" * 900,
    r"\sin" * 200 + "x",
]  # fmt: skip
UNFORESEEN = [  # no rule detects these
    r"\sum_{n=1}^{10^9} \frac{1}{n^n}", r"\prod_{n=1}^{999999} n", r"\int_0^1 \frac{\sin(x^9)e^{x^7}}{1+x^{11}} dx",
    "(a+b+c+d+e+f)^{60}", "(x+y+z+w)^{200} - (x+y+z+w)^{199}", r"\sum_{k=0}^{10^7} \binom{10^7}{k}",
    r"\lim_{x \to 0} \frac{\sin(\tan x)-\tan(\sin x)}{x^7}", "x^{77}+x^{76}+x+1=0", "2^{9999}!",
    r"\sin(\cos(\tan(\sin(\cos(\tan(x^{99}))))))^{99} + 18", r"\prod_{k=1}^{10^6} \left(1+\frac{1}{k^k}\right)",
    "987654321987654321987654321^{999}",
]  # fmt: skip
MEGABYTES = ["9", "9^", "(", r"\frac{", "9+", "{", "<answer>", r"\boxed{", "$", "1,", "x", "9!"]


@pytest.mark.slow
def test_hostile_answers_among_good_ones_that_need_the_verifier(monkeypatch):
    hostile = [*ABSURD, *NESTED, *UNFORESEEN, *(unit * (1_000_000 // len(unit)) for unit in MEGABYTES)]
    rows = [(f"<answer>{text}</answer>", "18", 0.0) for text in hostile]
    for n in range(2, 18):
        rows.append((rf"<answer>\sqrt{{{n * n * 2}}}</answer>", rf"{n}\sqrt{{2}}", 1.0))
        rows.append((f"<answer>(x+{n})^2</answer>", f"x^2+{2 * n}x+{n * n}", 1.0))
    random.Random(0).shuffle(rows)
    texts, golds, wanted = map(list, zip(*rows, strict=True))
    monkeypatch.setattr(verifier, "PATIENCE", 1e4)  # limits of processor time alone
    pool = VerifierPool(size=2, limit=2.0)  # a good answer needs a tenth of it, or more on a busy processor
    monkeypatch.setattr(answers, "default_pool", lambda: pool)
    scores = accuracy_batch(texts, golds)
    pool.close()
    assert scores == wanted
    assert pool.timeouts + pool.crashes >= 3


@pytest.mark.slow
@pytest.mark.parametrize("reward", GOLDS)
def test_a_long_completion_takes_linear_time(reward):
    """A megabyte, and the longest answers that are read; quadratic time would exceed the timeout of a test."""
    for unit in ANY + OWN[reward]:
        for length in (990, 19_980, 1_000_000):
            text = unit * (length // len(unit))
            completions = [text, f"<answer>{text}</answer>"]
            if reward in ("equation", "chemistry"):
                completions.append(f"<answer>2H2 + O2 = {text}</answer>")
            for completion in completions:
                assert REWARDS[reward](completion, GOLDS[reward]) < 1.0
