"""`pods tasks`: the list, the check of gold answers, its counts on the published files, and its exit code."""

import re
from pathlib import Path

import datasets
import pytest

from pods_rl.cli.catalog import _REFUSALS_SHOWN
from pods_rl.errors import UserError
from pods_rl.recipe.schema import TASKS
from pods_rl.tasks import Task

from ..rewards.data import FOLDER
from . import pods


@pytest.fixture(autouse=True)
def own_place(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def lines_of(result) -> list[str]:
    return [" ".join(line.split()) for line in result.output.splitlines()]


def broken(settings):
    """A task with gold answers that its grader does not accept; one of them would steer a terminal."""
    golds = ["5", "<answer>\x1b[2J[red]", *["</answer>"] * (2 * _REFUSALS_SHOWN)]
    split = datasets.Dataset.from_dict({"prompt": [f"{i}?" for i in range(len(golds))], "answer": golds})
    return Task("broken", "1", split, split, {"accuracy": 1.0})


def test_the_list_says_of_each_task_what_it_is_and_fits_80_columns():
    result = pods("tasks")
    assert result.exit_code == 0
    names = [line for line in result.output.splitlines() if not line.startswith(" ")]
    assert names == [*TASKS, "reasoning_gym:NAME"]
    assert max(map(len, result.output.splitlines())) <= 80
    assert "openai/gsm8k" in result.output
    assert "chemistry 1, format 0.1, tag_count 1" in result.output


def test_generated_tasks_are_checked():
    result = pods("tasks", "check", "words", "arithmetic", "--task_train_size", "20", "--task_test_size=6")
    assert result.exit_code == 0
    assert sum(line.startswith("train 20 prompts, 20 ") for line in lines_of(result)) == 2


def test_a_grader_that_refuses_its_gold_is_said_and_fails():
    result = pods("tasks", "check", f"{__name__}:broken")
    assert result.exit_code == 1
    lines = lines_of(result)
    assert any(re.match(r"train 22 prompts, 1 .*, 21\b", line) for line in lines)
    assert any(line.startswith("row 2 ") and line.endswith(r"'<answer>\x1b[2J[red]'") for line in lines)
    assert "\x1b" not in result.output
    assert any(line.startswith("note: 22 ") for line in lines)


def test_a_check_without_a_name_is_of_the_data_set_or_refused():
    Path("bad.jsonl").write_text('{"question": "1+1?", "answer": "</answer>"}\n')
    result = pods("tasks", "check", "--dataset_name", "bad.jsonl", "--dataset_test_name", "bad.jsonl")
    assert result.exit_code == 1
    assert lines_of(result)[0] == "dataset"
    with pytest.raises(UserError, match="pods tasks check"):
        pods("tasks", "check", "--use_cpu", "gsm8k")


def test_a_task_that_cannot_be_loaded_fails_and_the_others_are_still_checked(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr("pods_rl.tasks.sources.load_dataset", unreachable)
    result = pods("tasks", "check", "math", "words", "--task_train_size", "5", "--task_test_size", "2")
    assert result.exit_code == 1
    assert "DigitalLearningGmbH/MATH-lighteval" in result.output
    assert "--data_dir" in result.output
    assert any(line.startswith("train 5 prompts, 5 ") for line in lines_of(result))


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no published data in {FOLDER.name} beside the repository")
def test_the_published_files_are_counted_and_every_gold_answer_is_accepted():
    result = pods("tasks", "check", "gsm8k", "math", "sciknoweval_chemistry", "--data_dir", str(FOLDER))
    assert result.exit_code == 0
    assert "refused" not in result.output
    counts = re.findall(r"(?:train|test) +(\d+) prompts, +(\d+) gold answers accepted, mean", result.output)
    assert [int(prompts) for prompts, _ in counts] == [7473, 1319, 0, 500, 2794, 675]
    assert all(prompts == accepted for prompts, accepted in counts)
