"""What a recipe refuses, a script's configuration refuses too: the same table."""

import math

import numpy as np
import pytest
from trl import TrlParser

from pods_rl import AsyncPODSConfig, PODSConfig
from pods_rl.engines.bounds import CHOICES, INTERVALS, MAPPINGS
from pods_rl.errors import UserError
from pods_rl.recipe.schema import fields

HUGE = 10**400


def config(**settings):
    return PODSConfig("unused", use_cpu=True, bf16=False, **settings)


@pytest.mark.parametrize("key", sorted(INTERVALS))
def test_numbers_that_no_run_can_use_are_refused(key):
    """Also text, booleans, and numbers that no float holds."""
    low, high = map(float, INTERVALS[key][1:-1].split(","))
    outside = [True, math.nan, "1.0", [1], HUGE, -math.inf]
    if math.isfinite(low):
        outside += [low - 1, -HUGE]
    if math.isfinite(high):
        outside.append(high * 2)
    if "float" not in fields()[key].kinds:
        outside.append(low + 1.5)
    for value in outside:
        if isinstance(value, str) and "str" in fields()[key].kinds:
            continue
        with pytest.raises(UserError, match=key) as refused:
            config(**{key: value})
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 300
        with pytest.raises(ValueError, match="got "):
            fields()[key].convert(value if value != "1.0" else "one")


@pytest.mark.parametrize("key", sorted(CHOICES))
def test_unknown_choices_are_refused(key):
    for value in ("gropo", None, 3, ["grpo"]):
        with pytest.raises(UserError, match=key):
            config(**{key: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0, "epsilon_high": None, "delta": 2, "top_entropy_quantile": 1},
        {"max_grad_norm": None, "top_k": None, "tool_timeout": None},
        {"max_grad_norm": math.inf, "learning_rate": np.float32(1e-6), "top_k": np.int64(5)},
        {"scale_rewards": False, "pad_to_multiple_of": "auto"},
        {"scale_rewards": "batch", "pad_to_multiple_of": "8"},
        {"generation_kwargs": {"top_p": 0.5, "do_sample": True, "no_repeat_ngram_size": 3}},
        {"generation_kwargs": '{"top_p": 0.5}'},
    ],
)
def test_values_that_work_are_accepted(settings):
    config(**settings)


@pytest.mark.parametrize("key", MAPPINGS)
def test_what_is_not_a_mapping_is_refused(key):
    for value in ("nonsense", [1], 3):
        with pytest.raises(UserError, match=key):
            config(**{key: value})


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"top_kk": 1}, "top_k"),
        ({"top_p": 2}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": HUGE}, "bits"),
        ({"num_return_sequences": 2}, "num_rollouts"),
        ({3: 2}, "3"),
    ],
)
def test_arguments_that_generate_does_not_have_are_refused(arguments, word):
    with pytest.raises(UserError, match=f"generation_kwargs: .*{word}"):
        config(generation_kwargs=arguments)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"selection": "batch", "exact_trl": True}, "exact_trl"),
        ({"selection": "batch", "mask_constant_groups": True}, "mask_constant_groups"),
        ({"selection": "batch", "num_rollouts": 8, "num_prompts": 1, "per_device_train_batch_size": 16}, "num_prompts"),
        ({"selection": "batch", "num_prompts": 0}, "num_prompts"),
        ({"selection": "batch", "rule": "percentile", "num_rollouts": 8}, "percentile"),
        ({"selection": "batch", "multi_objective_aggregation": "normalize_then_sum"}, "selection"),
        ({"reward_tolerance": 0.1, "multi_objective_aggregation": "normalize_then_sum"}, "reward_tolerance"),
        ({"advantages": "before", "multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
        ({"mask_constant_groups": True, "loss_type": "bnpo"}, "bnpo"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings, key):
    with pytest.raises(UserError, match=key):
        config(**{"num_generations": 4} | settings)


@pytest.mark.parametrize("config", [PODSConfig, AsyncPODSConfig])
def test_trl_s_parser_of_arguments_builds_the_configuration(config, tmp_path):
    """The parser changes the annotations of the class, and passes every default."""
    arguments = ["--output_dir", str(tmp_path), "--num_rollouts", "16", "--bf16", "false", "--use_cpu", "true"]
    (first,) = TrlParser((config,)).parse_args_and_config(arguments)
    assert first.num_rollouts == 16
    if config is PODSConfig:
        for given, read in (("auto", "auto"), ("16000", 16_000)):
            (again,) = TrlParser((config,)).parse_args_and_config([*arguments, "--max_tokens_per_microbatch", given])
            assert again.max_tokens_per_microbatch == read
    with pytest.raises(UserError, match="learning_rate"):
        TrlParser((config,)).parse_args_and_config([*arguments, "--learning_rate", "-1"])
