"""One training run: recipe -> task -> trainer -> run directory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..distributed import Failure, place, watching
from ..distributed.signals import Stop, stop_on_signals
from ..distributed.streams import outlive_output
from ..errors import Interrupted, UserError
from ..evaluation import Evaluation, GenerateSampler, Sampling, evaluate
from ..evaluation.processes import agree, gather
from ..planning.batching import counted
from ..recipe import Recipe
from ..runs import Run, RunWriter
from ..runs.checkpoints import clean, last_good
from ..runs.disk import write_failure
from ..runs.files import CHECKPOINTS, LOG
from ..tasks import Fitted, Task, fit_prompts, load_task
from .environment import describe, device_line, quiet_libraries, set_threads
from .progress import Progress
from .resume import Start, find_start

if TYPE_CHECKING:
    from ..engines.trl import PODSTrainer
    from .recorder import Recorder

DDP_TIMEOUT = 1800.0  # seconds: transformers' own default


def train(
    recipe: Recipe,
    output: Path,
    *,
    resume: bool = False,
    allow_changed_recipe: bool = False,
    progress: bool = True,
    stop: Stop | None = None,
) -> Run:
    """Train a policy as a recipe says, and leave a run directory.

    A signal (`stopping.SIGNALS`) ends the run after the current step, with a checkpoint to go on from, its policy saved
    and its files whole; while it loads or evaluates it ends it at once, as does a second SIGINT. A display that can no
    longer be written does not end it: what it prints then goes to log.txt of the run.

    Args:
        recipe: from `load_recipe`.
        output: the run directory, made here; one that holds a run is refused unless `resume`.
        resume: go on from the last whole checkpoint of the run in `output`.
        allow_changed_recipe: also where it was made with another recipe.
        progress: show steps and evaluations.
        stop: what signals ask, where the caller handles them; None: handled here.

    Returns:
        The run, opened for reading; its `state` is finished or stopped.

    Raises:
        UserError: the recipe, the task or the directory cannot be used, or the disk is full.
        KeyboardInterrupt: it was interrupted before its first step, or a second time.
    """
    recipe.check_installed()
    quiet_libraries()
    from ..engines.trl.build import build_trainer

    main = place().rank == 0
    with ExitStack() as stack:
        stop = stop or stack.enter_context(stop_on_signals())
        find = partial(find_start, recipe, output, processes=place().processes, changed=allow_changed_recipe)
        if resume:
            find(hashes=False)  # refuse before anything is written
        writer = stack.enter_context(RunWriter(output, resume=resume)) if main else None
        stack.enter_context(outlive_output(output / LOG if main else None))
        stack.enter_context(stop.later())  # a signal that raised at any moment could miss the status
        started = time.perf_counter()
        show: Any = nullcontext()

        def end(failure: Failure) -> None:
            if writer:
                _write_end(writer, failure.state, failure.reason, time.perf_counter() - started)
            show.__exit__(None, None, None)  # whatever is printed next is not drawn over

        try:
            if writer:
                writer.write_config(recipe.to_yaml())
                writer.write_status("running", reason="loading")
                clean(output / CHECKPOINTS)
            limit = recipe.engine_arguments().get("ddp_timeout") or DDP_TIMEOUT
            with watching(limit, end), _full_disk_told(output):
                with stop.at_once():
                    set_threads(recipe.run_settings()["threads"])
                    fitted = fitted_task(recipe)
                    trainer = build_trainer(recipe, fitted[0], output / CHECKPOINTS)
                    start = agree(find() if main else None) if resume else None
                    recorder, show = _assemble(
                        recipe, fitted, trainer, output, writer, start, stop, progress=progress and main
                    )
                with show:
                    _train(trainer, recorder, start)
                    _finish(trainer, recorder, output, stop)
        except BaseException as error:  # of one process: of several, `watching` lets none out
            stop.over()
            if writer:
                state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                reason = str(error) if isinstance(error, Interrupted) else f"{type(error).__name__}: {error}"
                _write_end(writer, state, reason, time.perf_counter() - started)
            raise
    return Run.open(output)


def _train(trainer: PODSTrainer, recorder: Recorder, start: Start | None) -> None:
    """Train until all steps are made, the budget is spent or a signal asks; what a stop would lose is saved."""
    trainer.checked_checkpoint = start.checkpoint if start else None
    trainer.train(resume_from_checkpoint=str(start.checkpoint) if start and start.checkpoint else None)
    if recorder.stopped_by and recorder.saved_step != recorder.step:  # stopped in the last evaluation
        trainer._save_checkpoint(trainer.model, None)


def _write_end(writer: RunWriter, state: str, reason: str, elapsed: float) -> None:
    """Close the status of a run that did not come to its end, at the step it last said."""
    run = Run(writer.path)
    with suppress(OSError):  # of a full disk the error itself tells
        writer.write_status(state, reason=reason, step=run.step, seconds=run.seconds, elapsed=elapsed)


@contextmanager
def _full_disk_told(output: Path) -> Iterator[None]:
    """Inside, a file that could not be written is said in one line, with what there is to go on from."""
    try:
        yield
    except BaseException as error:
        full = write_failure(error)
        if not full:
            raise
        good, _ = last_good(output / CHECKPOINTS, hashes=False)
        after = f"go on from {good.name} with: pods train --output {output} --resume" if good else "start again"
        raise UserError(f"Cannot write to {output}: {full}. Make room there, then {after}") from error


def fitted_task(recipe: Recipe) -> tuple[Task, Fitted | None]:
    """The recipe's task as its policy reads it: plain without a chat template, no training prompt too long.

    Raises UserError where the task cannot be made, or has nothing to train on.
    """
    from ..engines.trl.build import check_policy, load_tokenizer, policy_path
    from ..evaluation.sampling import encode, render, template_options

    settings, model = recipe.task_settings(), recipe.model_arguments()
    task = load_task(settings, reward_errors=recipe.values["reward_errors"])
    if len(task.train) == 0:
        raise UserError(
            f"task {task.name} has {counted(len(task.test), 'prompt')} to test and none to train on: data_dir = "
            f"{settings['data_dir']} holds no training file. Put its train.jsonl there, or leave data_dir out"
        )
    options = template_options(recipe)
    where = policy_path(str(model["model_name_or_path"])), model.get("model_revision") or "main"
    check_policy(*where)
    tokenizer = load_tokenizer(*where)
    return fit_prompts(
        task,
        chat=tokenizer.chat_template is not None,
        limit=settings["max_prompt_length"],
        count_tokens=lambda prompts: [len(encode(tokenizer, p, render(tokenizer, p, **options))) for p in prompts],
        render=lambda prompt: render(tokenizer, prompt, **options),
    )


def _assemble(
    recipe: Recipe,
    fitted: tuple[Task, Fitted | None],
    trainer: PODSTrainer,
    output: Path,
    writer: RunWriter | None,
    start: Start | None,
    stop: Stop,
    *,
    progress: bool,
) -> tuple[Recorder, Any]:
    """Recorder and display, wired to the trainer."""
    from .recorder import Recorder

    task, too_long = fitted
    settings = recipe.run_settings()
    show: Any = nullcontext()
    if progress:
        steps = recipe.values.get("max_steps")
        show = Progress(
            _label(output),
            max_seconds=settings["max_seconds"],
            max_steps=steps if isinstance(steps, int) and steps > 0 else None,
        )
        show.say(f"{_label(output)}: {device_line(trainer)}; {task.name} {counted(len(task.train), 'prompt')}")
        if too_long:
            show.say(f"{_label(output)}: {too_long}")
        for line in start.describe() if start else ():
            show.say(f"{_label(output)}: {line}")
    if writer:
        environment = describe(trainer, task)
        environment["task"] |= {"too_long": asdict(too_long)} if too_long else {}
        environment |= {"resumed": start.describe()} if start else {}
        writer.write_environment(environment)
    recorder = Recorder(
        writer,
        show if progress else None,
        evaluate=_evaluator(trainer, task, recipe),
        ledger=lambda: _ledger(trainer),
        stop=stop,
        max_seconds=settings["max_seconds"],
        eval_seconds=settings["eval_seconds"],
        eval_completions=settings["eval_completions"],
        ledger_every=settings["ledger_every"],
        save_seconds=settings["save_seconds"],
    )
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(recorder)
    return recorder, show


def _ledger(trainer: PODSTrainer) -> dict[str, list[Any]] | None:
    """The columns of the latest generation, of all processes in order; every process must call it."""
    parts = gather([trainer.rollouts.columns() if trainer.rollouts else {}])
    return {name: [value for part in parts for value in part[name]] for name in parts[0]} or None


def _evaluator(trainer: PODSTrainer, task: Task, recipe: Recipe) -> Any:
    settings = recipe.run_settings()
    if settings["eval_prompts"] == 0:
        return None

    def run(index: int) -> Evaluation:
        sampling = Sampling(
            temperature=settings["eval_temperature"],
            max_completion_length=trainer.args.max_completion_length,
            batch_size=settings["eval_batch_size"],
            seed=10_007 * trainer.args.seed + index,  # the same draws for every arm of a seed
            chat_template_kwargs=trainer.chat_template_kwargs,
        )
        sampler = GenerateSampler(trainer.model, trainer.processing_class)
        with trainer.whole_weights():
            return evaluate(sampler, task, sampling, prompts=settings["eval_prompts"], repeats=settings["eval_repeats"])

    return run


def _finish(trainer: PODSTrainer, recorder: Recorder, output: Path, stop: Stop) -> None:
    """Save the final policy and close the status; a signal that comes now changes neither it nor the exit code."""
    from ..engines.trl.checkpoints import save_policy

    trainer.publish_folder(output / CHECKPOINTS / "final", partial(save_policy, trainer))
    stop.over()
    if recorder.stopped_by:
        recorder.write_status("stopped", recorder.stopped_by)
    else:
        recorder.write_status("finished", recorder.stop_reason or "all steps done")
    trainer.accelerator.wait_for_everyone()  # the others read the status next


def _label(output: Path) -> str:
    """`pods seed-0` for a run of an experiment, else the directory's name."""
    output = output.resolve()
    return f"{output.parent.name} {output.name}" if output.name.startswith("seed-") else output.name
