"""The rollout server of the CPU example: what it answers, and with which weights."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .conftest import ROOT, TINY

sys.path.insert(0, str(ROOT / "examples"))
from verl_on_cpu.rollout import CPUServer

GREEDY = {"temperature": 0, "top_k": -1, "top_p": 1.0, "logprobs": True}
SAMPLED = {**GREEDY, "temperature": 1.0}
PROMPTS = ["12+30-5=", "7+8=", "12+30-5="]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture
def server():
    config = SimpleNamespace(dtype="float32", seed=0, response_length=40, max_num_seqs=64)
    return CPUServer(str(TINY), config, 0)


@pytest.fixture
def batches(server, monkeypatch):
    """The number of requests in each batch."""
    seen, complete = [], server._complete
    monkeypatch.setattr(server, "_complete", lambda batch: seen.append(len(batch)) or complete(batch))
    return seen


def answers(server, tokenizer, prompts, how):
    async def play():
        requests = [server.generate("id", tokenizer(prompt)["input_ids"], how) for prompt in prompts]
        return await asyncio.gather(*requests)

    return asyncio.run(play())


def test_greedy_completions_are_those_of_generate(server, tokenizer, batches):
    model = AutoModelForCausalLM.from_pretrained(TINY)
    for prompt, output in zip(PROMPTS, answers(server, tokenizer, PROMPTS, GREEDY), strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        row = model.generate(**ids, do_sample=False, max_new_tokens=40)[0, ids["input_ids"].shape[1] :]
        assert output.token_ids == row.tolist()
    assert batches == [3]


def test_log_probabilities_are_the_models(server, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(TINY)
    for prompt, output in zip(PROMPTS, answers(server, tokenizer, PROMPTS, SAMPLED), strict=True):
        ids = torch.tensor([tokenizer(prompt)["input_ids"] + output.token_ids])
        count = len(output.token_ids)
        logps = model(ids).logits[0, -count - 1 : -1].log_softmax(dim=-1).gather(1, ids[0, -count:, None])[:, 0]
        assert output.log_probs == pytest.approx(logps.tolist(), abs=1e-4)
        assert tokenizer.eos_token_id not in output.token_ids[:-1]


def test_new_weights_answer_later_requests_alone(server, tokenizer):
    weights = {name: torch.zeros_like(value) for name, value in server._model.state_dict().items()}
    before = answers(server, tokenizer, ["7+8="], GREEDY)[0]
    asyncio.run(server.load(weights, 3))
    after = answers(server, tokenizer, ["7+8="], GREEDY)[0]
    assert before.extra_fields["global_steps"] == 0
    assert after.extra_fields["global_steps"] == 3
    assert after.token_ids == [0] * 40  # all logits are equal
    assert before.token_ids != after.token_ids


def test_a_failed_batch_answers_each_request_with_its_error_and_the_next_runs(server, tokenizer, monkeypatch):
    async def play():
        with monkeypatch.context() as patched:
            patched.setattr(server._model, "generate", lambda **_: 1 / 0)
            ids = tokenizer("7+8=")["input_ids"]
            failed = await asyncio.gather(*(server.generate("id", ids, GREEDY) for _ in "ab"), return_exceptions=True)
        return failed, await server.generate("id", ids, GREEDY)

    failed, output = asyncio.run(play())
    assert [type(error) for error in failed] == [ZeroDivisionError] * 2
    assert output.token_ids
