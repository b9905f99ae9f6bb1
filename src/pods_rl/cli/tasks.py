"""``pods tasks``: what there is to train on, and whether each task's grader accepts its own gold answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UserError
from ..text import console, safe_text

if TYPE_CHECKING:
    from rich.console import Console

    from ..tasks import Task

_REFUSALS_SHOWN = 10

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback()
def tasks(context: typer.Context) -> None:
    """List the tasks, or check that a task's grader accepts its own gold answers.

    The list says what each task is, where its rows are from, and what it rewards.

    \b
    Examples:
      pods tasks
      pods tasks check
      pods tasks check gsm8k math --data_dir data
    """
    if context.invoked_subcommand is not None:
        return
    from ..tasks import TASKS

    out = console()
    for name, entry in TASKS.items():
        out.print(f"[bold]{safe_text(name)}[/bold]\n  {safe_text(entry.what)}")
        out.print(f"  from     {safe_text(entry.source)}")
        if entry.folders:
            out.print(f"  local    folder {safe_text(' or '.join(entry.folders))} of --data_dir")
        out.print(f"  rewards  {', '.join(f'{reward} {weight:g}' for reward, weight in entry.rewards.items())}")


@app.command(context_settings={"ignore_unknown_options": True})
def check(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Which tasks; all of them where none is named.")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data_dir", help="Read published tasks here, not from the hub: a task's folder, or the one above."
        ),
    ] = None,
) -> None:
    """Load tasks, count their prompts, and grade every gold answer in the required form.

    A gold answer that the grader does not accept is listed, and the exit code is 1. Any key of a recipe's task can
    be set as well.

    \b
    Examples:
      pods tasks check
      pods tasks check --data_dir data
      pods tasks check dataset --dataset_name mine.jsonl --dataset_test_name test.jsonl
    """
    from ..recipe.reading import parse_overrides

    words = names or []
    options = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    overrides = parse_overrides(words[options:])
    chosen = words[:options] or _all_tasks(data_dir)
    out = console()
    sound = [_check_task(name, _settings(name, data_dir, overrides), out) for name in chosen]
    if not all(sound):
        raise typer.Exit(1)


def _all_tasks(data_dir: Path | None) -> list[str]:
    """Every task that needs nothing named; with a folder, the published ones that have their own in it."""
    from importlib.util import find_spec

    from ..tasks import TASKS

    if data_dir is None:
        absent = ("dataset", *(() if find_spec("reasoning_gym") else ("reasoning_gym",)))
        return [name for name in TASKS if name not in absent]
    folder = data_dir.expanduser().resolve()
    here = [
        name
        for name, entry in TASKS.items()
        if any((folder / inner).is_dir() or folder.name == inner for inner in entry.folders)
    ]
    if not here:
        known = ", ".join(inner for entry in TASKS.values() for inner in entry.folders)
        raise UserError(f"--data_dir {data_dir}: is no folder of a task and holds none: expected one of {known}")
    return here


def _settings(name: str, data_dir: Path | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The task's settings, checked as a recipe's are."""
    from ..policies import TINY
    from ..recipe import Origin, build_recipe
    from ..tasks import TASKS

    given: dict[str, Any] = {"task": name, "model_name_or_path": TINY, **overrides}
    if data_dir is not None and name in TASKS and TASKS[name].folders:
        given["data_dir"] = str(data_dir)
    if name == "reasoning_gym":
        given.setdefault("task_options", {"dataset": "chain_sum"})
    return build_recipe({"max_steps": 1}, Origin("pods tasks check"), given).task_settings()


def _check_task(name: str, settings: Mapping[str, Any], out: Console) -> bool:
    """Check one task and say what was found; whether it is sound."""
    from ..tasks import load_task
    from ..tasks.checking import shared_prompts
    from ..training.environment import quiet_libraries

    quiet_libraries()
    out.print(f"[bold]{safe_text(name)}[/bold]")
    try:
        with out.status("loading"):
            task = load_task(settings)
    except UserError as error:
        out.print(f"  [red]not loaded:[/red] {safe_text(error)}")
        return False
    out.print(f"  version {safe_text(task.version)}")
    sound = [_check_split(task, split, out) for split in ("train", "test")]
    out.print(f"  both  {len(task.train) + len(task.test):>5} prompts")
    shared = shared_prompts(task)
    if shared:
        out.print(f"  [yellow]note:[/yellow] {shared} test prompts are training prompts as well")
    return all(sound)


def _check_split(task: Task, split: str, out: Console) -> bool:
    from ..tasks.checking import check_split

    with out.status(f"{split}: grading") as status:
        found = check_split(task, split, lambda rows: status.update(f"{split}: {rows} gold answers graded"))
    if found.prompts == 0:
        out.print(f"  {split:<5}  none here: this task can be evaluated, not trained on")
        return True
    colour = "red" if found.refused else "green"
    out.print(
        f"  {split:<5} {found.prompts:>5} prompts, [{colour}]{found.accepted:>5} gold answers accepted "
        f"({100 * found.accepted / found.prompts:.4g} %)[/{colour}], mean reward {found.reward:.4g}"
    )
    if found.kinds:
        out.print("        " + ", ".join(f"{safe_text(kind)} {count}" for kind, count in sorted(found.kinds.items())))
    for row, gold in found.refused[:_REFUSALS_SHOWN]:
        out.print(f"        row {row} (counted from 1): not accepted: {safe_text(repr(gold))}")
    if len(found.refused) > _REFUSALS_SHOWN:
        out.print(f"        and {len(found.refused) - _REFUSALS_SHOWN} more")
    return not found.refused
