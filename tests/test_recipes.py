"""Every shipped recipe: what it says is true of what it does, and each of the paper's settings trains.

The packages that a recipe needs on a GPU (vllm, bitsandbytes) are taken for installed; nothing is downloaded.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from pods_rl.experiment import load_experiment
from pods_rl.recipe import Origin, Recipe, build_recipe, load_recipe, shipped_arms, shipped_recipes
from pods_rl.recipe import recipe as checks

ALL = shipped_recipes()
EXPERIMENTS = [name for name, path in ALL.items() if "arms" in yaml.safe_load(path.read_text())]
PAPER = [name for name, path in ALL.items() if path.parent.name == "paper"]
SINGLE_GPU = [name for name in PAPER if not name.endswith("8gpu")]


@pytest.fixture(autouse=True)
def _packages_of_a_gpu_machine(monkeypatch):
    find = checks.find_spec
    monkeypatch.setattr(checks, "find_spec", lambda name: name in ("vllm", "bitsandbytes") or find(name))


def header(name: str) -> str:
    """The comment lines at the top of a file, joined."""
    lines = ALL[name].read_text().split("\n")
    return "\n".join(lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))])


@pytest.mark.parametrize("name", sorted(set(ALL) - set(EXPERIMENTS)))
def test_every_recipe_loads(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.batch_plan().num_rollouts >= recipe.batch_plan().num_generations
    assert f"pods train --config {name}" in header(name)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_loads_with_all_its_arms(name):
    experiment = load_experiment(name)
    assert experiment.name == name
    plan = experiment.plan()
    assert len(plan) == len(experiment.arms) * len(experiment.seeds)
    assert f"pods compare --config {name}" in header(name)
    for run in plan[: len(experiment.arms)]:
        alone = load_recipe(f"{name}-{run.arm}")
        assert alone.name == f"{name}-{run.arm}"
        assert {**alone.values, "seed": 1} == dict(run.recipe.values)


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_header_says_hardware_time_and_what_to_expect(name):
    lines = ALL[name].read_text().split("\n")
    assert max(map(len, lines)) <= 120
    for part in (
        "Hardware:",
        "Time:",
        "Expected",
        *(["Memory:", "Not yet run on a GPU by us"] if name in PAPER else []),
    ):
        assert part in header(name).replace("\n# ", " "), part
    for command, named in re.findall(r"pods (train|compare) \S*?--(?:recipe|config) ([\w.-]+)", header(name)):
        assert named in (ALL if command == "compare" else {**ALL, **shipped_arms()}), named


# shared/paper/README.md, "Experimental settings": model, task, n -> m, GRPO's m, KL, seeds
SETTINGS = {
    "gsm8k-qwen2.5-3b": ("Qwen/Qwen2.5-3B-Instruct", "gsm8k", 64, 16, 0.0, 10),
    "math-qwen2.5-3b": ("Qwen/Qwen2.5-3B-Instruct", "math", 32, 8, 0.0, 10),
    "gsm8k-llama3.2-3b": ("meta-llama/Llama-3.2-3B-Instruct", "gsm8k", 64, 16, 0.04, 10),
    "gsm8k-qwen2.5-3b-8gpu": ("Qwen/Qwen2.5-3B-Instruct", "gsm8k", 128, 32, 0.0, 5),
    "gsm8k-qwen2.5-7b-8gpu": ("Qwen/Qwen2.5-7B-Instruct", "gsm8k", 128, 32, 0.0, 5),
    "chemistry-qwen2.5-3b": ("Qwen/Qwen2.5-3B-Instruct", "sciknoweval_chemistry", 64, 16, 0.0, 10),
}


def arms_of(name: str) -> dict[str, Recipe]:
    return {run.arm: run.recipe for run in load_experiment(name, {"seeds": 1}).plan()}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_the_papers(name):
    model, task, n, m, beta, seeds = SETTINGS[name]
    assert load_experiment(name).seeds == tuple(range(1, seeds + 1))
    for arm, recipe in arms_of(name).items():
        values = recipe.values
        assert (values["model_name_or_path"], values["task"], values["beta"]) == (model, task, beta)
        assert (values["rule"], values["advantages"], values["loss_type"]) == ("max_variance", "after", "grpo")
        assert (values["learning_rate"], values["lr_scheduler_type"]) == (5e-6, "constant")
        assert (values["temperature"], values["eval_temperature"], values["eval_repeats"]) == (0.9, 0.9, 5)
        assert (values["max_prompt_length"], values["eval_prompts"]) == (512, None)
        eight = name.endswith("8gpu")
        ours = {"grpo": (m, m), "grpo-ga": (m, m) if eight else (n, n), "pods": (n, m)}
        assert (values["num_rollouts"], values["num_generations"]) == ours[arm]
    assert set(arms_of(name)) == {"grpo", "grpo-ga", "pods"}


@pytest.mark.parametrize("name", SINGLE_GPU)
def test_one_gpu_settings_are_the_papers(name):
    for recipe in arms_of(name).values():
        wanted = {
            "use_peft": True, "lora_r": 64, "lora_alpha": 64, "lora_target_modules": ["all-linear"],
            "optim": "adamw_8bit", "adam_beta1": 0.9, "adam_beta2": 0.99, "weight_decay": 0.1, "max_grad_norm": 0.1,
            "max_completion_length": 512, "use_vllm": True, "vllm_mode": "colocate",
            "eval_seconds": 1800, "max_seconds": 21600,
        }  # fmt: skip
        assert {key: recipe.values.get(key) for key in wanted} == wanted
        assert recipe.batch_plan().prompts_per_generation == 1
    rewards = {"math-qwen2.5-3b": {"accuracy": 1.0}}.get(name) or {
        "chemistry" if name.startswith("chemistry") else "accuracy": 1.0, "format": 0.1, "tag_count": 1.0
    }  # fmt: skip
    assert recipe.values["task_rewards"] == rewards


@pytest.mark.parametrize("name", sorted(set(SETTINGS) - set(SINGLE_GPU)))
def test_eight_gpu_settings_are_the_papers(name):
    experiment = load_experiment(name)
    assert (experiment.accelerate, experiment.processes, experiment.baseline) == ("zero2", 8, "grpo-ga")
    plans = {run.arm: run.recipe.batch_plan(8) for run in experiment.plan()}
    for plan in plans.values():
        assert plan.micro_batch_rows * plan.micro_batches % plan.num_generations == 0  # whole groups on each GPU
    # the paper: 16 rows x 8 GPUs x GA 4 for PODS, x GA 16 for its baseline; both generate as much
    assert (plans["pods"].rows_per_generation, plans["grpo-ga"].rows_per_generation) == (16 * 8 * 4, 16 * 8 * 16)
    for plan in (plans["pods"], plans["grpo-ga"]):
        assert plan.prompts_per_generation * plan.num_rollouts == 2048
    for run in experiment.plan():
        values = run.recipe.values
        assert (values["max_completion_length"], values["bf16"], values["gradient_checkpointing"]) == (1024, True, True)
        assert (values["eval_seconds"], values["max_seconds"], values["use_peft"]) == (120, 2400, False)
        # the paper weighs accuracy, format and tag count by 1 each, a tag being a quarter of the count
        assert values["task_rewards"] == {"accuracy": 1.0, "format": 1.0, "tag_count": 10.0}


@pytest.mark.parametrize(
    ("ablation", "key", "values"),
    [
        ("n", "num_rollouts", [16, 32, 64, 128, 256]),
        ("m", "num_generations", [16, 16, 8, 4, 2]),
        ("rules", "rule", ["max_variance", "max_variance", "max_reward", "random", "percentile"]),
        ("advantages", "advantages", ["after", "before"]),
    ],
)
def test_ablations_change_one_thing_of_setting_a(ablation, key, values):
    setting_a = arms_of("gsm8k-qwen2.5-3b")["pods"].values
    arms = arms_of(f"gsm8k-qwen2.5-3b-ablation-{ablation}")
    assert [recipe.values[key] for recipe in arms.values()] == values
    same_step = ("per_device_train_batch_size", "gradient_accumulation_steps")  # one prompt a step, whatever m is
    for arm, recipe in arms.items():
        changed = {name for name in setting_a if recipe.values[name] != setting_a[name]} - set(same_step)
        assert changed <= ({"num_rollouts"} if arm == "grpo" else {key, "seed"}), arm
        assert recipe.batch_plan().prompts_per_generation == 1


# What a GPU machine has and this one has not; the rest of each recipe is as it is, n and m included.
REPLACED = {
    "use_vllm": False,  # by transformers' own generate
    "optim": "adamw_torch",  # the 8-bit AdamW needs bitsandbytes on a GPU
    "bf16": False,
    "dtype": "float32",
    "use_cpu": True,
    "threads": 1,
    "max_completion_length": 8,  # 512 or 1024 tokens
    "max_seconds": None,  # by two steps
    "max_steps": 2,
    "eval_seconds": None,
    "eval_prompts": 2,  # the whole test set
    "eval_repeats": 2,
    "save_steps": 2,
    "ledger_every": 1,
}
QUESTIONS = {
    "chemistry": [("Is table salt NaCl?", "Yes"), ("H2 + O2 = H2O, balanced:", "2H2 + O2 = 2H2O")],
    "other": [("What is 2 + 2?", "4"), ("What is 3 * 5?", "15")],
}


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> dict[str, Path]:
    """Random weights of the settings' architectures, some 25,000 parameters each, with the byte tokenizer."""
    import torch
    from tools.pretrain import build_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}\n{% endfor %}"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 2048, "vocab_size": len(tokenizer),
             "tie_word_embeddings": True, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None,
             "eos_token_id": tokenizer.eos_token_id}  # fmt: skip
    made = {}
    for family in ("qwen2", "llama"):
        torch.manual_seed(0)
        made[family] = tmp_path_factory.mktemp(family)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(made[family])
        tokenizer.save_pretrained(made[family])
    return made


