"""What is shipped with the package: recipes, experiments, each arm of an experiment, accelerate configurations."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from ..errors import UserError
from .arms import split_experiment
from .fields import describe, suggest
from .reading import Source, local_path, read_yaml

_RECIPES = Path(__file__).parent.parent / "recipes"
_ACCELERATE = _RECIPES / "accelerate"
MOST_PROCESSES = 1024  # that a launch starts on one machine


def shipped_recipes() -> dict[str, Path]:
    """Recipes and experiments in the package, by name: what starts quickly first, then the paper's settings."""
    return {path.stem: path for folder in (_RECIPES, _RECIPES / "paper") for path in sorted(folder.glob("*.yaml"))}


@cache
def shipped_arms() -> dict[str, tuple[Path, str]]:
    """Each arm of each shipped experiment, as ``<experiment>-<arm>``.

    >>> shipped_arms()["quickstart-pods"][1]
    'pods'
    """
    arms = {}
    for name, path in shipped_recipes().items():
        found = read_yaml(path)[0].get("arms")
        arms.update({f"{name}-{arm}": (path, arm) for arm in (found if isinstance(found, dict) else {})})
    return arms


def accelerate_configs() -> dict[str, Path]:
    """Configurations for ``accelerate launch`` in the package, by name."""
    return {path.stem: path for path in sorted(_ACCELERATE.glob("*.yaml"))}


def find_accelerate_config(path_or_name: str) -> Path:
    """The file of an accelerate configuration; raises UserError with the nearest name where there is none."""
    path, shipped = local_path(path_or_name), accelerate_configs()
    if path.is_file():
        return path.resolve()
    if path_or_name not in shipped:
        raise UserError(
            f"accelerate: {path_or_name} is neither a file nor a shipped configuration: expected a YAML file that "
            f"`accelerate config` wrote, or one of {', '.join(shipped)}.{suggest(path_or_name, shipped)}"
        )
    return shipped[path_or_name]


def accelerate_processes(config: Path) -> int:
    """How many processes an accelerate configuration starts; raises UserError where it gives no number."""
    count = read_yaml(config)[0].get("num_processes", 1)
    if not isinstance(count, int) or not 1 <= count <= MOST_PROCESSES:
        raise UserError(
            f"{config}: num_processes: got {describe(count)}, expected a whole number from 1 to {MOST_PROCESSES}."
        )
    return count


def find_recipe(path_or_name: str | Path) -> Path:
    """The file of a recipe or experiment; raises UserError with the nearest name where there is none."""
    path = local_path(path_or_name)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if str(path_or_name) in shipped:
        return shipped[str(path_or_name)]
    what = "is a directory" if path.is_dir() else "is neither a file nor a shipped recipe"
    word = path.name.removesuffix(".yaml")
    raise UserError(
        f"{path_or_name} {what}: expected a YAML file or one of {', '.join(shipped)} (`pods recipes` lists them and "
        f"their arms).{suggest(word, [*shipped, *shipped_arms()])}"
    )


def read_recipe(path_or_name: str | Path) -> tuple[dict[str, Any], Source]:
    """The keys of a recipe: of a file, of a shipped one, or of one arm of a shipped experiment.

    Raises UserError where there is none, and for an experiment without an arm.
    """
    arms = {} if local_path(path_or_name).is_file() else shipped_arms()
    if str(path_or_name) in arms:
        path, arm = arms[str(path_or_name)]
        return read_arm(path, arm), Source(str(path_or_name))
    values, source = read_yaml(find_recipe(path_or_name))
    if "arms" in values:
        name = Path(source.name).stem
        known = [f"{name}-{arm}" for arm in values["arms"]] if isinstance(values["arms"], dict) else []
        one = f" For one run of it: --recipe {' or '.join(known)}." if set(known) & set(arms) else ""
        raise UserError(f"{source.name} compares several runs (it has arms): use `pods compare --config`.{one}")
    return values, source


def read_arm(path: Path, arm: str) -> dict[str, Any]:
    """The keys one arm of an experiment's file trains with."""
    values, source = read_yaml(path)
    base, arms = split_experiment(values, source, read_base)
    return {**base, **arms[arm]}


def read_base(name: str, beside: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The recipe an experiment names as its base: a file beside it, or what is shipped.

    Of another experiment, the base it has itself; of one of its arms, that arm's keys. ``above`` are the files whose
    bases led here.
    """
    local = local_path(beside / name)
    if local.is_file() or name not in shipped_arms():
        path = find_recipe(local if local.is_file() else name)
        if path.resolve() in above:
            raise UserError(f"{path}: is its own base: name another recipe as base, or give its keys.")
        values, source = read_yaml(path)
        further = partial(read_base, above=(*above, path.resolve()))
        return split_experiment(values, source, further)[0] if "arms" in values else values
    return read_arm(*shipped_arms()[name])
