"""A vLLM server under PODSTrainer: n at generation, m everywhere else. Here it is `vllm_stand_in.py`.

A real vLLM, also a colocated one and two processes: tests/real_vllm/test_training.py.
"""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from pods_rl import PODSConfig
from pods_rl.engines.trl.step.turns import sequences_at_once
from tests.numeric import FLOAT32, assert_near

from .conftest import PROMPTS, assert_equal_weights, batches_of, letter_reward
from .test_losses import PLAIN, fed, kept_rows
from .vllm_stand_in import Client, put_client

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1}
CORRECTED = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 3.0}


@pytest.fixture
def make(make_trainer, monkeypatch):
    """Trainers whose vLLM is the stand-in: 2 prompts a generation, 12 rollouts each, 4 kept."""
    put_client(monkeypatch)
    return lambda *classes, **config: make_trainer(
        *classes, use_vllm=True, vllm_mode="server", **({} if classes else {"num_rollouts": 12}) | config
    )


def client():
    """The only stand-in that was made."""
    (made,) = Client.made
    return made


def test_n_of_each_prompt_are_requested_with_the_sampling_settings_and_the_weights_of_the_step(make):
    trainer, steps = make(max_steps=2, **SAMPLING), []
    made = client()
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
        prompts = {tuple(ids) for ids in sent["prompts"]}
        assert (len(sent["prompts"]), len(prompts), sent["n"]) == (2, 2, 12)
        assert prompts <= tokens
        assert {name: sent[name] for name in SAMPLING} == SAMPLING
        assert (sent["max_tokens"], sent["logprobs"]) == (12, 0)


@pytest.mark.parametrize(("config", "at_once"), [({}, 24), ({"rollout_batch_size": 10}, 10), ({"num_rollouts": 4}, 8)])
def test_a_colocated_generator_has_room_for_the_rollouts(tmp_path, config, at_once):
    """TRL would give it room for the 8 rows of the update."""
    settings = {"num_generations": 4, "num_rollouts": 12, "per_device_train_batch_size": 8, **config}
    assert sequences_at_once(PODSConfig(str(tmp_path), use_cpu=True, bf16=False, **settings)) == at_once


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
    assert len(client().sent("generate")) == 3
    assert len(client().sent("update_named_params")) == 2


def test_the_sampler_s_log_probabilities_follow_the_kept_rows(make):
    trainer = make(max_steps=2, **CORRECTED)
    batches = batches_of(trainer)
    trainer.train()
    given, unknown = client().given, 0
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


def test_evaluation_requests_its_own_number(make, dataset):
    trainer = make(
        max_steps=1, per_device_eval_batch_size=4, num_generations_eval=2,
        trainer_arguments={"eval_dataset": dataset.select(range(2))},
    )  # fmt: skip
    trainer.evaluate()
    trainer.train()
    sent = client().sent("generate")
    assert [(len(request["prompts"]), request["n"]) for request in sent] == [(2, 2), (2, 12)]


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask"])
def test_m_of_n_is_trl_on_those_m(make, correction):
    """Log-probabilities of the sampler included, however TRL corrects by them."""
    config = {"max_steps": 3, "steps_per_generation": 2, "per_device_train_batch_size": 4, "loss_type": "dapo"}
    config |= {"vllm_importance_sampling_mode": correction, "vllm_importance_sampling_clip_max": 20.0}
    ours = make(**config, **PLAIN)
    rows = kept_rows(ours)
    ours.train()
    theirs = fed(make(GRPOTrainer, GRPOConfig, **config), rows)
    theirs.train()
    assert_equal_weights(ours, theirs)


def test_the_stand_in_has_the_signatures_that_it_stands_for():
    for name in ("__init__", "init_communicator", "update_named_params", "reset_prefix_cache", "generate"):
        expected = inspect.signature(getattr(VLLMClient, name)).parameters
        got = inspect.signature(getattr(Client, name)).parameters
        assert [(p.name, p.default) for p in got.values()] == [(p.name, p.default) for p in expected.values()], name
    source = inspect.getsource(vllm_generation.VLLMGeneration)
    assert set(re.findall(r"vllm_client\.(\w+)\(", source)) - {"image_features"} <= set(dir(Client))
    assert "max_num_seqs=" in inspect.getsource(GRPOTrainer.__init__)
