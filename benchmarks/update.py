"""Cost of PODS's update next to TRL's: python benchmarks/update.py [--repeats 5] [--json FILE]

TRL's trainer and PODSTrainer at n = m = 16 alternate in one run on the shipped tiny policy, one CPU thread. Completions
are drawn beforehand, all different, so that both update on the same rows; everything but generation and reward counts.
Goals, TRL / PODS unless stated:

1. prompt 200, completion 30:               >= 3.5
2. prompt 60, completion 30:                >= 1.8
3. 12 and 30, 60 and 120: PODS / TRL        <= 1.02
4. half of the groups dead: PODS / TRL      <= 0.6
5. peak memory of the update: PODS / TRL    <= 1     (each of the shapes)
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, logging
from trl import GRPOConfig, GRPOTrainer

from pods_rl import PODSConfig, PODSTrainer
from quiet import quiet

M, STEPS, WARM_UP = 16, 6, 2
POLICY = str(files("pods_rl.policies") / "tiny")
FIRST_TOKEN, TOKENS = 20, 200  # single bytes of the tokenizer


@dataclass(frozen=True)
class Case:
    """One comparison: lengths in tokens and prompts a step."""

    prompt: int
    completion: int
    prompts: int = 1
    dead: bool = False  # every second prompt's rewards are all equal


CASES = {
    "prompt 200, completion 30": Case(200, 30),
    "prompt 60, completion 30": Case(60, 30),
    "prompt 12, completion 30": Case(12, 30),
    "prompt 60, completion 120": Case(60, 120),
    "60 + 30, half of the groups dead": Case(60, 30, prompts=2, dead=True),
}
FASTER = {"prompt 200, completion 30": 1 / 3.5, "prompt 60, completion 30": 1 / 1.8}


class Stopwatch(TrainerCallback):
    """Record the processor seconds of each step outside generation and reward."""

    def __init__(self) -> None:
        self.outside = 0.0
        self.steps: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.outside, self.started = 0.0, time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(time.process_time() - self.started - self.outside)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.outside += time.process_time() - before

        return timed


def completion(row: int, length: int) -> list[int]:
    return [(31 * row + 7 * place) % TOKENS + FIRST_TOKEN for place in range(length)]


def build_trainer(case: Case, pods: bool, steps: int) -> tuple[GRPOTrainer, Stopwatch]:
    rows = M * case.prompts
    config: dict[str, Any] = {
        "num_generations": M, "per_device_train_batch_size": rows, "max_completion_length": case.completion,
        "max_steps": steps, "loss_type": "grpo", "gradient_checkpointing": False, "bf16": False, "report_to": "none",
        "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1000,
    }  # fmt: skip

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [1.0 if case.dead and i // M % 2 else i % 7 for i in range(len(completions))]

    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    trainer_class, config_class = (PODSTrainer, PODSConfig) if pods else (GRPOTrainer, GRPOConfig)
    prompts = [("12+34-56+78-9*" * 20)[i % 10 :][: case.prompt] for i in range(64)]
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(POLICY),
        reward_funcs=reward,
        args=config_class(tempfile.mkdtemp(prefix="pods-bench-"), **config),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )
    watch = Stopwatch()
    drawn = [completion(row, case.completion) for row in range(rows)]
    trainer._generate_single_turn = watch.around(lambda ids, *_, **__: (drawn[: len(ids)], None))
    trainer.reward_funcs = [watch.around(function) for function in trainer.reward_funcs]
    trainer.add_callback(watch)
    return quiet(trainer), watch


def seconds(case: Case, pods: bool) -> float:
    """Median over the steps of one run."""
    trainer, watch = build_trainer(case, pods, STEPS + WARM_UP)
    trainer.train()
    return statistics.median(watch.steps[WARM_UP:])


def peak(case: Case, pods: bool) -> int:
    """Bytes of tensors at the peak of one loss and its gradient, above what was held when it began."""
    trainer, _ = build_trainer(case, pods, steps=2)
    step, peaks = trainer.training_step, []

    def measured(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.profile(profile_memory=True) as profile:
            loss = step(*args, **kwargs)
        held = highest = 0
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            highest = max(highest, held)
        peaks.append(highest)
        return loss

    trainer.training_step = measured
    trainer.train()
    return peaks[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", action="append", choices=list(CASES), help="only these cases")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    print(f"m = {M}, one CPU thread; PODS / TRL, medians [least, greatest] of {options.repeats} alternating repeats\n")
    print(f"{'update':<36}{'TRL ms':>8}{'PODS ms':>8}  {'PODS / TRL':<20}{'goal':>6}{'memory':>8}")
    figures: dict[str, Any] = {}
    for name in options.case or CASES:
        case, pairs = CASES[name], []
        for _ in range(options.repeats):
            pairs.append((seconds(case, pods=False), seconds(case, pods=True)))
        ratios = [ours / theirs for theirs, ours in pairs]
        goal = 0.6 if case.dead else FASTER.get(name, 1.02)
        memory = peak(case, pods=True) / peak(case, pods=False)
        figures[name] = {"seconds": pairs, "ratios": ratios, "goal": goal, "memory": memory}
        theirs, ours = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
        spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        print(f"{name:<36}{theirs:>8.1f}{ours:>8.1f}  {spread:<20}{goal:>6.2f}{memory:>8.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
