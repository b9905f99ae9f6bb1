"""`pods eval`: what it evaluates, prints, writes and refuses."""

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pods_rl.errors import UserError
from pods_rl.evaluation import checkpoint
from pods_rl.loading.folders import weights_hash
from pods_rl.policies import tiny_policy_path
from pods_rl.recipe import load_recipe
from pods_rl.runs import Run, RunWriter
from pods_rl.runs.checkpoints import publish, staging

from . import pods

SHORT = ["--eval_prompts", "3", "--max_completion_length", "8", "--threads", "1", "--use_cpu"]


# -- what is evaluated ------------------------------------------------------------------------------------------------


@pytest.fixture
def evaluated(monkeypatch, tmp_path):
    """Replaces evaluation: records the policy and the recipe."""
    made = []
    config = {"model": "m", "adapter": None, "repeats": 1, "temperature": 1.0, "backend": "generate"}
    line = {"config": config, "results": {"arithmetic": {"accuracy": 0.5, "accuracy_stderr": 0.25}}}
    line |= {"versions": {"arithmetic": "1"}, "n-samples": {"arithmetic": {"effective": 4}}}

    def evaluate_checkpoint(recipe, model, *, adapter=None, backend="auto", **_):
        made.append((recipe, model, adapter, backend))
        return None, line | {"total_evaluation_time_seconds": 2.5}

    monkeypatch.setattr(checkpoint, "evaluate_checkpoint", evaluate_checkpoint)
    monkeypatch.chdir(tmp_path)
    return made


@pytest.fixture
def run(tmp_path):
    """A finished run of the tiny recipe, without a policy."""
    with RunWriter(tmp_path / "out") as writer:
        writer.write_config(load_recipe("tiny-pods", {"task_seed": 5}).to_yaml())
        writer.write_status("finished")
    return tmp_path / "out"


def publish_policy(folder: Path, name: str = "config.json") -> None:
    staging(folder).mkdir(parents=True, exist_ok=True)
    (staging(folder) / name).write_text("{}")
    publish(folder, {})


def test_a_runs_last_policy_is_evaluated_on_its_own_task(evaluated, run):
    with pytest.raises(UserError, match=r"^out "):
        pods("eval", "--run", "out")
    for name in ("checkpoint-9", "checkpoint-10"):
        publish_policy(run / "checkpoints" / name)
    assert "checkpoint-10" in " ".join(pods("eval", "--run", "out").stderr.split())
    assert evaluated.pop()[1] == "out/checkpoints/checkpoint-10"
    publish_policy(run / "checkpoints" / "final")
    printed = pods("eval", "--run", "out", "--eval_repeats", "5", "--backend", "generate").output
    assert evaluated[-1][1] == "out/checkpoints/final"
    recipe, _, adapter, backend = evaluated[0]
    assert (recipe.values["task_seed"], recipe.values["eval_repeats"]) == (5, 5)
    assert (adapter, backend) == (None, "generate")
    assert re.search(r"accuracy +\| 50.0 % +\| 25.0 %", printed)


def test_an_older_policy_is_evaluated_only_if_it_is_named(evaluated, run):
    """A damaged final policy, and a damaged newest checkpoint of a run without one."""
    for name in ("checkpoint-9", "checkpoint-10", "final"):
        publish_policy(run / "checkpoints" / name)
    (run / "checkpoints" / "final" / "config.json").write_text("torn")
    older = "pods eval --run out --model out/checkpoints/checkpoint-10"
    with pytest.raises(UserError, match=rf"(?s){older}\n  damaged final: config.json"):
        pods("eval", "--run", "out")
    assert evaluated == []
    pods(*older.split()[1:])
    assert evaluated[-1][1] == "out/checkpoints/checkpoint-10"
    shutil.rmtree(run / "checkpoints" / "final")
    (run / "checkpoints" / "checkpoint-10" / "config.json").unlink()
    with pytest.raises(UserError, match=r"(?s)checkpoint-9\n  damaged checkpoint-10: config.json"):
        pods("eval", "--run", "out")
    (run / "checkpoints" / "checkpoint-9" / "config.json").write_text("torn")
    with pytest.raises(UserError, match=r"(?s) checkpoint-10: .* checkpoint-9: config"):
        pods("eval", "--run", "out")
    assert len(evaluated) == 1


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
    with RunWriter(tmp_path / "script") as writer:
        writer.write_config("max_steps: 1\n")  # without a task, as RunDirectory writes it
    for message, words in {
        "evaluate": [],
        "one of them": ["--run", tmp_path, "--config", "tiny-pods"],
        "gone": ["--model", "./gone"],
        "with --task": ["--run", tmp_path / "script", "--model", "tiny"],
        "--adapter": ["--adapter", "lora"],
        "file cannot": ["--model", "tiny", "--output", tmp_path / "file"],
        "eval_repeats": ["--model", "tiny", "--eval_repeats", "0"],
        "eval_promts": ["--model", "tiny", "--eval_promts", "3"],
    }.items():
        with pytest.raises(UserError, match=message):
            pods("eval", *words)
    assert evaluated == []


