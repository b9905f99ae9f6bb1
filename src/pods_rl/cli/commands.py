"""The commands of ``pods``, and how each of them ends: its exit code and its last line."""

from __future__ import annotations

import io
import os
import sys
import traceback
import warnings
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..distributed import is_launched
from ..distributed.signals import end_with_parent, ignore_signals, stop_on_signals
from ..errors import Interrupted, UserError, code_reason
from ..masking import mask_secrets
from ..runs.files import write_failure
from ..streams import drop_pending_output, lost_output, settle_streams
from ..text import console, plain_text, safe_text
from . import catalog, compare, doctor, evaluate, select, train


class _Commands(TyperGroup):
    """The commands. A signal ends each with one line and its exit code; typer would exit with 130 for every signal."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Once a run has written how it ended, a signal no longer changes the exit code."""
        try:
            with stop_on_signals() as stop:  # inside `try`: a signal may come as soon as the first handler is set
                try:
                    return super().invoke(ctx)
                except (Exception, SystemExit) as error:
                    if stop.number is None or stop.ended or isinstance(error, UserError):
                        raise
                    if isinstance(error, typer.Exit):
                        raise typer.Exit(stop.code if error.exit_code else 0) from None
                    # A library replaced our exception with its own, as C extensions do while they are imported.
                    raise Interrupted(stop.number) from error
                finally:
                    if stop.ended:
                        ignore_signals()
        except KeyboardInterrupt as interrupt:
            raise train.stopped(interrupt) from None


class _Train(TyperCommand):
    """`pods train`, where --explain may be the last word: typer has no option whose value is optional."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[-1:] == ["--explain"]:
            args = [*args, ""]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="pods",
    cls=_Commands,
    help="PODS: GRPO that generates many rollouts and trains on the few that teach most.\n\n"
    "Compare it with plain GRPO in minutes, on a CPU:  pods compare quickstart",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "token_normalize_func": lambda name: name.replace("_", "-"),  # options take both spellings
    },
)
_KEYS = "[OPTIONS] [--KEY VALUE]..."
_RECIPE = f"[RECIPE] {_KEYS}"


def _takes_keys(**options: Any) -> Any:
    """Return the decorator of a command that also takes the keys of a recipe."""
    return app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, **options)


_takes_keys(cls=_Train, options_metavar=_RECIPE, short_help="Train a policy from a recipe.")(train.train)
_takes_keys(options_metavar=_KEYS, name="eval")(evaluate.evaluate)
_takes_keys(
    options_metavar=f"[EXPERIMENT] {_KEYS}", short_help="Train several settings with several seeds, and report."
)(compare.compare)
app.command(short_help="Write the report of finished runs.")(compare.report)
app.command(short_help="Show the report of runs while they train.")(compare.watch)
_takes_keys(options_metavar=_RECIPE, short_help="Measure how many rollouts to generate and train here.")(doctor.plan)
app.command()(select.select)
_takes_keys(options_metavar=_RECIPE, short_help="Check whether this machine can train.")(doctor.doctor)
app.command(short_help="List recipes, experiments and configurations.")(catalog.recipes)
app.add_typer(catalog.tasks_app, name="tasks", short_help="List the tasks, or check their graders.")


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


def run() -> None:
    """Run the command. A user's mistake prints one red line without a traceback; the exit code is 2."""
    end_with_parent()
    settle_streams()
    if is_launched():  # one of several processes: each would print the C++ warnings
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries, printed once for each process
    try:
        find_user_modules()
        code = app(standalone_mode=False)
        if not getattr(sys.stdout, "lost", None):  # otherwise the command continued without its output
            sys.stdout.flush()
    except (Exception, SystemExit) as error:
        # Ours is `typer.Exit`. typer itself calls sys.exit if the reader of the output has gone.
        shown_error = _without_traceback(error)
        code, message = _exit_code_and_message(shown_error)
        if message and is_launched() and _reported(shown_error, int(code or 1)):
            os._exit(int(code or 1))  # an orderly exit would wait for the other processes
        with suppress(OSError):  # the exit code is right even if the message cannot be printed
            console(stderr=True).print(mask_secrets(message), end="")  # it may be in a log.txt
    drop_pending_output()
    if code:
        sys.exit(code)


def _without_traceback(error: BaseException) -> BaseException:
    """Return the UserError of one line that replaces an exception of a user's code; any other exception unchanged."""
    known = isinstance(error, (UserError, typer.Exit)) or hasattr(error, "show")
    if known or lost_output(error) is not None or write_failure(error):
        return error
    reason = code_reason(error)
    return error if reason is None else UserError(reason).with_traceback(error.__traceback__)


def _reported(error: BaseException, code: int) -> bool:
    """Leave the reason of a failure for the launcher that started this process; return False if there is none."""
    from ..distributed.launch import report_failure

    reason = " ".join(plain_text(error).split())
    if isinstance(error, UserError):
        return report_failure(reason, "", code)
    reason = f"{type(error).__name__}: {reason}".removesuffix(": ")
    details = plain_text("".join(traceback.format_exception(error)))
    return report_failure(reason, details, code)


def _exit_code_and_message(error: BaseException) -> tuple[Any, str]:
    """Return the exit code for an error, and the message to print."""
    lost = lost_output(error)
    if isinstance(lost, BrokenPipeError):  # the reader closed the pipe: exit as SIGPIPE would
        return 141, ""
    if lost is not None:
        stream = "standard output" if getattr(sys.stdout, "lost", None) is lost else "standard error"
        return 1, f"[red]Error:[/red] Cannot write to {stream}: {lost.strerror}.\n"
    if isinstance(error, UserError):
        return 2, f"[red]Error:[/red] {safe_text(error)}\n"
    failure = write_failure(error)
    if failure:
        return (
            1,
            f"[red]Error:[/red] A file cannot be written: {safe_text(failure)}. Free some space, then try again.\n",
        )
    if isinstance(error, OSError) and error.filename is not None and not isinstance(error, FileNotFoundError):
        return 2, f"[red]Error:[/red] Cannot use {safe_text(str(error.filename)[:200])}: {error.strerror}.\n"
    # typer's message or a traceback: both may quote text of a user or a model
    if not hasattr(error, "show"):
        return 1, safe_text(traceback.format_exc())
    usage = io.StringIO()
    error.show(file=usage)
    return getattr(error, "exit_code", 1), safe_text(usage.getvalue())


def find_user_modules() -> None:
    """Make the working directory importable, for rules and rewards; last in the path, so that it shadows no module."""
    try:
        folder = os.getcwd()
    except OSError as error:
        raise UserError(
            f"The working directory cannot be read ({error.strerror}): it was deleted or moved. Go to another with cd."
        ) from error
    if folder not in sys.path:
        sys.path.append(folder)
