"""Accuracy of a policy on a task: sampled completions, graded, with a standard error."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .environment import quiet_libraries, set_threads
from .recipe import Recipe
from .tasks import Task, load_task


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation measured.

    `accuracy`, `format_accuracy` and `both_accuracy` are means over prompts and repeats, `accuracy_se` the standard
    error over prompts, `mean_completion_tokens` counts the end token, `truncated_share` is the share of completions
    that never ended. `eval_seconds` is wall time.
    """

    accuracy: float
    accuracy_se: float
    format_accuracy: float
    both_accuracy: float
    mean_completion_tokens: float
    truncated_share: float
    prompts: int
    repeats: int
    temperature: float
    eval_seconds: float

    def row(self) -> dict[str, Any]:
        """As a line of `evals.jsonl`."""
        return asdict(self)


@dataclass(frozen=True)
class Completion:
    """One sampled answer: its text without special tokens, its length in tokens, and whether it ended by itself."""

    text: str
    tokens: int
    ended: bool


def evaluate(
    model: Any,
    tokenizer: Any,
    task: Task,
    *,
    prompts: int | None = None,
    repeats: int = 1,
    temperature: float = 1.0,
    max_completion_length: int = 256,
    batch_size: int = 256,
    seed: int = 0,
) -> Evaluation:
    """Sample `repeats` completions to each of the first `prompts` test prompts and grade them.

    The random state and the mode of the model are left as they were, so evaluating never changes a run.

    Args:
        model: a causal language model; on any device.
        tokenizer: padding on the left.
        task: what to answer and how it is graded.
        prompts: how many of the test split's prompts, from its start. None: all.
        repeats: completions per prompt.
        temperature: 0 means greedy.
        max_completion_length: tokens after which a completion is cut.
        batch_size: rows generated at once.
        seed: of the sampling.
    """
    started = time.perf_counter()
    rows = task.test if prompts is None else task.test.select(range(min(prompts, len(task.test))))
    questions = [q for q in rows["prompt"] for _ in range(repeats)]
    golds = [g for g in rows["answer"] for _ in range(repeats)]
    completions = sample(
        model,
        tokenizer,
        questions,
        temperature=temperature,
        max_completion_length=max_completion_length,
        batch_size=batch_size,
        seed=seed,
    )
    grades = task.grade([c.text for c in completions], golds)
    answer = torch.tensor([float(g.answer) for g in grades]).view(-1, repeats)
    per_prompt = answer.mean(dim=1)
    error = per_prompt.std().item() / math.sqrt(len(per_prompt)) if len(per_prompt) > 1 else math.nan
    return Evaluation(
        accuracy=per_prompt.mean().item(),
        accuracy_se=error,
        format_accuracy=_mean([g.format for g in grades]),
        both_accuracy=_mean([g.both for g in grades]),
        mean_completion_tokens=_mean([c.tokens for c in completions]),
        truncated_share=_mean([not c.ended for c in completions]),
        prompts=len(rows),
        repeats=repeats,
        temperature=temperature,
        eval_seconds=time.perf_counter() - started,
    )


def evaluate_checkpoint(recipe: Recipe, policy: str) -> Evaluation:
    """Evaluate a policy on a recipe's task, with the recipe's evaluation settings and precision.

    Args:
        recipe: its task, run and engine parts are read.
        policy: a local path, a hub id, or `tiny`.
    """
    quiet_libraries()
    from transformers import AutoModelForCausalLM

    from .engines.trl.build import bf16_here, load_tokenizer, policy_path

    settings = recipe.run_settings()
    set_threads(settings["threads"])
    path = policy_path(policy)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=recipe.values.get("dtype") or "float32").to(device)
    with torch.autocast(device, torch.bfloat16, enabled=bf16_here(device == "cpu")):
        return evaluate(
            model,
            load_tokenizer(path),
            load_task(recipe.task_settings()),
            prompts=settings["eval_prompts"],
            repeats=settings["eval_repeats"],
            temperature=settings["eval_temperature"],
            max_completion_length=recipe.values["max_completion_length"],
            batch_size=settings["eval_batch_size"],
            seed=recipe.values["seed"],
        )


@torch.no_grad()
def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    *,
    temperature: float,
    max_completion_length: int,
    batch_size: int,
    seed: int,
) -> list[Completion]:
    """One completion per prompt (text, or chat messages rendered with the model's own template)."""
    texts = [render(tokenizer, prompt) for prompt in prompts]
    plain = isinstance(prompts[0], str)
    how: dict[str, Any] = {"do_sample": False}
    if temperature:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    was_training = model.training
    devices = [model.device] if model.device.type == "cuda" else []
    completions: list[Completion] = []
    try:
        model.eval()
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            for start in range(0, len(texts), batch_size):
                batch = tokenizer(
                    texts[start : start + batch_size],
                    return_tensors="pt",
                    padding=True,
                    padding_side="left",
                    add_special_tokens=plain,  # a chat template has written them already
                ).to(model.device)
                batch.pop("token_type_ids", None)
                output = model.generate(
                    **batch,
                    max_new_tokens=max_completion_length,
                    pad_token_id=tokenizer.pad_token_id,
                    **how,
                )
                completions += _cut(output[:, batch["input_ids"].size(1) :], model, tokenizer)
    finally:
        model.train(was_training)
    return completions


def render(tokenizer: Any, prompt: Any) -> str:
    """A prompt as the text the model continues."""
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))


def _cut(ids: torch.Tensor, model: Any, tokenizer: Any) -> list[Completion]:
    """Cut each row after its first end token."""
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    ends.add(tokenizer.eos_token_id)
    completions = []
    for row in ids.tolist():
        length = next((i + 1 for i, token in enumerate(row) if token in ends), None)
        kept = row[:length]
        text = tokenizer.decode(kept, skip_special_tokens=True)
        completions.append(Completion(text, len(kept), length is not None))
    return completions


def _mean(values: Sequence[float | bool]) -> float:
    return sum(map(float, values)) / len(values)
