"""``pods compare``: arms x seeds, then the report; ``pods report`` and ``pods watch``: its report, once or live."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from ..distributed.signals import stop_on_signals
from ..errors import UserError
from ..experiment import Event, Experiment, Starters, load_experiment, make_starters, run_experiment
from ..runs.files import LOG, check_output
from ..streams import outlive_output
from ..text import console, counted, safe_text
from ..yaml_files import dump_yaml
from .train import DryRun, Force, named_recipe, note_missing, show_facts, show_notes, stoppable, working


def compare(
    context: typer.Context,
    config: Annotated[
        str | None, Option(help="An experiment: a YAML file with arms, or a name that `pods recipes` lists.")
    ] = None,
    output: Annotated[Path | None, Option(help="Directory of the experiment. [default: runs/<name>]")] = None,
    seeds: Annotated[
        str | None, Option(help="How many seeds each arm has (5: seeds 1 to 5), or a list such as '[3, 7]'.")
    ] = None,
    baseline: Annotated[str | None, Option(help="The arm to compare the others with.")] = None,
    force: Annotated[bool, Option("--force", help="Repeat finished runs whose recipe or data have changed.")] = False,
    parallel: Annotated[
        int, Option(min=1, help="Number of runs at the same time, each on its own GPU; on a CPU, set threads.")
    ] = 1,
    dry_run: DryRun = False,
) -> None:
    """Train every arm with every seed, then report which arm was faster.

    After Ctrl-C or a crash, repeat the same command. It skips finished runs and resumes the others from their last
    complete checkpoint. A run without one starts again. Set any key of all arms with --KEY VALUE.

    \b
    Examples:
      pods compare quickstart
      pods compare --config quickstart --seeds 8 --output runs/eight-seeds
      pods compare --config mine.yaml --max_seconds 600
    """
    from .board import Board

    named, keys = named_recipe(context, config)
    overrides: dict[str, Any] = dict(keys)
    if seeds is not None:
        overrides["seeds"] = seeds
    if baseline is not None:
        overrides["baseline"] = baseline
    experiment = load_experiment(named, overrides)
    output = output or Path("runs") / experiment.name
    if dry_run:
        with make_starters(experiment, 1) as starters:
            notes = _check_arms(experiment, starters, data=True)
        show(experiment)
        show_notes(notes)
        return
    with outlive_output(), make_starters(experiment, parallel) as starters:
        # A recipe that a library rejects stops the command here, before any run.
        _check_arms(experiment, starters)
        for line in experiment.about.splitlines():
            console().print(safe_text(line), highlight=False)
        try:
            with stop_on_signals(), Board(experiment.plan()) as board:
                run_experiment(experiment, output, board, force=force, parallel=parallel, starters=starters)
        except KeyboardInterrupt as interrupt:
            same_command = shlex.join(["pods", *sys.argv[1:]])
            console(stderr=True).print(
                f"\nStopped. The same command skips the finished runs in {safe_text(output)} and resumes the others\n"
                "from their last checkpoint. A run without a checkpoint starts again.\n"
                f"{'resume':<12}{safe_text(same_command)}\n{_next_commands(output)}"
            )
            raise typer.Exit(getattr(interrupt, "code", 130)) from None
        # Also after failures: the report compares what the other runs reached.
        complete = _report(output)
        console().print(_next_commands(output))
        if complete and not board.failures:
            console().print("Next: your own model and data (docs/how-do-i.md); pods plan measures costs.")
        _print_failures(board.failures)
    if board.failures or not complete:
        raise typer.Exit(1)


def _next_commands(output: Path) -> str:
    """Return a line each on how to watch an experiment and how to report on it."""
    folder = safe_text(shlex.quote(str(output)))
    return f"{'watch':<12}pods watch {folder}\n{'report':<12}pods report {folder}"


def _check_arms(experiment: Experiment, starters: Starters, *, data: bool = False) -> list[str]:
    """Check the recipe of each arm, with `data` also its data; return what the runs would note on their data."""
    what = f"importing torch and TRL, to check the recipes of {counted(len(experiment.arms), 'arm')}"
    if data:
        what += " and their data"
    with stoppable(), working(what):
        return starters.check(experiment, data=data)


def show(experiment: Experiment) -> None:
    """Print what each arm sets and does, and how many runs there are."""
    out = console()
    plan = experiment.plan()
    for run in experiment.first_runs():
        title = f"[bold]{safe_text(run.arm)}[/bold]"
        if run.arm == experiment.baseline:
            title += "  (the baseline)"
        out.print(title)
        keys = experiment.arms[run.arm]
        if keys:
            for line in dump_yaml(keys).splitlines():
                out.print(f"{'sets':<17} {safe_text(line)}")
        show_facts(run.recipe.batch_plan(experiment.processes).describe())
    # Runs have a total time only if each has a budget of seconds.
    budgets = [run.recipe.values["max_seconds"] for run in plan]
    limit = f"{sum(budgets):g} seconds of training clock in total" if all(budgets) else "limited by their steps"
    product = f"{counted(len(experiment.arms), 'arm')} x {counted(len(experiment.seeds), 'seed')}"
    out.print(f"{counted(len(plan), 'run')}: {product}, {limit}")
    missing = [run.recipe for run in plan if run.recipe.missing_library]
    if missing:
        note_missing(missing[0])


def _report(output: Path) -> bool:
    """Write the report of the experiment's declared runs and print its summary; return False if that failed."""
    from ..report import build_report, print_summary

    try:
        with working("writing the report", in_log=False):
            files = build_report(output)
        print_summary(files, console())
    except (OSError, UserError) as error:  # no run has an evaluation, or the disk is full
        console(stderr=True).print(f"[red]No report:[/red] {safe_text(error)}")
        return False
    return True


