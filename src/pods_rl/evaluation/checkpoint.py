"""Evaluate a saved policy on a recipe's task, and write the result with all settings needed to repeat it.

A result is a line of JSON in lm-eval's format: `results: {task: {metric: value, metric_stderr: value}}`, `versions`,
`n-samples`, `higher_is_better`, `config` and more.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..distributed import get_world_size
from ..distributed.processes import quiet_libraries, set_threads, version, versions
from ..errors import UserError
from ..loading.folders import Policy, find_policy
from ..loading.policy import load_policy, uses_bf16
from ..loading.prepare import prepare
from ..recipe import Recipe
from ..runs import to_json, write_parquet
from ..runs.environment import git_commit
from ..runs.files import RESULTS, encoded, open_own
from ..tasks import Task
from ..tasks.sources import first_rows
from ..text import counted
from . import Evaluation, evaluate
from .sampling import GenerateSampler, RowsDone, Sampler, Sampling, VLLMSampler, sampling_of

_HIGHER_IS_BETTER = {"mean_completion_tokens": None, "truncated_share": False}  # all other scores: True


def evaluate_checkpoint(
    recipe: Recipe,
    model: str,
    *,
    adapter: str | None = None,
    backend: str = "auto",
    done: RowsDone = lambda rows, of: None,
    begin: Callable[[str], None] = lambda what: None,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[Evaluation, dict[str, Any]]:
    """Evaluate a policy on a recipe's task, with the recipe's evaluation settings and precision.

    Returns the evaluation and its line of `results.jsonl`, with all settings needed to repeat it. The processes of a
    launcher (`torchrun`, `accelerate launch`) share the rows.

    Args:
        recipe: its task, run, model and engine parts are read.
        model: a local path, a hub id, or `tiny`. A folder that holds an adapter alone names its base model.
        adapter: a LoRA adapter for `model`.
        backend: `generate`, `vllm`, or `auto`: `vllm` if it is installed and there is a GPU.
        done, begin, note: show progress: finished rows, what begins, and a line for each note of the task on its data.
    """
    quiet_libraries()
    settings = recipe.run_settings()
    prompts = settings["eval_prompts"]
    if prompts == 0:
        raise UserError("eval_prompts = 0 evaluates nothing: set a number, or null for all test prompts.")
    set_threads(settings["threads"])
    policy = find_policy(model, adapter, revision=recipe.model_arguments().get("model_revision") or "main")
    with _device(recipe) as device:
        begin(f"loading the task {recipe.values['task']}")
        prepared = prepare(recipe, policy)
        task = prepared.task
        for text in task.notes:
            note(f"Note: {text}")
        backend = choose_backend(backend, on_cpu=bool(recipe.values.get("use_cpu")), task=task)
        begin(f"loading the policy {model}")
        sampler: Sampler
        if backend == "vllm":
            sampler = VLLMSampler(policy, recipe, prepared.tokenizer)
        else:
            sampler = GenerateSampler(load_policy(policy, recipe, device), prepared.tokenizer)
        sampling = sampling_of(recipe)
        # Described before the evaluation: an error here loses no result.
        line = _describe(recipe, policy, sampler, sampling, task) | {"date": time.time()}
        count = len(first_rows(task.test, prompts))
        begin(f"evaluating {counted(count * settings['eval_repeats'], 'completion')}")
        evaluation = evaluate(
            sampler,
            task,
            sampling,
            prompts=prompts,
            repeats=settings["eval_repeats"],
            done=done,
            tools=prepared.tools,
        )
    return evaluation, line | _lm_eval_scores(task, evaluation)


def choose_backend(wanted: str, *, on_cpu: bool = False, task: Task | None = None) -> str:
    """Return `generate` or `vllm`; raises UserError for another name, and for vLLM with processes or tools."""
    if wanted not in ("auto", "generate", "vllm"):
        raise UserError(f"--backend {wanted}: expected one of auto, generate, vllm.")
    several = get_world_size() > 1
    converses = task is not None and task.converses
    if wanted == "auto":
        # vLLM runs as one process and does not call the tools of a task.
        if on_cpu or several or converses:
            return "generate"
        return "vllm" if find_spec("vllm") and torch.cuda.is_available() else "generate"
    if wanted == "vllm" and several:
        raise UserError("--backend vllm runs as one process: start it alone, with --vllm_tensor_parallel_size GPUS.")
    if wanted == "vllm" and converses:
        raise UserError("--backend vllm does not run the tools of a task: use --backend generate.")
    return wanted


def write_results(evaluation: Evaluation, line: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Append a line to `results.jsonl` of a folder, and write the completions next to it; return both files."""
    (task,) = line["results"]
    when = datetime.fromtimestamp(line["date"], UTC).strftime("%Y-%m-%dT%H-%M-%S.%f")
    name = re.sub(r"[^\w.-]", "_", task, flags=re.ASCII)[:100]  # file names have at most 255 bytes
    completions = write_parquet(folder / f"completions-{name}-{when}.parquet", evaluation.columns())
    text = encoded(to_json(line | {"completions": completions.name}) + "\n")
    with open_own(folder / RESULTS, "a+b") as file:
        file.seek(max(0, file.tell() - 1))  # a kill may have truncated the last line
        last_byte = file.read()
        if last_byte not in (b"", b"\n"):
            file.write(b"\n")
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return folder / RESULTS, completions


