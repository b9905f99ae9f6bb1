"""Whole runs through the real commands, with a random policy small enough to train in a second."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tools.pretrain import build_tokenizer

from pods_rl.errors import UserError
from pods_rl.loading.folders import find_policy
from pods_rl.loading.prepare import prepare
from pods_rl.recipe import Origin, build_recipe
from pods_rl.runs import Run, find_runs
from pods_rl.training.run import train

from .. import DEADLINE, read_csv
from . import pods
from .conftest import RECIPE


def test_train_resume_and_evaluate(place):
    output = pods("train", "--config", "r.yaml", "--output", "run").output
    run = Run.open("run")
    assert run.evals[0]["accuracy"] == run.evals[0]["format_accuracy"] == 0
    assert "Warning: " in output
    assert run.state == "finished"
    assert run.config["num_rollouts"] == 4
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert [row["step"] for row in run.evals] == [0, 3]
    assert [path.name for path in run.rollout_files()] == [f"step-00000{step}.parquet" for step in (1, 2, 3)]
    pods("train", "--output", "run", "--resume", "--max_steps", "4")
    run = Run.open("run")
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    pods("eval", "--run", "run", "--output", "results")
    (line,) = Path("results/results.jsonl").read_text().splitlines()
    assert json.loads(line)["n-samples"] == {"arithmetic": {"original": 512, "effective": 4}}


@pytest.mark.slow
def test_a_run_does_not_resume_on_other_contents_unless_allowed(place, monkeypatch):
    """Its data, an import of its reward and its policy change; the directory stays as it was."""
    monkeypatch.syspath_prepend(str(place))
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]
    data = place / "train.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    (place / "judge_of_lengths.py").write_text(
        "from size_of_text import size\n\ndef judge(text, gold):\n    return size(text)\n"
    )
    (place / "size_of_text.py").write_text("size = len\n")
    words = ["--dataset_name", "train.jsonl", "--task_rewards", "{judge_of_lengths:judge: 1.0}", "--max_steps", "2"]
    words += ["--reward_seconds", "null", "--eval_prompts", "0", "--prompt_style", "plain"]
    pods("train", "--config", "r.yaml", "--output", "run", *words)
    kept = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file() and path.name != ".lock"}
    longer = ("train", "--output", "run", "--resume", "--max_steps", "3")
    weights = bytearray(Path("policy/model.safetensors").read_bytes())
    weights[-1] ^= 1
    changes = {
        "dataset_name": (data, data.read_bytes().replace(b'"20"', b'"21"')),
        "modules": (place / "size_of_text.py", b"size = int\n"),
        "model_name_or_path": (place / "policy" / "model.safetensors", bytes(weights)),
    }
    for key, (file, changed) in changes.items():
        whole = file.read_bytes()
        file.write_bytes(changed)
        with pytest.raises(UserError, match=rf"{key} \({file.name}\).*--allow_changes"):
            pods(*longer)
        file.write_bytes(whole)
        assert {path: path.read_bytes() for path in kept} == kept, key
    # rows that no named file explains, as those of a task of one's own or of the hub
    monkeypatch.setattr("pods_rl.training.run.row_hashes", lambda task: {"train": "0", "test": "0"})
    with pytest.raises(UserError, match=r"prompts \(test, train\)"):
        pods(*longer)
    assert {path: path.read_bytes() for path in kept} == kept
    pods(*longer, "--allow_changes")
    assert Run.open("run").step == 3


def brevity(text, gold):
    return 1.0 - len(text) / 1000


def test_a_run_on_a_users_own_reward_shows_that_reward_everywhere(place):
    rewards = json.dumps({f"{__name__}:brevity": 1.0})
    words = ["--task_rewards", rewards, "--reward_seconds", "null", "--max_steps", "1"]
    output = pods("train", "--config", "r.yaml", "--output", "run", *words).output
    run = Run.open("run")
    shown = [line for line in output.splitlines() if "step     0 " in line]
    assert shown[0].split()[-2:] == ["reward", f"{run.evals[0]['reward']:.3f}"]
    assert "accuracy" not in output
    assert "Warning" not in output
    assert 0 < run.evals[0]["reward"] == run.evals[0][f"reward/{__name__}:brevity"] < 1
    assert "accuracy" not in run.evals[0]
    assert len(run.metrics) == 1  # the log of an evaluation is not a step
    summary = pods("report", "run").output
    assert "reward" in summary
    assert "accuracy" not in summary
    assert "accuracy" not in pods("eval", "--run", "run", "--output", "results").output
    (line,) = Path("results/results.jsonl").read_text().splitlines()
    assert {"reward", "reward_stderr"} <= set(json.loads(line)["results"]["arithmetic"])


def test_a_dry_run_refuses_the_data_that_training_refuses(place):
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]
    damaged = [*rows, {"question": "1/2?", "answer": "\frac12"}]
    for name, written in (("good", rows), ("damaged", damaged), ("few", rows[:2])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    words = ["--config", "r.yaml", "--task", "dataset", "--prompt_style", "plain", "--system_prompt", ""]
    words += ["--per_device_train_batch_size", "4"]
    for name, message in (("damaged", "row 21 .*a backslash was lost"), ("few", "The data hold 1 training prompt")):
        with pytest.raises(UserError, match=message):
            pods("train", *words, "--dataset_name", f"{name}.jsonl", "--dry_run")
        with pytest.raises(UserError, match=message):
            pods("train", *words, "--dataset_name", f"{name}.jsonl", "--output", name)
    note = "Note: good.jsonl (train) has no test split. Of its 20 rows 19 are for training and 1 for testing"
    output = pods("train", *words, "--dataset_name", "good.jsonl", "--dry_run").output
    assert note in output
    assert "rollouts" in output
    assert note in pods("train", *words, "--dataset_name", "good.jsonl", "--output", "run", "--max_steps", "1").output
    with pytest.raises(UserError, match=r"^run "):
        pods("train", *words, "--dataset_name", "good.jsonl", "--output", "run", "--dry_run")


def test_a_dry_run_says_what_it_cannot_check_without_the_hub(place, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("a.jsonl").write_text('{"question": "1+1=", "answer": "\\frac12"}\n')
    words = ["train", "--config", "r.yaml", "--dry_run"]
    assert "task = gsm8k" in pods(*words, "--task", "gsm8k").output
    remote = [*words, "--model_name_or_path", "no/model"]
    assert "model_name_or_path = no/model" in pods(*remote).output
    with pytest.raises(UserError, match="backslash"):
        pods(*remote, "--task", "dataset", "--dataset_name", "a.jsonl", "--dataset_test_name", "a.jsonl")


@pytest.mark.slow
def test_a_chat_models_files(place):
    """The ledger shows each prompt as the policy continued it; saved configurations generate with a cache."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("policy")
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{{ end }}"
    tokenizer.save_pretrained("policy")
    Path("rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": "1+2?", "answer": "3"}\n')
    words = ["--task", "dataset", "--dataset_name", "rows.jsonl", "--dataset_test_name", "rows.jsonl"]
    words += ["--system_prompt", "Add.", "--chat_template_kwargs", "{end: '[me]'}"]
    words += ["--max_steps", "1", "--save_steps", "1"]
    pods("train", "--config", "r.yaml", "--output", "run", *words)
    run = Run.open("run")
    texts = {"[system]Add.[user]1+1?[me]", "[system]Add.[user]1+2?[me]"}
    rollouts = pq.read_table(run.rollout_files()[0])
    assert set(rollouts["prompt"].to_pylist()) < texts
    assert set(rollouts["question"].to_pylist()) < {"1+1?", "1+2?"}
    assert set(pq.read_table(run.evaluation_files()[0])["prompt"].to_pylist()) == texts
    assert json.loads(Path("policy/config.json").read_text())["use_cache"]
    for folder in ("checkpoint-1", "final"):
        assert json.loads(Path("run/checkpoints", folder, "config.json").read_text())["use_cache"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plan_is_measured_and_printed(place, monkeypatch):
    monkeypatch.setattr("pods_rl.planning.measure._MOST_ROUNDS", 2)
    done = pods("plan", "r.yaml", "--seconds", "1")
    report, _, experiment = done.output.partition("To settle it, ")
    assert max(map(len, report.splitlines())) <= 80
    for part in ("rewards", "completions", "rollouts are distinct", "none  ", "prompt  ", "batch  ", "importing torch"):
        assert part in report
    (place / "settings.yaml").write_text(experiment.partition("\n")[2])
    compared = pods("compare", "--config", "settings.yaml", "--dry_run")
    assert compared.exit_code == 0, compared.output


DRY = ("train", "tiny-pods", "--dry_run", "--eval_prompts", "0")
DATA = (*DRY, "--task", "dataset")
COMMANDS = {
    "data.jsonl": (*DATA, "--dataset_name", "data.jsonl"),
    "data/train.parquet": (*DATA, "--dataset_name", "data"),
    "policy/config.json": (*DRY, "--model_name_or_path", "./policy"),
    "accelerator.json": (*DRY, "--accelerator_config", "accelerator.json"),
    "r.yaml": ("train", "--config", "r.yaml", "--dry_run"),
    "rows.parquet": ("select", "rows.parquet", "--keep", "2"),
}


@pytest.mark.slow
@pytest.mark.timeout(240)  # then the command hangs
@pytest.mark.parametrize("pipe", COMMANDS)
def test_a_command_names_a_pipe_where_a_file_should_be_and_ends(place, pipe):
    """Opening it would block forever."""
    target = place / pipe
    target.parent.mkdir(exist_ok=True)
    target.unlink(missing_ok=True)
    os.mkfifo(target)
    with pytest.raises(UserError, match=re.escape(target.name)):
        pods(*COMMANDS[pipe])


SHORT_QUICKSTART = {"seeds": "1", "max_seconds": "2", "eval_seconds": "1", "eval_prompts": "32", "ledger_every": "2"}


@pytest.mark.slow
def test_quickstart_trains_its_arms_and_reports(tmp_path):
    output = tmp_path / "quickstart"
    command = [sys.executable, "-m", "pods_rl", "compare", "--config", "quickstart", "--output", str(output)]
    command += ["--parallel", "2", *(word for key, value in SHORT_QUICKSTART.items() for word in (f"--{key}", value))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (output / "report" / "report.html").stat().st_size > 0
    assert "report.html" in done.stdout.replace("\n", "")
    arms = find_runs(output)
    assert list(arms) == ["grpo-trl", "pods", "grpo"]
    (trl,), (pods,), (grpo,) = arms.values()
    assert {run.state for run in (trl, pods, grpo)} == {"finished"}
    assert len({run.evals[0]["accuracy"] for run in (trl, pods, grpo)}) == 1
    assert pods.evals[0]["accuracy"] < 0.5  # of 32 prompts; of all it is 0.25
    for run, n in ((trl, 4), (pods, 16), (grpo, 4)):
        dues = [row["due"] for row in run.evals]
        assert dues[0] == 0.0
        assert dues[-1] >= 2.0
        assert dues == sorted(set(dues))
        assert all(due % 1.0 == 0.0 for due in dues)  # a slow step may pass over one
        assert all(row["seconds"] >= row["due"] for row in run.evals)
        assert run.metrics[0]["pods/tokens/generated"] > 5 * n
    assert {row["arm"] for row in read_csv(output / "report" / "final.csv")} >= {"pods"}


# -- a run reads its task as the policy does --------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def recipe(**values):
    task = {"task": "gsm8k", "data_dir": ".", "system_prompt": ""}
    return build_recipe({"model_name_or_path": "./policy", **RECIPE, **task, **values}, Origin("test"))


@pytest.fixture
def questions(place):
    """Questions of several lengths, of which one is the shortest, in ``gsm8k/``."""
    (place / "gsm8k").mkdir()
    for split, numbers in (("train", range(40)), ("test", range(40, 50))):
        rows = [{"question": f"{i}{'+1' * (i % 10)} is?", "answer": f"#### {i + i % 10}"} for i in numbers]
        (place / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_prompts_are_counted_in_the_policys_tokens_with_its_template(questions):
    plain = prepare(recipe()).task
    shortest = min(len(prompt.encode()) for prompt in plain.train["prompt"])
    prepared = prepare(recipe(max_prompt_length=shortest))
    kept = prepared.task
    assert {len(prompt.encode()) for prompt in kept.train["prompt"]} == {shortest}
    assert len(kept.train) + prepared.fitted.train_left_out == 40
    evaluated = prepare(recipe(max_prompt_length=shortest), find_policy("./policy"))
    assert (len(evaluated.task.test), evaluated.fitted) == (10, None)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("policy")
    with pytest.raises(UserError, match=f"max_prompt_length = {shortest}: .*{shortest + 6} tokens"):
        prepare(recipe(max_prompt_length=shortest))  # <user> and > for the line break at the end


def test_a_run_says_and_records_what_it_left_out(questions, capsys):
    limit = sorted(len(prompt.encode()) for prompt in prepare(recipe()).task.train["prompt"])[20]
    run = train(recipe(max_prompt_length=limit), Path("run"))
    environment = json.loads(Path("run/environment.json").read_text())
    assert "scaled_dot_product_attention" in environment["attention"]
    assert environment["generation"] == "prefix trees"
    said = environment["task"]
    assert run.state == "finished"
    assert said["train"] + said["too_long"]["train_left_out"] == 40
    assert said["too_long"]["limit"] == limit
    assert said["test"] == 10
    line = f"skipped {said['too_long']['train_left_out']} of the training prompts, longer than {limit} tokens; kept "
    assert line in capsys.readouterr().out


def test_a_task_without_training_prompts_can_only_be_evaluated(place):
    (place / "math500").mkdir()
    (place / "math500" / "test.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    with pytest.raises(UserError, match=r"math .*data_dir = \. "):
        prepare(recipe(task="math", data_dir="."))
    assert len(prepare(recipe(task="math", data_dir="."), find_policy("./policy")).task.test) == 1
