"""Decoding over the tree of prefixes: the tokens of `generate`, its distribution, and a row for each node."""

import logging
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.cache_utils import DynamicCache, DynamicLayer

from pods_rl.prefix_tree import decoding as generating
from pods_rl.prefix_tree.cache import NodeLayer, move_nodes
from pods_rl.prefix_tree.decoding import CannotServeError, RowDraws, complete, decode
from pods_rl.prefix_tree.grouping import distinct_share
from pods_rl.prefix_tree.images import Images

from .newer import needs_newer_transformers

pytestmark = pytest.mark.numeric
V, PAD, END = 40, 0, 1
SIZES = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.4, "pad_token_id": PAD}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [4.0, 4.0], "rope_theta": 1e4}
SHAPES = {
    "qwen2": {},
    "llama": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {**SLIDING, "attn_logit_softcapping": 5.0},
    "gemma3_text": SLIDING,
    "gpt2": {},
    "phi3": {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE, "bos_token_id": 1, "eos_token_id": 1},
}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA |= {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1} | EXPERTS
MAMBA = {"n_groups": 1, "chunk_size": 8, "head_dim": 4}
HYBRID = {  # with states of a layer that reads tokens one after another, or with keys and values of another form
    "qwen3_5_text": DELTA | {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "nemotron_h": MAMBA
    | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mlp", "attention"], "ssm_state_size": 4}
    | {"mamba_num_heads": 4, "mamba_head_dim": 8, "conv_kernel": 4},
    "falcon_h1": MAMBA
    | {"mamba_d_state": 4, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1},
    "mamba": {"state_size": 4},
    "deepseek_v3": LATENT,
    "gpt_oss": SLIDING | EXPERTS,
    "llama4_text": EXPERTS
    | {"attention_chunk_size": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 16, "head_dim": 4}
    | {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 0]},
}
PLAIN = tuple(SHAPES)
SHAPES |= HYBRID
EQUAL = [[5, 6, 7, 8]] * 3 + [[9, 10, 11, 12]] * 2
MIXED = [[5, 6, 7, 8]] * 3 + [[9, 10]] * 2 + [[11, 12, 13, 14, 15, 16, 17, 18, 19]] * 2


@pytest.fixture(params=["copied", "shared"])
def kept(request, monkeypatch):
    """How prompts are kept: short ones are copied for each node, long ones shared. Here all are short."""
    monkeypatch.setattr("pods_rl.prefix_tree.cache._SHARED_FROM", 0 if request.param == "shared" else 2**60)


def build(shape, **other):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(shape, **SIZES | SHAPES.get(shape, {}) | other)).eval()


@pytest.fixture(scope="module")
def qwen2():
    return build("qwen2")


def batch(prompts, **settings):
    """Arguments of `generate`."""
    width = max(map(len, prompts))
    padded = [[PAD] * (width - len(ids)) + ids for ids in prompts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    defaults = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD, "eos_token_id": END, "top_k": 0}
    config = GenerationConfig(**defaults | settings)
    return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask), "generation_config": config}


def keys(rows, seed=0):
    return [(seed, row) for row in range(rows)]


def once(model, inputs, draws=None):
    return model.generate(**inputs, custom_generate=partial(decode, draws))


@pytest.fixture
def calls():
    """Counts the rows and columns of each forward pass of a model."""
    hooks = []

    def watch(model):
        seen = []
        note = lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape))  # noqa: E731
        hooks.append(model.register_forward_pre_hook(note, with_kwargs=True))
        return seen

    yield watch
    for hook in hooks:
        hook.remove()


# -- equals generate


def test_a_padding_token_in_a_prompt_is_a_token(qwen2):
    """These prompts have the same row of tokens once padded, and other masks."""
    inputs = batch([[PAD, PAD, 5, 6], [5, 6], [PAD, 5, 6], [5, 6]])
    theirs = qwen2.generate(**inputs)
    assert torch.equal(once(qwen2, inputs), theirs)
    assert len({tuple(row) for row in theirs[:, 4:].tolist()}) == 3


