"""SciKnowEval's chemistry: three kinds of question, a split by hash, and every published row."""

import json
from collections import Counter

import pytest

from pods_rl.errors import UserError
from pods_rl.tasks import load_task
from pods_rl.tasks.chemistry import read_questions

from ..rewards.data import FOLDER
from .conftest import write_jsonl


def choice(question, texts=("water", "salt"), answer="B", **more):
    row = {"question": question, "answerKey": answer, "answer": "", "type": "mcq-2-choices", "domain": "Chemistry"}
    return {**row, "choices": {"text": list(texts), "label": list("ABCD"[: len(texts)])}, "details": {}, **more}


def judgement(question, answer="Yes"):
    return choice(question, (), "", type="true_or_false") | {"answer": answer}


def equation(question="H2 + O2 = H2O", answer="2H2 + O2 = 2H2O", task="balancing_chemical_equation"):
    return choice(question, (), "", type="filling") | {"answer": answer, "details": {"task": task}}


ROWS = [choice("What dissolves?"), judgement("Gloves are worn."), equation()]


def questions(tmp_path, rows):
    write_jsonl(tmp_path / "sciknoweval_chemistry" / "L1.jsonl", rows)
    return list(read_questions({"data_dir": str(tmp_path)}))


def test_what_no_rule_can_grade_is_left_out(tmp_path):
    others = [
        choice("Cells?", domain="Biology"),
        choice("Explain.", (), "", type="open-ended-qa"),
        equation(task="names"),
    ]
    assert [q.stem for q in questions(tmp_path, [*others, ROWS[0]])] == ["What dissolves?"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (choice("Which?", answer="C"), r"row 2 .*'C' .*\['A', 'B'\]"),
        (judgement("Gloves?", "Maybe"), r"row 2 .*'Maybe' .*\['Yes', 'No'\]"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        questions(tmp_path, [ROWS[0], row])


def test_hub_and_folder_give_the_same_whatever_the_order_of_the_files(hub, tmp_path):
    rows = [choice(f"Which of {i}?", answer="AB"[i % 2]) for i in range(40)] + ROWS
    hub.rows = {("hicai-zju/SciKnowEval", "v2", "test"): [choice("Cells?", domain="Biology"), *rows]}
    for file, part in (("L1_a", rows[20:]), ("L3_b", rows[:20])):
        write_jsonl(tmp_path / "sciknoweval_chemistry" / f"{file}.jsonl", part)
    from_hub = load_task({"task": "sciknoweval_chemistry"})
    local = load_task({"task": "sciknoweval_chemistry", "data_dir": str(tmp_path)})
    assert local.train.to_list() == from_hub.train.to_list()
    assert local.test.to_list() == from_hub.test.to_list()
    assert len(from_hub.train) + len(from_hub.test) == 43
    assert hub.asked == [("hicai-zju/SciKnowEval", "v2", "test")]


def test_questions_that_read_the_same_are_on_the_same_side(tmp_path):
    pairs = [(choice(f"Which of {i}?"), choice(f" which  of {i}?\n", ("acid", "base"), "A")) for i in range(60)]
    asked = questions(tmp_path, [row for pair in pairs for row in pair])
    assert len({q.text for q in asked}) == 120
    assert all(a.held_out == b.held_out for a, b in zip(asked[::2], asked[1::2], strict=True))
    assert 0.1 < sum(q.held_out for q in asked) / 120 < 0.3


PUBLISHED = {
    ("L1_chemical_literature_QA", "multiple choice"): 1000,
    ("L2_reaction_mechanism_inference", "multiple choice"): 269,
    ("L3_balancing_chemical_equation", "equation"): 300,
    ("L3_molar_weight_calculation", "multiple choice"): 600,
    ("L3_molecular_property_calculation", "multiple choice"): 500,
    ("L3_reaction_prediction", "multiple choice"): 400,
    ("L4_chemical_laboratory_safety_test", "multiple choice"): 185,
    ("L4_chemical_laboratory_safety_test", "true or false"): 215,
}


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no published data in {FOLDER.name} beside the repository")
def test_every_published_row_is_parsed():
    asked = list(read_questions({"data_dir": str(FOLDER)}))
    found = Counter((q.place.split("/")[-1].split(".jsonl")[0], q.kind) for q in asked)
    assert (dict(found), len(asked)) == (PUBLISHED, 3469)
    lines = [line for file in sorted((FOLDER / "sciknoweval_chemistry").glob("*.jsonl")) for line in file.open()]
    golds = [row["answerKey"] or row["answer"] for row in map(json.loads, lines)]
    assert [q.gold for q in asked] == golds
