"""The model card of a run: TRL's own, with a table of evaluations; and the push of its policy, by transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import Trainer

from ..runs import Run
from ..runs.files import write_atomic
from ..text import console, plain_text, safe_text

_UNKNOWN = "[None](https://huggingface.co/None)"  # TRL's text for a policy from a local folder
_COLUMNS = ("step", "seconds", "accuracy", "accuracy_se", "format_accuracy")


def add_table_to_cards(trainer: Trainer, output: Path, model: str) -> None:
    """Have every model card that the trainer writes include the run's evaluations and the policy that it began with.

    Args:
        trainer: any of TRL's.
        output: the run directory.
        model: `model_name_or_path` of the recipe. Of a local path only the last part is shown.
    """
    write = trainer.create_model_card

    def create_model_card(model_name: str | None = None, *args: Any, **kwargs: Any) -> None:
        run = Run(output)
        write(plain_text(run.name), *args, **kwargs)
        if trainer.is_world_process_zero():
            card = Path(trainer.args.output_dir, "README.md")
            write_atomic(card, complete_card(card.read_text(encoding="utf-8"), run, model))

    trainer.create_model_card = create_model_card


def complete_card(text: str, run: Run, model: str) -> str:
    """Return TRL's card with the name of the first policy, if TRL has none, and a table of evaluations, if any."""
    local = os.path.isdir(model) or model.startswith(("/", ".", "~"))
    text = text.replace(_UNKNOWN, plain_text(Path(model).name if local else model))
    text = text.replace('model="None"', 'model="path/to/this/folder"')
    rows = [[_cell(row.get(name)) for name in _COLUMNS] for row in run.evals]
    n, m = (run.config.get(key) for key in ("num_rollouts", "num_generations"))
    how = f"{_cell(n or m)} rollouts a prompt, {_cell(m)} trained ([PODS](https://arxiv.org/abs/2504.13818))."
    table = [f"| {' | '.join(cells)} |" for cells in [[*_COLUMNS], ["---:"] * len(_COLUMNS), *rows]]
    return "\n".join([text.rstrip(), "", "## Evaluation", "", how, "", *table, ""]) if rows else text


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value) if isinstance(value, int) else "-"


def push(trainer: Trainer, folder: Path, name: str) -> None:
    """Push the final policy with transformers' `push_to_hub`. A failure is only a warning: the run is complete.

    Call it on every process.

    Args:
        trainer: its `hub_*` arguments say where to push.
        folder: the final policy.
        name: the repository, if the recipe does not name it.
    """
    args = trainer.args
    args.hub_model_id = args.hub_model_id or "".join(c if c.isascii() and c.isalnum() else "-" for c in name).strip("-")
    before, args.output_dir = args.output_dir, str(folder)
    try:
        trainer.push_to_hub()
    except Exception as error:  # the network, the hub, its client
        reason = " ".join(str(error).split()) or type(error).__name__
        console(stderr=True).print(f"[yellow]Not pushed to the hub:[/yellow] {safe_text(reason)} The run is complete.")
    finally:
        args.output_dir = before
