"""``pods export``: a run in the formats of TRL, lm-eval and spreadsheets; also lm-eval's layout and table."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ..errors import UserError
from ..text import console, safe_text

if TYPE_CHECKING:
    from ..runs import Run

FORMATS = ("trl", "lm-eval", "csv")
_COUNTS = ("mean_completion_tokens", "truncated_share")  # metrics without a standard error
_ARROWS = {True: "↑", False: "↓", None: ""}


def export(
    run: Annotated[Path, Argument(help="A run directory.")],
    format: Annotated[str, Option("--format", help="trl, lm-eval or csv.")],
    output: Annotated[Path | None, Option(help="Directory to write to. [default: RUN/export]")] = None,
    kept: Annotated[bool, Option("--kept", help="trl: only the rollouts that were trained on.")] = False,
) -> None:
    """Write a run as files that other tools read.

    \b
    trl      rollouts.jsonl, a TRL data set with a rollout a line (prompt, completion,
             reward, advantage, selected, step, ...); grpo_config.json, the arguments
             of TRL's GRPOConfig; log_history.json, as in trainer_state.json
    lm-eval  results_<time>.json of the last evaluation, in lm-eval's layout
    csv      metrics.csv and evals.csv, a row per logged step and per evaluation
    \b
    Examples:
      pods export runs/mine --format trl --kept
      pods export runs/mine --format csv --output tables
    """
    from ..recipe.fields import suggest
    from ..runs import Run, write_atomic
    from ..runs.files import replacing

    if format not in FORMATS:
        raise UserError(f"--format {format}: expected one of {', '.join(FORMATS)}.{suggest(format, FORMATS)}")
    if kept and format != "trl":
        raise UserError(f"--kept chooses rollouts, which --format {format} does not write: use --format trl.")
    found = Run.open(run)
    folder = output or found.path / "export"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if format == "trl":
            files = _trl_settings(found)
            with replacing(folder / "rollouts.jsonl") as file:
                written = sum(file.write(line) > 0 for line in _trl_rollouts(found, kept=kept))
            console().print(f"{safe_text(folder / 'rollouts.jsonl')}: {written} rollouts")
        else:
            files = _lm_eval_file(found) if format == "lm-eval" else _tables(found)
        for name, text in files.items():
            write_atomic(folder / name, text)
            console().print(safe_text(folder / name))
    except OSError as error:
        raise UserError(f"Cannot write to {folder}: {error.strerror}. Choose a directory with --output.") from error


def _trl_rollouts(run: Run, *, kept: bool) -> Iterator[bytes]:
    """Yield each rollout of the ledger as a line of JSON, file by file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ..runs import to_json
    from ..runs.files import encoded

    files = run.rollout_files()
    if not files:
        raise UserError(f"{run.path} holds no rollouts: a run writes them with ledger_every above 0.")
    for path in files:
        try:
            rows = pq.read_table(path).to_pylist()
        except (OSError, pa.ArrowException):
            console(stderr=True).print(f"[yellow]skipped {safe_text(path)}: not a complete Parquet file[/yellow]")
            continue
        for row in rows:
            if row.get("selected") or not kept:
                yield encoded(to_json(row) + "\n")


def _trl_settings(run: Run) -> dict[str, str]:
    from ..recipe.schema import fields, is_ours
    from ..runs import to_json
    from ..runs.run import logged_evaluation

    known = fields()
    config = {
        key: value
        for key, value in run.config.items()
        if key in known and known[key].section == "engine" and not is_ours(key)
    }
    history = [{name: value for name, value in row.items() if name != "elapsed"} for row in run.metrics]
    history += [{"step": row.get("step"), **logged_evaluation(row)} for row in run.evals]
    history.sort(key=lambda row: row.get("step") or 0)
    return {
        "grpo_config.json": to_json(config, indent=2) + "\n",
        "log_history.json": to_json(history, indent=2) + "\n",
    }


def _tables(run: Run) -> dict[str, str]:
    return {"metrics.csv": _csv(run.metrics), "evals.csv": _csv(run.evals)}


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV with a column per key. Text that a spreadsheet would run as a formula is quoted with a '."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"'{value}" if str(value)[:1] in "=+@" and value else value for key, value in row.items()}
                        if any(isinstance(value, str) for value in row.values()) else row)  # fmt: skip
    return text.getvalue()


