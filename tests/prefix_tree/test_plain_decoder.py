"""Single tokens with fewer operations: the model's own tokens, and which models compute their tokens themselves."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
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


@pytest.mark.parametrize("shape", OTHERS)
def test_a_model_of_another_arrangement_computes_its_tokens_itself(shape):
    assert plain_decoder(build(shape, OTHERS[shape])) is None


def changed(how):
    """A model that was plain until something about it changed."""
    model = build("qwen2", {})
    assert plain_decoder(model) is not None
    layer = model.model.layers[1]
    if how == "adapter":
        # A new adapter changes no logit yet.
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).get_base_model()
    if how == "hook":
        layer.mlp.register_forward_hook(lambda module, args, output: None)
    if how == "forward":
        layer.mlp.forward = layer.mlp.forward
    if how == "16 bits":
        model = model.bfloat16()
    return model


@pytest.mark.parametrize("how", ["adapter", "hook", "forward", "16 bits"])
def test_a_model_that_changed_computes_its_tokens_itself(how):
    assert plain_decoder(changed(how)) is None


def test_autocast_is_left_to_the_model():
    model = build("qwen2", {})
    with torch.autocast("cpu", torch.bfloat16):
        assert plain_decoder(model) is None
