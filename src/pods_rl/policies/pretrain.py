"""Train the tiny policy that ships with the package: `python -m pods_rl.policies.pretrain --output DIR`."""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from ..tasks.arithmetic import DIFFICULTIES, Problem, draw_problem
from .build import build_model, build_tokenizer
from .mixture import Mixture

IGNORED = -100
CLEAN = Mixture(sure=1.0, weak_share=0.0, broken_form=0.0)


def main(arguments: list[str] | None = None) -> None:
    """Train the policy as the command line says and write it."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    for name, mixture, steps, lr in (
        ("skill", CLEAN, options.skill_steps, options.lr),
        ("mistakes", Mixture(), options.mistake_steps, options.lr / 3),
    ):
        print(name)
        train(model, tokenizer, mixture, steps=steps, batch_size=options.batch_size, lr=lr, seed=options.seed)
    save(model, tokenizer, options.output)
    print(f"wrote {options.output}")


def train(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    mixture: Mixture,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
) -> None:
    """Fit the model to completions drawn from the mixture, never to a held-out prompt.

    The learning rate warms up and falls to zero by a cosine. Matrices are multiplied in bfloat16, which processors
    with such instructions do several times faster; the weights stay float32.
    """
    model.set_attn_implementation("eager")  # faster than the fused one on a CPU at these lengths
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, min(100, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _cosine(step, warmup, steps))
    started = time.monotonic()
    model.train()
    for step, batch in zip(range(1, steps + 1), batches(tokenizer, mixture, batch_size, seed), strict=False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step == steps:
            print(f"step {step:5d}/{steps}  loss {loss.item():.3f}  {time.monotonic() - started:4.0f} s", flush=True)
    model.eval()


def batches(
    tokenizer: Qwen2Tokenizer, mixture: Mixture, batch_size: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches for ever; sums of one length go together, so that little padding is computed."""
    rng = random.Random(seed)
    while True:
        pool = [_example(rng, tokenizer, mixture) for _ in range(8 * batch_size)]
        pool.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        starts = list(range(0, len(pool), batch_size))
        rng.shuffle(starts)
        for start in starts:
            yield _collate(pool[start : start + batch_size], tokenizer.pad_token_id)


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, output: Path) -> None:
    """Write weights (safetensors), tokenizer and configuration, as `from_pretrained` reads them."""
    model.generation_config.update(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def _example(rng: random.Random, tokenizer: Qwen2Tokenizer, mixture: Mixture) -> tuple[list[int], list[int]]:
    problem = _train_problem(rng)
    completion = tokenizer.encode(mixture.draw_completion(rng, problem)) + [tokenizer.eos_token_id]
    return tokenizer.encode(problem.prompt), completion


def _train_problem(rng: random.Random) -> Problem:
    while (problem := draw_problem(rng, DIFFICULTIES["mixed"])).held_out:
        pass
    return problem


def _collate(pairs: list[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """Pad to the right; the loss counts completions only, and the attention mask is left to causality."""
    width = max(len(prompt) + len(completion) for prompt, completion in pairs)
    ids = torch.full((len(pairs), width), pad)
    labels = torch.full((len(pairs), width), IGNORED)
    for row, (prompt, completion) in enumerate(pairs):
        end = len(prompt) + len(completion)
        ids[row, :end] = torch.tensor(prompt + completion)
        labels[row, len(prompt) : end] = ids[row, len(prompt) : end]
    return {"input_ids": ids, "labels": labels}


def _cosine(step: int, warmup: int, steps: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pods_rl.policies.pretrain", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the policy to")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="completions a step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of data and weights (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="processor threads (default: %(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
