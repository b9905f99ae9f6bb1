"""The task of a recipe as its policy reads it."""

from __future__ import annotations

from ..engines.trl.batching import counted
from ..errors import UserError
from ..policies.files import policy_path
from ..recipe import Recipe
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
