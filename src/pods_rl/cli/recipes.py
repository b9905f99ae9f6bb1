"""``pods recipes``: what is shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..terminal import console, safe_text


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe, to copy and change.")] = None,
) -> None:
    """List the recipes in the package, or print one.

    \b
    Examples:
      pods recipes
      pods recipes tiny-pods > my.yaml
    """
    from ..recipe import find_recipe, shipped_recipes

    if name is not None:
        print(find_recipe(name).read_text(encoding="utf-8"), end="")
        return
    shipped = shipped_recipes()
    width = max(map(len, shipped))
    for recipe, path in shipped.items():
        command = "compare" if is_experiment(path) else "train"
        console().print(f"{safe_text(recipe):<{width}}  {command:<7}  {safe_text(describe(path))}")


def describe(path: Path) -> str:
    """The first line of a recipe's header.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "r.yaml")
    ...     _ = path.write_text("# Trains a policy.\\n#\\nseed: 1\\n")
    ...     describe(path)
    'Trains a policy.'
    """
    first = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return first.lstrip("# ") if first.startswith("#") else ""


def is_experiment(path: Path) -> bool:
    """Whether a file compares several runs."""
    from ..recipe.reading import read_yaml

    return "arms" in read_yaml(path)[0]
