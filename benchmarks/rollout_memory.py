"""Memory that `rollout_batch_size` saves: python benchmarks/rollout_memory.py [--n 16 64 256]

Peak resident memory that one generation of PODSTrainer adds without vLLM: all n rollouts of a prompt at once, and 16 at
a time. A random Qwen2 of 17 million parameters in bf16 and 256 tokens a rollout, so that KV cache and logits dominate.
Each generation runs in a process of its own, on a CPU with one thread. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, set_seed

from measuring import command_line, peak_memory, reset_peak_memory, resident_memory, set_up_torch
from pods_rl.policies import tiny_policy_path
from step import Arm, random_text, trainer_of

AT_ONCE = 16
TOKENS = 256
MEGABYTE = 2**20


class _GeneratedError(Exception):
    """Raised once the rollouts are generated: the update is not measured."""


def policy() -> PreTrainedModel:
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_path())
    set_seed(0)
    config = Qwen2Config(
        vocab_size=32000, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).bfloat16()


def generation_peak(n: int, at_once: int | None) -> float:
    """Return the megabytes that a generation of n rollouts adds at its peak."""
    set_up_torch(threads=1)
    case = replace(random_text("embedded", 14, TOKENS), policy=policy)
    added: list[float] = []
    with tempfile.TemporaryDirectory(prefix="pods-bench-") as folder:
        trainer = trainer_of(Arm("PODS", n, {"rollout_batch_size": at_once}), case, 1, folder)
        generate = trainer._generate_single_turn

        def measured(*args: Any, **kwargs: Any) -> Any:
            assert reset_peak_memory()
            before = resident_memory()
            completion_ids, _ = generate(*args, **kwargs)
            added.append((peak_memory() - before) / MEGABYTE)
            assert [len(ids) for ids in completion_ids] == [TOKENS] * n
            raise _GeneratedError

        trainer._generate_single_turn = measured
        with suppress(_GeneratedError):
            trainer.train()
    return added[0]


def in_a_process(n: int, at_once: int | None) -> float:
    command = [sys.executable, __file__, "--one", str(n), str(at_once or 0)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--n", type=int, nargs="+", default=[16, 32, 64, 128, 256], help="rollouts of the prompt")
    parser.add_argument("--one", type=int, nargs=2, metavar=("N", "AT_ONCE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        n, at_once = options.one
        print(generation_peak(n, at_once or None))
        return
    print(f"peak memory of a generation, MB | n | all at once | {AT_ONCE} at a time | ratio", flush=True)
    for n in options.n:
        all_at_once = in_a_process(n, None)
        in_parts = in_a_process(n, AT_ONCE)
        print(f"{n:5d} {all_at_once:8.0f} {in_parts:8.0f} {all_at_once / in_parts:6.2f}", flush=True)


if __name__ == "__main__":
    main()
