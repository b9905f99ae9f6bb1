"""Plan again while a run trains (`plan_every`): which n, waves and places of dead groups, from its latest rollouts."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..engines.trl.rollouts import as_text
from ..planning.costs import Costs
from ..planning.grid import Setting
from ..planning.plan import decide, describe_pool, finalists, model
from ..planning.signal import Pool, observed
from ..runs import to_json, write_atomic
from ..runs.files import PLAN, read_mapping
from .measuring import answer_range, batches_of

if TYPE_CHECKING:
    from ..engines.trl import PODSTrainer
    from ..recipe import Recipe
    from .recorder import Recorder

_STATE = "pods_plan"  # the key of our state in the trainer state of a checkpoint
_GROUPS = 128  # the latest, from which a run plans


class Replanning(TrainerCallback):
    """Plans before every step that follows a multiple of `every`, off the training clock.

    m stays, since TRL's batches depend on it. Prices, and the settings that fit into memory, are those of the first
    plan; pass rates are those of the latest groups, and of each only the first wave, which came whatever it showed.
    Nothing else decides, and a checkpoint holds these groups: a resumed run plans as the whole run would have.

    Args:
        trainer: of a single process, built for the first plan.
        path: of `plan.json`, which gets an entry under `again` for each plan.
        every: steps.
        recorder: whose clock pauses.
        say: called with a line about each plan.
    """

    def __init__(
        self, trainer: PODSTrainer, path: Path, every: int, recorder: Recorder, say: Callable[[str], None]
    ) -> None:
        self._trainer, self._path, self._every, self._recorder, self._say = trainer, path, every, recorder, say
        self._plan = read_mapping(path)
        self._costs = Costs(**self._plan["seconds"])
        self._setting = Setting.of(self._plan["recommended"])
        m = self._setting.num_generations
        fitting = [Setting.of(one["setting"]) for one in self._plan["modelled"]]
        own = [one for one in fitting if one.num_generations == m]
        self._settings = list(dict.fromkeys([Setting(m, m), *own]))
        self._groups: deque[list[list[Any]]] = deque(maxlen=_GROUPS)  # rollouts: prompt, answer, total, text
        self._seen = 0  # the step whose generation was noted last

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if saved := state.stateful_callbacks.get(_STATE):
            self._groups.extend(saved["groups"])
            self._seen = saved["seen"]
            self._use(Setting.of(saved["keys"]))
        again = self._plan.get("again", [])
        self._plan["again"] = [one for one in again if one["step"] < state.global_step]
        if len(again) != len(self._plan["again"]):
            self._write()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not state.global_step or state.global_step % self._every or not self._groups:
            return
        phases = self._trainer._update.clock
        phases.stop()
        with self._recorder.clock:
            self._plan_again(state.global_step)
        phases.enter("update")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        record = self._trainer.rollouts
        if record is not None and record.step > self._seen:
            self._seen, n = record.step, record.rewards.size(1)
            first = record.wave_ends[0] if record.wave_ends else n
            answers = self._trainer._plan.answers(record.rewards_per_func).tolist()
            totals = record.rewards.flatten()[record.numbers].tolist()
            groups: dict[int, list[list[Any]]] = {}
            for number, answer, total, prompt, text in zip(
                record.numbers, answers, totals, record.prompts, record.completions, strict=True
            ):
                if number % n < first and math.isfinite(answer + total):
                    seen = [_name(prompt), answer, total, _name(text)]
                    groups.setdefault(number // n, []).append(seen)
            self._groups.extend(groups.values())
        state.stateful_callbacks[_STATE] = {
            "keys": self._setting.keys, "seen": self._seen, "groups": list(self._groups),
        }  # fmt: skip

    def _plan_again(self, step: int) -> None:
        prompts, answers, totals, texts = zip(*(one for group in self._groups for one in group), strict=True)
        pool = Pool(observed(prompts, answers, totals, texts, *answer_range(self._trainer)))
        batches = batches_of(self._trainer)
        candidates = model(self._settings, pool, batches, self._costs)
        made = decide(candidates, finalists(candidates), pool, batches, self._costs, facts=describe_pool(pool))
        was, now = self._setting.label, made.chosen.setting.label
        kept = f"keeps {now}" if was == now else f"{now} instead of {was}"
        self._say(f"step {step}: planned again (modelled): {kept}. {made.reasons[-1]}")
        self._use(made.chosen.setting)
        self._plan["again"].append({
            "step": step, "recommended": made.keys, "label": now, "reasons": made.reasons,
            "gain_90_percent": list(made.gain), "measured": dict(made.facts),
        })  # fmt: skip
        self._write()

    def _use(self, setting: Setting) -> None:
        self._setting = setting
        self._trainer._plan.read(self._trainer, **setting.keys)

    def _write(self) -> None:
        write_atomic(self._path, to_json(self._plan) + "\n")


def _name(text: Any) -> int:
    """Return a number that names a text, the same in every process."""
    return zlib.crc32(as_text(text).encode("utf-8", "surrogatepass"))


def plan_again(recipe: Recipe, trainer: PODSTrainer, output: Path, recorder: Recorder) -> None:
    """Have the run plan again every `plan_every` steps."""
    say = recorder.progress.say if recorder.progress else lambda line: None
    trainer.add_callback(Replanning(trainer, output / PLAN, recipe.values["plan_every"], recorder, say))
