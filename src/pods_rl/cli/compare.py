"""``pods compare``: arms x seeds, then the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..distributed.signals import stop_on_signals
from ..distributed.streams import outlive_output
from ..errors import UserError
from ..planning.batching import counted
from ..runs.files import LOG
from ..text import console, safe_text

if TYPE_CHECKING:
    from ..experiment import Event, Experiment


def compare(
    context: typer.Context,
    config: Annotated[
        str | None, typer.Option(help="An experiment: a YAML file with arms, or a name that `pods recipes` lists.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Directory of the experiment. [default: runs/<name>]")] = None,
    force: Annotated[bool, typer.Option("--force", help="Make finished runs again whose recipe has changed.")] = False,
    parallel: Annotated[
        int, typer.Option(help="Runs made side by side: on a GPU each where there are some, else with cores (threads).")
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every run, show every arm, and stop.")] = False,
) -> None:
    """Train every arm with every seed, then report which was faster.

    Finished runs are not repeated: after Ctrl-C or a crash, the same command goes on where it stopped.

    \b
    Examples:
      pods compare quickstart
      pods compare --config quickstart --seeds 8 --output runs/eight-seeds
      pods compare --config mine.yaml --max_seconds 600
    """
    from ..experiment import load_experiment, run_experiment
    from ..recipe.reading import parse_words
    from .board import Board

    config, given = parse_words(context.args, config)
    if config is None:
        raise UserError("No experiment: name a shipped one, as in `pods compare quickstart`, or a YAML file with arms.")
    experiment = load_experiment(config, given)
    output = output or Path("runs") / experiment.name
    if dry_run:
        _show(experiment)
        return
    with outlive_output(output / LOG):
        try:
            with stop_on_signals(), Board(experiment.plan(), parallel=parallel) as board:
                run_experiment(experiment, output, board, force=force, parallel=parallel)
        except KeyboardInterrupt as interrupt:
            console(stderr=True).print(
                f"\nStopped. What is done is kept in {safe_text(output)}; the same command goes on from there."
            )
            raise typer.Exit(getattr(interrupt, "code", 130)) from None
        complete = _report(experiment, output)
        _tell_failures(board.failures)
    if board.failures or not complete:
        raise typer.Exit(1)


def _report(experiment: Experiment, output: Path) -> bool:
    """Write the report and print its summary; whether that could be done."""
    from ..report import build_report, print_summary

    try:
        print_summary(build_report(output, baseline=experiment.baseline), console())
    except (OSError, UserError) as error:  # no run has an evaluation, or the disk is full
        console(stderr=True).print(f"[red]No report:[/red] {safe_text(error)}")
        return False
    return True


def _tell_failures(failures: Sequence[Event]) -> None:
    """Last, so that it is what stays on the screen: each run that is missing from the comparison, and why."""
    for event in failures:
        log = event.path / LOG
        more = f"  (what it printed: {safe_text(log)})" if log.is_file() else ""
        console(stderr=True).print(
            f"[red]{event.kind.capitalize()}:[/red] {safe_text(event.run.arm)} seed {event.run.seed}: "
            f"{safe_text(event.reason or 'no reason given')}{more}"
        )
    if failures:
        console(stderr=True).print(f"The same command makes {'it' if len(failures) == 1 else 'them'} again.")


def _show(experiment: Experiment) -> None:
    from ..recipe.reading import dump_yaml
    from .train import show_plan, tell_missing

    plan = experiment.plan()
    for run in plan[: len(experiment.arms)]:
        mark = "  (the baseline)" if run.arm == experiment.baseline else ""
        console().print(f"[bold]{safe_text(run.arm)}[/bold]{mark}")
        for line in dump_yaml(experiment.arms[run.arm]).splitlines() if experiment.arms[run.arm] else []:
            console().print(f"{'sets':<20} {safe_text(line)}")
        show_plan(run.recipe.batch_plan(experiment.processes))
    arms, seeds = len(experiment.arms), len(experiment.seeds)
    budgets = [run.recipe.values["max_seconds"] for run in plan]
    time = f", {sum(budgets):g} seconds of training clock together" if all(budgets) else ", ended by their steps"
    product = f"{counted(arms, 'arm')} x {counted(seeds, 'seed')}"
    console().print(f"{counted(len(plan), 'run')}: {product}{time}")
    tell_missing(next((run.recipe for run in plan if run.recipe.missing_library), plan[0].recipe))
