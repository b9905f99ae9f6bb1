"""Evaluating a saved policy on a recipe's task, and what it takes to do it again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..distributed import place
from ..errors import UserError
from ..policies.files import Policy, find_policy
from ..policies.loading import has_bf16, load_policy, load_tokenizer, render, template_options
from ..recipe import Recipe
from ..tasks import Task, load_task
from ..tasks.prompts import fit_prompts
from ..training.environment import git_commit, quiet_libraries, set_threads, version, versions
from . import vllm_backend
from .evaluator import evaluate
from .generate import GenerateSampler
from .sampling import RowsDone, Sampler, Sampling
from .scores import Evaluation

BACKENDS = ("auto", "generate", "vllm")


@dataclass(frozen=True)
class Outcome:
    """An evaluation of a saved policy, with all that is needed to repeat it.

    `settings` holds the policy with the hashes of its weights, how completions were sampled, the recipe's task part,
    chat template and system prompt, device, precision and versions; `started` is Unix time.
    """

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

    Under a launcher of several processes (`torchrun`, `accelerate launch`) they share the rows.

    Args:
        recipe: its task, run, model and engine parts are read.
        model: a local path, a hub id, or `tiny`; a folder with an adapter alone brings its base along.
        adapter: a LoRA adapter for `model`.
        backend: `vllm` needs it installed; `auto` takes it where it is installed and there is a GPU, else `generate`.
        done: told of the rows done.

    Raises:
        UserError: the policy, the task or the backend cannot be used.
    """
    quiet_libraries()
    settings = recipe.run_settings()
    if settings["eval_prompts"] == 0:
        raise UserError("eval_prompts = 0 leaves nothing to evaluate: set a number, or null for the whole test split.")
    set_threads(settings["threads"])
    backend = choose_backend(backend, on_cpu=bool(recipe.values.get("use_cpu")))
    policy = find_policy(model, adapter, revision=recipe.model_arguments().get("model_revision") or "main")
    with _processes(recipe) as device, _precision(recipe, device) as precision:
        task = load_task(recipe.task_settings(), reward_errors=recipe.values["reward_errors"])
        sampler = _sampler(backend, policy, recipe, device)
        tokenizer, options = sampler.tokenizer, template_options(recipe)
        task, _ = fit_prompts(
            task,
            chat=getattr(tokenizer, "chat_template", None) is not None,
            render=lambda prompt: render(tokenizer, prompt, **options),
        )
        sampling = Sampling(
            temperature=settings["eval_temperature"],
            max_completion_length=recipe.values["max_completion_length"],
            batch_size=settings["eval_batch_size"],
            seed=recipe.values["seed"],
            chat_template_kwargs=options,
        )
        about = {  # before the evaluation: nothing that can fail comes between it and its result
            "model": policy.name,
            "adapter": policy.adapter_name,
            **policy.hashes(),
            "backend": backend,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            "dtype": str(getattr(getattr(sampler, "model", None), "dtype", recipe.given.get("dtype") or "auto")),
            "precision": precision,
            **asdict(sampling),
            "repeats": settings["eval_repeats"],
            "limit": settings["eval_prompts"],
            **_prompt_settings(task, sampler.tokenizer, settings["eval_prompts"]),
            "task_settings": recipe.task_settings(),
            "versions": versions() | ({"vllm": version("vllm")} if backend == "vllm" else {}),
            "git_commit": git_commit(),
        }
        started = time.time()
        evaluation = evaluate(
            sampler, task, sampling, prompts=settings["eval_prompts"], repeats=settings["eval_repeats"], done=done
        )
    return Outcome(evaluation, task, about, started)


def choose_backend(wanted: str, *, on_cpu: bool = False) -> str:
    """`generate` or `vllm`; raises UserError for a name there is not, and for vLLM among several processes."""
    if wanted not in BACKENDS:
        raise UserError(f"--backend {wanted}: expected one of {', '.join(BACKENDS)}.")
    several = place().processes > 1
    if wanted == "auto":
        usable = vllm_backend.is_installed() and torch.cuda.is_available() and not on_cpu and not several
        return "vllm" if usable else "generate"
    if wanted == "vllm" and several:
        raise UserError(
            "--backend vllm runs as one process and spreads over GPUs by itself: start it without a launcher, with "
            "--vllm_tensor_parallel_size GPUS."
        )
    return wanted


def prompts_hash(task: Task, prompts: int | None) -> str:
    """The sha256 of the first test prompts and their gold answers; None: of all."""
    digest = hashlib.sha256()
    count = len(task.test) if prompts is None else min(prompts, len(task.test))
    for row in task.test.select(range(count)):
        digest.update(json.dumps([row["prompt"], row["answer"]], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _sampler(backend: str, policy: Policy, recipe: Recipe, device: torch.device) -> Sampler:
    if backend == "vllm":
        return vllm_backend.VLLMSampler(policy, recipe, seed=recipe.values["seed"])
    return GenerateSampler(load_policy(policy, recipe, device), load_tokenizer(policy.tokenizer))


@contextmanager
def _processes(recipe: Recipe) -> Iterator[torch.device]:
    """This process's device, in a group with those that a launcher started beside it."""
    on_cpu = bool(recipe.values.get("use_cpu")) or not torch.cuda.is_available()
    if place().processes == 1:
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
    """Autocast as the recipe trains: bf16 where it says so, or says nothing and the device has it."""
    bf16 = recipe.values.get("bf16")
    if bf16 is None:
        bf16 = not recipe.values.get("fp16") and has_bf16(device.type == "cpu")
    with torch.autocast(device.type, torch.bfloat16, enabled=bool(bf16)):
        yield "bf16 autocast" if bf16 else "no autocast"


def _prompt_settings(task: Task, tokenizer: Any, prompts: int | None) -> dict[str, Any]:
    """What decides the text that the model continues: the prompts, the chat template, the system prompt."""
    first = task.test[0]["prompt"]
    messages = [] if isinstance(first, str) else first
    template = None if isinstance(first, str) else tokenizer.chat_template
    return {
        "prompts_sha256": prompts_hash(task, prompts),
        "prompt_style": "plain" if isinstance(first, str) else "chat",
        "chat_template": template,
        "system_prompt": next((str(m["content"]) for m in messages if m.get("role") == "system"), None),
    }
