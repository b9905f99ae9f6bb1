"""Measure real steps of a recipe's trainer, each with its own prompts and rollouts, at a learning rate of 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..distributed import get_world_size
from ..distributed.processes import quiet_libraries, set_threads
from ..engines.trl.config import check_contradictions
from ..errors import UserError
from ..loading.prepare import prepare
from ..recipe import Recipe
from ..selection import BATCH_RULES, RULES
from ..training.run import device_line
from ..training.trainer import build_trainer
from .plan import Plan, Setting, Step

if TYPE_CHECKING:
    from ..engines.trl import PODSTrainer

_LEAST_ROUNDS = 2
_MOST_ROUNDS = 60
_GIB = 2**30
# No step moves the policy, ends the schedule or writes a file, and each trains one generation batch once.
_STILL = {
    "learning_rate": 0.0, "max_steps": 10**6, "max_seconds": None, "save_seconds": None, "save_strategy": "no",
    "report_to": "none", "log_completions": False, "push_to_hub": False, "lr_scheduler_type": "constant",
    "logging_strategy": "steps", "logging_steps": 1, "dynamic_sampling": False, "num_iterations": 1,
    "generation_batch_size": None, "steps_per_generation": None,
}  # fmt: skip
_UNSET = ("num_train_epochs", "save_steps", "lr_scheduler_kwargs", "warmup_steps")


def settings_to_measure(own: Setting, rows: int, values: Mapping[str, Any]) -> list[Setting]:
    """Return the settings that train `rows` rows a step, plain GRPO with the recipe's m first.

    Twice and four times as many rollouts, by selection of each prompt and over the batch, and the recipe's own
    setting. A rule of one kind of selection alone is measured with that. Selection over the batch is not measured if
    other keys of the recipe contradict it. `values` are those of every key.

    >>> from pods_rl.recipe import load_recipe
    >>> found = settings_to_measure(Setting(2, 32, 8, "prompt"), 16, load_recipe("tiny-pods").every_value())
    >>> [(setting.selection, setting.prompts, setting.n) for setting in found]
    [('none', 2, 8), ('prompt', 2, 16), ('prompt', 2, 32), ('batch', 4, 8), ('batch', 8, 8)]
    """
    rule = values["rule"]
    m = own.m
    prompts = rows // m
    settings = [Setting(prompts, m, m, "none")]
    if rule in RULES or own.selection == "prompt":
        settings += [Setting(prompts, times * m, m, "prompt") for times in (2, 4)]
    if rule in BATCH_RULES or own.selection == "batch":
        for times in (2, 4):
            setting = Setting(times * prompts, m, m, "batch")
            config: Any = SimpleNamespace(**{**values, **setting.keys})
            with suppress(UserError):
                check_contradictions(config)
                settings.append(setting)
    if own not in settings:
        settings.append(own)
    return settings


def own_setting(recipe: Recipe) -> Setting:
    """Return the setting of a recipe."""
    values = recipe.every_value()
    m = values["num_generations"]
    n = values["num_rollouts"] or m
    plan = recipe.batch_plan()
    keeps_all = values["selection"] == "prompt" and n == m
    selection = "none" if keeps_all else values["selection"]
    return Setting(plan.prompts_per_generation, n, m, selection)


def plan_recipe(recipe: Recipe, seconds: float, *, show: Callable[[str], None] = lambda line: None) -> Plan:
    """Measure a recipe with its own policy, task, engine and device, and return what steps cost.

    Args:
        recipe: a checked recipe.
        seconds: for measuring, after loading. Each setting gets two steps even if that takes longer.
        show: called with a line about the progress.
    """
    if get_world_size() > 1:
        raise UserError(f"pods plan runs as one process: got WORLD_SIZE = {get_world_size()}. Start it alone.")
    recipe.check_installed()
    quiet_libraries()
    values = recipe.every_value()
    rows = recipe.batch_plan().rows_per_generation
    settings = settings_to_measure(own_setting(recipe), rows, values)
    set_threads(recipe.run_settings()["threads"])
    show("loading the policy and the task")
    with TemporaryDirectory(prefix="pods-plan-") as folder:
        # Built for the most rollouts, so that what their memory needs shows at once.
        still = standing_still(recipe, max(settings, key=lambda setting: setting.prompts * setting.n))
        prepared = prepare(still)
        trainer = build_trainer(still, prepared, Path(folder))
        meter = Meter(trainer, values.get("num_iterations") or 1, show)
        meter.run(settings, seconds)
        device = device_line(trainer)
    facts = {"plan": f"{recipe.name}: {prepared.task.name} {prepared.task.version}, {device}", **meter.facts()}
    return Plan(rows, meter.steps, facts, meter.memory)


def standing_still(recipe: Recipe, setting: Setting) -> Recipe:
    """Return a recipe whose steps do not move the policy, built for a setting."""
    steps = recipe.batch_plan().steps_per_generation
    still = _STILL | setting.keys | {"gradient_accumulation_steps": steps}
    keys = recipe.every_value()
    changes = {key: value for key, value in still.items() if key in keys}

    def changed(values: Mapping[str, Any]) -> Mapping[str, Any]:
        every = {**values, **changes}
        for key in _UNSET:
            every.pop(key, None)
        return MappingProxyType(every)

    return replace(recipe, values=changed(recipe.values), given=changed(recipe.given))


class Meter(TrainerCallback):
    """Runs a trainer's steps with a setting for each, and measures them.

    Each step has new prompts; the number of rows stays. `steps` has a step of each round, `memory` the peak of a GPU.

    Args:
        trainer: of a single process and a `standing_still` recipe.
        passes: how often training passes over its rows (`num_iterations`).
        show: called with a line about each step.
    """

    def __init__(self, trainer: PODSTrainer, passes: int, show: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._passes = passes
        self._show = show
        self.steps: dict[Setting, list[Step]] = {}
        self.memory: dict[Setting, float] = {}
        self._rewards: list[torch.Tensor] = []  # of each step, [P, N]
        self._tokens: list[int] = []  # of each completion
        self._distinct: dict[int, float] = {}  # by n, the share of a step's tokens that prefix trees compute
        self._schedule: Iterator[Setting] = iter(())
        self._setting: Setting | None = None
        self._seconds = 0.0
        self._started = 0.0

    def run(self, settings: Sequence[Setting], seconds: float) -> None:
        """Train in rounds of these settings; the first warms up. After `seconds` and enough rounds no other begins."""
        self._seconds = seconds
        self._schedule = self._rounds(settings)
        self._trainer.add_callback(self)
        self._trainer.train()

    def _rounds(self, settings: Sequence[Setting]) -> Iterator[Setting]:
        self._started = time.perf_counter()
        yield from settings
        self.steps = {}  # the first round warmed up
        for done in range(_MOST_ROUNDS):
            if done >= _LEAST_ROUNDS and time.perf_counter() - self._started >= self._seconds:
                return
            yield from settings

    def facts(self) -> dict[str, str]:
        """Return what the rollouts of all steps show of the policy, as text by name.

        Raises:
            UserError: no rollout has a reward.
        """
        rewards = torch.cat([rewards_PN.flatten() for rewards_PN in self._rewards])
        mean = rewards.nanmean().item()
        if mean != mean:  # NaN, as each reward is
            raise UserError("No measured rollout has a reward. Look for the reason with: pods train --max_steps 1")
        n, distinct = max(self._distinct.items())
        return {
            "rewards": f"mean {mean:.2f} of {len(rewards)} rollouts",
            "completions": f"mean {sum(self._tokens) / len(self._tokens):.0f} tokens, longest {max(self._tokens)}",
            "prefixes": f"{distinct:.0%} of the tokens of {n} rollouts are distinct",
        }

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._next(control)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        logs: Mapping[str, float] | None = None, **_: Any,
    ) -> None:  # fmt: skip
        if self._setting is None or not logs or "train_runtime" in logs:
            return
        setting = self._setting
        of_phases = {key: value for key, value in logs.items() if key.startswith("pods/seconds/")}
        generation = of_phases.get("pods/seconds/rollout", 0.0) + of_phases.get("pods/seconds/reward", 0.0)
        # The measured steps pass once over their rows (`_STILL`). More passes do not generate again.
        seconds = generation + self._passes * (sum(of_phases.values()) - generation)
        record = self._trainer.rollouts
        assert record is not None
        assert record.advantages is not None
        rows_with_signal = int((record.advantages != 0).sum())
        rows = self._trainer.args.generation_batch_size
        assert rows is not None
        self.steps.setdefault(setting, []).append(Step(seconds, 1 - rows_with_signal / rows))
        self._rewards.append(record.scored_rewards())
        self._tokens += record.completion_tokens
        self._distinct[setting.n] = logs["pods/distinct_tokens"]
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated() / _GIB
            self.memory[setting] = max(peak, self.memory.get(setting, 0.0))
        elapsed = time.perf_counter() - self._started
        is_late = elapsed >= self._seconds
        end = ", until each setting has enough steps" if is_late else f" of {self._seconds:.3g} s"
        described = f"{setting.selection}, {setting.prompts} x {setting.n}"
        self._show(f"measuring: {described}, {seconds:.3g} s a step; {elapsed:.0f} s{end}")
        self._next(control)

    def _next(self, control: TrainerControl) -> None:
        self._setting = next(self._schedule, None)
        if self._setting is None:
            control.should_training_stop = True
            return
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # each setting has a peak of its own
        prompts = self._setting.prompts if self._setting.selection == "batch" else None
        self._trainer.measure(self._setting.n, self._setting.m, prompts)
