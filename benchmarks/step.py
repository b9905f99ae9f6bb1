"""Cost of a step next to TRL's GRPO: python benchmarks/step.py [--repeats 5] [--json FILE]

In each repeat all arms take their turn: TRL's GRPO with 16 and with 64 rollouts, PODS 64 -> 16 without and with
`prefix_tree`, and PODS 16 -> 16 with it. One prompt a step, real generation, every
completion of the same length, rewards that differ. The tables show seconds of processor time, which other work on the
machine hardly changes (medians), and each arm's step as a multiple of TRL's GRPO 16 of the same repeat: the median and,
in brackets, the least and the greatest.

Policies: the embedded one, and one of Qwen2's shape with 17 million random weights. One thread unless --threads says
more. Goals (embedded policy, prompts of 200, 60 and 12 tokens, completions of 30): PODS 64 -> 16 at most 0.42, 0.75 and
1.2; PODS 16 -> 16 at most 0.28, 0.55 and 1.0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from pods_rl import PODSConfig, PODSTrainer
from pods_rl.policies import tiny_policy_path
from quiet import quiet

M, N, WARM_UP = 16, 64, 1
GOALS = {("embedded", 200, 30): (0.42, 0.28), ("embedded", 60, 30): (0.75, 0.55), ("embedded", 12, 30): (1.2, 1.0)}
OFF = {"exact_trl": True}


@dataclass(frozen=True)
class Arm:
    """A trainer: TRL's if it has no settings, else ours with these; n is also the rows that TRL's trains."""

    name: str
    n: int
    settings: dict[str, bool] | None = None


ARMS = (
    Arm("TRL's GRPO 16", M),
    Arm("TRL's GRPO 64", N),
    Arm("PODS 64 -> 16 as TRL computes", N, OFF),
    Arm("PODS 64 -> 16", N, {}),
    Arm("PODS 16 -> 16", M, {}),
)
BASE, ALL, EQUAL = ARMS[0].name, ARMS[-2].name, ARMS[-1].name


def embedded() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_policy_path(), dtype=torch.float32)


def qwen2_17m() -> PreTrainedModel:
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_path())
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=2048, hidden_size=384, intermediate_size=1024, num_hidden_layers=9, num_attention_heads=6,
            num_key_value_heads=2, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )  # fmt: skip


POLICIES: dict[str, Callable[[], PreTrainedModel]] = {"embedded": embedded, "qwen2-17m": qwen2_17m}


def reward(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ within every group, so that every kept row has an advantage."""
    return [i % 7 + len(text) / 1000 for i, text in enumerate(completions)]


@dataclass
class Stopwatch(TrainerCallback):
    """The processor time of each step, in total and in generation."""

    generating: float = 0.0
    started: float = 0.0
    steps: list[dict[str, float]] = field(default_factory=list)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.generating, self.started = 0.0, time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        whole = time.process_time() - self.started
        self.steps.append({"generate": self.generating, "rest": whole - self.generating, "step": whole})

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.generating += time.process_time() - before

        return timed


def prompt_of(tokens: int) -> str:
    """Return a prompt of so many tokens: the embedded tokenizer has one for each byte."""
    return ("12+34-56+78-9=" * (tokens // 14 + 1))[-tokens:]


def steps_of(arm: Arm, policy: str, prompt: int, completion: int, steps: int) -> dict[str, float]:
    """Train a few steps; return the median seconds of the parts of a step."""
    rows = arm.n if arm.settings is None else M
    settings: dict[str, Any] = {
        "num_generations": rows, "per_device_train_batch_size": M, "gradient_accumulation_steps": rows // M,
        "max_completion_length": completion, "generation_kwargs": {"min_new_tokens": completion},
        "max_steps": WARM_UP + steps, "loss_type": "grpo", "learning_rate": 1e-6, "gradient_checkpointing": False,
        "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": 1000,
    }  # fmt: skip
    if arm.settings is not None:
        settings |= {"num_rollouts": arm.n} | arm.settings
    trainer_class, config_class = (GRPOTrainer, GRPOConfig) if arm.settings is None else (PODSTrainer, PODSConfig)
    with tempfile.TemporaryDirectory(prefix="pods-bench-") as folder:
        trainer = trainer_class(
            model=POLICIES[policy](),
            reward_funcs=reward,
            args=config_class(folder, **settings),
            train_dataset=Dataset.from_dict({"prompt": [prompt_of(prompt)] * 256}),
            processing_class=AutoTokenizer.from_pretrained(tiny_policy_path()),
        )
        watch = Stopwatch()
        trainer._generate_single_turn = watch.around(trainer._generate_single_turn)
        trainer.add_callback(watch)
        quiet(trainer).train()
    timed = watch.steps[WARM_UP:]
    return {part: statistics.median(step[part] for step in timed) for part in timed[0]}


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def cell(policy: str, prompt: int, completion: int, repeats: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """Measure and print all arms at one pair of lengths; return their seconds by repeat."""
    seen: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in ARMS}
    for _ in range(repeats):
        for arm in ARMS:
            seen[arm.name].append(steps_of(arm, policy, prompt, completion, steps))
    print(f"\n{policy} policy, prompt of {prompt} tokens, completions of {completion}")
    print(f"{'seconds':<30}{'generate':>9}{'rest':>8}{'step':>8}   step / TRL's GRPO 16")
    goals = dict(zip((ALL, EQUAL), GOALS.get((policy, prompt, completion), ()), strict=False))
    for name, rows in seen.items():
        parts = "".join(
            f"{statistics.median(row[part] for row in rows):>{width}.3f}"
            for part, width in (("generate", 9), ("rest", 8), ("step", 8))
        )
        ratios = [row["step"] / base["step"] for row, base in zip(rows, seen[BASE], strict=True)]
        goal = f"  goal {goals[name]}" if name in goals else ""
        print(f"{name:<30}{parts}   {spread(ratios)}{goal}", flush=True)
    return seen


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--prompts", type=numbers, default=[12, 60, 200])
    parser.add_argument("--completions", type=numbers, default=[30, 120])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each arm in a repeat")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    print(f"m = {M}, n = {N}; CPU, {options.threads} thread(s); {options.repeats} alternating repeats")
    figures = [
        {"policy": policy, "prompt": prompt, "completion": completion, "seconds":
         cell(policy, prompt, completion, options.repeats, options.steps)}
        for policy in options.policies.split(",")
        for prompt in options.prompts
        for completion in options.completions
    ]  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
