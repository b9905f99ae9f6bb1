"""``pods eval``: what it evaluates, prints, writes and refuses; whole, on a random policy, an adapter or none."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

from pods_rl.cli import main
from pods_rl.cli.evaluate import _progress
from pods_rl.errors import UserError
from pods_rl.policies import tiny_policy_path
from pods_rl.policies.files import weights_hash
from pods_rl.runs import Run, RunWriter
from pods_rl.runs.checkpoints import publish, staging

from . import pods

SHORT = ["--eval_prompts", "3", "--max_completion_length", "8", "--threads", "1", "--use_cpu"]


# ------------------------------------------------------------------------------------------------ what is evaluated


@pytest.fixture
def evaluated(monkeypatch, tmp_path):
    """Replaces evaluation: records the policy and the recipe."""
    made = []

    def evaluate_checkpoint(recipe, model, *, adapter=None, backend="auto", done=None):
        made.append((recipe, model, adapter, backend))
        evaluation = SimpleNamespace(prompts=4, repeats=1, temperature=1.0, eval_seconds=2.5)
        task = SimpleNamespace(name="arithmetic", version="1")
        return SimpleNamespace(evaluation=evaluation, task=task, settings={"backend": "generate"})

    line = {"results": {"arithmetic": {"accuracy": 0.5, "accuracy_stderr": 0.25}}, "versions": {"arithmetic": "1"}}
    line |= {"higher_is_better": {"arithmetic": {"accuracy": True}}}
    module = SimpleNamespace(
        evaluate_checkpoint=evaluate_checkpoint, write_results=None, results_line=lambda outcome: line
    )
    monkeypatch.setitem(sys.modules, "pods_rl.evaluation.checkpoint", module)
    monkeypatch.chdir(tmp_path)
    return made


@pytest.fixture
def run(tmp_path):
    """A finished run of the tiny recipe, without a policy."""
    from pods_rl.recipe import load_recipe

    with RunWriter(tmp_path / "out") as writer:
        writer.write_config(load_recipe("tiny-pods", {"task_seed": 5}).to_yaml())
        writer.write_status("finished")
    return tmp_path / "out"


def save(folder: Path, name: str = "config.json", **config) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(config))


def publish_policy(folder: Path) -> None:
    save(staging(folder))
    publish(folder, {})


def test_a_runs_last_policy_on_its_own_task(evaluated, run):
    with pytest.raises(UserError, match=r"has no policy under checkpoints/"):
        pods("eval", "--run", "out")
    for name in ("checkpoint-9", "checkpoint-10"):
        publish_policy(run / "checkpoints" / name)
    pods("eval", "--run", "out")
    save(run / "checkpoints" / "final")
    result = pods("eval", "--run", "out", "--eval_repeats", "5", "--backend", "generate")
    assert [made[1] for made in evaluated] == ["out/checkpoints/checkpoint-10", "out/checkpoints/final"]
    recipe, _, adapter, backend = evaluated[1]
    assert (recipe.values["task_seed"], recipe.values["eval_repeats"]) == (5, 5)
    assert (adapter, backend) == (None, "generate")
    assert "|arithmetic|      1|none  |     0|accuracy|↑  |0.5000|±  |0.2500|" in result.output
    for number in ("0.5", "0.25", "2.5"):
        assert len(re.findall(rf"(?<![\d.]){number}0*(?!\d)", result.output)) == 1  # each once


def test_a_torn_policy_is_skipped(evaluated, run):
    publish_policy(run / "checkpoints/checkpoint-9")
    for name in ("checkpoint-10", "final"):
        publish_policy(run / "checkpoints" / name)
        (run / "checkpoints" / name / "config.json").write_text("half")
    pods("eval", "--run", "out")
    assert evaluated[0][1] == "out/checkpoints/checkpoint-9"
    (run / "checkpoints/checkpoint-9/config.json").unlink()
    with pytest.raises(UserError, match=r"(?s)skipped final: config.json has 4 bytes.*skipped checkpoint-9: con"):
        pods("eval", "--run", "out")


def test_a_runs_adapter_comes_with_the_recipes_own_base(evaluated, run):
    save(run / "checkpoints" / "final", "adapter_config.json", base_model_name_or_path="/where/it/was/trained")
    pods("eval", "--run", "out")
    assert evaluated[0][1:3] == ("tiny", "out/checkpoints/final")


def test_a_model_needs_no_recipe(evaluated):
    pods("eval", "--model", "tiny", "--task_difficulty", "hard")
    recipe, model, _, backend = evaluated[0]
    assert (model, recipe.values["task_difficulty"], recipe.values["model_name_or_path"]) == ("tiny", "hard", "tiny")
    assert backend == "auto"
    pods("eval", "--model", "tiny", "--config", "tiny-pods", "--adapter", "lora")
    assert evaluated[1][0].values["eval_prompts"] == 256
    assert evaluated[1][2] == "lora"


def test_what_cannot_be_evaluated_is_refused_before_anything_is_loaded(evaluated, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    refusals = {
        "Nothing to evaluate": [],
        "give one of them": ["--run", tmp_path, "--config", "tiny-pods"],
        "there is no such directory": ["--model", "./gone"],
        "holds no config.json": ["--model", "./empty"],
        "--adapter needs its base model": ["--adapter", "lora"],
        "is a file: give a directory": ["--model", "tiny", "--output", tmp_path / "file"],
        "sums.*expected one of arithmetic": ["--model", "tiny", "--task", "sums"],
        "eval_repeats = 0: expected at least 1": ["--model", "tiny", "--eval_repeats", "0"],
        "eval_temperature = -1: expected at least 0": ["--model", "tiny", "--eval_temperature", "-1"],
        "unknown key": ["--model", "tiny", "--eval_promts", "3"],
    }
    for message, words in refusals.items():
        with pytest.raises(UserError, match=message):
            pods("eval", *words)
    assert evaluated == []


# ------------------------------------------------------------------------------------------------ whole


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with a random policy in ``policy/`` and a recipe for it in ``r.yaml``."""
    import torch

    from pods_rl.policies.build import build_model, build_tokenizer

    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    build_model(tokenizer, **sizes).save_pretrained("policy")
    tokenizer.save_pretrained("policy")
    recipe = {
        "model_name_or_path": "./policy", "num_generations": 2, "num_rollouts": 4, "per_device_train_batch_size": 2,
        "max_completion_length": 6, "max_steps": 2, "gradient_checkpointing": False, "use_cpu": True, "bf16": False,
        "eval_prompts": 4, "eval_repeats": 2, "ledger_every": 0, "threads": 1, "learning_rate": 0.01,
    }  # fmt: skip
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


