"""Cost of a PODS step against TRL's: python benchmarks/step.py [--repeats 5] [--json FILE]

TRL's trainer at m, TRL's trainer at n and PODS n -> m alternate in one run, on one random-weight Qwen2-shaped model.
Four questions and their goals:

1. update at equal m, equal lengths:   PODS / TRL at m                 <= 1.02
2. update at equal m, skewed lengths:  TRL at m / PODS                 >= 1.5   (one row in eight 4 times as long)
3. the whole step, real generation:    PODS / (gen(n) + update(m))     <= 1.05
4. peak memory of the update:          n = 256 / n = 16                <= 1.05

Everything except generation and reward counts as update, including selection. In 1, 2 and 4 completions are drawn at
given lengths, so that both trainers update on rows of the same lengths; 3 generates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback, logging, set_seed
from trl import GRPOConfig, GRPOTrainer

from pods_rl import PODSConfig, PODSTrainer
from pods_rl.engines.trl.rollouts import Rollouts
from pods_rl.engines.trl.round import RolloutRound
from pods_rl.policies.build import build_tokenizer
from quiet import quiet

M, PROMPT = 16, "12+34-56+78-9=" * 2
STEPS, WARM_UP = 4, 1


def reward(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text)) / 100 + i % 7 for i, text in enumerate(completions)]


class Stopwatch(TrainerCallback):
    """Record the seconds of each step, in total and outside generation and reward."""

    def __init__(self) -> None:
        self.outside = 0.0
        self.steps: list[dict[str, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.outside = 0.0
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        whole = time.perf_counter() - self.started
        self.steps.append({"step": whole, "generate": self.outside, "update": whole - self.outside})

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.outside += time.perf_counter() - before

        return timed


@dataclass(frozen=True)
class Arm:
    name: str
    n: int
    pods: bool
    lengths: tuple[int, ...] | None  # completion lengths by row, cycled; None: generate
    micro_batch: int = M


def build_model() -> Qwen2ForCausalLM:
    tokenizer = build_tokenizer()
    set_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=4, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )  # fmt: skip


def build_trainer(arm: Arm, max_steps: int = STEPS) -> tuple[GRPOTrainer, Stopwatch]:
    tokenizer = build_tokenizer()
    rows = M if arm.pods else arm.n
    config: dict[str, Any] = {
        "num_generations": rows, "per_device_train_batch_size": arm.micro_batch,
        "gradient_accumulation_steps": rows // arm.micro_batch, "max_completion_length": 64, "max_steps": max_steps,
        "loss_type": "grpo", "gradient_checkpointing": False, "bf16": torch.cuda.is_available(), "report_to": "none",
        "use_cpu": not torch.cuda.is_available(), "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1000,
    }  # fmt: skip
    if arm.pods:
        config["num_rollouts"] = arm.n
    trainer_class, config_class = (PODSTrainer, PODSConfig) if arm.pods else (GRPOTrainer, GRPOConfig)
    trainer = trainer_class(
        model=build_model(),
        reward_funcs=reward,
        args=config_class(tempfile.mkdtemp(prefix="pods-bench-"), **config),
        train_dataset=Dataset.from_dict({"prompt": [PROMPT] * 256}),
        processing_class=tokenizer,
    )
    watch = Stopwatch()
    if arm.lengths:
        canned = [[(7 * i + j) % 90 + 5 for j in range(arm.lengths[i % len(arm.lengths)])] for i in range(arm.n)]
        trainer._generate_single_turn = lambda ids, *a, **k: ([canned[i % arm.n] for i in range(len(ids))], None)
    trainer._generate_single_turn = watch.around(trainer._generate_single_turn)
    trainer.reward_funcs = [watch.around(f) for f in trainer.reward_funcs]
    trainer.add_callback(watch)
    return quiet(trainer), watch


def measure(arms: list[Arm], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Return medians over the steps of each repeat; the arms alternate."""
    seen: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in arms}
    for _ in range(repeats):
        for arm in arms:
            trainer, watch = build_trainer(arm)
            trainer.train()
            steps = watch.steps[WARM_UP:]
            seen[arm.name].append({k: statistics.median(s[k] for s in steps) for k in steps[0]})
    return seen


