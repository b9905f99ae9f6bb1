"""Check that what a recipe needs is there: libraries, the user's own modules, models and data sets of the hub.

It runs before torch is loaded. Loaders would notice later, or retry the hub for minutes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UserError
from .catalog import SHIPPED
from .reading import local_path, looks_like_path

_PATIENCE = 1.5  # seconds; a timeout is not an error, since a slow hub may still have it


def missing_library(values: Mapping[str, Any]) -> str | None:
    """Return a sentence on every extra of pods-rl that a recipe needs and that is missing; None if all are installed.

    transformers and TRL name any other library that is missing.
    """
    quantised = values.get("load_in_4bit") or values.get("load_in_8bit")
    needed = {
        "vllm": ("vllm", values.get("use_vllm")),
        "bitsandbytes": ("quant", quantised or re.search("8bit|bnb|paged", str(values.get("optim") or ""))),
        "deepspeed": ("deepspeed", values.get("deepspeed")),
    }
    missing = {name: extra for name, (extra, wanted) in needed.items() if wanted and not _is_there(name)}
    if not missing:
        return None
    verb = "is" if len(missing) == 1 else "are"
    line = f"pip install '.[{','.join(missing.values())}]' in a checkout"
    return f"This recipe needs {' and '.join(missing)}, which {verb} not installed: {line}."


def missing_module(values: Mapping[str, Any]) -> str | None:
    """Return a sentence on the first rule, task or reward of the user whose module is missing, or None."""
    names = [("rule", values.get("rule")), ("task", values.get("task"))]
    names += [("task_rewards", name) for name in values.get("task_rewards") or {}]
    for key, name in names:
        top = str(name).partition(":")[0].partition(".")[0]
        if name and re.search(r"[.:]", name) and top not in sys.modules and not _is_there(top):
            return f"{key}: {name}: there is no module {top} (looked in {Path.cwd()} and the packages of this Python)."
    return None


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing or blocked
        return False


def check_reachable(values: Mapping[str, Any]) -> None:
    """Raise UserError if the hub does not have the model or the data set, or would reject a push."""
    for key, kind, revision in (
        ("model_name_or_path", "model", values.get("model_revision") or "main"),
        ("dataset_name", "dataset", "main"),
    ):
        name = values.get(key)
        if name and name not in SHIPPED and not looks_like_path(name) and not local_path(name).exists():
            _check_readable(key, kind, name, revision)
    for key in ("push_to_hub", "log_completions_hub_repo"):
        if values.get(key):
            check_pushable(key)


@cache
def check_pushable(key: str) -> None:
    """Raise UserError if nothing can be pushed: offline, without a token, or with a wrong one."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import build_hf_headers, get_session

    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{key} needs the hub, and HF_HUB_OFFLINE is set: unset one of them.")
    token = get_token()
    if token is None:
        raise UserError(f"{key} needs a token of the hub: set HF_TOKEN, or run `hf auth login`.")
    url, headers = f"{constants.ENDPOINT}/api/whoami-v2", build_hf_headers(token=token)
    try:
        answer = get_session().get(url, headers=headers, timeout=_PATIENCE)
    except Exception as error:
        if _no_network(error):
            raise UserError(f"{key} needs the hub, which cannot be reached ({error}): check the network.") from error
        return
    if answer.status_code == 401:
        raise UserError(f"{key}: the hub does not accept the token: set another HF_TOKEN, or run `hf auth login`.")


@cache
def _check_readable(key: str, kind: str, name: str, revision: str) -> None:
    """Look one name up on the hub. Cached, since arms mostly share their model; errors are not."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    file = "config.json" if kind == "model" else "README.md"
    folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"
    prepared = Path(constants.HF_HOME) / "datasets" / name.replace("/", "___")
    try:
        known = isinstance(try_to_load_from_cache(name, file, revision=revision, repo_type=kind), str)
        if not known and not (kind == "dataset" and (folder.is_dir() or prepared.is_dir())):
            get_hf_file_metadata(hf_hub_url(name, file, revision=revision, repo_type=kind), timeout=_PATIENCE)
        return
    except HFValidationError:
        reason = "this is neither a path nor a valid name on the hub: correct the name"
    except GatedRepoError:
        reason = "the repository is gated: request access on the hub, then set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = f"there is no such {kind} on the hub, or it is private: correct the name, or set HF_TOKEN"
    except OfflineModeIsEnabled:
        reason = "not on this machine, and HF_HUB_OFFLINE forbids downloads: unset HF_HUB_OFFLINE"
    except Exception as error:
        if not _no_network(error):
            return
        reason = f"not on this machine, and the hub cannot be reached ({error}): check the network"
    raise UserError(f"{key} = {name}: {reason}, or name a local {'folder' if kind == 'model' else 'file or folder'}.")


def _no_network(error: Exception) -> bool:
    """Return whether a request failed for lack of a network; errors differ between versions of the library."""
    return "Connect" in type(error).__name__ and "Timeout" not in type(error).__name__
