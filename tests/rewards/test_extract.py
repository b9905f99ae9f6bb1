"""Where the final answer is found, and that finding it costs no more on a hostile text."""

from pods_rl.rewards import REWARDS, extract_answer, extract_gold, graded_text

CASES = [
    ("<answer>18</answer>", "18"),
    ("<think>9</think>\n<answer> 18 </answer> Hope this helps!", "18"),
    ("<answer>17</answer><answer>18</answer>", "18"),
    ("</answer><answer>18</answer>", "18"),
    ("<answer>1<answer>18</answer>", "18"),
    (r"<answer>So \boxed{18}.</answer>", "18"),
    ("<answer>so\n#### 18</answer>", "18"),
    (r"\boxed{17}<answer>18</answer>", "18"),
    (r"\boxed{17} <answer></answer>", None),
    ("</answer><answer>", None),
    (r"\boxed{17} then \boxed{18}", "18"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\boxed{18}}", "18"),
    (r"\boxed{17}, \boxed{18}", "17, 18"),
    (r"\boxed{2}, \boxed{3}, and \boxed{5}", "2, 3, 5"),
    (r"\boxed{k = 45} \quad \text{and} \quad \boxed{n = 2}", "k = 45, n = 2"),
    (r"$x = \boxed{1}$ and $y = \boxed{2}$", "1, 2"),
    (r"\[\boxed{\boxed{1}; \boxed{2}}\]", "1, 2"),
    (r"\boxed{18} = \boxed{18}, \boxed{18}", "18"),
    (r"\boxed{1} no no no no no \boxed{2}", "2"),
    (r"\boxed{15\frac{39}{40}},$ or $\boxed{\frac{639}{40}}$ inches", r"\frac{639}{40}"),
    (r"\boxed{1, \boxed{2}}", "2"),
    (r"so \\boxed{840}.", "840"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"{ \boxed{18}", "18"),
    (r"\boxed{}", None),
    (r"So it is $\fbox{18}$.", "18"),
    (r"\boxed{17}. I see now that it must be \fbox{18}", "18"),
    (r"\fbox{17} or \boxed{18}", "17, 18"),
    (r"\boxed{\fbox{18}}", "18"),
    (r"\fbox{$\frac{1}{2}$}", r"$\frac{1}{2}$"),
    ("9*2=18\n#### 18\nThat is all.", "18"),
    ("#### 17\n#### 18", "18"),
    ("####", None),
    ("<think>so <answer>18</answer>", None),
    ("<think>so\n#### 18", None),
    (r"<think>so \boxed{17}</think>\boxed{18}", "18"),
    (r"so \boxed{17}</think>\boxed{18}", "18"),
    ("<think>a</think>b</think><answer>18</answer>", "18"),
    ("<think>so <answer>18</answer></think>", None),
    (r"<think>so \boxed{18}</think> The answer is above.", None),
    ("<think>a</think><answer>17</answer><think>no, <answer>18</answer>", None),
    ("<think>a</think><answer>17</answer><think>no</think><answer>18</answer>", "18"),
]

ANSWERS = ("<answer>17</answer>", r"\boxed{17}", r"$\fbox{17}$", "#### 17\n")
BEGUN = (  # as where a completion is cut off
    "<answer>", "<answer>18", "<ans", r"<answer>so \boxed{18}", "<answer>18</ans", r"\boxed{18", r"\boxed{\frac{1}{2}",
    r"\boxed{", r"\boxed", r"\box", r"\boxed 18", r"\fbox{18", r"\fbox{\boxed{18}", r"\boxed{18, \boxed{19}", "####",
    "#### ", "##", "The answer is", "The answer is: $", "**Final answer:** ", "the answer should be\n",
)  # fmt: skip
FINISHED = (
    ".", " That is the answer.", "\nThe answer is above.", " since 1 < 2", "\n\\[", " }", " {", "</answer>", "#", "<",
)  # fmt: skip


def test_an_answer_that_is_begun_and_not_finished_leaves_none():
    for answer in ANSWERS:
        for begun in BEGUN:
            assert extract_answer(f"{answer} No: {begun}") is None, (answer, begun)
        for rest in FINISHED:
            assert extract_answer(answer + rest) in ("17", f"17{rest}".strip()), (answer, rest)
    lost_its_brace = "\\boxed{x = 2\nSo it is \\boxed{17}."
    assert extract_answer(lost_its_brace) == "17"


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
        (r"<think>\boxed{17}</think>18", "18"),
        ("<think>18", None),
    ]
    assert [(text, extract_gold(text)) for text, _ in cases] == cases


def test_every_grader_ignores_what_is_said_in_a_thought():
    golds = {"accuracy": "18", "choice": "B", "equation": "2H2 + O2 = 2H2O", "chemistry": "Yes"}
    for name, gold in golds.items():
        said = f"<answer>{gold}</answer>"
        assert REWARDS[name](f"<think>{said}</think>{said}", gold) == 1.0
        for text in (f"<think>{said}", f"<think>{said}</think>", f"{said}</think>", f"{said}<think>so"):
            assert REWARDS[name](text, gold) == 0.0, (name, text)


def test_a_thought_that_the_prompt_opens_is_graded():
    cut = r"9*2 = \boxed{18}"
    for prompt in ("<|im_start|>assistant\n<think>\n", "1+1=<think>", "<think> \n\n"):
        text = graded_text(prompt, "9*2=18</think>\n<answer>18</answer>")
        assert [REWARDS[name](text, "18") for name in ("accuracy", "format", "tag_count")] == [1.0, 1.0, 0.1]
        assert REWARDS["accuracy"](graded_text(prompt, cut), "18") == 0.0
    for prompt in ("", "<|im_start|>assistant\n", "<think>\n\n</think>\n\n", "Write <think> first.", "<think>so"):
        assert graded_text(prompt, cut) == cut
