"""A recipe: what a run does, resolved and checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import UserError
from ..planning.batching import BatchPlan
from .catalog import read_recipe
from .checks import batch_plan, check_values
from .extras import missing_library, missing_module
from .fields import listed, suggest
from .reach import check_reachable
from .reading import Source, dump_yaml, short
from .schema import TINY, UNSUPPORTED, defaults, fields

_SAVING = frozenset(("save_seconds", "save_steps", "save_strategy"))
_SAVE_SECONDS, _SAVES_KEPT = 1800.0, 2  # where a recipe says nothing of saving: no run loses more than half an hour
_ENDLESS = 10**9  # steps of a run that only the clock stops; TRL would stop after 3 epochs
_TITLES = {"model": "the policy", "engine": "training", "task": "the task", "run": "this run"}


@dataclass(frozen=True)
class Recipe:
    """``values``: every key that decides the run, resolved; ``given``: what the user set; ``source``:
    where."""

    values: Mapping[str, Any]
    given: Mapping[str, Any]
    source: str

    @property
    def name(self) -> str:
        """The file's name without its ending, for naming a run.

        >>> Recipe({}, {}, "recipes/my.yaml").name, Recipe({}, {}, "gsm8k-qwen2.5-3b-pods").name
        ('my', 'gsm8k-qwen2.5-3b-pods')
        """
        return re.sub(r"\.ya?ml$", "", Path(self.source).name)

    def engine_arguments(self) -> dict[str, Any]:
        """Keywords of PODSConfig, without ``output_dir``. ``bf16`` is there only where it was set."""
        arguments = {
            key: float(value) if type(value) is int and fields()[key].kinds <= {"float", "None"} else value
            for key, value in self._section("engine").items()  # transformers refuses `repetition_penalty: 1`
        }
        if arguments.get("max_steps", -1) <= 0 and "num_train_epochs" not in arguments:
            arguments["max_steps"] = _ENDLESS
        return arguments

    def model_arguments(self) -> dict[str, Any]:
        """Keywords of TRL's ModelConfig; ``model_name_or_path`` may be ``tiny``."""
        return self._section("model")

    def task_settings(self) -> dict[str, Any]:
        """What ``tasks.load_task`` takes."""
        return self._section("task")

    def run_settings(self) -> dict[str, Any]:
        """The budget, evaluation, ledger and threads."""
        return self._section("run")

    def batch_plan(self, processes: int | None = None) -> BatchPlan:
        """What a step handles on so many processes; None: as many as the launcher started."""
        return batch_plan(self.values, processes)

    @property
    def missing_library(self) -> str | None:
        """What must be installed before it can train here; no obstacle to reading it, or to evaluating its policy."""
        return missing_library(self.values)

    def check_installed(self) -> None:
        """Raises UserError where a library or a module that training needs is not there."""
        missing = self.missing_library or missing_module(self.values)
        if missing:
            raise UserError(f"{self.source}: {missing}")

    def check_reachable(self) -> None:
        """Raises UserError where the hub has to give the model or the data set, and will not."""
        try:
            check_reachable(self.values)
        except UserError as error:
            raise UserError(f"{self.source}: {error}") from error

    def to_yaml(self) -> str:
        """The resolved recipe, by section; loading it gives equal values."""
        return "".join(f"# {title}\n{dump_yaml(self._section(section))}" for section, title in _TITLES.items())

    def _section(self, section: str) -> dict[str, Any]:
        return {key: value for key, value in self.values.items() if fields()[key].section == section}


def load_recipe(
    path_or_name: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    processes: int | None = None,
    trains: bool = True,
) -> Recipe:
    """Load a recipe from a file, or a shipped one by its name, and check everything that can be.

    Args:
        path_or_name: a YAML file, a shipped recipe's name, or ``<experiment>-<arm>`` for one arm of a shipped
            experiment.
        overrides: values that replace the file's; text is read as the key's type, as from the command line.
        processes: how many will train it, for the batches must fit them; None: as many as the launcher started.
        trains: False where it is only evaluated, so that its batches need not fit.

    Raises:
        UserError: it cannot be found or read, or a key, value or combination is wrong.
    """
    values, source = read_recipe(path_or_name)
    return build_recipe(values, source, overrides or {}, processes=processes, trains=trains)


def build_recipe(
    values: Mapping[str, Any],
    source: Source,
    overrides: Mapping[str, Any] | None = None,
    *,
    processes: int | None = None,
    trains: bool = True,
) -> Recipe:
    """As load_recipe, from a mapping; ``source`` says where it is from, for messages."""
    given = _convert(values, source)
    given.update(_convert(overrides or {}, Source("command line"), dashes=True))
    for key in [key for key in given if key in UNSUPPORTED]:
        if given.pop(key) != fields()[key].default:
            where = "command line: " if key in (overrides or {}) else source.where(key)
            raise UserError(f"{where}{key} cannot be set in a recipe: {UNSUPPORTED[key]}.")
    resolved = defaults() | given
    resolve(resolved, given)
    try:
        check_values(resolved)
        if trains:
            batch_plan(resolved, processes)
    except UserError as error:
        raise UserError(f"{source.name}: {error}") from None
    return Recipe(MappingProxyType(resolved), MappingProxyType(given), source.name)


def _convert(values: Mapping[str, Any], source: Source, *, dashes: bool = False) -> dict[str, Any]:
    """Values as their keys' types; one UserError names every key that is unknown or of a wrong type."""
    converted: dict[str, Any] = {}
    problems: dict[str, str | None] = {}  # by key; None: it is unknown
    for key, value in values.items():
        field = fields().get(key)
        if key == "scale_rewards" and isinstance(value, bool):
            value = "group" if value else "none"  # as TRL reads it
        try:
            if field is None:
                problems[key] = None
            else:
                converted[key] = field.parse(value) if dashes and isinstance(value, str) else field.convert(value)
        except ValueError as error:
            problems[key] = f"{error}."
    if problems:
        lines = (
            f"{f'--{short(key)}' if dashes else source.where(key) + short(key)}: {text or _unknown(key)}"
            for key, text in problems.items()
        )
        raise UserError(listed(lines, len(problems)))
    return converted


def _unknown(key: str) -> str:
    return f"unknown key.{suggest(key, fields()) or ' It is neither a key of ours nor of TRL.'}"


def resolve(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Fill in what follows from other keys."""
    if values["num_rollouts"] is None:
        values["num_rollouts"] = values["num_generations"]
    if values["eval_temperature"] is None:
        values["eval_temperature"] = values["temperature"]
    if "task" not in given and values["dataset_name"]:
        values["task"] = "dataset"
    if values["model_name_or_path"] is None and values["task"] == "arithmetic":
        values["model_name_or_path"] = TINY
    if not _SAVING & given.keys():
        values["save_seconds"] = _SAVE_SECONDS
        if "save_total_limit" not in given:
            values["save_total_limit"] = _SAVES_KEPT
