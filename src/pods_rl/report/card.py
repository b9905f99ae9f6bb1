"""The model card of a run: a README for the hub, written from the run's files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..runs import Run
from .analysis import analyse
from .arms import arms_from_runs
from .curves import finite
from .figures import sketch_curves
from .plots import WIDE, to_bytes
from .text import encodable, markdown, number, plain

FIGURE = "accuracy.png"
PAPER = "https://arxiv.org/abs/2504.13818"
_SCORES = ("accuracy", "format_accuracy", "both_accuracy")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_HIDDEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_SHOWN = ("task", "learning_rate", "beta", "loss_type", "max_completion_length", "max_steps", "max_seconds", "seed")


def model_card(run: Run) -> tuple[str, bytes | None]:
    """Return a run's model card as Markdown, and its figure as PNG (None before the first evaluation).

    The license is not known to a run, so none is given. Of a local path only the last part is shown.
    """
    figure = _figure(run)
    parts = [
        _metadata(run),
        f"# {markdown(run.name)}",
        _summary(run),
        f"![Accuracy on the test prompts against training time]({FIGURE})" if figure else "",
        _evaluations(run),
        _method(run),
        _reproduction(run),
        _versions(run),
    ]
    return encodable("\n\n".join(filter(None, parts)) + "\n"), figure


def _figure(run: Run) -> bytes | None:
    arms = arms_from_runs([run.path], "accuracy")
    if not any(arm.curve for arm in arms):
        return None
    sketch = sketch_curves(analyse(arms, baseline=None, metric="accuracy"), "accuracy")
    return to_bytes(sketch.draw(WIDE), "png")


def _metadata(run: Run) -> str:
    base, data = (str(run.config.get(key) or "") for key in ("model_name_or_path", "dataset_name"))
    known: dict[str, Any] = {
        "library_name": "peft" if run.config.get("use_peft") else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "pods", "reinforcement-learning", "trl"],
    }
    known |= {"base_model": base} if _HUB_ID.fullmatch(base) else {}
    known |= {"datasets": [data]} if _HUB_ID.fullmatch(data) else {}
    return f"---\n{yaml.safe_dump(known, sort_keys=False)}---"


def _sizes(run: Run) -> tuple[Any, Any]:
    kept = run.config.get("num_generations")
    return run.config.get("num_rollouts") or kept, kept


def _summary(run: Run) -> str:
    n, m = _sizes(run)
    base, task = (markdown(_public(run.config.get(key) or "?")) for key in ("model_name_or_path", "task"))
    how = f"[PODS]({PAPER})" if n != m else "GRPO"
    return f"{base}, trained on {task} with {how} by pods-rl over TRL."


def _evaluations(run: Run) -> str:
    rows = [row for row in run.evals if finite(row.get("accuracy")) is not None]
    if not rows:
        return ""
    chosen = [*rows[:1], *([max(rows, key=lambda row: row["accuracy"])] if len(rows) > 2 else []), *rows[1:][-1:]]
    names = [name for name in (*_SCORES, *_passes(rows[-1])) if finite(rows[-1].get(name)) is not None]
    head = ["step", "training seconds", *(name.replace("_", " ") for name in names)]
    lines = [f"| {' | '.join(map(markdown, head))} |", f"|{'---:|' * len(head)}"]
    for row in chosen:
        cells = [number(row.get("step")), number(finite(row.get("seconds")), 0)]
        lines.append(f"| {' | '.join([*cells, *(_score(row, name) for name in names)])} |")
    last = rows[-1]
    how = (
        f"{markdown(last.get('prompts', '?'))} test prompts, {markdown(last.get('repeats', 1))} completion(s) each, "
        f"temperature {markdown(last.get('temperature', '?'))}; ± is a standard error over prompts."
    )
    best = " The first, the best and the last evaluation." if len(chosen) > 2 else ""
    return "## Evaluation\n\n" + "\n".join(lines) + f"\n\n{how}{best}"


def _passes(row: Mapping[str, Any]) -> list[str]:
    return [name for name in row if re.fullmatch(r"pass@\d{1,6}", name)]


def _score(row: Mapping[str, Any], name: str) -> str:
    error = finite(row.get(f"{name}_se"))
    spread = "" if error is None or math.isnan(error) else f" ± {number(error)}"
    return f"{number(finite(row.get(name)))}{spread}"


def _method(run: Run) -> str:
    n, m = _sizes(run)
    settings = {key: run.config[key] for key in _SHOWN if run.config.get(key) is not None}
    if n == m:
        text = f"GRPO with {markdown(m)} rollouts a prompt."
    else:
        text = (
            f"PODS ([arXiv 2504.13818]({PAPER})): GRPO that generates n = {markdown(n)} rollouts a prompt and trains "
            f"on m = {markdown(m)} of them, chosen by the rule {markdown(run.config.get('rule') or '?')}."
        )
    rows = [f"| {markdown(key)} | {markdown(_public(value))} |" for key, value in settings.items()]
    rows += [f"| steps | {run.step} |", f"| training seconds | {run.seconds:.0f} |"]
    rows += [f"| device | {markdown(run.environment.get('device_name') or '?')} |"]
    return "## Method\n\n" + text + "\n\n| setting | value |\n|---|---|\n" + "\n".join(rows)


def _reproduction(run: Run) -> str:
    recipe = yaml.safe_dump(_public(dict(run.config)), sort_keys=False, allow_unicode=True)
    recipe = _HIDDEN.sub(" ", encodable(recipe))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", recipe)), default=0))
    version = re.sub(r"[^\w.+-]", "", str(_versions_of(run).get("pods-rl") or ""))
    return (
        "## Reproduce\n\nSave the recipe as `recipe.yaml`; a path in it is yours to set.\n\n"
        f"```\npip install pods-rl{f'=={version}' if version else ''}\npods train --config recipe.yaml\n```\n\n"
        f"<details><summary>recipe.yaml</summary>\n\n{fence}yaml\n{recipe}{fence}\n\n</details>"
    )


def _versions_of(run: Run) -> Mapping[str, Any]:
    found = run.environment.get("versions")
    return found if isinstance(found, dict) else {}


def _versions(run: Run) -> str:
    listed = ", ".join(f"{markdown(key)} {markdown(value)}" for key, value in _versions_of(run).items())
    return f"## Versions\n\n{listed}" if listed else ""


def _public(value: Any) -> Any:
    """Return a value with each local path shortened to its last part.

    >>> _public({"data_dir": "/home/me/data", "task": "arithmetic", "files": ["./a/b.py"]})
    {'data_dir': 'data', 'task': 'arithmetic', 'files': ['b.py']}
    """
    if isinstance(value, dict):
        return {plain(key): _public(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_public(entry) for entry in value]
    if isinstance(value, str) and re.match(r"(~|\.{0,2}/|[A-Za-z]:\\)", value):
        return Path(value.replace("\\", "/")).name
    return value
