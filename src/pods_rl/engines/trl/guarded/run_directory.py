"""A run directory for a script with PODSTrainer, which `pods report` reads as one that `pods train` has written."""

from __future__ import annotations

import logging
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ....distributed.processes import gather, version, versions
from ....errors import UserError
from ....masking import mask_secrets
from ....runs import Record, Run, RunWriter, is_run, last_clocks
from ....runs.environment import git_commit, processor_name
from ....runs.files import CONFIG, EXPERIMENT, plain
from ....runs.identity import changed_contents, changed_settings, check_token, keep_state, kept_state
from ....selection.rules import rule_name
from ....tables import columns_of, rows_of
from ....text import content_text, counted
from ....yaml_files import dump_yaml
from .script_contents import script_contents

if TYPE_CHECKING:
    from ..config import PODSConfig
    from ..trainer import PODSTrainer

_NO_SETTINGS = ("output_dir", "logging_dir")
_ALWAYS_WRITTEN = ("seed", "learning_rate", "num_train_epochs", "max_completion_length", "loss_type")  # in config.yaml
_EVAL_SET = re.compile(r"eval_(?:(.+)_)?runtime")  # with one of several evaluation sets, transformers logs its name
_NEW = "give RunDirectory a new directory"

logger = logging.getLogger(__name__)


