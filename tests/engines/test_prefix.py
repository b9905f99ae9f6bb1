"""Packs: their layout by worked values, their attention by brute force, and models by their own rows."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl.trainer.utils import add_fused_lm_head

from pods_rl.engines.trl import packing
from pods_rl.engines.trl.packing import ChosenRows, why_rows
from pods_rl.engines.trl.prefix import Rows, attend, lay_out


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


def test_rows_of_one_prompt_stand_together_longest_first():
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
    assert bucket.gather.tolist() == [0, 1, 2, 2]
    assert bucket.real.tolist() == [0, 1, 2]


def test_rows_of_very_different_lengths_are_not_padded_to_each_other():
    ids, mask, _, keep = batch([3] * 6, [16, 4, 8, 3, 16, 1])
    (group,) = lay_out(Rows.of(ids, mask, keep), range(6), ids.device).groups
    assert [(bucket.count, bucket.width) for bucket in group.buckets] == [(3, 16), (2, 4), (1, 1)]


@pytest.mark.parametrize("hole", [(0, 3), (0, 5), (0, slice(0, 4))])
def test_rows_with_a_hole_or_without_a_prompt_are_not_regular(hole):
    ids, mask, _, keep = batch([3, 2], [3, 3])
    assert Rows.of(ids, mask, keep).regular
    mask[hole] = 0
    assert not Rows.of(ids, mask, keep).regular


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("heads", [4, 2, 1])
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
    torch.testing.assert_close(attend(pack, query, key, value, 0.3, window), expected)
    assert pack.windows == {window}


# -- models --------------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TAKES_PACKS = {
    "Qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "Mistral, a window of 4": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)),
    "Gemma 3, layers with a window": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=4, sliding_window_pattern=2)
    ),
    "GPT-2, learned positions": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, **QUIET)),
}
TAKES_ROWS = {
    "has dropout": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    r"\(eager\) cannot be replaced": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation="eager")),
    "depend on the length of the batch": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    ),
    "cannot be replaced": lambda: MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1)),
    "attention takes dropout": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attention_dropout=0.1)),
    "log-probabilities differ": lambda: OPTForCausalLM(  # numbers its positions by the mask
        OPTConfig(
            vocab_size=64,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            dropout=0.0,
            word_embed_proj_dim=32,
            max_position_embeddings=64,
        )
    ),
}  # fmt: skip


def with_head(make):
    torch.manual_seed(0)
    model = make().train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


@pytest.mark.parametrize("name", TAKES_PACKS)
def test_a_pack_has_the_scores_and_gradients_of_its_rows(name, monkeypatch):
    monkeypatch.setattr(packing, "CALL", -99)  # packs of single rows too
    model = with_head(TAKES_PACKS[name]).double()
    assert why_rows(model, model, tolerance=1e-4) is None
    ids, mask, labels, keep = batch([9, 9, 9, 5, 5, 2, 2, 1], [7, 3, 1, 7, 7, 0, 4, 7])
    ids[4] = ids[3]
    labels[4] = labels[3]
    factors = torch.randn(2, 8, keep, dtype=torch.float64)

    def gradients(log_probs, entropy):
        return torch.autograd.grad((torch.stack([log_probs, entropy]) * factors).sum(), list(model.parameters()))

    output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    log_probs, entropy = output.log_probs[:, -keep:], output.entropy[:, -keep:]
    expected = gradients(log_probs, entropy)
    for packed, merge in [(True, True), (False, True), (True, False)]:
        counts = {"merged": 0}
        chosen = ChosenRows(model, keep, merge=merge, packed=packed, counts=counts)
        scores = chosen(ids, mask, labels, fused_lm_head=True)
        assert counts == {"merged": int(merge)}
        torch.testing.assert_close(scores.log_probs, log_probs, rtol=0, atol=1e-5)
        torch.testing.assert_close(scores.entropy, entropy, rtol=0, atol=1e-5)
        for one, other in zip(gradients(scores.log_probs, scores.entropy), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)  # TRL's head computes in float32


@pytest.mark.parametrize("reason", TAKES_ROWS)
def test_a_model_that_cannot_take_packs_is_found_out(reason):
    model = with_head(TAKES_ROWS[reason])
    found = why_rows(model, model, tolerance=1e-4)
    assert found is not None
    assert re.search(reason, found), found


def test_a_model_whose_rows_meet_elsewhere_is_found_out():
    """A block that no rule knows: it mixes neighbouring tokens."""
    model = with_head(TAKES_PACKS["Llama"])
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda module, given, out: out + out.roll(1, dims=1))
    assert "log-probabilities differ" in str(why_rows(model, model, tolerance=1e-4))


def test_without_a_pack_attention_is_transformers_own():
    model = with_head(TAKES_PACKS["Qwen2"])
    ids, mask, *_ = batch([4, 2], [3, 3])
    expected = copy.deepcopy(model)(input_ids=ids, attention_mask=mask).logits
    packing.teach_attention_packs()
    packing.teach_attention_packs()
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)


def test_a_batch_without_a_row_to_read_still_has_a_pass_and_a_gradient_of_zero():
    model = with_head(TAKES_PACKS["Qwen2"])
    ids, mask, labels, keep = batch([4, 4, 2], [3, 0, 5])
    calls = []
    model.register_forward_pre_hook(
        lambda module, given, named: calls.append(len(named["input_ids"])), with_kwargs=True
    )
    unread = torch.full((3, keep), -2.0)
    for packed in (True, False):
        how = {"merge": True, "packed": packed}
        chosen = ChosenRows(model, keep, **how, live=torch.zeros(3, dtype=torch.bool), unread=unread)
        scores = chosen(ids, mask, labels, fused_lm_head=True)
        assert torch.equal(scores.log_probs, unread)
        scores.log_probs.sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert len(calls) == 2
    assert calls == [1, 1]


def test_rows_with_holes_keep_their_places(monkeypatch):
    """Nothing is packed, and every score stays in its column."""
    monkeypatch.setattr(packing, "CALL", -99)
    model = with_head(TAKES_PACKS["Qwen2"])
    ids, mask, labels, keep = batch([4, 4, 2], [5, 4, 5])
    mask[1, -4] = 0
    labels = labels.masked_fill(mask == 0, -100)
    expected = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs[:, -keep:]
    chosen = ChosenRows(model, keep, merge=True, packed=True)
    torch.testing.assert_close(chosen(ids, mask, labels, fused_lm_head=True).log_probs, expected)