def _lm_eval_file(run: Run) -> dict[str, str]:
    """Return the last evaluation of a run in lm-eval's layout, by file name."""
    from ..runs import to_json

    if not run.evals:
        raise UserError(f"{run.path} ({run.state}) has no evaluation: a run evaluates with eval_prompts other than 0.")
    row, config, task = run.evals[-1], run.config, run.environment.get("task") or {}
    name = str(task.get("name") or config.get("task") or "task")
    metrics = {
        key.replace("_se", "_stderr"): value
        for key, value in row.items()
        if key.removesuffix("_se") in ("accuracy", "format_accuracy", "both_accuracy", *_COUNTS) or "pass@" in key
    }
    line = {
        "results": {name: metrics},
        "versions": {name: task.get("version")},
        "n-shot": {name: 0},
        "higher_is_better": {
            name: {
                key: {"mean_completion_tokens": None, "truncated_share": False}.get(key, True)
                for key in metrics
                if not key.endswith("_stderr")
            }
        },
        "n-samples": {name: {"original": task.get("test"), "effective": row.get("prompts")}},
        "configs": {name: {"task": name, "repeats": row.get("repeats"), "temperature": row.get("temperature")}},
        "config": {"model": config.get("model_name_or_path"), "seed": config.get("seed"), "step": row.get("step")},
        "model_name": config.get("model_name_or_path"),
        "git_hash": run.environment.get("git_commit"),
        "total_evaluation_time_seconds": row.get("eval_seconds"),
    }
    return {f"results_{file_time(None)}.json": to_json(lm_eval_layout(line), indent=2) + "\n"}


def file_time(started: float | None) -> str:
    """Return a time (None: now) as in the names of lm-eval's result files.

    >>> file_time(0.0)
    '1970-01-01T00-00-00.000000'
    """
    when = time.time() if started is None else started
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H-%M-%S.%f")


def lm_eval_layout(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of `results.jsonl` with lm-eval's names of metrics: ``accuracy,none``, ``accuracy_stderr,none``.

    >>> lm_eval_layout({"results": {"sums": {"accuracy": 0.5, "accuracy_stderr": 0.1}}})["results"]["sums"]
    {'alias': 'sums', 'accuracy,none': 0.5, 'accuracy_stderr,none': 0.1}
    """
    results = {
        task: {"alias": task, **{f"{name},none": value for name, value in metrics.items()}}
        for task, metrics in line["results"].items()
    }
    return {**line, "results": results, "group_subtasks": {task: [] for task in results}}


def lm_eval_table(line: Mapping[str, Any]) -> str:
    """Return a line of `results.jsonl` as the Markdown table that lm-eval prints.

    >>> print(lm_eval_table({"results": {"sums": {"accuracy": 0.5, "accuracy_stderr": 0.1}},
    ...     "versions": {"sums": "3"}, "n-shot": {"sums": 0}, "higher_is_better": {"sums": {"accuracy": True}}}))
    |Tasks|Version|Filter|n-shot| Metric |   |Value |   |Stderr|
    |-----|------:|------|-----:|--------|---|-----:|---|-----:|
    |sums |      3|none  |     0|accuracy|↑  |0.5000|±  |0.1000|
    """
    head = ["Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr"]
    rows: list[list[str]] = []
    for task, metrics in line["results"].items():
        for name, value in metrics.items():
            if name.endswith("_stderr") or name == "pass@1":  # pass@1 is the accuracy
                continue
            error = metrics.get(f"{name}_stderr")
            arrow = _ARROWS[line["higher_is_better"][task].get(name)]
            cells = [task, line["versions"][task], "none", line["n-shot"][task]] if not rows else [""] * 4
            rows.append([*map(str, cells), name, arrow, _number(value), *_error(error)])
    right = {1, 3, 6, 8}
    widths = [max(3, *(len(row[column]) for row in (head, *rows))) for column in range(len(head))]
    lines = [[word.center(width) for word, width in zip(head, widths, strict=True)]]
    lines.append(["-" * (width - 1) + (":" if i in right else "-") for i, width in enumerate(widths)])
    for row in rows:
        escaped = [cell.replace("|", "/").replace("\n", " ") for cell in row]
        pairs = list(zip(escaped, widths, strict=True))
        lines.append([cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(pairs)])
    return "\n".join(f"|{'|'.join(cells)}|" for cells in lines)


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else "N/A"


def _error(value: Any) -> tuple[str, str]:
    known = isinstance(value, (int, float)) and value == value
    return ("±", _number(value)) if known else ("", "")
