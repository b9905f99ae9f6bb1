"""Evaluating in one process: pass@k, standard errors, how rows are drawn, and what a policy's files must be."""

import hashlib
import itertools
import math
import random
from fractions import Fraction
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig
from tools.pretrain import build_tokenizer

from pods_rl.errors import UserError
from pods_rl.evaluation import Answer, Completion, GenerateSampler, Sampling, evaluate, pass_at_k, sampling, summarise
from pods_rl.evaluation.checkpoint import _lm_eval_scores, choose_backend, evaluate_checkpoint
from pods_rl.loading.folders import Policy, weights_hash
from pods_rl.loading.prompts import encode, render
from pods_rl.policies import tiny_policy_path
from pods_rl.prefix_tree import decoding as generating
from pods_rl.recipe import build_recipe
from pods_rl.tasks import Task, load_task
from pods_rl.yaml_files import Origin

from .engines.conftest import random_policy

GREEDY = Sampling(temperature=0.0, max_completion_length=8)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)
    exact = 1 - math.prod(Fraction(5_000 - i, 10_000 - i) for i in range(3))  # none of the 3 right ones among the 5000
    assert pass_at_k(10_000, 3, 5_000) == float(exact)
    for n, c, k in [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)]:
        with pytest.raises(ValueError, match="expected 1 <= k"):
            pass_at_k(n, c, k)


def answers(right, formed=None, repeats=2):
    """Graded completions of given outcomes, in order."""
    formed = formed or [True] * len(right)
    return [
        Answer(i // repeats, i % repeats, "p", "g", "c", r, f, 10 + i, i % 3 != 0)
        for i, (r, f) in enumerate(zip(right, formed, strict=True))
    ]


def test_an_evaluation_of_worked_values():
    # prompts right in 2, 1, 0 and 0 of 2 repeats; in form in 1, 2, 0 and 1
    given = answers([1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 1, 1, 0, 0, 0, 1])
    found = summarise(given, repeats=2, temperature=0.5, seconds=3.0).scores
    assert (found["accuracy"], found["format_accuracy"], found["both_accuracy"]) == (3 / 8, 4 / 8, 2 / 8)
    assert found["accuracy_se"] == pytest.approx(np.std([1, 0.5, 0, 0], ddof=1) / 2)
    assert found["format_accuracy_se"] == pytest.approx(np.std([0.5, 1, 0, 0.5], ddof=1) / 2)
    assert found["both_accuracy_se"] == pytest.approx(np.std([0.5, 0.5, 0, 0], ddof=1) / 2)
    assert found["pass@2"] == 0.5
    assert found["pass@2_se"] == pytest.approx(np.std([1, 1, 0, 0], ddof=1) / 2)
    assert (found["mean_completion_tokens"], found["truncated_share"]) == (13.5, 3 / 8)
    assert (found["prompts"], found["repeats"], found["temperature"], found["eval_seconds"]) == (4, 2, 0.5, 3.0)
    row = summarise(answers([1, 0, 0, 0, 1], repeats=5), repeats=5, temperature=1.0, seconds=1.0).scores
    assert all(isinstance(value, (int, float)) for value in row.values())
    assert {name for name in row if "pass" in name} == {"pass@2", "pass@2_se", "pass@4", "pass@4_se"}
    assert math.isnan(row["accuracy_se"])  # of one prompt


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return random_policy(tokenizer).eval()


@pytest.fixture(scope="module")
def task():
    return load_task({"task": "arithmetic", "task_train_size": 1, "task_test_size": 12})


def told(found):
    """What an evaluation says, without its clock."""
    return {name: value for name, value in found.scores.items() if name != "eval_seconds"}, found.answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_the_seed_decides_and_neither_batches_nor_the_loop(model, tokenizer, task, temperature, monkeypatch):
    """`generate`'s own loop takes the same draws, for a model that the loop of `rollouts` cannot serve."""

    def run(batch_size, seed=5):
        sampling = Sampling(temperature, 12, batch_size, seed=seed)
        return told(evaluate(GenerateSampler(model, tokenizer), task, sampling, repeats=3, prompts=4))

    together = run(12)
    assert run(5) == run(1) == together
    assert (run(12, seed=6) == together) is (temperature == 0)
    repeats = [[answer.completion for answer in together[1][start::3]] for start in (0, 1)]
    assert (repeats[0] == repeats[1]) is (temperature == 0)
    monkeypatch.setattr(generating, "why_own_loop", lambda *_: "the test says so")
    monkeypatch.setattr(generating, "_logged_paths", {"the test says so"})
    assert run(7) == together


class Says:
    """Stands in for a policy: says one text after another."""

    backend = "says"

    def __init__(self, tokenizer, texts):
        self.tokenizer = tokenizer
        self.texts = texts

    def sample(self, prompts_ids, rows, how, done):
        done(len(rows), len(rows))
        return [Completion(self.texts[row % len(self.texts)], 3, True) for row in rows]


def test_a_thought_that_the_prompt_opens_is_graded(tokenizer):
    said = ["1+1=2</think><answer>2</answer>", "so <answer>2</answer>"]
    rows = Dataset.from_dict({"prompt": ["1+1=<think>", "1+1="], "answer": ["2", "2"]})
    found = evaluate(Says(tokenizer, said), Task("sums", "1", rows, rows, {"accuracy": 1.0}), GREEDY, repeats=2)
    assert [answer.answer_right for answer in found.answers] == [True, False, True, True]
    assert [answer.format_kept for answer in found.answers] == [True, False, False, False]
    assert [answer.completion for answer in found.answers] == said * 2


def test_the_models_own_penalties_are_left_out(model, tokenizer, task, monkeypatch):
    plain = evaluate(GenerateSampler(model, tokenizer), task, GREEDY)
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 5.0)
    assert told(evaluate(GenerateSampler(model, tokenizer), task, GREEDY)) == told(plain)


