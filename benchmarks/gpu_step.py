"""Cost of a step on one GPU as n grows: python benchmarks/gpu_step.py [--output docs/results]

PODS n -> 16 over prefix trees, the same row by row (`exact_trl`), and TRL's GRPO trainer on 16 and on all n (GRPO-GA:
the same micro-batches, more of them). The model has Qwen2.5-3B's shape, random weights (no download), LoRA of rank 64
on all linear layers, and bf16: the paper's setting a without its 4-bit base. The table has seconds by phase (median and
range over the steps after the first) and peak memory of generation and update. Each cell runs in a process of its own,
so running out of memory affects no other. Generation is `generate`, not vLLM.

Random weights never end a completion, so each has `--completion-tokens` tokens: the same work for both trainers. The
same clock times both at the same places.

    python benchmarks/gpu_step.py --size tiny --device cpu --n 4 8 --m 4 --output out      # seconds, on a CPU
"""

from __future__ import annotations

import argparse
import atexit
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

from measuring import command_line, peak_memory, quiet, reset_peak_memory, spread, write_json
from pods_rl.engines import PHASES

QWEN_3B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "qwen2.5-3b": QWEN_3B,
    "tiny": QWEN_3B | {
        "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2
    },
}  # fmt: skip
GIB = 2**30


def memory_clock(device: Any) -> Any:
    """Return the trainer's own clock, which also records each phase's peak memory."""
    import torch

    from pods_rl.engines.trl.update import PhaseClock

    cuda = device.type == "cuda"

    class MemoryClock(PhaseClock):
        def __init__(self) -> None:
            super().__init__(device)
            self.peaks: dict[str, int] = {}

        def enter(self, phase: str | None) -> None:
            left_phase = self.phase
            super().enter(phase)
            if left_phase is not None:
                peak = torch.cuda.max_memory_allocated(device) if cuda else peak_memory()
                self.peaks[left_phase] = max(peak, self.peaks.get(left_phase, 0))
            if cuda:
                torch.cuda.reset_peak_memory_stats(device)
            else:
                reset_peak_memory()

    return MemoryClock()


def reward(completions: list[str], **_: Any) -> list[float]:
    """Seven different rewards, so that every group has a signal: random weights write nothing to grade."""
    return [len(set(text)) / 100 + i % 7 for i, text in enumerate(completions)]


