"""``pods recipes`` and ``pods tasks``: list recipes and tasks, and check that graders accept their gold answers."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from ..engines.trl.batching import counted
from ..errors import UserError
from ..text import console, plain_text, safe_text

if TYPE_CHECKING:
    from rich.console import Console

    from ..tasks import Task

_REFUSALS_SHOWN = 10

tasks_app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def recipes(
    name: Annotated[
        str | None, Argument(help="Print this one, to copy and change: a recipe, an experiment or one of its arms.")
    ] = None,
    path: Annotated[bool, Option("--path", help="Print the path of NAME's file instead.")] = False,
) -> None:
    """List the recipes, experiments and accelerate configurations in the package, or print one.

    \b
    Examples:
      pods recipes
      pods recipes tiny-pods > my.yaml
      pods recipes gsm8k-qwen2.5-3b-pods
      pods recipes --path zero2
    """
    from ..recipe import accelerate_configs, shipped_arms, shipped_recipes
    from ..recipe.catalog import read_arm
    from ..text import short, suggest
    from ..yaml_files import dump_yaml

    if name is None:
        if path:
            raise UserError("--path needs a NAME that `pods recipes` lists.")
        _list_recipes()
        return
    arms, files = shipped_arms(), shipped_recipes() | accelerate_configs()
    if name not in arms and name not in files:
        raise UserError(
            f"{short(name)} is not shipped: expected one of {', '.join(files)}, or an arm that `pods recipes` lists."
            f"{suggest(name, [*files, *arms])}"
        )
    file, arm = arms.get(name) or (files[name], None)
    if path:
        print(plain_text(file))
    elif arm is None:
        print(plain_text(file.read_text(encoding="utf-8")), end="")
    else:
        print(
            f"# The arm {arm} of {file.stem}: see `pods recipes {file.stem}`.\n{dump_yaml(read_arm(file, arm))}", end=""
        )


def _list_recipes() -> None:
    from ..recipe import accelerate_configs, shipped_arms, shipped_recipes

    arms: dict[Path, list[str]] = {}
    for file, arm in shipped_arms().values():
        arms.setdefault(file, []).append(arm)
    shipped = shipped_recipes()
    paper = [name for name, file in shipped.items() if file.parent.name == "paper"]
    paper.sort(key=lambda name: ("ablation" in name, _describe(shipped[name])))  # settings a to f first
    groups = {
        "On a CPU, in minutes": {name: file for name, file in shipped.items() if name not in paper},
        "The paper's settings and ablations, on GPUs": {name: shipped[name] for name in paper},
        "For accelerate launch --config_file $(pods recipes --path NAME)": accelerate_configs(),
    }
    out = console()
    for title, files in groups.items():
        out.print(f"[bold]{safe_text(title)}[/bold]")
        for name, file in files.items():
            out.print(f"  [cyan]{safe_text(name)}[/cyan]")
            for about in [_describe(file), *([f"arms: {', '.join(arms[file])}"] if file in arms else [])]:
                for line in textwrap.wrap(about, width=74, subsequent_indent="  "):
                    out.print(f"      {safe_text(line)}")
        out.print()
    out.print("[bold]pods compare --config NAME[/bold] runs all arms of an experiment,")
    out.print("[bold]pods train --recipe NAME-ARM[/bold] (or NAME, if it has no arms) one run.")


def _describe(path: Path) -> str:
    """The first line of a recipe's header.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "r.yaml")
    ...     _ = path.write_text("# Trains a policy.\\n#\\nseed: 1\\n")
    ...     _describe(path)
    'Trains a policy.'
    """
    first = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return first.lstrip("# ") if first.startswith("#") else ""


@tasks_app.callback()
def tasks(context: typer.Context) -> None:
    """List the tasks, or check that a task's grader accepts its own gold answers.

    The list shows what each task is, where its rows come from, and what it rewards.

    \b
    Examples:
      pods tasks
      pods tasks check
      pods tasks check gsm8k math --data_dir data
    """
    if context.invoked_subcommand is not None:
        return
    from ..tasks import LIBRARIES, TASKS

    out = console()
    for name, entry in TASKS.items():
        out.print(f"[bold]{safe_text(name)}[/bold]\n  {safe_text(entry.what)}")
        out.print(f"  from     {safe_text(entry.source)}")
        if entry.folders:
            out.print(f"  local    folder {safe_text(' or '.join(entry.folders))} of --data_dir")
        out.print(f"  rewards  {', '.join(f'{reward} {weight:g}' for reward, weight in entry.rewards.items())}")
    for library, entry in LIBRARIES.items():
        out.print(f"  or       {library}:NAME, {safe_text(entry.what)}\n           from {safe_text(entry.source)}")


@tasks_app.command(context_settings={"ignore_unknown_options": True})
def check(
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="The tasks to check. [default: all]")] = None,
    data_dir: Annotated[
        Path | None,
        Option("--data_dir", help="Read published tasks from this folder, or from its subfolders, not from the hub."),
    ] = None,
) -> None:
    """Load tasks, count their prompts, and grade every gold answer in the required form.

    Lists the gold answers that the grader does not accept; the exit code is then 1. Set any key of a recipe's task with
    --KEY VALUE.

    \b
    Examples:
      pods tasks check
      pods tasks check --data_dir data
      pods tasks check dataset --dataset_name mine.jsonl --dataset_test_name test.jsonl
    """
    from ..recipe.reading import parse_overrides

    words = names or []
    options = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    keys = parse_overrides(words[options:])
    out = console()
    sound = [
        _check_task(name, _settings(name, data_dir, keys), out) for name in words[:options] or _all_tasks(data_dir)
    ]
    if not all(sound):
        raise typer.Exit(1)


def _all_tasks(data_dir: Path | None) -> list[str]:
    """Return the tasks that need no further keys; with a folder, the published tasks in it."""
    from importlib.util import find_spec

    from ..tasks import TASKS

    if data_dir is None:
        absent = ("dataset", *(() if find_spec("reasoning_gym") else ("reasoning_gym",)))
        return [name for name in TASKS if name not in absent]
    folder = data_dir.expanduser().resolve()
    held = {inner for entry in TASKS.values() for inner in entry.folders if (folder / inner).is_dir()} | {folder.name}
    here = [name for name, entry in TASKS.items() if held & set(entry.folders)]
    if not here:
        known = ", ".join(inner for entry in TASKS.values() for inner in entry.folders)
        raise UserError(f"--data_dir {data_dir}: expected a task's folder, or a folder with some of {known}")
    return here


def _settings(name: str, data_dir: Path | None, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task's settings, checked like those of a recipe."""
    from ..recipe import build_recipe
    from ..tasks import TASKS
    from ..yaml_files import Origin

    given: dict[str, Any] = {"task": name, "model_name_or_path": "any/policy", **keys}
    if data_dir is not None and name in TASKS and TASKS[name].folders:
        given["data_dir"] = str(data_dir)
    if name == "reasoning_gym":
        given.setdefault("task_options", {"dataset": "chain_sum"})
    return build_recipe({"max_steps": 1}, Origin("pods tasks check"), given).task_settings()