# -- whole ------------------------------------------------------------------------------------------------------------


def lines_of(folder: str) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_run_is_evaluated_while_it_trains_and_after(place, lora):
    peft = ["--use_peft", "--lora_target_modules", "all-linear", "--lora_r", "4"] if lora else []
    pods("train", "--config", "r.yaml", "--output", "run", "--eval_repeats", "2", "--bf16", "false", *peft)
    run = Run.open("run")
    last = pq.read_table(run.evaluation_files()[-1])
    assert last.num_rows == 8
    assert {"pass@2", "pass@2_se"} <= set(run.evals[-1])
    # the same seed as the run's last evaluation: the saved policy must say the same
    pods("eval", "--run", "run", "--output", "results", "--seed", 10_007 * run.seed + 1)
    (line,) = lines_of("results")
    assert pq.read_table(Path("results") / line["completions"]).equals(last)
    assert (line["config"]["adapter_sha256"] is not None) is lora
    base = Path("policy") if lora else run.path / "checkpoints/final"
    assert line["config"]["model_sha256"] == weights_hash(base)


def test_results_are_added_in_lm_evals_format_with_what_repeats_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["eval", "--model", "tiny", "--eval_repeats", "2", "--seed", "3", "--output", "results", *SHORT]
    pods(*words)
    with Path("results/results.jsonl").open("a") as file:
        file.write('{"torn": ')
    pods(*words)
    first, torn, second = Path("results/results.jsonl").read_text().splitlines()
    assert torn == '{"torn": '
    line, again = json.loads(first), json.loads(second)
    metrics = line["results"]["arithmetic"]
    assert metrics == again["results"]["arithmetic"]
    assert {"accuracy", "accuracy_stderr", "pass@1", "pass@2", "pass@2_stderr", "both_accuracy_stderr"} <= set(metrics)
    assert set(line["higher_is_better"]["arithmetic"]) == {name for name in metrics if not name.endswith("_stderr")}
    assert line["n-samples"] == {"arithmetic": {"original": 512, "effective": 3}}
    config = line["config"]
    assert config["model_sha256"] == weights_hash(tiny_policy_path())
    wanted = {"seed": 3, "temperature": 1.0, "max_completion_length": 8, "batch_size": 256, "repeats": 2, "limit": 3}
    wanted |= {"backend": "generate", "device": "cpu", "dtype": "torch.float32", "adapter_sha256": None}
    assert {name: config[name] for name in wanted} == wanted
    assert {"torch", "transformers", "pods-rl"} <= set(config["versions"])
    assert line["configs"]["arithmetic"]["task_difficulty"] == "mixed"
    tables = [pq.read_table(Path("results") / row["completions"]) for row in (line, again)]
    assert len(list(Path("results").glob("completions-arithmetic-*.parquet"))) == 2
    assert tables[0].equals(tables[1])


def test_the_template_and_the_system_prompt_are_in_the_result_even_if_the_policy_is_gone_by_then(place, monkeypatch):
    from tools.pretrain import build_tokenizer

    evaluate = checkpoint.evaluate

    def prune(*words, **options):
        """Evaluate, and prune the checkpoint meanwhile, as a run that trains on does."""
        found = evaluate(*words, **options)
        shutil.rmtree("policy")
        return found

    monkeypatch.setattr(checkpoint, "evaluate", prune)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{{ suffix }}"
    tokenizer.save_pretrained("policy")
    Path("q.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    words = ["--dataset_name", "q.jsonl", "--dataset_test_name", "q.jsonl", "--system_prompt", "Add."]
    words += ["--chat_template_kwargs", "{suffix: '!'}"]
    pods("eval", "--model", "./policy", *words, *SHORT, "--output", "results")
    (line,) = lines_of("results")
    assert line["config"]["chat_template_kwargs"] == {"suffix": "!"}
    assert (line["chat_template"], line["system_instruction"]) == (tokenizer.chat_template, "Add.")
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
        (line,) = lines_of(name)
        said[name] = pq.read_table(Path(name) / line["completions"]).column("completion").to_pylist()
        assert line["config"]["model_sha256"] == weights_hash(Path("policy"))
        assert line["config"]["adapter_sha256"] == (None if name == "base" else weights_hash(Path("lora")))
    assert said["both"] == said["alone"] != said["base"]


def test_a_repository_gives_neither_code_nor_pickles(place, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot_download(name, *, revision, allow_patterns):
        """Replaces the hub: it has nothing."""
        asked.append((name, revision, allow_patterns))
        raise FileNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError, match="nobody/nothing"):
        pods("eval", "--model", "nobody/nothing", *SHORT, "--task", "arithmetic", "--model_revision", "v2")
    assert asked[0][:2] == ("nobody/nothing", "v2")
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in asked[0][2])
    classes = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    Path("policy/config.json").write_text(json.dumps({"model_type": "of-my-own", "auto_map": classes}))
    Path("policy/mine.py").write_text("raise SystemExit('code of the model was run')")
    with pytest.raises(UserError, match=r"\./policy "):
        pods("eval", "--model", "./policy", *SHORT)
