"""The estimate of memory: its activations are those that torch stores, and each key changes what it should."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from pods_rl.errors import UserError
from pods_rl.planning.memory import GIB, estimate_memory, layer_bytes
from pods_rl.recipe import load_recipe

SHAPE = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
ROWS, TOKENS = 2, 64


def stored_bytes(layers: int, dtype: torch.dtype) -> int:
    """The bytes that a forward pass stores for the backward pass, without weights; each storage once."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=layers, attn_implementation="sdpa", **SHAPE)).to(dtype)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    sizes: dict[int, int] = {}
    stored = []  # kept, so that no storage has the address of another

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            stored.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(input_ids=torch.randint(0, 64, (ROWS, TOKENS)), use_cache=False)
    return sum(sizes.values())


@pytest.mark.parametrize(("dtype", "compute"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_the_activations_of_a_layer_are_those_that_torch_stores(dtype, compute):
    of_two_layers = stored_bytes(4, dtype) - stored_bytes(2, dtype)
    estimated = 2 * ROWS * TOKENS * layer_bytes(Qwen2Config(**SHAPE), compute)
    assert estimated == pytest.approx(of_two_layers, rel=0.1)


def changed(**keys):
    """The parts of the estimate that some keys change, as multiples of those of `tiny-pods`."""
    parts = ("weights", "optimizer", "vllm", "gradients", "activations", "cache", "sampling")
    before = estimate_memory(load_recipe("tiny-pods"))
    after = estimate_memory(load_recipe("tiny-pods", keys))
    changes = {}
    for part in parts:
        was = getattr(before, part)
        now = getattr(after, part)
        if now != was:
            changes[part] = now / was if was else now
    return changes


def test_rollouts_cost_memory_in_generation_only():
    assert changed(num_rollouts=128) == {"cache": 2.0, "sampling": 2.0}
    assert changed(rollout_batch_size=16) == {"cache": 0.25, "sampling": 0.25}


def test_micro_batches_cost_memory_in_the_update_only():
    """m itself costs none."""
    halves = changed(per_device_train_batch_size=8, gradient_accumulation_steps=2)
    assert halves.keys() == {"activations"}
    assert halves["activations"] < 0.7
    assert changed(num_generations=8, per_device_train_batch_size=16) == {"cache": 2.0, "sampling": 2.0}  # two prompts


def test_other_keys_change_what_they_should():
    assert changed(beta=0.1) == {"weights": 2.0}
    assert changed(optim="adamw_8bit") == {"optimizer": 0.25}
    assert changed(gradient_checkpointing=True)["activations"] < 1
    adapter = changed(use_peft=True, lora_r=8)
    assert adapter["gradients"] < 0.5
    assert adapter["weights"] > 1
    vllm = changed(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.5)
    assert vllm == {"vllm": 12 * GIB, "cache": 0.0, "sampling": 0.0}


def test_another_optimizer_is_refused():
    with pytest.raises(UserError, match="optim = sgd: "):
        estimate_memory(load_recipe("tiny-pods", {"optim": "sgd"}))
