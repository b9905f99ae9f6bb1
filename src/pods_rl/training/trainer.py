"""From a recipe and a task to a trainer that is ready to train."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from trl import ModelConfig, get_peft_config

from ..engines.trl.compat import lossy_cast
from ..engines.trl.config import PODSConfig, check_prompts
from ..errors import UserError
from ..policies.files import policy_path
from ..policies.loading import has_bf16, load_options, load_tokenizer
from ..recipe import Recipe
from ..recipe.recipe import checkpoint_keys
from ..rewards import Reward
from ..rewards import score as score_texts
from ..rewards.verifier import verifier_losses
from ..sandbox.scores import Scores
from ..tasks import Task, last_turn
from ..text import short
from .saving import RunTrainer

RewardFunction = Callable[..., Scores]

_NO_PICKLE = {"use_safetensors": True}
# A run writes its own files; TRL writes only what the recipe sets.
_QUIET = {"report_to": "none", "disable_tqdm": True}


def build_trainer(recipe: Recipe, task: Task, output_dir: Path) -> RunTrainer:
    """Build the trainer of a recipe, with policy, tokenizer, rewards and data; it does not start training.

    Args:
        recipe: a checked recipe.
        task: the task to train on.
        output_dir: the folder for TRL's checkpoints.
    """
    with as_recipe_errors(recipe):
        return _build(recipe, task, output_dir)


def _build(recipe: Recipe, task: Task, output_dir: Path) -> RunTrainer:
    arguments = engine_arguments(recipe)
    model = ModelConfig(**recipe.model_arguments())
    path = policy_path(str(model.model_name_or_path))
    options = load_options(recipe)
    quantization = options.pop("quantization_config", None)  # TRL expects it separately
    arguments["model_init_kwargs"] = dict(arguments.get("model_init_kwargs") or {}) | options | _NO_PICKLE
    config = PODSConfig(str(output_dir), **arguments, reward_weights=list(task.rewards.values()))
    check_prompts(config, len(task.train))  # again in the trainer, but here before a model loads
    trainer = RunTrainer(
        model=path,
        reward_funcs=reward_functions(recipe, task),
        args=config,
        train_dataset=task.train,
        processing_class=load_tokenizer(path, model.model_revision),
        quantization_config=quantization,
        peft_config=get_peft_config(model),
        tools=list(task.tools) or None,
        environment_factory=task.environment_factory,
    )
    if doubt := lossy_cast(trainer):
        raise UserError(doubt)
    trainer.recipe_keys = checkpoint_keys(recipe.values)
    return trainer


_WRONG_VALUE = (ValueError, TypeError, AttributeError, LookupError, ImportError, NotImplementedError)


@contextmanager
def as_recipe_errors(recipe: Recipe, kinds: tuple[type[Exception], ...] = _WRONG_VALUE) -> Iterator[None]:
    """Turn an error of TRL, transformers or peft about a value into a UserError of one line, with the cause.

    `kinds` are the exceptions that mean a wrong value.
    """
    try:
        yield
    except UserError as error:
        raise error if str(error).startswith(recipe.source) else UserError(f"{recipe.source}: {error}") from error
    except kinds as error:
        said = " ".join(str(error).split()) or type(error).__name__
        check = f" Check {', '.join(keys)}." if (keys := _keys_in(said, recipe)) else ""
        raise UserError(f"{recipe.source}: the trainer rejects this recipe: {short(said, 400)}{check}") from error


def _keys_in(said: str, recipe: Recipe) -> list[str]:
    """Return the keys that the user set and that a message names; if there are none, those whose value it quotes."""
    words = said.lower().replace(" ", "_")
    named = [key for key in recipe.given if re.search(rf"(?<![a-z]){key}(?![a-z])", words)]
    if named:
        return named
    given = {key: v for key, v in recipe.given.items() if not isinstance(v, (bool, dict, type(None)))}
    quoted = [
        key for key, v in given.items() if v not in (0, 1, 2) and re.search(rf"(?<![\w.]){re.escape(str(v))}", said)
    ]
    quoted += [key for key, v in recipe.given.items() if isinstance(v, dict) and any(part in said for part in v)]
    return quoted or list(recipe.given)[:8]


def engine_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return PODSConfig's keywords, with those that depend on the machine: use_cpu and bf16."""
    saves = "save_steps" in recipe.given or "save_strategy" in recipe.given
    arguments = _QUIET | ({} if saves else {"save_strategy": "no"}) | recipe.engine_arguments()
    arguments["push_to_hub"] = False  # the run pushes its final policy itself, after training
    # Every parameter is used in each pass, so DDP need not search the graph for unused ones.
    arguments.setdefault("ddp_find_unused_parameters", False)
    if not torch.cuda.is_available():
        arguments.setdefault("use_cpu", True)
    if arguments.get("bf16") is None:
        # With continuous batching TRL would permanently convert float32 weights to bf16.
        kept = not arguments.get("use_transformers_continuous_batching") or recipe.values.get("dtype") == "bfloat16"
        arguments["bf16"] = kept and not arguments.get("fp16") and has_bf16(bool(arguments.get("use_cpu")))
    return arguments


def reward_functions(recipe: Recipe, task: Task) -> list[RewardFunction]:
    """Return the task's rewards in TRL's signature, in the task's order; raise UserError for an unknown reward."""
    limit, seconds = recipe.values["max_completion_length"], recipe.values["reward_seconds"]
    return [trl_reward(task.reward(name), limit=limit, seconds=seconds) for name in task.rewards]


def trl_reward(reward: Reward, *, limit: int, seconds: float | None = None) -> RewardFunction:
    """Return a reward in TRL's signature: it takes completions and the `answer` column and returns a list of floats.

    A reward that uses verifier processes logs the answers whose verification timed out or crashed. A user's reward
    scores each completion separately; an error or timeout gives a RewardFailure, handled as `reward_errors` says.

    Args:
        limit: most tokens of a completion, for `overlong`.
        seconds: limit of a user's reward for one completion, in a process that is then killed. If None, there is no
            limit, and the reward runs in this process.
    """

    def score(
        completions: list[Any],
        answer: list[str],
        completion_ids: list[list[int]],
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> Scores:
        before = verifier_losses()
        scores: Scores
        if reward.reads == "tokens":
            scores = reward.of_lengths([len(ids) for ids in completion_ids], limit)
        else:
            scores = score_texts(reward, [last_turn(completion) for completion in completions], answer, seconds)
        if reward.verifies and log_metric is not None:
            _log_losses(before, log_metric)
        # To TRL, NaN is None, "does not apply"; here the whole rollout cannot be scored, which inf marks.
        return [math.inf if isinstance(x, float) and math.isnan(x) else x for x in scores]

    score.__name__ = reward.name
    score.range = reward.range  # type: ignore[attr-defined]
    return score


def _log_losses(before: tuple[int, int], log_metric: Callable[[str, float], None]) -> None:
    # TRL averages over processes; multiplied by their number, this is the sum.
    processes = PartialState().num_processes
    for name, earlier, now in zip(("timeouts", "crashes"), before, verifier_losses(), strict=True):
        log_metric(f"pods/verifier_{name}", float((now - earlier) * processes))
