"""Whether a run directory and a checkpoint belong to one run: compared before a record of the run is removed.

A run has a token. It is in `environment.json` (`run`) and in the `trainer_state.json` of each of its checkpoints. Runs
of earlier versions have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from .files import ENVIRONMENT, read_mapping

TOKEN = "run"  # the field of `environment.json`
_TRAINER_STATE = "trainer_state.json"
_STATE = "pods_recorder"  # the key of a run's state in the trainer state of a checkpoint


def token_of(run: Path) -> str | None:
    """Return the token of a run; empty if it has none, None if there is no readable `environment.json`."""
    environment = read_mapping(run / ENVIRONMENT)
    if not environment:
        return None
    return str(environment.get(TOKEN) or "")


def keep_state(callbacks: dict[str, Any], state: Mapping[str, Any]) -> None:
    """Put the state of a run where transformers saves it with the next checkpoint.

    Args:
        callbacks: `stateful_callbacks` of the trainer state. transformers leaves an entry alone that is not the name
            of a callback.
        state: plain data.
    """
    callbacks[_STATE] = dict(state)


def kept_state(callbacks: Any) -> dict[str, Any]:
    """Return the state of a run in the `stateful_callbacks` of a trainer state; empty if there is none."""
    state = callbacks.get(_STATE) if isinstance(callbacks, Mapping) else None
    return dict(state) if isinstance(state, Mapping) else {}


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Return the state of the run that saved a checkpoint; empty if it has none."""
    return kept_state(read_mapping(checkpoint / _TRAINER_STATE).get("stateful_callbacks"))


def is_of_other_run(checkpoint: Path, token: str | None) -> bool:
    """Return whether another run than the one with this token (`token_of`) saved a checkpoint.

    Without a trainer state, or with an unknown token, this is not known: the answer is False.
    """
    if token is None or not (checkpoint / _TRAINER_STATE).is_file():
        return False
    return token != str(state_of(checkpoint).get("token") or "")


def check_token(run: Path, step: int, token: str) -> None:
    """Raise UserError if a training cannot continue the records of a run, since another run saved its checkpoint.

    Args:
        run: its directory.
        step: of the checkpoint; 0 without one.
        token: that the checkpoint holds.
    """
    held = token_of(run)
    if step and held is not None and held != token:
        raise UserError(
            f"{run} holds another run than the one that saved the checkpoint of step {step}. Its records stay as they "
            "are. Choose the directory of the run that saved the checkpoint, or a new one."
        )
