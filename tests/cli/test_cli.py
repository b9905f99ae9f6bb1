"""The commands, up to where training starts: what they print, refuse and write."""

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from signal import SIGINT, SIGTERM
from types import SimpleNamespace

import pytest

from pods_rl.cli import main
from pods_rl.distributed.launch import Failure
from pods_rl.distributed.signals import stop_on_signals
from pods_rl.errors import UserError
from pods_rl.recipe import recipe as checks
from pods_rl.recipe import shipped_recipes
from pods_rl.recipe.recipe import checkpoint_keys
from pods_rl.runs import Run, RunInUseError, RunWriter
from pods_rl.runs.checkpoints import publish, staging

from . import pods


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Replaces training: records the arguments and leaves a run in the given state."""
    calls = SimpleNamespace(state="finished", made=[], signal=None)

    def train(recipe, output, *, shown_as, resume=False, **allowed):
        calls.made.append((recipe, output, resume))
        if calls.signal:
            with stop_on_signals() as stop, suppress(KeyboardInterrupt):
                stop.ask(calls.signal)
        with RunWriter(output, resume=resume) as writer:
            writer.write_config(recipe.to_yaml())
            writer.write_status(calls.state)
        return Run.open(output)

    monkeypatch.setitem(sys.modules, "pods_rl.training.run", SimpleNamespace(train=train))
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.mark.parametrize(
    ("state", "signal", "code"),
    [("finished", None, 0), ("stopped", SIGINT, 130), ("stopped", SIGTERM, 143), ("failed", None, 1)],
)
def test_trains_exit_code_says_how_it_ended(trained, state, signal, code):
    trained.state, trained.signal = state, signal
    assert pods("train", "--config", "tiny-pods", "--output", "out").exit_code == code


def save_checkpoint(output, step=3, processes=1):
    """A whole checkpoint of a run, of its own recipe."""
    target = Path(output, f"checkpoints/checkpoint-{step}")
    staging(target).mkdir(parents=True)
    (staging(target) / "optimizer.pt").write_bytes(b"momentum")
    keys = checkpoint_keys(Run(Path(output)).config)
    publish(target, {"step": step, "processes": processes, "recipe": {"keys": keys}})
    return target


def test_resume_takes_the_runs_own_recipe(trained):
    pods("train", "--config", "tiny-pods", "--output", "out", "--seed", "7")
    Path("out/metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"out \(finished\) .*checkpoint"):
        pods("train", "--output", "out", "--resume")
    save_checkpoint("out")
    pods("train", "--output", "out", "--resume")
    assert trained.made[1][2] is True
    assert trained.made[1][0].values["seed"] == 7
    with pytest.raises(UserError, match="empty "):
        pods("train", "--config", "tiny-pods", "--output", "empty", "--resume")


def test_resume_refuses_the_run_of_a_script(trained):
    Path("out").mkdir()
    Path("out/config.yaml").write_text("model_name_or_path: tiny\nseed: 7\n")
    with pytest.raises(UserError, match=r"out.*script"):
        pods("train", "--config", "tiny-pods", "--output", "out", "--resume")
    assert trained.made == []


def test_resume_refuses_another_recipe_unless_allowed(trained, monkeypatch):
    pods("train", "--config", "tiny-pods", "--output", "out", "--seed", "7")
    save_checkpoint("out")
    config = Path("out/config.yaml").read_text()
    pods("train", "--output", "out", "--resume", "--max_steps", "9", "--save_seconds", "5")  # may change
    changes = ["--seed", "8", "--rule", "random"]
    with pytest.raises(UserError, match=r"seed \(.*7.*8\), rule \(.*max_variance.*random"):
        pods("train", "--output", "out", "--resume", *changes)
    Path("other.yaml").write_text("num_generations: 8\nmax_steps: 9\n")
    with pytest.raises(UserError, match=r"num_rollouts \(saved 64, now 8\)"):
        pods("train", "--config", "other.yaml", "--output", "out", "--resume")
    pods("train", "--output", "out", "--resume", "--allow_changes", *changes)
    assert trained.made[-1][0].values["seed"] == 8
    Path("out/config.yaml").write_text(config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"\b1 process.* --num_processes"):
        pods("train", "--output", "out", "--resume", "--per_device_train_batch_size", "8")


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize(
    ("state", "failure", "code", "ends"),
    [
        ("finished", Failure("lost contact", "", 1), 0, "finished"),  # after its last status
        ("stopped", None, 138, "stopped"),
        ("failed", Failure("process 1: no data", "", 2), 2, "failed"),
        ("running", Failure("process 1 was killed", "", 1), 1, "failed"),
    ],
)
def test_the_exit_code_of_several_processes_agrees_with_the_status(
    trained, monkeypatch, asked, state, failure, code, ends
):
    def launch(words, config, processes, stop):
        reason = "interrupted by SIGUSR1" if state == "stopped" else None
        Path("out/status.json").write_text(json.dumps({"state": state, "reason": reason}))
        if asked:
            stop.ask(signal.SIGUSR1)
        return failure

    monkeypatch.setattr("pods_rl.distributed.launch.launch", launch)
    words = ("train", "--config", "tiny-pods", "--output", "out", "--num_processes", "2", "--num_generations", "16")
    Path("out").mkdir()
    if asked and state == "running":  # a second SIGINT has killed the processes
        code, ends = 138, "stopped"
    assert pods(*words, "--per_device_train_batch_size", "8").exit_code == code
    assert Run.open("out").status["state"] == ends


def test_of_several_nodes_only_the_first_one_locks_the_directory_before_the_start(trained, monkeypatch):
    monkeypatch.setattr("pods_rl.distributed.launch.launch", lambda *_: Failure("started", "", 3))
    words = ("train", "tiny-pods", "--output", "out", "--num_generations", "16", "--per_device_train_batch_size", "8")
    with RunWriter("out"):
        Path("node.yaml").write_text("num_processes: 2\nmachine_rank: 1\n")
        assert pods(*words, "--accelerate_config", "node.yaml").exit_code == 3
        Path("node.yaml").write_text("num_processes: 2\nmachine_rank: 0\n")
        with pytest.raises(RunInUseError):
            pods(*words, "--accelerate_config", "node.yaml")


def test_processes_that_do_not_fit_are_refused_before_they_start(trained, monkeypatch):
    """A real launch is in tests/test_ranks.py."""
    monkeypatch.setattr("pods_rl.distributed.launch.launch", lambda *_: pytest.fail("started"))
    words = ("train", "--config", "tiny-pods", "--output", "out", "--num_generations", "16")
    eight = (*words, "--num_processes", "8")
    with pytest.raises(UserError, match=r"num_generations = 16 .*\b24 rows"):
        pods(*eight, "--per_device_train_batch_size", "3")
    with pytest.raises(UserError, match="zero9"):
        pods(*eight, "--accelerate_config", "zero9")
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.raises(UserError, match=r"num_processes: .*64"):
        pods(*words, "--num_processes", "64")
    assert pods(*words, "--num_processes", "64", "--dry_run").exit_code == 0
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UserError, match=r"WORLD_SIZE = 8.*--num_processes"):
        pods(*eight)


def test_a_recipe_is_named_by_a_word_alone(trained, tmp_path):
    pods("train", "tiny-pods", "--output", "out", "--seed", "3")
    pods("train", "--seed", "4", "quickstart-pods")
    (tmp_path / "mine.yaml").write_text("max_seconds: 5\n")
    pods("train", "--output", "mine", "mine.yaml")
    assert [recipe.values["seed"] for recipe, _, _ in trained.made] == [3, 4, 42]
    assert [recipe.name for recipe, _, _ in trained.made] == ["tiny-pods", "quickstart-pods", "mine"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "tiny-pods", "--config", "tiny-pods"], "'tiny-pods'.*--key"),
        (["train", "tiny-pods", "quickstart-pods"], "'quickstart-pods'.* tiny-pods"),
        (["train", "quickstart"], "`pods compare"),
        (["train", "tiny-pod"], r"tiny-pods\?"),
        (["compare"], "experiment"),
        (["train"], "recipe"),
        (["train", "tiny-pods", "--resume"], "--resume "),
        (["train", "--explain", "rulee"], r"rule\?"),
        (["recipes", "../../../etc/passwd"], "passwd"),
        (["compare", "quickstart", "--seeds", "1000000000"], "seeds: .*1000000000"),
    ],
)  # fmt: skip
def test_words_that_name_nothing_or_too_much(words, message):
    with pytest.raises(UserError, match=message):
        pods(*words)


GOOD = "max_steps: 1\nnum_generations: 4\nper_device_train_batch_size: 4\nuse_cpu: true\nbf16: false\n"
READ = ["--config", "r.yaml"]
# what is wrong: the recipe, the words of the command, and what the message names
BEFORE_TORCH = {
    "a python tag": ("seed: !!python/object/apply:os.getpid []\n", READ, ["r.yaml:1", "python/object"]),
    "no limit": ("seed: 1\n", READ, ["max_seconds"]),
    "a path that is too long": (GOOD, ["--config", "a" * 5000], ["too long"]),
    "a directory that is a file": (GOOD, [*READ, "--output", "rows.jsonl/mine"], ["rows.jsonl/mine"]),
    "nothing to resume": (GOOD, [*READ, "--resume", "--output", "nowhere"], ["nowhere"]),
}


@pytest.mark.parametrize("what", BEFORE_TORCH)
def test_what_cannot_work_is_refused_before_torch_is_imported(what, monkeypatch, tmp_path):
    recipe, words, names = BEFORE_TORCH[what]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pods_rl.training.run", None)  # importing it, and so torch, is an error
    Path("r.yaml").write_text(recipe)
    Path("rows.jsonl").write_text("{}")
    with pytest.raises(UserError) as refused:
        pods("train", *words)
    assert [name for name in names if name not in str(refused.value)] == []
    assert len(str(refused.value)) < 700


@pytest.mark.slow
def test_a_dry_run_shows_that_extras_are_missing_and_training_is_refused_before_anything_is_written(
    monkeypatch, tmp_path
):
    find = checks.find_spec
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name in ("vllm", "bitsandbytes") else find(name))
    command = ("train", "--recipe", "gsm8k-qwen2.5-3b-pods")
    output = " ".join(pods(*command, "--dry-run").output.split())
    assert "rollouts" in output
    assert "'.[vllm,quant]'" in output
    with pytest.raises(UserError, match="vllm and bitsandbytes"):
        pods(*command, "--output", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_compare_checks_every_arm_with_the_libraries_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"grpo-trl: .*adamx"):
        pods("compare", "quickstart", "--optim", "adamx", "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_compare_prints_failures_last_and_its_exit_code_is_1(monkeypatch, tmp_path):
    def launch(starters, config, output, in_progress, **_):
        with RunWriter(output) as writer:
            writer.write_config(config.read_text())
            writer.append_eval({"step": 0, "due": 0, "seconds": 0, "accuracy": 0.2})
            writer.append_eval({"step": 1, "due": 1, "seconds": 1, "accuracy": 0.3})
            if "pods" in str(output):
                writer.write_status("failed", reason="ValueError: [red]bad\x1b[2J")
                return 1
            writer.write_status("finished")
        return 0

    monkeypatch.setattr("pods_rl.experiment.Starters.train", launch)
    result = pods("compare", "--config", "quickstart", "--seeds", "2", "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert result.output.count("finished") == 4  # one failure stops no other run
    assert r"ValueError: [red]bad\x1b[2J" in result.stderr
    assert (tmp_path / "out/report/report.html").is_file()


@pytest.mark.slow
def test_compare_outlives_its_display(tmp_path):
    """The runs themselves are replaced by ones that finish at once."""
    program = """
