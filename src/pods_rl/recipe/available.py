"""Check that what a recipe needs is there: libraries, the user's own modules, models and data sets of the hub.

It runs before torch is loaded. Loaders would notice later, or retry the hub for minutes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from ..errors import UserError
from .catalog import SHIPPED
from .reading import local_path, looks_like_path

_PATIENCE = 1.5  # seconds; a timeout is not an error, since a slow hub may still have it


class Extra(NamedTuple):
    """A library. One of ``modules`` is enough; ``install`` is the argument for pip, ``[name]`` an extra of pods-rl.

    Both are the library's name if they are not given.
    """

    name: str
    modules: tuple[str, ...] = ()
    install: str = ""

    @property
    def missing(self) -> bool:
        return not any(map(_is_there, self.modules or (self.name.replace("-", "_"),)))


_BITSANDBYTES = Extra("bitsandbytes", install="[quant]")
_OPTIMIZERS = {
    "adamw_8bit adamw_bnb_8bit paged_adamw_32bit paged_adamw_8bit lion_8bit lion_32bit paged_lion_8bit "
    "paged_lion_32bit ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit rmsprop_bnb rmsprop_bnb_8bit "
    "rmsprop_bnb_32bit": _BITSANDBYTES,
    "galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise galore_adamw_8bit_layerwise "
    "galore_adafactor_layerwise": Extra("galore-torch"),
    "lomo adalomo": Extra("lomo-optim"),
    "adamw_torch_4bit adamw_torch_8bit": Extra("torchao"),
    "schedule_free_radam schedule_free_adamw schedule_free_sgd": Extra("schedulefree"),
    "apollo_adamw apollo_adamw_layerwise": Extra("apollo-torch"),
    "grokadamw": Extra("grokadamw"),
    "stable_adamw": Extra("torch-optimi", ("optimi",)),
    "adamw_anyprecision": Extra("torchdistx"),
    "adamw_torch_xla": Extra("torch-xla"),
    "adamw_torch_npu_fused": Extra("torch-npu"),
}
_REPORTERS = {
    "wandb": Extra("wandb"),
    "tensorboard": Extra("tensorboard", ("tensorboard", "tensorboardX")),
    "trackio": Extra("trackio"),
    "mlflow": Extra("mlflow"),
    "comet_ml": Extra("comet-ml"),
    "clearml": Extra("clearml"),
    "neptune": Extra("neptune"),
    "codecarbon": Extra("codecarbon"),
    "dagshub": Extra("dagshub", install="dagshub mlflow"),
    "flyte": Extra("flytekit"),
    "dvclive": Extra("dvclive"),
    "swanlab": Extra("swanlab"),
    "azure_ml": Extra("azureml-mlflow", ("azureml.core.run",), "azureml-core"),
}
REPORTERS = (*_REPORTERS, "kubeflow", "all", "none")

# what a key's value needs; each value of a list is looked up
_OF_VALUE: dict[str, dict[Any, Extra]] = {
    "use_vllm": {True: Extra("vllm", install="[vllm]")},
    "load_in_4bit": {True: _BITSANDBYTES},
    "load_in_8bit": {True: _BITSANDBYTES},
    "use_peft": {True: Extra("peft")},
    "use_liger_kernel": {True: Extra("liger-kernel")},
    "attn_implementation": {
        "flash_attention_2": Extra("flash-attn", ("flash_attn", "kernels")),
        "flash_attention_3": Extra("flash-attn-3", ("flash_attn_3", "flash_attn_interface", "kernels"), "kernels"),
        "flash_attention_4": Extra("flash-attn-4", ("flash_attn.cute", "kernels")),
    },
    "cache_implementation": {"quantized": Extra("optimum-quanto", ("optimum.quanto", "hqq"))},
    "optim": {name: extra for names, extra in _OPTIMIZERS.items() for name in names.split()},
    "report_to": _REPORTERS,
}
_OF_KEY = {"deepspeed": Extra("deepspeed", install="[deepspeed]")}  # needed for any value


def missing_library(values: Mapping[str, Any]) -> str | None:
    """Return a sentence on every library that this recipe needs and that is missing; None if all are installed."""
    missing = list(dict.fromkeys(extra for extra in _needed(values) if extra.missing))
    if not missing:
        return None
    names = [extra.name for extra in missing]
    ours = [extra.install.strip("[]") for extra in missing if extra.install.startswith("[")]
    others = [extra.install or extra.name for extra in missing if not extra.install.startswith("[")]
    line = " ".join([*([f"'pods-rl[{','.join(ours)}]'"] if ours else []), *others])
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"This recipe needs {listed}, which {'is' if len(names) == 1 else 'are'} not installed: pip install {line}."


def trackers(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the trackers of `report_to` by name; of ``all`` those that are installed.

    >>> trackers({"report_to": "none"}), trackers({"report_to": ["wandb", "mlflow"]}), trackers({})
    ((), ('wandb', 'mlflow'), ())
    """
    given = values.get("report_to")
    names = given if isinstance(given, list) else [given]
    if "all" in names:
        return tuple(name for name, extra in _REPORTERS.items() if not extra.missing)
    return tuple(name for name in names if name in REPORTERS and name != "none")


