"""What a recipe may say of its task, refused before anything heavy is loaded."""

import re
from pathlib import Path

import pytest

from pods_rl import tasks
from pods_rl.errors import UserError
from pods_rl.recipe import Origin, build_recipe


def build(**values):
    return build_recipe({"max_steps": 1, "model_name_or_path": "tiny", **values}, Origin("test"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "gsm8"}, r"gsm8k\?"),
        ({"task": "dataset", "data_dir": ".", "dataset_name": "a/b"}, "data_dir"),
        ({"task": "countdown", "task_options": {"a": 1}}, "task_options"),
        ({"task": "reasoning_gym:chain_sum", "task_difficulty": "hard"}, "task_difficulty"),
        ({"dataset_name": __file__, "dataset_config": "main"}, "dataset_config = main "),
        ({"max_prompt_length": 0}, "max_prompt_length: "),
    ],
)
def test_what_a_task_does_not_read_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        build(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"task": "gsm8k", "question_column": "q", "answer_column": "a", "dataset_train_split": "train[:9]"},
        {"task": "reasoning_gym:chain_sum", "task_seed": 3, "task_options": {"max_terms": 4}},
        {"task": "reasoning_gym:chain_sum", "task_rewards": {"reasoning_gym": 2.0}},
        {"task": "mine.tasks:make", "question_column": "q", "task_seed": 3, "task_difficulty": "hard"},
        {"task": "gsm8k", "task_seed": 0, "task_difficulty": "mixed", "dataset_test_name": None},  # defaults
    ],
)
def test_what_a_task_reads_or_has_by_default_is_accepted(values):
    build(**values)


def test_the_page_of_tasks_lists_the_table():
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| .* \| `(\w+)` \|$", page, re.MULTILINE))
    assert rows == {name: entry.answer for name, entry in tasks.TASKS.items()}
    hub_ids = [part for entry in tasks.TASKS.values() if entry.folders for part in entry.source.split(", ")]
    assert all(f"`{hub_id}`" in page for hub_id in hub_ids)
