"""A real TRL trainer over a random-weight Qwen2 model small enough to train in a second, and what tests read of it."""

import copy
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tools.pretrain import build_model, build_tokenizer
from torch import Tensor
from transformers import TrainerCallback, set_seed
from trl.trainer import utils as trl_utils

from pods_rl import PODSConfig, PODSTrainer
from tests import DEADLINE


class TorchKernel:
    """TRL's log-probabilities in plain torch, for versions whose only kernel needs a GPU."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, chunk: int,
        softcap: float | None, scale: float, outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Log-probabilities, entropies, log sums of squared probabilities, mean logits and whether a token is best."""
        # The last layer may return float32 where the weights are in 16 bits.
        logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / temperature
        log_probs = logits.log_softmax(-1)
        of_labels = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        optional = {
            "entropy": lambda: -(log_probs.exp() * log_probs).sum(-1),
            "log_sum_sq_probs": lambda: (2 * log_probs).logsumexp(-1),
            "mean_logits": lambda: logits.mean(-1),
            "is_top1": lambda: logits.argmax(-1) == labels,
        }
        return of_labels, *(compute() if name in outputs else None for name, compute in optional.items())


if not hasattr(trl_utils, "_use_triton") and not torch.accelerator.is_available():
    # TRL 1.15 without a GPU: this replaces its Triton kernel, with the same results.
    trl_utils._ChunkedLogProbFunction = TorchKernel

PROMPTS = ["1+2=", "37+4=", "5-1=", "60+60=", "9+9+9=", "8-3+1=", "77-1=", "2+2="]


def letter_reward(completions: list[str], **_: Any) -> list[float]:
    """A reward with many values, a function of the text alone."""
    return [(sum(map(ord, text)) % 17) / 16 for text in completions]


def half_dead(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Constant for every second prompt of the data set."""
    pairs = zip(prompts, letter_reward(completions), strict=True)
    return [0.3 if PROMPTS.index(prompt) % 2 else score for prompt, score in pairs]


def constant(completions: list[str], **_: Any) -> list[float]:
    """Equal rewards, from which a policy learns nothing."""
    return [1.0] * len(completions)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of the policy's weights."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_equal_weights(ours: Any, theirs: Any) -> None:
    """Raise AssertionError unless two trainers, models or copies have the same weights to the last bit."""
    one, other = (
        x if isinstance(x, dict) else dict((x if isinstance(x, torch.nn.Module) else x.model).named_parameters())
        for x in (ours, theirs)
    )
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def texts_of(trainer: Any) -> dict[str, Any]:
    """The prompts, completions, rewards, advantages and extra columns that TRL keeps for its table of completions."""
    return trainer._logs


def kept_of(record: Any) -> torch.Tensor:
    """Which rollouts of each prompt are kept, `[P, M]`, counted in their prompt."""
    n = record.rewards.size(1)
    _, sizes = (record.kept // n).unique_consecutive(return_counts=True)
    return (record.kept % n).view(len(sizes), -1)


def update_of(trainer: Any) -> Any:
    """The part of a trainer that computes its update."""
    return trainer._update


def around(trainer: Any, method: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function run in place of a method of a trainer; it receives the method first."""

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(trainer, method, partial(function, getattr(trainer, method)))
        return function

    return put


def batches_of(trainer: Any) -> list[dict[str, Any]]:
    """Filled as it trains: every generation's batch, before it is split; without those that dynamic sampling joins."""
    batches = []

    @around(trainer, "_generate_and_score_completions")
    def keep(build: Callable[..., Any], inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = build(inputs)  # does not return for prompts of dynamic sampling
        batches.append(batch)
        return batch

    return batches


class Gradients(TrainerCallback):
    """The gradient of each step, as the optimizer gets it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.steps = trainer, []
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        named = self.trainer.model.named_parameters()
        self.steps.append({name: p.grad.clone() for name, p in named if p.grad is not None})


@pytest.fixture(autouse=True)
def without_garbage_collection(monkeypatch):
    """transformers collects all garbage before each run, which takes as long as a run here."""
    monkeypatch.setattr("accelerate.utils.memory.clear_device_cache", lambda garbage_collection=False: None)


@pytest.fixture
def example(monkeypatch) -> Callable[[str], Any]:
    """Imports an example by its name, anew, as an engine does by a path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))

    def load(name: str) -> Any:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


def random_policy(tokenizer: Any) -> Any:
    """A small Qwen2 with random weights. Every digit ends a completion too, so that it writes rows of many lengths."""
    set_seed(7)
    model = build_model(tokenizer, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2)
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list("0123456789"))]
    model.generation_config.eos_token_id = ends
    return model


@pytest.fixture(scope="session")
def random_model(tokenizer, tmp_path_factory):
    """A policy loaded from a folder, because TRL loads its reference model from the same folder."""
    model = random_policy(tokenizer)
    path = tmp_path_factory.mktemp("random-model")
    model.save_pretrained(path)
    return type(model).from_pretrained(path)


@pytest.fixture(scope="session")
def run_processes(tmp_path_factory, random_model, tokenizer) -> Callable[[str], Path]:
    """Runs a module of these tests that starts several processes; the folder with the policy they found and left."""

    def run(module: str) -> Path:
        folder = tmp_path_factory.mktemp(module)
        random_model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        done = subprocess.run(
            [sys.executable, "-m", f"tests.engines.{module}", str(folder)],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return folder

    return run


@pytest.fixture
def trl_draws(monkeypatch):
    """Let TRL's generation draw the rollouts, whatever `prefix_tree` says."""
    monkeypatch.setattr("pods_rl.engines.trl.step.trainer.over_prefix_tree", lambda *_: nullcontext())


@pytest.fixture
def dataset():
    return Dataset.from_dict({"prompt": PROMPTS * 4, "answer": ["3"] * 32})


@pytest.fixture
def make_trainer(tmp_path, tokenizer, random_model, dataset):
    """Builds a trainer over a fresh copy of the random model; keyword arguments go to the config."""

    def make(
        trainer_class: type = PODSTrainer,
        config_class: type = PODSConfig,
        reward: Any = letter_reward,
        dtype: torch.dtype = torch.float32,
        model: Any = None,
        train_dataset: Any = None,
        trainer_arguments: dict[str, Any] | None = None,
        **config: Any,
    ):
        settings = {
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "max_completion_length": 12,
            "learning_rate": 1e-3,
            "max_steps": 2,
            "seed": 3,
            "loss_type": "grpo",
            "save_strategy": "no",
        } | config
        settings = {"bf16": False} | settings | {"use_cpu": True, "gradient_checkpointing": False, "disable_tqdm": True}
        settings |= {"report_to": "none", "logging_steps": 1}
        trainer = trainer_class(
            model=copy.deepcopy(random_model if model is None else model).to(dtype),
            reward_funcs=reward,
            args=config_class(str(tmp_path / "out"), **settings),
            train_dataset=dataset if train_dataset is None else train_dataset,
            processing_class=tokenizer,
            **(trainer_arguments or {}),
        )
        return trainer

    return make
