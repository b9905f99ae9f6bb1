"""The tree of the update: its layout by brute force, and models by their own rows."""

import copy
import warnings

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.neftune import activate_neftune
from trl.trainer.utils import add_fused_lm_head

from pods_rl.prefix_tree.attention import KEYWORD, UnsupportedAttentionError, register_tree_attention
from pods_rl.prefix_tree.packing import TreePass, is_regular, probe_trees
from pods_rl.prefix_tree.tree import prefix_tree
from tests.numeric import FLOAT32, assert_near


def batch(prompts, completions, seed=0, tokens=57):
    """Rows with these lengths; equal prompt lengths that follow each other are one prompt."""
    width, keep = max(prompts) + 1, max(completions) + 1
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 3 + tokens, (len(prompts), width + keep), generator=draw)
    for row in range(1, len(prompts)):
        if prompts[row] == prompts[row - 1]:
            ids[row, :width] = ids[row - 1, :width]
    place = torch.arange(width + keep)
    p, c = torch.tensor(prompts).unsqueeze(1), torch.tensor(completions).unsqueeze(1)
    mask = ((place >= width - p) & (place < width + c)).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-keep] = -100
    return ids, mask, labels, keep


# -- the tree ------------------------------------------------------------------------------------------------------


def rows_of(ids, mask):
    return ids.masked_fill(mask == 0, -1).numpy()


def lengths(draw, rows):
    """Random lengths of prompts, ascending, and of completions."""
    return sorted(torch.randint(1, 7, (rows,), generator=draw).tolist()), torch.randint(1, 9, (rows,), generator=draw)


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_has_each_distinct_prefix_once_and_every_path_spells_its_row(seed):
    """Brute force: a node is a column, the tokens up to it, and the next one."""
    draw = torch.Generator().manual_seed(seed)
    prompts, completions = lengths(draw, 12)
    ids, mask, _, keep = batch(prompts, completions.tolist(), seed, tokens=2 + seed % 4)
    rows = rows_of(ids, mask)
    tree = prefix_tree(rows, rows.shape[1] - keep)
    distinct = {}
    for row in range(len(rows)):
        real = [column for column in range(rows.shape[1]) if rows[row, column] >= 0]
        for column in real[:-1]:
            node = tree.nodes[row, column]
            assert (tree.tokens[node], tree.labels[node]) == tuple(rows[row, column : column + 2])
            assert tree.columns[node] == column
            prefix = (real[0], *rows[row, real[0] : column + 2])
            assert distinct.setdefault(prefix, node) == node
        assert (tree.nodes[row] >= 0).sum() == len(real) - 1
    assert len(set(distinct.values())) == len(distinct) == len(tree.tokens)
    new = np.concatenate([branch.path[-branch.new :] for branch in tree.branches])
    assert new.tolist() == list(range(len(tree.tokens)))  # depth first, side by side


def test_rows_that_do_not_count_are_not_in_the_tree():
    rows = np.array([[5, 6, 7, 8], [5, 6, 7, 9], [-1, 6, 7, -1]])
    tree = prefix_tree(rows, 2, chosen=[1])
    assert (tree.tokens.tolist(), tree.nodes.tolist()) == ([5, 6, 7], [[-1] * 3, [0, 1, 2], [-1] * 3])