@pytest.mark.usefixtures("kept")
def test_greedy_with_every_processor_that_is_served(qwen2):
    inputs = batch(
        MIXED, eos_token_id=[END, 3], repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=4,
        bad_words_ids=[[7], [8, 9]], suppress_tokens=[10], begin_suppress_tokens=[11], forced_eos_token_id=END,
        exponential_decay_length_penalty=(6, 1.2), sequence_bias=[[[12], 1.5]], renormalize_logits=True,
        remove_invalid_values=True,
    )  # fmt: skip
    assert torch.equal(once(qwen2, inputs), qwen2.generate(**inputs))


def test_a_training_model_with_gradient_checkpointing_and_dropout():
    """The loop runs without both, as an evaluation does, and restores the mode of each module."""
    model = get_peft_model(build("qwen2"), LoraConfig(r=4, init_lora_weights=False, lora_dropout=0.5))
    inputs = batch(EQUAL)
    expected = once(model.eval(), inputs)
    model.train()
    model.get_base_model().model.norm.eval()
    model.gradient_checkpointing_enable()
    modes = [module.training for module in model.modules()]
    assert torch.equal(once(model, inputs), expected)
    assert [module.training for module in model.modules()] == modes


# -- the distribution


WARPERS = {
    "plain": {},
    "all": {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("name", WARPERS)
def test_tokens_follow_the_distribution_that_transformers_warpers_give(qwen2, name):
    """Chi-square goodness of fit of first and second tokens, against probabilities computed without our code."""
    rows, prompt = 6000, [5, 6, 7, 5]
    inputs = batch([prompt] * rows, max_new_tokens=2, do_sample=True, eos_token_id=None, **WARPERS[name])
    drawn = once(qwen2, inputs, RowDraws(keys(rows, seed=11), 2))[:, len(prompt) :]
    config = GenerationConfig(**inputs["generation_config"].to_diff_dict())
    processors = qwen2._get_logits_processor(config, len(prompt), model_kwargs={})

    def probabilities(ids):
        ids = torch.tensor([ids])
        return torch.softmax(processors(ids, qwen2(ids).logits[:, -1].double()), dim=-1)[0]

    first = probabilities(prompt)
    commonest = drawn[:, 0].mode().values.item()
    second = probabilities([*prompt, commonest])
    fits(drawn[:, 0], first)
    fits(drawn[drawn[:, 0] == commonest, 1], second)


def fits(tokens, probabilities):
    counts = torch.bincount(tokens, minlength=V)
    assert (counts[probabilities == 0] == 0).all()
    expected = probabilities * len(tokens)
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]]).clamp(min=1e-9)
    statistic = ((observed - expected) ** 2 / expected)[expected > 1].sum().item()
    degrees = max(1, len(observed) - 1)
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5 + 6  # about p = 0.0005


def test_draws_of_rows_that_are_not_finite_raise_where_they_are_strict():
    model = build("qwen2")
    model.lm_head.weight.data.fill_(torch.nan)
    inputs = batch(EQUAL, max_new_tokens=3, do_sample=True)
    with pytest.raises(RuntimeError, match="probability"):
        once(model, inputs, RowDraws(keys(5), 3, strict=True))
    assert once(model, inputs, RowDraws(keys(5), 3)).shape == (5, 7)


# -- what is computed


class EndsByPrompt(StoppingCriteria):
    """Ends a row after a number of tokens that its prompt's last token names."""

    def __init__(self, width, lengths):
        self.width, self.lengths = width, lengths

    def __call__(self, input_ids, scores, **_):
        ends = [input_ids.size(1) - self.width >= self.lengths[row[self.width - 1].item()] for row in input_ids]
        return torch.tensor(ends)


NEVER = V + 5  # an end token that no model writes, so that `generate` pads rows that a criterion ends


