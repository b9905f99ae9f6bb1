"""``pods eval``: accuracy of a policy on a task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UserError
from ..terminal import console, safe_text

if TYPE_CHECKING:
    from ..recipe import Recipe


def evaluate(
    context: typer.Context,
    run: Annotated[Path | None, typer.Option(help="A run directory: its final policy, on its own task.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A policy: a local path, a hub id, or tiny. With --run: instead of its.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="A recipe that says which task.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result to this JSON file as well.")] = None,
) -> None:
    """Evaluate a policy on a task.

    Prints answer accuracy with its standard error, format accuracy and lengths. What to
    evaluate on is the recipe's task; --eval_prompts, --eval_repeats, --eval_temperature and every other key can
    be set.

    \b
    Examples:
      pods eval --run runs/mine
      pods eval --model tiny --task_difficulty hard --eval_repeats 5
      pods eval --model Qwen/Qwen2.5-3B-Instruct --task gsm8k --eval_temperature 0
    """
    from ..recipe.reading import parse_overrides

    recipe, policy = _what(run, model, config, parse_overrides(context.args))
    from ..evaluate import evaluate_checkpoint

    result = evaluate_checkpoint(recipe, policy).row()
    if output is not None:
        from ..runs import write_atomic

        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, json.dumps({"model": policy, **result}, indent=2) + "\n")
    out = console()
    out.print(f"{'policy':<24} {safe_text(policy)}")
    for name, value in result.items():
        out.print(f"{name:<24} {value:.4g}" if isinstance(value, float) else f"{name:<24} {safe_text(value)}")


def _what(run: Path | None, model: str | None, config: str | None, overrides: dict[str, Any]) -> tuple[Recipe, str]:
    """The recipe with the task, and the policy."""
    from ..recipe import build_recipe, load_recipe
    from ..recipe.reading import Source
    from ..runs import Run

    if run is None and model is None:
        raise UserError("Nothing to evaluate: give --run DIRECTORY or --model PATH.")
    if run is not None and config is not None:
        raise UserError("--run and --config both name a task: give one of them.")
    found = Run.open(run) if run is not None else None
    if model is None and found is not None:
        model = str(_policy_of(found))
    overrides = {**overrides, "model_name_or_path": model}
    if found is not None:
        return load_recipe(found.path / "config.yaml", overrides), str(model)
    if config is not None:
        return load_recipe(config, overrides), str(model)
    return build_recipe({"max_steps": 1}, Source("pods eval"), overrides), str(model)


def _policy_of(run: Any) -> Path:
    policy = run.final_checkpoint or next(reversed(run.checkpoints()), None)
    if policy is None:
        raise UserError(f"{run.path} ({run.state}) has no policy under checkpoints/: give one with --model.")
    return policy
