"""vLLM under PODSTrainer: n at generation, m everywhere else. Here it is `vllm_stand_in.py`.

A real vLLM, one process and two: tests/real_vllm/test_training.py.
"""

from __future__ import annotations

import inspect
import re
import sys

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from tests.numeric import FLOAT32, assert_near

from .conftest import PROMPTS, assert_equal_weights, batches_of, letter_reward
from .test_losses import PLAIN, fed, kept_rows
from .vllm_stand_in import LLM, Client, stand_ins

modes = pytest.mark.parametrize("mode", ["server", "colocate"])
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1}
CORRECTED = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 3.0}


@pytest.fixture
def make(make_trainer):
    """Trainers whose vLLM is the stand-in: 2 prompts a generation, 12 rollouts each, 4 kept."""
    with stand_ins():
        yield lambda mode="server", *classes, **config: make_trainer(
            *classes, use_vllm=True, vllm_mode=mode, **({} if classes else {"num_rollouts": 12}) | config
        )


def generator():
    """The only stand-in that was made."""
    (made,) = Client.made + LLM.made
    return made


@modes
def test_n_of_each_prompt_are_requested_with_the_sampling_settings_and_the_weights_of_the_step(make, mode):
    trainer, steps = make(mode, max_steps=2, **SAMPLING), []
    made = generator()
    ask = made.generate

    def generate(*args, **kwargs):
        steps.append(assert_equal_weights(made.weights, trainer))
        return ask(*args, **kwargs)

    made.generate = generate
    trainer.train()
    assert len(steps) == len(made.sent("reset_prefix_cache")) == 2
    requests, tokens = made.sent("generate"), {tuple(trainer.processing_class(p)["input_ids"]) for p in PROMPTS}
    assert len(requests) == 2
    for sent in requests:
        if mode == "server":
            prompts, sampling = [tuple(ids) for ids in sent["prompts"] for _ in range(sent["n"])], sent
        else:
            prompts, sampling = [tuple(prompt["prompt_token_ids"]) for prompt in sent[0]], vars(sent[1])
        assert prompts == [prompts[0]] * 12 + [prompts[12]] * 12
        assert len({*prompts}) == 2
        assert {*prompts} <= tokens
        assert {name: sampling[name] for name in SAMPLING} == SAMPLING
        assert (sampling["max_tokens"], sampling["logprobs"]) == (12, 0)


@pytest.mark.parametrize(("config", "at_once"), [({}, 24), ({"rollout_batch_size": 10}, 10), ({"num_rollouts": 4}, 8)])
def test_a_colocated_generator_has_room_for_the_rollouts(make, config, at_once):
    """TRL would give it room for the 8 rows of the update."""
    make("colocate", vllm_gpu_memory_utilization=0.3, vllm_max_model_length=99, **config)
    settings = generator().settings
    assert settings["max_num_seqs"] == at_once
    assert (settings["gpu_memory_utilization"], settings["max_model_len"]) == (0.3, 99)
    assert vllm_generation.VLLMGeneration is sys.modules["trl.trainer.grpo_trainer"].VLLMGeneration


def test_weights_travel_only_where_something_is_generated_from_others(make):
    """Four steps on one generation, then one on the next; the last two steps have no signal, so nothing moves."""
    calls = []

    def reward(completions, **_):
        calls.append(1)
        return letter_reward(completions) if len(calls) == 1 else [1.0] * len(completions)

    schedule = {"steps_per_generation": 2, "num_iterations": 2, "per_device_train_batch_size": 4}
    trainer = make(reward=reward, max_steps=12, **schedule)
    trainer.train()
    assert [row.get("pods/skipped_step", 0.0) for row in trainer.state.log_history[:12]] == [0.0] * 4 + [1.0] * 8
    assert len(generator().sent("generate")) == 3
    assert len(generator().sent("update_named_params")) == 2


@modes
def test_the_sampler_s_log_probabilities_follow_the_kept_rows(make, mode):
    trainer = make(mode, max_steps=2, **CORRECTED)
    batches = batches_of(trainer)
    trainer.train()
    given, unknown = generator().sampler.given, 0
    assert len(given) == 2 * 24
    names = ("completion_ids", "completion_mask", "sampling_per_token_logps")
    names += ("old_per_token_logps", "importance_sampling_ratio")
    for batch in batches:
        assert len(batch["completion_ids"]) == 8
        for ids, mask, sampled, old, ratio in zip(*(batch[name] for name in names), strict=True):
            length = int(mask.sum())
            expected = torch.tensor(given[tuple(ids[:length].tolist())])
            assert torch.equal(sampled[:length].nan_to_num(9.0), expected.nan_to_num(9.0))
            unknown += int(expected.isnan().sum())
            assert_near(ratio[:length], (old[:length] - expected).nan_to_num(nan=0.0).exp().clamp(max=3.0), FLOAT32)
    assert unknown > 0


@modes
def test_evaluation_requests_its_own_number(make, mode, dataset):
    trainer = make(
        mode, max_steps=1, per_device_eval_batch_size=4, num_generations_eval=2,
        trainer_arguments={"eval_dataset": dataset.select(range(2))},
    )  # fmt: skip
    trainer.evaluate()
    trainer.train()
    sent = generator().sent("generate")
    if mode == "server":
        assert [(len(request["prompts"]), request["n"]) for request in sent] == [(2, 2), (2, 12)]
    else:
        assert [len(prompts) for prompts, _ in sent] == [4, 24]


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask"])
def test_m_of_n_is_trl_on_those_m(make, correction):
    """Log-probabilities of the sampler included, however TRL corrects by them."""
    config = {"max_steps": 3, "steps_per_generation": 2, "per_device_train_batch_size": 4, "loss_type": "dapo"}
    config |= {"vllm_importance_sampling_mode": correction, "vllm_importance_sampling_clip_max": 20.0}
    ours = make(**config, **PLAIN)
    rows = kept_rows(ours)
    ours.train()
    theirs = fed(make("server", GRPOTrainer, GRPOConfig, **config), rows)
    theirs.train()
    assert_equal_weights(ours, theirs)


def test_the_stand_ins_have_the_signatures_they_stand_for():
    for name in ("__init__", "init_communicator", "update_named_params", "reset_prefix_cache", "generate"):
        expected = inspect.signature(getattr(VLLMClient, name)).parameters
        got = inspect.signature(getattr(Client, name)).parameters
        assert [(p.name, p.default) for p in got.values()] == [(p.name, p.default) for p in expected.values()], name
    source = inspect.getsource(vllm_generation.VLLMGeneration)
    assert set(re.findall(r"vllm_client\.(\w+)\(", source)) - {"image_features"} <= set(dir(Client))
    assert set(re.findall(r"self\.llm\.(\w+)", source)) - {"llm_engine"} <= set(dir(LLM))
    assert "max_num_seqs=" in inspect.getsource(GRPOTrainer.__init__)
