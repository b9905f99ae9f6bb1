"""``pods eval``: accuracy of a policy on a task."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
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
from ..runs.files import CHECKPOINTS, open_own
from ..streams import outlive_output
from ..text import console, counted, safe_text
from .train import Config, stoppable

RESULTS = "results.jsonl"


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
      pods eval --model Qwen/Qwen2.5-3B-Instruct --adapter runs/lora/checkpoints/final --task gsm8k
    """
    from ..rewards import check_rewards

    recipe, model, adapter = _find_policy(run, model, adapter, config, parse_overrides(context.args))
    with stoppable():
        check_rewards(recipe.values)
    if output is not None:
        _check_writable(output)
    from ..evaluation.checkpoint import evaluate_checkpoint, write_results
    from ..training.progress import LiveLine

    main = get_rank() == 0
    with stoppable(), outlive_output(None):
        with LiveLine(console(stderr=True), every=60) if main else nullcontext() as live:
            found, line = evaluate_checkpoint(
                recipe,
                model,
                adapter=adapter,
                backend=backend,
                done=lambda rows, of: live.show(f"{rows} of {of} completions") if live and rows < of else None,
            )
        if not main:
            return
        written: tuple[Path, ...] = ()
        try:
            written = write_results(found, line, output) if output is not None else ()
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


def _find_policy(
    run: Path | None, model: str | None, adapter: str | None, config: str | None, keys: dict[str, Any]
) -> tuple[Recipe, str, str | None]:
    """Return the recipe with the task, and the policy's model and adapter."""
    if adapter is not None and model is None:
        raise UserError("--adapter needs its base model: add --model BASE.")
    if run is None and model is None:
        raise UserError("Nothing to evaluate: give --run DIRECTORY or --model PATH.")
    if run is not None and config is not None:
        raise UserError("--run and --config both name a task: give one of them.")
    if run is not None and model is None:
        model = str(_last_policy(Run.open(run)))
        if Path(model, "adapter_config.json").is_file():  # the recipe names its base model
            model, adapter = None, model
    if model is not None:
        keys = {**keys, "model_name_or_path": model}
    source = config if run is None else Run.open(run).path / "config.yaml"
    if source is None:
        recipe = build_recipe({"max_steps": 1}, Origin("pods eval"), keys)
    else:
        recipe = load_recipe(source, keys, trains=False)
    return recipe, model or str(recipe.values["model_name_or_path"]), adapter


def _last_policy(run: Run) -> Path:
    """Return the final policy of a run; of a run that has none yet its last checkpoint.

    Raises UserError if that policy is damaged: the score of an older one would be taken for that of this run.
    """
    final = run.final_checkpoint
    problems = verify(final) if final else []
    if final and not problems:
        return final
    damaged = [f"final: {line}" for line in problems[:1]]
    good, skipped = last_good(run.path / CHECKPOINTS)
    damaged += skipped
    torn = "".join(f"\n  damaged {line}" for line in damaged)
    if good is None:
        raise UserError(f"{run.path} ({run.state}) has no policy under checkpoints/: give one with --model.{torn}")
    if damaged:
        older = f"pods eval --run {shlex.quote(str(run.path))} --model {shlex.quote(str(good))}"
        raise UserError(
            f"{run.path} ({run.state}): its last policy is damaged, and nothing was evaluated. To evaluate the older "
            f"{good.name}: {older}{torn}"
        )
    console(stderr=True).print(
        f"[yellow]Note:[/yellow] {safe_text(run.path)} ({safe_text(run.state)}) has no checkpoints/final. This "
        f"evaluates {safe_text(good.name)}."
    )
    return good


def _print_result(line: Mapping[str, Any]) -> None:
    """Print what was evaluated and how, then the scores as a table in Markdown; `line` is that of `results.jsonl`."""
    from rich import box
    from rich.table import Table

    config, ((task, scores),) = line["config"], line["results"].items()
    prompts, seconds = line["n-samples"][task]["effective"], line["total_evaluation_time_seconds"]
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
            table.add_row(name, f"{value:.4f}", "" if math.isnan(error) else f"{error:.4f}")
    console().print(table)