# -- models --------------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OPT = {"ffn_dim": 64, "dropout": 0.0, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
TAKES_TREES = {  # name: architecture, configuration
    "Qwen2": ("qwen2", {}),
    "Mistral, a window of 4": ("mistral", {"sliding_window": 4}),
    "Gemma 3, layers with a window": ("gemma3_text", {"head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2}),
    "GPT-2, learned positions": ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "eager attention": ("llama", {"attn_implementation": "eager"}),
    "Mixtral, experts": ("mixtral", {"experts_implementation": "eager"}),
}
TAKES_ROWS = {  # name: architecture, configuration, words of the reason, one of which it has
    # Older transformers do not list its layers, and then the pass over a tree fails.
    "no attention": ("mamba", {}, "linear_attention", "a pass over a tree failed"),
    "frequencies that depend on the length": ("llama", {"rope_parameters": DYNAMIC}, "length of the batch"),
    "attention that no function replaces": ("nemotron", {}, "do not call"),
    "positions by the mask": ("opt", OPT, "log-probabilities differ"),
    "positions by the tokens": ("roberta", ENCODER, "log-probabilities differ"),
    "a term of attention's mask": ("doge", {}, "attention mask"),
    "a block that mixes neighbouring tokens": ("llama", {}, "log-probabilities differ"),
    "a block that will mix them": ("llama", {}, "gradient of model.layers.0.gate"),
    "a block that counts tokens": ("llama", {}, "model.layers.0.count"),
}


def add_term(model, name):
    """Give a layer a term that reads more than its own token."""
    layer = model.model.layers[0]
    if "mixes" in name:
        layer.register_forward_hook(lambda module, given, out: out + out.roll(1, dims=1))
    if "will mix" in name:  # as a gate whose training begins at 0
        layer.gate = torch.nn.Parameter(torch.zeros(1))
        layer.register_forward_hook(lambda module, given, out: out + module.gate * out.roll(1, dims=1))
    if "counts" in name:  # as the loads of experts, by which a router is corrected
        layer.register_buffer("count", torch.zeros(1))
        layer.register_forward_hook(lambda module, given, out: module.count.add_(out.size(1)) and None)


PRECISIONS = ((torch.float32, False, 1e-3), (torch.bfloat16, False, 0.1), (torch.float32, True, 0.1))


def build(name, given=None):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SMALL | (given or {}))
    model = AutoModelForCausalLM.from_config(config).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


@pytest.mark.numeric
@pytest.mark.parametrize("name", TAKES_TREES)
def test_a_tree_has_the_scores_and_gradients_of_its_rows(name):
    model = build(*TAKES_TREES[name]).double()
    assert probe_trees(model, model).why_rows is None
    ids, mask, labels, keep = batch([9, 9, 9, 5, 5, 2, 2, 1], [7, 3, 1, 7, 7, 0, 4, 7])
    ids[4], labels[4] = ids[3], labels[3]
    ids[1, :12], labels[1, :12] = ids[0, :12], labels[0, :12]
    factors = torch.randn(2, 8, keep, dtype=torch.float64)

    def gradients(scores):
        values = torch.stack([scores.log_probs[:, -keep:], scores.entropy[:, -keep:]])
        found = torch.autograd.grad((values * factors).sum(), list(model.parameters()), allow_unused=True)
        named = {f"gradient {i}": x for i, x in enumerate(found) if x is not None}
        return {"scores": values.detach()} | named

    expected = gradients(model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True))
    computed = {}
    shapes = []
    model.register_forward_pre_hook(
        lambda module, given, named: shapes.append(named["input_ids"].shape), with_kwargs=True
    )
    for tree in (True, False):
        given = TreePass(model, keep, tree=tree)
        assert_near(gradients(given(ids, mask, labels, fused_lm_head=True)), expected, FLOAT32)  # TRL's head
        computed[tree] = given.tokens["computed"]
    assert computed[True] == len(prefix_tree(rows_of(ids, mask), ids.size(1) - keep, [0, 1, 2, 3, 4, 6, 7]).tokens)
    assert computed[True] < computed[False] == 7 * (ids.size(1) - 1)
    assert shapes[0] == (1, computed[True])  # no padding


EXPERTS = {"experts_implementation": "eager"}
ROUTED = {
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", ROUTED)
def test_the_auxiliary_loss_of_experts_counts_each_token_of_each_row(name):
    model = build(name, ROUTED[name]).double()
    assert probe_trees(model, model).why_rows is None
    routers = [weight for weight_name, weight in model.named_parameters() if weight_name.endswith("gate.weight")]
    for weight in routers:
        torch.nn.init.normal_(weight)  # so that the experts are far from balanced
    # Equal rows, a row that begins another one, and a prompt without a completion.
    ids, mask, labels, keep = batch([9, 9, 9, 5, 5, 2, 2, 1], [7, 3, 1, 7, 7, 0, 4, 7])
    ids[4], labels[4] = ids[3], labels[3]
    ids[1, :12], labels[1, :12] = ids[0, :12], labels[0, :12]

    def loss_and_gradients(call):
        output = call(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, output_router_logits=True)
        gradients = torch.autograd.grad(output.aux_loss, routers)
        named = {f"gradient {i}": gradient for i, gradient in enumerate(gradients)}
        return {"loss": output.aux_loss.detach()} | named

    expected = loss_and_gradients(model)
    for tree in (True, False):
        assert_near(loss_and_gradients(TreePass(model, keep, tree=tree)), expected, FLOAT32)  # a sum in float32


NOISY = {  # noise: architecture, configuration
    "dropout of hidden states": ("gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.0}),
    "dropout of attention": ("llama", {"attention_dropout": 0.2}),
    "noise of a router": ("mixtral", EXPERTS | {"router_jitter_noise": 0.1}),
}


@pytest.mark.parametrize("name", NOISY)
def test_models_are_compared_without_their_noise(name):
    """A node draws once for all its rows, so draws of a tree are not those of its rows."""
    model = build(*NOISY[name])
    assert probe_trees(model, model).why_rows is None


def test_noise_that_depends_on_the_length_of_rows_computes_rows():
    model = build("llama")
    activate_neftune(model, 5.0)
    assert "NEFTune" in probe_trees(model, model).why_rows


def test_an_adapter_that_begins_after_some_tokens_computes_rows():
    adapter = LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6], target_modules=["q_proj"])
    model = get_peft_model(build("llama"), adapter)
    assert "alora_invocation_tokens" in probe_trees(model, model).why_rows


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_probe_leaves_no_gradient_and_no_setting_behind(reentrant):
    model = build("qwen2")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    state = torch.get_rng_state()
    with torch.no_grad():
        assert probe_trees(model, model).why_rows is None
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert model.is_gradient_checkpointing


