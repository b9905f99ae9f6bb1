"""Tasks from files: GSM8K as it is, small files of every kind, and what is refused."""

import gzip
import json
import math
import os
import re
from datetime import date
from decimal import Decimal
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pods_rl.errors import UserError
from pods_rl.recipe import schema
from pods_rl.tasks import TASKS, load_task, row_hashes, sources
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
    completion = SYSTEM_PROMPT.split("\n")[-1].replace("your final answer", "18")
    assert load_task(files).grade([completion], ["18"])[0].both


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
    with pytest.raises(UserError, match=r"row 1 .*assistant"):
        load_task({**both, "prompt_style": "plain"})


def test_a_saved_set_with_two_splits_is_read(tmp_path):
    rows = datasets.Dataset.from_list([{"question": "9*2?", "answer": "18"}])
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(str(tmp_path / "saved"))
    task = load_task({"dataset_name": str(tmp_path / "saved")})
    assert (task.train[0]["answer"], task.test[0]["answer"]) == ("18", "18")


def test_one_file_can_be_cut_in_two(tmp_path):
    name = write_jsonl(tmp_path / "a.jsonl", [{"question": f"{i}?", "answer": i} for i in range(10)])
    cut = {"dataset_train_split": "train[:80%]", "dataset_test_name": "train[80%:]"}
    task = load_task({"dataset_name": name, **cut})
    assert (task.train["answer"][-1], task.test["answer"][0]) == ("7", "8")
    with pytest.raises(UserError, match="dataset_test_name"):
        load_task({"dataset_name": name, "dataset_test_name": "validation"})


def test_a_folder_of_the_same_name_does_not_hide_a_split(tmp_path, monkeypatch):
    for place, answer in (("data/train", 1), ("data/test", 2), ("test/test", 3)):
        write_jsonl(tmp_path / f"{place}.jsonl", [{"question": f"{answer}+0?", "answer": answer}])
    monkeypatch.chdir(tmp_path)
    for test_name, answer in (("test", "2"), ("./test", "3")):
        assert load_task({"dataset_name": "data", "dataset_test_name": test_name}).test["answer"][:] == [answer]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder", "saved"])
