"""``pods recipes``: what is shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import UserError
from ..text import console, plain_text, safe_text


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Print this one, to copy and change: a recipe, experiment or arm of one.")
    ] = None,
    path: Annotated[bool, typer.Option("--path", help="Print where the file of NAME lies instead.")] = False,
) -> None:
    """List the recipes, experiments and accelerate configurations in the package, or print one.

    \b
    Examples:
      pods recipes
      pods recipes tiny-pods > my.yaml
      pods recipes gsm8k-qwen2.5-3b-pods
      pods recipes --path zero2
    """
    from ..recipe import accelerate_configs, shipped_arms, shipped_recipes
    from ..recipe.fields import suggest
    from ..recipe.reading import short

    if name is None:
        if path:
            raise UserError("--path needs a NAME, one that `pods recipes` lists.")
        _list()
        return
    arm = shipped_arms().get(name)
    shipped = shipped_recipes() | accelerate_configs()
    if arm is None and name not in shipped:
        raise UserError(
            f"{short(name)} is not shipped: expected one of {', '.join(shipped)}, or an arm that `pods recipes` lists."
            f"{suggest(name, [*shipped, *shipped_arms()])}"
        )
    file = arm[0] if arm else shipped[name]
    if path:
        print(plain_text(file))
    elif arm:
        print(_arm_text(*arm), end="")
    else:
        print(plain_text(file.read_text(encoding="utf-8")), end="")


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


def _list() -> None:
    from ..recipe import accelerate_configs, shipped_arms, shipped_recipes

    arms: dict[Path, list[str]] = {}
    for file, arm in shipped_arms().values():
        arms.setdefault(file, []).append(arm)
    shipped = shipped_recipes()
    ours = {name: file for name, file in shipped.items() if file.parent.name != "paper"}
    paper = {name: file for name, file in shipped.items() if name not in ours}
    paper = dict(sorted(paper.items(), key=lambda item: ("ablation" in item[0], describe(item[1]))))  # a to f first
    _group("On a CPU, in minutes", ours, arms)
    _group("The paper's settings and ablations, on GPUs", paper, arms)
    _group("For accelerate launch --config_file $(pods recipes --path NAME)", accelerate_configs(), {})
    out = console()
    out.print("[bold]pods compare --config NAME[/bold] runs all arms of an experiment,")
    out.print("[bold]pods train --recipe NAME-ARM[/bold] (or NAME, where it has no arms) one run.")


def _group(title: str, files: dict[str, Path], arms: dict[Path, list[str]]) -> None:
    """A name, what it is, and its arms, each within 80 columns where the terminal has no more."""
    import textwrap

    out = console()
    out.print(f"[bold]{safe_text(title)}[/bold]")
    for name, file in files.items():
        out.print(f"  [cyan]{safe_text(name)}[/cyan]")
        about = [describe(file), *([f"arms: {', '.join(arms[file])}"] if file in arms else [])]
        for text in about:
            for line in textwrap.wrap(text, width=74, subsequent_indent="  "):
                out.print(f"      {safe_text(line)}")
    out.print()


def _arm_text(path: Path, arm: str) -> str:
    """One arm's keys as a recipe, to copy and change."""
    from ..recipe.catalog import read_arm
    from ..recipe.reading import dump_yaml

    return f"# The arm {arm} of {path.stem}: see `pods recipes {path.stem}`.\n{dump_yaml(read_arm(path, arm))}"
