"""Recurrent layers over a tree: the number of calls, and models by their own rows."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from pods_rl.prefix_tree import recurrence
from pods_rl.prefix_tree.packing import TreePass, probe_trees
from pods_rl.prefix_tree.recurrence import plan_sequences, unregister_tree_recurrence
from pods_rl.prefix_tree.tree import by_prompt, common_nodes, prefix_tree
from tests.numeric import FLOAT64, assert_near

from .newer import needs_newer_transformers
from .test_packing import PRECISIONS, batch, rows_of
from .test_packing import build as build_small

pytestmark = needs_newer_transformers


@pytest.fixture(autouse=True)
def transformers_functions():
    yield
    unregister_tree_recurrence()


def random_tree(seed, prompts=3):
    """Prompts of several lengths, and completions of few tokens: deep forks, equal rows, rows that begin others."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (prompts,), generator=draw).repeat_interleave(5).tolist()
    completions = torch.randint(1, 14, (len(lengths),), generator=draw).tolist()
    ids, mask, labels, keep = batch(lengths, completions, seed, tokens=2 + seed % 3)
    ids[3], mask[3], labels[3] = ids[1], mask[1], labels[1]
    return ids, mask, labels, keep


# -- the calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call_tokens", [1, 6, 40, 10**6])
@pytest.mark.parametrize("seed", range(12))
def test_the_sequences_of_all_calls_spell_each_path_from_its_root(seed, call_tokens):
    ids, mask, _, keep = random_tree(seed)
    branches = prefix_tree(rows_of(ids, mask), ids.size(1) - keep).branches
    calls = plan_sequences(branches, call_tokens)
    paths = [[]]  # of the nodes up to the end of each sequence
    before = 1
    for sequences in calls:
        for sequence in sequences:
            assert sequence.parent < before  # computed by an earlier call
            paths.append(paths[sequence.parent] + sequence.nodes.tolist())
        before = len(paths)
    assert {tuple(branch.path.tolist()) for branch in branches} <= {tuple(path) for path in paths}
    computed = sum(len(sequence.nodes) for sequences in calls for sequence in sequences)
    as_rows = sum(len(branch.path) for branch in branches)
    nodes = sum(branch.new for branch in branches)
    assert nodes <= computed <= as_rows
    if call_tokens == 1:  # what all rows of a prompt share is computed once
        assert as_rows - computed == sum(common_nodes(rows) * (len(rows) - 1) for rows in by_prompt(branches))
    if call_tokens == 10**6:
        assert len(calls) == 1
        assert computed == as_rows


# -- models --------------------------------------------------------------------------------------------------------

