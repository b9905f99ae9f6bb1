"""The trainer of a run, built from a recipe: it publishes each checkpoint at once and complete."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PrinterCallback, Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from trl import ModelConfig, get_peft_config

from ..engines.trl import PODSTrainer
from ..engines.trl.compat import replacing
from ..engines.trl.config import PODSConfig, check_prompts
from ..loading.policy import load_options
from ..loading.prepare import Prepared
from ..loading.turns import TurnReader
from ..policies import policy_path
from ..recipe import Recipe
from ..recipe.recipe import checkpoint_keys
from ..runs.checkpoints import clean, prune, publish, staging
from .arguments import config_arguments
from .checks import as_recipe_errors
from .rewards import reward_functions


def build_trainer(recipe: Recipe, prepared: Prepared, output_dir: Path) -> RunTrainer:
    """Build the trainer of a recipe, with policy, rewards and data; it does not start training.

    Args:
        recipe: a checked recipe.
        prepared: from `prepare`, for this recipe.
        output_dir: the folder for TRL's checkpoints.
    """
    task = prepared.task
    with as_recipe_errors(recipe):
        arguments = config_arguments(recipe)
        model = ModelConfig(**recipe.model_arguments())
        options = load_options(recipe)
        quantization = options.pop("quantization_config", None)  # TRL expects it separately
        no_pickle = {"use_safetensors": True}
        arguments["model_init_kwargs"] = dict(arguments.get("model_init_kwargs") or {}) | options | no_pickle
        config = PODSConfig(str(output_dir), **arguments, reward_weights=list(task.rewards.values()))
        check_prompts(config, len(task.train))  # again in the trainer, but here before a model loads
        turns = TurnReader(prepared.tokenizer, prepared.render_options)
        trainer = RunTrainer(
            model=policy_path(str(model.model_name_or_path)),
            reward_funcs=reward_functions(recipe, task, turns),
            args=config,
            train_dataset=task.train,
            processing_class=prepared.tokenizer,
            quantization_config=quantization,
            peft_config=get_peft_config(model),
            tools=list(task.tools) or None,
            environment_factory=task.new_environment if task.environment_factory else None,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.recipe_keys = checkpoint_keys(recipe.values)
        return trainer


class RunTrainer(PODSTrainer):
    """The trainer of a run: its checkpoints appear at once and complete, with a manifest of hashes.

    All processes write under ``.saving/``, the first publishes the folder, then the older ones are pruned. TRL decides
    their content.
    """

    recipe_keys: Mapping[str, Any] = MappingProxyType({})  # of the recipe, for manifests
    contents: Mapping[str, Any] = MappingProxyType({})  # of what the recipe names, for manifests

    def log_evaluation(self, row: Mapping[str, Any]) -> None:
        """Log the numbers of a row of ``evals.jsonl``, under names that trackers show as ``eval/accuracy``.

        `eval_train_seconds` is the training clock; `eval_seconds` is how long the evaluation took. TRL's own `log`
        would also log and clear the metrics of a step that still runs.
        """
        numbers = {}
        for name, value in row.items():
            if name == "step" or not isinstance(value, (int, float)) or not math.isfinite(value):
                continue
            if name == "seconds":
                numbers["eval_train_seconds"] = value
            elif name.startswith("eval_"):
                numbers[name] = value
            else:
                numbers[f"eval_{name}"] = value
        logs_next = self.control.should_log  # `log` resets it, and this may come before the log of a step
        Trainer.log(self, numbers)
        self.control.should_log = logs_next

    def publish_folder(self, target: Path, write: Callable[[Path], None]) -> None:
        """Have every process write its part of a folder, then publish the complete folder with a manifest.

        If a process cannot write, the error is raised there and ``target`` is unchanged.

        Args:
            target: ``checkpoints/checkpoint-4``, ``checkpoints/final``.
            write: writes the process's part into the given folder, which exists.
        """
        accelerator = self.accelerator
        publishes = self.args.should_save
        manifest = {
            "step": self.state.global_step,
            "processes": accelerator.num_processes,
            "recipe": {"keys": dict(self.recipe_keys)},
            "contents": dict(self.contents),
        }
        # Each wait separates what one process does from what all need: the folder, their parts, the published folder.
        try:
            if publishes:
                clean(target.parent)
                staging(target).mkdir(parents=True)
            accelerator.wait_for_everyone()
            write(staging(target))
            accelerator.wait_for_everyone()
            if publishes:
                publish(target, manifest)
        except BaseException:
            if publishes:
                clean(target.parent)  # free the space of a half-written folder
            raise
        accelerator.wait_for_everyone()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        save = super()._save_checkpoint
        target = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")

        def write(folder: Path) -> None:
            # TRL writes in the output folder, which is replaced by .saving/.
            staged = replacing(self, _get_output_dir=lambda trial: str(folder.parent))
            with staged, _caching_as_loaded(self.accelerator.unwrap_model(self.model)):
                save(model, trial)
            if self.args.should_save:  # a pickle, which nothing reads: config.yaml has the settings
                (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)

        self.publish_folder(target, write)
        if self.args.should_save:
            prune(target.parent, self.args.save_total_limit or 0)


def _caching_as_loaded(policy: Any) -> AbstractContextManager[None]:
    """Save `use_cache` as the policy generates: transformers' trainer turns it off in the configuration to train."""
    as_loaded = getattr(getattr(policy, "generation_config", None), "use_cache", True)
    return replacing(policy.config, use_cache=as_loaded)


def save_policy(trainer: PODSTrainer, folder: Path) -> None:
    """Write policy and tokenizer as safetensors and JSON. Call it on every process; the first one writes.

    Sharded weights (FSDP2, ZeRO-3) are gathered in the first process's memory. For LoRA, only the adapter is written.

    Args:
        folder: made if missing; files of the same names are replaced.
    """
    is_divided = trainer._dist.is_fsdp or trainer._dist.is_zero3
    # None: the model's own
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if is_divided else None
    if trainer.is_world_process_zero():
        policy = trainer.accelerator.unwrap_model(trainer.model)
        if weights:  # tied weights were gathered as separate tensors
            for tied in getattr(policy, "all_tied_weights_keys", ()):
                weights.pop(tied, None)
        with _caching_as_loaded(policy):
            policy.save_pretrained(folder, state_dict=weights)
        trainer.processing_class.save_pretrained(folder)
