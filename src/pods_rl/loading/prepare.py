"""What a recipe resolves to on this machine, for a run and an evaluation: task, tokenizer, template options, tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..policies import policy_path
from ..recipe import Recipe
from ..tasks import Fitted, Prompt, Task, fit_prompts, load_task
from ..text import counted
from .folders import Policy
from .policy import check_policy, load_tokenizer
from .prompts import encode, render, template_options, tool_options


@dataclass(frozen=True)
class Prepared:
    """A task as a policy reads it, and how the policy reads it.

    Args:
        task: plain text if the policy has no chat template, and without training prompts that are too long.
        made: the task before that, which depends on the recipe's task and its data alone.
        fitted: how many prompts are too long. If None, the recipe sets no limit.
        tokenizer: of the policy.
        tools: what `tool_options` returned, which makes an environment only to list its tools.
        render_options: all arguments of the chat template: the recipe's `chat_template_kwargs`, and `tools`.
    """

    task: Task
    made: Task
    fitted: Fitted | None
    tokenizer: PreTrainedTokenizerBase
    tools: Mapping[str, Any]
    render_options: Mapping[str, Any]

    def render(self, prompt: Prompt) -> str:
        """Return the text that the policy continues."""
        return render(self.tokenizer, prompt, **self.render_options)


def prepare(recipe: Recipe, policy: Policy | None = None) -> Prepared:
    """Resolve the task of a recipe, a policy's tokenizer and the arguments of the chat template, once for a run.

    A policy that is given is evaluated, on all test prompts of any length. Without one, the recipe's own is trained:
    there must be training prompts, those that are too long are left out, and its files are checked before they are
    loaded. Raises UserError for what cannot be made, called or fitted.
    """
    limit = None
    if policy is None:
        made = training_task(recipe)
        limit = recipe.task_settings()["max_prompt_length"]
        model = recipe.model_arguments()
        path = policy_path(str(model["model_name_or_path"]))
        revision = model.get("model_revision") or "main"
        check_policy(path, revision)
        tokenizer = load_tokenizer(path, revision)
    else:
        made = load_task(recipe.task_settings(), reward_errors=recipe.values["reward_errors"])
        tokenizer = load_tokenizer(policy.tokenizer)
    tools = tool_options(tokenizer, made)
    render_options = {**template_options(recipe), **tools}

    def render_prompt(prompt: Prompt) -> str:
        return render(tokenizer, prompt, **render_options)

    task, fitted = fit_prompts(
        made,
        chat=tokenizer.chat_template is not None,
        limit=limit,
        count_tokens=lambda prompt: len(encode(tokenizer, prompt, render_prompt(prompt))),
        render=render_prompt,
    )
    return Prepared(task, made, fitted, tokenizer, tools, render_options)


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