def test_data_without_a_test_split_are_cut_in_two_with_a_note(tmp_path, kind):
    """About one distinct question in ten, chosen by its text, so that equal ones are on one side; the order stays."""
    rows = [{"question": f"{i // 2}+0?", "answer": i // 2} for i in range(60)]
    path = tmp_path / f"data.{kind}"
    table = datasets.Dataset.from_list(rows)
    if kind == "jsonl":
        write_jsonl(path, rows)
    elif kind == "parquet":
        table.to_parquet(str(path))
    elif kind == "folder":
        write_jsonl(path / "train.jsonl", rows)
    else:
        table.save_to_disk(str(path))
    task = load_task({"dataset_name": str(path)})
    again = load_task({"dataset_name": str(path)})
    assert (len(task.train), len(task.test)) == (52, 8)
    assert not set(task.train["answer"]) & set(task.test["answer"])
    assert task.train["answer"][:] == sorted(task.train["answer"], key=int)
    assert task.test["answer"][:] == again.test["answer"][:]
    assert re.search(r"\b60\b.*\b52\b.*\b8\b", task.notes[0])
    sized = load_task({"dataset_name": str(path), "task_train_size": 5, "task_test_size": 1})
    assert (sized.train["answer"][:], sized.test["answer"][:]) == (task.train["answer"][:5], task.test["answer"][:1])
    assert re.search(r"\b60\b.*\b5\b.*\b1\b", sized.notes[0])


def test_data_of_one_question_cannot_be_cut_in_two(tmp_path):
    one_question = write_jsonl(tmp_path / "one.jsonl", [{"question": q, "answer": 1} for q in ("1+0?", "1+0? ")])
    with pytest.raises(UserError, match=r"one.jsonl"):
        load_task({"dataset_name": one_question})


def questions_of(split) -> set[str]:
    """The questions of prompts, without a system prompt; of spaces and capitals in any form."""
    found = set()
    for prompt in split["prompt"]:
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        found.add(text.strip().splitlines()[-1].strip().lower())
    return found


@pytest.mark.parametrize("change", [{}, {"system_prompt": "Add."}, {"prompt_style": "plain", "task_seed": 7}])
def test_a_row_that_was_trained_is_never_a_test_row_later(tmp_path, change):
    """Neither with another prompt, as `pods eval` may set it, nor in a file to which rows were added meanwhile."""
    rows = [{"question": f"What is {i}+0?", "answer": i} for i in range(200)]
    before = load_task({"dataset_name": write_jsonl(tmp_path / "a.jsonl", rows)})
    more = [{"question": f"What is  {i}+0? ", "answer": i} for i in range(500)]
    after = load_task({"dataset_name": write_jsonl(tmp_path / "b.jsonl", rows + more), **change})
    assert len(after.test) > len(before.test)
    trained = {question.replace("  ", " ") for question in questions_of(before.train)}
    tested = {question.replace("  ", " ") for question in questions_of(after.test)}
    assert not trained & tested


def test_a_validation_split_is_used_to_test_on_with_a_note(tmp_path):
    for split, start in (("train", 0), ("validation", 50)):
        write_jsonl(tmp_path / f"{split}.jsonl", [{"question": f"{start + i}?", "answer": i} for i in range(5)])
    task = load_task({"dataset_name": str(tmp_path)})
    assert task.test["prompt"][0][-1]["content"] == "50?"
    assert [(str(tmp_path) in note, "validation" in note) for note in task.notes] == [(True, True)]


WRITTEN = ["9007199254740993", "2.5", "2.50", "1e400", "007", "1.10", "2024-05-01", "-0.0", "1" * 5000]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "folder"])
def test_answers_are_read_as_they_are_written(tmp_path, kind):
    """Not by a reader that types a column: the last digit of a large number, a zero and a date would change."""
    as_number = [text for text in WRITTEN if text not in ("007", "2024-05-01")]
    cells = [text if text in as_number and kind != "csv" else json.dumps(text) for text in WRITTEN]
    if kind == "csv":
        text = "question,answer\n" + "".join(f"{i}?,{value}\n" for i, value in enumerate(WRITTEN))
    else:
        rows = [f'{{"question": "{i}?", "answer": {cell}}}' for i, cell in enumerate(cells)]
        text = f"[{', '.join(rows)}]" if kind == "json" else "\n".join(rows)
    path = tmp_path / f"test.{'jsonl' if kind == 'folder' else kind}"
    path.write_text(text)
    (tmp_path / f"train{path.suffix}").write_text(text)
    name = str(tmp_path) if kind == "folder" else str(path)
    settings = {"dataset_name": name} if kind == "folder" else {"dataset_name": name, "dataset_test_name": name}
    task = load_task(settings)
    assert task.train["answer"][:] == task.test["answer"][:] == WRITTEN


def test_a_column_of_a_typed_file_is_converted_exactly_or_refused(tmp_path):
    def golds(column):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet"
        pq.write_table(pa.table({"question": [f"{i}?" for i in range(len(column))], "answer": column}), path)
        return load_task({"dataset_name": str(path), "dataset_test_name": str(path)}).test["answer"][:]

    assert golds(pa.array([Decimal("1.10"), Decimal("2.00")])) == ["1.10", "2.00"]
    assert golds(pa.array([0.1, 6e23], pa.float32())) == ["0.1", "6e+23"]
    assert golds(pa.array([2**63 - 1, -1])) == ["9223372036854775807", "-1"]
    assert golds(pa.array([27.0, 6.02e23])) == ["27.0", "6.02e+23"]
    for column, message in [
        (pa.array([9007199254740993.0, 2.5]), "row 1 "),
        (pa.array([2.5, math.nan]), "row 2 "),
        (pa.array([date(2024, 5, 1)]), "row 1 .*2024-05-01"),
        (pa.array([[1], [2]]), r"row 1 .*\[1\]"),
    ]:
        with pytest.raises(UserError, match=message):
            golds(column)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("\frac12", r"'\\x0crac12': .*backslash"),
        ("we get #### 3\neq 4", "backslash"),
        ("4\x01", r"U\+0001"),
        ("caf\ufffd", r"U\+FFFD"),
        (r"\boxed{}", "empty"),
        (r"so \boxed{5", "braces"),
        (r"\left(1, 2)", r"\\left .*\\right"),
    ],
)
def test_a_gold_answer_that_no_completion_can_match_is_refused_with_its_row(tmp_path, answer, message):
    name = write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"question": "2+2?", "answer": answer}])
    with pytest.raises(UserError, match=f"row 3 .*{message}"):
        load_task({"dataset_name": name, "dataset_test_name": name})


