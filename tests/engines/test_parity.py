"""A user who changes two names gets TRL: the same defaults, the same weights, the same calls of what they override."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from pods_rl import PODSConfig, PODSTrainer

from .conftest import PROMPTS, letter_reward
from .test_equivalence import gradients_of_first_step
from .test_losses import OFTEN, OTHERS, train

TEMPLATE = "{% for m in messages %}<think>{{ m['content'] }}</think>{% endfor %}"
EXACT = {"exact_trl": True}
FIRST_GRADIENT = 16  # ulps of a tensor's largest entry
WEIGHTS = 0.05  # of a learning rate, after four AdamW steps


def chats(prompts=PROMPTS):
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": p}] for p in prompts * 4]})


# -- defaults ------------------------------------------------------------------------------------------------------


def test_every_field_of_trl_s_has_trl_s_default():
    ours = {field.name: field for field in dataclasses.fields(PODSConfig)}
    for field in dataclasses.fields(GRPOConfig):
        assert ours[field.name].default == field.default, field.name
        assert ours[field.name].default_factory == field.default_factory, field.name
        assert ours[field.name].type == field.type, field.name
    assert list(ours)[: len(dataclasses.fields(GRPOConfig))] == [field.name for field in dataclasses.fields(GRPOConfig)]


@pytest.mark.parametrize("given", [{}, {"num_generations": 2, "steps_per_generation": 4}, {"bf16": False, "beta": 0.1}])
def test_what_follows_from_the_given_fields_is_trl_s_too(tmp_path, given):
    """Those that are worked out, such as bf16 and the generation batch; and what a trainer leaves of them."""
    theirs, ours = (cls(str(tmp_path), use_cpu=True, **given) for cls in (GRPOConfig, PODSConfig))
    for field in dataclasses.fields(GRPOConfig):
        assert getattr(ours, field.name) == getattr(theirs, field.name) or field.name == "logging_dir", field.name
    assert (ours.num_rollouts, ours.skip_zero_advantage_steps) == (ours.num_generations, False)


def test_a_trainer_without_a_configuration_is_named_after_its_model(random_model, tokenizer, dataset, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    default = PODSConfig.__init__
    monkeypatch.setattr(PODSConfig, "__init__", lambda self, *a: default(self, *a, use_cpu=True, bf16=False))
    trainer = PODSTrainer(copy.deepcopy(random_model), letter_reward, None, dataset, processing_class=tokenizer)
    assert trainer.args.output_dir == f"{random_model.config._name_or_path.split('/')[-1]}-PODS"


# -- weights -------------------------------------------------------------------------------------------------------


def none_and_nan(completions, **_):
    return [(0.5, None, math.nan, 1.0)[sum(map(ord, text)) % 4] for text in completions]


def chat_reward(completions, **_):
    return letter_reward([turn[0]["content"] for turn in completions])


def constant(completions, **_):
    return [1.0] * len(completions)


def stream():
    return IterableDataset.from_generator(lambda: ({"prompt": p, "answer": "3"} for p in PROMPTS * 4))


# name: settings; `reward`, `train_dataset` and `trainer_arguments` go to the trainer, the rest to its configuration
CONFIGURATIONS = {
    "defaults": {},
    "a schedule": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "steps on one generation": {"steps_per_generation": 4, "per_device_train_batch_size": 2, "num_iterations": 2},
    "grpo": {"loss_type": "grpo", **OFTEN},
    "bnpo": {"loss_type": "bnpo", **OFTEN},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", **OFTEN},
    "dapo": {"epsilon_high": 0.28, "mask_truncated_completions": True, **OFTEN},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, **OFTEN},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, **OFTEN},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", **OFTEN},
    "sapo": {"loss_type": "sapo", **OFTEN},
    "vespo": {"loss_type": "vespo", **OFTEN},
    **{name: {**settings, **OFTEN} for name, settings in OTHERS.items()},
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
ALWAYS = ("defaults", "grpo", "cispo", "KL", "two rewards, NaN in one", "a step without signal", "chats", "evaluation")
TIMES = {"step_time", "train_runtime", "eval_runtime"}


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.reliability) for name in CONFIGURATIONS]
)
@pytest.mark.numeric
@pytest.mark.usefixtures("trl_draws")
def test_four_steps_are_trl_s(make_trainer, tokenizer, monkeypatch, name):
    """To the last bit, logs included, with the switches off; with the defaults up to the stated rounding."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    settings = {"loss_type": "dapo", "optim": "adamw_torch", **CONFIGURATIONS[name], "max_steps": 4}
    (theirs, their_logs) = train(make_trainer(GRPOTrainer, GRPOConfig, **settings))
    (exact, our_logs) = train(make_trainer(**settings, **EXACT))
    assert [key for key, weight in theirs.items() if not torch.equal(weight, exact[key])] == []
    for their_row, our_row in zip(their_logs, our_logs, strict=True):
        same = {key: (our_row[key], value) for key, value in their_row.items() if key not in TIMES}
        assert {key: pair for key, pair in same.items() if pair[0] != pair[1]} == {}
    (rounded, _) = train(make_trainer(**settings))
    apart = max((weight - rounded[key]).abs().max().item() for key, weight in theirs.items())
    print(f"\n{name}: weights apart by {apart / 1e-3:.1e} learning rates")
    assert apart <= WEIGHTS * 1e-3


@pytest.mark.numeric
@pytest.mark.usefixtures("trl_draws")
@pytest.mark.parametrize("name", ["grpo", "vespo"])
def test_the_first_gradient_is_trl_s_up_to_the_stated_rounding(make_trainer, name):
    settings = {"loss_type": "dapo", **CONFIGURATIONS[name]}
    theirs = gradients_of_first_step(make_trainer(GRPOTrainer, GRPOConfig, **settings))
    ours = gradients_of_first_step(make_trainer(**settings))
    ulp = torch.finfo(torch.float32).eps
    apart = {key: ((ours[key] - g).abs().max() / g.abs().max() / ulp).item() for key, g in theirs.items()}
    assert max(apart.values()) <= FIRST_GRADIENT