def _print_failures(failures: Sequence[Event]) -> None:
    """Print each run that failed or stopped, and why; last, so that it stays on the screen."""
    out = console(stderr=True)
    for event in failures:
        log = event.path / LOG
        text = (
            f"[red]{event.kind.capitalize()}:[/red] {safe_text(event.run.arm)} seed {event.run.seed}: "
            f"{safe_text(event.reason or 'no reason given')}"
        )
        if log.is_file():
            text += f"  (its output: {safe_text(log)})"
        out.print(text)
    if failures:
        out.print("The same command resumes such runs from their last checkpoint, or starts them again without one.")


def report(
    directories: Annotated[list[Path], Argument(help="An experiment, a run, or several of either.")],
    output: Annotated[
        Path | None, Option(help="Directory of the report. [default: report/ inside, or next to several]")
    ] = None,
    baseline: Annotated[
        str | None,
        Option(help="The arm to compare with. [default: the experiment's baseline, else the first arm]"),
    ] = None,
    metric: Annotated[
        str | None,
        Option(help="The field of evals.jsonl to report. [default: accuracy, else reward]"),
    ] = None,
    force: Force = False,
) -> None:
    """Write report.html, report.md and a CSV of every table: final.csv, pairs.csv, curves.csv and more.

    Of several directories, the first is the baseline. A run of another tool needs three small files (docs/metrics.md).

    \b
    Examples:
      pods report runs/quickstart
      pods report runs/grpo runs/pods --output report
      pods report runs/quickstart --metric format_accuracy
    """
    from ..report import build_report, print_summary
    from ..report.build import FILES, PAGE

    if output is not None:
        # A report replaces files of an earlier one, and no others.
        page = output / PAGE
        has_report = False
        if page.is_file():
            with page.open("rb") as file:
                has_report = b"<title>PODS report: " in file.read(4096)
        for name in FILES:
            path = output / name
            if path.exists():
                check_output(path, "--output", ours=lambda _: has_report, force=force)
    with working("writing the report", in_log=False):
        files = build_report(directories, output, baseline=baseline, metric=metric)
    print_summary(files, console())


def watch(
    directory: Annotated[Path, Argument(help="A run or an experiment; it may begin later.")],
    port: Annotated[int, Option(min=0, max=65535, help="Port of the page. 0 takes a free one.")] = 8760,
    no_browser: Annotated[bool, Option("--no_browser", help="Print the address, and open no browser.")] = False,
) -> None:
    """Show the report of runs while they train, in a browser.

    The page updates itself. It is served on this machine only (127.0.0.1), and does not change the runs. Ctrl-C ends
    it; the runs continue.

    \b
    Examples:
      pods watch runs/mine
      pods watch runs/quickstart --port 9000 --no-browser
    """
    from ..report.live import LOOPBACK, LivePage, server

    if not directory.is_dir() and (directory.exists() or not directory.absolute().parent.is_dir()):
        raise UserError(f"{directory} is not a directory, nor a place for one: name a run or an experiment.")
    with stop_on_signals() as stop, LivePage(directory) as page, server(page, port) as pages:
        address = f"http://{LOOPBACK}:{pages.server_port}/"
        console().print(f"Watching {safe_text(directory)} at {address}  (Ctrl-C ends this, not the runs)")
        # Without a screen, as on a machine reached through ssh, the reader opens the page on another machine.
        has_display = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
        has_screen = has_display if sys.platform.startswith("linux") else True
        if has_screen and not no_browser:
            webbrowser.open(address)
        elif os.environ.get("SSH_CONNECTION"):
            forwarded = f"{pages.server_port}:127.0.0.1:{pages.server_port}"
            console().print(f"From your own machine: ssh -L {forwarded} THIS_MACHINE, then open {address}")
        try:
            pages.serve_forever()
        except KeyboardInterrupt:
            stop.over()
            console().print("Stopped watching.")
    if stop.number not in (None, signal.SIGINT):
        raise typer.Exit(stop.code)
