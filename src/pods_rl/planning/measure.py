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
from ..loading.prepare import prepare
from ..recipe import Recipe
from ..training.run import device_line
from ..training.trainer import build_trainer
from .plan import Plan, decide, describe
from .prices import Setting, Step, StepWork, fit_prices, settings_to_compare, to_measure
from .signal import Candidate, Pool, simulate

if TYPE_CHECKING:
    from ..engines.trl import PODSTrainer

_FINALISTS = 3  # timed next to plain GRPO
_MEASURING = 0.4  # of the seconds; the rest times the best settings
_LEAST_ROUNDS = 2
_MOST_ROUNDS = 60
# No step moves the policy, ends the schedule or writes a file, and each trains one generation batch once.
_STILL = {
    "learning_rate": 0.0, "max_steps": 10**6, "max_seconds": None, "save_seconds": None, "save_strategy": "no",
    "report_to": "none", "log_completions": False, "push_to_hub": False, "lr_scheduler_type": "constant",
    "logging_strategy": "steps", "logging_steps": 1, "dynamic_sampling": False, "num_iterations": 1,
    "selection": "prompt", "num_prompts": None,
    "generation_batch_size": None, "steps_per_generation": None,
}  # fmt: skip
_UNSET = ("num_train_epochs", "save_steps", "lr_scheduler_kwargs", "warmup_steps")


def plan_recipe(recipe: Recipe, seconds: float, *, show: Callable[[str], None] = lambda line: None) -> Plan:
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
    values = recipe.every_value()
    rows = recipe.batch_plan().rows_per_generation
    m = values["num_generations"]
    settings = settings_to_compare(Setting(values["num_rollouts"] or m, m), rows)
    set_threads(recipe.run_settings()["threads"])
    show("loading the policy and the task")
    with TemporaryDirectory(prefix="pods-plan-") as folder:
        # Built for the most rollouts, so that what their memory needs shows at once.
        still = standing_still(recipe, max(settings, key=lambda setting: setting.n))
        prepared = prepare(still)
        trainer = build_trainer(still, prepared, Path(folder))
        meter = Meter(trainer, values.get("num_iterations") or 1, show)
        device = device_line(trainer).partition(";")[0]
        facts = {"plan": f"{recipe.name}: {prepared.task.name} {prepared.task.version}, {device}"}
        simulated = partial(simulate, rows=rows, rule=trainer.args.rule)
        plan: Plan = meter.run(_survey(meter, settings, seconds, simulated, facts))
    return plan


def _survey(
    meter: Meter, settings: Sequence[Setting], seconds: float, simulated: partial[Candidate], facts: dict[str, str]
) -> Generator[Setting, None, Plan]:
    """Yield the settings that show the prices, then plain GRPO and the best; return the plan."""
    yield from meter.rounds(to_measure(settings), _MEASURING * seconds, "measuring what a step costs")
    prices = fit_prices(list(meter.steps.values()))
    pool = Pool(list(meter.rewards.values()))
    if not len(pool.rewards):
        raise UserError("No measured rollout has a reward. Look for the reason with: pods train --max_steps 1")
    facts |= describe(pool, prices)
    mean_tokens = sum(meter.tokens) / len(meter.tokens)
    facts["completions"] = f"mean {mean_tokens:.0f} tokens, longest {max(meter.tokens)}"
    n, distinct_share = max(meter.distinct.items())
    facts["prefixes"] = f"{distinct_share:.0%} of the tokens of {n} rollouts are distinct"
    simulated = partial(simulated, pool=pool, prices=prices)
    candidates = [simulated(setting) for setting in settings]
    grpo = candidates[0]
    best = sorted(candidates[1:], key=lambda candidate: candidate.speed, reverse=True)[:_FINALISTS]
    finalists = [candidate.setting for candidate in (grpo, *best)]
    yield from meter.rounds(finalists, (1 - _MEASURING) * seconds, "timing the best")
    timed = []
    for candidate in candidates:
        steps = meter.steps.get(candidate.setting, [])
        timed.append(replace(candidate, times=tuple(step.seconds for step in steps)))
    return decide(timed, pool, simulated, facts)


