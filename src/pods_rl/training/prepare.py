"""What a recipe resolves to on this machine: task, tokenizer, template options, tools, and the trainer's keywords."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..policies import policy_path
from ..policies.loading import (
    check_policy,
    check_template_options,
    encode,
    load_tokenizer,
    longest,
    render,
    template_options,
    tool_options,
    uses_bf16,
)
from ..prefix_tree.positions import Positions, positions_of, with_longest_text
from ..recipe import Recipe
from ..tasks import Fitted, Prompt, Task, fit_prompts, load_task
from ..text import counted

# A run writes its own files; TRL writes only what the recipe sets.
_QUIET = {"report_to": "none", "disable_tqdm": True}
_MOST_COMPARED = 20_000  # prompts of a split whose length is compared with the policy's positions before the run


@dataclass(frozen=True)
class Prepared:
    """A task as the policy of a recipe reads it, and how the policy reads it.

    Args:
        task: plain text if the policy has no chat template, and without training prompts that are too long.
        made: the task before that, which depends on the recipe's task and its data alone.
        fitted: how many prompts are too long. If None, the recipe sets no limit.
        tokenizer: of the policy.
        tools: what `tool_options` returned, which makes an environment only to list its tools.
        render_options: all arguments of the chat template: the recipe's `chat_template_kwargs`, and `tools`.
        notes: on keys of the recipe that the run ignores.
    """

    task: Task
    made: Task
    fitted: Fitted | None
    tokenizer: PreTrainedTokenizerBase
    tools: Mapping[str, Any]
    render_options: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def render(self, prompt: Prompt) -> str:
        """Return the text that the policy continues."""
        return render(self.tokenizer, prompt, **self.render_options)


def prepare(recipe: Recipe) -> Prepared:
    """Resolve the task of a recipe, its policy's tokenizer and the arguments of the chat template, once for a run.

    Raises UserError if the task cannot be made, has no training prompts, has tools that the policy cannot call, or has
    prompts that leave no room for a completion in the policy's table of positions.
    """
    settings = recipe.task_settings()
    model = recipe.model_arguments()
    made = training_task(recipe)
    path = policy_path(str(model["model_name_or_path"]))
    revision = model.get("model_revision") or "main"
    skeleton = check_policy(path, revision)
    tokenizer = load_tokenizer(path, revision)
    tools = tool_options(tokenizer, made)
    check_template_options(tokenizer, template_options(recipe))
    render_options = {**template_options(recipe), **tools}

    def render_prompt(prompt: Prompt) -> str:
        return render(tokenizer, prompt, **render_options)

    task, fitted = fit_prompts(
        made,
        chat=tokenizer.chat_template is not None,
        limit=settings["max_prompt_length"],
        count_tokens=lambda prompt: len(encode(tokenizer, prompt, render_prompt(prompt))),
        render=render_prompt,
    )
    positions = positions_of(skeleton) if skeleton is not None else None
    if positions:
        notes = _check_positions(recipe, task, positions, lambda prompts: longest(tokenizer, prompts, **render_options))
        task = replace(task, notes=(*task.notes, *notes))
    return Prepared(task, made, fitted, tokenizer, tools, render_options, tuple(recipe.notes))


def _check_positions(
    recipe: Recipe, task: Task, positions: Positions, tokens_of: Callable[[list[Prompt]], int]
) -> list[str]:
    """Return a note for each split with rows that are longer than the policy was configured for.

    Raises UserError if a split has prompts that leave no room for a completion in the policy's table of positions.
    """
    evaluated = recipe.run_settings()["eval_prompts"]
    splits = {
        "training": (task.train, len(task.train), "set a lower max_prompt_length"),
        "test": (task.test, evaluated, "evaluate on fewer or shorter ones (eval_prompts)"),
    }
    notes = []
    for name, (split, size, advice) in splits.items():
        count = min(len(split) if size is None else size, len(split), _MOST_COMPARED)
        if count == 0:
            continue
        prompts = with_longest_text(split.select(range(count))["prompt"])
        note = positions.check(
            tokens_of(prompts),
            recipe.values["max_completion_length"],
            which=f"The longest {name} prompt",
            advice=advice,
            trains=name == "training",
        )
        if note:
            notes.append(note)
    return notes


def training_task(recipe: Recipe) -> Task:
    """Return the recipe's task; raise UserError if it cannot be made, or has no training prompts."""
    settings = recipe.task_settings()
    task = load_task(settings, reward_errors=recipe.values["reward_errors"])
    if len(task.train) == 0:
        raise UserError(
            f"task {task.name} has {counted(len(task.test), 'prompt')} to test and none to train on: data_dir = "
            f"{settings['data_dir']} holds no training file. Put its train.jsonl there, or remove data_dir from the "
            "recipe"
        )
    return task


def engine_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the keywords of PODSConfig, with those that depend on the machine: use_cpu and bf16."""
    arguments: dict[str, Any] = dict(_QUIET)
    if "save_steps" not in recipe.given and "save_strategy" not in recipe.given:
        arguments["save_strategy"] = "no"
    arguments |= recipe.engine_arguments()
    arguments["push_to_hub"] = False  # the run pushes its final policy itself, after training
    # Every parameter is used in each pass, so DDP need not search the graph for unused ones.
    arguments.setdefault("ddp_find_unused_parameters", False)
    if not torch.cuda.is_available():
        arguments.setdefault("use_cpu", True)
    if arguments.get("bf16") is None:
        arguments["bf16"] = _trains_in_bf16(recipe, arguments)
    return arguments


def _trains_in_bf16(recipe: Recipe, arguments: Mapping[str, Any]) -> bool:
    """Return whether a run that does not set bf16 uses it."""
    if arguments.get("fp16"):
        return False
    # With continuous batching TRL would permanently convert float32 weights to bf16.
    converts = arguments.get("use_transformers_continuous_batching")
    if converts and recipe.values.get("dtype") != "bfloat16":
        return False
    return uses_bf16(bool(arguments.get("use_cpu")))
