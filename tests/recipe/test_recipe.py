"""Recipes: resolution, what is shipped, and everything that is refused before torch is loaded."""

import pytest
import yaml
from typer.testing import CliRunner

from pods_rl.cli.commands import app
from pods_rl.errors import UserError
from pods_rl.experiment import load_experiment
from pods_rl.recipe import Origin, build_recipe, load_recipe
from pods_rl.recipe.catalog import check_accelerate
from pods_rl.recipe.recipe import FREE, changed_keys
from pods_rl.recipe.schema import fields

MINIMAL = {"max_seconds": 1}


def build(**values):
    return build_recipe({**MINIMAL, **values}, Origin("r.yaml", {"max_seconds": 1}))


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
    with pytest.raises(UserError, match=r"^r\.yaml: .*\b2 rows .*processes 1 x"):
        build_recipe(values, source)
    with pytest.raises(UserError, match=r"\b12 rows .*processes 6 x"):
        build_recipe(values, source, processes=6)
    assert build_recipe(values, source, processes=8).batch_plan(8).prompts_per_generation == 1
    assert build_recipe(values, source, trains=False).values["num_generations"] == 16


def test_the_loss_is_trl_s_by_default_and_keys_follow_from_others():
    values = build(num_generations=4, temperature=0.5).values
    assert (values["loss_type"], values["beta"], values["epsilon"]) == ("dapo", 0.0, 0.2)
    assert (values["num_rollouts"], values["eval_temperature"]) == (4, 0.5)
    assert (values["task"], values["model_name_or_path"]) == ("arithmetic", "tiny")
    assert build(eval_temperature=0).values["eval_temperature"] == 0


def test_each_part_gets_its_own_keys():
    recipe = build(num_rollouts=64, use_peft=True, lora_r=8, task_seed=3, threads=1)
    engine, model = recipe.engine_arguments(), recipe.model_arguments()
    assert engine["num_rollouts"] == 64
    assert "bf16" not in engine  # the machine decides
    assert model == {"model_name_or_path": "tiny", "dtype": "float32", "use_peft": True, "lora_r": 8}
    assert recipe.task_settings()["task_seed"] == 3
    assert recipe.run_settings()["threads"] == 1
    assert not set(engine) & (set(model) | set(recipe.task_settings()) | set(recipe.run_settings()))


# what no library checks: refused when a recipe is loaded, before torch is imported
REFUSED = [
    ({"num_generations": 16}, "per_device_train_batch_size to 16 or 32"),
    ({"seed": 2**32}, "seed"),
    ({"save_strategy": "best"}, "no, steps, epoch"),
    ({"max_completion_length": None}, "max_completion_length"),
    ({"load_in_4bit": True, "use_peft": True, "use_vllm": True}, "bf16"),
    ({"task_rewards": {"acuracy": 1}}, "accuracy?"),
    ({"task_rewards": {"accuracy": True}}, "accuracy: "),
    ({"task_rewards": {}}, "empty mapping"),
    ({"task_rewards": {"accuracy": 0}}, "accuracy: 1.0"),
    ({"task_rewards": {"accuracy": 1e300}}, "a magnitude"),
    # counts that would hang or exhaust the memory
    ({"num_rollouts": 10**9}, "num_rollouts"),
    ({"gradient_accumulation_steps": 10**9}, "1,000,000,000 prompts"),
    ({"task_train_size": 10**9}, "task_train_size"),
    ({"dataset_name": "gone.jsonl", "model_name_or_path": "tiny"}, "no such file"),
    ({"task": "gsm8k"}, "model_name_or_path"),
    # keys that the task does not read
    ({"task": "gsm8"}, "gsm8k?"),
    ({"task": "dataset", "data_dir": ".", "dataset_name": "a/b"}, "data_dir"),
    ({"task": "words", "task_options": {"a": 1}}, "task_options"),
    ({"task": "reasoning_gym:chain_sum", "task_difficulty": "hard"}, "task_difficulty"),
    ({"dataset_name": __file__, "dataset_config": "main"}, "dataset_config = main "),
    ({"max_prompt_length": 0}, "max_prompt_length: "),
    ({"trust_remote_code": True}, "repository"),
    ({"hub_token": "hf_abc"}, "HF_TOKEN"),
    ({"eval_strategy": "steps"}, "eval_seconds"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_cannot_work_is_refused_with_what_to_do(values, message):
    with pytest.raises(UserError) as refusal:
        build(**values)
    assert message in str(refusal.value)
    assert "hf_abc" not in str(refusal.value)


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
    build(model_name_or_path="tiny", **values)


# What TRL, transformers, PEFT or torch reject: refused by the command before a policy loads, in one line. More keys:
# tests/engines/test_bounds.py (numbers, choices and mappings) and test_from_recipe.py (what libraries raise).
REJECTED = {
    "cache_implementation": "fast", "lora_task_type": "X", "lora_dropout": 2, "optim": "adam",
    "report_to": "tensorbord", "activation_checkpointing_kwargs": "[1]", "generation_kwargs": "{a",
    "accelerator_config": "gone.json", "fsdp": True, "debug": "zz", "log_completions_hub_repo": "a/b", "tf32": True,
    "remove_unused_columns": True, "vllm_importance_sampling_clip_min": 4.0, "dynamic_sampling": "accurcy",
    "advantages": "during", "rule": "nowhere_at_all:best",
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), REJECTED.items())
def test_a_wrong_value_ends_the_command_in_one_line_that_names_the_recipe(key, value, tmp_path):
    values = {"max_steps": 2, "use_cpu": True, "bf16": False, "use_peft": key.startswith("lora"), key: value}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(values))
    result = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "r.yaml"), "--dry_run"])
    assert isinstance(result.exception, UserError), repr(result.exception)
    message = str(result.exception)
    assert "r.yaml" in message
    assert key in message or str(value) in message
    assert "\n" not in message
    assert len(message) < 700


