"""What is read from TRL's source is what TRL's dataclasses say."""

import dataclasses

import pytest

from pods_rl.recipe.schema import COMPUTED, REWARDS, UNSUPPORTED, fields, trl_fields


@pytest.fixture(scope="module")
def dataclass_fields():
    from trl import GRPOConfig, ModelConfig

    both = [f for config in (ModelConfig, GRPOConfig) for f in dataclasses.fields(config) if f.init]
    assert len({field.name for field in both}) == len(both)  # else a key would belong to two parts
    return {field.name: field for field in both}


def test_fields_and_defaults_agree(dataclass_fields):
    assert set(trl_fields()) == set(dataclass_fields)
    computed = set()
    for name, ours in trl_fields().items():
        theirs = dataclass_fields[name]
        if ours.default == COMPUTED:
            computed.add(name)
        else:
            assert ours.default == theirs.default, name
    assert computed == {"optim", "include_for_metrics"}  # no literal: by torch's version, and a list


def test_help_and_choices_agree(dataclass_fields):
    for name, ours in trl_fields().items():
        theirs = dataclass_fields[name].metadata
        assert ours.help == " ".join(theirs.get("help", "").replace("%%", "%").split()), name
        if ours.choices and "choices" in theirs:
            assert list(ours.choices) == list(theirs["choices"]), name


def test_every_default_is_of_its_own_type():
    for name, field in fields().items():
        if field.default != COMPUTED:
            assert field.convert(field.default) == field.default, name


def test_names_that_are_written_down_again_are_the_real_ones():
    from pods_rl import rewards
    from pods_rl.tasks.generated import DIFFICULTIES
    from pods_rl.tasks.prompts import PROMPT_STYLES

    assert set(REWARDS) == set(rewards.REWARDS)
    assert set(fields()["task_difficulty"].choices) == set(DIFFICULTIES)
    assert set(fields()["prompt_style"].choices) == set(PROMPT_STYLES)
    assert set(UNSUPPORTED) <= set(trl_fields())


def test_the_engines_own_fields_are_the_ones_we_document():
    from trl import GRPOConfig

    from pods_rl.engines.trl import PODSConfig

    added = {f.name: f for f in dataclasses.fields(PODSConfig)}
    for field in dataclasses.fields(GRPOConfig):
        added.pop(field.name)
    ours = {name: field for name, field in fields().items() if field.source == "PODSConfig"}
    engine = {name: field.default for name, field in added.items()}
    assert engine.pop("skip_zero_advantage_steps") is None  # a recipe's arms all skip, plain GRPO too
    assert fields()["skip_zero_advantage_steps"].default is True
    assert engine == {name: field.default for name, field in ours.items()}
    assert {name: field.metadata["help"] for name, field in added.items()} == {
        name: fields()[name].help for name in added
    }


@pytest.mark.parametrize("name", ["loss_type", "scale_rewards", "importance_sampling_level", "vllm_mode"])
def test_choices_we_add_are_the_ones_that_trl_compares_with(name):
    import inspect
    from importlib import import_module

    trainer = inspect.getsource(import_module("trl.trainer.grpo_trainer"))
    prose = trl_fields()[name].help
    for choice in fields()[name].choices:
        assert f'"{choice}"' in trainer or choice in prose, choice
