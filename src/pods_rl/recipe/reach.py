"""Whether the hub would give what a recipe names, asked before torch is loaded: loaders try for minutes to say no."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..errors import UserError
from .checks import looks_like_path
from .reading import local_path
from .schema import TINY

_PATIENCE = 1.5  # seconds; a hub that is slow may yet give it, so that only a clear no refuses


def check_reachable(values: Mapping[str, Any]) -> None:
    """Raises UserError where the hub does not have the model or the data set, or would not take what is pushed."""
    wanted: list[tuple[str, Literal["model", "dataset"], str]] = [
        ("model_name_or_path", "model", values.get("model_revision") or "main"),
        ("dataset_name", "dataset", "main"),
    ]
    for key, kind, revision in wanted:
        name = values.get(key)
        if name and name != TINY and not looks_like_path(name) and not local_path(name).exists():
            _check(key, kind, name, revision)
    for key in ("push_to_hub", "log_completions_hub_repo"):
        if values.get(key):
            _check_writable(key)


@cache
def _check_writable(key: str) -> None:
    """Raises UserError where the hub would take nothing from here: offline, without a token, or with a wrong one."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import build_hf_headers, get_session

    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{key} needs the hub, and HF_HUB_OFFLINE is set: unset one of them.")
    token = get_token()
    if token is None:
        raise UserError(f"{key} needs a token of the hub: set HF_TOKEN, or run `hf auth login`.")
    try:
        answer = get_session().get(
            f"{constants.ENDPOINT}/api/whoami-v2", headers=build_hf_headers(token=token), timeout=_PATIENCE
        )
    except Exception as error:
        if "Connect" in type(error).__name__ and "Timeout" not in type(error).__name__:
            raise UserError(
                f"{key} needs the hub, which cannot be reached ({error}): unset it, or check the network."
            ) from error
        return
    if answer.status_code == 401:
        raise UserError(f"{key}: the hub does not accept the token: set another HF_TOKEN, or run `hf auth login`.")


@cache
def _check(key: str, kind: Literal["model", "dataset"], name: str, revision: str) -> None:
    """Once for each name: arms of an experiment mostly share theirs. A refusal is not remembered."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    file = "config.json" if kind == "model" else "README.md"
    folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"
    prepared = Path(constants.HF_HOME) / "datasets" / name.replace("/", "___")
    instead = f"name a local {'folder' if kind == 'model' else 'file or folder'}"
    try:
        known = isinstance(try_to_load_from_cache(name, file, revision=revision, repo_type=kind), str)
        if known or (kind == "dataset" and (folder.is_dir() or prepared.is_dir())):
            return
        get_hf_file_metadata(hf_hub_url(name, file, revision=revision, repo_type=kind), timeout=_PATIENCE)
    except HFValidationError as error:
        raise UserError(f"{key} = {name}: is neither a path nor a name the hub can have: {instead}.") from error
    except GatedRepoError as error:
        raise UserError(
            f"{key} = {name}: the hub gives it to those it has let in: ask there, then set HF_TOKEN; or {instead}."
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{key} = {name}: there is no such {kind} on the hub, or it is private: mend the name, set HF_TOKEN, or "
            f"{instead}."
        ) from error
    except OfflineModeIsEnabled as error:
        raise UserError(
            f"{key} = {name}: is not on this machine, and HF_HUB_OFFLINE forbids to fetch it: unset that, or {instead}."
        ) from error
    except Exception as error:  # each version of the hub's library has its own for a network that is not there
        if "Connect" in type(error).__name__ and "Timeout" not in type(error).__name__:
            raise UserError(
                f"{key} = {name}: is not on this machine, and the hub cannot be reached ({error}): mend the network, "
                f"or fetch it elsewhere and {instead}."
            ) from error
