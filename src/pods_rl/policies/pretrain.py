"""Train the tiny policy that ships with the package.

First the skill: right chains of thought, with drills of bare steps between them. Then the mistakes: a short time on
chains of which many go wrong, so that the policy knows how to reason but seldom gets it right.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from .build import build_model, build_tokenizer
from .examples import Batch, completion_batches, drill_batches
from .mixture import RIGHT, Mixture


def main(arguments: list[str] | None = None) -> None:
    """Train the policy as the command line says, and write it."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters", flush=True)
    size, seed = options.batch_size, options.seed
    skill = zip(drill_batches(tokenizer, size, seed), completion_batches(tokenizer, RIGHT, size, seed), strict=True)
    fit(model, islice(chain.from_iterable(skill), options.skill_steps), options.skill_steps, 1.5e-3, "skill")
    mistakes = completion_batches(tokenizer, Mixture(), size, seed + 1)
    fit(model, islice(mistakes, options.mistake_steps), options.mistake_steps, 5e-4, "mistakes")
    save(model, tokenizer, options.output)
    print(f"wrote {options.output}")


def fit(model: Qwen2ForCausalLM, batches: Iterator[Batch], steps: int, lr: float, name: str) -> None:
    """Minimise the model's loss on `steps` batches, telling how it goes.

    The learning rate warms up for 50 steps, and falls to zero over the last 30 %. Matrices are multiplied in bfloat16,
    which processors with such instructions do several times faster; the weights stay float32.
    """
    model.set_attn_implementation("eager")  # on a CPU faster than the fused one at these lengths
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50, (steps - step) / (0.3 * steps))
    )
    started, losses = time.monotonic(), []
    model.train()
    for step, batch in enumerate(batches, start=1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps:
            mean = sum(losses[-50:]) / len(losses[-50:])
            print(f"{name} {step:4d}/{steps}  loss {mean:.3f}  {time.monotonic() - started:4.0f} s", flush=True)
    model.eval()


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, output: Path) -> None:
    """Write weights (safetensors), tokenizer and configuration, as `from_pretrained` reads them.

    Sampling from the whole distribution is written down as the default, so that nobody samples from less unknowingly.
    """
    model.generation_config.update(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pods_rl.policies.pretrain",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write the policy to")
    parser.add_argument("--skill-steps", type=int, default=900, help="optimizer steps on right chains and drills")
    parser.add_argument("--mistake-steps", type=int, default=150, help="optimizer steps on chains with mistakes")
    parser.add_argument("--batch-size", type=int, default=64, help="rows a step")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data and the first weights")
    parser.add_argument("--threads", type=int, default=1, help="processor threads; another number rounds otherwise")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
