"""Tasks from reasoning-gym: its generators, our grader. Its scorers are never called: some run output as code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from ..errors import UserError
from ..rewards import accuracy
from .generated import Problem, distinct, sizes_of, to_dataset
from .prompts import PromptForm
from .task import PAPER_REWARDS, Task

_DRAWS_PER_PROMPT = 20


def gym_task(settings: Mapping[str, Any]) -> Task:
    """Generate the problems of a reasoning-gym data set; `task_options` names it and holds its own options.

    The reward `accuracy` decides: an answer is right where it equals the gold one, as a number, a text or a formula.
    So choose data sets with one right answer. Train and test are disjoint over all seeds.

    Raises UserError where reasoning-gym is not installed, for an unknown data set or option, where it gives too few
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
        source = _create(name, options, _DRAWS_PER_PROMPT * size, settings.get("task_seed") or 0)
        problems = distinct(_problems(source, name), size, held_out=held_out, of=f"reasoning-gym's {name}")
        splits.append(to_dataset(problems, form.write))
    # the library's version decides the problems as much as ours does
    version = form.version(f"1.{metadata.version('reasoning-gym')}")
    return Task(f"reasoning_gym/{name}", version, splits[0], splits[1], dict(PAPER_REWARDS))


def _create(name: str, options: Mapping[str, Any], size: int, seed: int) -> Any:
    """Make the library's generator; importing the library takes a moment, so it is done here."""
    if find_spec("reasoning_gym") is None:
        raise UserError(
            "task reasoning_gym needs reasoning-gym, which is not installed: pip install 'pods-rl[reasoning-gym]'"
        )
    factory = import_module("reasoning_gym.factory")
    import_module("reasoning_gym")  # fills the table of data sets
    known = sorted(factory.DATASETS)
    if name not in known:
        near = get_close_matches(name, known, n=3) or known[:8]
        raise UserError(f"reasoning-gym has no data set {name!r}; near it, or first, come {', '.join(near)}")
    try:
        return factory.create_dataset(name, **{**options, "size": size, "seed": seed})
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"task_options: reasoning-gym's {name} refuses {dict(options)}: {error}") from error


def _problems(source: Any, name: str) -> Iterator[Problem]:
    for index in range(len(source)):
        entry = source[index]
        question, gold = entry["question"], entry["answer"]
        if not isinstance(gold, str) or accuracy(f"<answer>{gold}</answer>", gold) != 1:
            raise UserError(
                f"reasoning-gym's {name}, problem {index}: the grader does not accept {gold!r} as its own answer, so "
                "no completion could be right; choose a data set whose answers are numbers or short texts"
            )
        yield question, gold
