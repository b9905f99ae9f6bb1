"""`pods tasks`: the list, the check of gold answers, its counts on the published files, and its exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import datasets
import pytest
from typer.testing import CliRunner

from pods_rl.cli import app
from pods_rl.cli.catalog import _REFUSALS_SHOWN
from pods_rl.errors import UserError
from pods_rl.recipe.schema import TASKS
from pods_rl.tasks import Task
from pods_rl.tasks.task import check_split

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(autouse=True)
def own_place(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def pods(*words: str):
    return CliRunner().invoke(app, ["tasks", *words], catch_exceptions=False, env={"COLUMNS": "80"})


def lines_of(result) -> list[str]:
    return [" ".join(line.split()) for line in result.output.splitlines()]


def broken(settings):
    """A task with gold answers that its grader does not accept; one of them would steer a terminal."""
    golds = ["5", "<answer>\x1b[2J[red]", *["</answer>"] * (2 * _REFUSALS_SHOWN)]
    split = datasets.Dataset.from_dict({"prompt": [f"{i}?" for i in range(len(golds))], "answer": golds})
    return Task("broken", "1", split, split, {"accuracy": 1.0})


def test_the_list_says_of_each_task_what_it_is_and_fits_80_columns():
    result = pods()
    assert result.exit_code == 0
    assert [line for line in result.output.splitlines() if not line.startswith(" ")] == list(TASKS)
    assert max(map(len, result.output.splitlines())) <= 80
    assert "  from     openai/gsm8k\n  local    folder gsm8k of --data_dir\n" in result.output
    assert "  local    folder math500 or math of --data_dir\n" in result.output  # MATH to train on has its own
    assert "  rewards  countdown 1, format 0.1, tag_count 1\n" in result.output


def test_generated_tasks_are_checked():
    result = pods("check", "countdown", "sorting", "--task_train_size", "20", "--task_test_size=6")
    assert result.exit_code == 0
    assert lines_of(result)[0] == "countdown"
    assert lines_of(result).count("train 20 prompts, 20 gold answers accepted (100 %), mean reward 1.2") == 2
    assert lines_of(result).count("both 26 prompts") == 2
    assert max(map(len, result.output.splitlines())) <= 80


def test_a_grader_that_refuses_its_gold_is_said_and_fails():
    result = pods("check", f"{__name__}:broken")
    assert result.exit_code == 1
    lines = lines_of(result)
    assert "train 22 prompts, 1 gold answers accepted (4.545 %), mean reward 0.04545" in lines
    assert r"row 2 (counted from 1): not accepted: '<answer>\x1b[2J[red]'" in lines
    assert lines.count("and 11 more") == 2
    assert "\x1b" not in result.output
    assert "note: 22 test prompts are also training prompts" in lines


def test_a_task_that_cannot_be_loaded_fails_and_the_others_are_still_checked(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr("pods_rl.tasks.sources.load_dataset", unreachable)
    result = pods("check", "math", "sorting", "--task_train_size", "5", "--task_test_size", "2")
    assert result.exit_code == 1
    assert "not loaded: no local file or folder is called 'DigitalLearningGmbH/MATH-lighteval'" in result.output
    assert "train 5 prompts, 5 gold answers accepted (100 %), mean reward 1.2" in lines_of(result)


def test_ones_own_data_set_is_checked():
    Path("a.jsonl").write_text("".join(json.dumps({"question": f"{i}+1?", "answer": i + 1}) + "\n" for i in range(3)))
    result = pods("check", "dataset", "--dataset_name", "a.jsonl", "--dataset_test_name", "a.jsonl")
    assert result.exit_code == 0
    assert "both 6 prompts" in lines_of(result)


def test_conversations_are_checked():
    turns = [{"role": role, "content": "1+1?"} for role in ("user", "assistant", "user")]
    for name, last in (("train", "2+2?"), ("test", "2+2?"), ("other", "3+3?")):
        prompt = [*turns[:-1], {"role": "user", "content": last}]
        Path(f"{name}.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")
    words = ("check", "dataset", "--dataset_name", "train.jsonl", "--dataset_test_name")
    assert "note: 1 test prompt is also a training prompt" in lines_of(pods(*words, "test.jsonl"))
    assert not any(line.startswith("note") for line in lines_of(pods(*words, "other.jsonl")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "gsm8"], r"unknown name gsm8. Did you mean gsm8k"),
        (["check", "sorting", "--task_trian_size", "5"], "task_trian_size: unknown key"),
        (["check", "--data_dir", "."], "expected a task's folder, or a folder with some of gsm8k, math500"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(UserError, match=message):
        pods(*words)


def test_all_tasks_means_all_that_need_nothing_named(monkeypatch):
    asked = []
    monkeypatch.setattr("pods_rl.cli.catalog._check_task", lambda name, *_: asked.append(name) or True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert pods("check").exit_code == 0
    assert asked == [name for name in TASKS if name not in ("dataset", "reasoning_gym")]


def test_progress_counts_rows():
    done = []
    task = broken({})
    check_split(task, "test", done.append)
    assert done == [22]


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no published data in {SHARED.name} beside the repository")
def test_the_published_files_are_counted_and_every_gold_answer_is_accepted():
    result = pods("check", "--data_dir", str(SHARED))
    assert result.exit_code == 0
    lines = lines_of(result)
    pattern = re.compile(r"(train|test|both) +(\d+) prompts(?:, +(\d+) gold answers accepted \(100 %\))?")
    counts = [pattern.match(line) for line in lines]
    assert [match.groups() for match in counts if match] == [
        ("train", "7473", "7473"),
        ("test", "1319", "1319"),
        ("both", "8792", None),
        ("test", "500", "500"),
        ("both", "500", None),
        ("train", "2794", "2794"),
        ("test", "675", "675"),
        ("both", "3469", None),
    ]
    assert "train no prompts: this task can be evaluated, not trained on" in lines
    assert "equation 48, multiple choice 584, true or false 43" in lines
