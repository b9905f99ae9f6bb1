"""``pods eval``: accuracy of a policy on a task."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Option

from ..distributed import get_rank
from ..distributed.streams import outlive_output
from ..engines.trl.batching import counted
from ..errors import UserError
from ..runs import read_jsonl
from ..runs.outputs import check_output
from ..text import console, safe_text
from .train import Config, stoppable

if TYPE_CHECKING:
    from rich.console import Console

    from ..evaluation.checkpoint import Outcome
    from ..recipe import Recipe
    from ..runs import Run

RESULTS = "results.jsonl"
_LOG_SECONDS = 60.0  # between lines of progress in a log


class _Policy(NamedTuple):
    """The policy to evaluate, and the recipe with the task."""

    recipe: Recipe
    model: str
    adapter: str | None


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
    force: Annotated[bool, Option("--force", help="Add to a results.jsonl that pods eval did not write.")] = False,
) -> None:
    """Evaluate a policy on a recipe's task.

    Prints answer accuracy with its standard error, pass@k, format accuracy and lengths as lm-eval's table in Markdown.
    Set any key of the recipe with --KEY VALUE, such as --task, --eval_prompts, --eval_repeats and
    --eval_temperature.

    \b
    Examples:
      pods eval --run runs/mine --eval_repeats 5 --output results
      pods eval --model tiny --task_difficulty hard
      pods eval --model Qwen/Qwen2.5-3B-Instruct --adapter runs/lora/checkpoints/final --task gsm8k
    """
    from ..recipe.reading import parse_overrides
    from ..rewards import check_rewards

    if output is not None:
        _check_writable(output, force)
    policy = _find_policy(run, model, adapter, config, parse_overrides(context.args))
    with stoppable():
        check_rewards(policy.recipe.values)
    from ..evaluation.checkpoint import evaluate_checkpoint, results_line, write_results

    main = get_rank() == 0
    with stoppable(), outlive_output(None):
        with _progress(console(stderr=True) if main else None) as done:
            outcome = evaluate_checkpoint(*policy[:2], adapter=policy.adapter, backend=backend, done=done)
        if not main:
            return
        written: tuple[Path, ...] = ()
        try:
            written = write_results(outcome, output) if output is not None else ()
        finally:  # print the result even if it cannot be written
            _print_outcome(policy, outcome, results_line(outcome))
        for path in written:
            console().print(f"{'written':<14} {safe_text(path)}")


def _check_writable(output: Path, force: bool) -> None:
    """Raise UserError, before the evaluation, if the results cannot be written to a directory; create nothing."""
    there = next(place for place in (output, *output.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        raise UserError(f"--output {output}: {there} is a file: give a directory for results.jsonl.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"--output {output}: {there} cannot be written to. Give another directory.")
    if output.is_dir():
        check_output(output / RESULTS, "--output", ours=_are_results, force=force)


def _are_results(path: Path) -> bool:
    """Return whether a file has a line of `pods eval`; a kill may have torn others."""
    return path.stat().st_size == 0 or any("results" in line and "versions" in line for line in read_jsonl(path))


def _find_policy(
    run: Path | None, model: str | None, adapter: str | None, config: str | None, keys: dict[str, Any]
) -> _Policy:
    from ..recipe import build_recipe, load_recipe
    from ..runs import Run
    from ..yaml_files import Origin

    if adapter is not None and model is None:
        raise UserError("--adapter needs its base model: add --model BASE.")
    if run is None and model is None:
        raise UserError("Nothing to evaluate: give --run DIRECTORY or --model PATH.")
    if run is not None and config is not None:
        raise UserError("--run and --config both name a task: give one of them.")
    source: str | Path | None = config
    if run is not None:
        found = Run.open(run)
        source = found.path / "config.yaml"
        if model is None:
            model = str(_last_policy(found))
            if Path(model, "adapter_config.json").is_file():  # the recipe names its base model
                model, adapter = None, model
    if model is not None:
        keys = {**keys, "model_name_or_path": model}
    if source is None:
        recipe = build_recipe({"max_steps": 1}, Origin("pods eval"), keys)
    else:
        recipe = load_recipe(source, keys, trains=False)
    return _Policy(recipe, model or str(recipe.values["model_name_or_path"]), adapter)


def _last_policy(run: Run) -> Path:
    """Return the final policy of a run, or else its last complete checkpoint."""
    from ..runs.checkpoints import MANIFEST, last_good, verify
    from ..runs.files import CHECKPOINTS

    final = run.final_checkpoint
    problems = verify(final) if final and (final / MANIFEST).is_file() else []  # earlier versions wrote no manifest
    if final and not problems:
        return final
    good, skipped = last_good(run.path / CHECKPOINTS)
    if good is None:
        torn = "".join(f"\n  skipped {line}" for line in [*(f"final: {line}" for line in problems[:1]), *skipped])
        raise UserError(f"{run.path} ({run.state}) has no policy under checkpoints/: give one with --model.{torn}")
    return good


@contextmanager
def _progress(out: Console | None) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback that shows the rows done and the time left on `out`; None: show nothing."""
    from ..training.progress import LiveLine, duration

    if out is None:
        yield lambda rows, of: None
        return
    started = time.monotonic()
    with LiveLine(out, every=_LOG_SECONDS, first=_LOG_SECONDS) as line:

        def done(rows: int, of: int) -> None:
            left = (time.monotonic() - started) / rows * (of - rows)
            if rows < of:
                line.show(f"{rows} of {of} completions, {duration(left)} left")

        yield done


