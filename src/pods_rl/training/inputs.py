"""What a recipe gives on this machine: its task as its policy reads it, and the memory it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..engines.trl.batching import BatchPlan, counted
from ..errors import UserError
from ..planning.memory import Change, Estimate, Shape, advice, estimate
from ..policies.files import policy_path, read_config
from ..recipe import Recipe
from ..recipe.checks import cpu_has_bf16
from ..tasks import Fitted, Task, fit_prompts, load_task


def fitted_task(recipe: Recipe) -> tuple[Task, Fitted | None]:
    """Return the recipe's task as its policy reads it (`fit_prompts`): plain text if there is no chat template,
    and without training prompts that are too long.

    Raises UserError if the task cannot be made, has no training prompts, or has tools that the policy cannot call.
    """
    from ..policies.loading import check_policy, encode, load_tokenizer, render, template_options, tool_options

    settings, model = recipe.task_settings(), recipe.model_arguments()
    task = load_task(settings, reward_errors=recipe.values["reward_errors"])
    if len(task.train) == 0:
        raise UserError(
            f"task {task.name} has {counted(len(task.test), 'prompt')} to test and none to train on: data_dir = "
            f"{settings['data_dir']} holds no training file. Put its train.jsonl there, or remove data_dir from the "
            "recipe"
        )
    where = policy_path(str(model["model_name_or_path"])), model.get("model_revision") or "main"
    check_policy(*where)
    tokenizer = load_tokenizer(*where)
    options = {**template_options(recipe), **tool_options(tokenizer, task)}
    return fit_prompts(
        task,
        chat=tokenizer.chat_template is not None,
        limit=settings["max_prompt_length"],
        count_tokens=lambda prompts: [len(encode(tokenizer, p, render(tokenizer, p, **options))) for p in prompts],
        render=lambda prompt: render(tokenizer, prompt, **options),
    )


@dataclass(frozen=True)
class MemoryInputs:
    """What decides the memory of a recipe on this machine, besides its settings."""

    shape: Shape
    bf16: bool
    on_cpu: bool

    def estimate(self, values: Mapping[str, Any], plan: BatchPlan) -> Estimate:
        return estimate(values, self.shape, plan, bf16=self.bf16, on_cpu=self.on_cpu)

    def advice(self, values: Mapping[str, Any], plan: BatchPlan, phase: str) -> list[Change]:
        return advice(values, self.shape, plan, phase, bf16=self.bf16, on_cpu=self.on_cpu)


def memory_inputs(values: Mapping[str, Any]) -> MemoryInputs:
    """Return what decides the memory of a recipe's values; raise UserError if config.json does not tell the sizes."""
    import torch

    shape = Shape.of(read_config(str(values["model_name_or_path"]), str(values.get("model_revision") or "main")))
    on_cpu = bool(values.get("use_cpu")) or not torch.cuda.is_available()
    wanted = values.get("bf16")
    bf16 = bool(values.get("fp16") or (wanted if wanted is not None else not on_cpu or cpu_has_bf16()))
    return MemoryInputs(shape, bf16, on_cpu)
