"""What is wrong with a policy's files is one line, before its weights are loaded."""

import json
import shutil

import pytest
import torch
from httpx import ConnectError
from huggingface_hub.errors import LocalEntryNotFoundError

from pods_rl.errors import UserError
from pods_rl.loading.folders import find_policy
from pods_rl.loading.policy import check_policy, load_tokenizer, uses_bf16
from pods_rl.policies import tiny_policy_path
from pods_rl.recipe import load_recipe
from pods_rl.training.arguments import config_arguments


@pytest.fixture
def policy(tmp_path):
    return shutil.copytree(tiny_policy_path(), tmp_path / "policy")


def cut(name, keep=0.5):
    def spoil(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return spoil


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def change(**values):
    def spoil(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return spoil


def shard_gone(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def adapter(text):
    def spoil(folder):
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
        (folder / "config.json").unlink()
        (folder / "adapter_config.json").write_text(text)

    return spoil


SPOILED = {
    "a pickle": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"),
        "A pickle .* can run code",
    ),
    "weights without an end": (cut("model.safetensors", 0.9), "cannot be loaded"),
    "a shard missing": (shard_gone, "cannot be loaded"),
    "config of nothing": (write("config.json", "{}"), "model_type"),
    "another size": (change(intermediate_size=8), "have another shape than config.json says"),
    "adapter of nothing": (adapter("{}"), "base_model_name_or_path"),
    "adapter's base gone": (adapter('{"base_model_name_or_path": "./gone"}'), "./gone cannot be loaded"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_a_policy_that_is_not_whole_is_refused(policy, kind):
    check_policy(str(policy))
    spoil, said = SPOILED[kind]
    spoil(policy)
    with pytest.raises(UserError, match=said) as refused:
        check_policy(str(policy))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("spoil", [cut("tokenizer.json"), write("tokenizer.json", "{}")])
def test_a_torn_tokenizer_is_refused(policy, spoil):
    spoil(policy)
    with pytest.raises(UserError, match=str(policy)) as refused:
        load_tokenizer(str(policy))
    assert "\n" not in str(refused.value)


def test_an_adapter_on_a_whole_model_is_accepted(policy):
    adapter(json.dumps({"base_model_name_or_path": str(tiny_policy_path())}))(policy)
    check_policy(str(policy))


@pytest.mark.parametrize("emulated", [True, False])
def test_bf16_that_the_gpu_emulates_is_not_used(monkeypatch, emulated):
    """As on a T4 or V100, where torch says that bf16 is supported unless asked for hardware."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(
        "torch.cuda.is_bf16_supported", lambda including_emulation=True: including_emulation or not emulated
    )
    assert uses_bf16({}, on_cpu=False) == (not emulated)
    assert config_arguments(load_recipe("gsm8k-qwen2.5-3b-pods"))["bf16"] == (not emulated)
    assert torch.cuda.is_bf16_supported()


@pytest.mark.parametrize("gpu", [True, False])
def test_a_cpu_computes_in_float32_unless_the_recipe_says_otherwise(monkeypatch, gpu):
    """Also where a GPU that has bf16 is there, and not used."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: gpu)
    values = {"use_cpu": True} if gpu else {}
    assert config_arguments(load_recipe("gsm8k-qwen2.5-3b-pods", values))["bf16"] is False
    assert config_arguments(load_recipe("gsm8k-qwen2.5-3b-pods", values | {"bf16": True}))["bf16"] is True
    assert not uses_bf16({}, on_cpu=True)


def without_network(*_, **__):
    try:
        raise ConnectError("[Errno -2] Name or service not known")
    except ConnectError as error:
        raise LocalEntryNotFoundError("cannot find the files in the local cache") from error


def wrapped_by_transformers(*arguments, **options):
    try:
        without_network()
    except LocalEntryNotFoundError as error:
        raise OSError("We couldn't connect to the hub to load the files.") from error


def test_without_a_network_the_hub_is_named_and_not_the_policy(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", without_network)
    for loader in ("AutoConfig", "AutoTokenizer"):
        monkeypatch.setattr(f"pods_rl.loading.policy.{loader}.from_pretrained", wrapped_by_transformers)
    calls = [
        lambda: find_policy("owner/model"),
        lambda: find_policy("tiny", "owner/adapter"),
        lambda: check_policy("owner/model"),
        lambda: load_tokenizer("owner/model"),
    ]
    for call in calls:
        with pytest.raises(UserError, match=r"hub .*Name or") as refused:
            call()
        assert "\n" not in str(refused.value)
