"""Which runs are seeds of one recipe, so that they may be pooled into one arm."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..runs import Run
from .text import plain

OWN_TO_A_RUN = frozenset({"seed", "data_seed", "output_dir", "run_name", "logging_dir", "resume"})
"""Keys of a recipe that runs of one arm differ in."""

NO_MATTER = frozenset(
    {
        "rollout_batch_size",
        "vllm_gpu_memory_utilization",
        "eval_batch_size",
        "ledger_every",
        "report_to",
        "project",
        "push_to_hub",
        "hub_model_id",
        "save_seconds",
        "save_steps",
        "save_strategy",
        "save_total_limit",
    }
)
"""Keys that decide how memory and disk are used and what is published, not what is learned."""

# the names in an arm's name of what environment.json has, and no recipe
_TASK = "task version"
_CONTENTS = "contents of "
_DIGITS = 8  # of a hash in an arm's name
_NAMED_FIRST = ("task", "model_name_or_path", "rule", "num_rollouts", "num_generations")
_UNREADABLE = "recipe unreadable"

Settings = Mapping[str, str]


def pools_of(folders: Mapping[str, Sequence[Run]]) -> dict[str, list[Run]]:
    """Split the runs under each name by recipe; return the runs of each arm by its own name.

    Args:
        folders: runs by the name of their folder.

    Returns:
        Arms in the same order. A name whose runs have one recipe is kept.
    """
    named: list[tuple[str, list[Run]]] = []
    for name, runs in folders.items():
        pools = _split(runs)
        if len(pools) == 1:
            named.append((name, pools[0]))
        else:
            named += zip(_names(name, pools), pools, strict=True)
    return _unique(named)


def settings_text(run: Run) -> dict[str, str]:
    """Return what the recipe, the task and its contents of a run are, as text; empty if the recipe cannot be read."""
    settings = {}
    for key, value in run.config.items():
        if key not in OWN_TO_A_RUN | NO_MATTER and value is not None:
            settings[str(key)] = as_text(value)
    version = task_of(run).get("version")
    if settings and version is not None:
        settings[_TASK] = str(version)
    if settings:
        for key, hashes in contents_of(run).items():
            settings[_CONTENTS + key] = hashlib.sha256(in_order(hashes).encode()).hexdigest()[:_DIGITS]
    return settings


def task_of(run: Run) -> Mapping[str, Any]:
    """Return the name, version and sizes of a run's task, as environment.json has them; empty if it has none."""
    task = run.environment.get("task")
    if not isinstance(task, Mapping):
        return {}
    return task


def contents_of(run: Run) -> dict[str, Mapping[str, Any]]:
    """Return the hashes of what a run's recipe names, by key, as environment.json has them; empty if it has none."""
    contents = run.environment.get("contents")
    by_key: dict[str, Mapping[str, Any]] = {}
    if isinstance(contents, Mapping):
        for key, hashes in contents.items():
            if isinstance(hashes, Mapping):
                by_key[str(key)] = hashes
    return by_key


def in_order(value: Any) -> str:
    """Return a setting as JSON with sorted keys; a value that JSON cannot hold as Python writes it."""
    try:
        return json.dumps(value, sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def as_text(value: Any) -> str:
    """Return a setting as text: a text as it is, anything else by `in_order`."""
    if isinstance(value, str):
        return value
    return in_order(value)


def _split(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs of each recipe. Those without a readable recipe are the last part.

    If no run has a readable recipe, the folders decide: ``seed-<k>`` next to each other are one arm.
    """
    pools: list[tuple[Settings, list[Run]]] = []
    unknown: list[Run] = []
    for run in runs:
        settings = settings_text(run)
        if not settings:
            unknown.append(run)
            continue
        for recipe, members in pools:
            if _is_same(recipe, settings):
                members.append(run)
                break
        else:
            pools.append((settings, [run]))
    parts = [members for _, members in pools]
    if not unknown:
        return parts
    if parts or all(_is_seed(run) for run in unknown):
        return [*parts, unknown]
    return [[run] for run in unknown]


def _is_same(recipe: Settings, settings: Settings) -> bool:
    """Whether two runs have one recipe. A run that has just begun has no task version and no contents yet."""
    for key in {*recipe, *settings}:
        is_unknown = key not in recipe or key not in settings
        if is_unknown and (key == _TASK or key.startswith(_CONTENTS)):
            continue
        if recipe.get(key) != settings.get(key):
            return False
    return True


def _is_seed(run: Run) -> bool:
    return re.fullmatch(r"seed-\d+", run.path.name) is not None


def _names(name: str, pools: Sequence[Sequence[Run]]) -> list[str]:
    """Return a name for each part: the folder of a single run, else the name with the settings that differ."""
    recipes = [settings_text(pool[0]) for pool in pools]
    readable = [recipe for recipe in recipes if recipe]
    keys = _telling_keys(readable)
    names = []
    for pool, recipe in zip(pools, recipes, strict=True):
        if len(pool) == 1 and not _is_seed(pool[0]):
            names.append(pool[0].path.name)
        elif not recipe:
            names.append(f"{name} [{_UNREADABLE}]")
        elif not keys:  # the other part is the one without a recipe
            names.append(name)
        else:
            values = [f"{key} {plain(recipe.get(key, 'not set'), limit=24)}" for key in keys]
            names.append(f"{name} [{', '.join(values)}]")
    return names


def _telling_keys(recipes: Sequence[Settings]) -> list[str]:
    """Return the fewest settings, in a fixed order, whose values tell all recipes apart."""
    keys: set[str] = set()
    for recipe in recipes:
        keys |= recipe.keys()
    chosen: list[str] = []
    told_apart = 1
    for key in [*_NAMED_FIRST, *sorted(keys.difference(_NAMED_FIRST))]:
        count = _distinct(recipes, [*chosen, key])
        if count > told_apart:
            chosen.append(key)
            told_apart = count
    return chosen


def _distinct(recipes: Sequence[Settings], keys: Sequence[str]) -> int:
    """Return how many recipes can be told apart by these settings."""
    values = {tuple(map(recipe.get, keys)) for recipe in recipes}
    return len(values)


def _unique(named: Sequence[tuple[str, list[Run]]]) -> dict[str, list[Run]]:
    """Return the runs by name; where two parts have one name, the parent's name and then a number are added."""
    counts = Counter(name for name, _ in named)
    arms: dict[str, list[Run]] = {}
    for name, runs in named:
        wanted = name
        if counts[name] > 1:
            wanted = f"{runs[0].path.absolute().parent.name}/{name}"
        number = 2
        free = wanted
        while free in arms:
            free = f"{wanted} ({number})"
            number += 1
        arms[free] = runs
    return arms
