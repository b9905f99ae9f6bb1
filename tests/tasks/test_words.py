"""Word problems: seeded, disjoint by template and numbers, and right by a reader of their English."""

import random
import re

import pytest

from pods_rl.tasks import load_task
from pods_rl.tasks.words import LEVELS, TIMES, draw_problem, read_stories

STORIES = read_stories()
SCENES, ENDS, DISTRACTORS = STORIES["scenes"], STORIES["ends"], STORIES["distractors"]
GROWTHS, HALVINGS = STORIES["growths"], STORIES["halvings"]

FIELDS = {"n": r"(?P<n>\d+)", "k": r"(?P<k>\d+)", "times": f"(?P<times>{'|'.join(TIMES.values())})"}
NUMBERS = {word: number for number, word in TIMES.items()}


def drawn(count, *levels, seed=7):
    rng = random.Random(seed)
    return [draw_problem(rng, *LEVELS[level]) for level in levels or LEVELS for _ in range(count)]


def make(**settings):
    return load_task({"task": "words", "task_train_size": 120, "task_test_size": 40, **settings})


def pattern(sentence: str) -> re.Pattern:
    """What a sentence of the tables looks like in a text: numbers where its fields are, any words for the others."""
    parts = re.split(r"\{(\w+)\}", sentence)
    return re.compile("".join(FIELDS.get(p, r"[\w']+?") if i % 2 else re.escape(p) for i, p in enumerate(parts)))


def every(*tables) -> list[re.Pattern]:
    return [pattern(sentence) for table in tables for sentence in table]


READ = {
    "open": every(*(scene["opens"] for scene in SCENES)),
    "group": every(*(scene["groups"] for scene in SCENES)),
    "+": every(*(scene["gains"] for scene in SCENES), ENDS["more"], ENDS["together"]),
    "-": every(*(scene["losses"] for scene in SCENES), ENDS["fewer"]),
    "*": every(GROWTHS, ENDS["times"], ENDS["price"]),
    "half": every(HALVINGS),
    "/": every(ENDS["share"]),
    None: every(*(scene["settings"] for scene in SCENES), DISTRACTORS, ENDS["ask"]),
}


def solve(text: str) -> int:
    """Work a problem out from its text alone, one sentence (or a last pair) after another."""
    sentences = re.findall(r"[^.?]+[.?]", text)
    total = None
    while sentences:
        for count in (2, 1):
            said = " ".join(s.strip() for s in sentences[:count])
            found = [(kind, m) for kind, many in READ.items() for p in many if (m := p.fullmatch(said))]
            if found:
                break
        assert len({kind for kind, _ in found}) == 1, said
        kind, match = found[0]
        given = match.groupdict()
        number = NUMBERS[given["times"]] if given.get("times") else int(given.get("n") or 2)
        if kind == "open":
            total = number
        elif kind == "group":
            total = int(given["k"]) * number
        elif kind == "half":
            assert total % 2 == 0
            total //= 2
        elif kind == "/":
            assert total % number == 0
            total //= number
        elif kind:
            total = {"+": total + number, "-": total - number, "*": total * number}[kind]
        sentences = sentences[count:]
    return total


def test_the_text_alone_gives_the_answer():
    for problem in drawn(150):
        assert solve(problem.text) == problem.totals[-1]
    task = make()
    for split in (task.train, task.test):
        assert [str(solve(prompt.strip())) for prompt in split["prompt"]] == list(split["answer"])


def test_no_template_and_no_numbers_of_a_test_problem_are_trained_on():
    problems = [problem for seed in range(3) for problem in drawn(400, seed=seed)]
    trained = [problem for problem in problems if problem.held_out is False]
    tested = [problem for problem in problems if problem.held_out]
    assert len(trained) > 10 * len(tested) > 500
    for key in (lambda p: p.template, lambda p: (p.start, p.steps)):
        assert not set(map(key, trained)) & set(map(key, tested))
    task = make()
    sides = {problem.text: problem.held_out for problem in drawn(5000, "mixed", seed=0)}
    for split, side in ((task.train, False), (task.test, True)):
        assert {sides[prompt.strip()] for prompt in split["prompt"]} == {side}
        assert len(set(split["prompt"])) == len(split)


@pytest.mark.parametrize("name", LEVELS)
def test_difficulty_bounds_steps_and_sentences_that_do_not_matter(name):
    (lengths, distractors), problems = LEVELS[name], drawn(300, name)
    assert {len(problem.steps) for problem in problems} == set(range(lengths[0], lengths[1] + 1))
    idle = every(DISTRACTORS)
    counts = {sum(bool(p.search(problem.text)) for p in idle) for problem in problems}
    assert counts == set(range(distractors[0], distractors[1] + 1))
    for problem in problems:
        assert all(2 <= number <= 99 for number in (problem.start, *(n for _, n in problem.steps), *problem.totals))
