"""One training run, from top to bottom: recipe -> task -> trainer -> run directory, which describes it."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch.distributed import distributed_c10d

from ..distributed import get_rank, get_world_size
from ..distributed.launch import LAUNCHED
from ..distributed.processes import gather, quiet_libraries, set_threads, versions
from ..distributed.signals import Stop, stop_on_signals
from ..errors import Interrupted, UserError, exit_reason
from ..evaluation import Evaluation, GenerateSampler, evaluate
from ..evaluation.sampling import sampling_of
from ..recipe import Recipe
from ..runs import Run, RunWriter, last_clocks, place_of
from ..runs.checkpoints import clean, last_good
from ..runs.environment import git_commit, processor_name
from ..runs.files import CHECKPOINTS, LOG, write_failure
from ..streams import outlive_output
from ..tasks import Fitted, Task
from ..text import counted
from .progress import Progress, Watcher, label_of
from .resume import Start, find_start

if TYPE_CHECKING:
    from ..engines.trl import PODSTrainer
    from .recorder import Recorder
    from .trainer import RunTrainer

_ON_SIGNAL = "the run ends after this step and saves a checkpoint. Another Ctrl-C ends it at once and loses the step."


def train(
    recipe: Recipe,
    output: Path,
    *,
    shown_as: Path | None = None,
    resume: bool = False,
    allow_changed_recipe: bool = False,
    progress: bool = True,
    stop: Stop | None = None,
) -> Run:
    """Train a policy from a recipe, and return its run directory; the run's `state` is finished or stopped.

    A signal of `SIGNALS` ends the run after the current step: its checkpoint, its policy and its files are complete.
    While the run loads or evaluates, the signal ends it at once; a second SIGINT always does. If standard output can no
    longer be written, the run continues and logs to its log.txt. A resume that fails before it trains leaves the
    directory as it was.

    Args:
        recipe: from `load_recipe`.
        output: the run directory. One that holds a run is refused unless `resume`.
        shown_as: the run directory as messages name it. If None, `output`.
        resume: continue from the last complete checkpoint of the run in `output`.
        allow_changed_recipe: resume even if the checkpoint belongs to another recipe.
        progress: show steps and evaluations.
        stop: collects the signals if the caller handles them. If None, they are handled here.

    Raises:
        UserError: the recipe, the task or the directory cannot be used, or the disk is full.
        KeyboardInterrupt: interrupted before the first step, or a second time.
    """
    recipe.check_installed()
    shown_as = shown_as or output
    output = place_of(output)
    with ExitStack() as stack:
        stop = stop or stack.enter_context(stop_on_signals())
        find = partial(find_start, output=output, processes=get_world_size(), changed=allow_changed_recipe)
        if resume:
            find(recipe, hashes=False)  # refuse before anything is written
        writer = stack.enter_context(RunWriter(output, resume=resume)) if get_rank() == 0 else None
        stack.enter_context(outlive_output(output / LOG if writer else None))
        limits = {"max_seconds": recipe.run_settings()["max_seconds"], "max_steps": recipe.values.get("max_steps")}
        out = None if progress and writer else Console(quiet=True)
        label = label_of(shown_as)
        shown = Watcher("the progress display", stack.enter_context(Progress(label, out=out, **limits)))
        shown.begin("importing TRL")
        quiet_libraries()
        from .recorder import trackers_inside

        stack.enter_context(trackers_inside(output, recipe.values.get("report_to") if writer else None))
        notice = _ON_SIGNAL if writer and LAUNCHED not in os.environ else ""  # our launcher prints its own
        stack.enter_context(stop.later(notice))  # a signal that raises anywhere could prevent the last status
        records = _Records(recipe, output, writer)
        stack.enter_context(_status_at_end(records, stop))
        if not resume:
            records.begin()
        with stop.at_once():
            set_threads(recipe.run_settings()["threads"])
            task, skipped, trainer = _load(recipe, output, shown)
            start = gather([find(recipe) if writer else None])[0] if resume else None
            print_start(shown, shown_as, label, trainer, task, skipped, start)
            records.environment = describe(trainer, task, skipped, start)
            recorder = _add_recorder(recipe, task, trainer, output, records, shown, stop)
        _train(trainer, recorder, start)
        shown.begin("saving the policy")
        _finish(trainer, recorder, recipe, output, stop)
    return Run.open(output)


class _Records:
    """The recipe, the environment and the status of a run, as its directory keeps them.

    A new run has them at once. A resumed run keeps its earlier ones until it trains, so that a resume that is refused
    or interrupted leaves them as they were.

    Args:
        writer: None on the processes that do not write.
    """

    def __init__(self, recipe: Recipe, output: Path, writer: RunWriter | None) -> None:
        self.writer = writer
        self.output = output
        self.environment: dict[str, Any] = {}
        self._recipe = recipe
        self._begun = False

    def begin(self) -> None:
        """Write that the run has begun."""
        if not self.writer or self._begun:
            return
        self._begun = True
        self.writer.write_config(self._recipe.to_yaml())
        self.writer.write_status("running", reason="loading")
        clean(self.output / CHECKPOINTS)

    def begin_training(self) -> None:
        """Write that the run begins to train, and in which environment."""
        self.begin()
        if self.writer:
            self.writer.write_environment(self.environment)

    def end(self, state: str, reason: str) -> None:
        """Write how the run ended, if it had begun."""
        if self.writer and self._begun:
            with suppress(OSError):  # the disk is full, which the error itself reports
                self.writer.write_status(state, reason=reason, **last_clocks(self.output))


@contextmanager
def _status_at_end(records: _Records, stop: Stop) -> Iterator[None]:
    """Write the status of a run that ends early by an exception.

    The error of a file that cannot be written becomes one line that says how to continue, and so does a call of
    `sys.exit` in a user's code.
    """
    output = records.output
    try:
        yield
    except BaseException as error:
        stop.over()
        ended = error
        if full := write_failure(error):
            good, _ = last_good(output / CHECKPOINTS, hashes=False)
            then = f"resume from {good.name} with: pods train --output {output} --resume" if good else "start again"
            ended = UserError(f"Cannot write to {output}: {full}. Free some space, then {then}")
        elif isinstance(error, SystemExit):
            ended = UserError(exit_reason(error))
        reason = str(ended) if isinstance(ended, Interrupted) else f"{type(ended).__name__}: {ended}"
        records.end("stopped" if isinstance(ended, KeyboardInterrupt) else "failed", reason)
        if ended is error:
            raise
        raise ended from error


def _load(recipe: Recipe, output: Path, shown: Watcher) -> tuple[Task, Fitted | None, RunTrainer]:
    """Return the task, which of its prompts are too long, and the trainer."""
    from .trainer import build_trainer, fitted_task

    shown.begin(f"loading the task {recipe.values['task']}")
    task, skipped = fitted_task(recipe)
    shown.begin(f"loading the policy {recipe.values['model_name_or_path']}")
    trainer = build_trainer(recipe, task, output / CHECKPOINTS)
    if trainer.args.use_cpu and get_world_size() > 1:  # transformers passes ddp_timeout on for GPUs only
        distributed_c10d._set_pg_timeout(timedelta(seconds=trainer.args.ddp_timeout))
    return task, skipped, trainer


def _precision(trainer: PODSTrainer) -> str:
    args = trainer.args
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "float32"


def device_line(trainer: PODSTrainer) -> str:
    """Return device, precision and method as one line to display."""
    device = trainer.accelerator.device
    on_cpu = device.type != "cuda"
    name = counted(torch.get_num_threads(), "CPU thread") if on_cpu else torch.cuda.get_device_name(device)
    n, m = trainer.args.num_rollouts, trainer.args.num_generations
    rule = "all trained" if n == m else f"{m} kept by {trainer.args.rule}"
    return f"{name}, {_precision(trainer)}; {counted(n or 0, 'rollout')} a prompt, {rule}"


def describe(trainer: PODSTrainer, task: Task, skipped: Fitted | None, resumed: Start | None) -> dict[str, Any]:
    """Return the content of `environment.json`; ``skipped``: the number of training prompts that are too long."""
    from ..engines.trl.generation import describe_vllm

    return {
        "versions": versions(),
        "device": str(trainer.accelerator.device),
        "device_name": device_line(trainer).split(",")[0],
        "processor": processor_name(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "processes": trainer.accelerator.num_processes,
        "layout": trainer.layout,
        "precision": _precision(trainer),
        **describe_vllm(trainer),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "seed": trainer.args.seed,
        "task": {
            "name": task.name,
            "version": task.version,
            "train": len(task.train),
            "test": len(task.test),
            **({"too_long": asdict(skipped)} if skipped else {}),
        },
        "git_commit": git_commit(),
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **({"resumed": resumed.describe()} if resumed else {}),
    }


def print_start(
    shown: Watcher,
    output: Path,
    label: str,
    trainer: PODSTrainer,
    task: Task,
    skipped: Fitted | None,
    start: Start | None,
) -> None:
    """Print what a run trains, where it resumes, and how to watch it."""
    lines = [device_line(trainer), f"{task.name}: {counted(len(task.train), 'prompt')}"]  # each fits 80 columns
    lines += [f"Note: {note}" for note in task.notes]
    lines += [str(skipped)] if skipped else []
    lines += start.describe() if start else []
    for line in [*lines, f"live in a browser: pods watch {quote(str(output))}"]:
        shown.say(f"{label}: {line}")


def _add_recorder(
    recipe: Recipe,
    task: Task,
    trainer: RunTrainer,
    output: Path,
    records: _Records,
    shown: Watcher,
    stop: Stop,
) -> Recorder:
    """Add a `Recorder` that writes the run directory."""
    from .recorder import Recorder, add_trackers, track_evaluation

    settings = recipe.run_settings()
    names = ("max_seconds", "eval_seconds", "ledger_every", "save_seconds")
    recorder = Recorder(
        records.writer,
        shown,
        begin=records.begin_training,
        evaluate=_evaluator(trainer, task, recipe, shown) if settings["eval_prompts"] != 0 else None,
        ledger=partial(_ledger, trainer, task),
        stop=stop,
        cpu_clock=trainer.args.clock == "cpu",
        track=partial(track_evaluation, trainer),
        attention=lambda: trainer._update.attention,
        **{name: settings[name] for name in names},
    )
    trainer.add_callback(recorder)
    add_trackers(trainer, Run(output).name)
    return recorder


def _evaluator(trainer: RunTrainer, task: Task, recipe: Recipe, shown: Watcher) -> Callable[[int], Evaluation]:
    settings, sampling = recipe.run_settings(), sampling_of(recipe)

    def run(index: int) -> Evaluation:
        what = "evaluating" if index else "evaluating before training"
        shown.begin(what)
        sampler = GenerateSampler(trainer.model, trainer.processing_class)
        with trainer.whole_weights():
            found = evaluate(
                sampler,
                task,
                replace(sampling, seed=10_007 * sampling.seed + index),  # the same draws for every arm of a seed
                prompts=settings["eval_prompts"],
                repeats=settings["eval_repeats"],
                done=lambda rows, of: shown.show_part(f"{what} {rows} of {of}") if rows < of else None,
                loop=getattr(trainer, "async_loop", None),
            )
        if index == 0 and found.accuracy == found.format_accuracy == 0:
            shown.say(
                "Warning: no completion of the first evaluation is right, and none has the form <think>...</think>"
                "<answer>...</answer>. A policy that is never rewarded learns nothing. Check prompt_style, "
                "system_prompt and max_completion_length."
            )
        return found

    return run


def _ledger(trainer: RunTrainer, task: Task) -> dict[str, list[Any]] | None:
    """Return the columns of the latest generation, of all processes, ordered by group and rollout.

    Each process must call it.
    """
    from ..policies.loading import render, tool_options

    # the prompt as the policy continued it, as in the files of evaluations
    options = {**trainer.chat_template_kwargs, **tool_options(trainer.processing_class, task)}
    write = partial(render, trainer.processing_class, **options)
    own, problem = [], ""
    try:
        columns = trainer.rollouts.columns(write) if trainer.rollouts else {}
        own = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    except Exception as error:  # each process must reach `gather`
        problem = f"{type(error).__name__}: {error}"
    parts = gather([(own, problem)])
    if problem := next((problem for _, problem in parts if problem), ""):
        raise RuntimeError(problem)
    rows = sorted((row for part, _ in parts for row in part), key=lambda row: (row["group"], row["rollout"]))
    names = dict.fromkeys(name for row in rows for name in row)  # the rows of one process alone may have turns
    return {name: [row.get(name) for row in rows] for name in names} or None


def _train(trainer: RunTrainer, recorder: Recorder, start: Start | None) -> None:
    """Train until the last step, the end of the budget or a signal, and save a checkpoint after a stop."""
    checkpoint = start.checkpoint if start else None
    trainer._resume.verified = checkpoint
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except ImportError as error:  # transformers imports some packages when training begins
        raise UserError(f"A package is missing: {' '.join(str(error).split())}") from error
    if recorder.stopped_by and recorder.saved_step != recorder.step:  # stopped in the last evaluation
        trainer._save_checkpoint(trainer.model, None)


def _finish(trainer: RunTrainer, recorder: Recorder, recipe: Recipe, output: Path, stop: Stop) -> None:
    """Save the final policy and write the last status; from then on no signal changes the status or the exit code."""
    from .recorder import push
    from .trainer import save_policy

    if not recorder.step and not recorder.stopped_by:
        raise UserError("The run ended without a step. Raise max_steps or num_train_epochs.")
    final = output / CHECKPOINTS / "final"
    trainer.publish_folder(final, partial(save_policy, trainer))
    stop.over()
    if recorder.stopped_by:
        recorder.write_status("stopped", recorder.stopped_by)
    else:
        recorder.write_status("finished", recorder.stop_reason or "all steps done")
    trainer.accelerator.wait_for_everyone()  # the other processes read the status next
    if recipe.values.get("push_to_hub") and not recorder.stopped_by:
        push(trainer, final, Run(output).name)
