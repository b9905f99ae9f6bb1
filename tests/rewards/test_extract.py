"""Where the final answer is found, and that finding it costs no more on a hostile text."""

from __future__ import annotations

from pods_rl.rewards import extract_answer, extract_gold

CASES = [
    ("<answer>18</answer>", "18"),
    ("<think>9</think>\n<answer> 18 </answer> Hope this helps!", "18"),
    ("<answer>17</answer><answer>18</answer>", "18"),
    ("<answer>18</answer><answer>17", "18"),
    ("</answer><answer>18</answer>", "18"),
    ("<answer>1<answer>18</answer>", "18"),
    (r"<answer>So \boxed{18}.</answer>", "18"),
    ("<answer>so\n#### 18</answer>", "18"),
    (r"\boxed{17}<answer>18</answer>", "18"),
    (r"\boxed{17} <answer></answer>", None),
    ("<answer>18", None),
    ("</answer><answer>", None),
    (r"\boxed{17} then \boxed{18}", "18"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\boxed{18}}", "18"),
    (r"\boxed{17}, \boxed{18}", "17, 18"),
    (r"\boxed{1}\boxed{2}", "1, 2"),
    (r"Either $\boxed{17}$ or maybe $\boxed{18}$.", "17, 18"),
    (r"\boxed{2}, \boxed{3}, and \boxed{5}", "2, 3, 5"),
    (r"\boxed{k = 45} \quad \text{and} \quad \boxed{n = 2}", "k = 45, n = 2"),
    (r"\boxed{1} papers and \boxed{2} bins", "1, 2"),
    (r"$x = \boxed{1}$ and $y = \boxed{2}$", "1, 2"),
    (r"\[\boxed{\boxed{1}; \boxed{2}}\]", "1, 2"),
    (r"\boxed{18} = \boxed{18}, \boxed{18}", "18"),
    (r"\boxed{1} no no no no no \boxed{2}", "2"),
    (r"\boxed{15\frac{39}{40}},$ or $\boxed{\frac{639}{40}}$ inches", r"\frac{639}{40}"),
    (r"\boxed{1, \boxed{2}}", "2"),
    (r"so \\boxed{840}.", "840"),
    (r"x = 1 \\\boxed{2}", "2"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{18} and \boxed{17", "18"),
    (r"{ \boxed{18}", "18"),
    (r"}} \boxed{18}", "18"),
    (r"\boxed{}", None),
    (r"So it is $\fbox{18}$.", "18"),
    (r"\fbox{17}, no: \boxed{18}", "18"),
    (r"\boxed{17}. I see now that it must be \fbox{18}", "18"),
    (r"\fbox{17} or \boxed{18}", "17, 18"),
    (r"\boxed{\fbox{18}}", "18"),
    (r"\fbox{$\frac{1}{2}$}", r"$\frac{1}{2}$"),
    (r"\fbox{18", None),
    ("9*2=18\n#### 18\nThat is all.", "18"),
    ("#### 17\n#### 18", "18"),
    ("####", None),
]


def test_the_final_answer_of_a_completion():
    assert [(text, extract_answer(text)) for text, _ in CASES] == CASES


def test_the_gold_answer_of_a_column():
    cases = [
        ("a #### 1,200\n", "1,200"),
        ("#### ", None),
        ("9*2 = 18 ####", None),
        (r"we get \boxed{18}", "18"),
        (" p - q ", "p - q"),
        ("", None),
    ]
    assert [(text, extract_gold(text)) for text, _ in cases] == cases