class RunDirectory(TrainerCallback):
    """Write a run directory while a script trains: settings, environment, metrics and rollouts.

    Add it to the trainer before `train`. `pods report DIRECTORY` draws it, and `pods watch DIRECTORY` while it trains.
    If the trainer evaluates (`eval_strategy`), the mean reward of each evaluation is the score of the report.

    A training that resumes from a checkpoint continues the directory of the run that saved it, without what was
    written after the checkpoint. It is refused, and nothing is removed, if the directory holds another run, or if
    settings, the policy's name, the data or a reward function have changed since. In a new directory it begins a run.

    If a file cannot be written while it trains (a full disk, a folder that was deleted), the training saves a
    checkpoint, ends after its next step and raises UserError.

    The training clock (`seconds`) counts steps, and not evaluations, logging or saving.

    Args:
        trainer: a PODSTrainer. With several processes, each has one of these, and the first one writes.
        path: the directory; it is made.
        rollouts_every: steps between those whose rollouts are written, from step 1 on. If 0, no rollouts are written.
        overwrite: if training begins with its first step, remove the files of an earlier run of a script in the
            directory. A run of `pods train` is never removed.
        allow_changes: continue a run although settings, the policy's name, the data or a reward function have changed.

    Raises:
        TypeError: `trainer` is not a PODSTrainer.
        UserError: the directory cannot be written, another process writes it, or it holds a run that this training
            can neither continue nor overwrite. What depends on the checkpoint is refused when training begins.

    Example::

        trainer.add_callback(RunDirectory(trainer, "runs/mine"))
        trainer.train()
    """

    def __init__(
        self,
        trainer: PODSTrainer,
        path: str | Path,
        *,
        rollouts_every: int = 10,
        overwrite: bool = False,
        allow_changes: bool = False,
    ) -> None:
        if not hasattr(trainer, "layout"):  # of the layer `Guarded`, whose class would be loaded with this module
            raise TypeError(f"RunDirectory records a PODSTrainer: got {type(trainer).__name__}.")
        self.path = Path(path).absolute()
        self._trainer = trainer
        self._overwrite = overwrite
        self._allow_changes = allow_changes
        self._rollouts_every = rollouts_every
        self._record = Record(None)
        self._problem: str | None = None  # why nothing more is written
        self._rollouts_failed = False
        self._contents: dict[str, dict[str, str]] = {}
        self._on_first_process(self._check_place)

    def _on_first_process(self, work: Callable[[], None]) -> None:
        """Do what only the process that writes can do; raise its UserError on every process, so that none waits."""
        problem = None
        if self._trainer.is_world_process_zero():
            try:
                work()
            except UserError as error:
                problem = str(error)
        problem = gather([problem])[0]
        if problem is not None:
            raise UserError(problem)

    # -- whose directory it is -----------------------------------------------------------------------------------------

    def _check_place(self) -> None:
        """Raise UserError, before anything is trained, for a directory that this training cannot use in any case."""
        # Here, since values that a reward uses may change while it trains.
        self._contents = script_contents(self._trainer)
        RunWriter(self.path, resume=True).close()  # raises if it cannot be written, or another process writes it
        if (self.path / EXPERIMENT).exists():
            raise UserError(f"{self.path} holds an experiment of `pods compare`: {_NEW}.")
        if is_run(self.path):
            self._check_run(Run(self.path))

    def _check_run(self, run: Run) -> None:
        """Raise UserError for a run that no training with this trainer can continue or overwrite."""
        if "task" in run.config:
            raise UserError(
                f"{self.path} holds a run of `pods train` ({run.state}): {_NEW}, or continue that run with: pods train "
                f"--output {self.path} --resume"
            )
        if run.state == "unknown":
            raise UserError(f"{self.path} has a {CONFIG}, and no run has written it: {_NEW}.")

    def _claim(self, state: TrainerState, writer: RunWriter) -> list[str]:
        """Continue the directory's run, overwrite it, or raise UserError; return what may and has changed since."""
        if not is_run(self.path):
            return []
        run = Run(self.path)
        self._check_run(run)
        if not state.global_step:  # from the start, and not from a checkpoint
            if not self._overwrite:
                # A killed run has not written its last step into its status.
                step = last_clocks(self.path).get("step", run.step)
                raise UserError(
                    f"{self.path} already holds a run ({run.state} at step {step}). Continue it from its last "
                    f"checkpoint with trainer.train(resume_from_checkpoint=True), {_NEW}, or remove the run with "
                    "overwrite=True."
                )
            writer.clear()
            return []
        saved = kept_state(state.stateful_callbacks)
        check_token(self.path, state.global_step, str(saved.get("token") or ""))
        recorded_step = saved.get("step", state.global_step)
        if recorded_step != state.global_step:
            raise UserError(
                f"{self.path} ends at step {recorded_step}, and the checkpoint is of step {state.global_step}: the "
                f"steps between were trained without RunDirectory. Resume from an earlier checkpoint, or {_NEW}."
            )
        changes = changed_settings(run.config, settings_of(self._trainer))
        changes += changed_contents(run.environment.get("contents"), self._contents)
        if changes and not self._allow_changes:
            raise UserError(
                f"The run in {self.path} has other settings, data or rewards than this training: {', '.join(changes)}. "
                f"Restore them, {_NEW}, or continue with the changes with allow_changes=True."
            )
        return changes

    # -- events of the trainer -----------------------------------------------------------------------------------------

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._problem = None
        self._record = Record(None, clock=self._trainer.args.clock, rollouts_every=self._rollouts_every)
        self._on_first_process(partial(self._begin, state))

    def _begin(self, state: TrainerState) -> None:
        writer = RunWriter(self.path, resume=True)
        try:
            changes = self._claim(state, writer)
            environment = environment_of(self._trainer) | {"contents": self._contents}
            if state.global_step:
                environment["resumed"] = [f"resumes from step {state.global_step}", *changes]
            self._record.writer = writer
            self._record.begin(environment, step=state.global_step, saved=kept_state(state.stateful_callbacks))
            self._record.write_status("running")
            writer.write_config(dump_yaml(settings_of(self._trainer)))
        except BaseException as error:
            writer.close()  # it would hold the lock of the directory until the process ends
            if isinstance(error, OSError):
                raise UserError(self._cannot_write(error)) from error
            raise

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._record.start_clock()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._record.stop_clock()
        self._record.step = state.global_step
        keep_state(state.stateful_callbacks, self._record.state())
        with self._until_a_problem():
            if self._record.writer:
                self._record.writer.check()
        if self._trainer.rollouts is not None and self._record.wants_rollouts():
            # Values that Parquet cannot hold end these files, and not the training.
            try:
                columns = gather_columns(self._trainer.rollouts)  # on every process
                if self._record.writer and columns and not self._rollouts_failed:
                    with self._until_a_problem():
                        self._record.writer.write_rollouts(self._record.step, columns)
            except Exception as error:
                self._rollouts_failed = True
                logger.warning("RunDirectory writes no more rollouts: %s: %s", type(error).__name__, error)
        # A problem of the first process ends the training on all of them.
        self._problem = gather([self._problem])[0]
        if self._problem is not None:
            control.should_training_stop = True
            control.should_save = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs is None or self._record.writer is None:
            return
        with self._until_a_problem():
            if "eval_reward" in logs:  # of an evaluation; others have the metrics of a step, or neither
                self._record.write_evaluation(self._record.seconds, _evaluation_scores(logs))
                keep_state(state.stateful_callbacks, self._record.state())
            elif "loss" in logs:
                self._record.write_step(logs)
            self._record.write_status("running")

    @contextmanager
    def _until_a_problem(self) -> Iterator[None]:
        """Inside, an error of a file ends the record, and no more is written."""
        try:
            yield
        except (OSError, UserError) as error:
            self._problem = self._cannot_write(error) if isinstance(error, OSError) else str(error)
            with suppress(OSError):
                if self.path.is_dir():
                    self._record.write_status("stopped", self._problem)
            self._close()

    def _cannot_write(self, error: OSError) -> str:
        return (
            f"Cannot write to {error.filename or self.path}: {error.strerror or error}. Make the directory writable, "
            "then continue with trainer.train(resume_from_checkpoint=True)."
        )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._end("finished", "training ended")
        if self._problem is not None:
            raise UserError(self._problem)

    def on_train_error(self, error: BaseException, state: TrainerState) -> None:
        """Write that an exception has ended the training; `PODSTrainer.train` calls this."""
        status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        self._end(status, f"{type(error).__name__}: {error}")

    def _end(self, status: str, reason: str) -> None:
        with self._until_a_problem():
            self._record.write_status(status, reason)
        self._close()

    def _close(self) -> None:
        if self._record.writer:
            self._record.writer.close()
            self._record.writer = None


