"""Answers that try to hang a grader, and good ones among which they are mixed.

Towers of powers, huge factorials, deep nesting, megabytes of text, and sums and products that no rule detects.
"""

from __future__ import annotations

import random

_TOWERS = [
    "9^{9^{9^9}}",
    "10^{999999999}",
    "(10^{10})^{10^{10}}",
    "2^{2^{2^{2^{2^2}}}}",
    "9^9^9^9^9",
    "-7^{7^{7^7}}",
    "x^{9^{9^9}}",
    r"\sqrt{9^{9^{9^9}}}",
    r"\frac{1}{9^{9^{9^9}}}",
    r"3 \cdot 10^{10^{10}}",
    r"\log(9^{9^{9^9}})",
    "18+10^{99999999}-10^{99999999}",
    "(((9^{99})^{99})^{99})^{99}",
    "99^{(99^{99})}",
]
_FACTORIALS = [
    "(10^{10^{10}})!",
    "99999999!",
    "((9!)!)!",
    "9!!!!!!!!",
    "(10^{10})!",
    r"\frac{99999999!}{99999998!}",
    r"\binom{10^{12}}{10^{11}}",
    r"\binom{999999999}{444444444}",
    "123456789! + 1",
    "(2^{64})!",
    r"\sqrt{(10^9)!}",
    "(99999!)^{99999!}",
]
_NESTED = [
    "[" * 900,
    "(" * 400 + "1" + ")" * 400,
    r"\frac{" * 150,
    r"\frac{1}{1+" * 80 + "1" + "}" * 80,
    r"\sqrt{" * 120 + "2" + "}" * 120,
    "{" * 450 + "}" * 450,
    "9^" * 400 + "9",
    "1+" * 499 + "1",
    "-" * 900 + "1",
    r"\left(" * 150 + "x",
    "((" * 200 + "x^2" + "))^2" * 50,
    "|" * 900,
    "x^{" * 200 + "x" + "}" * 200,
    r"\sin" * 200 + "x",
]
_UNFORESEEN = [
    r"\sum_{n=1}^{10^9} \frac{1}{n^n}",
    r"\prod_{n=1}^{999999} n",
    r"\int_0^1 \frac{\sin(x^9)e^{x^7}}{1+x^{11}} dx",
    "(a+b+c+d+e+f)^{60}",
    "(x+y+z+w)^{200} - (x+y+z+w)^{199}",
    r"\sum_{k=0}^{10^7} \binom{10^7}{k}",
    r"\lim_{x \to 0} \frac{\sin(\tan x)-\tan(\sin x)}{x^7}",
    "x^{77}+x^{76}+x+1=0",
    "2^{9999}!",
    r"\sin(\cos(\tan(\sin(\cos(\tan(x^{99}))))))^{99} + 18",
    r"\prod_{k=1}^{10^6} \left(1+\frac{1}{k^k}\right)",
    "987654321987654321987654321^{999}",
]
_MEGABYTES = ["9", "9^", "(", r"\frac{", "9+", "{", "<answer>", r"\boxed{", "$", "1,", "x", "9!"]


def hostile_answers() -> list[str]:
    """Return 64 completions with hostile answers."""
    megabytes = [unit * (1_000_000 // len(unit)) for unit in _MEGABYTES]
    hostile = [*_TOWERS, *_FACTORIALS, *_NESTED, *_UNFORESEEN, *megabytes]
    return [f"<answer>{text}</answer>" for text in hostile]


def good_answers() -> list[tuple[str, str]]:
    """Return 64 right completions and their gold answers; half of them need the verifier."""
    numbers = [(f"<answer>The total is ${n}.00</answer>", str(n)) for n in range(32)]
    roots = [(rf"<answer>\sqrt{{{n * n * 2}}}</answer>", rf"{n}\sqrt{{2}}") for n in range(2, 18)]
    powers = [(f"<answer>(x+{n})^2</answer>", f"x^2+{2 * n}x+{n * n}") for n in range(1, 17)]
    return [*numbers, *roots, *powers]


def mixed_batch(seed: int = 0) -> tuple[list[str], list[str], list[float]]:
    """Return hostile and good answers in random order: completions, gold answers and expected scores."""
    rows = [(text, "18", 0.0) for text in hostile_answers()] + [(*good, 1.0) for good in good_answers()]
    random.Random(seed).shuffle(rows)
    texts, golds, scores = zip(*rows, strict=True)
    return list(texts), list(golds), list(scores)
