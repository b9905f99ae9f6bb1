"""A run reads its task as the policy does: plain without a chat template, long prompts left out, said and recorded."""

import json
from pathlib import Path

import pytest
from tools.pretrain import build_tokenizer

from pods_rl.errors import UserError
from pods_rl.loading.folders import find_policy
from pods_rl.loading.prepare import prepare
from pods_rl.recipe import Origin, build_recipe
from pods_rl.training.run import train

from .conftest import RECIPE

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def recipe(**values):
    countdown = {"task": "countdown", "task_train_size": 40, "task_test_size": 10, "system_prompt": ""}
    return build_recipe({"model_name_or_path": "./policy", **RECIPE, **countdown, **values}, Origin("test"))


def test_prompts_are_counted_in_the_policys_tokens_with_its_template(place):
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


def test_a_run_says_and_records_what_it_left_out(place, capsys):
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
