"""The command line: ``pods train | eval | compare | report | select | doctor | recipes | tasks``.

Every command imports what is heavy inside its function, so that ``pods --help`` answers at once.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from contextlib import suppress
from typing import Annotated, Any

import typer

from .. import __version__
from ..distributed import is_launched
from ..distributed.signals import ignore_signals, stop_on_signals
from ..distributed.streams import drop_pending_output, lost_output, settle_streams
from ..errors import UserError
from ..text import console, safe_text
from . import compare, doctor, evaluate, recipes, report, select, tasks, train

app = typer.Typer(
    name="pods",
    help="PODS: GRPO that generates many rollouts and trains on the few that teach most.\n\n"
    "See it beside plain GRPO in minutes, on a CPU:  pods compare quickstart",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "token_normalize_func": lambda name: name.replace("_", "-"),  # every option in either spelling
    },
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"pods-rl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


_ANY_KEY = {"allow_extra_args": True, "ignore_unknown_options": True}
_RECIPE = "[RECIPE] [OPTIONS]"
app.command(cls=train.TrainCommand, context_settings=_ANY_KEY, options_metavar=_RECIPE)(train.train)
app.command(name="eval", context_settings=_ANY_KEY)(evaluate.evaluate)
app.command(context_settings=_ANY_KEY, options_metavar="[EXPERIMENT] [OPTIONS]")(compare.compare)
app.command()(report.report)
app.command()(select.select)
app.command(cls=train.TrainCommand, context_settings=_ANY_KEY, options_metavar=_RECIPE)(doctor.doctor)
app.command()(recipes.recipes)
app.add_typer(tasks.app, name="tasks")


def main() -> None:
    """The ``pods`` command. Once a run has written how it ended, no signal gives the process another exit code."""
    settle_streams()
    with stop_on_signals() as stop:
        try:
            _main()
        except SystemExit:
            if stop.reason and not stop.ended:  # typer says 130 whichever signal it was
                sys.exit(stop.code)
            raise
        finally:
            if stop.ended:
                ignore_signals()


def _main() -> None:
    """Run the command. A user's mistake is one line in red, without a traceback, with exit code 2."""
    if is_launched():  # one of several processes: C++ warnings would come from each
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        _find_user_modules()
        code = app(standalone_mode=False)
        if not getattr(sys.stdout, "lost", None):  # else its loss was outlived: the work is done
            sys.stdout.flush()
    except (Exception, SystemExit) as error:
        code, message = _verdict(error)
        with suppress(OSError):  # where nothing can be said, the exit code still tells
            console(stderr=True).print(message, end="")
    drop_pending_output()
    if code:
        sys.exit(code)


def _verdict(error: Exception | SystemExit) -> tuple[Any, str]:
    """The exit code that an error calls for, and what to print of it."""
    lost = lost_output(error)
    if lost is not None:
        if isinstance(lost, BrokenPipeError):  # the reader has what it wanted: end as SIGPIPE would
            return 141, ""
        which = "standard output" if getattr(sys.stdout, "lost", None) is lost else "standard error"
        return 1, f"[red]Error:[/red] Cannot write to {which}: {lost.strerror}.\n"
    if isinstance(error, SystemExit):
        return error.code, ""
    if isinstance(error, UserError):
        return 2, f"[red]Error:[/red] {safe_text(error)}\n"
    if isinstance(error, OSError) and error.filename is not None and not isinstance(error, FileNotFoundError):
        return 2, f"[red]Error:[/red] Cannot use {safe_text(str(error.filename)[:200])}: {error.strerror}.\n"
    if isinstance(error, typer.Abort):
        return 1, "Aborted!\n"
    # a fault of ours, or of a reward of the user's: it may quote what a model wrote
    return getattr(error, "exit_code", 1), safe_text(_usage(error) or traceback.format_exc())


def _find_user_modules() -> None:
    """Have a rule or reward of the user's found in the working directory: last, so that it replaces no module."""
    try:
        here = os.getcwd()
    except OSError as error:
        raise UserError(
            f"The working directory cannot be read ({error.strerror}): it was deleted or moved. Go to another with cd."
        ) from error
    if here not in sys.path:
        sys.path.append(here)


def _usage(error: Exception) -> str:
    """What typer says of a word that it cannot read, quoted as it came; nothing for another error."""
    if not hasattr(error, "show"):
        return ""
    said = io.StringIO()
    error.show(file=said)
    return said.getvalue()


__all__ = ["app", "main"]
