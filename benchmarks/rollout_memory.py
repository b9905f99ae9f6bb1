"""Memory that `rollout_batch_size` saves: python benchmarks/rollout_memory.py [--n 16 64 256] [--json FILE]

Peak resident memory that one generation of PODSTrainer adds without vLLM: all n rollouts of a prompt at once, and
`--at_once` at a time. A random Qwen2 of 17 million parameters in bf16 and 256 tokens a rollout, so that KV cache and
logits dominate. Each generation runs in a process of its own, on a CPU with one thread. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from measuring import command_line, peak_memory, quiet, reset_peak_memory, resident_memory, write_json

M = 16
PROMPT = "12+34-56+78-9="
MEGABYTE = 2**20


class _GeneratedError(Exception):
    """Raised once the rollouts are generated: the update is not measured."""


def generation_peak(n: int, at_once: int | None, tokens: int) -> float:
    """Return the megabytes that a generation of n rollouts adds at its peak."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, set_seed

    from pods_rl import PODSConfig, PODSTrainer
    from pods_rl.policies import tiny_policy_path

    torch.set_num_threads(1)
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_path())
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=32000, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=4, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        )
    )  # fmt: skip
    trainer = PODSTrainer(
        model=model.bfloat16(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=PODSConfig(
            tempfile.mkdtemp(prefix="pods-bench-"), num_generations=M, num_rollouts=n, rollout_batch_size=at_once,
            per_device_train_batch_size=M, max_completion_length=tokens, max_steps=1, use_cpu=True, bf16=False,
            generation_kwargs={"min_new_tokens": tokens}, gradient_checkpointing=False, report_to="none",
            save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [PROMPT] * M}),
        processing_class=tokenizer,
    )  # fmt: skip
    added: list[float] = []
    generate = trainer._generate_single_turn

    def measured(*args: Any, **kwargs: Any) -> Any:
        assert reset_peak_memory()
        before = resident_memory()
        completion_ids, _ = generate(*args, **kwargs)
        added.append((peak_memory() - before) / MEGABYTE)
        assert [len(ids) for ids in completion_ids] == [tokens] * n
        raise _GeneratedError

    trainer._generate_single_turn = measured
    with suppress(_GeneratedError):
        quiet(trainer).train()
    return added[0]


def in_a_process(n: int, at_once: int | None, tokens: int) -> float:
    command = [sys.executable, __file__, "--one", str(n), str(at_once or 0), str(tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--n", type=int, nargs="+", default=[16, 32, 64, 128, 256], help="rollouts of the prompt")
    parser.add_argument("--at_once", type=int, default=16, help="rollout_batch_size of the second column")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--one", type=int, nargs=3, metavar=("N", "AT_ONCE", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        n, at_once, tokens = options.one
        print(generation_peak(n, at_once or None, tokens))
        return
    rows = []
    print(f"peak memory of a generation, MB | n | all at once | {options.at_once} at a time | ratio", flush=True)
    for n in options.n:
        all_at_once = in_a_process(n, None, options.tokens)
        in_parts = in_a_process(n, options.at_once, options.tokens)
        ratio = all_at_once / in_parts
        rows.append({"n": n, "all_at_once_mb": all_at_once, "in_parts_mb": in_parts, "ratio": ratio})
        print(f"{n:5d} {all_at_once:8.0f} {in_parts:8.0f} {ratio:6.2f}", flush=True)
    write_json(options.json, {"at_once": options.at_once, "tokens": options.tokens, "rows": rows})


if __name__ == "__main__":
    main()