def _lm_eval_scores(task: Task, evaluation: Evaluation) -> dict[str, Any]:
    """Return the scores of a line in lm-eval's names, each with `_stderr` if it has a standard error."""
    scores = dict(evaluation.scores)
    # lm-eval has these under other keys: `n-samples`, `config` and `total_evaluation_time_seconds`.
    for setting in ("prompts", "repeats", "temperature", "eval_seconds"):
        del scores[setting]
    if "accuracy" in scores:
        scores["pass@1"] = scores["accuracy"]
        scores["pass@1_se"] = scores["accuracy_se"]
    results = {}
    higher_is_better: dict[str, bool | None] = {}
    for name, score in scores.items():
        if name.endswith("_se"):
            results[f"{name.removesuffix('_se')}_stderr"] = score
        else:
            results[name] = score
            higher_is_better[name] = _HIGHER_IS_BETTER.get(name, True)
    return {
        "results": {task.name: results},
        "higher_is_better": {task.name: higher_is_better},
        "n-samples": {task.name: {"original": len(task.test), "effective": evaluation.scores["prompts"]}},
        "total_evaluation_time_seconds": evaluation.scores["eval_seconds"],
    }


@contextmanager
def _device(recipe: Recipe) -> Iterator[torch.device]:
    """Yield this process's device, with autocast as in training, in a group of the launcher's processes."""
    on_cpu = bool(recipe.values.get("use_cpu")) or not torch.cuda.is_available()
    device = torch.device("cpu" if on_cpu else "cuda")
    state = None
    if get_world_size() > 1:
        from accelerate import PartialState

        state = PartialState(cpu=on_cpu)
        device = state.device
    bf16 = uses_bf16(recipe.values, on_cpu=on_cpu)
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            yield device
    finally:
        if state is not None:
            state.destroy_process_group()


def _describe(recipe: Recipe, policy: Policy, sampler: Sampler, sampling: Sampling, task: Task) -> dict[str, Any]:
    """Return a line of `results.jsonl` without scores: policy, machine, sampling, prompts and versions."""
    settings = recipe.run_settings()
    prompts = first_rows(task.test, settings["eval_prompts"])
    # Evaluations whose rows have the same hash had the same prompts and gold answers.
    rows = json.dumps([[row["prompt"], row["answer"]] for row in prompts], sort_keys=True)
    first_prompt = prompts[0]["prompt"]
    chat_template = None
    system_prompt = None
    if not isinstance(first_prompt, str):  # a prompt of text is not rendered
        chat_template = sampler.tokenizer.chat_template
        system_prompt = next((str(turn["content"]) for turn in first_prompt if turn.get("role") == "system"), None)
    on_cpu = recipe.values.get("use_cpu") or not torch.cuda.is_available()
    device = "cpu" if on_cpu else torch.cuda.get_device_name()
    autocast = torch.is_autocast_enabled("cpu" if on_cpu else "cuda")
    packages = versions()
    if sampler.backend == "vllm":
        packages["vllm"] = version("vllm")
    config = {
        "model": policy.name,
        "adapter": policy.adapter_name,
        **policy.hashes(),
        "backend": sampler.backend,
        "device": device,
        "dtype": str(sampler.dtype),
        "autocast": "bfloat16" if autocast else None,
        **asdict(sampling),
        "repeats": settings["eval_repeats"],
        "limit": settings["eval_prompts"],
        "versions": packages,
    }
    return {
        "model_name": policy.name,
        "versions": {task.name: task.version},
        "n-shot": {task.name: 0},
        "configs": {task.name: recipe.task_settings()},
        "config": config,
        "chat_template": chat_template,
        "system_instruction": system_prompt,
        "task_hashes": {task.name: hashlib.sha256(rows.encode()).hexdigest()},
        "git_hash": git_commit(),
    }