def build(options: argparse.Namespace) -> Any:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, set_seed
    from trl import GRPOConfig, GRPOTrainer

    from pods_rl import PODSConfig, PODSTrainer
    from pods_rl.policies import tiny_policy_path

    cuda = options.device == "cuda"
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_path())
    tokenizer.model_max_length = options.prompt_tokens + options.completion_tokens
    set_seed(0)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen2Config(**SIZES[options.size], **ids, tie_word_embeddings=True)
    with torch.device(options.device):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16 if cuda else torch.float32)
    folder = tempfile.mkdtemp(prefix="pods-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pods = options.arm != "trl"
    rows = options.m if pods else options.n[0]
    settings: dict[str, Any] = {
        "num_generations": rows, "per_device_train_batch_size": min(options.micro_batch, rows),
        "gradient_accumulation_steps": max(1, rows // options.micro_batch), "max_steps": options.steps,
        "max_completion_length": options.completion_tokens, "temperature": 0.9, "beta": 0.0, "loss_type": "grpo",
        "generation_kwargs": {"min_new_tokens": options.completion_tokens}, "gradient_checkpointing": True,
        "learning_rate": 5e-6, "lr_scheduler_type": "constant", "optim": options.optim, "bf16": cuda,
        "use_cpu": not cuda, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip
    trainer_class: type[GRPOTrainer] = GRPOTrainer
    config_class: type[GRPOConfig] = GRPOConfig
    if pods:
        settings |= {"num_rollouts": options.n[0], "rollout_batch_size": options.rollout_batch_size}
        settings |= {"exact_trl": options.arm == "rows"}
        trainer_class = PODSTrainer
        config_class = PODSConfig
    return trainer_class(
        model=model,
        reward_funcs=reward,
        args=config_class(folder, **settings),
        train_dataset=Dataset.from_dict({"prompt": ["7" * options.prompt_tokens] * (4 * options.steps)}),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=64, lora_alpha=64, target_modules="all-linear"),
    )


def time_from_outside(trainer: Any, clock: Any) -> None:
    """Time TRL's trainer with PODSTrainer's clock: the same phases, entered at the same calls."""
    from transformers import TrainerCallback

    def within(phase: str, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            clock.enter(phase)
            result = function(*args, **kwargs)
            clock.enter("update")
            return result

        return timed

    class Step(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.seconds = dict.fromkeys(clock.seconds, 0.0)
            clock.enter("update")

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.enter(None)
            for phase, seconds in clock.seconds.items():
                trainer._metrics["train"][f"pods/seconds/{phase}"].append(seconds)

    trainer._generate = within("rollout", trainer._generate)
    trainer._calculate_rewards = within("reward", trainer._calculate_rewards)
    trainer.add_callback(Step())


def run_cell(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return each step's seconds by phase, the phases' peaks, or the phase that ran out of memory."""
    import torch
    from transformers import logging

    from pods_rl.engines.trl.stability import is_out_of_memory

    logging.set_verbosity_error()
    if options.threads:
        torch.set_num_threads(options.threads)
    clock = None
    try:
        trainer = quiet(build(options))
        clock = memory_clock(trainer.accelerator.device)
        if options.arm != "trl":
            trainer._update.clock = clock
        else:
            time_from_outside(trainer, clock)
        trainer.train()
    except Exception as error:
        cause = error.__cause__ or error  # PODSTrainer adds advice to torch's error
        if not is_out_of_memory(cause):
            raise
        phase = "loading"
        if clock is not None and clock.phase is not None:
            phase = clock.phase
        return {"out_of_memory": phase, "message": str(cause).splitlines()[0]}
    rows = [row for row in trainer.state.log_history if "pods/seconds/update" in row]
    lengths = [row["completions/mean_length"] for row in rows]
    assert min(lengths) == options.completion_tokens, f"completions of {min(lengths):g} tokens"
    steps = [{phase: row[f"pods/seconds/{phase}"] for phase in PHASES} for row in rows]
    return {"steps": steps[1:], "peaks": clock.peaks}


def in_a_process(arm: str, n: int, words: list[str], limit: float) -> dict[str, Any]:
    """Run a cell in a child process; if it fails, the failure is its result."""
    with tempfile.TemporaryDirectory(prefix="pods-bench-") as folder:
        result_file = Path(folder) / "cell.json"
        command = [sys.executable, __file__, *words, "--arm", arm, "--n", str(n), "--cell", str(result_file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {limit:g} s"}
        if result_file.is_file():
            return json.loads(result_file.read_text())
    message = done.stderr.strip() or "no message"
    last_line = message.splitlines()[-1]
    return {"failed": f"exit code {done.returncode}: {last_line[:200]}"}


def row(cell: dict[str, Any]) -> list[str]:
    """Return a cell as a row of the table."""
    pods = f"PODS {cell['n']} -> {cell['m']}"
    name = {"tree": pods, "rows": f"{pods}, rows", "trl": f"TRL {cell['n']}"}[cell["arm"]]
    if "steps" not in cell:
        reason = f"out of memory in {cell['out_of_memory']}" if "out_of_memory" in cell else cell["failed"]
        return [name, reason.replace("|", "/"), *[""] * 6]
    step_seconds = spread([sum(step.values()) for step in cell["steps"]], ".3g")
    medians = {phase: statistics.median(step[phase] for step in cell["steps"]) for phase in PHASES}
    phases = [f"{seconds:.3g}" for seconds in medians.values()]
    peaks = [f"{cell['peaks'][phase] / GIB:.2f}" for phase in ("rollout", "update")]
    return [name, step_seconds, *phases, *peaks]


def table(results: dict[str, Any]) -> str:
    """Return the Markdown table below a description of the run."""
    on_gpu = results["device"] != results["processor"]
    memory = "allocated on the device" if on_gpu else "resident in the process"
    header = ["arm", "step, s (range)", *PHASES, "peak rollout, GiB", "peak update, GiB"]
    lines = [
        f"{results['size']}-shaped, random weights, LoRA 64; {results['device']}; torch {results['torch']}, TRL "
        f"{results['trl']}.",
        f"Prompts of {results['prompt_tokens']} tokens, every completion {results['completion_tokens']}; micro-batches "
        f"of {results['micro_batch']} rows; medians of {results['steps'] - 1} steps; memory {memory}.",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row(cell)) + " |" for cell in results["cells"]),
    ]
    return "\n".join(lines) + "\n"


def device_name(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def parse(words: list[str]) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="qwen2.5-3b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--n", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--m", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=8, help="rows of a forward pass (default: %(default)s)")
    parser.add_argument("--rollout-batch-size", type=int, help="PODS: rows generated at once (default: all n)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="the paper's limit (default: %(default)s)")
    parser.add_argument("--completion-tokens", type=int, default=512, help="the paper's limit (default: %(default)s)")
    parser.add_argument("--optim", default="adamw_torch", help="the paper: adamw_8bit (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps of each cell; the first is not counted")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--limit", type=float, default=1800, help="seconds per cell at most (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder of gpu_step.json and .md")
    parser.add_argument("--arm", choices=("tree", "rows", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--cell", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def cells(options: argparse.Namespace) -> list[tuple[str, int]]:
    """TRL on m, then each arm for each n (TRL only once at n = m)."""
    first = ("trl", options.m)
    later = [(arm, n) for n, arm in product(options.n, ("tree", "rows", "trl"))]
    return [first, *(cell for cell in later if cell != first)]


def main() -> None:
    options = parse(sys.argv[1:])
    if options.cell:
        options.cell.write_text(json.dumps(run_cell(options)))
        return
    results = start(options)
    options.output.mkdir(parents=True, exist_ok=True)
    print(table(results), end="", flush=True)
    for arm, n in cells(options):
        cell = {"arm": arm, "n": n, "m": options.m, **in_a_process(arm, n, sys.argv[1:], options.limit)}
        results["cells"].append(cell)
        print("| " + " | ".join(row(cell)) + " |", flush=True)
        write_json(options.output / "gpu_step.json", results)
        (options.output / "gpu_step.md").write_text(table(results))


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Return the results without cells: settings, device, versions."""
    results = {key: value for key, value in vars(options).items() if key not in ("output", "arm", "cell", "limit")}
    results |= {"device": device_name(options.device), "processor": device_name("cpu"), "cells": []}
    return results | {name: metadata.version(name) for name in ("torch", "trl", "transformers", "peft")}


if __name__ == "__main__":
    main()
