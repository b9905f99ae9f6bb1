"""A user who changes two names gets TRL: the same defaults, the same weights, the same logs."""

import dataclasses
import math

import pytest
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from pods_rl import PODSConfig

from .conftest import PROMPTS, assert_equal_weights, constant, letter_reward
from .test_losses import LOSSES, OFTEN, OTHERS, train

TEMPLATE = "{% for m in messages %}<think>{{ m['content'] }}</think>{% endfor %}"
WEIGHTS = 0.05  # of a learning rate, after four AdamW steps


def chats(prompts=PROMPTS):
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": p}] for p in prompts * 4]})


def test_every_field_of_trl_s_has_trl_s_default():
    ours, theirs = list(dataclasses.fields(PODSConfig)), list(dataclasses.fields(GRPOConfig))
    for our, field in zip(ours[: len(theirs)], theirs, strict=True):
        expected = (field.name, field.default, field.default_factory, field.type)
        assert (our.name, our.default, our.default_factory, our.type) == expected


@pytest.mark.parametrize("given", [{}, {"num_generations": 2, "steps_per_generation": 4}, {"bf16": False, "beta": 0.1}])
def test_fields_that_follow_from_others_are_trl_s_too(tmp_path, given):
    """Such as bf16 and the generation batch."""
    theirs, ours = (cls(str(tmp_path), use_cpu=True, **given) for cls in (GRPOConfig, PODSConfig))
    for field in dataclasses.fields(GRPOConfig):
        assert getattr(ours, field.name) == getattr(theirs, field.name) or field.name == "logging_dir", field.name
    assert (ours.num_rollouts, ours.skip_zero_advantage_steps) == (ours.num_generations, False)


# -- weights -------------------------------------------------------------------------------------------------------


def none_and_nan(completions, **_):
    return [(0.5, None, math.nan, 1.0)[sum(map(ord, text)) % 4] for text in completions]


def chat_reward(completions, **_):
    return letter_reward([turn[0]["content"] for turn in completions])


def stream():
    return IterableDataset.from_generator(lambda: ({"prompt": p, "answer": "3"} for p in PROMPTS * 4))


# name: settings; `reward`, `train_dataset` and `trainer_arguments` go to the trainer, the rest to its configuration
CONFIGURATIONS = {
    "defaults": {},
    "a schedule": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "steps on one generation": {"steps_per_generation": 4, "per_device_train_batch_size": 2, "num_iterations": 2},
    **{name: {**settings, **OFTEN} for name, settings in (LOSSES | OTHERS).items()},
    "off-policy mask": {"beta": 0.02, "off_policy_mask_threshold": 0.01, "use_bias_correction_kl": True, **OFTEN},
    "batch scaling": {"scale_rewards": "batch", **OFTEN},
    "None and NaN": {"reward": none_and_nan, **OFTEN},
    "two rewards, NaN in one": {"reward": [letter_reward, none_and_nan], "reward_weights": [1.0, 0.3], **OFTEN},
    "normalised, then summed": {
        "reward": [none_and_nan, letter_reward], "multi_objective_aggregation": "normalize_then_sum", **OFTEN,
    },
    "a step without signal": {"reward": constant, "weight_decay": 0.1},
    "in order": {"shuffle_dataset": False, **OFTEN},
    "a stream": {"train_dataset": stream(), **OFTEN},
    "chats": {"train_dataset": chats(), "reward": chat_reward, **OFTEN},
    "LoRA": {"trainer_arguments": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}, **OFTEN},
    "evaluation": {
        "trainer_arguments": {"eval_dataset": chats(PROMPTS[:1])}, "train_dataset": chats(), "reward": chat_reward,
        "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, **OFTEN,
    },
    "a reference that follows": {"beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 2, **OFTEN},
}  # fmt: skip
QUICK = ("defaults", "two rewards, NaN in one", "a step without signal")
SLOW = ("KL", "grpo", "CISPO", "chats", "evaluation")
TIMES = {"step_time", "train_runtime", "eval_runtime"}


def marks_of(name):
    if name in QUICK:
        return ()
    return pytest.mark.slow if name in SLOW else pytest.mark.reliability


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in CONFIGURATIONS])
@pytest.mark.numeric
@pytest.mark.usefixtures("trl_draws")
def test_four_steps_are_trl_s(make_trainer, tokenizer, monkeypatch, name):
    """To the last bit, logs included, with `exact_trl`; with the defaults up to the stated rounding."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    settings = {"loss_type": "dapo", "optim": "adamw_torch", **CONFIGURATIONS[name], "max_steps": 4}
    theirs, their_logs = train(make_trainer(GRPOTrainer, GRPOConfig, **settings))
    exact, our_logs = train(make_trainer(**settings, exact_trl=True))
    assert_equal_weights(exact, theirs)
    for their_row, our_row in zip(their_logs, our_logs, strict=True):
        same = {key: (our_row[key], value) for key, value in their_row.items() if key not in TIMES}
        assert {key: pair for key, pair in same.items() if pair[0] != pair[1]} == {}
    rounded, _ = train(make_trainer(**settings))
    assert max((weight - rounded[key]).abs().max().item() for key, weight in theirs.items()) <= WEIGHTS * 1e-3
