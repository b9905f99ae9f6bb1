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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch

from ..distributed import get_world_size
from ..distributed.processes import git_commit, quiet_libraries, set_threads, version, versions
from ..errors import UserError
from ..policies.files import Policy, find_policy
from ..policies.loading import has_bf16, load_policy, load_tokenizer, render, template_options, tool_options
from ..recipe import Recipe
from ..rollouts.tools import ToolLimits
from ..runs import to_json, write_parquet
from ..runs.files import encoded, open_own
from ..tasks import Task, fit_prompts, load_task
from . import vllm_backend
from .conversation import Talking
from .evaluator import Evaluation, evaluate
from .sampling import GenerateSampler, RowsDone, Sampler, Sampling

BACKENDS = ("auto", "generate", "vllm")
RESULTS = "results.jsonl"
_NOT_IN_CONFIG = ("task_settings", "chat_template", "system_prompt", "prompts_sha256", "git_commit")


@dataclass(frozen=True)
class Outcome:
    """An evaluation of a saved policy, with all settings needed to repeat it; `started` is Unix time."""

    evaluation: Evaluation
    task: Task
    settings: dict[str, Any]
    started: float


def evaluate_checkpoint(
    recipe: Recipe,
    model: str,
    *,
    adapter: str | None = None,
    backend: str = "auto",
    done: RowsDone = lambda rows, of: None,
) -> Outcome:
    """Evaluate a policy on a recipe's task, with the recipe's evaluation settings and precision.

    With a launcher of several processes (`torchrun`, `accelerate launch`) they share the rows.

    Args:
        recipe: its task, run, model and engine parts are read.
        model: a local path, a hub id, or `tiny`. A folder that holds an adapter alone names its base model.
        adapter: a LoRA adapter for `model`.
        backend: `generate`, `vllm`, or `auto`: `vllm` if it is installed and there is a GPU.
        done: called with the number of finished rows, to show progress.

    Raises:
        UserError: the policy, the task or the backend cannot be used.
    """
    quiet_libraries()
    settings = recipe.run_settings()
    prompts, repeats = settings["eval_prompts"], settings["eval_repeats"]
    if prompts == 0:
        raise UserError("eval_prompts = 0 evaluates nothing: set a number, or null for all test prompts.")
    set_threads(settings["threads"])
    choose_backend(backend)  # refuse before anything is loaded
    policy = find_policy(model, adapter, revision=recipe.model_arguments().get("model_revision") or "main")
    with _device(recipe) as device, _precision(recipe, device) as precision:
        task = load_task(recipe.task_settings(), reward_errors=recipe.values["reward_errors"])
        backend = choose_backend(backend, on_cpu=bool(recipe.values.get("use_cpu")), task=task)
        if task.converses:
            tool_options(load_tokenizer(policy.tokenizer), task)  # refuse before the policy is loaded
        sampler = _sampler(backend, policy, recipe, device)
        sampling = Sampling(
            temperature=settings["eval_temperature"],
            max_completion_length=recipe.values["max_completion_length"],
            batch_size=settings["eval_batch_size"],
            seed=recipe.values["seed"],
            chat_template_kwargs=template_options(recipe),
        )
        task, _ = fit_prompts(
            task,
            chat=getattr(sampler.tokenizer, "chat_template", None) is not None,
            render=lambda prompt: render(sampler.tokenizer, prompt, **sampling.chat_template_kwargs),
        )
        talking = Talking(recipe.values.get("max_tool_calling_iterations"), ToolLimits(recipe.values["tool_timeout"]))
        # Described before the evaluation: an error here loses no result.
        described = _describe(recipe, policy, sampler, sampling, task, device) | {"precision": precision}
        started = time.time()
        evaluation = evaluate(sampler, task, sampling, prompts=prompts, repeats=repeats, talking=talking, done=done)
    return Outcome(evaluation, task, described, started)


def choose_backend(wanted: str, *, on_cpu: bool = False, task: Task | None = None) -> str:
    """Return `generate` or `vllm`; raises UserError for another name, and for vLLM with processes or tools."""
    if wanted not in BACKENDS:
        raise UserError(f"--backend {wanted}: expected one of {', '.join(BACKENDS)}.")
    several, converses = get_world_size() > 1, task is not None and task.converses
    if wanted == "auto":
        usable = vllm_backend.is_installed() and torch.cuda.is_available() and not (on_cpu or several or converses)
        return "vllm" if usable else "generate"
    if wanted == "vllm" and several:
        raise UserError(
            "--backend vllm runs as one process and spreads over GPUs by itself: start it without a launcher, with "
            "--vllm_tensor_parallel_size GPUS."
        )
    if wanted == "vllm" and task is not None and converses:
        raise UserError(f"--backend vllm does not run the tools of task {task.name}: use --backend generate.")
    return wanted