@pytest.mark.usefixtures("kept")
def test_each_prompt_is_computed_once_and_ended_rows_are_dropped(qwen2, calls):
    ends = StoppingCriteriaList([EndsByPrompt(9, {8: 3, 10: 3, 19: 20})])
    inputs = batch(MIXED, max_new_tokens=20, eos_token_id=NEVER) | {"stopping_criteria": ends}
    seen = calls(qwen2)
    ours = once(qwen2, inputs)
    assert seen[:3] == [(3, 9), (3, 1), (3, 1)]
    assert seen[3:] == [(1, 1)] * 17  # the rows of two prompts end with their third token
    assert torch.equal(ours, qwen2.generate(**inputs))


def by_rows(model, inputs, draws):
    """The completions of `generate`, which computes every row, with the same draws."""
    width = inputs["input_ids"].size(1)
    draws.prompt_width = width
    chosen = LogitsProcessorList([TemperatureLogitsWarper(inputs["generation_config"].temperature), draws])
    settings = GenerationConfig(**inputs["generation_config"].to_diff_dict() | {"do_sample": False, "temperature": 1.0})
    return model.generate(**inputs | {"generation_config": settings}, logits_processor=chosen)


def nodes_of(output, width, ends):
    """The nodes of each step: distinct prefixes of the rows that have not ended."""
    rows = [row.tolist() for row in output]
    lengths = [next((i + 1 for i in range(width, len(row)) if row[i] in ends), len(row)) for row in rows]
    counts = [
        len({tuple(row[:at]) for row, length in zip(rows, lengths, strict=True) if length > at})
        for at in range(width + 1, output.size(1))
    ]
    return [(count, 1) for count in counts]


def is_the_tree_of(model, inputs, rows, seen, ends):
    expected = by_rows(model, inputs, RowDraws(keys(rows), 24))
    seen.clear()
    assert torch.equal(once(model, inputs, RowDraws(keys(rows), 24)), expected)
    assert seen[1:] == nodes_of(expected, inputs["input_ids"].size(1), ends)
    assert seen[0] == (len(inputs["input_ids"].unique(dim=0)), inputs["input_ids"].size(1))
    return seen


@pytest.mark.parametrize(
    ("kept", "shape", "prompts", "temperature"),
    [
        *(("copied", shape, MIXED * 3, 1.0) for shape in PLAIN),
        *(("shared", shape, MIXED * 3, 1.0) for shape in PLAIN),
        *(pytest.param("copied", shape, MIXED * 3, 1.0, marks=needs_newer_transformers) for shape in HYBRID),
        ("copied", "qwen2", EQUAL[:1] * 12, 1.0),
        ("shared", "gpt2", MIXED * 3, 0.4),
    ],
    indirect=["kept"],
)
def test_rows_get_the_texts_of_generate_and_each_prefix_is_fed_once(kept, shape, prompts, temperature, calls):
    """Forks and ends of several prompts, whose rows are not side by side; grouped heads, windows and padding."""
    model = build(shape)
    inputs = batch(prompts, eos_token_id=[END, 3, 22], do_sample=True, temperature=temperature)
    seen = is_the_tree_of(model, inputs, len(prompts), calls(model), [END, 3, 22])
    assert len({count for count, _ in seen}) > 2


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Gemma3"])
def test_text_alone_on_a_model_that_takes_images(family, calls):
    """Positions have several axes, tokens have kinds, and the features of images are none."""
    vision = pytest.importorskip("tests.engines.vision", exc_type=ImportError)
    model = vision.make_vlm(family)[0].eval()
    ends = model.generation_config.eos_token_id
    for prompts in (MIXED * 3, LONG):
        inputs = batch(prompts, eos_token_id=ends, do_sample=True, temperature=1.0)
        kinds = torch.zeros_like(inputs["input_ids"])
        inputs |= {"Gemma3": {"token_type_ids": kinds}, "Qwen2_5_VL": {"mm_token_type_ids": kinds}}.get(family, {})
        expected = by_rows(model, inputs, RowDraws(keys(len(prompts)), 24))
        seen = calls(model)
        assert torch.equal(once(model, inputs, RowDraws(keys(len(prompts)), 24)), expected)
        assert max(rows for rows, columns in seen if columns > 1) == len({*map(tuple, prompts)})


