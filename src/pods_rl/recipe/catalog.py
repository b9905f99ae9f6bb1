"""Find recipes, experiments and configurations of ``accelerate launch`` by name or path. Does not import torch.

An experiment's file has a base recipe, and arms that each set some of its keys. Each arm is a recipe too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..text import describe, short, suggest
from ..yaml_files import Origin, read_yaml

# the others are recipe keys of all arms
EXPERIMENT_KEYS = ("name", "about", "base", "arms", "baseline", "pairs", "seeds", "accelerate")
_RECIPES = Path(__file__).parent.parent / "recipes"
_ARM_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
_TAKEN = ("report", "configs", "logs")  # directories of the experiment itself


def local_path(name: str | Path) -> Path:
    """Return the path a user gave, whether or not it exists; raise UserError if it cannot be a path."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no permission to look, ~nobody, a null character
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UserError(f"{short(str(name))} cannot be a path: {reason}.") from error
    return path


def looks_like_path(name: str) -> bool:
    """Return whether a name can only be a path: a hub id is ``name`` or ``owner/name``.

    >>> looks_like_path("./model"), looks_like_path("a/b/c"), looks_like_path("Qwen/Qwen2.5-0.5B")
    (True, True, False)
    """
    return name.startswith(("/", "./", "../", "~", ".\\")) or name.count("/") > 1 or "\\" in name


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes and experiments in the package, by name: quick ones first, then the paper's."""
    files = sorted(_RECIPES.glob("*.yaml")) + sorted((_RECIPES / "paper").glob("*.yaml"))
    return {path.stem: path for path in files}


@cache
def shipped_arms() -> dict[str, tuple[Path, str]]:
    """Return each arm of each shipped experiment, as ``<experiment>-<arm>``.

    >>> shipped_arms()["quickstart-pods"][1]
    'pods'
    """
    places: dict[str, tuple[Path, str]] = {}
    for name, path in shipped_recipes().items():
        values, _ = read_yaml(path)
        for arm in values.get("arms", {}):  # a single recipe has none
            places[f"{name}-{arm}"] = (path, arm)
    return places


def find_recipe(path_or_name: str | Path) -> Path:
    """Return the file of a recipe or experiment; raise UserError with the nearest name if there is none."""
    shipped = shipped_recipes()
    return _find(path_or_name, "recipe", shipped, [*shipped, *shipped_arms()], "a name that `pods recipes` lists")


def _find(
    path_or_name: str | Path, kind: str, shipped: Mapping[str, Path], suggestions: Iterable[str], expected_name: str
) -> Path:
    """Return a user's file, or a shipped one by name; the other arguments are for the message."""
    path = local_path(path_or_name)
    if path.is_file():
        return path
    if str(path_or_name) in shipped:
        return shipped[str(path_or_name)]
    problem = "is a directory" if path.is_dir() else f"is neither a file nor a shipped {kind}"
    near = suggest(path.name.removesuffix(".yaml"), suggestions)
    raise UserError(f"{path_or_name} {problem}.{near} Expected a YAML file, or {expected_name}.")


def read_recipe(path_or_name: str | Path) -> tuple[dict[str, Any], Origin]:
    """Return the keys of a recipe: of a file, of a shipped one, or of one arm of a shipped experiment.

    Raises UserError if there is none, and for an experiment without an arm.
    """
    name = str(path_or_name)
    # A local file hides the shipped arm of the same name.
    if not local_path(path_or_name).is_file() and name in shipped_arms():
        path, arm = shipped_arms()[name]
        return read_arm(path, arm), Origin(name)
    values, origin = read_yaml(find_recipe(path_or_name))
    if "arms" in values:
        raise UserError(
            f"{origin.name} compares several runs (it has arms): use `pods compare`, or name one of its arms, "
            "as in quickstart-pods."
        )
    return values, origin


def read_arm(path: Path, arm: str) -> dict[str, Any]:
    """Return the recipe keys of one arm of an experiment's file."""
    base, arms = split_experiment(*read_yaml(path))
    return {**base, **arms[arm]}