def test_every_wrong_key_is_named_with_its_line(tmp_path):
    (tmp_path / "r.yaml").write_text("max_seconds: 1\n\nsed: 1\nbeta: x\n")
    with pytest.raises(UserError) as refusal:
        load_recipe(tmp_path / "r.yaml", {"rulee": "random"})
    first, second = str(refusal.value).split("\n")
    assert first.endswith(" seed?")
    assert ("r.yaml:3: sed: " in first, "r.yaml:4: beta: " in second) == (True, True)
    (tmp_path / "r.yaml").write_text("max_seconds: 1\n")
    with pytest.raises(UserError, match=r"^--rulee: .* rule\?"):
        load_recipe(tmp_path / "r.yaml", {"rulee": "random"})


@pytest.mark.parametrize("options", [{"fsdp_version": 1}, {}])
def test_the_first_fsdp_is_refused(tmp_path, options):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"distributed_type": "FSDP", "fsdp_config": options}))
    with pytest.raises(UserError, match="fsdp_version: "):
        check_accelerate(tmp_path / "mine.yaml")


def test_an_experiment_that_is_its_own_base_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("arms: {x: {}}\nbase: b.yaml\n")
    (tmp_path / "b.yaml").write_text("arms: {x: {}}\nbase: a.yaml\n")
    with pytest.raises(UserError, match=r"b\.yaml"):
        load_experiment(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("given", "seconds", "kept"),
    [
        ({}, 1800.0, 2),
        ({"save_seconds": 60}, 60.0, None),
        ({"save_seconds": None}, None, None),
        ({"save_steps": 10}, None, None),
        ({"save_steps": 10, "save_seconds": 60, "save_total_limit": 1}, 60.0, 1),
    ],
)
def test_saving_where_a_recipe_does_not_say(given, seconds, kept):
    recipe = build(**given)
    assert (recipe.values["save_seconds"], recipe.values["save_total_limit"]) == (seconds, kept)
    assert dict(build(**recipe.values).values) == dict(recipe.values)


@pytest.mark.parametrize(
    ("offline", "token", "message"),
    [
        (True, "hf_x", "push_to_hub .*HF_HUB_OFFLINE"),
        (False, None, "push_to_hub .*HF_TOKEN"),
        (False, "hf_x", r"push_to_hub .*(127\.0\.0\.1|Connect)"),
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


def test_recipes_are_compared_with_the_defaults_of_absent_keys():
    values = load_recipe("tiny-pods").values
    stored = {key: value for key, value in values.items() if key not in ("rule", "eval_temperature")}
    assert changed_keys({**stored, "a_removed_key": 1}, values) == []
    assert changed_keys(values, {**values, "loss_type": "dapo"}) == ["loss_type (saved grpo, now dapo)"]
    assert fields().keys() >= FREE


def test_the_prompt_of_a_shipped_policy_is_the_question_alone(tmp_path):
    """These policies continue a question as text, and know no instructions."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1?", "answer": "2"}\n')
    data = {"dataset_name": str(rows), "dataset_test_name": str(rows)}
    values = build(model_name_or_path="tiny", **data).values
    assert (values["task"], values["prompt_style"], values["system_prompt"]) == ("dataset", "plain", "")
    own = build(model_name_or_path="tiny", system_prompt="Add.", **data).values
    assert (own["prompt_style"], own["system_prompt"]) == ("plain", "Add.")
    assert build(model_name_or_path="owner/name", **data).values["prompt_style"] is None


@pytest.mark.parametrize(
    ("values", "key", "accepted"),
    [
        ({"lora_r": 8}, "lora_r", {"use_peft": True}),
        ({"ref_model_sync_steps": 8, "beta": 0.1}, "ref_model_sync_steps", {"sync_ref_model": True}),
        ({"model_revision": "v2"}, "model_revision", {"model_name_or_path": "owner/model", "task": "arithmetic"}),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor", None),
    ],
)
def test_a_key_that_would_change_nothing_is_refused(values, key, accepted):
    with pytest.raises(UserError, match=rf"\b{key}\b") as refused:
        build(**values)
    assert "\n" not in str(refused.value)
    if accepted is not None:
        build(**values, **accepted)
    build(**{key: fields()[key].default})  # as in the config.yaml of a run


def test_a_local_folder_has_no_revision(tmp_path):
    with pytest.raises(UserError, match="model_revision"):
        build(model_name_or_path=str(tmp_path), model_revision="v2")
    values = {**MINIMAL, "model_name_or_path": str(tmp_path), "model_revision": "v2", "task": "arithmetic"}
    build_recipe(values, Origin("r.yaml"), trains=False)  # the policy of a run whose base is on the hub
