"""Passwords and tokens do not reach the files of a run."""

import json

import pytest

from pods_rl.errors import UserError
from pods_rl.masking import mask_secrets
from pods_rl.recipe import load_recipe
from pods_rl.recipe.schema import fields
from pods_rl.runs import Run, RunWriter

TOKEN = "hf_abcdefghijklmnopqrstuv"


@pytest.mark.parametrize(
    ("words", "secret"),
    [
        (["--hub_token", "s3cret"], "s3cret"),
        (["--apiKey", "s3cret"], "s3cret"),
        (["HF_TOKEN=s3cret"], "s3cret"),
        (["--config", '{"hub_token": "s3cret", "n": 1}'], "s3cret"),
        (["--url", "https://me:s3cret@host/v1"], "s3cret"),
        (["--url", "https://host/file?sig=s3cret&n=1"], "s3cret"),
        (["--header", "Authorization: Bearer s3cret"], "s3cret"),
        (["--header", "bearer abcdefghijklm4567"], "abcdefghijklm4567"),
        (["--name", TOKEN], TOKEN),
    ],
)
def test_secrets_of_a_command_line_are_masked(words, secret):
    masked = mask_secrets(["train.py", *words, "--seed", "1"])
    assert secret not in " ".join(masked)
    assert "***" in " ".join(masked)
    assert masked[0] == "train.py"
    assert masked[-2:] == ["--seed", "1"]
    assert mask_secrets(masked) == masked


@pytest.mark.parametrize(
    "value",
    [
        ["--max_tokens", "512", "--pad_token", "<pad>", "--question_key", "question", "--tokenizer", "name", "--token"],
        ["--token", "--seed", "1"],
        {"pad_token": "<pad>", "num_rollouts": 16, "hub_token": None, "stop": ["a", "b"], "key": 3},
        "Basic arithmetic. Write the key as name=value; a bearer of news. https://host/path?page=2 me@host.com",
    ],
)
def test_what_is_not_a_secret_stays(value):
    assert mask_secrets(value) == value


def test_keys_of_a_recipe_are_not_secrets():
    keys = set(fields()) - {"hub_token"}
    assert mask_secrets(dict.fromkeys(keys, "value")) == dict.fromkeys(keys, "value")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_init_kwargs", {"token": "s3cret"}),
        ("vllm_server_base_url", "http://me:s3cret@host:8000"),
        ("run_name", TOKEN),
        ("generation_kwargs", {"a": [{"api_key": "s3cret"}]}),
    ],
)
def test_a_recipe_with_a_secret_is_refused(key, value):
    with pytest.raises(UserError, match=key) as refused:
        load_recipe("tiny-pods", {key: json.dumps(value) if isinstance(value, dict) else value})
    assert "s3cret" not in str(refused.value)
    assert TOKEN not in str(refused.value)


def test_the_reason_of_a_status_has_no_secret(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        writer.write_status("failed", reason=f"401 for https://me:s3cret@host and {TOKEN}")
    assert Run(tmp_path / "run").status["reason"] == "401 for https://***@host and ***"