SHARED = [*range(5, 25)]  # as a system prompt
LONG = [[*SHARED, 30]] * 3 + [[*SHARED, 31, 32, 33]] * 2 + [[*SHARED, *SHARED, 6]] * 2 + [[*SHARED, 5, 6, 7, 8]] * 3


EQUALLY_LONG = [[*SHARED, 30 + i % 3] for i in range(9)]


def test_one_token_and_rows_that_end_together(qwen2, calls):
    seen = calls(qwen2)
    for settings, steps in (({"max_new_tokens": 1}, 1), ({"eos_token_id": list(range(V))}, 1), ({}, 24)):
        inputs = batch(MIXED * 2, do_sample=True, temperature=1.0, **{"eos_token_id": None} | settings)
        is_the_tree_of(qwen2, inputs, 14, seen, settings.get("eos_token_id", []))
        assert len(seen) == steps


@pytest.mark.parametrize("trial", range(20))
def test_the_distinct_share_counts_prefixes_of_each_prompt(trial):
    random = np.random.default_rng(trial)
    rows = [random.integers(0, 2, random.integers(0, 9)).tolist() for _ in range(12)]
    groups = random.integers(0, 3, 12).tolist()
    fed = [(group, *ids[:at]) for group, ids in zip(groups, rows, strict=True) for at in range(1, len(ids))]
    assert distinct_share(rows, groups) == pytest.approx(len(set(fed)) / len(fed))
    assert distinct_share([[3], [3]], [0, 0]) == 1


@pytest.mark.parametrize("placeholders", [[5, 7], [6, 9], [6, 3]])
def test_features_of_images_that_do_not_follow_the_rows_go_to_generate(placeholders):
    with pytest.raises(CannotServeError, match="images"):
        Images(SimpleNamespace(pooler_output=torch.zeros(4, 3, 5)), placeholders)


def test_one_copy_of_a_prompt_serves_all_its_nodes(qwen2, monkeypatch):
    monkeypatch.setattr("pods_rl.prefix_tree.cache._SHARED_FROM", 0)
    shared = []
    share = NodeLayer.share
    monkeypatch.setattr(NodeLayer, "share", lambda layer, *how: shared.append(layer) or share(layer, *how))
    inputs = batch(EQUALLY_LONG, do_sample=True, temperature=1.0)
    once(qwen2, inputs, RowDraws(keys(len(EQUALLY_LONG)), 24))
    assert shared


def test_a_model_that_keeps_states_outside_of_its_cache_goes_to_generate():
    model = build("recurrent_gemma", block_types=["recurrent", "attention"], num_key_value_heads=1)
    inputs = batch(MIXED, max_new_tokens=4)
    with pytest.raises(CannotServeError, match="cache"):
        once(model, inputs)


