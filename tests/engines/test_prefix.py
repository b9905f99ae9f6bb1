"""Packs: their layout by worked values, their attention by brute force, and models by their own rows."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from pods_rl.engines.trl import packing
from pods_rl.engines.trl.packing import ChosenRows, Rows, attend, lay_out, why_rows
from tests.numeric import FLOAT32, FLOAT64, assert_near


def batch(prompts, completions, seed=0):
    """Rows with these lengths; equal prompt lengths that follow each other are one prompt."""
    width, keep = max(prompts) + 1, max(completions) + 1
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (len(prompts), width + keep), generator=draw)
    for row in range(1, len(prompts)):
        if prompts[row] == prompts[row - 1]:
            ids[row, :width] = ids[row - 1, :width]
    place = torch.arange(width + keep)
    p, c = torch.tensor(prompts).unsqueeze(1), torch.tensor(completions).unsqueeze(1)
    mask = ((place >= width - p) & (place < width + c)).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-keep] = -100
    return ids, mask, labels, keep


# -- layout --------------------------------------------------------------------------------------------------------


def test_a_pack_has_each_prompt_once_then_its_rows_the_longest_first():
    ids = torch.tensor([[0, 5, 6, 7, 0], [1, 2, 3, 4, 9], [0, 5, 6, 8, 9]])
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    pack = lay_out(Rows.of(ids, mask, 2), [0, 1, 2], ids.device)
    assert pack.input_ids.tolist() == [[5, 6, 8, 6, 1, 2, 3, 4]]
    assert pack.position_ids.tolist() == [[1, 2, 3, 2, 0, 1, 2, 3]]
    assert pack.labels.tolist() == [[-100, 8, 9, 7, -100, -100, 4, 9]]
    assert pack.starts == {2: 1, 0: 3, 1: 6}
    (first, second) = pack.groups
    assert (first.start, first.prompt, second.start, second.prompt) == (0, 1, 4, 2)
    (bucket,) = first.buckets
    assert (bucket.start, bucket.stop, bucket.count, bucket.width) == (1, 4, 2, 2)
    ids, mask, _, keep = batch([3] * 6, [16, 4, 8, 3, 16, 1])
    (group,) = lay_out(Rows.of(ids, mask, keep), range(6), ids.device).groups
    shapes = [(bucket.count, bucket.width) for bucket in group.buckets]
    assert shapes == [(3, 16), (2, 4), (1, 1)]  # rows of very different lengths are not padded to each other


@pytest.mark.numeric
@pytest.mark.parametrize(("heads", "window"), [(4, 0), (2, 3), (1, 0)])
def test_attention_is_that_of_a_dense_mask(heads, window):
    """Brute force: every pair of tokens asks whether one may see the other."""
    ids, mask, _, keep = batch([4, 4, 4, 1, 6], [5, 3, 4, 3, 4])
    pack = lay_out(Rows.of(ids, mask, keep), range(5), ids.device)
    length = pack.input_ids.size(1)
    owner = [(-1, -1)] * length  # of each token: its group, and its row or -1
    for number, group in enumerate(pack.groups):
        for token in range(group.start, group.start + group.prompt):
            owner[token] = (number, -1)
    for row, start in pack.starts.items():
        number = next(
            i for i, group in enumerate(pack.groups) if group.buckets[0].start <= start < group.buckets[-1].stop
        )
        for token in range(start, start + int(mask[row, -keep:].sum())):
            owner[token] = (number, row)
    at = pack.position_ids[0].tolist()
    seen = torch.zeros(length, length, dtype=torch.bool)
    for i, (group, row) in enumerate(owner):
        for j, (other, other_row) in enumerate(owner):
            related = group == other and other_row in (-1, row)
            seen[i, j] = related and at[j] <= at[i] and (not window or at[i] - at[j] < window)
    draw = torch.Generator().manual_seed(1)
    query = torch.randn(1, 4, length, 8, generator=draw, dtype=torch.float64)
    key, value = (torch.randn(1, heads, length, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    spread = [x.repeat_interleave(4 // heads, dim=1) for x in (key, value)]
    weights = (query @ spread[0].transpose(2, 3) * 0.3).masked_fill(~seen, -torch.inf).softmax(-1)
    expected = (weights @ spread[1]).transpose(1, 2)
    assert_near(attend(pack, query, key, value, 0.3, window), expected, FLOAT64)
    assert pack.windows == {window}


# -- models --------------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OPT = {"ffn_dim": 64, "dropout": 0.0, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
TAKES_PACKS = {  # name: architecture, configuration
    "Qwen2": ("qwen2", {}),
    "Mistral, a window of 4": ("mistral", {"sliding_window": 4}),
    "Gemma 3, layers with a window": ("gemma3_text", {"head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2}),
    "GPT-2, learned positions": ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "Mixtral, experts": ("mixtral", {"experts_implementation": "eager"}),
}
TAKES_ROWS = {  # name: architecture, configuration, a word of the reason
    "dropout": ("gpt2", {}, "dropout"),
    "dropout of attention": ("llama", {"attention_dropout": 0.1}, "dropout"),
    "noise of a router": ("mixtral", {"router_jitter_noise": 0.1}, "noise"),
    "eager attention": ("llama", {"attn_implementation": "eager"}, "takes no packs"),
    "no attention": ("mamba", {}, "linear_attention"),
    "frequencies that depend on the length": ("llama", {"rope_parameters": DYNAMIC}, "length of the batch"),
    "attention that no function replaces": ("nemotron", {}, "takes no packs"),
    "positions by the mask": ("opt", OPT, "log-probabilities differ"),
    "positions by the tokens": ("roberta", ENCODER, "log-probabilities differ"),
    "a block that mixes neighbouring tokens": ("llama", {}, "log-probabilities differ"),
}


def build(name, given=None):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SMALL | (given or {}))
    model = AutoModelForCausalLM.from_config(config).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


@pytest.mark.numeric
@pytest.mark.parametrize("name", TAKES_PACKS)
def test_a_pack_has_the_scores_and_gradients_of_its_rows(name, monkeypatch):
    monkeypatch.setattr(packing, "CALL", -99)  # packs of single rows too
    model = build(*TAKES_PACKS[name]).double()
    assert why_rows(model, model) is None
    ids, mask, labels, keep = batch([9, 9, 9, 5, 5, 2, 2, 1], [7, 3, 1, 7, 7, 0, 4, 7])
    ids[4], labels[4] = ids[3], labels[3]
    factors = torch.randn(2, 8, keep, dtype=torch.float64)

    def gradients(scores):
        values = torch.stack([scores.log_probs[:, -keep:], scores.entropy[:, -keep:]])
        found = torch.autograd.grad((values * factors).sum(), list(model.parameters()), allow_unused=True)
        named = {f"gradient {i}": x for i, x in enumerate(found) if x is not None}
        return {"scores": values.detach()} | named

    expected = gradients(model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True))
    for packed, merge in [(True, True), (False, True), (True, False)]:
        counts = {"merged": 0}
        chosen = ChosenRows(model, keep, merge=merge, packed=packed, counts=counts)
        assert_near(gradients(chosen(ids, mask, labels, fused_lm_head=True)), expected, FLOAT32)  # TRL's head
        assert counts == {"merged": int(merge)}


@pytest.mark.parametrize("name", [*TAKES_PACKS, *TAKES_ROWS])
def test_a_model_that_cannot_take_packs_is_recognized_whatever_its_dtype(name):
    architecture, given, *reason = (TAKES_PACKS | TAKES_ROWS)[name]
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        model = build(architecture, given).to(dtype)
        if "mixes" in name:
            model.model.layers[0].register_forward_hook(lambda module, given, out: out + out.roll(1, dims=1))
        found = why_rows(model, model, tolerance=tolerance)
        assert (found is None) == (not reason), found
        assert not reason or reason[0] in found


def test_attention_without_a_pack_is_transformers_own():
    model = build("qwen2")
    ids, mask, *_ = batch([4, 2], [3, 3])
    expected = copy.deepcopy(model)(input_ids=ids, attention_mask=mask).logits
    packing.teach_attention_packs()
    packing.teach_attention_packs()
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)


@pytest.mark.parametrize("packed", [True, False])
def test_a_batch_without_a_row_to_read_still_has_a_pass_and_a_gradient_of_zero(packed):
    model, calls = build("qwen2"), []
    ids, mask, labels, keep = batch([4, 4, 2], [3, 0, 5])
    model.register_forward_pre_hook(
        lambda module, given, named: calls.append(len(named["input_ids"])), with_kwargs=True
    )
    unread = torch.full((3, keep), -2.0)
    chosen = ChosenRows(model, keep, merge=True, packed=packed, live=torch.zeros(3, dtype=torch.bool), unread=unread)
    scores = chosen(ids, mask, labels, fused_lm_head=True)
    assert torch.equal(scores.log_probs, unread)
    scores.log_probs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert calls == [1]


@pytest.mark.numeric
@pytest.mark.parametrize("hole", [(1, -4), (0, 3), (0, slice(0, 5))])
def test_rows_with_holes_or_without_a_prompt_are_not_packed_and_every_score_stays_in_its_column(monkeypatch, hole):
    monkeypatch.setattr(packing, "CALL", -99)
    model = build("qwen2")
    ids, mask, labels, keep = batch([4, 4, 2], [5, 4, 5])
    assert Rows.of(ids, mask, keep).regular
    mask[hole] = 0
    assert not Rows.of(ids, mask, keep).regular
    labels = labels.masked_fill(mask == 0, -100)
    expected = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs[:, -keep:]
    chosen = ChosenRows(model, keep, merge=True, packed=True)
    assert_near(chosen(ids, mask, labels, fused_lm_head=True).log_probs, expected, FLOAT32)