def trained_arms() -> list[str]:
    """The names of PODS in each of the paper's settings, and of the baselines in one."""
    names = [name for name, (path, _) in shipped_arms().items() if path.stem in PAPER]
    pods = [name for name in names if name.endswith("-pods")]
    baselines = [name for name in names if name.startswith("gsm8k-qwen2.5-3b-grpo")]
    return [*pods, *baselines]


@pytest.mark.slow
@pytest.mark.parametrize("name", trained_arms())
def test_an_arm_trains_for_two_steps(name, policies, tmp_path):
    """Replaces the model by a tiny one of its family, the data by two questions, and what REPLACED lists.

    With one process in place of eight, a step of settings d and e has an eighth of the prompts.
    """
    from pods_rl.training.run import train

    recipe = load_recipe(name)
    questions = QUESTIONS["chemistry" if name.startswith("chemistry") else "other"]
    for split in ("train", "test"):
        rows = [json.dumps({"question": question, "answer": answer}) for question, answer in questions * 4]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    family = "llama" if "llama" in name else "qwen2"
    data = {"task": "dataset", "dataset_name": str(tmp_path / "train.jsonl"),
            "dataset_test_name": str(tmp_path / "test.jsonl"), "system_prompt": "",
            "model_name_or_path": str(policies[family])}  # fmt: skip
    run = train(build_recipe({**recipe.given, **REPLACED, **data}, Origin(name)), tmp_path / "run", progress=False)

    assert run.state == "finished"
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert run.environment["trained_parameters"] < 100_000
    assert (run.final_checkpoint / ("adapter_config.json" if recipe.values["use_peft"] else "config.json")).is_file()
    assert run.evals[-1]["repeats"] == 2
    plan = recipe.batch_plan()
    import pyarrow.parquet as pq

    ledger = pq.read_table(run.rollout_files()[0]).to_pydict()
    assert len(ledger["selected"]) == plan.prompts_per_generation * plan.num_rollouts
    assert sum(ledger["selected"]) == plan.prompts_per_generation * plan.num_generations
    assert {key.removeprefix("reward/") for key in ledger if key.startswith("reward/")} == set(
        recipe.values["task_rewards"]
    )
    assert all(("kl" in row) == (recipe.values["beta"] > 0) for row in run.metrics)
