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
from peft import PeftConfig, inject_adapter_in_model
from torch.nn import Linear
from transformers import AutoConfig, AutoModelForCausalLM
from trl import ModelConfig, get_peft_config

from ..engines.trl.config import PODSConfig
from ..engines.trl.refusals import lossy_cast
from ..engines.trl.trainer import PODSTrainer
from ..errors import UserError
from ..policies.files import policy_path
from ..policies.loading import has_bf16, load_options, load_tokenizer
from ..recipe import Recipe
from ..recipe.reading import short
from ..recipe.recipe import checkpoint_keys
from ..rewards import Reward, binarise
from ..rewards import score as score_texts
from ..rewards.verifier import verifier_losses
from ..sandbox.scores import RewardFailure, Scores
from ..tasks import Task, conversation_text, last_turn

RewardFunction = Callable[..., Scores]

_NO_PICKLE = {"use_safetensors": True}
# A run writes its own files; TRL writes only what the recipe sets.
_QUIET = {"report_to": "none", "disable_tqdm": True}


def build_trainer(recipe: Recipe, task: Task, output_dir: Path) -> PODSTrainer:
    """Build the trainer of a recipe, with policy, tokenizer, rewards and data; it does not start training.

    Args:
        recipe: a checked recipe.
        task: the task to train on.
        output_dir: the folder for TRL's checkpoints.
    """
    with _as_recipe_errors(recipe):
        return _build(recipe, task, output_dir)


def _build(recipe: Recipe, task: Task, output_dir: Path) -> PODSTrainer:
    arguments = engine_arguments(recipe)
    model = ModelConfig(**recipe.model_arguments())
    path = policy_path(str(model.model_name_or_path))
    options = load_options(recipe)
    quantization = options.pop("quantization_config", None)  # TRL expects it separately
    arguments["model_init_kwargs"] = dict(arguments.get("model_init_kwargs") or {}) | options | _NO_PICKLE
    if arguments.get("answer_reward") is None and task.answer in task.rewards:
        arguments["answer_reward"] = task.answer
    adapter = get_peft_config(model)
    if adapter is not None:
        check_adapter(adapter, path, model.model_revision)
    trainer = PODSTrainer(
        model=path,
        reward_funcs=reward_functions(recipe, task),
        args=PODSConfig(str(output_dir), **arguments, reward_weights=list(task.rewards.values())),
        train_dataset=task.train,
        processing_class=load_tokenizer(path, model.model_revision),
        quantization_config=quantization,
        peft_config=adapter,
        tools=list(task.tools) or None,
        environment_factory=task.environment_factory,
    )
    if doubt := lossy_cast(trainer):
        raise UserError(doubt)
    trainer.recipe_keys = checkpoint_keys(recipe.values)
    return trainer


@contextmanager
def _as_recipe_errors(recipe: Recipe) -> Iterator[None]:
    """Turn an error of TRL, transformers or peft about a value into a UserError of one line, with the cause."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, ImportError, NotImplementedError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        keys = [key for key in recipe.given if re.search(rf"\b{key}\b", said)] or list(recipe.given)
        raise UserError(
            f"{recipe.source}: the trainer rejects this recipe: {short(said, 400)} Check {', '.join(keys[:20])}."
        ) from error


def check_adapter(adapter: PeftConfig, path: str, revision: str = "main") -> None:
    """Raise UserError if an adapter names layers that the policy does not have; no weights are loaded."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, revision=revision))
    layers = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, Linear)}
    try:
        inject_adapter_in_model(adapter, model)
    except ValueError as error:
        raise UserError(
            f"lora_target_modules = {adapter.target_modules}: {short(str(error), 200)} Expected some of "
            f"{', '.join(sorted(layers - {'lm_head'}))}, or all-linear."
        ) from error


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
    """Return the task's rewards in TRL's signature, in the task's order, with the recipe's settings.

    Raises UserError for an unknown reward, or, with `task_binary`, for a reward of unknown range.
    """
    return [
        trl_reward(
            task.reward(name),
            limit=recipe.values["max_completion_length"],
            buffer=recipe.values["overlong_buffer"],
            binary=recipe.values["task_binary"],
            seconds=recipe.values["reward_seconds"],
        )
        for name in task.rewards
    ]


def trl_reward(
    reward: Reward,
    *,
    limit: int,
    buffer: int | None = None,
    binary: float | None = None,
    seconds: float | None = None,
) -> RewardFunction:
    """Return a reward in TRL's signature: it takes completions and the `answer` column and returns a list of floats.

    A reward that uses verifier processes logs the answers whose verification timed out or crashed. A user's reward
    scores each completion separately; an error or timeout gives a RewardFailure, handled as `reward_errors` says.

    Args:
        limit: most tokens of a completion, for `overlong`.
        buffer: tokens before the limit over which the penalty of `overlong` grows; None: a fifth of it.
        binary: share of the reward's range from which a score counts as 1, below it as 0; None: scores stay.
        seconds: limit of a user's reward for one completion, in a process that is then killed; None: no limit, in this
            process.
    """
    if binary is not None:
        binarise(reward, [], binary)  # refuse an unknown range before anything is generated

    def score(
        completions: list[Any],
        answer: list[str],
        completion_ids: list[list[int]],
        log_metric: Callable[[str, float], None] | None = None,
        environments: list[Any] | None = None,
        **_: Any,
    ) -> Scores:
        before = verifier_losses()
        scores: Scores
        if reward.reads == "tokens":
            scores = reward.of_lengths([len(ids) for ids in completion_ids], limit, buffer)
        elif reward.reads == "messages":
            of_each = environments or [None] * len(completions)
            texts = [conversation_text(*given) for given in zip(completions, of_each, strict=True)]
            scores = score_texts(reward, texts, answer, seconds)
        else:
            scores = score_texts(reward, [last_turn(completion) for completion in completions], answer, seconds)
        if reward.verifies and log_metric is not None:
            _log_losses(before, log_metric)
        if binary is not None:
            scores = [x if isinstance(x, RewardFailure) else binarise(reward, [x], binary)[0] for x in scores]
        # To TRL, NaN is None, "does not apply"; here the whole rollout cannot be scored, which inf marks.
        return [math.inf if isinstance(x, float) and math.isnan(x) else x for x in scores]

    score.__name__ = reward.name
    score.range = reward.range if binary is None else (0.0, 1.0)  # type: ignore[attr-defined]
    return score


def _log_losses(before: tuple[int, int], log_metric: Callable[[str, float], None]) -> None:
    # TRL averages over processes; multiplied by their number, this is the sum.
    processes = PartialState().num_processes
    for name, earlier, now in zip(("timeouts", "crashes"), before, verifier_losses(), strict=True):
        log_metric(f"pods/verifier_{name}", float((now - earlier) * processes))
