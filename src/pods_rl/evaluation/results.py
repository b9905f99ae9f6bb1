"""Results as files: a line of JSON in the shape that users of lighteval and lm-eval know, and the completions.

Both tools write `results: {task: {metric: value, metric_stderr: value}}` with `versions`, `n-samples`,
`higher_is_better` and `config` (lm-eval) or `config_general` (lighteval) beside it. Here one object has both.
"""

from __future__ import annotations

import hashlib
import os
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from ..errors import UserError
from ..runs import to_json, write_parquet
from ..runs.files import encoded, open_own
from .checkpoint import Outcome
from .scores import Evaluation

RESULTS = "results.jsonl"


def write_results(outcome: Outcome, folder: Path) -> tuple[Path, Path]:
    """Append a line to `results.jsonl` of a folder, and keep the completions beside it.

    A line that a kill has torn stays alone on its line.

    Returns:
        The two files.

    Raises:
        UserError: the folder cannot be written to.
    """
    when = datetime.fromtimestamp(outcome.started, timezone.utc).strftime("%Y-%m-%dT%H-%M-%S.%f")
    name = re.sub(r"[^\w.-]", "_", outcome.task.name, flags=re.ASCII)[:100]  # a file's name has 255 bytes
    try:
        completions = write_parquet(folder / f"completions-{name}-{when}.parquet", outcome.evaluation.columns())
        line = to_json(results_line(outcome) | {"completions": completions.name}) + "\n"
        with open_own(folder / RESULTS, "a+b") as file:
            if file.tell() and _last_byte(file) != b"\n":
                line = f"\n{line}"
            file.write(encoded(line))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"Cannot write to {folder}: {error.strerror}. Choose a directory with --output.") from error
    return folder / RESULTS, completions


def results_line(outcome: Outcome) -> dict[str, Any]:
    """One evaluation as an object of `results.jsonl`."""
    task, found, settings = outcome.task, outcome.evaluation, outcome.settings
    metrics = task_metrics(found)
    stop = outcome.started + found.eval_seconds
    general = {
        "model_name": settings["model"],
        "model_sha": settings["model_sha256"],
        "model_dtype": settings["dtype"],
        "max_samples": settings["limit"],
        "start_time": outcome.started,
        "end_time": stop,
        "total_evaluation_time_secondes": str(found.eval_seconds),  # lighteval's spelling
        "generation_parameters": {
            "temperature": settings["temperature"],
            "max_new_tokens": settings["max_completion_length"],
            "seed": settings["seed"],
        },
    }
    template, system = settings["chat_template"], settings["system_prompt"]
    return {
        "results": {task.name: metrics},
        "versions": {task.name: task.version},
        "n-shot": {task.name: 0},
        "higher_is_better": {task.name: {name: _higher_is_better(name) for name in metrics if "_stderr" not in name}},
        "n-samples": {task.name: {"original": len(task.test), "effective": found.prompts}},
        "configs": {task.name: {**settings["task_settings"], "repeats": found.repeats}},
        "config": {name: value for name, value in settings.items() if name not in _TOLD_APART},
        "config_general": general,
        "model_name": settings["model"],
        "chat_template": template,
        "chat_template_sha": _sha256(template),
        "system_instruction": system,
        "system_instruction_sha": _sha256(system),
        "task_hashes": {task.name: settings["prompts_sha256"]},
        "transformers_version": settings["versions"]["transformers"],
        "git_hash": settings["git_commit"],
        "date": outcome.started,
        "total_evaluation_time_seconds": found.eval_seconds,
    }


def task_metrics(found: Evaluation) -> dict[str, float]:
    """The metrics of an evaluation, each with `_stderr` where it has a standard error."""
    metrics = {"accuracy": found.accuracy, "accuracy_stderr": found.accuracy_se}
    for k, (value, error) in ({1: (found.accuracy, found.accuracy_se)} | dict(found.pass_at)).items():
        metrics |= {f"pass@{k}": value, f"pass@{k}_stderr": error}
    metrics |= {"format_accuracy": found.format_accuracy, "format_accuracy_stderr": found.format_accuracy_se}
    metrics |= {"both_accuracy": found.both_accuracy, "both_accuracy_stderr": found.both_accuracy_se}
    return metrics | {
        "mean_completion_tokens": found.mean_completion_tokens,
        "truncated_share": found.truncated_share,
    }


_TOLD_APART = ("task_settings", "chat_template", "system_prompt", "prompts_sha256", "git_commit")


def _higher_is_better(metric: str) -> bool | None:
    return {"mean_completion_tokens": None, "truncated_share": False}.get(metric, True)


def _sha256(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(encoded(text)).hexdigest()


def _last_byte(file: IO[bytes]) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read()
