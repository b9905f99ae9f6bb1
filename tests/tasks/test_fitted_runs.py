"""A run reads its task as the policy does: plain without a chat template, long prompts left out, said and recorded."""

import json
from pathlib import Path

import pytest
from tools.pretrain import build_model, build_tokenizer

from pods_rl.errors import UserError
from pods_rl.loading.folders import find_policy
from pods_rl.loading.prepare import prepare
from pods_rl.recipe import Origin, build_recipe
from pods_rl.training.run import train

from .conftest import write_jsonl

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
RECIPE = {
    "model_name_or_path": "./policy",
    "num_generations": 2,
    "num_rollouts": 4,
    "per_device_train_batch_size": 2,
    "max_completion_length": 4,
    "max_steps": 2,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "eval_prompts": 2,
    "threads": 1,
    "task": "countdown",
    "task_train_size": 40,
    "task_test_size": 10,
    "system_prompt": "",
}


@pytest.fixture
def policy(tmp_path, monkeypatch):
    """A random policy in ``policy/``; gives a function that sets its chat template."""
    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    build_model(tokenizer, **sizes).save_pretrained("policy")
    tokenizer.save_pretrained("policy")

    def set_template(template):
        tokenizer.chat_template = template
        tokenizer.save_pretrained("policy")

    return set_template


def recipe(**values):
    return build_recipe({**RECIPE, **values}, Origin("test"))


def test_prompts_are_counted_in_the_policys_tokens_with_its_template(policy):
    plain = prepare(recipe()).task
    shortest = min(len(prompt.encode()) for prompt in plain.train["prompt"])
    prepared = prepare(recipe(max_prompt_length=shortest))
    kept = prepared.task
    assert {len(prompt.encode()) for prompt in kept.train["prompt"]} == {shortest}
    assert len(kept.train) + prepared.fitted.train_left_out == 40
    evaluated = prepare(recipe(max_prompt_length=shortest), find_policy("./policy"))
    assert (len(evaluated.task.test), evaluated.fitted) == (10, None)
    policy(TEMPLATE)
    with pytest.raises(UserError, match=f"max_prompt_length = {shortest}: .*{shortest + 6} tokens"):
        prepare(recipe(max_prompt_length=shortest))  # <user> and > for the line break at the end


def test_a_run_says_and_records_what_it_left_out(policy, capsys):
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


def test_a_task_without_training_prompts_can_only_be_evaluated(policy, tmp_path):
    write_jsonl(tmp_path / "math500" / "test.jsonl", [{"problem": "1+1?", "answer": "2"}])
    with pytest.raises(UserError, match=r"math .*data_dir = \. "):
        prepare(recipe(task="math", data_dir="."))
    assert len(prepare(recipe(task="math", data_dir="."), find_policy("./policy")).task.test) == 1