BASE = {"num_hidden_layers": 4, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.3}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "experts_implementation": "eager",
}  # fmt: skip
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
KIMI = {
    "linear_num_heads": 4, "linear_head_dim": 8, "linear_conv_kernel_dim": 4, "num_experts_per_token": 2,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "layer_types": DELTA["layer_types"],
}  # fmt: skip
NEMOTRON = {
    "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "ssm_state_size": 8, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "n_groups": 1, "conv_kernel": 4, "chunk_size": 8,
}  # fmt: skip
# Of the kinds of recurrent layers one each: configuration. Others are trained in tests/engines/test_families.py.
TAKES_TREES = {"qwen3_5_text": DELTA, "kimi_linear": LATENT | KIMI | EXPERTS, "lfm2": CONVOLUTIONS}
TAKES_ROWS = {  # name of the architecture: configuration, a word of the reason
    "jamba": (
        {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_dt_rank": 4, "num_experts": 4},
        "linear_attention",
    ),
    "minimax": ({}, "linear_attention"),
    "nemotron_h": (NEMOTRON, "layers of a kind"),
    "recurrent_gemma": ({}, "linear_attention"),
}


def build(name, given):
    return build_small(name, BASE | given)


def scores_and_gradients(model, given, ids, mask, labels, keep):
    draw = torch.Generator().manual_seed(1)
    factors = torch.randn(2, len(ids), keep, generator=draw, dtype=torch.float64)
    scores = given(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    values = torch.stack([scores.log_probs[:, -keep:], scores.entropy[:, -keep:]])
    model.zero_grad()
    (values * factors).sum().backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return {"scores": values.detach()} | gradients


@pytest.fixture
def only_float64(monkeypatch):
    """Transformers computes recurrences and norms in float32, also those of a model in float64.

    In these small trees a call would take longer than what it saves.
    """
    monkeypatch.setattr(recurrence, "call_tokens", lambda states, work: 8)
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.numeric
@pytest.mark.usefixtures("only_float64")
@pytest.mark.parametrize("architecture", TAKES_TREES)
def test_a_tree_has_the_scores_and_gradients_of_its_rows(architecture):
    model = build(architecture, TAKES_TREES[architecture]).double()
    assert probe_trees(model, model).why_rows is None
    for seed in (2, 3):
        rows = random_tree(seed)
        expected = scores_and_gradients(model, model, *rows)
        assert_near(scores_and_gradients(model, TreePass(model, rows[3], tree=True), *rows), expected, FLOAT64)


@pytest.mark.numeric
@pytest.mark.usefixtures("only_float64")
@pytest.mark.parametrize(("name", "reentrant"), list(zip(TAKES_TREES, [True, False, False], strict=True)))
def test_gradients_with_checkpointing_and_lora_are_those_of_rows(name, reentrant):
    """The backward pass computes each layer again, outside of the pass over the tree."""
    targets = ["q_proj", "v_proj", "in_proj", "in_proj_qkv"]
    model = get_peft_model(build(name, TAKES_TREES[name]), LoraConfig(r=4, target_modules=targets)).double()
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if "lora_B" in weight_name:
                weight.normal_()
    assert probe_trees(model, model).why_rows is None
    rows = random_tree(4)
    expected = scores_and_gradients(model, model, *rows)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_near(scores_and_gradients(model, TreePass(model, rows[3], tree=True), *rows), expected, FLOAT64)


@pytest.mark.slow
@pytest.mark.numeric
@pytest.mark.parametrize(("name", "autocast"), list(zip(TAKES_TREES, [True, False, True], strict=True)))
def test_gradients_in_16_bits_are_as_near_to_those_in_32_as_rows_are(monkeypatch, name, autocast):
    monkeypatch.setattr(recurrence, "call_tokens", lambda states, work: 8)
    model = build(name, TAKES_TREES[name] | {"initializer_range": 0.1})
    assert probe_trees(model, model).why_rows is None
    rows = random_tree(6)

    def gradient(given):
        found = scores_and_gradients(model, given, *rows)
        found.pop("scores")
        return torch.cat([gradient.flatten().float() for gradient in found.values()])

    exact = gradient(model)
    if not autocast:
        model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        of_rows = gradient(model)
        of_tree = gradient(TreePass(model, rows[3], tree=True))
    assert (of_tree - exact).norm() <= 1.5 * (of_rows - exact).norm()


@pytest.mark.parametrize("name", [*TAKES_TREES, *TAKES_ROWS])
def test_a_probe_recognizes_recurrent_layers_in_every_precision(name):
    given, *reason = TAKES_ROWS.get(name, (TAKES_TREES.get(name),))
    for dtype, autocast, tolerance in PRECISIONS:
        model = build(name, given).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            why_rows = probe_trees(model, model, tolerance=tolerance).why_rows
        assert (why_rows is None) == (not reason), why_rows
        assert not reason or reason[0] in why_rows


@pytest.mark.parametrize("name", TAKES_TREES)
def test_a_probe_notices_recurrent_layers_that_do_not_receive_the_tree(monkeypatch, name):
    """Weights of almost 0 hide the difference that a wrong state makes."""
    model = build(name, TAKES_TREES[name] | {"initializer_range": 1e-6})
    assert probe_trees(model, model).why_rows is None
    monkeypatch.setattr("pods_rl.prefix_tree.packing.register_tree_recurrence", lambda model: None)
    unregister_tree_recurrence()
    assert "recurrent" in probe_trees(model, model).why_rows
