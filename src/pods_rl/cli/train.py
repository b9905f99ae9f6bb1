"""``pods train``: one run from one recipe. Other commands use its options and its recipe lookup."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Option

from ..distributed import get_rank, get_world_size, is_launched
from ..distributed.signals import Stop, exit_code, stop_on_signals
from ..errors import Interrupted, UserError, raised
from ..recipe import Recipe, find_accelerate_config, load_recipe
from ..recipe.catalog import accelerate_processes, check_accelerate
from ..recipe.schema import UNSUPPORTED, explain, fields, parse_overrides
from ..runs import Run, RunInUseError, RunWriter, check_unused, last_clocks
from ..streams import outlive_output
from ..text import console, counted, plain_text, safe_text, short, suggest
from ..yaml_files import read_yaml

if TYPE_CHECKING:
    from ..training.display import LiveLine

Config = Annotated[
    str | None,
    Option("--config", "--recipe", metavar="RECIPE", help="A YAML file, or a name that `pods recipes` lists."),
]
Processes = Annotated[
    int | None,
    Option("--num_processes", metavar="K", min=1, max=1024, help="Use K processes, started through accelerate."),
]
AccelerateConfig = Annotated[
    str | None,
    Option("--accelerate_config", metavar="NAME",
           help="How the processes share the model: a shipped configuration or a file of accelerate's. [default: ddp]"),
]  # fmt: skip
Output = Annotated[Path | None, Option(help="Directory of the run. [default: runs/<recipe>-<date>-<time>]")]
Resume = Annotated[bool, Option("--resume", help="Resume the run in --output from its last complete checkpoint.")]
AllowChanges = Annotated[
    bool, Option("--allow_changes", help="With --resume: accept changes of the recipe, its data, modules or policy.")
]
DryRun = Annotated[
    bool, Option("--dry_run", help="Check recipes and data as training does, and show what a step does. Train nothing.")
]
_WIDTH = 80  # columns of what is printed
_PROCESSES_A_CORE = 8  # each process imports torch and holds a policy; more would only exhaust the memory
Force = Annotated[bool, Option("--force", help="Replace a file that this command did not write.")]
Explain = Annotated[
    str | None,
    Option(metavar="[KEY]", help="Show what a recipe key means; without KEY, list all keys."),
]


def train(
    context: typer.Context,
    config: Config = None,
    output: Output = None,
    resume: Resume = False,
    allow_changes: AllowChanges = False,
    num_processes: Processes = None,
    accelerate_config: AccelerateConfig = None,
    dry_run: DryRun = False,
    explain: Explain = None,
) -> None:
    """Train a policy from a recipe: a YAML file or the name of a shipped one.

    docs/how-do-i.md has recipes for your own model, data and rewards. Set any key of the recipe with --KEY VALUE; the
    names are TRL's own. To turn PODS on for a GRPO recipe, add --num_rollouts 64. A signal ends the run after its step
    and saves a checkpoint for --resume: Ctrl-C (exit code 130), SIGTERM (143), SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU
    (128 plus the signal's number).

    \b
    Examples:
      pods train tiny-pods
      pods train --recipe gsm8k-qwen2.5-3b-pods --data_dir gsm8k/ --dry_run
      pods train --config my.yaml --num_rollouts 64 --output runs/mine
      pods train --config my.yaml --num_processes 8 --dry_run
      pods train --config my.yaml --num_processes 8 --accelerate_config fsdp2
      pods train --output runs/mine --resume
      pods train --explain num_rollouts
    """
    if explain is not None:
        _show_key(explain)
        return
    if resume and output is None:
        raise UserError("--resume needs the directory of a run: give it with --output.")
    with stoppable() as stop:
        launch = _find_launch(num_processes, accelerate_config)
        resume_options = {"resume": resume, "allow_changes": allow_changes}
        named, keys = named_recipe(context, config, resumed=output if resume else None)
        recipe = load_recipe(named, keys, processes=launch.processes if launch else None)
        if dry_run:
            _show_dry_run(recipe, output, launch, resume_options)
            return
        shown_as = _named_output(recipe, output)
        output = shown_as.absolute()  # messages name the directory as it was given
        _prepare(recipe, output, launch, resume_options)
        with _last_words(output, shown_as, launch):
            if launch:
                status = _launch_run(launch, named, keys, output, shown_as, resume_options, stop)
            else:
                status = _train_here(recipe, output, shown_as, resume_options)
        code = exit_code(status, default=stop.code)
        if code:
            raise typer.Exit(code)


def _show_dry_run(
    recipe: Recipe, output: Path | None, launch: Launch | None, resume_options: Mapping[str, bool]
) -> None:
    """Check a recipe and its data, and print what a run would do."""
    processes = launch.processes if launch else None
    with working("importing torch and TRL, to check the recipe and its data"):
        notes = check_recipe(recipe, processes)
    if output is not None:
        if resume_options["resume"]:
            _check_resume(recipe, output, launch, resume_options)
        else:
            check_unused(output)
    print(plain_text(recipe.to_yaml()))
    show_facts(recipe.batch_plan(processes).describe())
    show_notes(notes)
    note_missing(recipe)


@contextmanager
def working(what: str, *, in_log: bool = True) -> Iterator[LiveLine]:
    """Inside, show what the command does, away from its results on standard output."""
    from ..training.display import LiveLine, progress_console

    # A command does not end because its progress cannot be written. A log says it after 5 seconds.
    with outlive_output(), LiveLine(progress_console(), silent=5.0) as line:
        line.begin(what, in_log=in_log)
        yield line


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Inside, signals ask the work to stop; a signal that ends the command at once sets the exit code."""
    with stop_on_signals() as stop:
        try:
            yield stop
        except KeyboardInterrupt as interrupt:
            raise stopped(interrupt) from None


def stopped(interrupt: KeyboardInterrupt) -> typer.Exit:
    """Print what stopped a command; return the exception that ends it with its exit code."""
    # `Interrupted` names its signal; a bare KeyboardInterrupt was raised by the user's own code
    reason = str(interrupt) or raised(interrupt)
    console(stderr=True).print(f"Stopped: {safe_text(reason)}.")
    return typer.Exit(getattr(interrupt, "code", 130))


def named_recipe(
    context: typer.Context, config: str | None, resumed: Path | None = None
) -> tuple[str, dict[str, str | bool]]:
    """Return the recipe or experiment that a command names, or that of a resumed run, and the keys that it sets."""
    stray: list[str] = []
    keys = parse_overrides(context.args, stray)
    if config is None and stray:
        config = stray.pop(0)
    if stray:
        raise UserError(
            f"Unexpected argument {short(stray[0])!r}: expected --key value, as in --seed 1, after the recipe "
            f"{short(config or '')}."
        )
    if config is None and resumed is not None:
        config = str(Run.open(resumed).path / "config.yaml")
    if config is None:
        command = context.info_name
        kind, example = ("experiment", "quickstart") if command == "compare" else ("recipe", "tiny-pods")
        raise UserError(f"Missing {kind}. Pass a name that `pods recipes` lists, or a file: pods {command} {example}")
    return config, keys


def show_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print (label, value) lines, with the values below each other."""
    for label, value in facts:
        show_fact(f"{label:<18}", value)


def show_fact(name: str, value: object, *, style: str = "") -> None:
    """Print a fact with its name, within 80 columns."""
    indent = " " * len(name)
    lines = textwrap.wrap(plain_text(value), _WIDTH - len(name), break_long_words=False, break_on_hyphens=False)
    text = f"\n{indent}".join(lines)
    out = console()
    out.print(name, end="", style=style, markup=False)
    out.print(text, markup=False)


def check_recipe(recipe: Recipe, processes: int | None = None, loaded: dict[str, Any] | None = None) -> tuple[str, ...]:
    """Check a recipe and its data as a run does before its first step; return what the run would note on them.

    Does not load the weights of the policy. `loaded` keeps tasks between the recipes of an experiment.
    """
    from ..training.checks import check_engine, check_task

    config = None if recipe.missing_library else check_engine(recipe, processes or 1)
    return check_task(recipe, config, loaded)


def show_notes(notes: Iterable[str]) -> None:
    """Print what a run would note on its data."""
    out = console()
    for note in notes:
        out.print(f"[yellow]Note:[/yellow] {safe_text(note)}", soft_wrap=not out.is_terminal)


def note_missing(recipe: Recipe) -> None:
    """Print which libraries a recipe still needs before it can train on this machine."""
    if recipe.missing_library:
        console().print(f"[yellow]Note:[/yellow] {safe_text(recipe.missing_library)}")


def _show_key(key: str) -> None:
    """Print what a recipe key means, or the names of all keys by the part of the run that they configure."""
    key = key.lstrip("-").replace("-", "_")
    if not key:
        parts: dict[str, list[str]] = {}
        for name, field in fields().items():
            if name not in UNSUPPORTED:
                parts.setdefault(field.section, []).append(name)
        for part, names in parts.items():
            print(f"{part}:")
            print(textwrap.fill(" ".join(sorted(names)), _WIDTH, initial_indent="  ", subsequent_indent="  "))
        print("\nThe meaning of one: pods train --explain KEY. All of them: docs/keys.md.")
        return
    if key not in fields():
        raise UserError(f"Unknown recipe key {key}.{suggest(key, fields())}")
    name, *about = explain(key).splitlines()
    print("\n".join(textwrap.wrap(name, _WIDTH, subsequent_indent="  ")))
    for line in about:
        print("\n".join(textwrap.wrap(line.strip(), _WIDTH, initial_indent="  ", subsequent_indent="  ")))


def _check_resume(recipe: Recipe, output: Path, launch: Launch | None, resume_options: Mapping[str, bool]) -> None:
    """Raise UserError if the run in this directory cannot be resumed. Does not read weights, which the run does."""
    from ..recipe.contents import contents_of, module_hashes
    from ..training.resume import find_start

    find_start(
        recipe,
        output,
        processes=launch.processes if launch else get_world_size(),
        contents=contents_of(recipe, weights=False) | module_hashes(Run(output).environment.get("sources")),
        allow_changes=resume_options["allow_changes"],
        hashes=False,
    )


def _named_output(recipe: Recipe, output: Path | None) -> Path:
    """Return the run's directory, by default one that is named after the recipe and the time."""
    if output is None and get_world_size() > 1:
        raise UserError("Several processes need one directory for the run: give it with --output.")
    if output:
        return output
    name = recipe.name.encode("utf-8", "replace").decode()  # the name of a file may have other bytes
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def _prepare(recipe: Recipe, output: Path, launch: Launch | None, resume_options: Mapping[str, bool]) -> None:
    """Raise UserError, before torch and the model load, if the run cannot start."""
    from ..rewards import check_named_rewards

    recipe.check_reachable()
    is_first = get_rank() == 0
    if launch:  # each process checks its rewards itself
        check_accelerate(launch.config)
        accelerate, _ = read_yaml(launch.config)
        is_first = str(accelerate.get("machine_rank") or 0) == "0"
        cores = os.cpu_count() or 1
        if launch.processes > _PROCESSES_A_CORE * cores:
            raise UserError(
                f"num_processes: got {launch.processes}, expected at most {_PROCESSES_A_CORE} for each CPU core: this "
                f"machine has {counted(cores, 'core')}."
            )
    else:
        check_named_rewards(recipe.values)
    if resume_options["resume"]:
        _check_resume(recipe, output, launch, resume_options)
    if is_first:  # the nodes of one run start at the same time, and would find each other's lock
        # Raises now if the directory holds another run, is in use, or cannot be written to.
        RunWriter(output, resume=resume_options["resume"]).close()
    elif not resume_options["resume"] and Run(output).state in ("finished", "stopped", "failed"):
        check_unused(output)  # the first node may have begun a run by now


class Launch(NamedTuple):
    """The number of processes to start, and their accelerate configuration."""

    processes: int
    config: Path
    name: str = "ddp"


def _find_launch(processes: int | None, config: str | None) -> Launch | None:
    """Return what to start through accelerate; None if neither option is given."""
    if processes is None and config is None:
        return None
    if is_launched():
        raise UserError(
            f"A launcher has already started this process (WORLD_SIZE = {get_world_size()}): remove "
            "--num_processes and --accelerate_config, or start `pods train` by itself."
        )
    name = config or "ddp"
    path = find_accelerate_config(name)
    return Launch(processes or accelerate_processes(path), path, name)


def _train_here(recipe: Recipe, output: Path, shown_as: Path, resume_options: Mapping[str, bool]) -> Mapping[str, Any]:
    """Train in this process; return the last status of the run. The import of torch takes seconds and is shown."""
    from ..training.display import RunDisplay, run_label

    with outlive_output():
        display = RunDisplay(run_label(output)) if get_rank() == 0 else None
        with display or nullcontext():
            if display is not None:
                display.begin("importing torch")
            from ..training.run import train as train_run

            if not is_launched():  # else each process checks the recipe when it builds its trainer
                from ..training.checks import check_engine

                check_engine(recipe)
    return train_run(recipe, output, shown_as=shown_as, **resume_options).status


@contextmanager
def _last_words(output: Path, shown_as: Path, launch: Launch | None) -> Iterator[None]:
    """At the end, also after an error, print the directory of the run, how to resume it and what to do next."""
    from ..distributed.launch import LAUNCHED
    from ..training.display import run_label
    from ..training.resume import last_lines

    try:
        yield
    finally:
        # The command that started several processes prints them, and not its first process.
        if get_rank() == 0 and LAUNCHED not in os.environ:
            options = f" --num_processes {launch.processes} --accelerate_config {launch.name}" if launch else ""
            # among the lines of a launcher a line needs the run's name
            prefix = f"{run_label(output)}: " if launch or get_world_size() > 1 else ""
            with outlive_output():
                for line in last_lines(output, options, shown_as=shown_as):
                    console().print(f"{prefix}{safe_text(line)}")


def _launch_run(
    launch: Launch,
    recipe: str,
    keys: Mapping[str, str | bool],
    output: Path,
    shown_as: Path,
    resume_options: Mapping[str, bool],
    stop: Stop,
) -> Mapping[str, Any]:
    """Train with `pods train` in several processes; return the last status of the run."""
    from ..distributed.launch import launch as start

    words = ["train", "--config", recipe, "--output", str(shown_as)]
    words += [f"--{name}" for name, wanted in resume_options.items() if wanted]
    words += [f"--{key}={'true' if value is True else value}" for key, value in keys.items()]
    failure = None
    earlier_status = Run(output).status  # a resumed run has one before its processes write their own
    with stop.later(), outlive_output():
        with suppress(Interrupted):  # before the processes started
            failure = start(words, launch.config, launch.processes, stop)
        stop.over()
        has_begun = Run(output).status != earlier_status
        state = Run(output).state if has_begun else "unknown"
        stopped = stop.reason
        # A process may fail after the last status, or because the signal killed it: neither is a failure of the run.
        if state == "finished" or (stopped and state != "failed"):
            failure = None
        if has_begun or not resume_options["resume"]:
            if failure:
                _write_end(output, "failed", failure.reason)
            elif stopped and state not in ("finished", "stopped"):
                _write_end(output, "stopped", stopped)
        if failure:
            console(stderr=True).print(f"[red]Error:[/red] {safe_text(failure.reason)}")
            console(stderr=True).print(safe_text(failure.details), end="")
            raise typer.Exit(failure.code)
        if stopped and state != "finished":
            console(stderr=True).print(f"Stopped: {stopped}. Finished work is kept in {safe_text(shown_as)}.")
        if resume_options["resume"] and not has_begun:  # the status is of the earlier run
            return {"state": "stopped", "reason": stopped} if stopped else {}
    return Run(output).status


def _write_end(output: Path, state: str, reason: str) -> None:
    """Write the final status of a run that its processes could not write; not if one of them still writes."""
    with suppress(RunInUseError), RunWriter(output, resume=True) as writer:
        writer.write_status(state, reason=reason, **last_clocks(output))
