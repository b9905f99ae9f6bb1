"""The vLLM backend against a stand-in: what it is made with, and when it is chosen. A real one: tests/real_vllm."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from peft import IA3Config, LoraConfig

import pods_rl.training.trainer  # noqa: F401  (TRL looks for vLLM when it is imported: before the stand-in is there)
from pods_rl.errors import UserError
from pods_rl.evaluation import Sampling, sampling
from pods_rl.evaluation.checkpoint import choose_backend, evaluate_checkpoint
from pods_rl.loading.folders import Policy
from pods_rl.policies import tiny_policy_path
from pods_rl.recipe import build_recipe
from pods_rl.yaml_files import Origin


class Engine:
    """Stands in for vllm.LLM: keeps what it was made with, and the adapter of its last request."""

    def __init__(self, **settings):
        self.settings = settings
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
        ENGINES.append(self)

    def generate(self, requests, *, lora_request, **_):
        self.lora_request = lora_request
        return []


ENGINES: list[Engine] = []


@pytest.fixture
def vllm(monkeypatch):
    """Makes the stand-in importable as vllm."""
    ENGINES.clear()
    for name, members in {
        "vllm": {"LLM": Engine, "SamplingParams": SimpleNamespace},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": lambda *words: words},
    }.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


def recipe(**values):
    given = {"model_name_or_path": "tiny", "max_steps": 1, "use_cpu": True, "bf16": False, **values}
    return build_recipe(given, Origin("test"))


def test_the_recipes_keys_and_the_adapter_reach_the_engine(vllm, tmp_path):
    keys = {"vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.5, "vllm_max_model_length": 700}
    policy = Policy("tiny", tiny_policy_path(), "lora", tmp_path)
    for ranks, room in (({"r": 1}, 8), ({"r": 64}, 64), ({"r": 16, "rank_pattern": {"q_proj": 65}}, 128)):
        LoraConfig(**ranks).save_pretrained(tmp_path)
        sampler = sampling.VLLMSampler(policy, recipe(dtype="float32", **keys), None)
        sampler.sample([], [], Sampling(), lambda rows, of: None)
        engine = ENGINES.pop()
        assert engine.lora_request == ("adapter", 1, str(tmp_path))
        wanted = {
            "enable_lora": True, "max_lora_rank": room, "dtype": "float32", "tensor_parallel_size": 2,
            "gpu_memory_utilization": 0.5, "max_model_len": 700,
            "trust_remote_code": False, "load_format": "safetensors",  # neither code nor pickles
        }  # fmt: skip
        assert {key: engine.settings[key] for key in wanted} == wanted
    IA3Config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="IA3"):
        sampling.VLLMSampler(policy, recipe(), None)


def test_a_missing_or_broken_vllm_is_one_line(vllm, monkeypatch):
    def broken(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(sampling, "import_module", broken)
    with pytest.raises(UserError, match=r"OSError: libcudart.*--backend generate"):
        evaluate_checkpoint(recipe(), "tiny", backend="vllm")


def test_auto_takes_vllm_where_it_can_work(vllm, monkeypatch):
    tools = SimpleNamespace(converses=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_backend("auto") == "vllm"
    assert choose_backend("auto", on_cpu=True) == choose_backend("auto", task=tools) == "generate"
    with pytest.raises(UserError, match="tools"):
        choose_backend("vllm", task=tools)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose_backend("auto") == "generate"
    with pytest.raises(UserError, match="process"):
        choose_backend("vllm")
    with pytest.raises(UserError, match="sglang"):
        choose_backend("sglang")
