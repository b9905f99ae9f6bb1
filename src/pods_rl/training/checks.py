"""Check a recipe as a run does before its first step, without loading its policy."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from transformers import Trainer, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from trl import ModelConfig, get_peft_config

from ..distributed.processes import quiet_libraries
from ..engines.trl.config import PODSConfig, check_prompts
from ..engines.trl.guarded.stability import is_out_of_memory
from ..errors import UserError
from ..loading.prepare import prepare, training_task
from ..recipe import Recipe
from ..recipe.recipe import DATA_KEYS
from ..tasks import Fitted, Task
from ..text import describe, short
from .arguments import config_arguments

_STEPS = 100  # of a schedule without a number of steps
_WRONG_VALUE = (ValueError, TypeError, LookupError, ImportError, NotImplementedError)


@contextmanager
def as_recipe_errors(
    recipe: Recipe, kinds: tuple[type[Exception], ...] = _WRONG_VALUE, read: Sequence[str] = ()
) -> Iterator[None]:
    """Turn an error of TRL, transformers or peft into a UserError of one line: the recipe, and the library's sentence.

    Args:
        recipe: a loaded recipe.
        kinds: the exceptions that mean a wrong value.
        read: the keys that decide what happens inside. Those that the recipe sets are named with their values.
    """
    try:
        yield
    except UserError as error:
        if str(error).startswith(recipe.source):  # it names the recipe already
            raise
        raise UserError(f"{recipe.source}: {error}") from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if is_out_of_memory(error):
            raise UserError(
                f"{recipe.source}: out of memory while the policy loads ({short(reason, 200)}). Use a smaller model, "
                "dtype: bfloat16, or an adapter (use_peft: true) with a lower lora_r."
            ) from error
        if not isinstance(error, kinds):
            raise
        settings = []
        for key in read:
            if key in recipe.given:
                value = recipe.given[key]
                settings.append(f"{key} = {short(value) if isinstance(value, str) else describe(value)}")
        rejected = " with ".join(settings) or "this recipe"
        raise UserError(f"{recipe.source}: the trainer rejects {rejected}: {short(reason, 400)}") from error


def check_task(
    recipe: Recipe, config: PODSConfig | None, loaded: dict[str, tuple[Task, Fitted | None]] | None = None
) -> tuple[str, ...]:
    """Load the prompts, gold answers, rewards and tokenizer of a recipe as a run does; return what the run would note.

    What is on a hub that cannot be reached is not checked, and a note says so.

    Args:
        recipe: a loaded recipe.
        config: from `check_engine`. If None, the number of prompts is not compared with the batch.
        loaded: tasks that earlier calls have loaded, to which this one adds its own; arms mostly share theirs.

    Raises:
        UserError: what a run would raise before its first step.
    """
    quiet_libraries()
    data_problem = recipe.hub_problem(DATA_KEYS)
    if data_problem:
        return (f"The data are not checked: {data_problem}",)
    policy_problem = recipe.hub_problem(("model_name_or_path",))
    if loaded is None:
        loaded = {}
    key = repr((recipe.task_settings(), recipe.model_arguments(), recipe.values.get("chat_template_kwargs")))
    if key not in loaded:
        if policy_problem:
            loaded[key] = (training_task(recipe), None)  # without its tokenizer no prompt's length is known
        else:
            prepared = prepare(recipe)
            loaded[key] = (prepared.task, prepared.fitted)
    task, fitted = loaded[key]
    if config is not None:
        with as_recipe_errors(recipe):
            check_prompts(config, len(task.train))
    notes = list(task.notes)
    if fitted:
        notes.append(str(fitted))
    if policy_problem:
        notes.append(f"The policy is not checked: {policy_problem}")
    return tuple(notes)


def check_engine(recipe: Recipe, processes: int = 1) -> PODSConfig:
    """Construct the configurations, optimizer, schedule and trackers of a recipe, without its policy.

    Returns the configuration, for one process that trains the rows of all.

    Args:
        recipe: a loaded recipe.
        processes: the number of processes that train it.

    Raises:
        UserError: whatever one of them raises, as one line.
    """

    def reading(*keys: str) -> AbstractContextManager[None]:
        return as_recipe_errors(recipe, (Exception,), keys)

    # the trainer shows the warnings again
    with warnings.catch_warnings(action="ignore"), as_recipe_errors(recipe, (Exception,)):
        arguments = config_arguments(recipe)
        arguments["per_device_train_batch_size"] *= processes  # the batch of all of them, in this one
        with reading(*recipe.model_arguments()):
            get_peft_config(ModelConfig(**recipe.model_arguments()))
        config = PODSConfig("unused", **arguments)
        if config.fsdp and processes == 1:
            raise UserError(
                f"fsdp = {describe(recipe.given['fsdp'])} shares the policy among processes, and this run has one: "
                "remove fsdp, or start several with --num_processes K --accelerate_config fsdp2."
            )
        if config.accelerator_config.dispatch_batches:
            raise UserError(
                "accelerator_config: dispatch_batches needs batches of tensors, and a prompt is text: remove it."
            )
        with reading("optim", "optim_args", "learning_rate"):
            layer = torch.nn.Linear(1, 1)
            kind, options = Trainer.get_optimizer_cls_and_kwargs(config, layer)
            optimizer = kind(**{"params": layer.parameters(), **options})
        with reading("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"):
            steps = config.max_steps if config.max_steps > 0 else _STEPS
            get_scheduler(
                config.lr_scheduler_type,
                optimizer,
                num_warmup_steps=config.get_warmup_steps(steps),
                num_training_steps=steps,
                scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs or {}),
            )
        with reading("report_to"):
            for callback in get_reporting_integration_callbacks(recipe.values.get("report_to") or []):
                callback()
    return config
