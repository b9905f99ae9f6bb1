"""Recipes: resolution, what is shipped, and everything that is refused before torch is loaded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from pods_rl.engines.trl.settings import LEVERS
from pods_rl.errors import UserError
from pods_rl.experiment import load_experiment
from pods_rl.recipe import Origin, available, build_recipe, checks, load_recipe
from pods_rl.recipe.fields import inside
from pods_rl.recipe.recipe import FREE
from pods_rl.recipe.schema import UNSUPPORTED, fields

MINIMAL = {"max_seconds": 1}


def build(**values):
    return build_recipe({**MINIMAL, **values}, Origin("r.yaml", {"max_seconds": 1}))


@pytest.fixture
def gsm8k(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "1+1?", "answer": "2 #### 2"}\n')
    return {"dataset_name": str(tmp_path / "train.jsonl"), "dataset_test_name": str(tmp_path / "test.jsonl")}


def test_the_resolved_recipe_loads_to_itself(tmp_path):
    first = build(learning_rate="1e-6", num_rollouts=32, task_rewards={"accuracy": 1.0}, save_strategy=False)
    (tmp_path / "config.yaml").write_text(first.to_yaml())
    again = load_recipe(tmp_path / "config.yaml")
    assert dict(again.values) == dict(first.values)
    assert again.to_yaml() == first.to_yaml()


def test_batches_must_fit_the_processes_that_train_them_and_only_those():
    """A group spread over processes is whole over all of them, not on the one that plans or evaluates."""
    values = {**MINIMAL, "num_generations": 16, "per_device_train_batch_size": 2}
    source = Origin("r.yaml")
    with pytest.raises(UserError, match=r"r\.yaml: .*it holds 2 rows .* processes 1 x"):
        build_recipe(values, source)
    with pytest.raises(UserError, match=r"it holds 12 rows .* processes 6 x"):
        build_recipe(values, source, processes=6)
    assert build_recipe(values, source, processes=8).batch_plan(8).prompts_per_step == 1
    assert build_recipe(values, source, trains=False).values["num_generations"] == 16


def test_the_loss_is_trl_s_by_default_and_keys_follow_from_others():
    values = build(num_generations=4, temperature=0.5).values
    assert (values["loss_type"], values["beta"], values["epsilon"]) == ("dapo", 0.0, 0.2)
    assert (values["num_rollouts"], values["eval_temperature"]) == (4, 0.5)
    assert (values["task"], values["model_name_or_path"]) == ("arithmetic", "tiny")
    assert build(eval_temperature=0).values["eval_temperature"] == 0


def test_a_dataset_names_the_task(gsm8k):
    recipe = build(model_name_or_path="tiny", **gsm8k)
    assert recipe.values["task"] == "dataset"


def test_each_part_gets_its_own_keys():
    recipe = build(num_rollouts=64, use_peft=True, lora_r=8, task_seed=3, threads=1, trust_remote_code=True)
    engine, model = recipe.engine_arguments(), recipe.model_arguments()
    assert engine["num_rollouts"] == 64
    assert "trust_remote_code" in engine
    assert "bf16" not in engine  # the machine decides
    assert model == {"model_name_or_path": "tiny", "dtype": "float32", "use_peft": True, "lora_r": 8}
    assert recipe.task_settings()["task_seed"] == 3
    assert recipe.run_settings()["threads"] == 1
    assert not set(engine) & (set(model) | set(recipe.task_settings()) | set(recipe.run_settings()))


def test_the_engine_takes_its_part(tmp_path):
    from pods_rl.engines.trl import PODSConfig

    arguments = build(num_rollouts=32, use_cpu=True, bf16=False).engine_arguments()
    config = PODSConfig(output_dir=str(tmp_path), **arguments)
    assert (config.num_rollouts, config.loss_type, config.max_steps) == (32, "dapo", 10**9)


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({}, 10**9),
        ({"max_steps": 5}, 5),
        ({"num_train_epochs": 2}, None),
        ({"max_steps": -1, "num_train_epochs": 2}, -1),
    ],
)
def test_only_the_clock_stops_a_run_without_steps(values, steps):
    assert build(**values).engine_arguments().get("max_steps") == steps


def test_overrides_replace_the_file(tmp_path):
    (tmp_path / "r.yaml").write_text("max_seconds: 1\nseed: 1\n")
    recipe = load_recipe(tmp_path / "r.yaml", {"seed": "2", "rule": "random", "prompt_once": "no"})
    assert (recipe.values["seed"], recipe.values["rule"], recipe.values["prompt_once"]) == (2, "random", False)
    assert recipe.given == {"max_seconds": 1, "seed": 2, "rule": "random", "prompt_once": False}


def test_a_recipe_cannot_be_changed():
    with pytest.raises(TypeError):
        build().values["seed"] = 1


def test_trls_own_default_of_an_unsupported_key_is_no_mistake():
    assert "eval_strategy" not in build(eval_strategy=False, do_train=False, output_dir=None).values


# (what is in the recipe, what the message must say)
REFUSED = [
    ({"num_rolouts": 64}, "r.yaml: num_rolouts: unknown key. Did you mean num_rollouts?"),
    ({"xyzzy": 1}, "xyzzy: unknown key. Neither pods-rl nor TRL has such a key."),
    ({"learning_rate": "fast"}, "learning_rate: got the text 'fast', expected a number."),
    ({"num_rollouts": 4.5}, "num_rollouts: got 4.5, expected a whole number or null."),
    ({"num_generations": 16}, "holds 8 rows (per_device_train_batch_size 8 x processes 1"),
    ({"num_generations": 16}, "Set per_device_train_batch_size to 16 or 32."),
    ({"num_rollouts": 4}, "cannot keep 8 of 4 rollouts"),
    ({"num_generations": 1}, "num_generations = 1: expected a whole number of at least 2"),
    ({"rollout_batch_size": 0}, "rollout_batch_size = 0: expected at least 1."),
    ({"generation_batch_size": 8, "steps_per_generation": 1}, "keep one of them"),
    ({"max_seconds": None}, "set max_seconds (training clock), max_steps or both"),
    ({"max_seconds": 0}, "max_seconds = 0: expected more than 0."),
    ({"eval_repeats": 0}, "eval_repeats = 0: expected at least 1 and at most 10000."),
    ({"temperature": 0}, "temperature = 0: expected more than 0."),
    ({"lr_scheduler_type": "cosine"}, "set max_steps as well, or lr_scheduler_type: constant"),
    ({"rule": "../x"}, "rule = ../x: expected one of max_variance"),
    ({"rule": "max_varience"}, "Did you mean max_variance?"),
    ({"advantages": "both"}, "expected one of after, before"),
    ({"advantage_baseline": "rloo"}, "expected one of mean, leave_one_out"),
    ({"advantage_baseline": "leave_one_out"}, "Set scale_rewards: none"),
    (
        {"advantages": "before", "multi_objective_aggregation": "normalize_then_sum"},
        "needs multi_objective_aggregation='sum_then_normalize'",
    ),
    ({"loss_type": "cispo"}, "Set epsilon_high: 5.0"),
    ({"loss_type": "cispo", "epsilon_high": 0.28}, "Set epsilon_high: 5.0"),
    ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "unset importance_sampling_level"),
    ({"loss_type": "vespo", "use_vllm": True}, "set token_truncate or token_mask"),
    ({"loss_type": "gpro"}, "loss_type: got the text 'gpro', expected one of grpo"),
    ({"use_vllm": True, "use_transformers_continuous_batching": True}, "choose one generator"),
    (
        {"use_transformers_continuous_batching": True, "fp16": True, "dtype": "float32"},
        "TRL would turn the trained float32 weights into fp16",
    ),
    ({"bf16": True, "fp16": True}, "bf16 and fp16 are both true: choose one"),
    ({"load_in_4bit": True}, "set use_peft: true as well"),
    ({"load_in_4bit": True, "load_in_8bit": True}, "choose one"),
    ({"load_in_4bit": True, "use_peft": True, "use_vllm": True}, "Unset load_in_4bit (LoRA on a bf16 base)"),
    ({"task_rewards": {"acuracy": 1}}, "Did you mean accuracy?"),
    ({"task_rewards": {"accuracy": True}}, "accuracy: got true, expected a weight, such as 1.0."),
    ({"task": "dataset", "model_name_or_path": "tiny"}, "task = dataset needs dataset_name"),
    ({"task": "arithmetic", "dataset_name": "x.jsonl"}, "set task: dataset (or gsm8k)"),
    ({"dataset_name": "gone.jsonl", "model_name_or_path": "tiny"}, "there is no such file or directory"),
    ({"task": "gsm8k"}, "model_name_or_path is not set"),
    ({"model_name_or_path": "./gone"}, "there is no such directory (looked in"),
    ({"output_dir": "x"}, "choose it with --output"),
    ({"resume_from_checkpoint": "x"}, "continue a run with --resume"),
    ({"save_only_model": True}, "cannot resume from a checkpoint without its optimizer"),
    ({"hub_token": "hf_abc"}, "set HF_TOKEN in the environment"),
    ({"eval_strategy": "steps"}, "use eval_seconds"),
    ({"reward_weights": [1.0]}, "task_rewards: {accuracy: 1.0"),
    ({"log_multimodal": False}, "images are not supported yet"),
    ({"auto_find_batch_size": True}, "set rollout_batch_size"),
    ({"use_transformers_paged": True}, "use use_transformers_continuous_batching"),
    ({"seed": 2**32}, "seed = 4294967296: expected at least 0 and at most 4294967295."),
    ({"seed": -1}, "seed = -1: expected at least 0"),
    ({"data_seed": 2**32}, "data_seed = 4294967296: expected"),
    ({"lora_r": 0}, "lora_r = 0: expected at least 1"),
    ({"lora_r": -4}, "lora_r = -4: expected at least 1"),
    ({"lora_alpha": 0}, "lora_alpha = 0: expected at least 1"),
    ({"lora_dropout": 2}, "lora_dropout = 2: expected at least 0 and less than 1."),
    ({"min_p": 5}, "min_p = 5: expected at least 0 and at most 1."),
    ({"top_k": -5}, "top_k = -5: expected at least 0"),
    ({"top_p": 0}, "top_p = 0: expected more than 0 and at most 1."),
    ({"repetition_penalty": 0}, "repetition_penalty = 0: expected more than 0."),
    ({"adam_beta1": 2}, "adam_beta1 = 2: expected at least 0 and less than 1."),
    ({"adam_beta2": 1.0}, "adam_beta2 = 1.0: expected at least 0 and less than 1."),
    ({"weight_decay": float("nan")}, "weight_decay: got nan, expected a number."),
    ({"max_grad_norm": -1}, "max_grad_norm = -1: expected at least 0."),
    ({"warmup_steps": -5}, "warmup_steps = -5: expected at least 0."),
    ({"warmup_steps": 2.5}, "warmup_steps = 2.5: expected a whole number of steps, or a fraction"),
    ({"dataloader_num_workers": -1}, "dataloader_num_workers = -1: expected at least 0"),
    ({"dataloader_prefetch_factor": 2}, "set dataloader_num_workers above 0"),
    ({"attn_implementation": "flash"}, "attn_implementation = flash: expected one of eager, sdpa"),
    ({"cache_implementation": "fast"}, "cache_implementation: got the text 'fast', expected one of dynamic, static"),
    ({"report_to": "tensorbord"}, "report_to: got the text 'tensorbord', expected one of wandb, tensorboard"),
    ({"report_to": "tensorbord"}, "none or null (did you mean tensorboard?)."),
    ({"report_to": ["wandb", "trakio"]}, "none (did you mean trackio?)."),
    ({"report_to": ["wandb", "wandbd"]}, "report_to: got the text 'wandbd' in the list, expected some of wandb"),
    ({"optim": "adam"}, "optim: got the text 'adam', expected one of adamw_torch"),
    ({"optim": "galore_adamw"}, "optim = galore_adamw needs optim_target_modules"),
    ({"optim_args": "rank"}, "optim_args: got rank, expected names and values"),
    ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type: got the text 'cosin', expected one of linear"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "it needs TRL's evaluation"),
    ({"save_strategy": "best"}, "TRL cannot know the best checkpoint: set steps, epoch or no"),
    ({"ref_model_sync_steps": 0}, "ref_model_sync_steps = 0: expected at least 1."),
    ({"ref_model_mixup_alpha": 1.5}, "ref_model_mixup_alpha = 1.5: expected at least 0 and at most 1."),
    ({"sync_ref_model": True}, "sync_ref_model = true: there is no reference model with beta = 0"),
    ({"sync_ref_model": True, "use_peft": True, "beta": 0.1}, "no reference model with use_peft"),
    ({"num_rollouts": 1e30}, "num_rollouts: got 1000000000000000019884624838656, expected a number of at most"),
    ({"num_rollouts": 10**9}, "num_rollouts = 1000000000: expected at least 1 and at most 1000000."),
    ({"eval_repeats": 10**9}, "eval_repeats = 1000000000: expected at least 1 and at most 10000."),
    ({"max_completion_length": 0}, "max_completion_length = 0: expected at least 1"),
    ({"max_completion_length": None}, "max_completion_length = null: expected at least 1"),
    ({"save_steps": 0}, "save_steps = 0: expected more than 0."),
    ({"save_total_limit": 0}, "save_total_limit = 0: expected at least 1."),
    ({"logging_steps": 0}, "logging_steps = 0: expected more than 0."),
    ({"generation_kwargs": {"top_k": -1}}, "generation_kwargs: top_k = -1: expected a number, at least 1"),
    ({"generation_kwargs": '{"min_p": 5}'}, "generation_kwargs: min_p = 5: expected a number"),
    ({"generation_kwargs": {"max_new_tokens": "x"}}, "max_new_tokens = x: expected a number, at least 1."),
    ({"max_steps": 2, "lr_scheduler_type": "cosine_with_min_lr"}, "needs lr_scheduler_kwargs: {min_lr or min_lr_rate"),
    ({"max_steps": 2, "lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"power": 2}}, "linear takes nothing"),
    ({"cache_implementation": "offloaded", "use_cpu": True}, "it needs a GPU, and use_cpu is true"),
    ({"dtype": "float64"}, "dtype: got the text 'float64', expected one of auto, bfloat16"),
    ({"pad_to_multiple_of": "8x"}, "pad_to_multiple_of = 8x: expected a whole number, auto or null."),
    ({"generation_kwargs": "{a"}, "generation_kwargs = {a: expected a mapping"),
    ({"model_init_kwargs": "[1]"}, "model_init_kwargs = [1]: expected a mapping"),
    ({"deepspeed": "gone.json"}, "deepspeed = gone.json: there is no such file"),
    ({"log_completions_hub_repo": "a/b"}, "log_completions is false: set it to true"),
    ({"vllm_importance_sampling_clip_min": 4.0}, "clip_min = 4.0: expected less than clip_max, 3.0"),
    ({"vllm_gpu_memory_utilization": 30}, "vllm_gpu_memory_utilization = 30: expected more than 0 and at most 1."),
    ({"arms": {}}, "use `pods compare --config`"),
]  # fmt: skip


def test_every_key_with_a_number_has_a_range_that_its_default_lies_in():
    numbers = {key: field for key, field in fields().items() if field.kinds & {"int", "float"}}
    ranges = {key: field.within for key, field in fields().items() if field.within}
    assert ranges.keys() == numbers.keys() - UNSUPPORTED.keys()
    for key, interval in ranges.items():
        default = numbers[key].default
        assert not isinstance(default, (int, float)) or inside(default, interval), key


@pytest.mark.parametrize(("values", "message"), REFUSED[:-1])
def test_what_cannot_work_is_refused_with_what_to_do(values, message):
    with pytest.raises(UserError) as refusal:
        build(**values)
    assert message in str(refusal.value)
    assert "hf_abc" not in str(refusal.value)


def test_all_of_it_is_refused_before_torch_is_loaded(tmp_path):
    paths = []
    for number, (values, _) in enumerate(REFUSED):
        paths.append(tmp_path / f"{number}.yaml")
        paths[-1].write_text(yaml.safe_dump({**MINIMAL, **values}))
    code = """