def _print_outcome(policy: _Policy, outcome: Outcome, line: dict[str, Any]) -> None:
    """Print what was evaluated and how, then the scores as a table."""
    found = outcome.evaluation
    facts = {
        "policy": policy.model,
        **({"adapter": policy.adapter} if policy.adapter else {}),
        "task": f"{outcome.task.name} {outcome.task.version}",
        "completions": f"{counted(found.prompts, 'prompt')} x {found.repeats}, temperature {found.temperature:g}",
        "sampled with": f"{outcome.settings['backend']}, {found.eval_seconds:.3g} s",
    }
    for name, value in facts.items():
        console().print(f"{name:<14} {safe_text(value)}")
    console().print(f"\n{safe_text(score_table(line))}\n")


def score_table(line: Mapping[str, Any]) -> str:
    """Return the scores in a line of `results.jsonl` as the Markdown table that lm-eval prints.

    >>> print(score_table({"results": {"sums": {"accuracy": 0.5, "accuracy_stderr": 0.1}}, "versions": {"sums": "3"},
    ...     "higher_is_better": {"sums": {"accuracy": True}}}))
    |Tasks|Version|Filter|n-shot| Metric |   |Value |   |Stderr|
    |-----|------:|------|-----:|--------|---|-----:|---|-----:|
    |sums |      3|none  |     0|accuracy|↑  |0.5000|±  |0.1000|
    """
    ((task, scores),) = line["results"].items()
    head = ["Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr"]
    rows = [head]
    for name, value in scores.items():
        if name.endswith("_stderr") or name == "pass@1":  # pass@1 is the accuracy
            continue
        error = scores.get(f"{name}_stderr", math.nan)
        first = [task, line["versions"][task], "none", "0"] if len(rows) == 1 else [""] * 4
        arrow = {True: "↑", False: "↓", None: ""}[line["higher_is_better"][task].get(name)]
        rows.append([*first, name, arrow, f"{value:.4f}", *(("", "") if math.isnan(error) else ("±", f"{error:.4f}"))])
    cells = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    ends = [":" if column in (1, 3, 6, 8) else "-" for column in range(len(head))]
    lines = [
        [
            cell.rjust(width) if end == ":" else cell.ljust(width)
            for cell, width, end in zip(row, widths, ends, strict=True)
        ]
        for row in cells
    ]
    lines[0] = [cell.center(width) for cell, width in zip(head, widths, strict=True)]
    lines.insert(1, ["-" * (width - 1) + end for width, end in zip(widths, ends, strict=True)])
    return "\n".join(f"|{'|'.join(row)}|" for row in lines)
