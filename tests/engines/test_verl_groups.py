"""The part of the verl engine that needs no verl: groups of keys, what is kept of them, what is logged."""

import json
import math
import random
import re
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import pods_rl
from pods_rl.engines.verl import VERSIONS
from pods_rl.engines.verl.groups import Group, choose, group_keys
from pods_rl.engines.versions import check_version
from pods_rl.errors import UserError
from pods_rl.tasks import load_task
from pods_rl.tasks.scoring import check_sources, compute_score

SHIPPED = Path(pods_rl.__file__).parent / "recipes" / "verl"


def test_known_versions_of_verl_are_accepted_and_others_refused():
    for installed in (None, "0.9.0", "0.9.1+local", "0.10.0.dev0", "0.10.0.dev"):
        check_version("verl", installed, VERSIONS, example="0.9.1")
    for installed in ("0.8.0", "0.9.2", "0.11.0", "0.9.10"):
        with pytest.raises(UserError, match=rf"^verl {installed} .* 0.9.0, 0.9.1, "):
            check_version("verl", installed, VERSIONS, example="0.9.1")


def test_keys_in_any_order_give_the_same_sessions():
    keys = [f"{uid}_{session}_{index}" for uid in "ab" for session in (0, 2, 10) for index in range(11)]
    shuffled = random.Random(0).sample(keys, len(keys))
    found = {group.uid: group for group in group_keys(shuffled)}
    assert found == {group.uid: group for group in group_keys(keys)}
    assert [keys[-1] for keys in found["a"].sessions] == ["a_0_10", "a_2_10", "a_10_10"]  # by number: 10 after 2
    assert group_keys(["my_prompt-1_3_0"]) == [Group("my_prompt-1", (("my_prompt-1_3_0",),))]


def test_a_rule_of_ones_own_never_gets_an_unscored_session_trained():
    def first(rewards_PN, m, *, generator=None):
        return torch.arange(m).expand(rewards_PN.shape[0], m)

    assert choose(torch.tensor([[math.nan, 1.0, 0.0, 0.5]]), 2, first).tolist() == [[False, True, False, False]]


def test_rows_that_our_reward_function_cannot_score_are_refused_before_a_model_loads(tmp_path):
    def write(name, *sources):
        table = pa.table({"data_source": sources, "prompt": ["1+1="] * len(sources)})
        if name.endswith("parquet"):
            pq.write_table(table, tmp_path / name)
        else:
            (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
        return str(tmp_path / name)

    for form in ("parquet", "jsonl"):
        good, unknown = write(f"good.{form}", "arithmetic", "words"), write(f"unknown.{form}", "sums")
        check_sources([good, None, [good]], "data_source")
        check_sources([str(tmp_path / "elsewhere.parquet")], "data_source")  # verl reports it
        with pytest.raises(UserError, match=f"^{re.escape(unknown)}: .*'sums'"):
            check_sources([None, [good, unknown]], "data_source")


def test_scores_are_the_tasks_own():
    task = load_task({"task": "arithmetic", "task_train_size": 1, "task_test_size": 1})
    gold = task.test["answer"][0]
    for text in (f"<think>a</think><answer>{gold}</answer>", f"<answer>{gold}</answer>", "no answer"):
        found = compute_score("arithmetic", text, gold, extra_info={})
        marks = {name: task.scores(name, [text], [gold])[0] for name in task.rewards}
        total = sum(weight * marks[name] for name, weight in task.rewards.items())
        assert found == {"score": pytest.approx(total), "acc": float(task.grade([text], [gold])[0].answer), **marks}


def test_a_prompt_that_opens_a_thought_is_said_by_a_keyword():
    text = "1+1=2</think><answer>2</answer>"
    assert compute_score("arithmetic", text, "2", opens_thought=True)["format"] == 1.0
    assert compute_score("arithmetic", text, "2")["format"] == 0.0
    assert compute_score("arithmetic", "so <answer>2</answer>", "2", opens_thought=True)["acc"] == 0.0


def launch(tmp_path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The launch script with `echo` in place of Python and Ray: what it would run."""
    for name in ("ray", "echoing-python"):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\ncase "$*" in *ray.init*) echo 2;; *) echo {name} "$@";; esac\n')
        path.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "echoing-python", **variables}
    command = ["bash", str(SHIPPED / "launch.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_the_launch_script_on_one_node_and_on_several(tmp_path):
    for name, estimator in (("grpo", "grpo"), ("ppo", "gae"), ("rloo", "rloo")):
        done = launch(tmp_path, "trainer.total_epochs=2", ESTIMATOR=name)
        assert done.returncode == 0, done.stderr
        assert f"algorithm.adv_estimator={estimator} trainer.nnodes=1 trainer.n_gpus_per_node=8" in done.stdout
        assert done.stdout.rstrip().endswith("trainer.total_epochs=2")
    head = launch(tmp_path, NODES="2", HEAD_ADDRESS="10.0.0.1")
    assert head.returncode == 0, head.stderr
    started, trained, stopped = head.stdout.splitlines()
    assert started == "ray start --head --node-ip-address 10.0.0.1 --port 6379 --num-gpus 8"
    assert "data.train_batch_size=32" in trained
    assert "trainer.nnodes=2" in trained
    assert trained.endswith("+ray_kwargs.ray_init.address=auto")
    assert stopped == "ray stop"
    other = launch(tmp_path, NODES="2", RANK="1", HEAD_ADDRESS="10.0.0.1")
    assert other.stdout == "ray start --address 10.0.0.1:6379 --num-gpus 8 --block\n"

    unknown = launch(tmp_path, ESTIMATOR="grop")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "'grop'" in unknown.stderr
    lost = launch(tmp_path, NODES="2")
    assert lost.returncode != 0
    assert "HEAD_ADDRESS" in lost.stderr
