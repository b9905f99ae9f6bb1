"""The count of launches and reads equals one by hand, and that of a step stays below its bar."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from pods_rl.prefix_tree.decoding import RowDraws, complete_prompts

from . import module

launches = module("launches")


def test_operations_that_compute_and_numbers_that_the_host_reads_are_counted():
    numbers = torch.tensor([[1.0, -2.0], [3.0, -4.0]])
    counts = launches.Counts()
    with launches.CountOperations(counts), launches.CountReads(counts):
        numbers * 2  # outside of a phase
        with counts.within("update"):
            doubled = numbers * 2  # 1 launch
            flat = doubled.view(-1).unsqueeze(0)[0]  # views
            positive = flat[flat > 0]  # 2 launches; 1 read, of how many there are
            with counts.within("generation"):
                total = flat.sum()  # 1 launch
            assert total.item() == -4.0  # 1 read
            assert positive.tolist() == [2.0, 6.0]  # 1 read
            assert flat.cpu().numpy().shape == (4,)  # 1 read
            assert flat.tolist() == [2.0, -4.0, 6.0, -8.0]  # 1 read
    assert counts.launches == {"update": 3, "generation": 1}
    assert counts.reads == {"update": 5}


TRL = launches.TRL_ARM
OURS = launches.Arm("ours", launches.M, {})  # n = m: the update has as many rows, and less is generated
WITH_BUDGET = launches.Arm("ours, 16,000 tokens", launches.M, {"max_tokens_per_microbatch": 16_000})


@pytest.mark.parametrize(
    ("row", "bars"),
    [
        (launches.Row(1, 16), {OURS.name: 1.4}),
        pytest.param(launches.Row(4, 8), {OURS.name: 0.65, WITH_BUDGET.name: 0.40}, marks=pytest.mark.slow),
    ],
    ids=["one of 16", "eight of 8"],
)
def test_the_update_has_fewer_launches_than_its_bar(row, bars):
    """With short completions: the number of operations does not depend on their length."""
    case = row.case(completion=8)
    base = launches.count_step(TRL, case).launches["update"]
    for arm in (OURS, WITH_BUDGET):
        if arm.name in bars:
            assert launches.count_step(arm, case).launches["update"] <= bars[arm.name] * base


def launches_of_a_token(complete):
    """The launches of each of the later tokens that `complete` generates."""
    counts = launches.Counts()
    total = []
    for length in (4, 8):
        with launches.CountOperations(counts), counts.within("generation"):
            complete(length)
        total.append(counts.launches.pop("generation"))
    return (total[1] - total[0]) / 4


def test_a_token_of_a_policy_with_lora_has_few_launches():
    config = Qwen2Config(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    policy = get_peft_model(Qwen2ForCausalLM(config), LoraConfig(r=2, target_modules="all-linear")).eval()
    model = policy.get_base_model()
    rows = [[5, 6, 7, 8]] * 4

    def over_trees(length):
        draws = RowDraws([(0, row) for row in range(4)], length)
        complete_prompts(model, rows, draws, length=length, ends=[], pad=0)

    def by_generate(length):
        prompts = torch.tensor(rows)
        model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=length, do_sample=True)

    over_trees(2)  # compares logits once
    assert launches_of_a_token(over_trees) <= 0.35 * launches_of_a_token(by_generate)
