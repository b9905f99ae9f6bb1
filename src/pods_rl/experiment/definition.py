"""The definition of an experiment: arms x seeds over one base recipe, from a file or a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from ..recipe import Recipe, build_recipe, find_accelerate_config, find_recipe
from ..recipe.catalog import accelerate_processes, split_experiment
from ..recipe.recipe import convert
from ..text import describe
from ..yaml_files import Origin, YAMLError, dump_yaml, parse_value, read_yaml

HEAD = "# pods compare: the experiment of this directory\n"  # how a stored experiment begins
_MOST_SEEDS = 1000


class DeclaredPair(NamedTuple):
    """An arm, the arm that the report compares it with, and what their difference shows, if it is said."""

    arm: str
    against: str
    shows: str = ""


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment; ``path`` is its place below the experiment's directory."""

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
    base: dict[str, Any]
    arms: dict[str, dict[str, Any]]
    seeds: tuple[int, ...]
    baseline: str
    source: str
    accelerate: str | None = None
    pairs: tuple[DeclaredPair, ...] = ()  # what the report compares; if none, every arm with the baseline
    about: str = ""  # printed before the first run

    @property
    def processes(self) -> int:
        """Processes of each run: 1, or as many as its accelerate configuration starts."""
        return 1 if self.accelerate is None else accelerate_processes(find_accelerate_config(self.accelerate))

    def plan(self) -> list[PlannedRun]:
        """Return every run in order: all arms with the first seed, then all with the next. So the arms of a seed train
        close in time, under the same load of the machine. Raises UserError if any recipe is wrong."""
        runs = []
        processes = self.processes
        for seed in self.seeds:
            for arm, keys in self.arms.items():
                origin = Origin(f"{self.source}, arm {arm}")
                recipe = build_recipe(self.base | keys | {"seed": seed}, origin, processes=processes)
                runs.append(PlannedRun(arm, seed, recipe))
        return runs

    def first_runs(self) -> list[PlannedRun]:
        """Return the run of each arm with the first seed: the recipes of an arm differ only in their seed."""
        return self.plan()[: len(self.arms)]

    def to_yaml(self) -> str:
        """Return the text of ``experiment.yaml``; loading it gives an equal experiment."""
        settings: dict[str, Any] = {"name": self.name}
        if self.about:
            settings["about"] = self.about
        settings["baseline"] = self.baseline
        if self.accelerate is not None:
            settings["accelerate"] = self.accelerate
        settings["arms"] = self.arms
        if self.pairs:
            settings["pairs"] = [pair._asdict() for pair in self.pairs]
        settings |= {"seeds": list(self.seeds), "base": self.base}
        return HEAD + dump_yaml(settings)


def load_experiment(path_or_name: str | Path, overrides: Mapping[str, Any] | None = None) -> Experiment:
    """Load an experiment from a YAML file, or a shipped one by its name.

    Its keys: ``arms`` (name -> recipe keys), ``base`` (a recipe's name or path, or recipe keys),
    ``pairs`` (what the report compares, a list of mappings: ``arm``, ``against``, by default the baseline, and
    ``shows``, what their difference shows; by default every arm against the baseline),
    ``about`` (a text that ``pods compare`` prints before the first run),
    ``baseline`` (an arm; the first by default), ``seeds`` (a count k for 1..k, or a list), ``name``,
    ``accelerate`` (runs of several processes: a configuration's name, such as zero2, or path); any other key is a
    recipe key of all arms. ``overrides`` replace keys of all arms, or ``seeds``, ``baseline`` and ``accelerate``.

    Raises:
        UserError: the experiment cannot be found or read, or a key is missing or wrong.
    """
    path = find_recipe(path_or_name)
    values, source = read_yaml(path)
    return build_experiment(values, source, overrides or {})


