"""Tasks from files: GSM8K as it is, small files of every kind, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from pods_rl.errors import UserError
from pods_rl.recipe import schema
from pods_rl.tasks import TASKS, load_task
from pods_rl.tasks.prompts import SYSTEM_PROMPT

from .conftest import write_jsonl

ROWS = [{"question": "9*2?", "answer": "9*2=18\n#### 18"}, {"question": "600*2?", "answer": "#### 1,200"}]


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    return {
        "dataset_name": write_jsonl(tmp_path / "train.jsonl", ROWS),
        "dataset_test_name": write_jsonl(tmp_path / "test.jsonl", ROWS[:1]),
    }


def test_the_system_prompt_shows_a_completion_that_the_grader_finds_in_form(files):
    shown = SYSTEM_PROMPT.split("\n")[-1].replace("your final answer", "18")
    assert load_task(files).grade([shown], ["18"])[0].both


def test_questions_may_be_chat_messages(tmp_path):
    turns = [{"role": "user", "content": "9*2?"}]
    own = [{"role": "system", "content": "Add."}, *turns]
    name = write_jsonl(tmp_path / "a.jsonl", [{"prompt": turns, "answer": 18}, {"prompt": own, "answer": "18"}])
    task = load_task({"dataset_name": name, "dataset_test_name": name, "system_prompt": "Think."})
    assert task.train[0]["prompt"] == [{"role": "system", "content": "Think."}, *turns]
    assert task.train[1]["prompt"] == own
    plain = load_task({"dataset_name": name, "dataset_test_name": name, "prompt_style": "plain"})
    assert plain.train[1]["prompt"] == "Add.\n\n9*2?\n"


def test_a_conversation_cannot_be_written_as_plain_text(tmp_path):
    turns = [{"role": role, "content": "9*2?"} for role in ("user", "assistant", "user")]
    name = write_jsonl(tmp_path / "a.jsonl", [{"prompt": turns, "answer": 18}])
    both = {"dataset_name": name, "dataset_test_name": name}
    assert len(load_task(both).train[0]["prompt"]) == 4
    with pytest.raises(UserError, match=r"row 1 .*a turn of assistant cannot be written as plain text"):
        load_task({**both, "prompt_style": "plain"})


@pytest.mark.parametrize("kind", ["json", "parquet", "saved", "saved_splits"])
def test_every_kind_of_file(tmp_path, kind):
    rows = datasets.Dataset.from_list([{"question": "9*2?", "answer": "18"}])
    path = tmp_path / f"data.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows.to_list()))
    elif kind == "parquet":
        rows.to_parquet(str(path))
    elif kind == "saved":
        rows.save_to_disk(str(path))
    else:
        datasets.DatasetDict(train=rows, test=rows).save_to_disk(str(path))
    extra = {} if kind.startswith("saved") else {"dataset_test_name": str(path)}
    task = load_task({"dataset_name": str(path), **extra})
    assert (task.train[0]["answer"], task.test[0]["answer"]) == ("18", "18")


def test_one_file_can_be_cut_in_two(tmp_path):
    name = write_jsonl(tmp_path / "a.jsonl", [{"question": f"{i}?", "answer": i} for i in range(10)])
    cut = {"dataset_train_split": "train[:80%]", "dataset_test_name": "train[80%:]"}
    task = load_task({"dataset_name": name, **cut})
    assert (task.train["answer"][-1], task.test["answer"][0]) == ("7", "8")
    with pytest.raises(UserError, match="nothing to test on"):
        load_task({"dataset_name": name})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "2+2?", "answer": " "}, "row 3 .* no gold answer in the text ' '"),
        ({"question": "2+2?"}, "row 3 .* the answer is null"),
        ({"question": " ", "answer": "#### 4"}, "row 3 .* the question is the text ' '"),
        ({"question": "2+2?", "answer": "#### </answer>4"}, "row 3 .* does not accept the text '</answer>4'"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    write_jsonl(tmp_path / "gsm8k" / "test.jsonl", [*ROWS, row])
    with pytest.raises(UserError, match=message):
        load_task({"task": "gsm8k", "data_dir": str(tmp_path)})


def chat(*messages):
    return {"question": list(messages), "answer": "4"}


USER = {"role": "user", "content": "2+2?"}


PARTS = {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}


@pytest.mark.parametrize(
    ("row", "place"),
    [
        (chat(USER, {"role": "assistant", "content": None}), "row 2 .*message 2"),
        (chat({"role": "user", "content": " "}), "message 1"),
        (chat(IMAGE), "images"),
        (chat(), r"the question is the list \[\]"),
    ],
)
def test_parts_of_text_are_joined_and_any_other_chat_message_is_refused_with_its_place(tmp_path, row, place):
    good = write_jsonl(tmp_path / "good.jsonl", [chat(PARTS)])
    task = load_task({"dataset_name": good, "dataset_test_name": good, "system_prompt": ""})
    assert task.train[0]["prompt"] == [USER]
    name = write_jsonl(tmp_path / "a.jsonl", [chat(USER), row])
    with pytest.raises(UserError, match=place):
        load_task({"dataset_name": name, "dataset_test_name": name})


def test_missing_things_are_refused_with_what_exists(tmp_path, files):
    train = files["dataset_name"]
    cases = [
        ({"dataset_name": train.replace("train", "trian")}, "Did you mean train.jsonl"),
        ({**files, "question_column": "quesiton"}, "has the columns question, answer; name one of them"),
        ({"task": "dataset"}, "needs dataset_name"),
        (
            {"dataset_name": str(tmp_path), "dataset_train_split": "dev"},
            "holds test.jsonl, train.jsonl.*gives no split 'dev'",
        ),
    ]
    for settings, message in cases:
        with pytest.raises(UserError, match=message):
            load_task(settings)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "gives no split|has no rows"),
        ("words.jsonl", "hello\n", "the file .*words.jsonl gives no split 'train': .*name another file"),
        ("odd.jsonl", '{"q": "a", "a": "1"}\n', "has the columns q, a, none of prompt, question, problem"),
        ("notes.txt", "hello", r"is a \.txt; expected one of \.jsonl"),
    ],
)
def test_files_that_hold_no_dataset(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_task({"dataset_name": str(path), "dataset_test_name": str(path)})


def test_every_task_of_a_recipe_is_in_the_table():
    assert tuple(TASKS) == schema.TASKS


def listwise(completions, **kwargs):
    return [0.0] * len(completions)


def test_a_reward_in_trls_form_is_refused_with_the_form_to_write(files):
    with pytest.raises(UserError, match=r"listwise' takes .*\(text: str, gold: str\) -> float"):
        load_task({**files, "task_rewards": {f"{__name__}:listwise": 1.0}})


def test_many_rows_are_kept_in_a_file_that_is_read_again(tmp_path, monkeypatch):
    """Prompts of a large file must not be held in the memory of each process."""
    monkeypatch.setattr("pods_rl.tasks.prompts._FEW_ROWS", 5)
    name = write_jsonl(tmp_path / "a.jsonl", [{"question": f"{i}+0?", "answer": i} for i in range(50)])
    both = {"dataset_name": name, "dataset_test_name": name}
    first, again = load_task(both), load_task(both)
    assert [Path(file["filename"]).suffix for file in first.train.cache_files] == [".arrow"]
    assert again.train.cache_files == first.train.cache_files
    assert first.train["answer"][:] == [str(i) for i in range(50)]
    other = load_task({**both, "system_prompt": "Add."})
    assert other.train["prompt"][0] != first.train["prompt"][0]
