"""``pods eval``: accuracy of a policy on a task."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..distributed import place
from ..distributed.streams import outlive_output
from ..errors import UserError
from ..text import console, safe_text
from .train import stoppable

if TYPE_CHECKING:
    from rich.console import Console

    from ..evaluation.checkpoint import Outcome
    from ..recipe import Recipe
    from ..runs import Run

_LOG_SECONDS = 60.0  # between lines of progress where the output is no terminal


class _What(NamedTuple):
    """The recipe with the task, and the policy."""

    recipe: Recipe
    model: str
    adapter: str | None


def evaluate(
    context: typer.Context,
    run: Annotated[Path | None, typer.Option(help="A run directory: its final policy, on its own task.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A policy: a local path, a hub id, or tiny. With --run: instead of its.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="A LoRA adapter for --model: a local path or a hub id.")] = None,
    config: Annotated[str | None, typer.Option(help="A recipe that says which task.")] = None,
    backend: Annotated[
        str, typer.Option(help="auto, generate or vllm. auto: vllm where it is installed and there is a GPU.")
    ] = "auto",
    output: Annotated[
        Path | None, typer.Option(help="Directory: a line is added to results.jsonl, completions are kept beside it.")
    ] = None,
) -> None:
    """Evaluate a policy on a task.

    Prints answer accuracy with its standard error, pass@k, format accuracy and lengths. What to evaluate on is the
    recipe's task; --eval_prompts, --eval_repeats, --eval_temperature and every other key can be set.

    \b
    Examples:
      pods eval --run runs/mine --eval_repeats 5 --output results
      pods eval --model tiny --task_difficulty hard
      pods eval --model Qwen/Qwen2.5-3B-Instruct --adapter runs/lora/checkpoints/final --task gsm8k
    """
    from ..recipe.reading import parse_overrides
    from ..rewards import check_rewards

    if output is not None:
        _check_writable(output)
    first = place().rank == 0
    what = _what(run, model, adapter, config, parse_overrides(context.args))
    with stoppable():
        check_rewards(what.recipe.values)
    from ..evaluation.checkpoint import evaluate_checkpoint
    from ..evaluation.results import write_results

    out = console()
    done = _progress(console(stderr=True)) if first else lambda rows, of: None
    written: tuple[Path, ...] = ()
    with stoppable(), outlive_output(None):
        outcome = evaluate_checkpoint(what.recipe, what.model, adapter=what.adapter, backend=backend, done=done)
        if not first:
            return
        try:
            written = write_results(outcome, output) if output is not None else ()
        finally:  # what could not be written is on the screen at least
            _print_outcome(what, outcome, out)
    for path in written:
        out.print(f"{'written':<24} {safe_text(path)}")


def _check_writable(output: Path) -> None:
    """Refuse, before an evaluation, a directory that its results cannot be written to; makes nothing."""
    there = next(place for place in (output, *output.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        raise UserError(f"--output {output}: {there} is a file: give a directory, results.jsonl is written in it.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"--output {output}: {there} cannot be written to. Give another directory.")


def _print_outcome(what: _What, outcome: Outcome, out: Console) -> None:
    lines = {
        "policy": what.model,
        **({"adapter": what.adapter} if what.adapter else {}),
        "task": f"{outcome.task.name} {outcome.task.version}",
        "backend": outcome.settings["backend"],
        **outcome.evaluation.row(),
    }
    for name, value in lines.items():
        out.print(f"{name:<24} {value:.4g}" if isinstance(value, float) else f"{name:<24} {safe_text(value)}")


def _progress(out: Console) -> Callable[[int, int], None]:
    """Rows done and seconds left: one line redrawn on a terminal, now and then a line in a log."""
    started = printed = time.monotonic()
    redraws = out.is_terminal and not out.is_dumb_terminal

    def done(rows: int, of: int) -> None:
        nonlocal printed
        now = time.monotonic()
        left = (now - started) / rows * (of - rows)
        line = f"{rows} of {of} completions, {left:.0f} s left"
        if redraws:
            out.print(f"\r{line:<60}", end="" if rows < of else "\n")
        elif now - printed >= _LOG_SECONDS and rows < of:
            printed = now
            out.print(line)

    return done


def _what(
    run: Path | None, model: str | None, adapter: str | None, config: str | None, overrides: dict[str, Any]
) -> _What:
    from ..recipe import Origin, build_recipe, load_recipe
    from ..runs import Run

    if adapter is not None and model is None:
        raise UserError("--adapter needs the model it is for: give it with --model BASE.")
    if run is None and model is None:
        raise UserError("Nothing to evaluate: give --run DIRECTORY or --model PATH.")
    if run is not None and config is not None:
        raise UserError("--run and --config both name a task: give one of them.")
    found = Run.open(run) if run is not None else None
    if model is None and found is not None:
        policy = _policy_of(found)
        if (policy / "adapter_config.json").is_file():  # the base as the recipe has it, wherever the run was made
            recipe = load_recipe(found.path / "config.yaml", overrides, trains=False)
            return _What(recipe, str(recipe.values["model_name_or_path"]), str(policy))
        model = str(policy)
    assert model is not None
    overrides = {**overrides, "model_name_or_path": model}
    if found is not None:
        return _What(load_recipe(found.path / "config.yaml", overrides, trains=False), model, adapter)
    if config is not None:
        return _What(load_recipe(config, overrides, trains=False), model, adapter)
    return _What(build_recipe({"max_steps": 1}, Origin("pods eval"), overrides), model, adapter)


def _policy_of(run: Run) -> Path:
    from ..runs.checkpoints import MANIFEST, last_good, verify
    from ..runs.files import CHECKPOINTS

    final = run.final_checkpoint
    problems = verify(final) if final and (final / MANIFEST).is_file() else []  # earlier versions wrote none
    if final and not problems:
        return final
    good, passed = last_good(run.path / CHECKPOINTS)
    if good is None:
        torn = "".join(f"\n  passed over {line}" for line in [*(f"final: {line}" for line in problems[:1]), *passed])
        raise UserError(f"{run.path} ({run.state}) has no policy under checkpoints/: give one with --model.{torn}")
    return good
