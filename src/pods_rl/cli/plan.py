"""``pods plan``: which n and m have the most signal a second for a recipe on this machine, by measuring."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from ..errors import UserError
from ..runs.files import begins_with, check_output, write_output
from ..text import console, plain_text, safe_text
from .train import Config, Force, named_recipe, stoppable

if TYPE_CHECKING:
    from ..planning.plan import Plan

_DUMP = "With --rollouts"
_HEAD = "# pods plan: "  # how a file of ours begins


def plan(
    context: typer.Context,
    config: Config = None,
    seconds: Annotated[float, Option(min=1, max=1e6, help="Seconds to measure and time, after loading.")] = 120,
    write: Annotated[Path | None, Option(help="Write the recipe with the recommended n and m to this file.")] = None,
    force: Force = False,
    rollouts: Annotated[
        Path | None,
        Option(help="Read rewards from rollouts that any framework wrote, as `pods select` does, and time nothing."),
    ] = None,
    prompts: Annotated[int, Option(min=1, help=f"{_DUMP}: prompts a step.")] = 1,
    keep: Annotated[int, Option("-m", "--keep", min=2, help=f"{_DUMP}: m, rows trained of a prompt.")] = 16,
    group_by: Annotated[
        str, Option("--group_by", help=f"{_DUMP}: the key that identifies the group of a rollout.")
    ] = "prompt",
    reward_key: Annotated[str, Option("--reward_key", help=f"{_DUMP}: the key of the reward.")] = "reward",
) -> None:
    """Find the n and m with the most signal a second for a recipe, by measuring.

    Measures the seconds of a rollout, a prompt and a trained row and the rewards of the policy on real steps, models
    each n and m, then times plain GRPO and the three best. Recommends only a setting that it timed. Rows a step and the
    learning rate stay. Set any key of the recipe with --KEY VALUE.

    \b
    Examples:
      pods plan tiny-pods
      pods plan --config my.yaml --seconds 600 --write my-plan.yaml
      pods plan --rollouts run.parquet --prompts 64 -m 16
    """
    named, keys = named_recipe(context.args, config)
    if rollouts is not None:
        if write is not None or named is not None:
            raise UserError("--rollouts reads no recipe and times nothing: remove the recipe and --write.")
        print("\n".join(map(plain_text, _from_rollouts(rollouts, prompts * keep, keep, group_by, reward_key).lines())))
        return
    if named is None:
        raise UserError("Missing recipe. Pass a name, as in `pods plan tiny-pods`, a file, or --rollouts.")
    from ..recipe import load_recipe

    recipe = load_recipe(named, keys)
    if write is not None:
        check_output(write, "--write", inputs=[Path(recipe.source)], ours=begins_with(_HEAD), force=force)
    recipe.check_reachable()
    from ..training.planning import plan_recipe
    from ..training.progress import LiveLine
    from ..yaml_files import dump_yaml

    with stoppable() as stop, stop.at_once(), LiveLine(console(), every=10, spins=True) as line:
        made = plan_recipe(recipe, seconds, show=line.show)
    print("\n".join(map(plain_text, made.lines())))
    if write is not None:
        assert made.chosen is not None
        text = f"{_HEAD}{made.chosen.setting.label}\n# {plain_text(made.reason)}\n"
        write_output(write, "--write", text + dump_yaml({**recipe.given, **made.chosen.setting.keys}))
        console().print(f"Written: {safe_text(write)}: pods train --config {safe_text(write)}")


def _from_rollouts(path: Path, rows: int, m: int, group_by: str, reward_key: str) -> Plan:
    """Plan from the rewards of a file: signals without seconds."""
    from ..engines.trl.batching import counted
    from ..planning.plan import Pool, Prices, Setting, decide, describe, model, settings_to_compare, simulate
    from .rows import read_rollouts

    found, bad = read_rollouts(str(path), group_by, reward_key)
    groups: dict[str, list[float]] = {}
    for one in found:
        groups.setdefault(one.group, []).append(one.reward)
    pool = Pool(list(groups.values()))
    if bad or not len(pool.rewards):
        raise UserError(f"{path}: {bad[0] if bad else 'no rollout has a reward'}.")
    simulated = partial(simulate, pool=pool, rows=rows)
    candidates = model(settings_to_compare(Setting(m, m), rows), simulated, Prices())
    facts = {"plan": f"{counted(rows // m, 'prompt')} of {path.name} a step; nothing was timed"} | describe(pool)
    return decide(candidates, pool, simulated, Prices(), facts)