@pytest.mark.parametrize("answer", [r"\frac{1}{2}", r"\left\{1, 2\right\}", "]0,1[", "a\tb", "x\r\ny", "-"])
def test_an_answer_that_only_looks_odd_is_accepted(tmp_path, answer):
    name = write_jsonl(tmp_path / "a.jsonl", [{"question": f"{i}?", "answer": answer} for i in range(2)])
    assert load_task({"dataset_name": name, "dataset_test_name": name}).test["answer"][0] == answer.strip()


def test_a_reward_of_the_users_own_may_read_gold_answers_of_any_form(tmp_path):
    cases = "{\n\t'in': [1"
    name = write_jsonl(tmp_path / "a.jsonl", [{"question": "Write f.", "answer": cases}])
    settings = {"dataset_name": name, "dataset_test_name": name, "reward_seconds": None}
    assert load_task({**settings, "task_rewards": {"operator:eq": 1.0}}).test["answer"][0] == cases
    with pytest.raises(UserError, match="braces"):
        load_task({**settings, "task_rewards": {"operator:eq": 1.0, "accuracy": 0.5}})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '{"question": "a", "answer": "1"},\n', "line 1: .*JSON"),
        ("a.json", '{"question": "a", "answer": "\\sqrt2"}', "line 1: .*backslash"),
        ("a.json", '{"data": [{"question": "a", "answer": "1"}]}', "columns data, "),
        ("a.json", "1\n2\n", "line 1: is 1;"),
        ("a.json", '{"question": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested"),
        ("a.csv", "question;answer\na;5\n", "question;answer"),
        ("a.csv", "question,answer\na, b?,5\n", "line 2: .*3 "),
        ("a.csv", "question,answer\na?\n", "row 1 .*null"),
        ("a.csv", 'question,answer\n"a?,5\n', "CSV"),
        ("empty.jsonl", "", "empty.jsonl"),
        ("words.parquet", "hello\n", "words.parquet .*'train'"),
        ("odd.jsonl", '{"q": "a", "a": "1"}\n', "q, a, .*prompt, question, problem"),
        ("notes.txt", "hello", r"\.txt; .*\.jsonl"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line_and_what_to_do(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_task({"dataset_name": str(path), "dataset_test_name": str(path)})


@pytest.mark.parametrize("kind", ["bom", "crlf", "blank", "list", "indented", "csv"])
def test_files_as_other_programs_write_them(tmp_path, kind):
    lines = [json.dumps({"question": f"{i}?", "answer": str(i)}) for i in range(3)]
    path = tmp_path / ("a.csv" if kind == "csv" else "a.jsonl")
    text = {
        "bom": "\ufeff" + "\n".join(lines),
        "crlf": "\r\n".join(lines) + "\r\n",
        "blank": "\n\n".join(lines) + "\n\n",
        "list": f"[{','.join(lines)}]",
        "indented": json.dumps([json.loads(line) for line in lines], indent=2),
        "csv": '\ufeffquestion, answer\r\n"0?", "0"\r\n1?,1\r\n\r\n2?,2\r\n',
    }[kind]
    path.write_bytes(text.encode())
    task = load_task({"dataset_name": str(path), "dataset_test_name": str(path), "system_prompt": ""})
    assert task.train["answer"][:] == ["0", "1", "2"]
    assert task.train["prompt"][0] == [{"role": "user", "content": "0?"}]


@pytest.mark.parametrize(
    ("kind", "few_rows"), [("parquet", 2), ("folder", 1000), ("gz", 1000), ("saved", 2), ("large text", 2)]
)
def test_a_file_that_replaces_another_of_the_same_size_and_time_is_read(tmp_path, monkeypatch, kind, few_rows):
    """As `cp -p`, `rsync -t` and `tar` do; with few rows in memory the prompts are in a file of the cache too."""
    monkeypatch.setattr("pods_rl.tasks.files._IN_MEMORY", 10)
    monkeypatch.setattr("pods_rl.tasks.prompts._FEW_ROWS", few_rows)
    place = tmp_path / "data"
    place.mkdir()

    def write(digit):
        rows = datasets.Dataset.from_list([{"question": f"{row}?", "answer": digit} for row in range(5)])
        if kind == "saved":
            rows._fingerprint = "same"
            rows.save_to_disk(place)
        elif kind == "gz":
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (place / "train.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        elif kind == "large text":
            write_jsonl(place / "train.jsonl", list(rows))
        else:
            rows.to_parquet(place / "train.parquet")
        for file in place.iterdir():
            os.utime(file, ns=(10**18, 10**18))
        file = {"parquet": place / "train.parquet", "large text": place / "train.jsonl"}.get(kind, place)
        test = "train" if kind in ("folder", "gz") else str(file)
        return load_task({"dataset_name": str(file), "dataset_test_name": test})

    assert set(write("1").train["answer"]) == {"1"}
    assert set(write("2").train["answer"]) == {"2"}
    assert set(write("1").train["answer"]) == {"1"}


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
        (chat(), r"question .*\[\]"),
        (chat(USER, {"role": "assistant", "content": "4"}), "row 2 .*role assistant"),
        (chat({"role": "system", "content": "Add."}), "row 2 .*question"),
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
        ({"dataset_name": train.replace("train", "trian")}, "train.jsonl"),
        ({**files, "question_column": "quesiton"}, "question, answer"),
        ({"task": "dataset"}, "dataset_name"),
        ({"dataset_name": str(tmp_path), "dataset_train_split": "dev"}, "test.jsonl, train.jsonl.*'dev'"),
    ]
    for settings, message in cases:
        with pytest.raises(UserError, match=message):
            load_task(settings)


def test_every_task_of_a_recipe_is_in_the_table_and_on_its_page():
    assert tuple(TASKS) == schema.TASKS
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| .* \| `(\w+)` \|$", page, re.MULTILINE))
    assert rows == {name: entry.answer for name, entry in TASKS.items()}
    for entry in TASKS.values():
        assert not entry.folders or all(f"`{hub_id}`" in page for hub_id in entry.source.split(", "))


def listwise(completions, **kwargs):
    return [0.0] * len(completions)


def test_a_reward_in_trls_form_is_refused_with_the_form_to_write(files):
    with pytest.raises(UserError, match=r"listwise' .*\(text: str, gold: str\) -> float"):
        load_task({**files, "task_rewards": {f"{__name__}:listwise": 1.0}})


def test_many_rows_are_kept_in_a_file_that_is_read_again(tmp_path, monkeypatch):
    """Prompts of a large file must not be held in the memory of each process."""
    monkeypatch.setattr("pods_rl.tasks.prompts._FEW_ROWS", 5)
    name = write_jsonl(tmp_path / "a.jsonl", [{"question": f"{i}+0?", "answer": i} for i in range(50)])
    both = {"dataset_name": name, "dataset_test_name": name}
    first = load_task(both)
    again = load_task(both)
    assert [Path(file["filename"]).suffix for file in first.train.cache_files] == [".arrow"]
    assert again.train.cache_files == first.train.cache_files
    assert first.train["answer"][:] == [str(i) for i in range(50)]
    assert load_task({**both, "system_prompt": "Add."}).train["prompt"][0] != first.train["prompt"][0]


def test_the_hashes_of_a_tasks_rows_are_those_of_their_contents_and_order(tmp_path):
    """Whatever the file is called and however it is written; another answer, order or split is another hash."""
    plain = {"prompt_style": "plain", "system_prompt": ""}

    def hashes(rows, name="train.jsonl"):
        path = write_jsonl(tmp_path / name, rows)
        return row_hashes(load_task({"dataset_name": path, "dataset_test_name": path, **plain}))

    first = hashes(ROWS)
    assert first["train"] == first["test"]
    assert hashes(ROWS, "other.jsonl") == first
    assert hashes([dict(reversed(row.items())) for row in ROWS]) == first
    changed = [ROWS[0], {**ROWS[1], "answer": "#### 1,201"}]
    others = [hashes(ROWS[::-1]), hashes(ROWS[:1]), hashes(changed), hashes([*ROWS, ROWS[0]])]
    assert len({first["train"], *(other["train"] for other in others)}) == 5


@pytest.mark.parametrize("message", ["Couldn't reach 'owner/set' on the Hub (X)", "Couldn't find cache for owner/set"])
@pytest.mark.parametrize("settings", [{"task": "gsm8k"}, {"dataset_name": "owner/set"}])
def test_without_a_network_the_hub_is_named_and_not_the_data(monkeypatch, settings, message):
    def unreachable(*_, **__):
        raise ConnectionError(message) if "reach" in message else ValueError(message)

    for name in ("load_dataset", "get_dataset_split_names"):
        monkeypatch.setattr(sources, name, unreachable)
    with pytest.raises(UserError, match=r"hub .*--data_dir") as refused:
        load_task(settings)
    assert "\n" not in str(refused.value)