def split_experiment(
    values: Mapping[str, Any], origin: Origin, above: tuple[Path, ...] = ()
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the keys that all arms share, and those that each arm sets, by name; unchecked as recipe keys.

    Raises:
        UserError: arms without names or keys, a name that cannot be a directory, a base that is neither, a seed.
    """
    arms = _read_arms(values.get("arms"), origin.where("arms"))
    base = values.get("base", {})
    if isinstance(base, str):
        base = _read_base(base, Path(origin.name).parent, above)
        base.pop("seed", None)  # of a recipe that was trained alone: an experiment has seeds
    elif not isinstance(base, dict):
        raise UserError(
            f"{origin.where('base')}base: got {describe(base)}, expected a recipe's name or path, or its keys."
        )
    shared = base | {key: value for key, value in values.items() if key not in EXPERIMENT_KEYS}
    if any("seed" in keys for keys in (shared, *arms.values())):
        raise UserError(f"{origin.where('seed')}seed: an experiment has seeds (--seeds), a count or a list.")
    return shared, arms


def _read_arms(arms: Any, where: str) -> dict[str, dict[str, Any]]:
    """Return the keys of each arm; raise UserError for arms without names or keys, and for a wrong name."""
    expected = f"{where}arms: expected names with the keys each sets, as in `pods: {{num_rollouts: 64}}`."
    if not isinstance(arms, dict) or not arms or any(keys and not isinstance(keys, dict) for keys in arms.values()):
        raise UserError(expected)
    for name in arms:
        if not isinstance(name, str) or not _ARM_NAME.fullmatch(name) or name in _TAKEN:
            raise UserError(
                f"{where}arms: {describe(name)} cannot name a directory of runs: use letters, digits, '-', '_' and "
                f"'.', and none of {', '.join(_TAKEN)}."
            )
    # `grpo:` without keys is null in YAML.
    return {name: dict(keys or {}) for name, keys in arms.items()}


def _read_base(name: str, folder: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """Return the keys of a base: a file next to the experiment or a shipped recipe; of an experiment its own base."""
    local = local_path(folder / name)
    if not local.is_file() and name in shipped_arms():
        return read_arm(*shipped_arms()[name])
    path = find_recipe(local if local.is_file() else name)
    if path.resolve() in above:
        raise UserError(f"{path}: is its own base: name another recipe as base, or give its keys.")
    values, origin = read_yaml(path)
    if "arms" not in values:
        return values
    shared, _ = split_experiment(values, origin, (*above, path.resolve()))
    return shared


def accelerate_configs() -> dict[str, Path]:
    """Return the accelerate configurations in the package, by name."""
    return {path.stem: path for path in sorted((_RECIPES / "accelerate").glob("*.yaml"))}


def find_accelerate_config(path_or_name: str) -> Path:
    """Return the file of an accelerate configuration; raise UserError with the nearest name if there is none."""
    shipped = accelerate_configs()
    return _find(path_or_name, "accelerate configuration", shipped, shipped, f"one of {', '.join(shipped)}").resolve()


def accelerate_processes(config: Path) -> int:
    """Return how many processes an accelerate configuration starts; raise UserError if the number is wrong."""
    values, _ = read_yaml(config)
    count = values.get("num_processes", 1)
    if not isinstance(count, int) or count < 1:
        raise UserError(f"{config}: num_processes: got {describe(count)}, expected a whole number of at least 1.")
    return count


def check_accelerate(config: Path) -> None:
    """Raise UserError if an accelerate configuration is not supported, or needs a library that is missing."""
    values, _ = read_yaml(config)
    kind = str(values.get("distributed_type"))
    version = (values.get("fsdp_config") or {}).get("fsdp_version", 1)
    if kind == "FSDP" and version != 2:
        raise UserError(f"{config}: fsdp_version: got {version!r}, expected 2 (FSDP2).")
    if kind == "DEEPSPEED" and find_spec("deepspeed") is None:
        raise UserError(
            f"{config.stem} needs deepspeed, which is not installed: pip install '.[deepspeed]' in a checkout."
        )