def build_experiment(
    values: Mapping[str, Any], source: Origin, overrides: Mapping[str, Any] | None = None
) -> Experiment:
    """Build an experiment from a mapping, as `load_experiment` does from a file."""
    overrides = dict(overrides or {})
    values = dict(values)
    for key in ("baseline", "seeds", "accelerate", "seed"):  # of the experiment itself, which refuses a single seed
        if key in overrides:
            values[key] = overrides.pop(key)
    base, arms = split_experiment(values, source)
    for arm, keys in arms.items():
        for key in keys:
            if key in overrides:
                raise UserError(f"--{key} would make the arms alike: {source.name} sets it for the arm {arm}.")
    baseline = values.get("baseline", next(iter(arms)))
    if not isinstance(baseline, str) or baseline not in arms:
        raise UserError(
            f"{source.where('baseline')}baseline: {describe(baseline)} is not an arm: expected one of "
            f"{', '.join(arms)}."
        )
    base |= convert(overrides, None)
    name = values.get("name") or Path(source.name).stem
    if not isinstance(name, (str, int)) or Path(str(name)).name != str(name):
        raise UserError(f"{source.where('name')}name: got {describe(name)}, expected the name of a directory.")
    accelerate = values.get("accelerate")
    if accelerate is not None:
        find_accelerate_config(str(accelerate))
    about = values.get("about") or ""
    if not isinstance(about, str) or not about.replace("\n", " ").isprintable():
        raise UserError(f"{source.where('about')}about: got {describe(about)}, expected a text.")
    seeds = _seeds(values.get("seeds", 1), source)
    pairs = _pairs(values.get("pairs") or [], arms, baseline, source)
    return Experiment(str(name), base, arms, seeds, baseline, source.name, accelerate, pairs, about.strip())


def _pairs(entries: Any, arms: Mapping[str, Any], baseline: str, source: Origin) -> tuple[DeclaredPair, ...]:
    """Return the declared pairs; raise UserError if they are not different arms, or if what one shows is not a line."""
    where = f"{source.where('pairs')}pairs: "
    if not isinstance(entries, list):
        raise UserError(f"{where}got {describe(entries)}, expected a list, such as - {{arm: pods, against: grpo}}.")
    pairs: list[DeclaredPair] = []
    for entry in entries:
        if not isinstance(entry, dict) or "arm" not in entry or not {*entry} <= {*DeclaredPair._fields}:
            raise UserError(f"{where}got {describe(entry)}, expected the keys {', '.join(DeclaredPair._fields)}.")
        pair = DeclaredPair(**{"against": baseline, **entry})
        for name in (pair.arm, pair.against):
            if not isinstance(name, str) or name not in arms:
                raise UserError(f"{where}{describe(name)} is not an arm: expected one of {', '.join(arms)}.")
        if not isinstance(pair.shows, str) or not (pair.shows + " ").isprintable():
            raise UserError(f"{where}shows: got {describe(pair.shows)}, expected a few words, such as selection.")
        if any({pair.arm, pair.against} == {other.arm, other.against} for other in pairs) or pair.arm == pair.against:
            raise UserError(f"{where}{pair.arm} against {pair.against}: expected two arms, and each pair once.")
        pairs.append(pair)
    return tuple(pairs)


def _seeds(seeds: Any, source: Origin) -> tuple[int, ...]:
    if isinstance(seeds, str):
        with suppress(YAMLError):  # refused below, as text
            seeds = parse_value(seeds)
    if type(seeds) is int and 1 <= seeds <= _MOST_SEEDS:
        return tuple(range(1, seeds + 1))
    if isinstance(seeds, list) and 0 < len(seeds) <= _MOST_SEEDS:
        # true and false are of a type below int
        are_numbers = all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
        if are_numbers and len(set(seeds)) == len(seeds):
            return tuple(seeds)
    raise UserError(
        f"{source.where('seeds')}seeds: got {describe(seeds)}, expected their number (5 gives 1 to 5, at most "
        f"{_MOST_SEEDS:,}), or a list of different whole numbers from 0 to 4294967295."
    )