def locked_tracker(values: Mapping[str, Any]) -> str | None:
    """Return a sentence if wandb would ask for a key, or None."""
    if "wandb" not in trackers(values):
        return None
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return None
    if os.environ.get("WANDB_MODE", "online") not in ("online", "shared") or os.environ.get("WANDB_DISABLED"):
        return None
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    files = [Path(os.environ.get("NETRC") or "~/.netrc"), Path("~/_netrc")]
    settings = [Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb", "settings"), Path("wandb/settings")]
    for file, words in [*((file, (host,)) for file in files), *((file, ("offline", "disabled")) for file in settings)]:
        with suppress(OSError, UnicodeDecodeError):
            if any(word in file.expanduser().read_text(encoding="utf-8") for word in words):
                return None
    return (
        "report_to: wandb needs a key: set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline to log without "
        "an account (`wandb sync` sends it later)."
    )


def missing_module(values: Mapping[str, Any]) -> str | None:
    """Return a sentence on the first rule, task or reward of the user whose module is missing, or None."""
    names = [("rule", values.get("rule")), ("task", values.get("task"))]
    names += [("task_rewards", name) for name in values.get("task_rewards") or {}]
    for key, name in names:
        top = str(name).partition(":")[0].partition(".")[0]
        if name and re.search(r"[.:]", name) and top not in sys.modules and not _is_there(top):
            return f"{key}: {name}: there is no module {top} (looked in {Path.cwd()} and the packages of this Python)."
    return None


def _needed(values: Mapping[str, Any]) -> Iterable[Extra]:
    for key, extras in _OF_VALUE.items():
        given = values.get(key)
        for value in given if isinstance(given, list) else [given]:
            if value in extras:
                yield extras[value]
    yield from (extra for key, extra in _OF_KEY.items() if values.get(key))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing or blocked
        return False


def check_reachable(values: Mapping[str, Any]) -> None:
    """Raise UserError if the hub does not have the model or the data set, or would reject a push."""
    wanted: list[tuple[str, Literal["model", "dataset"], str]] = [
        ("model_name_or_path", "model", values.get("model_revision") or "main"),
        ("dataset_name", "dataset", "main"),
    ]
    for key, kind, revision in wanted:
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
        if not _no_network(error):
            return
        raise UserError(
            f"{key} needs the hub, which cannot be reached ({error}): unset it, or check the network."
        ) from error
    if answer.status_code == 401:
        raise UserError(f"{key}: the hub does not accept the token: set another HF_TOKEN, or run `hf auth login`.")


@cache
def _check_readable(key: str, kind: Literal["model", "dataset"], name: str, revision: str) -> None:
    """Look one name up on the hub. Cached, since arms mostly share their model; errors are not."""
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
    except HFValidationError:
        reason = f"this is neither a path nor a valid name on the hub: {instead}"
    except GatedRepoError:
        reason = f"the repository is gated: request access on the hub, then set HF_TOKEN; or {instead}"
    except RepositoryNotFoundError:
        reason = f"there is no such {kind} on the hub, or it is private: correct the name, set HF_TOKEN, or {instead}"
    except OfflineModeIsEnabled:
        reason = f"not on this machine, and HF_HUB_OFFLINE forbids downloads: unset HF_HUB_OFFLINE, or {instead}"
    except Exception as error:
        if not _no_network(error):
            return
        reason = (
            f"not on this machine, and the hub cannot be reached ({error}): check the network, or download it "
            f"elsewhere and {instead}"
        )
    else:
        return
    raise UserError(f"{key} = {name}: {reason}.")


def _no_network(error: Exception) -> bool:
    """Return whether a request failed for lack of a network; errors differ between versions of the library."""
    return "Connect" in type(error).__name__ and "Timeout" not in type(error).__name__
