"""A run directory for a script with PODSTrainer, which `pods report` reads as one that `pods train` has written."""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ....distributed.processes import versions
from ....errors import UserError
from ....masking import mask_secrets
from ....runs import Run, RunWriter, is_run
from ....runs.environment import git_commit, processor_name
from ....runs.files import METRICS, last_row, number
from ....text import counted
from ....yaml_files import dump_yaml
from ..selecting.record import gather_columns

if TYPE_CHECKING:
    from ..config import PODSConfig
    from ..trainer import PODSTrainer

_SUMMARY = "train_runtime"  # only in the log with which transformers ends
_NO_SETTINGS = ("output_dir", "accelerator_config")  # a folder, and what transformers always fills in
_ALWAYS = ("seed", "learning_rate", "num_train_epochs", "max_completion_length", "loss_type")  # in config.yaml


class RunDirectory(TrainerCallback):
    """Write a run directory while a script trains: settings, environment, metrics and rollouts.

    Add it to the trainer before `train`. `pods report DIRECTORY` draws it, and `pods watch DIRECTORY` while it trains.
    If the trainer evaluates (`eval_strategy`), the mean reward of each evaluation is the score of the report. A resumed
    training continues the directory, without what it had written after the checkpoint.

    The training clock (`seconds`) counts steps, and not evaluations, logging or saving.

    Args:
        trainer: a PODSTrainer. With several processes, each has one of these, and the first one writes.
        path: the directory; it is made. One that holds a run already is refused when training begins, unless training
            resumes from a checkpoint.
        rollouts_every: steps between those whose rollouts are written, from step 1 on. If 0, no rollouts are written.

    Raises:
        TypeError: `trainer` is not a PODSTrainer.

    Example::

        trainer.add_callback(RunDirectory(trainer, "runs/mine"))
        trainer.train()
    """

    def __init__(self, trainer: PODSTrainer, path: str | Path, *, rollouts_every: int = 10) -> None:
        if not hasattr(trainer, "rollouts"):  # its class would be loaded with this module
            raise TypeError(f"RunDirectory records a PODSTrainer: got {type(trainer).__name__}.")
        self.path = Path(path)
        self._trainer = trainer
        self._rollouts_every = rollouts_every
        self._writer: RunWriter | None = None  # of the first process, while it trains
        self._seconds = 0.0
        self._started = 0.0
        self._step_began = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._started = time.perf_counter()
        self._seconds = 0.0
        if not state.is_world_process_zero:
            return
        resumes = state.global_step > 0
        if not resumes and is_run(self.path):
            raise UserError(
                f"{self.path} already holds a run ({Run(self.path).state}). Choose another directory, or continue its "
                "training with trainer.train(resume_from_checkpoint=True)."
            )
        self._writer = RunWriter(self.path, resume=resumes)
        if resumes:
            # What was written after the checkpoint comes again.
            self._writer.rewind(state.global_step, len(Run(self.path).evals))
            row = last_row(self.path / METRICS)
            self._seconds = number(row.get("seconds"))
            self._started -= number(row.get("elapsed"))  # as if the run had never ended
        self._writer.write_config(dump_yaml(settings_of(self._trainer)))
        self._writer.write_environment(environment_of(self._trainer))
        self._write_status("running", state)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._step_began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._seconds += time.perf_counter() - self._step_began
        step = state.global_step
        record = self._trainer.rollouts
        if record is None or not self._rollouts_every or (step > 1 and step % self._rollouts_every):
            return
        columns = gather_columns(record)  # on every process
        if self._writer and columns:  # of the first process
            self._writer.write_rollouts(step, columns)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if self._writer is None or logs is None or _SUMMARY in logs:
            return
        row = {"step": state.global_step, **self._clocks()}
        if "eval_reward" in logs:  # of an evaluation; others have the metrics of a step, or neither
            self._writer.append_eval({**row, "due": self._seconds, **_scores(logs)})
        elif "loss" in logs:
            self._writer.append_metrics({**row, **logs})
        self._write_status("running", state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._end("finished", "training ended", state)

    def on_train_error(self, error: BaseException, state: TrainerState) -> None:
        """Write that an exception has ended the training; `PODSTrainer.train` calls this."""
        status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        self._end(status, f"{type(error).__name__}: {error}", state)

    def _end(self, status: str, reason: str, state: TrainerState) -> None:
        if self._writer is None:
            return
        self._write_status(status, state, reason)
        self._writer.close()
        self._writer = None

    def _write_status(self, status: str, state: TrainerState, reason: str | None = None) -> None:
        assert self._writer is not None
        self._writer.write_status(status, reason=reason, step=state.global_step, **self._clocks())

    def _clocks(self) -> dict[str, float]:
        return {"seconds": self._seconds, "elapsed": time.perf_counter() - self._started}


def _scores(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of an evaluation by TRL, as `evals.jsonl` names them (docs/metrics.md)."""
    scores = {"reward": logs["eval_reward"]}
    for name, value in logs.items():
        found = re.fullmatch(r"eval_rewards/(.+)/mean", name)
        if found:
            scores[f"reward/{found[1]}"] = value
    scores["mean_completion_tokens"] = logs.get("eval_completions/mean_length")
    scores["truncated_share"] = logs.get("eval_completions/clipped_ratio")
    scores["eval_seconds"] = logs.get("eval_runtime")
    return scores


def settings_of(trainer: PODSTrainer) -> dict[str, Any]:
    """Return the policy's name and the arguments that differ from their defaults, with the sizes of a group."""
    args: PODSConfig = trainer.args
    values = args.to_dict()  # plain data, without tokens
    settings: dict[str, Any] = {"model_name_or_path": getattr(trainer.model.config, "_name_or_path", None)}
    for field in fields(args):
        value = values.get(field.name)
        is_set = getattr(args, field.name) != field.default and value not in (None, [], {})
        if field.name in _ALWAYS or (is_set and field.name not in _NO_SETTINGS):
            settings[field.name] = value
    shown = ("num_rollouts", "num_generations", "rule", "advantages")
    return dict(mask_secrets(settings)) | {name: values[name] for name in shown}


def environment_of(trainer: PODSTrainer) -> dict[str, Any]:
    """Return the versions, the machine, the precision and the size of the policy, for `environment.json`."""
    parameters = list(trainer.model.parameters())
    trained_parameters = [parameter for parameter in parameters if parameter.requires_grad]
    return {
        "versions": versions(),
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
    """Return the precision in which a trainer computes."""
    weights = str(trainer.model.dtype).removeprefix("torch.")
    return precision(trainer.args.bf16, trainer.args.fp16, weights)


def precision(bf16: bool, fp16: bool, weights: str) -> str:
    """Return the precision in which a run computes.

    >>> precision(True, False, "float32"), precision(False, False, "float32"), precision(False, False, "bfloat16")
    ('bf16', 'float32', 'bf16')

    Args:
        bf16: whether the pass runs under autocast to bf16.
        fp16: the same for fp16.
        weights: the type of the weights, in which a pass without autocast computes.
    """
    if bf16 or fp16:
        return "bf16" if bf16 else "fp16"
    return {"bfloat16": "bf16", "float16": "fp16"}.get(weights, weights)
