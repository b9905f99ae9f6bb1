"""Single tokens with fewer operations: the model's own tokens, and which models compute their tokens themselves."""

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.cache_utils import DynamicCache

from pods_rl.prefix_tree import decoding as generating
from pods_rl.prefix_tree.decoding import RowDraws, complete_prompts
from pods_rl.prefix_tree.plain_decoder import CacheMemory, PlainDecoder, cast_cache, plain_decoder

from . import test_decoding
from .newer import needs_newer_transformers

pytestmark = pytest.mark.numeric
SIZES = test_decoding.SIZES | {"num_hidden_layers": 4}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "granite": {
        "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.3
    },
    "seed_oss": {"head_dim": 8},
    "cwm": {"head_dim": 8, **WINDOWS},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, **WINDOWS},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, **WINDOWS},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "phi3": {},
    "qwen3_5_text": {
        "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
}  # fmt: skip
NEWER = {"gemma", "gemma2", "qwen3_5_text"}  # older transformers arranges these differently
QUICK = {"llama", "mistral", "qwen3", "granite", "gemma2", "olmo2", "smollm3", "qwen3_5_text"}


def shapes(names):
    params = []
    for name in names:
        marks = [needs_newer_transformers] if name in NEWER else []
        if name not in QUICK:
            marks.append(pytest.mark.slow)
        params.append(pytest.param(name, marks=marks))
    return params


OTHERS = {
    "glm": {"head_dim": 8},  # rotates neighbouring columns
    "exaone4": {},  # layers without a window do not rotate
    "ministral3": {"head_dim": 4, "max_position_embeddings": 32768},  # scales queries far from the beginning
    "cohere2": {},  # norms of another form
    "olmo2": {},  # norms of all heads together, and none before a product
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


@pytest.mark.parametrize("shape", shapes(FAMILIES))
def test_tokens_are_the_models_own(monkeypatch, plain_tokens, shape):
    monkeypatch.setattr("pods_rl.prefix_tree.cache._SHARED_FROM", 2**60)  # prompts are copied
    monkeypatch.setattr("pods_rl.prefix_tree.cache._LONG", 20)  # memory is arranged anew on the way
    check_tokens(monkeypatch, plain_tokens, build(shape, FAMILIES[shape]))


@pytest.mark.parametrize("shape", shapes(["llama", "mistral", "qwen3_5_text"]))
def test_tokens_after_shared_prompts_are_the_models_own(monkeypatch, plain_tokens, shape):
    monkeypatch.setattr("pods_rl.prefix_tree.cache._SHARED_FROM", 0)
    monkeypatch.setattr("pods_rl.prefix_tree.cache._LONG", 4)
    check_tokens(monkeypatch, plain_tokens, build(shape, FAMILIES[shape]))


def check_tokens(monkeypatch, plain_tokens, model):
    completions = complete(model)
    assert max(plain_tokens) > 3  # nodes of three prompts have forked
    monkeypatch.setattr(generating, "plain_decoder", lambda model, length: None)
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
    monkeypatch.setattr(generating, "plain_decoder", lambda model, length: None)
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
    policy = get_peft_model(build("qwen3", FAMILIES["qwen3"]), config)
    if kind == "two adapters":
        policy.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["v_proj", "down_proj"]))
    for name, weights in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weights, std=0.3)
    ADAPTERS[kind](policy)
    return policy.eval()


@pytest.mark.parametrize("kind", ADAPTERS)
def test_tokens_with_lora_are_the_models_own(monkeypatch, plain_tokens, kind):
    check_tokens(monkeypatch, plain_tokens, with_lora(kind).get_base_model())


@pytest.mark.parametrize("shape", OTHERS)
def test_a_model_of_another_arrangement_computes_its_tokens_itself(shape):
    assert plain_decoder(build(shape, OTHERS[shape]), 64) is None


def test_gradient_checkpointing_leaves_single_tokens_to_the_decoder():
    """It marks the embeddings by a hook, which changes no value."""
    model = build("qwen2", {})
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    assert model.model.embed_tokens._forward_hooks
    assert plain_decoder(model, 4) is not None


def changed(how):
    """A model that was plain until something about it changed."""
    model = build("qwen2", {})
    assert plain_decoder(model, 64) is not None
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
    return model


@pytest.mark.parametrize(
    "how",
    ["DoRA", "LoRA with a bias", "LoRA of embeddings", "trained copy", "IA3", "hook in an adapter", "hook", "forward"],
)  # fmt: skip
def test_a_model_that_changed_computes_its_tokens_itself(how):
    assert plain_decoder(changed(how), 64) is None


def test_another_arrangement_is_not_served_in_16_bits_because_it_looks_like_rounding(monkeypatch):
    assert plain_decoder(build("llama", {}).bfloat16(), 64) is not None
    monkeypatch.setattr(LlamaConfig, "model_type", "another")
    assert plain_decoder(build("llama", {}).bfloat16(), 64) is None


def logits_of_tokens(model, ids, decoder):
    """The logits after each of the tokens `[rows, T]` but the first two, by the model or by its plain decoder."""
    positions = torch.arange(ids.size(1))
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:, :2], position_ids=positions[None, :2], past_key_values=cache, use_cache=True)
    if decoder is not None:
        cast_cache(cache, decoder.dtype)
    logits = []
    for i in range(2, ids.size(1)):
        at = positions[i : i + 1]
        if decoder is None:
            output = model(input_ids=ids[:, i : i + 1], position_ids=at[None], past_key_values=cache, use_cache=True)
            logits.append(output.logits[:, 0].float())
        else:
            logits.append(decoder(ids[:, i], CacheMemory(decoder, at, None, cache)).float())
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("shape", "precision"),
    [
        *(("qwen2", precision) for precision in ("bfloat16", "float16", "autocast", "autocast of a trainer")),
        ("gemma3_text", "bfloat16"),
        pytest.param("qwen3_5_text", "bfloat16", marks=needs_newer_transformers),
    ],
)
@torch.no_grad()
def test_in_16_bits_tokens_are_as_exact_as_the_models_own(shape, precision):
    ids = torch.randint(40, (8, 12), generator=torch.Generator().manual_seed(0))
    model = build(shape, FAMILIES[shape])
    for weights in model.parameters():
        if weights.ndim == 2:
            weights /= 4  # such large weights as above would amplify every rounding
    exact = logits_of_tokens(model, ids, None)
    if precision in ("bfloat16", "float16"):
        model.to(getattr(torch, precision))
    if precision == "autocast of a trainer":
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        decoder = plain_decoder(model, 64)
        assert decoder is not None
        assert decoder.dtype == torch.float16 if precision == "float16" else torch.bfloat16
        distances = [(logits_of_tokens(model, ids, which) - exact).norm() for which in (None, decoder)]
    assert distances[1] < 1.5 * distances[0]


def test_weights_are_read_again_at_the_same_addresses():
    policy = with_lora("all maps")
    model = policy.get_base_model()
    with torch.no_grad():
        decoder = plain_decoder(model, 64)
        addresses = [copy.tensor.data_ptr() for copy in decoder.copies]
        for weights in policy.parameters():
            weights += 0.1
        fresh = [copy.tensor for copy in plain_decoder(model, 64).copies]
        assert not all(map(torch.equal, [copy.tensor for copy in decoder.copies], fresh))
        decoder.refill()
    assert all(map(torch.equal, [copy.tensor for copy in decoder.copies], fresh))
    assert addresses == [copy.tensor.data_ptr() for copy in decoder.copies]