def write_results(outcome: Outcome, folder: Path) -> tuple[Path, Path]:
    """Append a line to `results.jsonl` of a folder, and write the completions next to it; return both files.

    A line truncated by a kill is terminated first.

    Raises:
        UserError: the folder cannot be written to.
    """
    when = datetime.fromtimestamp(outcome.started, UTC).strftime("%Y-%m-%dT%H-%M-%S.%f")
    name = re.sub(r"[^\w.-]", "_", outcome.task.name, flags=re.ASCII)[:100]  # file names have at most 255 bytes
    try:
        completions = write_parquet(folder / f"completions-{name}-{when}.parquet", outcome.evaluation.columns())
        line = to_json(results_line(outcome) | {"completions": completions.name}) + "\n"
        with open_own(folder / RESULTS, "a+b") as file:
            if file.tell() and _last_byte(file) != b"\n":
                line = f"\n{line}"
            file.write(encoded(line))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"Cannot write to {folder}: {error.strerror}. Choose a directory with --output.") from error
    return folder / RESULTS, completions


def results_line(outcome: Outcome) -> dict[str, Any]:
    """Return an evaluation as an object of `results.jsonl`."""
    task, found, settings = outcome.task, outcome.evaluation, outcome.settings
    metrics = task_metrics(found)
    better = {"mean_completion_tokens": None, "truncated_share": False}
    return {
        "results": {task.name: metrics},
        "versions": {task.name: task.version},
        "n-shot": {task.name: 0},
        "higher_is_better": {task.name: {name: better.get(name, True) for name in metrics if "_stderr" not in name}},
        "n-samples": {task.name: {"original": len(task.test), "effective": found.prompts}},
        "configs": {task.name: {**settings["task_settings"], "repeats": found.repeats}},
        "config": {name: value for name, value in settings.items() if name not in _NOT_IN_CONFIG},
        "model_name": settings["model"],
        "chat_template": settings["chat_template"],
        "system_instruction": settings["system_prompt"],
        "task_hashes": {task.name: settings["prompts_sha256"]},
        "git_hash": settings["git_commit"],
        "date": outcome.started,
        "total_evaluation_time_seconds": found.eval_seconds,
    }


def task_metrics(found: Evaluation) -> dict[str, float]:
    """Return the metrics of an evaluation in lm-eval's names, each with `_stderr` if it has a standard error."""
    settings = ("prompts", "repeats", "temperature", "eval_seconds")
    row = {name: value for name, value in found.row().items() if name not in settings}
    row |= {"pass@1": found.accuracy, "pass@1_se": found.accuracy_se}
    return {name.replace("_se", "_stderr"): value for name, value in row.items()}


def _sampler(backend: str, policy: Policy, recipe: Recipe, device: torch.device) -> Sampler:
    if backend == "vllm":
        return vllm_backend.VLLMSampler(policy, recipe, seed=recipe.values["seed"])
    return GenerateSampler(load_policy(policy, recipe, device), load_tokenizer(policy.tokenizer))


@contextmanager
def _device(recipe: Recipe) -> Iterator[torch.device]:
    """Yield this process's device; inside, the launcher's processes form a `torch.distributed` group."""
    on_cpu = bool(recipe.values.get("use_cpu")) or not torch.cuda.is_available()
    if get_world_size() == 1:
        yield torch.device("cpu" if on_cpu else "cuda")
        return
    from accelerate import PartialState

    state = PartialState(cpu=on_cpu)
    try:
        yield state.device
    finally:
        state.destroy_process_group()


@contextmanager
def _precision(recipe: Recipe, device: torch.device) -> Iterator[str]:
    """Autocast as in training: bf16 if the recipe sets it, or sets neither precision and the device has it."""
    bf16 = recipe.values.get("bf16")
    if bf16 is None:
        bf16 = not recipe.values.get("fp16") and has_bf16(device.type == "cpu")
    with torch.autocast(device.type, torch.bfloat16, enabled=bool(bf16)):
        yield "bf16 autocast" if bf16 else "no autocast"


def _describe(
    recipe: Recipe, policy: Policy, sampler: Sampler, sampling: Sampling, task: Task, device: torch.device
) -> dict[str, Any]:
    """Return everything that decides the result: policy, machine, sampling, prompts and versions."""
    settings = recipe.run_settings()
    prompts = task.test.select(range(min(settings["eval_prompts"] or len(task.test), len(task.test))))
    digest = hashlib.sha256()
    for row in prompts:
        digest.update(json.dumps([row["prompt"], row["answer"]], sort_keys=True).encode() + b"\n")
    first = prompts[0]["prompt"]
    messages = [] if isinstance(first, str) else first
    return {
        "model": policy.name,
        "adapter": policy.adapter_name,
        **policy.hashes(),
        "backend": sampler.backend,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "dtype": str(sampler.dtype),
        **asdict(sampling),
        "repeats": settings["eval_repeats"],
        "limit": settings["eval_prompts"],
        "prompts_sha256": digest.hexdigest(),
        "prompt_style": "chat" if messages else "plain",
        "chat_template": sampler.tokenizer.chat_template if messages else None,
        "system_prompt": next((str(m["content"]) for m in messages if m.get("role") == "system"), None),
        "task_settings": recipe.task_settings(),
        "versions": versions() | ({"vllm": version("vllm")} if sampler.backend == "vllm" else {}),
        "git_commit": git_commit(),
    }


def _last_byte(file: IO[bytes]) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read()
