"""Real steps of a trainer whose policy does not move, each with a setting of its own: what they cost and show."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..engines.trl.compat import standing_in
from ..engines.trl.rollouts import as_text
from ..engines.trl.update import PhaseClock
from ..planning.costs import Measured, Work
from ..planning.grid import Setting
from ..planning.signal import Batches, Observed, observed
from ..rollouts.allocating import Refill

if TYPE_CHECKING:
    from ..engines.trl import PODSTrainer

_SKIPPED = ("left_out", "merged")


@dataclass
class Seen:
    """Rollouts of settings that generate all at once: rewards and texts, and lengths in tokens."""

    prompts: list[int] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    texts: list[int] = field(default_factory=list)
    completion_tokens: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    text_numbers: dict[str, int] = field(default_factory=dict)

    def observed(self, low: float | None, high: float | None) -> list[Observed]:
        """Return the scored rollouts, given the least and the greatest answer reward, None where unknown."""
        return observed(self.prompts, self.answers, self.totals, self.texts, low, high)


class Meter(TrainerCallback):
    """Makes a trainer's generation batches with the settings that a schedule gives, and measures each.

    The trainer's rows a step stay; prompts come in a shuffled order of their own, as many as a setting needs. The
    policy must not move: the learning rate is 0.

    Args:
        trainer: single process; its settings change.
        schedule: the setting of each measurement; it may depend on earlier ones. Training stops at its end.
        measured: called with each setting and its measurement.
        now: the clock.
    """

    def __init__(
        self,
        trainer: PODSTrainer,
        schedule: Iterator[Setting],
        measured: Callable[[Setting, Measured], None],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._trainer, self._schedule, self._measured, self._now = trainer, schedule, measured, now
        trainer._update.clock = PhaseClock(trainer.accelerator.device, now)
        args = trainer.args
        assert args.steps_per_generation is not None
        per_generation = args.steps_per_generation * args.num_iterations
        together = math.lcm(per_generation, args.gradient_accumulation_steps)
        self._steps, self._generations = together // args.gradient_accumulation_steps, together // per_generation
        self._prompts = Refill(args.seed, len(trainer.train_dataset))
        self._generate = trainer._generate_and_score_completions
        self.seen = Seen()
        self._setting: Setting | None = None
        self._begin()

    def run(self) -> None:
        """Train through the schedule."""
        trainer = self._trainer
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)  # behind the callback that times steps
        with standing_in(trainer, _generate_and_score_completions=self._generate_as_set):
            trainer.train()

    def batches(self) -> Batches:
        return batches_of(self._trainer)

    def answer_range(self) -> tuple[float | None, float | None]:
        return answer_range(self._trainer)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._next(control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        rows = self._trainer._update.rows
        self._rows += self._trainer.args.train_batch_size * args.gradient_accumulation_steps
        self._rows -= sum(rows[name] for name in _SKIPPED)
        self._steps_done += 1
        if self._steps_done < self._steps or self._setting is None:
            return
        whole = self._now() - self._started
        generation, reward = self._phases["rollout"], self._phases["reward"]
        parts = (generation, reward, whole - generation - reward)
        work = Work(self._calls, self._asked, self._rollouts, self._groups, self._rows)
        share = 1 / self._generations
        each = Work(**{name: value * share for name, value in vars(work).items()})
        self._measured(self._setting, Measured(each, *(part * share for part in parts)))
        self._next(control)

    def _next(self, control: TrainerControl) -> None:
        self._setting = next(self._schedule, None)
        if self._setting is None:
            control.should_training_stop = True
            return
        trainer = self._trainer
        trainer.num_generations = self._setting.num_generations
        trainer._plan.read(trainer, **self._setting.keys)
        self._begin()

    def _begin(self) -> None:
        self._phases = {"rollout": 0.0, "reward": 0.0}
        self._steps_done = self._calls = self._asked = self._rollouts = self._groups = self._rows = 0
        self._started = self._now()

    def _generate_as_set(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate for prompts of the setting in place of TRL's, and note what was done."""
        trainer, setting = self._trainer, self._setting
        assert setting is not None
        numbers = self._prompts.prompts(len(inputs) // setting.num_generations)
        rows = [trainer.train_dataset[number] for number in numbers]
        clock = trainer._update.clock
        before = dict(clock.seconds)
        output = self._generate([dict(row) for row in rows for _ in range(setting.num_generations)])
        for phase in self._phases:
            self._phases[phase] += clock.seconds[phase] - before[phase]
        self._note(setting, numbers, output)
        return output

    def _note(self, setting: Setting, numbers: list[int], output: dict[str, Any]) -> None:
        trainer, record = self._trainer, self._trainer.rollouts
        assert record is not None
        assert record.advantages is not None
        batches, rollouts = self.batches(), len(record.numbers)
        groups = record.groups[record.advantages.cpu() != 0] if batches.skips else record.groups
        self._groups += len(groups.unique()) * batches.repeats
        self._calls += -(-rollouts // (batches.chunk or rollouts))
        self._asked += len(numbers)
        self._rollouts += rollouts
        if setting.rollout_waves or setting.dead_groups == "refill":
            return  # its groups' sizes depend on rewards, and further prompts came
        seen, n = self.seen, setting.num_rollouts
        seen.prompts += [numbers[number // n] for number in record.numbers]
        seen.answers += trainer._plan.answers(record.rewards_per_func).tolist()
        seen.totals += record.rewards.flatten()[record.numbers].tolist()
        texts = seen.text_numbers
        seen.texts += [texts.setdefault(as_text(text), len(texts)) for text in record.completions]
        seen.completion_tokens += record.completion_tokens
        seen.prompt_tokens += output["prompt_mask"].sum(dim=1)[:: setting.num_generations].tolist()


def batches_of(trainer: PODSTrainer) -> Batches:
    """Return what a trainer's batches have in common, whatever the setting."""
    args = trainer.args
    return Batches(
        rows=args.per_device_train_batch_size * (args.steps_per_generation or 1),
        chunk=None if trainer.use_vllm else args.rollout_batch_size,
        skips=args.prompt_once and not trainer._update._reads_every_row(),
        merges=args.prompt_once,
        repeats=args.num_iterations,
        rule=args.rule,
        refill_limit=args.refill_limit,
    )


def answer_range(trainer: PODSTrainer) -> tuple[float | None, float | None]:
    """Return the least and the greatest answer reward, None where unknown."""
    name = trainer.args.answer_reward
    if name is None:
        return None, None
    function = trainer.reward_funcs[trainer.reward_func_names.index(name)]
    return getattr(function, "range", None) or (0.0, 1.0)
