"""The vLLM backend against a stand-in: what it is sent, and how its outputs are read.

vLLM needs a GPU. `Engine`, `Params` and `Lora` replace `vllm.LLM`, `vllm.SamplingParams` and
`vllm.lora.request.LoRARequest`, with the signatures and outputs of vLLM 0.22 to 0.31.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import pods_rl.training.trainer  # noqa: F401  (TRL looks for vLLM when it is imported: before the stand-in is there)
from pods_rl.distributed import processes
from pods_rl.errors import UserError
from pods_rl.evaluation import Sampling, vllm_backend
from pods_rl.evaluation.checkpoint import choose_backend, evaluate_checkpoint
from pods_rl.policies import tiny_policy_path
from pods_rl.policies.files import Policy
from pods_rl.recipe import build_recipe
from pods_rl.yaml_files import Origin


@dataclass
class Params:
    """Stands in for vllm.SamplingParams: the fields we set, no others."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = 16
    seed: int | None = None


@dataclass
class Lora:
    """Stands in for vllm.lora.request.LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class Engine:
    """Stands in for vllm.LLM: writes each request's seed, ended where that is even; keeps what it was sent."""

    model: str
    tokenizer: str | None = None
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    quantization: str | None = None
    seed: int = 0
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    load_format: str = "auto"
    enable_lora: bool = False
    max_lora_rank: int = 16
    sent: list = field(default_factory=list, init=False)

    def __post_init__(self):
        ENGINES.append(self)
        computes = torch.bfloat16 if self.dtype == "auto" else getattr(torch, self.dtype)
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(dtype=computes))

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True, lora_request=None):
        self.sent.append((prompts, sampling_params, lora_request))
        outputs = []
        for params in sampling_params:
            text = f"<answer>{params.seed}</answer>"
            reason = "stop" if params.seed % 2 == 0 else "length"
            completion = SimpleNamespace(text=text, token_ids=[7] * 5, finish_reason=reason)
            outputs.append(SimpleNamespace(outputs=[completion]))
        return outputs


ENGINES: list[Engine] = []


@pytest.fixture
def vllm(monkeypatch):
    """Makes the stand-in importable as vllm."""
    ENGINES.clear()
    for name, members in (
        ("vllm", {"LLM": Engine, "SamplingParams": Params}),
        ("vllm.lora", {}),
        ("vllm.lora.request", {"LoRARequest": Lora}),
    ):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("pods_rl.evaluation.checkpoint.version", {"vllm": "0.22.0"}.get)


def recipe(**values):
    given = {"model_name_or_path": "tiny", "max_steps": 1, "use_cpu": True, "bf16": False, **values}
    return build_recipe(given, Origin("test"))


def adapter(folder: Path, **config) -> Policy:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return Policy("tiny", tiny_policy_path(), str(folder), folder)


TINY = Policy("tiny", tiny_policy_path())


def test_an_evaluation_by_vllm(vllm):
    given = recipe(eval_prompts=3, eval_repeats=2, max_completion_length=9, eval_temperature=0.5, seed=4)
    seen = []
    found = evaluate_checkpoint(given, "tiny", backend="vllm", done=lambda rows, of: seen.append((rows, of)))
    (engine,) = ENGINES
    ((prompts, params, lora),) = engine.sent
    assert (engine.model, engine.trust_remote_code, engine.load_format) == (str(TINY.model), False, "safetensors")
    assert [vllm_backend.row_seed(4, row) for row in range(6)] == [p.seed for p in params]
    assert {(p.n, p.temperature, p.top_p, p.top_k, p.max_tokens) for p in params} == {(1, 0.5, 1.0, 0, 9)}
    assert lora is None
    assert all(list(prompt) == ["prompt_token_ids"] for prompt in prompts)
    assert prompts[0] == prompts[1] != prompts[2]
    answers = found.evaluation.answers
    assert [a.completion for a in answers] == [f"<answer>{p.seed}</answer>" for p in params]
    assert [a.ended for a in answers] == [p.seed % 2 == 0 for p in params]
    assert found.evaluation.mean_completion_tokens == 5
    assert found.settings["backend"] == "vllm"
    assert found.settings["versions"]["vllm"] == "0.22.0"
    assert found.settings["dtype"] == "torch.bfloat16"  # of float32 weights
    assert seen == [(6, 6)]


@pytest.mark.parametrize(
    ("config", "room"), [({"r": 1}, 8), ({"r": 64}, 64), ({"r": 16, "rank_pattern": {"q_proj": 65}}, 128)]
)
def test_an_adapter_is_requested_with_room_for_its_rank(vllm, tmp_path, config, room):
    policy = adapter(tmp_path / "a", **config)
    vllm_backend.VLLMSampler(policy, recipe()).sample([[1]], [0], Sampling(), lambda rows, of: None)
    assert (ENGINES[0].enable_lora, ENGINES[0].max_lora_rank) == (True, room)
    assert ENGINES[0].sent[0][2] == Lora("adapter", 1, str(tmp_path / "a"))


def test_an_adapter_that_does_not_fit_is_refused(vllm, tmp_path):
    with pytest.raises(UserError, match="has rank 1024, and vLLM takes 512 at most: use --backend generate"):
        vllm_backend.VLLMSampler(adapter(tmp_path / "a", r=1024), recipe())
    with pytest.raises(UserError, match="expected those of a LoRA adapter"):
        vllm_backend.VLLMSampler(adapter(tmp_path / "b", peft_type="IA3"), recipe())


def test_the_recipes_own_vllm_keys_are_taken(vllm):
    given = recipe(vllm_tensor_parallel_size=2, vllm_gpu_memory_utilization=0.5, vllm_max_model_length=700)
    arguments = vllm_backend.engine_arguments(TINY, given, seed=3)
    assert (arguments["tensor_parallel_size"], arguments["gpu_memory_utilization"]) == (2, 0.5)
    assert (arguments["max_model_len"], arguments["seed"]) == (700, 3)
    assert vllm_backend.VLLMSampler(TINY, recipe(dtype="float32")).dtype == torch.float32


def test_a_missing_or_broken_vllm_is_one_line(vllm, monkeypatch):
    def import_module(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(vllm_backend, "import_module", import_module)
    with pytest.raises(UserError, match=r"OSError: libcudart.*--backend generate"):
        evaluate_checkpoint(recipe(), "tiny", backend="vllm")
    monkeypatch.setattr(vllm_backend, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed: pip install '.\[vllm\]' in a checkout, or use --backend"):
        evaluate_checkpoint(recipe(), "tiny", backend="vllm")


def test_a_vllm_without_metadata_loses_no_evaluation(vllm, monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr("pods_rl.evaluation.checkpoint.version", processes.version)
    found = evaluate_checkpoint(recipe(eval_prompts=2), "tiny", backend="vllm")
    assert found.evaluation.prompts == 2
    assert found.settings["versions"]["vllm"] is None  # and not an error after the work
    sys.modules["vllm"].__version__ = "0.23.0+cpu"
    assert processes.version("vllm") == "0.23.0+cpu"


def test_auto_takes_vllm_where_it_can_work(vllm, monkeypatch):
    assert choose_backend("auto") == ("vllm" if torch.cuda.is_available() else "generate")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_backend("auto") == "vllm"
    assert choose_backend("auto", on_cpu=True) == "generate"
    assert choose_backend("generate") == "generate"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose_backend("auto") == "generate"
    with pytest.raises(UserError, match="--backend vllm runs as one process"):
        choose_backend("vllm")
    with pytest.raises(UserError, match="--backend sglang: expected one of auto, generate, vllm"):
        choose_backend("sglang")
