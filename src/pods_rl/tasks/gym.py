"""`reasoning_gym:NAME`: any data set of reasoning-gym, graded by the scorer of that data set."""

from __future__ import annotations

import json
from importlib import metadata

from ..errors import UserError
from ..rewards import library_reward, score
from ..rewards.gym import numbered, unnumbered
from ..sandbox.scores import RewardFailure
from .generated import create_gym, distinct, sizes_of, to_dataset
from .prompts import PromptForm
from .task import FORM_REWARDS, Settings, Task, shown

GYM = "reasoning_gym"
_DRAWS_PER_PROMPT = 20
_TRIED = 8  # gold answers of each split that the scorer must accept before anything is trained


def scored_gym_task(settings: Settings) -> Task:
    """Generate the problems of a reasoning-gym data set, `task: reasoning_gym:NAME`; `task_options` holds its options.

    The deciding reward `reasoning_gym` is what the data set's own scorer gives the extracted answer, often with
    partial credit (`pods_rl.rewards.gym`). Train and test are disjoint over all seeds.

    Raises UserError if reasoning-gym is not installed, for an unknown data set or option, if it yields too few
    distinct problems, or if its scorer does not accept its own answers.
    """
    name = str(settings["task"]).partition(":")[2]
    sizes, form = sizes_of(settings), PromptForm.of(settings)
    draws, seed = _DRAWS_PER_PROMPT * max(sizes), settings.get("task_seed") or 0
    options = dict(settings.get("task_options") or {})
    source = create_gym(name, options, draws, seed)

    def split(size: int, held_out: bool) -> dict[str, str]:
        problems = (source[row] for row in range(draws))
        drawn = ((str(each["question"]), numbered(each["answer"], row)) for row, each in enumerate(problems))
        return distinct(drawn, size, held_out=held_out, of=f"reasoning-gym's {name}")

    splits = [split(size, held_out) for size, held_out in zip(sizes, (False, True), strict=True)]
    work = json.dumps([name, {**options, "size": draws, "seed": seed}])
    maker = "pods_rl.rewards.gym:scoring", work
    grader = library_reward(GYM, maker, range=(0.0, 1.0), gold=lambda gold: unnumbered(gold)[0] or None)
    golds = [gold for problems in splits for gold in list(problems.values())[:_TRIED] if grader.gold(gold)]
    texts = [f"<answer>{grader.gold(gold)}</answer>" for gold in golds]
    for gold, mark in zip(golds, score(grader, texts, golds, settings.get("reward_seconds")), strict=True):
        if isinstance(mark, RewardFailure) or mark < 1:
            said = mark.reason if isinstance(mark, RewardFailure) else f"it scores {mark:g}"
            raise UserError(
                f"reasoning-gym's {name}: its scorer does not accept its own answer {shown(gold)} ({said}). Some "
                "scorers run an answer as code, which is blocked: choose another data set, or, if each problem has "
                f"one right answer, task: reasoning_gym with task_options: {{dataset: {name}}}"
            )
    train, test = (to_dataset(problems, form.write) for problems in splits)
    version = form.version(f"scored.1.{metadata.version('reasoning-gym')}")
    return Task(f"{GYM}/{name}", version, train, test, {GYM: 1.0, **FORM_REWARDS}, GYM, graders=(grader,))
