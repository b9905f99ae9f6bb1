"""``pods eval``: accuracy of a policy on a task."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from ..distributed import get_rank
from ..errors import UserError
from ..recipe import Origin, Recipe, build_recipe, load_recipe
from ..recipe.schema import parse_overrides
from ..runs import Run
from ..runs.checkpoints import last_good, verify
from ..runs.files import CHECKPOINTS, RESULTS, open_own
from ..streams import outlive_output
from ..text import console, counted, safe_text
from .train import Config, stoppable


def evaluate(
    context: typer.Context,
    run: Annotated[Path | None, Option(help="A run directory: its final policy, on its own task.")] = None,
    model: Annotated[
        str | None, Option(help="A policy: a local path, a hub id, or tiny. With --run, replaces the run's policy.")
    ] = None,
    adapter: Annotated[str | None, Option(help="A LoRA adapter for --model: a local path or a hub id.")] = None,
    config: Config = None,
    backend: Annotated[
        str, Option(help="auto, generate or vllm. auto: vllm if it is installed and there is a GPU.")
    ] = "auto",
    output: Annotated[
        Path | None,
        Option(
            help="Directory: adds a line to results.jsonl, in lm-eval's format, and writes the completions as Parquet."
        ),
    ] = None,
) -> None:
    """Evaluate a policy on a recipe's task.

    Prints answer accuracy with its standard error, pass@k, format accuracy and lengths as a table in Markdown.
    Set any key of the recipe with --KEY VALUE, such as --task, --eval_prompts, --eval_repeats and
    --eval_temperature.

    \b
    Examples:
      pods eval --run runs/mine --eval_repeats 5 --output results
      pods eval --model tiny --task_difficulty hard
      pods eval --model Qwen/Qwen2.5-3B-Instruct --task gsm8k
      pods eval --model BASE --adapter runs/lora/checkpoints/final --task gsm8k
    """
    keys: dict[str, Any] = dict(parse_overrides(context.args))
    if adapter is not None and model is None:
        raise UserError("--adapter needs its base model: add --model BASE.")
    if run is not None and config is not None:
        raise UserError("--run and --config both name a task: give one of them.")
    if run is not None:
        recipe, model, adapter = _policy_of_run(Run.open(run), model, adapter, keys)
    elif model is not None:
        keys["model_name_or_path"] = model
        if config is None:
            # A recipe needs a limit of its training, which an evaluation does not use.
            recipe = build_recipe({"max_steps": 1}, Origin("pods eval"), keys)
        else:
            recipe = load_recipe(config, keys, trains=False)
    else:
        raise UserError("Nothing to evaluate: give --run DIRECTORY or --model PATH.")
    if output is not None:
        _check_writable(output)
    from ..training.display import EvaluationDisplay

    is_main = get_rank() == 0
    with stoppable(), outlive_output():
        with EvaluationDisplay(shows=is_main) as display:
            display.begin("importing torch")
            from ..evaluation.checkpoint import evaluate_checkpoint, write_results
            from ..rewards import check_named_rewards

            check_named_rewards(recipe.values)
            evaluation, line = evaluate_checkpoint(
                recipe,
                model,
                adapter=adapter,
                backend=backend,
                done=display.completed,
                begin=display.begin,
                note=display.note,
            )
        if not is_main:  # the first process writes and prints for all
            return
        written: tuple[Path, ...] = ()
        try:
            if output is not None:
                written = write_results(evaluation, line, output)
        finally:  # print the result even if it cannot be written
            _print_result(line)
        for path in written:
            console().print(f"{'written':<14} {safe_text(path)}")


def _check_writable(output: Path) -> None:
    """Create a directory for results; raise UserError, before the evaluation, if they cannot be written there."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        open_own(output / RESULTS, "ab").close()
    except OSError as error:
        raise UserError(f"--output {output} cannot be written to: {error.strerror}. Give another directory.") from error


def _policy_of_run(
    run: Run, model: str | None, adapter: str | None, keys: Mapping[str, Any]
) -> tuple[Recipe, str, str | None]:
    """Return the recipe of a run, and the model and the adapter to evaluate: by default those of its last policy."""
    if run.config and "task" not in run.config:
        raise UserError(
            f"--run {run.path}: a script made this run, and its task is in that script. Give --model with --task or "
            "--config."
        )
    if model is None:
        policy = str(_last_policy(run))
        if Path(policy, "adapter_config.json").is_file():
            adapter = policy  # of the base model that the recipe names
        else:
            model = policy
    if model is not None:
        keys = {**keys, "model_name_or_path": model}
    recipe = load_recipe(run.path / "config.yaml", keys, trains=False)
    return recipe, model or str(recipe.values["model_name_or_path"]), adapter


def _last_policy(run: Run) -> Path:
    """Return the final policy of a run; of a run that has none yet its last checkpoint."""
    damaged: list[str] = []
    final = run.final_checkpoint
    if final:
        problems = verify(final)
        if not problems:
            return final
        damaged.append(f"final: {problems[0]}")
    good, skipped = last_good(run.path / CHECKPOINTS)
    damaged += skipped
    list_of_damaged = "".join(f"\n  damaged {line}" for line in damaged)
    if good is None:
        raise UserError(
            f"{run.path} ({run.state}) has no policy under checkpoints/: give one with --model.{list_of_damaged}"
        )
    if damaged:  # the score of an older policy would be taken for that of this run
        older = f"pods eval --run {shlex.quote(str(run.path))} --model {shlex.quote(str(good))}"
        raise UserError(
            f"{run.path} ({run.state}): its last policy is damaged, and nothing was evaluated. To evaluate the older "
            f"{good.name}: {older}{list_of_damaged}"
        )
    console(stderr=True).print(
        f"[yellow]Note:[/yellow] {safe_text(run.path)} ({safe_text(run.state)}) has no checkpoints/final. This "
        f"evaluates {safe_text(good.name)}."
    )
    return good


def _print_result(line: Mapping[str, Any]) -> None:
    """Print what a line of `results.jsonl` was evaluated on and with, then its scores as a table in Markdown."""
    from rich import box
    from rich.table import Table

    config = line["config"]
    ((task, scores),) = line["results"].items()
    prompts = line["n-samples"][task]["effective"]
    seconds = line["total_evaluation_time_seconds"]
    facts = {
        "policy": config["model"],
        "adapter": config["adapter"],
        "task": f"{task} {line['versions'][task]}",
        "completions": f"{counted(prompts, 'prompt')} x {config['repeats']}, temperature {config['temperature']:g}",
        "sampled with": f"{config['backend']}, {seconds:.3g} s",
    }
    for name, value in facts.items():
        if value is not None:
            console().print(f"{name:<14} {safe_text(value)}")
    table = Table("metric", "value", "standard error", box=box.MARKDOWN)
    for name, value in scores.items():
        if not name.endswith("_stderr") and name != "pass@1":  # pass@1 is the accuracy
            error = scores.get(f"{name}_stderr", math.nan)
            is_share = name.endswith("accuracy") or name.startswith("pass@")
            numbers = [f"{100 * number:.1f} %" if is_share else f"{number:.4f}" for number in (value, error)]
            table.add_row(name, numbers[0], "" if math.isnan(error) else numbers[1])
    console().print(table)
