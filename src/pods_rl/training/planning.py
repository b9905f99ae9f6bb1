"""Plan a recipe by measuring it: which n and m, and whether waves and refilling, have most signal a second here."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..distributed import get_world_size
from ..distributed.processes import quiet_libraries, set_threads
from ..engines.trl.batching import batch_plan
from ..errors import UserError
from ..planning.grid import AUTO, PLANNED, Setting, settings_to_compare
from ..recipe import Origin, Recipe, build_recipe
from ..runs import to_json, write_atomic
from ..runs.files import CONFIG, PLAN, read_mapping
from .inputs import fitted_task, memory_inputs

if TYPE_CHECKING:
    from ..planning.costs import Measured
    from ..planning.plan import Candidate, Plan
    from .measuring import Meter

SECONDS = 120.0
_MEASURING = 0.4  # of the seconds; the rest times the best
_LEAST, _MOST = 2, 60  # rounds of steps
# What measuring needs otherwise than training: no step moves the policy, ends the schedule or writes a file.
_STILL = {
    "learning_rate": 0.0, "max_steps": -1, "max_seconds": None, "save_seconds": None, "save_strategy": "no",
    "report_to": "none", "log_completions": False, "push_to_hub": False, "lr_scheduler_type": "constant",
}  # fmt: skip
_UNSET = ("num_train_epochs", "save_steps", "lr_scheduler_kwargs", "warmup_steps")


def plan_recipe(recipe: Recipe, seconds: float = SECONDS, *, show: Callable[[str], None] = lambda line: None) -> Plan:
    """Measure a recipe with its own policy, task, engine and device, and return the plan.

    Steps are real, except that the policy does not move. The measuring and the timing take `seconds`, and longer where
    two steps of each setting do; loading comes on top.

    Args:
        recipe: a checked recipe; its `num_rollouts` may be auto.
        show: called with a line about the progress, often.

    Raises:
        UserError: several processes; the recipe cannot be used.
    """
    if get_world_size() > 1:
        raise UserError(
            f"A plan is measured by one process: got WORLD_SIZE = {get_world_size()}. Plan without a launcher, and "
            "train with what --write writes."
        )
    recipe.check_installed()
    quiet_libraries()
    from .measuring import Meter
    from .trainer import build_trainer

    settings, notes = settings_that_fit(recipe)
    largest = max(settings, key=lambda setting: setting.num_rollouts)
    set_threads(recipe.run_settings()["threads"])
    show("loads the policy and the task")
    with TemporaryDirectory(prefix="pods-plan-") as folder:
        still = standing_still(recipe, largest)
        task, _ = fitted_task(still)
        trainer = build_trainer(still, task, Path(folder))
        survey = _Survey(settings, seconds, show)
        now = time.process_time if recipe.values.get("clock") == "cpu" else time.perf_counter
        survey.meter = Meter(trainer, survey.schedule(), survey.add, now)
        survey.meter.run()
        return survey.plan(f"{recipe.name}: {task.name} {task.version}, {_device(trainer)}", notes)


def settings_that_fit(recipe: Recipe) -> tuple[list[Setting], list[str]]:
    """Return the settings that fit into memory, and a note on those that do not."""
    values = recipe.every_value()
    try:
        inputs = memory_inputs(values)
    except UserError as error:
        return settings_to_compare(values, recipe.batch_plan()), [f"Memory is not checked: {error}"]
    left: dict[Setting, float] = {}
    limit = _memory(values, on_cpu=inputs.on_cpu)

    def fits(setting: Setting) -> bool:
        changed = {**values, **setting.keys}
        needed = inputs.estimate(changed, batch_plan(changed)).peak
        if needed > limit:
            left[setting] = needed
        return needed <= limit

    settings = settings_to_compare(values, recipe.batch_plan(), fits)
    if not left:
        return settings, []
    least, most = (f"{size / 2**30:.2g} GiB" for size in (min(left.values()), limit))
    return settings, [f"{len(left)} settings are left out: they need {least} or more (estimated) of {most}."]


def _memory(values: Mapping[str, Any], *, on_cpu: bool) -> float:
    """Return the bytes that a run may take: of the device, or of the machine where it trains on the CPU."""
    import psutil
    import torch

    if on_cpu:
        return float(psutil.virtual_memory().available)
    taken = values.get("vllm_gpu_memory_utilization") or 0.3
    colocated = values.get("use_vllm") and values.get("vllm_mode", "colocate") == "colocate"
    return torch.cuda.get_device_properties(0).total_memory * (1 - taken if colocated else 1)


def standing_still(recipe: Recipe, setting: Setting) -> Recipe:
    """Return a recipe whose steps do not move the policy, built for a setting."""
    values, given = (
        {key: value for key, value in ({**some, **_STILL, **setting.keys}).items() if key not in _UNSET}
        for some in (recipe.values, recipe.given)
    )
    return replace(recipe, values=MappingProxyType(values), given=MappingProxyType(given))


def _device(trainer: Any) -> str:
    from .environment import device_line

    return device_line(trainer).split(";")[0]


class _Survey:
    """Chooses which settings are measured and timed, as a schedule that sees what came before."""

    meter: Meter

    def __init__(self, settings: list[Setting], seconds: float, show: Callable[[str], None]) -> None:
        self._settings, self._seconds, self._show = settings, seconds, show
        self._steps: dict[Setting, list[Measured]] = {}
        self._started = 0.0
        self.timed: list[Candidate] = []

    def add(self, setting: Setting, measured: Measured) -> None:
        """Take a measurement."""
        self._steps.setdefault(setting, []).append(measured)
        left = max(self._seconds - (time.perf_counter() - self._started), 0.0)
        self._show(f"{self._stage} {setting.label}: {measured.seconds:.3g} s a step; {left:.0f} s left")

    def schedule(self) -> Iterator[Setting]:
        """Yield settings: those from which prices and pass rates are read, then the best; each in alternating rounds.

        The first step of each is warm-up.
        """
        from ..planning.costs import fit_costs, mean_seconds, relative_error
        from ..planning.plan import finalists, model
        from ..planning.signal import Pool

        self._stage, self._started = "measures", time.perf_counter()
        yield from self._rounds(to_measure(self._settings), _MEASURING * self._seconds)
        self.measured = self._steps
        self._show("models the other settings")
        observed = self.meter.seen.observed(*self.meter.answer_range())
        if not observed:
            raise UserError(
                f"None of the {len(self.meter.seen.prompts)} rollouts that were measured has a reward, so nothing can "
                "be planned. Look at the reward functions: pods train --max_steps 1 logs why."
            )
        self.pool = Pool(observed)
        self.batches, self.costs = self.meter.batches(), fit_costs([*self._steps.values()])
        self.candidates = model(self._settings, self.pool, self.batches, self.costs)
        best = finalists(self.candidates)
        self._stage = "times"
        yield from self._rounds([one.setting for one in best], self._seconds)
        for one in best:
            steps = self._steps[one.setting]
            timed = replace(one, timed=mean_seconds(steps), steps=len(steps), error=relative_error(steps))
            self.timed.append(timed)

    def _rounds(self, settings: list[Setting], until: float) -> Iterator[Setting]:
        yield from settings
        self._steps = {}
        for done in range(_MOST):
            if done >= _LEAST and time.perf_counter() - self._started >= until:
                return
            yield from settings

    def plan(self, what: str, notes: list[str]) -> Plan:
        """Return the plan; what was measured as facts."""
        from ..planning.plan import decide, describe_costs, describe_pool

        seen, spent = self.meter.seen, time.perf_counter() - self._started
        steps = sum(map(len, self.measured.values())), sum(one.steps for one in self.timed)
        facts = {"plan": what, "measured": f"{spent:.0f} s: {steps[0]} steps for prices, {steps[1]} timed"}
        facts |= describe_costs(self.costs) | describe_pool(self.pool)
        facts["tokens"] = f"{_lengths(seen.prompt_tokens)} a prompt, {_lengths(seen.completion_tokens)} a completion"
        self._show("compares")
        return decide(self.candidates, self.timed, self.pool, self.batches, self.costs, facts=facts, notes=notes)


def to_measure(settings: list[Setting]) -> list[Setting]:
    """Return the settings whose steps tell the prices: few and many rollouts, few and many prompts.

    >>> found = to_measure([Setting(n, m) for m in (8, 4) for n in (m, 2 * m, 4 * m, 8 * m)])
    >>> [setting.label for setting in found]
    ['8 -> 8', '32 -> 8', '64 -> 8', '8 -> 4']
    """
    plain = [setting for setting in settings if not setting.rollout_waves and setting.dead_groups == "keep"]
    own = sorted((one for one in plain if one.num_generations == plain[0].num_generations), key=_rollouts)
    least = min(setting.num_generations for setting in plain)
    small = sorted((one for one in plain if one.num_generations == least), key=_rollouts)
    chosen = [own[0], own[len(own) // 2], own[-1], small[min(1, len(small) - 1)]]
    return list(dict.fromkeys(chosen))


def _rollouts(setting: Setting) -> int:
    return setting.num_rollouts


def _lengths(tokens: list[int]) -> str:
    ordered = sorted(tokens)
    return f"{sum(ordered) / len(ordered):.0f} tokens (95 %: {ordered[int(0.95 * (len(ordered) - 1))]})"


# -- recipes with num_rollouts: auto ----------------------------------------------------------------------------------


def with_keys(recipe: Recipe, keys: Mapping[str, Any]) -> Recipe:
    """Return a recipe with the keys of a plan."""
    given = {key: value for key, value in recipe.given.items() if key not in PLANNED} | dict(keys)
    return build_recipe(given, Origin(recipe.source))


class Settled(NamedTuple):
    """A recipe as config.yaml keeps it, and as it trains, which is the same unless the plan may change (plan_every)."""

    kept: Recipe
    trains: Recipe


def settle_auto(recipe: Recipe, output: Path, *, resume: bool, plan: Callable[[Recipe], Plan]) -> Settled:
    """Return a recipe with `num_rollouts: auto` replaced by a plan, which is recorded in the run directory.

    A resumed run keeps the plan that it began with. Other recipes are returned as they are. With `plan_every`
    config.yaml keeps auto, and the m that was planned.

    Args:
        plan: makes the plan of a new run.

    Raises:
        UserError: colocated vLLM, which cannot start twice in a process; no first plan, by which to plan again.
    """
    if recipe.values["num_rollouts"] != AUTO:
        return Settled(recipe, recipe)
    planned = read_mapping(output / PLAN).get("recommended") if resume else _planned(recipe, output, plan)
    every = recipe.values["plan_every"]
    if not isinstance(planned, dict):
        if every:
            raise UserError(
                f"{output / PLAN} is missing or damaged: plan_every = {every} needs its prices. Put the file back, or "
                "start again in another --output."
            )
        stored = read_mapping(output / CONFIG)
        planned = {key: stored[key] for key in PLANNED if key in stored}
    if not every:
        recipe = with_keys(recipe, planned)
        return Settled(recipe, recipe)
    kept, trains = (
        replace(recipe, values=MappingProxyType({**recipe.values, **keys}))
        for keys in ({"num_generations": planned["num_generations"]}, planned)
    )
    return Settled(kept, trains)


def _planned(recipe: Recipe, output: Path, plan: Callable[[Recipe], Plan]) -> dict[str, Any]:
    """Plan, record the plan, and return its keys."""
    if recipe.values.get("use_vllm") and recipe.every_value().get("vllm_mode", "colocate") == "colocate":
        raise UserError(
            "num_rollouts = auto with colocated vLLM: its engine cannot start twice in a process. Run `pods plan "
            "--config RECIPE --write PLANNED.yaml` first, and train PLANNED.yaml."
        )
    import torch

    made = plan(recipe)
    gc.collect()  # the trainer that measured, before another takes its memory
    torch.cuda.empty_cache()
    write_atomic(output / PLAN, to_json(made.record()) + "\n")
    return made.keys
