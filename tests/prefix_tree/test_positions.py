"""How many positions a model has, and what is said of prompts that need more."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pods_rl.errors import UserError
from pods_rl.prefix_tree.positions import Positions, positions_of, with_longest_text

SMALL = {"vocab_size": 16, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
NEO = {**SMALL, "num_layers": 1, "max_position_embeddings": 40, "attention_types": [[["global"], 1]]}
QWEN = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 8, "max_position_embeddings": 40}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "rope_theta": 1e4}
KINDS = {
    "gpt2": (SMALL | {"n_positions": 40}, Positions(40, end=True)),
    "opt": (SMALL | {"ffn_dim": 8, "max_position_embeddings": 40, "word_embed_proj_dim": 8}, Positions(40, end=True)),
    "gpt_neo": (NEO, Positions(40, end=True)),
    "biogpt": (SMALL | {"max_position_embeddings": 40}, Positions(40, end=True)),
    "roberta": (SMALL | {"max_position_embeddings": 42, "is_decoder": True}, Positions(40, end=True)),
    "qwen2": (QWEN, Positions(40, end=False)),
    "qwen3": (QWEN | {"rope_parameters": YARN}, None),  # made for longer rows
    "bloom": (SMALL, None),  # ALiBi
    "mamba": ({"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1}, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_positions_of_each_kind_of_model(kind: str) -> None:
    settings, expected = KINDS[kind]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    assert positions_of(model) == expected


@pytest.mark.parametrize("kind", ["gpt2", "opt", "roberta"])
def test_a_model_runs_to_the_end_of_its_table_and_not_beyond(kind: str) -> None:
    settings, expected = KINDS[kind]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    model(torch.full((1, expected.count), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, expected.count + 1), 5))


def test_rows_beyond_a_table_are_an_error_and_beyond_rotary_positions_a_note() -> None:
    table = Positions(40, end=True)
    rotary = Positions(40, end=False)
    names = {"which": "The longest prompt", "advice": "shorten it"}
    for positions in (table, rotary):
        assert positions.check(30, 10, **names) is None
        assert positions.check(31, 10, trains=False, **names) is None  # the last token is not read
    with pytest.raises(UserError, match=r"max_completion_length .*\b9\b") as refused:
        table.check(31, 10, **names)
    assert "\n" not in str(refused.value)
    assert re.search(r"max_completion_length .*\b10\b", str(_error(table, 31, 11, trains=False, **names)))
    assert "First" in str(_error(table, 40, 1, **names))
    assert "max_position_embeddings" in str(rotary.check(31, 10, **names))


def _error(positions: Positions, *sizes: int, **names: object) -> UserError:
    with pytest.raises(UserError) as refused:
        positions.check(*sizes, **names)
    return refused.value


def test_the_longest_texts_are_found_among_many() -> None:
    prompts = ["x" * (i % 997) for i in range(5000)]
    assert len(with_longest_text(prompts)[0]) == 996
