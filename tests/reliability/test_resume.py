"""A killed run that is resumed ends as if nothing had happened: weights, optimizer, selections, rewards, data order.

Each run is killed for good (SIGKILL) in a process of its own, and resumed by `pods train --resume` in another.
"""

from __future__ import annotations

import shutil
import signal

import pytest

from pods_rl.runs import Run

from .commands import differences, outcome
from .resume_runs import CONFIGURATIONS, prepare, train, train_and_kill

STEPS = range(1, 9, 2)
CALLS_OF_AN_EVALUATION = 4  # before the first step: the display shows the reward that is trained
CALLS_A_GENERATION = 16  # two prompts, eight rollouts each
FRESH = ("--config", "r.yaml", "--output")
RESUMED = ("--resume", "--output")


def compare(expected: Run, found: Run) -> list[str]:
    return differences(outcome(expected.path), outcome(found.path))


def test_steps_since_the_last_checkpoint_are_made_again(tmp_path):
    """The sample of all. The checkpoint has half of a generation and of a log line; the next generation is killed."""
    prepare(tmp_path, "steps_per_generation 4", save_steps=5, max_steps=9)
    whole = train(tmp_path, *FRESH, "whole")
    assert [row["step"] for row in whole.metrics] == [3, 6, 9]
    assert len({row["grad_norm"] for row in whole.metrics} - {0.0}) > 1
    (tmp_path / "kill-at-call").write_text(str(CALLS_OF_AN_EVALUATION + 2 * CALLS_A_GENERATION + 3))
    killed = train(tmp_path, *FRESH, "killed", code=-signal.SIGKILL)
    assert [row["step"] for row in killed.metrics] == [3, 6]
    assert [path.name for path in killed.checkpoints()] == ["checkpoint-5"]
    (tmp_path / "kill-at-call").unlink()
    assert compare(whole, train(tmp_path, *RESUMED, "killed")) == []
    # A run that was killed after its last step has nothing left to train.
    shutil.copytree(whole.path, tmp_path / "over")
    assert compare(whole, train(tmp_path, *RESUMED, "over")) == []


def test_what_could_not_go_on_exactly_is_refused_and_loses_nothing(tmp_path):
    prepare(tmp_path, "plain", max_steps=2, save_steps=1, eval_prompts=0)
    before = train(tmp_path, *FRESH, "run")
    kept = (before.metrics, before.rollout_files())
    assert len(kept[0]) == len(kept[1]) == 2
    names = ("status.json", "config.yaml", "environment.json", "metrics.jsonl")
    files = {name: (tmp_path / "run" / name).read_bytes() for name in names}
    refused = {  # by the recipe, by the task, by the policy
        "ignore_data_skip": ["--ignore_data_skip", "true"],
        "nowhere": ["--task_rewards", "{nowhere:reward: 1.0}"],
        "nonsense": ["--use_peft", "true", "--lora_target_modules", "[nonsense]"],
    }
    for words, changes in refused.items():
        changes = ["--max_steps", "3", "--allow_changed_recipe", *changes]
        after = train(tmp_path, *RESUMED, "run", *changes, code=2)
        said = " ".join((tmp_path / "log.txt").read_text().split())
        assert words in said
        assert (after.metrics, after.rollout_files()) == kept
        assert {name: (tmp_path / "run" / name).read_bytes() for name in names} == files, words


@pytest.mark.reliability
@pytest.mark.timeout(7200)
def test_every_kill_in_every_configuration(tmp_path):
    wrong = {}
    for number, name in enumerate(CONFIGURATIONS):
        folder, processes = tmp_path / str(number), 2 if name == "2 processes" else 1
        prepare(folder, name)
        whole = train(folder, *FRESH, "whole", processes=processes)
        for step in STEPS:
            train_and_kill(folder, f"killed-{step}", step, processes)
            resumed = train(folder, *RESUMED, f"killed-{step}", processes=processes)
            different = compare(whole, resumed)
            if different:
                wrong[f"{name}, step {step}"] = different
            else:
                shutil.rmtree(resumed.path)
        if processes == 2:  # one process cannot go on for two
            train(folder, *RESUMED, "whole", code=2)
            assert "--num_processes 2" in " ".join((folder / "log.txt").read_text().split())
    assert wrong == {}
