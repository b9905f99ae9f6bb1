"""Single tokens with fewer operations: the model's own tokens, and which models compute their tokens themselves."""

from __future__ import annotations

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from pods_rl.prefix_tree import nodes
from pods_rl.prefix_tree.decoding import RowDraws, complete_prompts
from pods_rl.prefix_tree.plain_decoder import PlainDecoder, plain_decoder

pytestmark = pytest.mark.numeric
SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.4, "pad_token_id": 0,
}  # fmt: skip
PLAIN = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "granite": {},
    "seed_oss": {"head_dim": 8},
}
OTHERS = {
    "gemma": {"head_dim": 4},  # norms of another form
    "granite": {"residual_multiplier": 0.5},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "ministral3": {"head_dim": 4, "max_position_embeddings": 32768},  # scales queries far from the beginning
    "olmo2": {},  # norms at other places
    "mixtral": {},
    "gpt2": {},
}
PROMPTS = [[5, 6, 7, 8]] * 12 + [[9, 10]] * 12 + [[11, 12, 13, 14, 15, 16, 17, 18, 19]] * 12


def build(shape, settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape, **SIZES | settings)).eval()
    for weights in model.parameters():
        if weights.ndim == 1:  # norms and biases, which begin as 1 and 0
            torch.nn.init.normal_(weights, mean=1.0, std=0.3)
    return model


def complete(model):
    draws = RowDraws([(0, row) for row in range(len(PROMPTS))], 24)
    return complete_prompts(model, PROMPTS, draws, length=24, ends=[1], pad=0, temperature=0.7)


@pytest.fixture
def plain_tokens(monkeypatch):
    """The rows of each call of a plain decoder."""
    rows = []
    call = PlainDecoder.__call__

    def counting(self, ids, *args):
        rows.append(len(ids))
        return call(self, ids, *args)

    monkeypatch.setattr(PlainDecoder, "__call__", counting)
    return rows


@pytest.mark.parametrize("shared", [False, True], ids=["prompts copied", "prompts shared"])
@pytest.mark.parametrize("shape", PLAIN)
def test_tokens_are_the_models_own(monkeypatch, plain_tokens, shape, shared):
    monkeypatch.setattr("pods_rl.prefix_tree.cache._SHARED_FROM", 0 if shared else 2**60)
    model = build(shape, PLAIN[shape])
    completions = complete(model)
    assert max(plain_tokens) > 3  # nodes of three prompts have forked
    monkeypatch.setattr(nodes, "plain_decoder", lambda model: None)
    assert torch.equal(completions, complete(model))


def test_weights_that_change_between_generations_are_read(monkeypatch, plain_tokens):
    model = build("qwen2", {})
    before = complete(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.normal_()
        model.model.layers[2].mlp.up_proj.weight.normal_()
    after = complete(model)
    assert plain_tokens
    assert not torch.equal(before, after)
    monkeypatch.setattr(nodes, "plain_decoder", lambda model: None)
    assert torch.equal(after, complete(model))


ADAPTERS = {
    "all maps": lambda policy: None,
    "scaled by the root of the rank": lambda policy: None,
    "some maps": lambda policy: None,
    "two adapters": lambda policy: policy.base_model.set_adapter(["default", "second"]),
    "merged": lambda policy: policy.merge_adapter(),
    "disabled": lambda policy: policy.base_model.disable_adapter_layers(),
}


def with_lora(kind):
    """A policy with trained adapters."""
    maps = ["k_proj", "o_proj", "up_proj"] if kind == "some maps" else "all-linear"
    is_scaled = kind == "scaled by the root of the rank"
    config = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=3, target_modules=maps, use_rslora=is_scaled)
    policy = get_peft_model(build("qwen3", PLAIN["qwen3"]), config)
    if kind == "two adapters":
        policy.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["v_proj", "down_proj"]))
    for name, weights in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weights, std=0.3)
    ADAPTERS[kind](policy)
    return policy.eval()


@pytest.mark.parametrize("kind", ADAPTERS)
def test_tokens_with_lora_are_the_models_own(monkeypatch, plain_tokens, kind):
    model = with_lora(kind).get_base_model()
    completions = complete(model)
    assert max(plain_tokens) > 3
    monkeypatch.setattr(nodes, "plain_decoder", lambda model: None)
    assert torch.equal(completions, complete(model))


def test_adapters_that_change_between_generations_are_read(plain_tokens):
    policy = with_lora("all maps")
    before = complete(policy.get_base_model())
    with policy.disable_adapter():
        assert not torch.equal(before, complete(policy.get_base_model()))
    assert torch.equal(before, complete(policy.get_base_model()))


@pytest.mark.parametrize("shape", OTHERS)
def test_a_model_of_another_arrangement_computes_its_tokens_itself(shape):
    assert plain_decoder(build(shape, OTHERS[shape])) is None


def changed(how):
    """A model that was plain until something about it changed."""
    model = build("qwen2", {})
    assert plain_decoder(model) is not None
    layer = model.model.layers[1]
    # A new adapter of these kinds changes no logit yet.
    if how == "DoRA":
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], use_dora=True)).get_base_model()
    if how == "LoRA with a bias":
        model = get_peft_model(model, LoraConfig(target_modules=["v_proj"], lora_bias=True)).get_base_model()
    if how == "LoRA of embeddings":
        model = get_peft_model(model, LoraConfig(target_modules=["embed_tokens"])).get_base_model()
    if how == "trained copy":
        config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
        model = get_peft_model(model, config).get_base_model()
    if how == "IA3":
        config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
        model = get_peft_model(model, config).get_base_model()
    if how == "hook in an adapter":
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"])).get_base_model()
        adapter = model.model.layers[1].self_attn.q_proj.lora_B["default"]
        adapter.register_forward_hook(lambda module, args, output: None)
    if how == "hook":
        layer.mlp.register_forward_hook(lambda module, args, output: None)
    if how == "forward":
        layer.mlp.forward = layer.mlp.forward
    if how == "16 bits":
        model = model.bfloat16()
    return model


@pytest.mark.parametrize(
    "how",
    ["DoRA", "LoRA with a bias", "LoRA of embeddings", "trained copy", "IA3", "hook in an adapter", "hook", "forward",
     "16 bits"],
)  # fmt: skip
def test_a_model_that_changed_computes_its_tokens_itself(how):
    assert plain_decoder(changed(how)) is None


def test_autocast_is_left_to_the_model():
    model = build("qwen2", {})
    with torch.autocast("cpu", torch.bfloat16):
        assert plain_decoder(model) is None
