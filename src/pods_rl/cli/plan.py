"""``pods plan``: which n and m have most signal a second for a recipe on this machine, by measuring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ..errors import UserError
from ..text import console, plain_text, safe_text
from .train import Config, RecipeName, named_recipe, stoppable

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..recipe import Recipe

_LEDGER = "With --rollouts"


def plan(
    context: typer.Context,
    config: Config = None,
    recipe_name: RecipeName = None,
    seconds: Annotated[float, Option(min=1, help="Seconds to measure and time, at most where steps are short.")] = 120,
    write: Annotated[Path | None, Option(help="Write the recipe with the recommended settings to this file.")] = None,
    figure: Annotated[Path | None, Option(help="Draw signal against seconds here, .svg or .png.")] = None,
    rollouts: Annotated[
        Path | None,
        Option(help="Plan from rollouts that any framework wrote (JSONL or Parquet, as `pods select` reads them), "
                    "without measuring."),
    ] = None,
    generate_seconds: Annotated[
        tuple[float, float], Option(metavar="A B", help=f"{_LEDGER}: seconds of a generation call and of a rollout.")
    ] = (0.0, 0.0),
    update_seconds: Annotated[float, Option(min=0, help=f"{_LEDGER}: seconds of a trained row.")] = 0.0,
    prompts: Annotated[int, Option(min=1, help=f"{_LEDGER}: prompts a step.")] = 1,
    keep: Annotated[int, Option("-m", "--keep", min=2, help=f"{_LEDGER}: m, rows trained of a prompt.")] = 16,
    group_by: Annotated[str, Option(help=f"{_LEDGER}: the key that identifies the group of a rollout.")] = "prompt",
    reward_key: Annotated[str, Option(help=f"{_LEDGER}: the key of the reward.")] = "reward",
) -> None:  # fmt: skip
    """Find the n and m with most signal a second for a recipe, by measuring.

    Measures prices and pass rates on real steps whose policy does not move, models the signal a second of a grid of
    n, m, waves, giving up and dead groups' places, times the three best and plain GRPO, and recommends one: often GRPO.
    Rows a step and learning rate stay. Set any key of the recipe with --KEY VALUE. docs/plan.md: the model, its limits.

    \b
    Examples:
      pods plan tiny-pods
      pods plan --config my.yaml --seconds 600 --write my-plan.yaml
      pods train --config my-plan.yaml
      pods train --config my.yaml --num_rollouts auto
      pods plan --rollouts run.parquet --generate-seconds 9 0.02 --prompts 64
    """  # fmt: skip
    for path in (write, figure):
        if path is not None and not path.resolve().parent.is_dir():
            raise UserError(f"{path}: its folder does not exist. Create it, or choose another.")
    if figure is not None and figure.suffix not in (".svg", ".png"):
        raise UserError(f"--figure {figure}: expected a name that ends in .svg or .png.")
    if rollouts is not None:
        made, recipe = (
            _from_ledger(rollouts, generate_seconds, update_seconds, prompts * keep, keep, group_by, reward_key),
            None,
        )
    else:
        made, recipe = _measured(context.args, config, recipe_name, seconds)
    for line in made.lines():
        print(plain_text(line))
    if figure is not None:
        _draw(made, figure)
    if write is not None:
        _write(made, recipe, write)


def _measured(words: list[str], config: str | None, name: str | None, seconds: float) -> tuple[Plan, Recipe]:
    from ..recipe import load_recipe
    from ..training.planning import plan_recipe
    from ..training.progress import LiveLine

    named, keys = named_recipe(words, config, name)
    if named is None:
        raise UserError("No recipe: name one, as in `pods plan tiny-pods`, or a file; or give --rollouts.")
    recipe = load_recipe(named, keys)
    recipe.check_reachable()
    with stoppable() as stop, stop.at_once(), LiveLine(console(), every=10, spins=True) as line:
        return plan_recipe(recipe, seconds, show=line.show), recipe


def _from_ledger(
    path: Path, generate: tuple[float, float], update: float, rows: int, m: int, group_by: str, reward_key: str
) -> Plan:
    """Plan from rollouts of another framework: everything is modelled, nothing is timed."""
    from ..engines.trl.batching import BatchPlan
    from ..planning.costs import Costs
    from ..planning.grid import settings_to_compare
    from ..planning.plan import decide, describe_costs, describe_pool, finalists, model
    from ..planning.signal import Batches, Pool, observed
    from .select import read_rollouts

    costs = Costs(call=generate[0], rollout=generate[1], row=update)
    if not any((*generate, update)) or min(*generate, update) < 0:
        raise UserError(
            f"--rollouts needs prices of at least 0, and one above it: got --generate-seconds {generate[0]:g} "
            f"{generate[1]:g} --update-seconds {update:g}. Read them from the framework's own timings of a step."
        )
    found, bad = read_rollouts(str(path), group_by, reward_key)
    scored = [one for one in found if one.reward == one.reward]
    if bad or not scored:
        raise UserError(f"{path}: {bad[0] if bad else 'no rollout has a reward'}.")
    groups: dict[str, int] = {}
    texts: dict[Any, int] = {}
    rewards = [one.reward for one in scored]
    pool = Pool(
        observed(
            [groups.setdefault(one.group, len(groups)) for one in scored], rewards, rewards,
            [texts.setdefault(str(one.values.get("completion", one.values.get("output", i))), i)
             for i, one in enumerate(scored)],
        )
    )  # fmt: skip
    batches = Batches(rows)
    settings = settings_to_compare({"num_generations": m}, BatchPlan(m, m, 1, rows, 1, 1, None))
    candidates = model([one for one in settings if one.dead_groups != "share"], pool, batches, costs)  # as verl
    facts = {"plan": f"{rows // m} prompts of {path.name} a step; nothing was measured or timed"}
    facts |= describe_costs(costs) | describe_pool(pool)
    return decide(candidates, finalists(candidates), pool, batches, costs, facts=facts)


def _draw(made: Plan, path: Path) -> None:
    from ..planning.plan import Candidate
    from ..report.plots import Dot, Role, plan_figure, to_bytes
    from ..runs import write_atomic

    def dot(one: Candidate, timed: float | None) -> Dot:
        role: Role = "baseline" if one is made.base else "reference" if one is made.chosen else "arm"
        return Dot(one.setting.label, one.seconds, one.expected.signal, timed, role)

    named = [dot(one, one.timed or one.seconds) for one in made.timed]
    found = plan_figure([*named, *(dot(one, None) for one in made.candidates)])
    write_atomic(path, to_bytes(found, "svg" if path.suffix == ".svg" else "png"), follow=True)
    console().print(f"Figure: {safe_text(path)}")


def _write(made: Plan, recipe: Recipe | None, path: Path) -> None:
    """Write the recipe with the plan's keys; without a recipe the keys alone."""
    from ..planning.grid import PLANNED
    from ..recipe.reading import dump_yaml
    from ..runs import write_atomic

    keys = made.keys
    head = [f"pods plan: {made.chosen.setting.label}", *made.reasons]
    if recipe is None:
        head.append("verl: num_generations is actor_rollout_ref.rollout.n, the rest trainer.v1.sampler.sampler_kwargs.")
    else:
        now = recipe.every_value()
        head.append(f"Planned: {', '.join(key for key in keys if now[key] != keys[key]) or 'no change'}")
    rest = {} if recipe is None else {key: value for key, value in recipe.given.items() if key not in PLANNED}
    text = "".join(f"# {plain_text(line)}\n" for line in head) + dump_yaml(keys | rest)
    write_atomic(path, text, follow=True)
    then = "" if recipe is None else f": pods train --config {path}"
    console().print(f"Written: {safe_text(path)}{safe_text(then)}")