def test_the_probe_puts_the_random_states_of_all_gpus_back_without_a_warning(monkeypatch):
    restored = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: f"state of {device}")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.update({device: state}))
    monkeypatch.setattr(torch.random, "_fork_rng_warned_already", False)
    model = build("qwen2")
    with warnings.catch_warnings(action="error"):
        assert probe_trees(model, model).why_rows is None
    assert restored == {0: "state of 0", 1: "state of 1"}


@pytest.mark.parametrize("name", [*TAKES_TREES, *TAKES_ROWS])
def test_a_model_that_cannot_compute_trees_is_recognized_whatever_its_precision(name):
    architecture, given, *reason = (TAKES_TREES | TAKES_ROWS)[name]
    for dtype, autocast, tolerance in PRECISIONS:
        model = build(architecture, given)
        if "a block" in name:
            add_term(model, name)
        model = model.to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = probe_trees(model, model, tolerance=tolerance).why_rows
        assert (found is None) == (not reason), found
        assert not reason or any(words in found for words in reason)


def test_layers_that_attend_in_chunks_or_scale_queries_by_position_compute_rows():
    """As Llama 4's."""
    model = build("qwen2")
    model.config.layer_types = ["chunked_attention"] * model.config.num_hidden_layers
    assert "chunked_attention" in probe_trees(model, model).why_rows
    register_tree_attention(model)
    layer = torch.nn.Module()
    layer.attn_temperature_tuning, layer.use_rope = True, False
    with pytest.raises(UnsupportedAttentionError, match="position"):
        AttentionInterface()["sdpa"](layer, "q", "k", "v", None, **{KEYWORD: object()})


def test_bounded_scores_stay_with_eager_attention_where_sdpa_ignores_the_bound(monkeypatch):
    """As in transformers up to 5.17, where Gemma 2 takes sdpa and its rows lose their softcap."""
    model = build("gemma2", {"attn_implementation": "eager", "query_pre_attn_scalar": 8})
    monkeypatch.setattr(type(model), "_supports_sdpa", True)
    assert probe_trees(model, model).why_rows is None
    assert model.config._attn_implementation == "eager"


def test_the_probe_leaves_no_cast_behind_in_a_block_of_autocast():
    """Seen to fail with torch 2.6, where autocast keeps the casts of passes without a gradient (`make test-oldest`)."""
    model = build("qwen2")
    ids, mask, labels, _ = batch([4, 2], [3, 3])
    with torch.autocast("cpu", torch.bfloat16):
        assert probe_trees(model, model, tolerance=0.1).why_rows is None
        model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs.sum().backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


def test_attention_without_a_tree_is_transformers_own():
    model = build("qwen2")
    ids, mask, *_ = batch([4, 2], [3, 3])
    expected = copy.deepcopy(model)(input_ids=ids, attention_mask=mask).logits
    register_tree_attention(model)
    register_tree_attention(model)
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"])
def test_every_attention_of_transformers_hands_a_tree_its_arguments(name):
    register_tree_attention(torch.nn.Module())
    given = []
    tree = lambda *states, **known: given.append(known) or states[0]  # noqa: E731
    how = {"dropout": 0.1, "scaling": 0.5, "sliding_window": 4, "softcap": 30.0, "s_aux": "sinks", "position_ids": None}
    how[KEYWORD] = tree
    assert AttentionInterface()[name](torch.nn.Module(), "q", "k", "v", None, **how) == ("q", None)
    assert given == [{"scale": 0.5, "window": 4, "softcap": 30.0, "dropout": 0.1, "sinks": "sinks"}]
    for wrong in ({"position_bias": torch.ones(1)}, {"indices": torch.ones(1)}, {"is_causal": False}):
        with pytest.raises(UnsupportedAttentionError):
            AttentionInterface()[name](torch.nn.Module(), "q", "k", "v", None, **how | wrong)


@pytest.mark.numeric
@pytest.mark.parametrize("hole", [(1, -4), (0, 3), (0, slice(0, 5))])
def test_rows_with_holes_or_without_a_prompt_are_computed_as_rows_and_every_score_stays_in_its_column(hole):
    model = build("qwen2")
    ids, mask, labels, keep = batch([4, 4, 2], [5, 4, 5])
    assert is_regular(rows_of(ids, mask), ids.size(1) - keep)
    mask[hole] = 0
    assert not is_regular(rows_of(ids, mask), ids.size(1) - keep)
    labels = labels.masked_fill(mask == 0, -100)
    expected = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs[:, -keep:]
    given = TreePass(model, keep, tree=True)
    assert_near(given(ids, mask, labels, fused_lm_head=True).log_probs, expected, FLOAT32)