import json, sys
from pods_rl.errors import UserError
from pods_rl.experiment import load_experiment
from pods_rl.recipe import load_recipe
messages = []
for path in sys.argv[1:]:
    try:
        load_recipe(path)
        messages.append("accepted")
    except UserError as error:
        messages.append(str(error))
heavy = [name for name in ("torch", "trl", "transformers", "datasets", "pyarrow") if name in sys.modules]
print(json.dumps({"messages": messages, "heavy": heavy}))
"""
    done = subprocess.run([sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True)
    result = json.loads(done.stdout)
    assert result["heavy"] == []
    for message, (_, expected) in zip(result["messages"], REFUSED, strict=True):
        assert expected.removeprefix("r.yaml: ") in message


def test_every_wrong_key_is_named_with_its_line(tmp_path):
    (tmp_path / "r.yaml").write_text("max_seconds: 1\n\nsed: 1\nbeta: x\n")
    with pytest.raises(UserError) as refusal:
        load_recipe(tmp_path / "r.yaml", {"rulee": "random"})
    first, second = str(refusal.value).split("\n")
    assert first.endswith("r.yaml:3: sed: unknown key. Did you mean seed?")
    assert second.endswith("r.yaml:4: beta: got the text 'x', expected a number.")
    (tmp_path / "r.yaml").write_text("max_seconds: 1\n")
    with pytest.raises(UserError, match=r"^--rulee: unknown key\. Did you mean rule\?"):
        load_recipe(tmp_path / "r.yaml", {"rulee": "random"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny-pod", r"neither a file nor a shipped recipe.*Did you mean tiny-pods\?"),
        ("quickstart_pods", r"neither a file nor a shipped recipe.*Did you mean quickstart-pods\?"),
        ("gone/mine.yaml", "neither a file nor a shipped recipe: expected a YAML file or one of"),
    ],
)
def test_a_recipe_that_is_not_there(name, message):
    with pytest.raises(UserError, match=message):
        load_recipe(name)


def test_files_that_are_no_recipes(tmp_path):
    with pytest.raises(UserError, match="is a directory"):
        load_recipe(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not text in UTF-8"):
        load_recipe(tmp_path / "weights.bin")


def test_columns_are_checked_against_the_file(gsm8k, tmp_path):
    build(model_name_or_path="tiny", question_column="question", **gsm8k)
    with pytest.raises(UserError, match=r"has the columns question, answer\. Did you mean question\?"):
        build(model_name_or_path="tiny", question_column="qestion", **gsm8k)
    (tmp_path / "train.jsonl").write_text("[1]\n")
    with pytest.raises(UserError, match="line 1: is a list: expected a JSON object"):
        build(model_name_or_path="tiny", **gsm8k)


def test_a_model_directory_must_hold_a_model(tmp_path):
    with pytest.raises(UserError, match=r"holds no config\.json"):
        build(model_name_or_path=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    build(model_name_or_path=str(tmp_path))
    build(model_name_or_path="Qwen/Qwen2.5-3B-Instruct")


def test_bf16_needs_a_processor_that_has_it(monkeypatch):
    monkeypatch.setattr("pods_rl.recipe.checks.cpu_has_bf16", lambda: False)
    build(bf16=True)  # a GPU may be there
    build(use_cpu=True)
    with pytest.raises(UserError, match=r"no bf16 instructions.*or set bf16: false"):
        build(bf16=True, use_cpu=True)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx2\n", False),
        ("model name: x\n", None),
    ],
)
def test_the_processor_says_what_it_has(tmp_path, monkeypatch, text, answer):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(checks, "Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr(checks.platform, "system", lambda: "Linux")
    assert checks.cpu_has_bf16() is answer


@pytest.mark.parametrize(
    ("values", "package", "install"),
    [
        ({"use_vllm": True}, "vllm", r"'pods-rl\[vllm\]'"),
        ({"load_in_8bit": True, "use_peft": True}, "bitsandbytes and peft", r"'pods-rl\[quant\]' peft"),
        ({"optim": "adamw_8bit"}, "bitsandbytes", r"'pods-rl\[quant\]'"),
        ({"optim": "lomo"}, "lomo-optim", "lomo-optim"),
        ({"report_to": "wandb"}, "wandb", "wandb"),
        ({"report_to": ["tensorboard", "trackio"]}, "tensorboard and trackio", "tensorboard trackio"),
        ({"attn_implementation": "flash_attention_2"}, "flash-attn", "flash-attn"),
        ({"use_liger_kernel": True}, "liger-kernel", "liger-kernel"),
        ({"cache_implementation": "quantized"}, "optimum-quanto", "optimum-quanto"),
        (
            {"use_vllm": True, "optim": "adamw_8bit", "deepspeed": {"a": 1}, "report_to": ["mlflow", "wandb"]},
            "vllm, bitsandbytes, mlflow, wandb and deepspeed",
            r"'pods-rl\[vllm,quant,deepspeed\]' mlflow wandb",
        ),
    ],
)
def test_what_is_not_installed_is_named_at_once_where_one_trains_and_not_before(monkeypatch, values, package, install):
    monkeypatch.setattr(available, "find_spec", lambda name: None)
    recipe = build(**values)  # to read it, or to evaluate its policy, takes no extra
    with pytest.raises(UserError, match=rf"needs {package}, .* pip install {install}\."):
        recipe.check_installed()
    assert build().missing_library is None


@pytest.mark.parametrize(
    "values",
    [{"rule": "nowhere_at_all:best"}, {"task": "nowhere_at_all.tasks.mine"}, {"task_rewards": {"nowhere_at_all:r": 1}}],
)
def test_a_module_of_ones_own_that_is_not_there_is_named_before_loading(values):
    recipe = build(model_name_or_path="tiny", **values)
    with pytest.raises(UserError, match="there is no module nowhere_at_all"):
        recipe.check_installed()


def test_an_experiment_that_is_its_own_base_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("arms: {x: {}}\nbase: b.yaml\n")
    (tmp_path / "b.yaml").write_text("arms: {x: {}}\nbase: a.yaml\n")
    with pytest.raises(UserError, match="is its own base"):
        load_experiment(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("given", "seconds", "kept"),
    [
        ({}, 1800.0, 2),
        ({"save_total_limit": 5}, 1800.0, 5),
        ({"save_seconds": 60}, 60.0, None),
        ({"save_seconds": None}, None, None),
        ({"save_steps": 10}, None, None),
        ({"save_strategy": "no"}, None, None),
        ({"save_steps": 10, "save_seconds": 60, "save_total_limit": 1}, 60.0, 1),
    ],
)
def test_saving_where_a_recipe_does_not_say(given, seconds, kept):
    recipe = build(**given)
    assert (recipe.values["save_seconds"], recipe.values["save_total_limit"]) == (seconds, kept)
    again = build(**recipe.values)
    assert dict(again.values) == dict(recipe.values)


def test_what_may_change_when_a_run_goes_on_is_a_key():
    assert fields().keys() >= FREE


@pytest.mark.parametrize(
    ("offline", "token", "message"),
    [
        (True, "hf_x", "push_to_hub needs the hub, and HF_HUB_OFFLINE is set"),
        (False, None, "push_to_hub needs a token of the hub: set HF_TOKEN"),
        (False, "hf_x", "push_to_hub needs the hub, which cannot be reached"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_loading(monkeypatch, offline, token, message):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    with pytest.raises(UserError, match=message) as refusal:
        build(push_to_hub=True).check_reachable()
    assert "hf_x" not in str(refusal.value)


def test_the_switch_that_gives_trl_back_shows_in_the_resolved_recipe():
    exact = build(exact_trl=True, prompt_once=True, skip_zero_advantage_steps=True)
    assert [exact.values[lever] for lever in LEVERS] == [False] * len(LEVERS)
    assert all(build(skip_zero_advantage_steps=True).values[lever] for lever in LEVERS)
