"""Plan a recipe by measuring real steps of its trainer, each with its own n and m, at a learning rate of 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..distributed import get_world_size
from ..distributed.processes import quiet_libraries, set_threads
from ..errors import UserError
from ..planning import plan
from ..recipe import Recipe
from .run import device_line

if TYPE_CHECKING:
    from ..engines.trl import PODSTrainer

_FINALISTS = 3  # timed next to plain GRPO
_MEASURING = 0.4  # of the seconds; the rest times the best settings
_LEAST, _MOST = 2, 60  # rounds of steps
# No step moves the policy, ends the schedule or writes a file, and each trains one generation batch once.
_STILL = {
    "learning_rate": 0.0, "max_steps": 10**6, "max_seconds": None, "save_seconds": None, "save_strategy": "no",
    "report_to": "none", "log_completions": False, "push_to_hub": False, "lr_scheduler_type": "constant",
    "logging_strategy": "steps", "logging_steps": 1, "dynamic_sampling": False, "num_iterations": 1,
    "generation_batch_size": None, "steps_per_generation": None,
}  # fmt: skip
_UNSET = ("num_train_epochs", "save_steps", "lr_scheduler_kwargs", "warmup_steps")


def plan_recipe(recipe: Recipe, seconds: float, *, show: Callable[[str], None] = lambda line: None) -> plan.Plan:
    """Measure a recipe with its own policy, task, engine and device, and return the plan.

    Args:
        recipe: a checked recipe.
        seconds: for measuring and timing, after loading. Each setting gets two steps even if that takes longer.
        show: called with a line about the progress.
    """
    if get_world_size() > 1:
        raise UserError(f"pods plan runs as one process: got WORLD_SIZE = {get_world_size()}. Start it alone.")
    recipe.check_installed()
    quiet_libraries()
    from .trainer import build_trainer, fitted_task

    values, rows = recipe.every_value(), recipe.batch_plan().rows_per_generation
    m = values["num_generations"]
    settings = plan.settings_to_compare(plan.Setting(values["num_rollouts"] or m, m), rows)
    set_threads(recipe.run_settings()["threads"])
    show("loading the policy and the task")
    with TemporaryDirectory(prefix="pods-plan-") as folder:
        still = standing_still(recipe, max(settings, key=lambda one: one.n))
        task, _ = fitted_task(still)
        trainer = build_trainer(still, task, Path(folder))
        meter = Meter(trainer, values.get("num_iterations") or 1, show)
        facts = {"plan": f"{recipe.name}: {task.name} {task.version}, {device_line(trainer).split(';')[0]}"}
        simulated = partial(plan.simulate, rows=rows, rule=trainer.args.rule)
        found: plan.Plan = meter.run(_survey(meter, settings, seconds, simulated, facts))
    return found


def _survey(
    meter: Meter, settings: Sequence[plan.Setting], seconds: float, simulated: plan.Simulated, facts: dict[str, str]
) -> Generator[plan.Setting, None, plan.Plan]:
    """Yield the settings that show the prices, then plain GRPO and the best; return the plan."""
    yield from meter.rounds(plan.to_measure(settings), _MEASURING * seconds)
    prices, pool = plan.fit_prices([*meter.steps.values()]), plan.Pool([*meter.rewards.values()])
    if not len(pool.rewards):
        raise UserError("No measured rollout has a reward. Look for the reason with: pods train --max_steps 1")
    facts |= plan.describe(pool, prices)
    n, share = max(meter.distinct.items())
    facts["completions"] = f"mean {sum(meter.tokens) / len(meter.tokens):.0f} tokens, longest {max(meter.tokens)}"
    facts["prefixes"] = f"{share:.0%} of the tokens of {n} rollouts are distinct"
    simulated = partial(simulated, pool=pool, prices=prices)
    candidates = [simulated(setting) for setting in settings]
    best = sorted(candidates[1:], key=lambda one: -one.rate)[:_FINALISTS]
    yield from meter.rounds([one.setting for one in (candidates[0], *best)], (1 - _MEASURING) * seconds)
    timed = {setting: tuple(step.seconds for step in steps) for setting, steps in meter.steps.items()}
    candidates = [replace(one, times=timed.get(one.setting, ())) for one in candidates]
    return plan.decide(candidates, pool, simulated, facts)


def standing_still(recipe: Recipe, setting: plan.Setting) -> Recipe:
    """Return a recipe whose steps do not move the policy, built for a setting."""
    known, steps = recipe.every_value(), recipe.batch_plan().steps_per_generation
    changed = _STILL | setting.keys | {"gradient_accumulation_steps": steps}
    changed = {key: value for key, value in changed.items() if key in known}
    values, given = (
        MappingProxyType({key: value for key, value in {**some, **changed}.items() if key not in _UNSET})
        for some in (recipe.values, recipe.given)
    )
    return replace(recipe, values=values, given=given)


class Meter(TrainerCallback):
    """Runs a trainer's steps with an n and m for each, and measures them.

    Each step has new prompts; the number of rows stays. `steps` holds the latest rounds, `rewards` the rewards of each
    prompt, `tokens` the length of each completion, and `distinct` the share of distinct prefixes by n.

    Args:
        trainer: of a single process and a `standing_still` recipe.
        passes: how often training passes over its rows (`num_iterations`).
        show: called with a line about each step.
    """

    def __init__(self, trainer: PODSTrainer, passes: int = 1, show: Callable[[str], None] = lambda line: None) -> None:
        self._trainer, self._passes, self._show = trainer, passes, show
        self._generate = trainer._generate_and_score_completions
        self.steps: dict[plan.Setting, list[plan.Step]] = {}
        self.rewards: dict[int, list[float]] = {}
        self.tokens: list[int] = []
        self.distinct: dict[int, float] = {}
        self._schedule: Iterator[plan.Setting] = iter(())
        self._setting: plan.Setting | None = None
        self._found: Any = None
        self._work = plan.StepWork(0, 0, 0)

    def run(self, schedule: Iterator[plan.Setting]) -> Any:
        """Train through a schedule, which may depend on earlier steps; return what it returns."""
        self._schedule = schedule
        self._trainer.add_callback(self)
        self._trainer._generate_and_score_completions = self._generate_as_set  # type: ignore[method-assign]
        self._trainer.train()
        return self._found

    def rounds(self, settings: Sequence[plan.Setting], seconds: float) -> Iterator[plan.Setting]:
        """Yield the settings in alternating rounds; the first round warms up and is dropped."""
        started = time.perf_counter()
        yield from settings
        self.steps = {}
        for done in range(_MOST):
            if done >= _LEAST and time.perf_counter() - started >= seconds:
                return
            yield from settings

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._next(control)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        logs: Mapping[str, float] | None = None, **_: Any,
    ) -> None:  # fmt: skip
        if self._setting is None or not logs or "train_runtime" in logs:
            return
        seconds = {key: value for key, value in logs.items() if key.startswith("pods/seconds/")}
        generation = sum(seconds.get(f"pods/seconds/{phase}", 0.0) for phase in ("rollout", "reward"))
        step = plan.Step(self._work, generation, (sum(seconds.values()) - generation) * self._passes)
        self.steps.setdefault(self._setting, []).append(step)
        self.distinct[self._setting.n] = logs["pods/distinct_tokens"]
        self._show(f"{self._setting.label}: {step.seconds:.3g} s a step")
        self._next(control)

    def _next(self, control: TrainerControl) -> None:
        try:
            self._setting = next(self._schedule)
        except StopIteration as end:
            self._setting, self._found, control.should_training_stop = None, end.value, True
            return
        self._trainer.num_generations = self._setting.m
        for key, value in self._setting.keys.items():
            setattr(self._trainer.args, key, value)

    def _generate_as_set(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate for prompts of this setting instead of TRL's, and record the rewards."""
        trainer, setting = self._trainer, self._setting
        assert setting is not None
        numbers = trainer._dynamic.draw(len(inputs) // setting.m)
        rows = [trainer.train_dataset[number] for number in numbers]
        output = self._generate([dict(row) for row in rows for _ in range(setting.m)])
        record = trainer.rollouts
        assert record is not None
        assert record.advantages is not None
        self.tokens += record.completion_tokens
        for number, rewards in zip(numbers, record.scored_rewards().tolist(), strict=True):
            self.rewards.setdefault(number, []).extend(rewards)
        self._work = plan.StepWork(len(numbers), record.rewards.numel(), int((record.advantages != 0).sum()))
        return output
