"""The command line: ``pods train | eval | compare | report | select | doctor | recipes | tasks``.

Every command imports what is heavy inside its function, so that ``pods --help`` answers at once.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from typing import Annotated

import typer

from .. import __version__
from ..errors import UserError
from ..terminal import console, plain_text, safe_text
from . import compare, doctor, evaluate, recipes, report, select, tasks, train

app = typer.Typer(
    name="pods",
    help="PODS: GRPO that generates many rollouts and trains on the few that teach most.\n\n"
    "See it beside plain GRPO in minutes, on a CPU:  pods compare --config quickstart",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
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
app.command(cls=train.TrainCommand, context_settings=_ANY_KEY)(train.train)
app.command(name="eval", context_settings=_ANY_KEY)(evaluate.evaluate)
app.command(context_settings=_ANY_KEY)(compare.compare)
app.command()(report.report)
app.command()(select.select)
app.command(context_settings=_ANY_KEY)(doctor.doctor)
app.command()(recipes.recipes)
app.add_typer(tasks.app, name="tasks")


def main() -> None:
    """The ``pods`` command. A user's mistake is told in red, without a traceback, with exit code 2."""
    if "RANK" in os.environ:  # one of several processes: C++ warnings would come from each
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        _find_user_modules()
        code = app(standalone_mode=False)
        if code:
            sys.exit(code)
    except UserError as error:
        console(stderr=True).print(f"[red]Error:[/red] {safe_text(error)}")
        sys.exit(2)
    except typer.Abort:
        print("Aborted!", file=sys.stderr)
        sys.exit(1)
    except Exception as error:  # a fault of ours, or of a reward of the user's: it may quote what a model wrote
        print(plain_text(_usage(error) or traceback.format_exc()), end="", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))


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