import sys, pods_rl.cli as c
from pods_rl.experiment import Starters
from pods_rl.runs import RunWriter
def finish(starters, config, output, in_progress, **_):
    with RunWriter(output) as writer:
        writer.write_config(config.read_text())
        writer.append_eval({"step": 1, "seconds": 1.0, "elapsed": 1.0, "due": 1.0, "accuracy": 0.5})
        writer.write_status("finished")
    return 0
Starters.train = finish
c.main()
"""
    words = [sys.executable, "-c", program, "compare", "quickstart", "--seeds", "1", "--output", tmp_path / "out"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, text=True, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 0, done
    assert (tmp_path / "out/report/report.html").is_file()


def test_recipes_are_listed_and_printed():
    output = pods("recipes").output
    assert max(map(len, output.splitlines())) <= 80
    for name, path in shipped_recipes().items():
        assert name in output.splitlines()
        assert pods("recipes", name).output == path.read_text()
        assert pods("recipes", "--path", name).output == f"{path}\n"
    assert "grpo-ga" in output


def test_the_current_directory_comes_last_on_the_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("pods_rl.cli.commands.app", lambda **_: None)
    main()
    assert sys.path[-1] == str(tmp_path)


def test_a_refused_resume_of_several_processes_leaves_the_run_as_it_was(trained, monkeypatch):
    pods("train", "tiny-pods", "--output", "out", "--num_generations", "16", "--per_device_train_batch_size", "16")
    save_checkpoint("out", processes=2)
    before = Path("out/status.json").read_bytes()
    resume = ("train", "--output", "out", "--resume", "--num_processes", "2")
    monkeypatch.setattr("pods_rl.distributed.launch.launch", lambda *_: Failure("process 0: refused", "", 2))
    assert pods(*resume).exit_code == 2
    monkeypatch.setattr("pods_rl.distributed.launch.launch", lambda *args: args[-1].ask(signal.SIGTERM))
    assert pods(*resume).exit_code == 143
    assert Path("out/status.json").read_bytes() == before
