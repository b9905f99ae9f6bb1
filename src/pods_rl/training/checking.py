"""Check a recipe with the objects that TRL, transformers, PEFT and torch make of it, before a policy loads."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import GenerationConfig, Trainer, get_scheduler
from transformers.generation import logits_process as processors
from transformers.integrations import get_reporting_integration_callbacks
from trl import ModelConfig, get_peft_config

from ..engines.trl.config import PODSConfig
from ..errors import UserError
from ..recipe import Recipe
from ..text import suggest
from .trainer import as_recipe_errors, engine_arguments

_STEPS = 100  # of a schedule without a number of steps
_SAMPLING = {  # what `generate` makes of each setting, and the value that turns it off
    "temperature": (processors.TemperatureLogitsWarper, 1.0),
    "top_k": (processors.TopKLogitsWarper, 0),
    "top_p": (processors.TopPLogitsWarper, 1.0),
    "min_p": (processors.MinPLogitsWarper, None),
    "repetition_penalty": (processors.RepetitionPenaltyLogitsProcessor, 1.0),
}


def check_engine(recipe: Recipe, processes: int = 1) -> None:
    """Construct the configurations, sampling, optimizer, schedule and trackers of a recipe, without its policy.

    Args:
        recipe: a loaded recipe.
        processes: the number of processes that train it.

    Raises:
        UserError: whatever one of them raises, as one line.
    """
    with _quiet(), as_recipe_errors(recipe, (Exception,)):
        arguments = engine_arguments(recipe)
        report_to = recipe.values.get("report_to")
        arguments["per_device_train_batch_size"] *= processes  # the batch of all of them, in this one
        for key in ("model_init_kwargs", "generation_kwargs"):  # JSON, as on TRL's command line
            if isinstance(arguments.get(key), str):
                arguments[key] = json.loads(arguments[key])
            if not isinstance(arguments.get(key), (dict, type(None))):
                raise UserError(f"{key}: expected a mapping, as in {{a: 1}}, or its JSON.")
        get_peft_config(ModelConfig(**recipe.model_arguments()))
        config = PODSConfig("unused", **arguments)
        _check_sampling(config)
        layer = torch.nn.Linear(1, 1)
        kind, options = Trainer.get_optimizer_cls_and_kwargs(config, layer)
        optimizer = kind(**{"params": layer.parameters(), **options})
        steps = config.max_steps if config.max_steps > 0 else _STEPS
        get_scheduler(
            config.lr_scheduler_type,
            optimizer,
            num_warmup_steps=config.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs or {}),
        )
        for callback in get_reporting_integration_callbacks(report_to or []):
            callback()


def _check_sampling(config: PODSConfig) -> None:
    own = dict(config.generation_kwargs or {})
    known = GenerationConfig().to_dict()
    for name in own:
        if name not in known and not config.use_vllm:
            raise UserError(f"generation_kwargs: {name}: `generate` has no such argument.{suggest(name, known)}")
    settings = {name: own.get(name, getattr(config, name)) for name in _SAMPLING}
    for name, (processor, off) in _SAMPLING.items():
        if settings[name] != off and settings[name] is not None:
            processor(settings[name])
    lengths = {"max_new_tokens": config.max_completion_length, "cache_implementation": config.cache_implementation}
    GenerationConfig(do_sample=True, **lengths | settings | own).validate()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings and logs: the trainer shows them again."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
