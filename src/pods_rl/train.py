"""One training run: recipe -> task -> trainer -> run directory."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .environment import describe, device_line, quiet_libraries, set_threads
from .errors import UserError
from .evaluation import Evaluation, GenerateSampler, Sampling, evaluate
from .evaluation.processes import gather
from .progress import Progress
from .recipe import Recipe
from .runs import Run, RunWriter
from .tasks import Fitted, Task, fit_prompts, load_task

if TYPE_CHECKING:
    from .engines.trl import PODSTrainer
    from .recorder import Recorder


def train(recipe: Recipe, output: Path, *, resume: bool = False, progress: bool = True) -> Run:
    """Train a policy as a recipe says, and leave a run directory.

    SIGINT and SIGTERM end the run after the current step, with its final policy saved and its files whole; a second
    SIGINT ends it at once.

    Args:
        recipe: from `load_recipe`.
        output: the run directory, made here; one that holds a run is refused unless `resume`.
        resume: go on from the last checkpoint of the run in `output`.
        progress: show steps and evaluations.

    Returns:
        The run, opened for reading; its `state` is finished or stopped.

    Raises:
        UserError: the recipe, the task or the directory cannot be used.
    """
    recipe.check_installed()
    quiet_libraries()
    main = os.environ.get("RANK", "0") == "0"
    with RunWriter(output, resume=resume) if main else nullcontext() as writer:
        started = time.perf_counter()
        checkpoint = last_checkpoint(output) if resume else None
        if writer:
            writer.write_config(recipe.to_yaml())
            writer.write_status("running", reason="loading")
        try:
            set_threads(recipe.run_settings()["threads"])
            fitted = fitted_task(recipe)
            trainer, recorder, show = _assemble(recipe, fitted, output, writer, progress=progress and main)
            with show, _graceful_stop() as asked:
                recorder._stop_requested = asked.reason
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            _finish(trainer, recorder, output, asked.reason())
        except BaseException as error:
            if writer:
                state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                status = Run(output).status
                writer.write_status(
                    state,
                    reason=f"{type(error).__name__}: {error}",
                    step=int(status.get("step") or 0),
                    seconds=float(status.get("seconds") or 0.0),
                    elapsed=time.perf_counter() - started,
                )
            raise
    return Run.open(output)


def fitted_task(recipe: Recipe) -> tuple[Task, Fitted | None]:
    """The recipe's task as its policy reads it: plain without a chat template, no training prompt too long.

    Raises UserError where the task cannot be made, or has nothing to train on.
    """
    from .engines.trl.build import load_tokenizer, policy_path
    from .evaluation.sampling import encode, render, template_options

    settings, model = recipe.task_settings(), recipe.model_arguments()
    task = load_task(settings)
    if len(task.train) == 0:
        raise UserError(
            f"task {task.name} has {len(task.test)} prompts to test and none to train on: data_dir = "
            f"{settings['data_dir']} holds no training file. Put its train.jsonl there, or leave data_dir out"
        )
    options = template_options(recipe)
    tokenizer = load_tokenizer(policy_path(str(model["model_name_or_path"])), model.get("model_revision") or "main")
    return fit_prompts(
        task,
        chat=tokenizer.chat_template is not None,
        limit=settings["max_prompt_length"],
        count_tokens=lambda prompts: [len(encode(tokenizer, p, render(tokenizer, p, **options))) for p in prompts],
    )


def last_checkpoint(output: Path) -> Path | None:
    """The newest checkpoint of a run, if it has any."""
    checkpoints = Run(output).checkpoints()
    return checkpoints[-1] if checkpoints else None


def _assemble(
    recipe: Recipe,
    fitted: tuple[Task, Fitted | None],
    output: Path,
    writer: RunWriter | None,
    *,
    progress: bool,
) -> tuple[PODSTrainer, Recorder, Any]:
    """Trainer, recorder and display, wired to each other."""
    from .engines.trl.build import build_trainer
    from .recorder import Recorder

    task, too_long = fitted
    trainer = build_trainer(recipe, task, output / "checkpoints")
    settings = recipe.run_settings()
    show: Any = nullcontext()
    if progress:
        steps = recipe.values.get("max_steps")
        show = Progress(
            _label(output),
            max_seconds=settings["max_seconds"],
            max_steps=steps if isinstance(steps, int) and steps > 0 else None,
        )
        show.say(f"{_label(output)}: {device_line(trainer)}; {task.name} {len(task.train)} prompts")
        if too_long:
            show.say(f"{_label(output)}: {too_long}")
    if writer:
        environment = describe(trainer, task)
        environment["task"] |= {"too_long": asdict(too_long)} if too_long else {}
        writer.write_environment(environment)
    recorder = Recorder(
        writer,
        show if progress else None,
        evaluate=_evaluator(trainer, task, recipe),
        ledger=lambda: _ledger(trainer),
        stop_requested=lambda: None,
        max_seconds=settings["max_seconds"],
        eval_seconds=settings["eval_seconds"],
        eval_completions=settings["eval_completions"],
        ledger_every=settings["ledger_every"],
        save_seconds=settings["save_seconds"],
    )
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(recorder)
    return trainer, recorder, show


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
        return evaluate(sampler, task, sampling, prompts=settings["eval_prompts"], repeats=settings["eval_repeats"])

    return run


def _finish(trainer: PODSTrainer, recorder: Recorder, output: Path, interrupted: str | None) -> None:
    """Save the final policy and close the status."""
    if trainer.is_world_process_zero():
        final = output / "checkpoints" / "final"
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(final)
        trainer.processing_class.save_pretrained(final)
    if interrupted:
        recorder.write_status("stopped", interrupted)
    else:
        recorder.write_status("finished", recorder.stop_reason or "all steps done")
    trainer.accelerator.wait_for_everyone()  # the others read the status next


class _Stop:
    """Which signal asked for an end, if any."""

    def __init__(self) -> None:
        self._reason: str | None = None

    def reason(self) -> str | None:
        return self._reason

    def ask(self, number: int, _: Any) -> None:
        if self._reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._reason = f"interrupted by {signal.Signals(number).name}"


@contextmanager
def _graceful_stop() -> Iterator[_Stop]:
    """Turn SIGINT and SIGTERM into a request that is met after the current step."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers
        return
    before = {number: signal.signal(number, stop.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _label(output: Path) -> str:
    """`pods seed-0` for a run of an experiment, else the directory's name."""
    output = output.resolve()
    return f"{output.parent.name} {output.name}" if output.name.startswith("seed-") else output.name
