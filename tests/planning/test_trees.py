"""What `pods doctor MODEL` says of prefix trees: the parts of a policy that are computed over them, and why not."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pods_rl.planning.trees import describe_trees
from pods_rl.policies import tiny_policy_path
from pods_rl.recipe import load_recipe

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def parts(model, **keys):
    return dict(describe_trees(load_recipe("tiny-pods", {"model_name_or_path": str(model), **keys})))


def save(folder, model_type, **settings):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | settings)).save_pretrained(folder)
    return folder


def test_the_shipped_policy_is_computed_over_trees():
    found = parts(tiny_policy_path())
    assert not found["generation"].startswith("rows")
    assert not found["update"].startswith("rows")


def test_a_part_that_is_computed_by_rows_says_why(tmp_path):
    found = parts(save(tmp_path, "mamba", state_size=4))
    assert not found["generation"].startswith("rows")
    assert found["update"].startswith("rows: ")


@pytest.mark.parametrize("keys", [{"prefix_tree": False}, {"exact_trl": True}])
def test_trees_that_are_turned_off_name_their_keys(keys):
    for value in parts(tiny_policy_path(), **keys).values():
        assert value.startswith("rows: ")
        assert "prefix_tree" in value
