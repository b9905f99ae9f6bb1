"""One training run, from top to bottom: recipe -> prepared task -> trainer -> run directory, which describes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.console import Console
from torch.distributed import distributed_c10d

from ..distributed import get_rank, get_world_size
from ..distributed.launch import LAUNCHED
from ..distributed.processes import gather, quiet_libraries, set_threads
from ..distributed.signals import stop_on_signals
from ..errors import UserError
from ..evaluation import Evaluation, GenerateSampler, evaluate
from ..evaluation.sampling import sampling_of
from ..recipe import Recipe
from ..recipe.contents import ROWS, Contents, contents_of, module_hashes
from ..runs import Run, RunWriter
from ..runs.files import CHECKPOINTS
from ..runs.sources import user_sources
from ..streams import outlive_output
from ..tasks import row_hashes
from ..text import counted
from .context import Context
from .display import RunDisplay, Watcher, run_label
from .resume import Start, find_start

if TYPE_CHECKING:
    from ..engines.trl import PODSTrainer
    from ..loading.prepare import Prepared
    from .recorder import Recorder
    from .trainer import RunTrainer

_NOTICE = "the run ends after this step and saves a checkpoint. Another Ctrl-C ends it at once and loses the step."


def train(
    recipe: Recipe,
    output: Path,
    *,
    shown_as: Path | None = None,
    resume: bool = False,
    allow_changes: bool = False,
    progress: bool = True,
) -> Run:
    """Train a policy from a recipe, and return its run directory; the run's `state` is finished or stopped.

    A signal of `SIGNALS` ends the run after the current step: its checkpoint, its policy and its files are complete.
    While the run loads or evaluates, the signal ends it at once; a second SIGINT always does. If standard output can no
    longer be written, the run continues. A resume that fails before it trains leaves the directory as it was.

    Args:
        recipe: from `load_recipe`.
        output: the run directory. One that holds a run is refused unless `resume`.
        shown_as: the run directory as messages name it. If None, `output`.
        resume: continue from the last complete checkpoint of the run in `output`.
        allow_changes: resume even if the recipe, or the data, the modules or the policy that it names have changed.
        progress: show steps and evaluations.

    Raises:
        UserError: the recipe, the task or the directory cannot be used, or the disk is full.
        KeyboardInterrupt: interrupted before the first step, or a second time.
    """
    recipe.check_installed()
    shown_as = shown_as or output
    output = output.absolute()  # a task, a rule or a reward may change the working directory
    find = partial(find_start, recipe, output, processes=get_world_size(), allow_changes=allow_changes)
    label = run_label(shown_as)
    is_first = get_rank() == 0
    with stop_on_signals() as stop:
        if resume:
            find(hashes=False)  # refuse before anything is written
        writing: RunWriter | nullcontext[None] = RunWriter(output, resume=resume) if is_first else nullcontext()
        with (
            writing as writer,
            outlive_output(),
            RunDisplay(
                label,
                max_seconds=recipe.run_settings()["max_seconds"],
                max_steps=recipe.values.get("max_steps"),
                out=None if progress and is_first else Console(quiet=True),
            ) as display,
        ):
            shown = Watcher("the progress display", display)
            shown.begin("importing TRL")
            quiet_libraries()
            from .recorder import trackers_inside

            notice = _NOTICE if is_first and LAUNCHED not in os.environ else ""  # our launcher prints its own
            context = Context(recipe, output, writer, shown, stop)
            trackers = trackers_inside(output, recipe.values.get("report_to")) if is_first else nullcontext()
            # A signal that raises anywhere could prevent the last status.
            with trackers, stop.later(notice), context.status_at_end():
                if not resume:
                    context.begin()
                with stop.at_once():
                    set_threads(recipe.run_settings()["threads"])
                    prepared, trainer = _load_task_and_policy(context)
                    shown.begin("reading what the recipe names")
                    contents: Contents = _on_first_process(writer, lambda: _contents(recipe, prepared))
                    trainer.contents = contents
                    start: Start | None = _on_first_process(writer, lambda: find(contents=contents)) if resume else None
                    print_start(shown, shown_as, label, trainer, prepared, start)
                    environment = run_environment(trainer, prepared, start)
                    recorder = _add_recorder(context, prepared, trainer, environment)
                _train(trainer, recorder, start)
                shown.begin("saving the policy")
                _finish(context, trainer, recorder)
    return Run.open(output)


def _on_first_process(writer: RunWriter | None, work: Callable[[], Any]) -> Any:
    """Return what the first process, which has the writer, computes; call it on every process."""
    return gather([work() if writer else None])[0]


def _contents(recipe: Recipe, prepared: Prepared) -> Contents:
    """Return the hashes of what the recipe names, once it is loaded, and those of the rows of its task."""
    return {**contents_of(recipe), **module_hashes(user_sources()), ROWS: {**row_hashes(prepared.made)}}


def _load_task_and_policy(context: Context) -> tuple[Prepared, RunTrainer]:
    """Return the prepared task and the trainer."""
    from ..loading.prepare import prepare
    from .trainer import build_trainer

    recipe = context.recipe
    context.shown.begin(f"loading the task {recipe.values['task']}")
    prepared = prepare(recipe)
    context.shown.begin(f"loading the policy {recipe.values['model_name_or_path']}")
    trainer = build_trainer(recipe, prepared, context.output / CHECKPOINTS)
    if trainer.args.use_cpu and get_world_size() > 1:  # transformers passes ddp_timeout on for GPUs only
        distributed_c10d._set_pg_timeout(timedelta(seconds=trainer.args.ddp_timeout))
    return prepared, trainer


def device_line(trainer: PODSTrainer) -> str:
    """Return the device and the precision to display."""
    from ..engines.trl.guarded.run_directory import device_name, precision_of

    return f"{device_name(trainer)}, {precision_of(trainer)}"


def run_environment(trainer: RunTrainer, prepared: Prepared, start: Start | None) -> dict[str, Any]:
    """Return the content of `environment.json`."""
    from ..engines.trl.guarded.run_directory import environment_of

    task = prepared.task
    task_facts: dict[str, Any] = {
        "name": task.name,
        "version": task.version,
        "train": len(task.train),
        "test": len(task.test),
    }
    if prepared.fitted:
        task_facts["too_long"] = asdict(prepared.fitted)
    environment = {
        **environment_of(trainer),
        "task": task_facts,
        "contents": dict(trainer.contents),
        "sources": user_sources(),
    }
    if start:
        environment["resumed"] = start.describe()
    return environment


def print_start(
    shown: Watcher,
    output: Path,
    label: str,
    trainer: PODSTrainer,
    prepared: Prepared,
    start: Start | None,
) -> None:
    """Print what a run trains, where it resumes, and how to watch it."""
    from ..engines.trl.config import group_sizes

    task = prepared.task
    n, m = group_sizes(trainer.args)
    if trainer.args.keeps_all:
        rule = "all trained"
    else:
        kept = "some" if trainer.args.selection == "batch" else m  # a batch keeps other numbers of each prompt's
        rule = f"{kept} kept by {trainer.args.rule}"
    # Each line fits 80 columns.
    shown.say(f"{label}: {device_line(trainer)}; {counted(n, 'rollout')} a prompt, {rule}")
    shown.say(f"{label}: {task.name}: {counted(len(task.train), 'prompt')}")
    for note in task.notes:
        shown.note(f"{label}: Note: {note}")
    lines = []
    if prepared.fitted:
        lines.append(str(prepared.fitted))
    if start:
        lines += start.describe()
    lines.append(f"live in a browser: pods watch {quote(str(output))}")
    for line in lines:
        shown.say(f"{label}: {line}")


def _add_recorder(
    context: Context, prepared: Prepared, trainer: RunTrainer, environment: Mapping[str, Any]
) -> Recorder:
    """Add a `Recorder` that writes the run directory."""
    from ..engines.trl.guarded.run_directory import gather_columns
    from .recorder import Recorder, add_trackers

    evaluates = context.recipe.run_settings()["eval_prompts"] != 0
    evaluate_policy = _evaluator(context, prepared, trainer) if evaluates else None

    def ledger() -> dict[str, list[Any]] | None:
        # the prompt as the policy continued it, as in the files of evaluations
        return gather_columns(trainer.rollouts, prepared.render)

    recorder = Recorder(context, trainer, environment, evaluate=evaluate_policy, ledger=ledger)
    trainer.add_callback(recorder)
    add_trackers(trainer, Run(context.output).name)
    return recorder


def _evaluator(context: Context, prepared: Prepared, trainer: RunTrainer) -> Callable[[int], Evaluation]:
    """Return a function that evaluates the policy as it is; it is called with the number of evaluations before."""
    shown = context.shown
    settings = context.recipe.run_settings()
    sampling = sampling_of(context.recipe)

    def run(index: int) -> Evaluation:
        label = "evaluating" if index else "evaluating before training"
        shown.begin(label)

        def show_rows(rows: int, all_rows: int) -> None:
            if rows < all_rows:
                shown.show_part(f"{label}: {rows} of {all_rows} completions")

        sampler = GenerateSampler(trainer.model, prepared.tokenizer)
        with trainer.whole_weights():
            evaluation = evaluate(
                sampler,
                prepared.task,
                replace(sampling, seed=10_007 * sampling.seed + index),  # the same draws for every arm of a seed
                prompts=settings["eval_prompts"],
                repeats=settings["eval_repeats"],
                done=show_rows,
                loop=getattr(trainer, "async_loop", None),  # a trainer has one only for tools that are coroutines
                tools=prepared.tools,
            )
        if index == 0 and evaluation.scores.get("accuracy") == evaluation.scores.get("format_accuracy") == 0:
            shown.say(
                "Warning: no completion of the first evaluation is right, and none has the form <think>...</think>"
                "<answer>...</answer>. A policy that is never rewarded learns nothing. Check prompt_style, "
                "system_prompt and max_completion_length."
            )
        return evaluation

    return run


def _train(trainer: RunTrainer, recorder: Recorder, start: Start | None) -> None:
    """Train until the last step, the end of the budget or a signal, and save a checkpoint after a stop."""
    checkpoint = start.checkpoint if start else None
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except ImportError as error:  # transformers imports some packages when training begins
        raise UserError(f"A package is missing: {' '.join(str(error).split())}") from error
    if recorder.stopped_by and recorder.saved_step != recorder.step:  # stopped in the last evaluation
        trainer._save_checkpoint(trainer.model, None)


def _finish(context: Context, trainer: RunTrainer, recorder: Recorder) -> None:
    """Save the final policy and write the last status; from then on no signal changes the status or the exit code."""
    from .recorder import push
    from .trainer import save_policy

    if not recorder.step and not recorder.stopped_by:
        raise UserError("The run ended without a step. Raise max_steps or num_train_epochs.")
    final = context.output / CHECKPOINTS / "final"
    trainer.publish_folder(final, partial(save_policy, trainer))
    context.stop.over()
    if recorder.stopped_by:
        recorder.write_status("stopped", recorder.stopped_by)
    else:
        recorder.write_status("finished", recorder.stop_reason or "all steps done")
    trainer.accelerator.wait_for_everyone()  # the other processes read the status next
    if context.recipe.values.get("push_to_hub") and not recorder.stopped_by:
        push(trainer, final, Run(context.output).name)
