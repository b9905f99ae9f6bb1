"""Published mathematics: the hub (replaced) and a folder give the same; what is asked of the hub; what is refused."""

import pytest

from pods_rl.errors import UserError
from pods_rl.tasks import load_task

from .conftest import write_jsonl

GSM8K = [{"question": f"{i}+1?", "answer": f"one more\n#### {i + 1},000"} for i in range(4)]
MATH = [{"problem": f"{i}/7?", "solution": rf"not \boxed{{1}} but \boxed{{\frac{{{i}}}{{7}}}}"} for i in range(4)]
MATH_500 = [{"problem": "f?", "solution": r"\boxed{7}", "answer": r"\left( 3, \frac{\pi}{2} \right)"}]
AMC = [{"question": "x?", "answer": 27.0}]
HUB = {
    ("openai/gsm8k", "main", "train"): GSM8K[:3],
    ("openai/gsm8k", "main", "test"): GSM8K[3:],
    ("DigitalLearningGmbH/MATH-lighteval", "default", "train"): MATH,
    ("HuggingFaceH4/MATH-500", None, "test"): MATH_500,
    ("math-ai/amc23", None, "test"): AMC,
}


def rows(task):
    return [(split["prompt"][:], split["answer"][:]) for split in (task.train, task.test)]


@pytest.mark.parametrize(
    ("name", "trained", "tested"),
    [
        ("gsm8k", ["1,000", "2,000", "3,000"], ["4,000"]),
        ("math", [rf"\frac{{{i}}}{{7}}" for i in range(4)], [MATH_500[0]["answer"]]),
        ("amc23", [rf"\frac{{{i}}}{{7}}" for i in range(4)], ["27.0"]),
    ],
)
def test_hub_and_folder_give_the_same_prompts_and_gold_answers(hub, tmp_path, name, trained, tested):
    hub.rows = HUB
    write_jsonl(tmp_path / "gsm8k" / "train.jsonl", GSM8K[:3])
    write_jsonl(tmp_path / "gsm8k" / "test.jsonl", GSM8K[3:])
    write_jsonl(tmp_path / "math" / "train.jsonl", MATH)
    write_jsonl(tmp_path / "math500" / "test.jsonl", MATH_500)
    write_jsonl(tmp_path / "amc23" / "test.jsonl", AMC)
    settings = {"task": name, "dataset_train_split": "train", "dataset_name": None}
    from_hub, local = load_task(settings), load_task({**settings, "data_dir": str(tmp_path)})
    assert rows(from_hub) == rows(local)
    assert from_hub.version == local.version
    assert from_hub.name == name
    assert (from_hub.train["answer"][:], from_hub.test["answer"][:]) == (trained, tested)
    assert set(hub.asked) <= set(HUB)


@pytest.mark.parametrize("name", ["gsm8k", "math", "amc23"])
def test_a_test_set_is_not_cut_off_the_training_rows(tmp_path, name):
    write_jsonl(tmp_path / "gsm8k" / "train.jsonl", GSM8K)
    write_jsonl(tmp_path / "math" / "train.jsonl", MATH)
    with pytest.raises(UserError, match=name):
        load_task({"task": name, "data_dir": str(tmp_path)})