COLUMNS = [
    "index", "repeat", "prompt", "answer", "completion", "answer_right", "format_kept", "completion_tokens", "ended",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_run_is_evaluated_while_it_trains_and_after(place, lora):
    peft = ["--use_peft", "--lora_target_modules", "all-linear", "--lora_r", "4"] if lora else []
    pods("train", "--config", "r.yaml", "--output", "run", *peft)
    run = Run.open("run")
    assert (run.path / "checkpoints/final/adapter_config.json").is_file() is lora
    assert [path.name for path in run.evaluation_files()] == ["step-000000.parquet", "step-000002.parquet"]
    last = pq.read_table(run.evaluation_files()[-1])
    assert last.column_names == COLUMNS
    assert last.num_rows == 8
    assert {"pass@2", "pass@2_se"} <= set(run.evals[-1])
    # the same seed as the run's last evaluation: the saved policy must say the same
    result = pods("eval", "--run", "run", "--output", "results", "--seed", 10_007 * run.seed + 1)
    (line,) = [json.loads(text) for text in Path("results/results.jsonl").read_text().splitlines()]
    assert pq.read_table(Path("results") / line["completions"]).equals(last)
    assert ("adapter  " in result.output) is lora
    assert (line["config"]["adapter_sha256"] is not None) is lora
    base = Path("policy") if lora else run.path / "checkpoints/final"
    assert line["config"]["model_sha256"] == weights_hash(base)


def test_results_are_what_others_read_and_enough_to_repeat(place):
    words = ["eval", "--model", "tiny", "--eval_repeats", "2", "--seed", "3", "--output", "results", *SHORT]
    pods(*words)
    first, second = (pods(*words).output, Path("results/results.jsonl").read_text().splitlines())[1]
    line, again = json.loads(first), json.loads(second)
    metrics = line["results"]["arithmetic"]
    assert metrics == again["results"]["arithmetic"]
    assert {"accuracy", "accuracy_stderr", "pass@1", "pass@2", "pass@2_stderr", "both_accuracy_stderr"} <= set(metrics)
    assert set(line["higher_is_better"]["arithmetic"]) == {name for name in metrics if not name.endswith("_stderr")}
    assert line["n-samples"] == {"arithmetic": {"original": 512, "effective": 3}}
    assert isinstance(line["versions"]["arithmetic"], str)
    assert line["chat_template"] is None
    config = line["config"]
    assert config["model_sha256"] == weights_hash(tiny_policy_path())
    wanted = {"seed": 3, "temperature": 1.0, "max_completion_length": 8, "batch_size": 256, "repeats": 2, "limit": 3}
    wanted |= {"backend": "generate", "device": "cpu", "dtype": "torch.float32", "adapter_sha256": None}
    assert {name: config[name] for name in wanted} == wanted
    assert {"torch", "transformers", "pods-rl"} <= set(config["versions"])
    assert line["configs"]["arithmetic"]["task_difficulty"] == "mixed"
    assert len(line["task_hashes"]["arithmetic"]) == 64
    tables = [pq.read_table(Path("results") / row["completions"]) for row in (line, again)]
    assert len(list(Path("results").glob("completions-arithmetic-*.parquet"))) == 2
    assert tables[0].equals(tables[1])


def test_results_are_added_to_files_of_pods_eval_even_torn_ones_and_to_no_other(place):
    words = ["eval", "--model", "tiny", "--output", "results", *SHORT]
    pods(*words)
    path = Path("results/results.jsonl")
    first = path.read_text()
    path.write_text(first + '{"torn": ')
    pods(*words)
    lines = path.read_text().splitlines()
    assert lines[:2] == [first.strip(), '{"torn": ']
    assert json.loads(lines[2])["model_name"] == "tiny"
    path.write_text('{"mine": 1}\n')
    with pytest.raises(UserError, match="--force"):
        pods(*words)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="is a directory"):
        pods(*words)


