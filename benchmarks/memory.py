"""Estimates of `pods doctor --config` against CPU runs: python benchmarks/memory.py [--json FILE]

Each configuration trains for two steps in a process of its own, on random weights of Qwen2's shape (or the shipped
policy), with completions of maximum length. Measured is the peak resident memory of each phase, less that of the same
process after the same steps of a policy of a few thousand parameters, which excludes Python, torch and their buffers.
The heap returns freed memory (MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_), so the peak is that of memory in
use. Goal: within 25 % of the larger phase.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import resident
from pods_rl.engines.trl.batching import check_batch
from pods_rl.planning.memory import GENERATION, UPDATE, Estimate, Shape, estimate
from pods_rl.policies import tiny_policy_path
from quiet import quiet

GOAL, MIB = 0.25, 2**20
# sizes of the policy (None: the shipped one), and settings as in a recipe
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
WIDE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 8}
HEAVY = WIDE | {"vocab_size": 24000, "num_key_value_heads": 2}
FEW = {"num_generations": 4, "num_rollouts": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
CASES: dict[str, tuple[dict[str, int] | None, dict[str, Any]]] = {
    "shipped policy, 256 rollouts": (None, {"num_rollouts": 256, "max_prompt_length": 128}),
    "logits": (SMALL | {"vocab_size": 32000}, {"num_rollouts": 16}),
    "KV cache": (SMALL | {"num_hidden_layers": 8}, {"num_rollouts": 256, "max_prompt_length": 64}),
    "KV cache in parts": (
        SMALL | {"num_hidden_layers": 8},
        {"num_rollouts": 256, "max_prompt_length": 64, "rollout_batch_size": 64},
    ),
    "activations": (SMALL | {"num_hidden_layers": 12}, {"num_rollouts": 16, "max_prompt_length": 96}),
    "checkpointed": (
        SMALL | {"num_hidden_layers": 12},
        {"num_rollouts": 16, "max_prompt_length": 480, "gradient_checkpointing": True},
    ),
    "weights and optimizer": (HEAVY, FEW),
    "reference": (HEAVY, FEW | {"beta": 0.04}),
    "LoRA": (HEAVY, FEW | {"use_peft": True, "lora_r": 32, "lora_target_modules": ["all-linear"]}),
    "bf16": (HEAVY, FEW | {"bf16": True}),
}
COMMON = {
    "num_generations": 8, "per_device_train_batch_size": 8, "max_completion_length": 32, "max_prompt_length": 32,
    "gradient_checkpointing": False, "bf16": False, "beta": 0.0, "optim": "adamw_torch",
}  # fmt: skip
LEAST = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}


def settings(name: str) -> dict[str, Any]:
    return COMMON | CASES[name][1]


def predicted(name: str) -> Estimate:
    """Return the estimate of `pods doctor`."""
    values, sizes = settings(name), CASES[name][0]
    config = json.loads((tiny_policy_path() / "config.json").read_text()) if sizes is None else whole(sizes)
    keys = (
        "num_generations", "num_rollouts", "per_device_train_batch_size", "gradient_accumulation_steps",
        "rollout_batch_size",
    )  # fmt: skip
    plan = check_batch(**{key: values[key] for key in keys if key in values}, processes=1)
    return estimate(values, Shape.of(config), plan, bf16=values["bf16"], on_cpu=True)


def whole(sizes: dict[str, int]) -> dict[str, Any]:
    heads = sizes["num_attention_heads"]
    return {
        "vocab_size": 2048,
        "num_key_value_heads": heads,
        "tie_word_embeddings": True,
        "model_type": "qwen2",
    } | sizes


def train(values: dict[str, Any], sizes: dict[str, int] | None) -> dict[str, int]:
    """Train two steps; return peak resident memory of generation and of the update."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, logging, set_seed
    from trl import ModelConfig, get_peft_config

    from pods_rl import PODSConfig, PODSTrainer
    from pods_rl.engines.trl.update import PhaseClock
    from pods_rl.policies.build import build_tokenizer

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    set_seed(0)
    peaks = {"rollout": 0, "update": 0}

    class PeakClock(PhaseClock):
        def _settle(self) -> float:
            if self.phase in peaks:
                peaks[self.phase] = max(peaks[self.phase], resident.peak())
            resident.reset_peak()
            return super()._settle()

    with tempfile.TemporaryDirectory(prefix="pods-bench-") as folder:
        path = tiny_policy_path()
        if sizes is not None:
            path = Path(folder) / "model"
            ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
            Qwen2ForCausalLM(Qwen2Config(**whole(sizes), **ids)).save_pretrained(path)
        model_keys = ("use_peft", "lora_r", "lora_target_modules")
        engine = {k: v for k, v in values.items() if k not in (*model_keys, "max_prompt_length")}
        trainer = PODSTrainer(
            model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [float(i % 7) for i in range(len(completions))],
            args=PODSConfig(
                folder, **engine, max_steps=2, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
                generation_kwargs={"min_new_tokens": values["max_completion_length"]}, logging_steps=1,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["7" * values["max_prompt_length"]] * 16}),
            processing_class=tokenizer,
            peft_config=get_peft_config(ModelConfig(**{k: values[k] for k in model_keys if k in values})),
        )  # fmt: skip
        trainer._update.clock = PeakClock(device=None)
        quiet(trainer).train()
    return {GENERATION: peaks["rollout"], UPDATE: peaks["update"]}


def measure(name: str) -> dict[str, int]:
    """Return bytes of each phase, less those of the same process with a minimal policy."""
    import gc

    values, sizes = settings(name), CASES[name][0]
    small = COMMON | {"num_rollouts": 8, "max_completion_length": 4, "max_prompt_length": 4, "bf16": values["bf16"]}
    train(small | {k: v for k, v in values.items() if k.startswith(("use_peft", "lora"))}, LEAST | {"vocab_size": 300})
    gc.collect()
    base = resident.memory()
    return {phase: peak - base for phase, peak in train(values, sizes).items()}


def in_a_process(name: str) -> dict[str, int]:
    """Run `measure` in a child whose heap returns freed memory to the system."""
    giving_back = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--case", name],
        env=os.environ | giving_back | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def line(name: str, expected: Estimate, measured: dict[str, int]) -> dict[str, Any]:
    """Return both phases and the ratio of the peaks."""
    peak = max(measured.values())
    return {
        "case": name,
        "estimated": {phase: expected.total(phase) for phase in (GENERATION, UPDATE)},
        "measured": measured,
        "ratio": expected.peak / peak,
        "same_phase": measured[expected.phase] == peak,
        "parts": {part.name: [part.generation, part.update] for part in expected.parts},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case)))
        return
    print(f"{'MiB: estimated / measured':30}{'generation':>16}{'update':>16}{'ratio':>8}  peak in")
    rows = []
    for name in options.cases:
        row = line(name, predicted(name), in_a_process(name))
        rows.append(row)
        both = [(row["estimated"][phase] / MIB, row["measured"][phase] / MIB) for phase in (GENERATION, UPDATE)]
        cells = "".join(f"{f'{expected:.0f} / {seen:.0f}':>16}" for expected, seen in both)
        print(f"{name:30}{cells}{row['ratio']:>8.2f}  {'the same' if row['same_phase'] else 'ANOTHER'}", flush=True)
    held = sum(abs(row["ratio"] - 1) <= GOAL for row in rows)
    print(f"within {GOAL:.0%}: {held} of {len(rows)}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
