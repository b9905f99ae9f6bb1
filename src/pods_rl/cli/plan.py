"""``pods plan``: which n and m have the most signal a second for a recipe on this machine, by measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ..errors import UserError
from ..recipe import load_recipe
from ..runs.files import begins_with, check_output, write_output
from ..text import console, plain_text, safe_text
from ..yaml_files import dump_yaml
from .train import Config, Force, named_recipe, stoppable

_HEAD = "# pods plan: "  # how a file of ours begins


def plan(
    context: typer.Context,
    config: Config = None,
    seconds: Annotated[float, Option(min=1, max=1e6, help="Seconds to measure and time, after loading.")] = 120,
    write: Annotated[Path | None, Option(help="Write the recipe with the recommended n and m to this file.")] = None,
    force: Force = False,
) -> None:
    """Find the n and m with the most signal a second for a recipe, by measuring.

    Measures the seconds of a rollout, a prompt and a trained row and the rewards of the policy on real steps, models
    each n and m, then times plain GRPO and the three best. Recommends only a setting that it timed. Rows a step and the
    learning rate stay. Set any key of the recipe with --KEY VALUE.

    \b
    Examples:
      pods plan tiny-pods
      pods plan --config my.yaml --seconds 600 --write my-plan.yaml
    """
    named, keys = named_recipe(context.args, config)
    if named is None:
        raise UserError("Missing recipe. Pass a name, as in `pods plan tiny-pods`, or a file.")
    recipe = load_recipe(named, keys)
    if write is not None:
        check_output(write, "--write", inputs=[Path(recipe.source)], ours=begins_with(_HEAD), force=force)
    recipe.check_reachable()
    from ..training.planning import plan_recipe
    from ..training.progress import LiveLine

    with stoppable() as stop, stop.at_once(), LiveLine(console(), every=10, spins=True) as line:
        made = plan_recipe(recipe, seconds, show=line.show)
    print("\n".join(map(plain_text, made.lines())))
    if write is not None:
        text = f"{_HEAD}{made.chosen.setting.label}\n# {plain_text(made.reason)}\n"
        write_output(write, "--write", text + dump_yaml({**recipe.given, **made.chosen.setting.keys}))
        console().print(f"Written: {safe_text(write)}: pods train --config {safe_text(write)}")
