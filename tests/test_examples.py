"""Every example runs, as its header says: the CPU ones with fewer steps, what needs a cluster or a GPU up to there."""

import doctest
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pyarrow.parquet as parquet
import pytest
import torch
from nbclient import NotebookClient

from pods_rl.experiment import load_experiment
from pods_rl.recipe import load_recipe, shipped_recipes
from pods_rl.recipe import recipe as checks
from pods_rl.recipe.recipe import differences
from pods_rl.runs import Run

from . import DEADLINE
from .cli import pods
from .numeric import assert_near

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SHORT = ("--max_steps", "1", "--eval_prompts", "4")


def header_commands(file: Path) -> list[list[str]]:
    """The `pods` commands that a file's header shows, as words."""
    text = file.read_text("utf-8").replace("\\\\\n", "\\\n")
    text = re.sub(r"\\\n#? *", " ", text)
    found = re.findall(r"^(?:#   |    )(?:PYTHONPATH=examples )?pods (.*)$", text, flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


def train_shortly(words: list[str], output: Path) -> Run:
    """Run a `pods train` of a header for one step, with few evaluations."""
    assert words[0] == "train"
    assert pods(*words, *SHORT, "--output", output).exit_code == 0
    return Run.open(output)


def test_the_table_names_every_example():
    table = (EXAMPLES / "README.md").read_text("utf-8")
    named = set(re.findall(r"^\| \[[^]]+\]\(([^)]+)\)", table, flags=re.MULTILINE))
    assert named == {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}


@pytest.mark.slow
def test_the_trl_script_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = (EXAMPLES / "trl_script.py").read_text("utf-8").replace("STEPS = 20", "STEPS = 1")
    names: dict = {}
    exec(compile(script, "trl_script.py", "exec"), names)
    assert names["trainer"].state.global_step == 1


@pytest.mark.parametrize("name", ["own_reward.py", "own_rule.py"])
def test_the_doctests_of_an_example(name):
    names = runpy.run_path(str(EXAMPLES / name))
    functions = [value for value in names.values() if getattr(value, "__module__", None) == "<run_path>"]
    tests = [test for function in functions for test in doctest.DocTestFinder().find(function, globs=names)]
    results = [doctest.DocTestRunner().run(test) for test in tests]
    assert sum(result.attempted for result in results) >= 1
    assert sum(result.failed for result in results) == 0


@pytest.mark.slow
def test_the_own_reward_rule_and_task_are_trained_on(tmp_path, monkeypatch):
    """As the headers say: from the repository's root, with examples/ importable, also in the workers."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    runs = {}
    for name in ("own_reward.py", "own_rule.py", "own_task.yaml"):
        (command,) = header_commands(EXAMPLES / name)
        runs[name] = train_shortly(command, tmp_path / name)
    assert "rewards/own_reward:brevity/mean" in runs["own_reward.py"].metrics[0]
    assert runs["own_rule.py"].config["rule"] == "own_rule:extremes_and_random"
    assert runs["own_rule.py"].metrics[0]["step"] == 1
    lines = (EXAMPLES / "own_task" / "train.jsonl").read_text("utf-8").splitlines()
    asked = {json.loads(line)["text"] for line in lines}
    (rollouts,) = runs["own_task.yaml"].rollout_files()
    assert {prompt.strip() for prompt in parquet.read_table(rollouts)["prompt"].to_pylist()} <= asked


@pytest.mark.slow
def test_the_walkthrough_shows_the_lines_of_each_stage_and_replays_its_rollouts(tmp_path):
    printed = []
    for words in ([], ["--replay"]):
        command = [sys.executable, str(EXAMPLES / "walkthrough.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True, cwd=tmp_path)
        printed.append(done.stdout)
    places = re.findall(r"(\w+), (src\S+):(\d+)$", printed[0], flags=re.MULTILINE)
    assert len(places) == 5
    for name, file, line in places:
        first = int(line) - 1
        lines = (ROOT / file).read_text("utf-8").splitlines()[first : first + 5]  # a decorator may come first
        assert any(f"def {name}(" in text for text in lines), (name, file, line)
    later = [text.partition("2. Rewards")[2] for text in printed]
    assert later[0] == later[1]
    right, wrong = map(float, re.search(r"right ones (\S+), wrong ones (\S+)$", printed[0].strip()).groups())
    assert right > 0 > wrong


@pytest.mark.slow
def test_the_script_for_one_gpu_runs_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = (EXAMPLES / "one_gpu.py").read_text("utf-8")
    names: dict = {}
    exec(compile(script.replace("else 2", "else 1"), "one_gpu.py", "exec"), names)
    (metrics,) = [row for row in names["trainer"].state.log_history if "reward" in row]
    assert metrics["pods/rows_a_prompt"] * metrics["pods/prompts_trained"] == pytest.approx(64)


@pytest.mark.slow
def test_the_recipe_for_one_gpu_has_the_rows_of_the_script_and_its_short_form_runs(tmp_path, monkeypatch):
    doctor, full, short = header_commands(shipped_recipes()["gsm8k-8x8"])
    assert "bad   recipe" in (report := pods(*doctor).output)
    assert "vllm" in report
    with monkeypatch.context() as patch:
        find = checks.find_spec
        patch.setattr(checks, "find_spec", lambda name: name == "vllm" or find(name))
        recipe = load_recipe(full[-1])
        recipe.check_installed()
    plan = recipe.batch_plan()
    assert (plan.prompts_per_generation, plan.num_rollouts, plan.rows_per_generation) == (8, 32, 64)
    run = train_shortly(short, tmp_path / "run")
    assert run.metrics[0]["pods/rows_a_prompt"] * run.metrics[0]["pods/prompts_trained"] == pytest.approx(64)
    assert (run.path / "checkpoints" / "final" / "adapter_model.safetensors").is_file()


def test_the_slurm_array_makes_exactly_the_runs_that_compare_looks_for(tmp_path):
    """A stand-in for `pods` records its words; each task must make one run of the experiment, with its very recipe."""
    (tmp_path / "pods").write_text('#!/bin/sh\nprintf "%s\\n" "$*" >> calls\n', "utf-8")
    (tmp_path / "pods").chmod(0o755)
    (tmp_path / "runs" / "quickstart" / "pods" / "seed-3").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "pods" / "seed-3" / "status.json").touch()
    script = EXAMPLES / "slurm.sh"
    (last,) = re.findall(r"--array=0-(\d+)", script.read_text("utf-8"))
    for task in range(int(last) + 1):
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": str(task)}
        subprocess.run(["bash", str(script), "--threads", "1"], cwd=tmp_path, env=environment, check=True)
    calls = [line.split() for line in (tmp_path / "calls").read_text("utf-8").splitlines()]
    plan = {f"runs/quickstart/{run.path}": run.recipe for run in load_experiment("quickstart").plan()}
    assert {call[call.index("--output") + 1] for call in calls} == set(plan)
    for call in calls:
        output = call[call.index("--output") + 1]
        recipe = load_recipe(call[1], {"seed": call[call.index("--seed") + 1], "threads": "1"})
        assert call[0] == "train"
        assert not differences(recipe.values, plan[output].values)
        assert ("--resume" in call) == (output == "runs/quickstart/pods/seed-3")
    assert len(calls) == len(plan)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PODS_NOTEBOOK_SECONDS", "0.5")
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # outputs would be stale, and large
    NotebookClient(notebook, timeout=int(DEADLINE), resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    printed = "".join(output.get("text", "") for output in outputs)
    assert "kept [[0, 1, 2, 5]] advantages [[" in printed
    assert "kept   " in printed
    assert "dropped" in printed


# -- the plain PyTorch loop --------------------------------------------------------------------------------------------

PLAIN_LOOP = EXAMPLES / "plain_loop.py"


@pytest.fixture(scope="module")
def loop() -> str:
    return PLAIN_LOOP.read_text("utf-8")


def test_the_plain_loop_fits_on_two_screens(loop):
    assert len(loop.splitlines()) <= 60


def test_the_plain_loop_trains_on_the_kept_rows_alone(loop, capsys):
    two_steps = loop.replace("STEPS, P, N, M, T = 10, 2, 32, 8, 56", "STEPS, P, N, M, T = 2, 2, 6, 2, 40")
    assert two_steps != loop
    names: dict = {}
    exec(compile(two_steps, str(PLAIN_LOOP), "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2"]
    assert re.search(r"\b12, .*\b4 rows$", lines[0])
    assert names["logps"].shape[:2] == names["advantage"].shape == (2, 2)
    assert torch.isfinite(names["loss"])


@pytest.mark.numeric
def test_the_log_probabilities_of_the_plain_loop_are_the_policys(loop, capsys):
    """Against each row alone, without padding."""
    names: dict = {}
    before_the_loop = loop.split("for step in")[0].replace("10, 2, 32, 8, 56", "0, 2, 3, 2, 30")
    exec(compile(before_the_loop, str(PLAIN_LOOP), "exec"), names)
    policy, tokenizer = names["policy"], names["tokenizer"]
    with torch.no_grad():
        rows, length, _ = names["generate"](["1+2=", "10+20+30="])
        logps, mask = names["log_probs"](rows, length)
        for row, found, kept in zip(rows, logps, mask.bool(), strict=True):
            bare = row[row != tokenizer.pad_token_id][None]
            alone = policy(bare).logits[:, :-1].log_softmax(-1).gather(-1, bare[:, 1:, None])[0, :, 0]
            assert_near(found[kept], alone[-int(kept.sum()) :], 1e-4)