def standing_still(recipe: Recipe, setting: Setting) -> Recipe:
    """Return a recipe whose steps do not move the policy, built for a setting."""
    steps = recipe.batch_plan().steps_per_generation
    still = _STILL | setting.keys | {"gradient_accumulation_steps": steps}
    keys = recipe.every_value()
    changes = {}
    for key, value in still.items():
        if key in keys:
            changes[key] = value

    def changed(values: Mapping[str, Any]) -> Mapping[str, Any]:
        every = {**values, **changes}
        for key in _UNSET:
            every.pop(key, None)
        return MappingProxyType(every)

    return replace(recipe, values=changed(recipe.values), given=changed(recipe.given))


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
        self._trainer = trainer
        self._passes = passes
        self._show = show
        self.steps: dict[Setting, list[Step]] = {}
        self.rewards: dict[str, list[float]] = {}
        self.tokens: list[int] = []
        self.distinct: dict[int, float] = {}
        self._schedule: Iterator[Setting] = iter(())
        self._setting: Setting | None = None
        self._result: Any = None  # of the schedule
        self._part = "measuring"  # of the schedule, for `show`
        self._part_seconds = 0.0
        self._part_started = 0.0

    def run(self, schedule: Iterator[Setting]) -> Any:
        """Train through a schedule, which may depend on earlier steps; return what it returns."""
        self._schedule = schedule
        self._trainer.add_callback(self)
        self._trainer.train()
        return self._result

    def rounds(self, settings: Sequence[Setting], seconds: float, part: str = "measuring") -> Iterator[Setting]:
        """Yield the settings in alternating rounds; the first round warms up and is dropped.

        Args:
            settings: of a round.
            seconds: after which no new round begins, once there were enough.
            part: what this is, as progress says it.
        """
        started = time.perf_counter()
        self._part = part
        self._part_seconds = seconds
        self._part_started = started
        yield from settings
        self.steps = {}
        for done in range(_MOST_ROUNDS):
            if done >= _LEAST_ROUNDS and time.perf_counter() - started >= seconds:
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
        all_seconds = 0.0
        for key, value in logs.items():
            if key.startswith("pods/seconds/"):
                all_seconds += value
        generation = logs.get("pods/seconds/rollout", 0.0) + logs.get("pods/seconds/reward", 0.0)
        update = (all_seconds - generation) * self._passes
        step = Step(self._record_rollouts(), generation, update)
        self.steps.setdefault(self._setting, []).append(step)
        self.distinct[self._setting.n] = logs["pods/distinct_tokens"]
        elapsed = time.perf_counter() - self._part_started
        progress = f"{elapsed:.0f} s"
        if elapsed < self._part_seconds:
            progress += f" of {self._part_seconds:.3g} s"
        else:
            progress += ", until each setting has enough steps"
        self._show(f"{self._part}: {self._setting.label}, {step.seconds:.3g} s per step; {progress}")
        self._next(control)

    def _next(self, control: TrainerControl) -> None:
        try:
            self._setting = next(self._schedule)
        except StopIteration as end:
            self._setting = None
            self._result = end.value
            control.should_training_stop = True
            return
        self._trainer.measure(self._setting.n, self._setting.m)

    def _record_rollouts(self) -> StepWork:
        """Record the rewards and lengths of the step's rollouts; return what the step worked on."""
        record = self._trainer.rollouts
        assert record is not None
        assert record.advantages is not None
        self.tokens += record.completion_tokens
        prompts, n = record.rewards.shape
        for group, rewards in enumerate(record.scored_rewards().tolist()):
            # A row of the data: prompts can be equal where an environment sets the question.
            row = str(record.inputs[group * n])
            self.rewards.setdefault(row, []).extend(rewards)
        rows_with_gradient = int((record.advantages != 0).sum())
        return StepWork(prompts, record.rewards.numel(), rows_with_gradient)
