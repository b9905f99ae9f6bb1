"""Arithmetic is parsed, and its value is exact."""

from pods_rl.rewards.mathematics.arithmetic import read_expression

VALUES = {
    "1+2*3": 7,
    "2*3+4*5": 26,
    "10-4-3": 3,
    "24/4/2": 3,
    "-3+10": 7,
    "4*-2": -8,
    "--4": 4,
    "-(2+3)*2": -10,
    "0.5*4": 2,
    "1,000 + 24": 1024,
    "3 × 4 ÷ 6 − 1": 1,
    r"3 \times 4 \div 6 \cdot 2": 4,
    "3 x 4": 12,
    r"\frac{6}{3} * 4": 8,
    r"\left( 1 + 2 \right) \times [3]": 9,
    "2(3+4)(1+1)": 28,
    "(1+2)3": 9,
    "$1 + 2$.": 3,
    "**2 * 3**": 6,
}
NONE = [
    "", " ", "()", "(", ")", "1+", "+1", "*", "1 2", "(1 2)", "1 + 2)", "((1+2)", "1..2", "1//2", "2**3", "2^3", "1/0",
    "1/(2-2)", "2+2=4", "a+b", "5!", "1e3", "__import__('os')", "1 if 1 else 2", "1;2",
    "2%3", "٣+٤", "𝟑+4", "1_000", "1,2", r"\sqrt{4}", "(1,2)",
]  # fmt: skip


def test_values():
    for text, value in VALUES.items():
        assert read_expression(text) == value, text
    assert [text for text in NONE if read_expression(text) is not None] == []
