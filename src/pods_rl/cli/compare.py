"""``pods compare``: arms x seeds, then the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..terminal import console, safe_text

if TYPE_CHECKING:
    from ..experiment import Event, Experiment

_LOOKS = {"started": "bold", "skipped": "dim", "finished": "green", "stopped": "yellow", "failed": "red"}


def compare(
    context: typer.Context,
    config: Annotated[
        str, typer.Option(help="An experiment: a YAML file with arms, or a name that `pods recipes` lists.")
    ],
    output: Annotated[Path | None, typer.Option(help="Directory of the experiment. [default: runs/<name>]")] = None,
    force: Annotated[bool, typer.Option("--force", help="Make finished runs again whose recipe has changed.")] = False,
    parallel: Annotated[int, typer.Option(help="Runs made side by side; give each its own cores (threads).")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check every run, show what would be made, and stop.")
    ] = False,
) -> None:
    """Train every arm with every seed, then report which was faster.

    Finished runs are not repeated: after Ctrl-C or a crash, the same command goes on where it stopped.

    \b
    Examples:
      pods compare --config quickstart
      pods compare --config quickstart --seeds 8 --output runs/eight-seeds
      pods compare --config mine.yaml --max_seconds 600
    """
    from ..experiment import load_experiment, run_experiment
    from ..recipe.reading import parse_overrides

    experiment = load_experiment(config, parse_overrides(context.args))
    output = output or Path("runs") / experiment.name
    if dry_run:
        _show(experiment)
        return
    try:
        counts = run_experiment(experiment, output, _tell, force=force, parallel=parallel)
    except KeyboardInterrupt:
        console(stderr=True).print(
            f"\nStopped. What is done is kept in {safe_text(output)}; the same command goes on from there."
        )
        raise typer.Exit(130) from None
    from ..report import build_report, print_summary

    print_summary(build_report(output, baseline=experiment.baseline), console())
    if counts.get("failed", 0) + counts.get("stopped", 0):
        raise typer.Exit(1)


def _show(experiment: Experiment) -> None:
    from .train import show_plan

    plan = experiment.plan()
    for run in plan[: len(experiment.arms)]:
        console().print(f"[bold]{safe_text(run.arm)}[/bold]")
        show_plan(run.recipe.batch_plan())
    seconds = sum(run.recipe.values["max_seconds"] or 0 for run in plan)
    console().print(f"{len(plan)} runs, {seconds:g} seconds of training clock together")


def _tell(event: Event) -> None:
    reason = f": {safe_text(event.reason)}" if event.reason else ""
    look = _LOOKS[event.kind]
    console().print(
        f"[{look}][{event.position}/{event.total}] {safe_text(event.run.arm)} seed {event.run.seed} "
        f"{event.kind}{reason}[/{look}]  {safe_text(event.path)}"
    )