def _check_task(name: str, settings: Mapping[str, Any], out: Console) -> bool:
    """Check one task and print the result; return whether all its gold answers are accepted."""
    from ..distributed.processes import quiet_libraries
    from ..tasks import load_task
    from ..tasks.task import shared_prompts

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
    if shared := shared_prompts(task):
        verb = "is also a training prompt" if shared == 1 else "are also training prompts"
        out.print(f"  [yellow]note:[/yellow] {counted(shared, 'test prompt')} {verb}")
    return all(sound)


def _check_split(task: Task, split: str, out: Console) -> bool:
    from ..tasks.task import check_split

    with out.status(f"{split}: grading") as status:
        found = check_split(task, split, lambda rows: status.update(f"{split}: {rows} gold answers graded"))
    if found.prompts == 0:
        out.print(f"  {split:<5}  no prompts: this task can be evaluated, not trained on")
        return True
    checked = found.prompts - found.unknown
    colour, share = "red" if found.refused else "green", 100 * found.accepted / max(checked, 1)
    out.print(
        f"  {split:<5} {found.prompts:>5} prompts, "
        + (f"{found.unknown} of them without a gold answer to check, " if found.unknown else "")
        + f"[{colour}]{found.accepted:>5} gold answers accepted ({share:.4g} %)[/{colour}], "
        f"mean reward {found.reward:.4g}"
        if checked
        else f"  {split:<5} {found.prompts:>5} prompts without gold answers to check"
    )
    if found.kinds:
        out.print("        " + ", ".join(f"{safe_text(kind)} {count}" for kind, count in sorted(found.kinds.items())))
    for row, gold in found.refused[:_REFUSALS_SHOWN]:
        out.print(f"        row {row} (counted from 1): not accepted: {safe_text(repr(gold))}")
    if len(found.refused) > _REFUSALS_SHOWN:
        out.print(f"        and {len(found.refused) - _REFUSALS_SHOWN} more")
    return not found.refused