def ratio(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Median, least and greatest of a/b over repeats."""
    ratios = [a / b for a, b in pairs]
    return statistics.median(ratios), min(ratios), max(ratios)


def update_peak(n: int) -> int:
    """Bytes of tensors allocated at the peak of one update, above what was held when it began."""
    trainer, _ = build_trainer(Arm("memory", n, pods=True, lengths=(48,)), max_steps=2)
    cuda = torch.cuda.is_available()
    peaks: list[int] = []

    class Probe(TrainerCallback):
        profile: Any = None

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if cuda:
                peaks.append(torch.cuda.max_memory_allocated() - self.before)
            elif self.profile is not None:
                self.profile.stop()
                peaks.append(peak_of(self.profile))
                self.profile = None

    probe = Probe()
    finish = RolloutRound.finish

    def begin(*args: Any) -> Rollouts:  # the update begins where the generation round ends
        record = finish(*args)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            probe.before = torch.cuda.memory_allocated()
        else:
            probe.profile = torch.profiler.profile(profile_memory=True)
            probe.profile.start()
        return record

    RolloutRound.finish = begin  # type: ignore[method-assign]
    trainer.add_callback(probe)
    try:
        trainer.train()
    finally:
        RolloutRound.finish = finish  # type: ignore[method-assign]
    return peaks[-1]


def peak_of(profile: Any) -> int:
    """Highest running sum of the allocator's events."""
    held = highest = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--n", type=int, default=64, help="rollouts per prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    n, even, skewed = options.n, (48,), (16, 16, 16, 16, 16, 16, 16, 64)
    equal = measure([Arm("trl", M, False, even, 4), Arm("pods", n, True, even, 4)], options.repeats)
    uneven = measure([Arm("trl", M, False, skewed, 4), Arm("pods", n, True, skewed, 4)], options.repeats)
    arms = [Arm("trl m", M, False, None), Arm("trl n", n, False, None, M), Arm("pods", n, True, None)]
    whole = measure(arms, options.repeats)

    def pairs(figures: dict[str, list[dict[str, float]]], a: str, b: str) -> list[tuple[float, float]]:
        return [(x["update"], y["update"]) for x, y in zip(figures[a], figures[b], strict=True)]

    apart = [
        (p["step"], full["generate"] + small["update"])
        for p, full, small in zip(whole["pods"], whole["trl n"], whole["trl m"], strict=True)
    ]
    memory = update_peak(256) / update_peak(16)
    results = {
        "update, equal lengths: PODS / TRL": (*ratio(pairs(equal, "pods", "trl")), "<= 1.02"),
        "update, skewed lengths: TRL / PODS": (*ratio(pairs(uneven, "trl", "pods")), ">= 1.5"),
        "step: PODS / (gen(n) + update(m))": (*ratio(apart), "<= 1.05"),
        "update's peak memory: n=256 / n=16": (memory, memory, memory, "<= 1.05"),
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {options.threads} thread(s)"
    print(f"m = {M}, n = {n}; {device}; medians of {options.repeats} alternating repeats\n")
    print(f"{'seconds a step':<36}{'generate':>10}{'update':>10}{'step':>10}")
    for name, rows in whole.items():
        print(
            f"{name:<36}"
            + "".join(f"{statistics.median(r[k] for r in rows):>10.3f}" for k in ("generate", "update", "step"))
        )
    print(f"\n{'ratio':<36}{'median':>8}{'min':>8}{'max':>8}   goal")
    for name, (median, low, high, goal) in results.items():
        print(f"{name:<36}{median:>8.2f}{low:>8.2f}{high:>8.2f}   {goal}")
    if options.json:
        options.json.write_text(
            json.dumps({"device": device, "n": n, "m": M, "ratios": results, "seconds": whole}, indent=1)
        )


if __name__ == "__main__":
    main()
