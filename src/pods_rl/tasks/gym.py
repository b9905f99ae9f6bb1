"""Tasks of reasoning-gym.

`reasoning_gym:NAME` is graded by the scorer of the data set, and `reasoning_gym` by its gold answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from ..errors import UserError
from ..rewards import accuracy, library_reward, score
from ..rewards.gym import numbered, unnumbered
from ..sandbox.scores import RewardFailure
from ..text import suggest
from .generated import Problem, distinct, sizes_of, to_dataset
from .prompts import PromptForm
from .task import FORM_REWARDS, PAPER_REWARDS, Settings, Task, shown

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


def gym_task(settings: Settings) -> Task:
    """Generate the problems of a reasoning-gym data set; `task_options` names it and holds its own options.

    Graded by the reward `accuracy`: an answer is right if it equals the gold one, as a number, a text or a formula.
    So choose data sets with one right answer. The library's scorers are never called: some run output as code.

    Raises UserError if reasoning-gym is not installed, for an unknown data set or option, if it yields too few
    distinct problems, or a gold answer that the grader does not accept.
    """
    options = dict(settings.get("task_options") or {})
    if "dataset" not in options:
        raise UserError(
            f"task_options is {options or None!r}; task reasoning_gym needs the name of a data set of reasoning-gym, "
            "as in task_options: {dataset: chain_sum, max_terms: 4}"
        )
    name = str(options.pop("dataset"))
    form = PromptForm.of(settings)
    splits = []
    for size, held_out in zip(sizes_of(settings), (False, True), strict=True):
        source = create_gym(name, options, _DRAWS_PER_PROMPT * size, settings.get("task_seed") or 0)
        problems = distinct(_gym_problems(source, name), size, held_out=held_out, of=f"reasoning-gym's {name}")
        splits.append(to_dataset(problems, form.write))
    # the library's version decides the problems too
    version = form.version(f"1.{metadata.version('reasoning-gym')}")
    return Task(f"reasoning_gym/{name}", version, splits[0], splits[1], dict(PAPER_REWARDS))


def create_gym(name: str, options: Settings, size: int, seed: int) -> Any:
    """Make a data set of reasoning-gym; the library is imported here because it loads slowly.

    Raises UserError if it is not installed, and for an unknown data set or option.
    """
    if find_spec("reasoning_gym") is None:
        raise UserError(
            "task reasoning_gym needs reasoning-gym, which is not installed: pip install '.[reasoning-gym]'"
            " in a checkout"
        )
    factory = import_module("reasoning_gym.factory")
    import_module("reasoning_gym")  # fills the table of data sets
    known = sorted(factory.DATASETS)
    if name not in known:
        raise UserError(
            f"reasoning-gym has no data set {name!r}.{suggest(name, known)} It has {', '.join(known[:8])}, ..."
        )
    try:
        return factory.create_dataset(name, **{**options, "size": size, "seed": seed})
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"task_options: reasoning-gym's {name} rejects {dict(options)}: {error}") from error


def _gym_problems(source: Sequence[Mapping[str, object]], name: str) -> Iterator[Problem]:
    for index in range(len(source)):
        entry = source[index]
        question, gold = entry["question"], entry["answer"]
        if not isinstance(gold, str) or accuracy(f"<answer>{gold}</answer>", gold) != 1:
            raise UserError(
                f"reasoning-gym's {name}, problem {index}: the grader does not accept {gold!r} as its own answer, so "
                "no completion could be right; choose a data set whose answers are numbers or short texts"
            )
        yield str(question), gold
