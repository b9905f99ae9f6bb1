"""Time the ways to generate on one device: what the generation cells of `gpu_day.py` run.

The model has random weights and LoRA, and no completion ends before its last token. Seconds are those of all rows
together. That our own ways draw the same tokens is checked by `gpu_checks.py` in float32: in 16 bits rounding changes
draws.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from peft import get_peft_model
from torch import Tensor
from transformers import AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

from gpu_device import Device
from gpu_step import build_model, lora
from pods_rl.policies import tiny_policy_path
from pods_rl.prefix_tree import decoding
from pods_rl.prefix_tree.decoding import Path, complete_prompts, generation_path
from pods_rl.prefix_tree.draws import RowDraws

NEVER = 10**6  # an end token that no model has
MOST = 4  # generations of a cell, with the warm-up
Prompts = list[list[int]]
Way = Callable[[Any, Prompts, int], Any]  # of a model, the prompt of each row and the number of tokens


@dataclass(frozen=True)
class GenerationCell:
    """What is generated.

    Args:
        way: of `WAYS`.
        shape: of the model, in bf16; on a CPU in float32.
        prompts: different ones.
        rows: of each prompt.
        prompt_tokens: of each prompt.
        completion_tokens: of each row.
        seconds: after these no generation begins, if one was timed.
    """

    way: str
    shape: str
    prompts: int
    rows: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float


def by_path(model: Any, prompts: Prompts, length: int, path: Path) -> Tensor:
    """Return completions `[rows, length]` by one of the paths that a run may take: captured rows on CUDA."""
    draws = RowDraws([(0, row) for row in range(len(prompts))], length, model.device, strict=True)
    with patch.object(decoding, "choose_path", lambda *_: path):
        return complete_prompts(model, prompts, draws, length=length, ends=[NEVER], pad=0)


def by_modules(model: Any, prompts: Prompts, length: int) -> Tensor:
    """Return those that the modules of the model compute over the tree."""
    with patch.object(decoding, "plain_decoder", lambda *_: None):
        return by_path(model, prompts, length, Path.TREE)


def by_transformers(model: Any, prompts: Prompts, length: int, **settings: Any) -> Tensor:
    """Return those of transformers' own loop."""
    ids = torch.tensor(prompts, device=model.device)
    output: Tensor = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=length,
        eos_token_id=NEVER, pad_token_id=0, **settings,
    )  # fmt: skip
    return output[:, ids.size(1) :]


def continuously(model: Any, prompts: Prompts, length: int) -> Any:
    """Return the requests of transformers' continuous batching, with the settings that TRL advises."""
    if model.device.type == "cuda":
        batching = ContinuousBatchingConfig(use_cuda_graph=False, max_memory_percent=0.4)
    else:
        batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)
    sampling = GenerationConfig(do_sample=True, max_new_tokens=length, eos_token_id=NEVER, pad_token_id=0)
    return model.generate_batch(prompts, generation_config=sampling, continuous_batching_config=batching)


WAYS: dict[str, Way] = {
    "tree, modules": by_modules,
    "tree": partial(by_path, path=Path.TREE),
    "rows": partial(by_path, path=Path.ROWS),
    "captured rows": partial(by_path, path=Path.CAPTURED),
    "generate": by_transformers,
    "generate, static cache": partial(by_transformers, cache_implementation="static"),
    "continuous batching": continuously,
}
OURS = ("tree, modules", "tree", "rows", "captured rows")  # which draw the same tokens


def run_generation(cell: GenerationCell, device: Device) -> dict[str, Any]:
    """Generate, and return the seconds of each time, of which the first is a warm-up, and the peak of memory."""
    device.release()
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_path())
    model = get_peft_model(build_model(cell.shape, tokenizer, device), lora()).eval()
    held = device.memory()
    prompts: Prompts = []
    for prompt in range(cell.prompts):
        prompts += [[3 + prompt] + [7] * (cell.prompt_tokens - 1)] * cell.rows
    end = time.monotonic() + cell.seconds
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < MOST and time.monotonic() < end):
        began = time.monotonic()
        with torch.no_grad():
            completions = WAYS[cell.way](model, prompts, cell.completion_tokens)
        if device.is_gpu:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
        assert len(completions) == len(prompts)
    return {
        "path": generation_path(model.get_base_model()),
        "seconds": seconds,
        "milliseconds_a_token": 1000 * statistics.median(seconds[1:]) / cell.completion_tokens,
        "peaks": {"rollout": device.peak()},
        "held": held,
    }