def test_evaluating_leaves_random_state_and_mode_alone(model, tokenizer, task):
    model.train()
    before = torch.get_rng_state(), random.getstate()
    evaluate(GenerateSampler(model, tokenizer), task, Sampling(1.0, 4), prompts=2)
    assert model.training
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    model.eval()


def parrot(tokenizer, golds, repeats):
    """Right in every second repeat."""
    answers = [gold if repeat % 2 == 0 else "none" for gold in golds for repeat in range(repeats)]
    return Says(tokenizer, [f"<answer>{answer}</answer>" for answer in answers])


def test_grades_are_the_tasks(tokenizer, task):
    seen = []
    sampler = parrot(tokenizer, task.test["answer"], repeats=4)
    found = evaluate(sampler, task, GREEDY, repeats=4, done=lambda rows, of: seen.append((rows, of)))
    scores = found.scores
    assert (scores["accuracy"], scores["format_accuracy"], scores["both_accuracy"]) == (0.5, 0.0, 0.0)
    assert scores["pass@2"] == pytest.approx(5 / 6)  # of the 6 pairs of 4 repeats, one has no right one
    assert (scores["pass@4"], scores["pass@4_se"]) == (1.0, 0.0)
    assert seen == [(48, 48)]
    columns = found.columns()
    assert (columns["index"], columns["repeat"]) == ([i for i in range(12) for _ in range(4)], [0, 1, 2, 3] * 12)
    assert columns["prompt"] == [prompt for prompt in task.test["prompt"] for _ in range(4)]
    assert columns["answer"] == [gold for gold in task.test["answer"] for _ in range(4)]


def brief_sentence(text, gold):
    return 1.0 - len(text) / 100


def test_a_task_that_trains_on_no_grader_is_evaluated_by_its_rewards(tokenizer):
    """Accuracy, which nobody asked for, would be 0 for a policy that learns what its own reward says."""
    name = f"{__name__}:brief_sentence"
    settings = {"task_test_size": 12, "task_train_size": 1, "reward_seconds": None}
    task = load_task({**settings, "task_rewards": {name: 1.0, "overlong": 0.5}})
    assert task.answer is None
    sampler = parrot(tokenizer, task.test["answer"], repeats=2)
    found = evaluate(sampler, task, Sampling(max_completion_length=3), repeats=2)
    row, columns = found.scores, found.columns()
    scores = [1.0 - len(text) / 100 for text in columns["completion"]]
    assert columns[f"reward/{name}"] == scores
    assert columns["reward"] == [score - 0.5 for score in scores]  # each of 3 tokens, which is the limit
    assert row["reward"] == pytest.approx(sum(scores) / len(scores) - 0.5)
    assert row["reward/overlong"] == -1.0
    assert row["reward_se"] == row["reward/overlong_se"] == 0.0  # equal lengths
    assert not [key for key in row if "accuracy" in key or "pass@" in key]
    assert not {"answer_right", "format_kept", "rewards"} & set(columns)
    results = _lm_eval_scores(task, found)["results"][task.name]
    assert {f"reward/{name}", f"reward/{name}_stderr"} <= results.keys()  # also a name with `_se` in it
    graded = load_task({**settings, "task_rewards": {name: 1.0, "accuracy": 0.0}})  # weight 0: shown, not trained
    row = evaluate(parrot(tokenizer, graded.test["answer"], repeats=2), graded, GREEDY, repeats=2).scores
    assert row["accuracy"] == 0.5
    assert not [key for key in row if key.startswith("reward")]


CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]


def test_messages_need_a_chat_template(tokenizer):
    """tests/cli/test_eval.py has what a template writes."""
    assert render(tokenizer, "1+1=") == "1+1="
    with pytest.raises(UserError, match="template"):
        render(tokenizer, CHAT)


def test_a_templates_special_tokens_are_not_written_twice():
    class Tokenizer:
        """Stands in for one that starts every text with a special token, as Llama's does."""

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [1] * add_special_tokens + [7] * len(text)}

    assert encode(Tokenizer(), "ab", "ab") == [1, 7, 7]
    assert encode(Tokenizer(), CHAT, "ab") == [7, 7]


def test_the_hash_is_of_names_and_contents(tmp_path):
    data = bytes(range(256)) * 40_000  # longer than one read
    for name, file, content in (("a", "model", data), ("b", "model", data + b"1"), ("c", "model-00001", data)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{file}.safetensors").write_bytes(content)
    line = f"model.safetensors {hashlib.sha256(data).hexdigest()}\n"
    assert weights_hash(tmp_path / "a") == hashlib.sha256(line.encode()).hexdigest()
    assert len({weights_hash(tmp_path / name) for name in "abc"}) == 3


# -- the vLLM backend against a stand-in; a real one: tests/real_vllm ------------------------------------------------


@pytest.fixture
def vllm(monkeypatch):
    """Replaces the modules of vLLM."""
    modules = MagicMock()
    monkeypatch.setattr(sampling, "import_module", lambda name: modules)
    monkeypatch.setattr("pods_rl.evaluation.checkpoint.find_spec", lambda name: True)
    return modules


def recipe(**values):
    given = {"model_name_or_path": "tiny", "max_steps": 1, "use_cpu": True, "bf16": False, **values}
    return build_recipe(given, Origin("test"))


def test_the_recipes_keys_and_the_adapter_reach_the_engine(vllm, tmp_path):
    keys = {"vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.5, "vllm_max_model_length": 700}
    policy = Policy("tiny", tiny_policy_path(), "lora", tmp_path)
    for ranks, room in (({"r": 1}, 8), ({"r": 64}, 64), ({"r": 16, "rank_pattern": {"q_proj": 65}}, 128)):
        LoraConfig(**ranks).save_pretrained(tmp_path)
        sampler = sampling.VLLMSampler(policy, recipe(dtype="float32", **keys), None)
        sampler.sample([], [], Sampling(), lambda rows, of: None)
        vllm.LoRARequest.assert_called_with("adapter", 1, str(tmp_path))
        request = vllm.LLM.return_value.generate.call_args.kwargs["lora_request"]
        assert request is vllm.LoRARequest.return_value
        wanted = {
            "enable_lora": True, "max_lora_rank": room, "dtype": "float32", "tensor_parallel_size": 2,
            "gpu_memory_utilization": 0.5, "max_model_len": 700,
            "trust_remote_code": False, "load_format": "safetensors",  # neither code nor pickles
        }  # fmt: skip
        assert vllm.LLM.call_args.kwargs.items() >= wanted.items()
    IA3Config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="IA3"):
        sampling.VLLMSampler(policy, recipe(), None)


def test_a_missing_or_broken_vllm_is_one_line(monkeypatch):
    def broken(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(sampling, "import_module", broken)
    with pytest.raises(UserError, match=r"OSError: libcudart.*--backend generate"):
        evaluate_checkpoint(recipe(), "tiny", backend="vllm")


def test_auto_takes_vllm_where_it_can_work(vllm, monkeypatch):
    tools = SimpleNamespace(converses=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_backend("auto") == "vllm"
    assert choose_backend("auto", on_cpu=True) == choose_backend("auto", task=tools) == "generate"
    with pytest.raises(UserError, match="tools"):
        choose_backend("vllm", task=tools)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose_backend("auto") == "generate"
    with pytest.raises(UserError, match="process"):
        choose_backend("vllm")
    with pytest.raises(UserError, match="sglang"):
        choose_backend("sglang")