# -- what a device does: the host reads few tokens


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Rows part at their first token, and the host reads which ended at every eighth."""
    monkeypatch.setattr(generating, "choose_path", lambda *how: generating.Path.ROWS)


WARPED = {"top_k": 12, "top_p": 0.9, "temperature": 1.4, "repetition_penalty": 1.2, "min_new_tokens": 3}


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("shape", "prompts", "settings"),
    [
        *((shape, [MIXED[i] for i in (0, 3, 5, 1, 4, 6, 2)] * 3, {}) for shape in ("qwen2", "gemma2", "gpt2", "phi3")),
        pytest.param("qwen3_5_text", MIXED * 3, {}, marks=needs_newer_transformers),
        ("qwen2", EQUAL * 3, WARPED),
        ("qwen2", LONG * 2, {"eos_token_id": None}),
        ("gemma2", MIXED, {"do_sample": False}),
        ("qwen2", MIXED, {"do_sample": False, "max_new_tokens": 1}),
        ("qwen2", MIXED, {"eos_token_id": list(range(2, V))}),
    ],
)
def test_rows_of_a_device_get_the_tokens_of_the_tree(request, shape, prompts, settings):
    model = build(shape)
    inputs = batch(prompts, **{"eos_token_id": [END, 3, 22], "do_sample": True, "temperature": 1.0} | settings)
    draws = lambda: RowDraws(keys(len(prompts)), 24) if inputs["generation_config"].do_sample else None  # noqa: E731
    expected = once(model, inputs, draws())
    request.getfixturevalue("as_on_a_device")
    assert torch.equal(once(model, inputs, draws()), expected)


def test_the_host_of_a_device_reads_one_in_eight_tokens_and_drops_the_rows_that_ended(
    qwen2, monkeypatch, as_on_a_device, calls
):
    """Without padding: transformers' masks read it for each token, unless the decoder is plain."""
    rows = len(EQUAL) * 4
    reads = []
    for name in ("cpu", "tolist", "item", "__int__", "__bool__"):
        method = getattr(torch.Tensor, name)
        noted = lambda *args, method=method, **how: reads.append(args[0].shape) or method(*args, **how)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, noted)

    def reads_of(tokens):
        inputs = batch(EQUAL * 4, max_new_tokens=tokens, eos_token_id=[END, 3], do_sample=True, temperature=1.0)
        reads.clear()
        output = once(qwen2, inputs, RowDraws(keys(rows), tokens))
        return len(reads), output

    reads_of(8)  # the first generation also compares the plain decoder with the model
    few, _ = reads_of(8)
    seen = calls(qwen2)
    more, output = reads_of(40)
    assert more == few + 4
    counts = [count for count, _ in nodes_of(output, 4, [END, 3])]
    assert [count for count, _ in seen[1:]] == [rows] * 7 + [counts[at // 8 * 8 - 1] for at in range(8, 40)]


# -- what generate serves


def prompt_tuning():
    return get_peft_model(build("qwen2"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


QWEN2 = partial(build, "qwen2")
REFUSED = [
    (partial(build, "rwkv"), {}, "makes its own cache"),
    (prompt_tuning, {}, "prompt learning"),
    (partial(build, "phi3", original_max_position_embeddings=6), {}, "rotary frequencies"),
    (QWEN2, {"num_beams": 2}, "beam search"),
    (QWEN2, {"do_sample": True, "num_return_sequences": 2}, "num_return_sequences"),
    (QWEN2, {"cache_implementation": "static"}, "StaticCache"),
    (QWEN2, {"use_cache": False}, "use_cache"),
    (QWEN2, {"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    (QWEN2, {"return_dict_in_generate": True}, "return_dict_in_generate"),
]


@pytest.mark.parametrize(("make", "settings", "reason"), REFUSED, ids=[reason for *_, reason in REFUSED])
def test_models_and_settings_that_it_cannot_serve_are_refused_before_the_first_token(calls, make, settings, reason):
    model = make().eval()
    seen = calls(model)
    with pytest.raises(CannotServeError, match=reason):
        once(model, batch(EQUAL, max_new_tokens=3, **settings))
    assert seen == []


def test_generate_serves_the_rest_and_the_log_says_so_once(qwen2, caplog, monkeypatch):
    monkeypatch.setattr(generating, "_logged_paths", set())
    inputs = batch(EQUAL, max_new_tokens=5, num_beams=2)
    with caplog.at_level(logging.WARNING, logger="pods_rl"):
        for _ in range(3):
            assert torch.equal(complete(qwen2.generate, inputs), qwen2.generate(**inputs))
        complete(qwen2.generate, batch(EQUAL, max_new_tokens=5))
    (record,) = caplog.records
    assert "beam" in record.getMessage()


def test_nodes_move_in_the_layers_of_a_model_over_several_devices():
    """TRL spreads a policy that it loads over all GPUs that one process sees. A meta device stands in for a second."""
    cache = DynamicCache()
    for device in ("cpu", "meta"):
        prompts = DynamicLayer()
        states = torch.zeros(2, 1, 3, 4, device=device)
        prompts.update(states, states)
        cache.layers.append(prompts)
    move_nodes(cache, np.array([0, 1, 0]), np.array([0, 1]), torch.device("cpu"))
    assert [(len(layer.keys), layer.keys.device.type) for layer in cache.layers] == [(3, "cpu"), (3, "meta")]
