"""``pods plan``: which n and m have the most signal a second for a recipe on this machine, by measuring."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from ..recipe import load_recipe
from ..text import console, plain_text
from .train import Config, named_recipe, stoppable


def plan(
    context: typer.Context,
    config: Config = None,
    seconds: Annotated[float, Option(min=1, max=1e6, help="Seconds to measure and time, after loading.")] = 120,
) -> None:
    """Find the n and m with the most signal a second for a recipe, by measuring.

    Measures the seconds of a rollout, a prompt and a trained row and the rewards of the policy on real steps, models
    each n and m, then times plain GRPO and the three best. Recommends only a setting that it timed. Rows a step and the
    learning rate stay. Set any key of the recipe with --KEY VALUE. The last line of the output has the options
    of `pods train` for the recommended n and m.

    \b
    Examples:
      pods plan tiny-pods
      pods plan --config my.yaml --seconds 600
    """
    recipe = load_recipe(*named_recipe(context, config))
    recipe.check_reachable()
    from ..training.planning import plan_recipe
    from ..training.progress import LiveLine

    with stoppable() as stop, stop.at_once(), LiveLine(console()) as line:
        made = plan_recipe(recipe, seconds, show=line.show)
    print("\n".join(map(plain_text, made.lines())))
    print("Train with: pods train ...", *(f"--{key} {value}" for key, value in made.chosen.setting.keys.items()))