def test_an_evaluation_that_cannot_be_written_is_printed(place, capsys, monkeypatch):
    def full(path, mode):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pods_rl.evaluation.checkpoint.open_own", full)
    monkeypatch.setattr(sys, "argv", ["pods", "eval", "--model", "tiny", "--output", "results", *SHORT])
    with pytest.raises(SystemExit) as exit:
        main()
    printed = capsys.readouterr()
    assert exit.value.code == 2
    assert "accuracy" in printed.out
    assert "No space left on device" in printed.err.splitlines()[-1]


def test_a_policy_that_is_gone_by_the_end_loses_no_evaluation(place, monkeypatch):
    """A run that trains on prunes the checkpoint that is evaluated."""
    from pods_rl.evaluation import checkpoint

    evaluate = checkpoint.evaluate

    def prune(*words, **options):
        found = evaluate(*words, **options)
        shutil.rmtree("policy")
        return found

    monkeypatch.setattr(checkpoint, "evaluate", prune)
    pods("eval", "--model", "./policy", "--system_prompt", "\udcff", "--output", "results", *SHORT)
    line = json.loads(Path("results/results.jsonl").read_text())
    assert len(line["config"]["model_sha256"]) == 64


def test_the_template_and_the_system_prompt_are_part_of_a_result(place):
    from pods_rl.policies.build import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{{ suffix }}"
    tokenizer.save_pretrained("policy")
    Path("q.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    words = ["--dataset_name", "q.jsonl", "--dataset_test_name", "q.jsonl", "--system_prompt", "Add."]
    words += ["--chat_template_kwargs", "{suffix: '!'}"]
    pods("eval", "--model", "./policy", *words, *SHORT, "--output", "results")
    line = json.loads(Path("results/results.jsonl").read_text())
    assert line["config"]["chat_template_kwargs"] == {"suffix": "!"}
    assert line["chat_template"] == tokenizer.chat_template
    assert line["system_instruction"] == "Add."
    table = pq.read_table(Path("results") / line["completions"])
    assert table.column("prompt").to_pylist() == ["[system]Add.[user]1+1?!"]


def test_an_adapter_changes_what_its_base_says(place):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained("policy", dtype=torch.float32)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(base, config).save_pretrained("lora")
    said = {}
    for name, words in {
        "base": ["--model", "./policy"],
        "both": ["--model", "./policy", "--adapter", "lora"],
        "alone": ["--model", "./lora", "--task", "arithmetic"],
    }.items():
        pods("eval", *words, *SHORT, "--eval_temperature", "0", "--output", name)
        line = json.loads(Path(name, "results.jsonl").read_text())
        said[name] = pq.read_table(Path(name) / line["completions"]).column("completion").to_pylist()
        assert line["config"]["model_sha256"] == weights_hash(Path("policy"))
        assert line["config"]["adapter_sha256"] == (None if name == "base" else weights_hash(Path("lora")))
    assert said["both"] == said["alone"] != said["base"]


def drop_a_weight(source, target):
    """Copies a policy or an adapter without its last weight."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    file = next(Path(target).glob("*.safetensors"))
    weights = load_file(file)
    del weights[max(weights)]
    save_file(weights, file, metadata={"format": "pt"})


def test_policies_that_cannot_be_loaded_are_refused(place, monkeypatch):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained("policy")
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained("lora")
    refusals = {}
    for name in ("pickle", "torn", "strange", "no-base"):
        save(place / name, model_type="qwen2")
    (place / "pickle/pytorch_model.bin").write_bytes(b"x")
    refusals["./pickle"] = "holds its weights as a pickle"
    (place / "torn/model.safetensors").write_bytes(Path("policy/model.safetensors").read_bytes()[:1000])
    refusals["./torn"] = r"\./torn cannot be loaded"
    classes = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    save(place / "strange", model_type="of-my-own", auto_map=classes)
    (place / "strange/model.safetensors").write_bytes(Path("policy/model.safetensors").read_bytes())
    (place / "strange/mine.py").write_text("raise SystemExit('code of the model was run')")
    refusals["./strange"] = r"\./strange cannot be loaded"
    (place / "no-base/config.json").unlink()
    save(place / "no-base", "adapter_config.json", peft_type="LORA")
    refusals["./no-base"] = "names no base model"
    for model, message in refusals.items():
        with pytest.raises(UserError, match=message):
            pods("eval", "--model", model, *SHORT)
    drop_a_weight("policy", "lacking")
    drop_a_weight("lora", "lora-lacking")
    with pytest.raises(UserError, match=r"1 weights are missing, such as model.norm.weight"):
        pods("eval", "--model", "./lacking", *SHORT)
    with pytest.raises(UserError, match="missing adapter keys"):
        pods("eval", "--model", "./policy", "--adapter", "./lora-lacking", *SHORT)
    shutil.copytree("policy", "mute", ignore=shutil.ignore_patterns("tok*"))
    with pytest.raises(UserError, match="tokenizer in mute cannot be loaded: it has no vocabulary"):
        pods("eval", "--model", "./mute", *SHORT)
    with pytest.raises(UserError, match=r"adapter \./gone: there is no such directory"):
        pods("eval", "--model", "./policy", "--adapter", "./gone", *SHORT)
    with pytest.raises(UserError, match="chat_template_kwargs = suffix: expected a mapping"):
        pods("eval", "--model", "./policy", "--chat_template_kwargs", "suffix", *SHORT)
    with pytest.raises(UserError, match="eval_prompts = 0 evaluates nothing"):
        pods("eval", "--model", "./policy", "--eval_prompts", "0")


def test_an_unknown_hub_id_is_refused(place, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot_download(name, *, revision, allow_patterns):
        """Replaces the hub: it has nothing."""
        asked.append((name, revision, allow_patterns))
        raise FileNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError, match=r"model nobody/nothing is not a local folder, and downloading it .* failed"):
        pods("eval", "--model", "nobody/nothing", *SHORT, "--task", "arithmetic", "--model_revision", "v2")
    assert asked[0][:2] == ("nobody/nothing", "v2")
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in asked[0][2])


def test_mistakes_end_with_code_2_and_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pods", "eval", "--model", "./gone[red]\x1b[2J"])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "\x1b" not in error


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_says_rows_and_seconds_on_a_terminal_and_little_in_a_log(monkeypatch, terminal):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    out = Console(file=io.StringIO(), force_terminal=terminal, width=80, _environ={"TERM": "xterm"})
    with _progress(out) as done:
        for clock[0], rows in ((10.0, 5), (20.0, 10), (90.0, 30), (120.0, 40)):
            done(rows, 40)
    printed = [line.strip() for line in re.split(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]+", out.file.getvalue())]
    lines = ["5 of 40 completions, 70 s left", "10 of 40 completions, 60 s left", "30 of 40 completions, 30 s left"]
    assert list(dict.fromkeys(filter(None, printed))) == (lines if terminal else lines[2:])
