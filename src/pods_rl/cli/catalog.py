"""``pods recipes`` and ``pods tasks``: list recipes and tasks, and check that graders accept their gold answers."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from ..errors import UserError
from ..recipe import Origin, build_recipe, shipped_arms, shipped_recipes
from ..recipe.catalog import accelerate_configs, read_arm
from ..recipe.schema import parse_overrides
from ..text import console, plain_text, safe_text, short, suggest
from ..yaml_files import dump_yaml
from .train import working

if TYPE_CHECKING:
    from rich.console import Console

_REFUSALS_SHOWN = 10
_USES = {
    "pods compare NAME": "an experiment, which has arms: train all of them",
    "pods train NAME": "a recipe, which has none: train it",
    "pods train NAME-ARM": "train one arm of an experiment",
    "... --accelerate_config NAME": "in several processes, as the last four say",
    "pods recipes NAME > mine.yaml": "copy a recipe or an experiment, to change it",
}

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
    arms = shipped_arms()
    files = shipped_recipes() | accelerate_configs()
    if name is None:
        _list_recipes()
        return
    if name in arms:
        file, arm = arms[name]
        text = dump_yaml(read_arm(file, arm))
    elif name in files:
        file = files[name]
        text = file.read_text(encoding="utf-8")
    else:
        near = suggest(name, [*files, *arms]) or " `pods recipes` lists all names."
        raise UserError(f"{short(name)} is not shipped.{near}")
    print(plain_text(f"{file}\n" if path else text), end="")


def _list_recipes() -> None:
    """Print each name with the first line of its file, which describes it, and with its arms."""
    arms: dict[Path, list[str]] = {}
    for file, arm in shipped_arms().values():
        arms.setdefault(file, []).append(arm)
    out = console()
    for name, file in (shipped_recipes() | accelerate_configs()).items():
        out.print(f"[cyan]{safe_text(name)}[/cyan]")
        first_line, _, _ = file.read_text(encoding="utf-8").partition("\n")
        _print_indented(out, first_line.lstrip("# "))
        if file in arms:
            _print_indented(out, f"arms: {', '.join(arms[file])}")
    out.print()
    for command, what in _USES.items():
        out.print(f"[bold]{command:<31}[/bold] {what}")


def _print_indented(out: Console, text: str) -> None:
    unbroken = text.replace(" -> ", "\xa0->\xa0")  # n -> m stays on one line
    for line in textwrap.wrap(unbroken, width=76, subsequent_indent="  "):
        plain = line.replace("\xa0", " ")
        out.print(f"    {safe_text(plain)}")


@tasks_app.callback()
def tasks(context: typer.Context) -> None:
    """List the tasks, or check that a task's grader accepts its own gold answers.

    The list shows what each task is, where its rows come from, and what it rewards.

    \b
    Examples:
      pods tasks
      pods tasks check arithmetic words
      pods tasks check gsm8k math --data_dir data
    """
    if context.invoked_subcommand is not None:
        return
    from ..tasks import GYM_TASKS, TASKS

    out = console()
    for name, entry in TASKS.items():
        out.print(f"[bold]{safe_text(name)}[/bold]\n  {safe_text(entry.what)}")
        out.print(f"  from     {safe_text(entry.source)}")
        if entry.folders:
            out.print(f"  local    folder {safe_text(' or '.join(entry.folders))} of --data_dir")
        rewards = ", ".join(f"{reward} {weight:g}" for reward, weight in entry.rewards.items())
        out.print(f"  rewards  {rewards}")
    out.print(f"[bold]reasoning_gym:NAME[/bold]\n  {GYM_TASKS.what}\n  from     {safe_text(GYM_TASKS.source)}")


@tasks_app.command(
    short_help="Check that the grader of a task accepts its own gold answers.",
    context_settings={"ignore_unknown_options": True},
)
def check(words: Annotated[list[str], Argument(metavar="NAME", help="Names of tasks, and --KEY VALUE.")]) -> None:
    """Load tasks, count their prompts, and grade every gold answer in the required form.

    Lists the gold answers that the grader does not accept; the exit code is then 1. Set any key of a recipe's task with
    --KEY VALUE.

    \b
    Examples:
      pods tasks check arithmetic words
      pods tasks check gsm8k math --data_dir data
      pods tasks check dataset --dataset_name mine.jsonl
    """
    names: list[str] = []
    # A recipe needs a policy and a limit of its training. This check loads no policy and trains nothing.
    keys = {"model_name_or_path": "any/policy", **parse_overrides(words, names)}
    if not names and "dataset_name" in keys:  # as in a recipe
        names = ["dataset"]
    if not names:
        raise UserError("Missing task. Pass a name that `pods tasks` lists, before the keys: pods tasks check gsm8k")
    origin = Origin("pods tasks check")
    # all of them before the first task loads, so that a wrong key is refused at once
    recipes = [build_recipe({"max_steps": 1}, origin, {"task": name, **keys}) for name in names]
    sound = [_check_grader(recipe.task_settings(), console()) for recipe in recipes]
    if not all(sound):
        raise typer.Exit(1)


def _check_grader(settings: Mapping[str, Any], out: Console) -> bool:
    """Check one task and print the result; return whether all its gold answers are accepted."""
    out.print(f"[bold]{safe_text(settings['task'])}[/bold]")
    try:
        with working(f"loading the task {settings['task']}", in_log=False):
            from ..distributed.processes import quiet_libraries
            from ..tasks import load_task
            from ..tasks.task import check_split

            quiet_libraries()
            task = load_task(settings, check=False)
    except UserError as error:
        out.print(f"  [red]not loaded:[/red] {safe_text(error)}")
        return False
    out.print(f"  version {safe_text(task.version)}")
    sound = True
    for split in ("train", "test"):
        with working(f"grading the gold answers of the {split} split", in_log=False):
            result = check_split(task, split)
        text = f"{result.prompts:>5} prompts, {result.accepted:>5} gold answers accepted"
        if result.refused:
            text += f", {len(result.refused)} refused"
        if result.unknown:
            text += f", {result.unknown} not checked"
        out.print(f"  {split:<5} {text}, mean reward {result.reward:.4g}")
        for row, gold in result.refused[:_REFUSALS_SHOWN]:
            out.print(f"        row {row} (counted from 1): [red]not accepted:[/red] {safe_text(repr(gold))}")
        sound = sound and not result.refused
    for note in task.notes:
        out.print(f"  [yellow]note:[/yellow] {safe_text(note)}", soft_wrap=not out.is_terminal)
    return sound