def _evaluation_scores(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of an evaluation by TRL, as `evals.jsonl` names them (docs/metrics.md)."""
    scores: dict[str, Any] = {}
    for name, value in logs.items():
        eval_set = _EVAL_SET.fullmatch(name)
        if eval_set:
            if eval_set[1]:
                scores["set"] = eval_set[1]
            scores["eval_seconds"] = value
        part = re.fullmatch(r"eval_rewards/(.+)/mean", name)
        if part:
            scores[f"reward/{part[1]}"] = value
    return scores | {
        "reward": logs["eval_reward"],
        "mean_completion_tokens": logs.get("eval_completions/mean_length"),
        "truncated_share": logs.get("eval_completions/clipped_ratio"),
    }


def settings_of(trainer: PODSTrainer) -> dict[str, Any]:
    """Return the policy's name and the arguments that a user set, with the sizes of a group, as plain data."""
    args: PODSConfig = trainer.args
    given = args.replaced() | {"rule": rule_name(args.rule)}
    settings: dict[str, Any] = {"model_name_or_path": getattr(trainer.model.config, "_name_or_path", None)}
    for field in fields(args):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = plain(given.get(field.name, getattr(args, field.name)))
        if field.name in _ALWAYS_WRITTEN or (value != plain(default) and field.name not in _NO_SETTINGS):
            settings[field.name] = value
    for name in ("num_rollouts", "num_generations", "advantages"):
        settings[name] = plain(getattr(args, name))
    return dict(mask_secrets(settings | {"rule": given["rule"]}))


def environment_of(trainer: PODSTrainer) -> dict[str, Any]:
    """Return the versions, the machine, the precision and the size of the policy, for `environment.json`."""
    parameters = list(trainer.model.parameters())
    trained_parameters = [parameter for parameter in parameters if parameter.requires_grad]
    packages = versions()
    if trainer.use_vllm:
        packages["vllm"] = version("vllm")
    return {
        "versions": packages,
        "device": str(trainer.accelerator.device),
        "device_name": device_name(trainer),
        "processor": processor_name(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "processes": trainer.accelerator.num_processes,
        "layout": trainer.layout,
        "precision": precision_of(trainer),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trained_parameters": sum(parameter.numel() for parameter in trained_parameters),
        "seed": trainer.args.seed,
        "git_commit": git_commit(),
        "command": mask_secrets(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def device_name(trainer: PODSTrainer) -> str:
    """Return the name of the GPU, or the number of threads of a CPU."""
    device = trainer.accelerator.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return counted(torch.get_num_threads(), "CPU thread")


def precision_of(trainer: PODSTrainer) -> str:
    """Return the precision in which a trainer computes: that of autocast, or else the type of the weights."""
    if trainer.args.bf16 or trainer.args.fp16:
        return "bf16" if trainer.args.bf16 else "fp16"
    weights = str(trainer.model.dtype).removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(weights, weights)


def _last_user_message(prompt: Any) -> str:
    """Return the last message of the user; of a prompt of text, its last paragraph.

    >>> _last_user_message("Add." + 2 * chr(10) + "1+1?" + chr(10))
    '1+1?'
    """
    if isinstance(prompt, str):
        return prompt.strip().rpartition("\n\n")[2]
    asked = [message.get("content") for message in prompt if message.get("role") == "user"]
    return content_text(asked[-1]) if asked else ""


def gather_columns(record: Any, write: Callable[[Any], str] | None = None) -> dict[str, list[Any]] | None:
    """Return the ledger's columns of all processes, by group and rollout. Call this on every process."""
    rows_here: list[dict[str, Any]] = []
    problem = ""
    try:
        if record is not None:
            rows_here = rows_of({**record.columns(write), "question": list(map(_last_user_message, record.prompts))})
    except Exception as error:  # each process must reach `gather`
        problem = f"{type(error).__name__}: {error}"
    rows: list[dict[str, Any]] = []
    for process_rows, process_problem in gather([(rows_here, problem)]):
        if process_problem:
            raise RuntimeError(process_problem)
        rows += process_rows
    rows.sort(key=lambda row: (row["group"], row["rollout"]))
    return columns_of(rows) or None  # the rows of one process alone may have turns
