"""What an experiment is: arms (a name and the recipe keys that it sets) over one base recipe, times seeds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..recipe import Recipe, build_recipe, find_recipe
from ..recipe.reading import Source, dump_yaml, parse_yaml, read_yaml
from ..recipe.schema import fields

_KEYS = ("name", "base", "baseline", "arms", "seeds")
_ARM_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
_TAKEN = ("report", "configs")  # directories of the experiment itself


@dataclass(frozen=True)
class Planned:
    """One run of an experiment, and where it goes below the experiment's directory."""

    arm: str
    seed: int
    recipe: Recipe

    @property
    def path(self) -> Path:
        return Path(self.arm) / f"seed-{self.seed}"


@dataclass(frozen=True)
class Experiment:
    """Arms (a name and the recipe keys that it sets) over one base recipe, each with every seed."""

    name: str
    base: Mapping[str, Any]
    arms: Mapping[str, Mapping[str, Any]]
    seeds: tuple[int, ...]
    baseline: str
    source: str

    def plan(self) -> list[Planned]:
        """Every run, in the order they are made: seeds outside, arms inside, so that the arms of a seed share
        whatever the machine does at that hour. Raises UserError where any recipe is wrong."""
        return [Planned(arm, seed, self._recipe(arm, seed)) for seed in self.seeds for arm in self.arms]

    def to_yaml(self) -> str:
        """As ``experiment.yaml``; loading it gives an equal experiment."""
        return dump_yaml(
            {
                "name": self.name,
                "baseline": self.baseline,
                "arms": {name: dict(keys) for name, keys in self.arms.items()},
                "seeds": list(self.seeds),
                "base": dict(self.base),
            }
        )

    def _recipe(self, arm: str, seed: int) -> Recipe:
        values = {**self.base, **self.arms[arm], "seed": seed}
        return build_recipe(values, Source(f"{self.source}, arm {arm}"))


def load_experiment(path_or_name: str | Path, overrides: Mapping[str, Any] | None = None) -> Experiment:
    """Load an experiment from a YAML file, or one that is shipped by its name.

    Its keys: ``arms`` (name -> recipe keys), ``base`` (a recipe's name or path, or recipe keys),
    ``baseline`` (an arm; the first by default), ``seeds`` (a count k for 1..k, or a list), ``name``; any
    other key is a recipe key of all arms. ``overrides`` replace keys of all arms, or ``seeds`` and ``baseline``.

    Raises:
        UserError: it cannot be found or read, or does not say what an experiment needs.
    """
    path = find_recipe(path_or_name)
    values, source = read_yaml(path)
    return build_experiment(values, source, overrides or {})


def build_experiment(
    values: Mapping[str, Any], source: Source, overrides: Mapping[str, Any] | None = None
) -> Experiment:
    """As load_experiment, from a mapping."""
    overrides = dict(overrides or {})
    values = {**values, **{key: overrides.pop(key) for key in _KEYS[2:] if key in overrides}}
    arms = _arms(values.get("arms"), source)
    for arm, keys in arms.items():
        for key in keys:
            if key in overrides:
                raise UserError(f"--{key} would make the arms alike: {source.name} sets it for the arm {arm}.")
    baseline = values.get("baseline", next(iter(arms)))
    if baseline not in arms:
        raise UserError(f"{source.where('baseline')}baseline: {baseline} is no arm: expected {_list(arms)}.")
    base = _base(values.get("base", {}), source)
    for key, value in values.items():
        if key not in _KEYS:
            base[key] = value
    _convert(overrides, base)
    if "seed" in base:
        raise UserError(f"{source.where('seed')}seed: an experiment has seeds: a count or a list.")
    name = values.get("name") or Path(source.name).stem
    return Experiment(str(name), base, arms, _seeds(values.get("seeds", 1), source), baseline, source.name)


def _arms(arms: Any, source: Source) -> dict[str, dict[str, Any]]:
    where = source.where("arms")
    if not isinstance(arms, dict) or not arms:
        raise UserError(f"{where}arms: expected names with the keys each sets, as in `pods: {{num_rollouts: 64}}`.")
    for name, keys in arms.items():
        if not isinstance(name, str) or not _ARM_NAME.fullmatch(name) or name in _TAKEN:
            raise UserError(
                f"{where}arms: {name!r} cannot name a directory of runs: use letters, digits, '-', '_' "
                "and '.', and "
                f"none of {_list(_TAKEN)}."
            )
        if keys is not None and not isinstance(keys, dict):
            raise UserError(f"{where}arms: {name}: got {keys!r}, expected keys, as in {{num_rollouts: 64}}.")
        if "seed" in (keys or {}):
            raise UserError(f"{where}arms: {name}: seed: arms share their seeds: use seeds.")
    return {name: dict(keys or {}) for name, keys in arms.items()}


def _base(base: Any, source: Source) -> dict[str, Any]:
    if isinstance(base, dict):
        return dict(base)
    if not isinstance(base, str):
        raise UserError(f"{source.where('base')}base: got {base!r}, expected a recipe's name or path, or its keys.")
    beside = Path(source.name).parent / base
    values, _ = read_yaml(find_recipe(beside if beside.is_file() else base))
    return values


def _seeds(seeds: Any, source: Source) -> tuple[int, ...]:
    if isinstance(seeds, str):
        seeds, _ = parse_yaml(f"seeds: {seeds}", "command line")
        seeds = seeds["seeds"]
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds >= 1:
        return tuple(range(1, seeds + 1))
    good = isinstance(seeds, list) and seeds and len(set(map(str, seeds))) == len(seeds)
    if not good or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise UserError(
            f"{source.where('seeds')}seeds: got {seeds!r}, expected how many (5 gives 1 to 5), or a list of "
            "different whole numbers."
        )
    return tuple(seeds)


def _convert(overrides: Mapping[str, Any], base: dict[str, Any]) -> None:
    """Put command-line words into the base as values, so that experiment.yaml holds what was meant."""
    for key, word in overrides.items():
        known = fields().get(key)
        try:
            base[key] = known.parse(word) if known is not None and isinstance(word, str) else word
        except ValueError as error:
            raise UserError(f"--{key}: {error}.") from None


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
