"""The built-in task: seeded, disjoint, right by an independent evaluator, and graded as the paper grades."""

import ast
import random

import pytest

from pods_rl.rewards import REWARDS
from pods_rl.tasks.arithmetic import DIFFICULTIES, Difficulty, Problem, arithmetic_task, draw_problem, write_completion


def evaluate(prompt: str) -> int:
    """Work a sum out from its syntax tree: independent of how the task made it."""
    return _value(ast.parse(prompt.removesuffix("="), mode="eval").body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        return left + right if isinstance(node.op, ast.Add) else left - right
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int)
    return node.value


def problems(count: int, difficulty: str = "mixed") -> list[Problem]:
    rng = random.Random(7)
    return [draw_problem(rng, DIFFICULTIES[difficulty]) for _ in range(count)]


def test_same_arguments_give_same_prompts_and_another_seed_gives_others():
    first, again, other = (arithmetic_task(train_size=50, test_size=20, seed=seed) for seed in (3, 3, 4))
    assert first.train["prompt"] == again.train["prompt"]
    assert first.test["answer"] == again.test["answer"]
    assert first.train["prompt"] != other.train["prompt"]


def test_prompts_are_distinct_and_test_is_disjoint_over_seeds_and_difficulties():
    tasks = [arithmetic_task(d, train_size=400, test_size=200, seed=s) for s in (0, 1) for d in DIFFICULTIES]
    for task in tasks:
        assert len(set(task.train["prompt"])) == 400
        assert len(set(task.test["prompt"])) == 200
    trained = {prompt for task in tasks for prompt in task.train["prompt"]}
    tested = {prompt for task in tasks for prompt in task.test["prompt"]}
    assert not trained & tested


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_gold_answers_are_right(difficulty):
    task = arithmetic_task(difficulty, train_size=300, test_size=300)
    for split in (task.train, task.test):
        assert [str(evaluate(prompt)) for prompt in split["prompt"]] == list(split["answer"])


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_difficulty_bounds_terms_and_numbers(difficulty):
    level = DIFFICULTIES[difficulty]
    drawn = problems(600, difficulty)
    assert {len(p.terms) for p in drawn} == set(range(level.min_terms, level.max_terms + 1))
    for problem in drawn:
        for number in (*map(abs, problem.terms), *problem.totals):
            assert level.smallest <= number <= level.largest


def test_canonical_completion_earns_full_marks_for_every_gold_answer():
    task = arithmetic_task(train_size=1, test_size=1)
    for problem in problems(500):
        text = write_completion(problem)
        assert task.grade([text], [problem.answer])[0].both
        marks = sum(weight * REWARDS[name](text, problem.answer) for name, weight in task.rewards.items())
        assert marks == pytest.approx(1.0 + 0.1 + 4 * 0.025)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>1\n+1=2</think><answer>2</answer>", (True, True)),
        ("<think>1\n+1=3</think><answer>3</answer>", (False, True)),
        ("<think>1\n+1=2<answer>2</answer>", (True, False)),
        ("<think>1\n+1=2</think>2", (False, False)),
        ("<think>1\n+1=2</think><answer>2</answer>2", (True, False)),
        ("2", (False, False)),
        ("", (False, False)),
    ],
)
def test_grade_judges_answer_and_form_apart(text, expected):
    task = arithmetic_task("easy", train_size=1, test_size=1)
    assert task.grade([text], ["2"]) == [expected]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"difficulty": "simple"}, "'simple'.*easy, mixed, hard"),
        ({"train_size": 0}, "0 prompts"),
        ({"difficulty": Difficulty(2, 2, 1, 4), "train_size": 500}, "500 distinct train prompts"),
    ],
)
def test_refuses_what_it_cannot_make(arguments, said):
    with pytest.raises(ValueError, match=said):
        arithmetic_task(**arguments)
