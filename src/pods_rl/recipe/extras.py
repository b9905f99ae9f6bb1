"""What a recipe needs besides what pods-rl installs, as data: found before torch is loaded, all of it at once."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


class Extra(NamedTuple):
    """A library: any of ``modules`` will do; ``install`` is what pip takes, ``[name]`` an extra of pods-rl."""

    name: str
    modules: tuple[str, ...]
    install: str

    @property
    def missing(self) -> bool:
        return not any(_is_there(module) for module in self.modules)


_BITSANDBYTES = Extra("bitsandbytes", ("bitsandbytes",), "[quant]")
_FLASH = Extra("flash-attn", ("flash_attn", "kernels"), "flash-attn")
_GALORE = Extra("galore-torch", ("galore_torch",), "galore-torch")
_LOMO = Extra("lomo-optim", ("lomo_optim",), "lomo-optim")
_TORCHAO = Extra("torchao", ("torchao",), "torchao")
_FREE = Extra("schedulefree", ("schedulefree",), "schedulefree")
_APOLLO = Extra("apollo-torch", ("apollo_torch",), "apollo-torch")

# what a key's value needs; a list's values are looked up one by one
_OF_VALUE: dict[str, dict[Any, Extra]] = {
    "use_vllm": {True: Extra("vllm", ("vllm",), "[vllm]")},
    "load_in_4bit": {True: _BITSANDBYTES},
    "load_in_8bit": {True: _BITSANDBYTES},
    "use_peft": {True: Extra("peft", ("peft",), "peft")},
    "use_liger_kernel": {True: Extra("liger-kernel", ("liger_kernel",), "liger-kernel")},
    "attn_implementation": {
        "flash_attention_2": _FLASH,
        "flash_attention_3": Extra("flash-attn-3", ("flash_attn_3", "flash_attn_interface", "kernels"), "kernels"),
        "flash_attention_4": Extra("flash-attn-4", ("flash_attn.cute", "kernels"), "flash-attn-4"),
    },
    "cache_implementation": {
        "quantized": Extra("optimum-quanto", ("optimum.quanto", "hqq"), "optimum-quanto"),
    },
    "optim": {
        **dict.fromkeys((
            "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "lion_8bit", "lion_32bit",
            "paged_lion_8bit", "paged_lion_32bit", "ademamix", "ademamix_8bit", "paged_ademamix_32bit",
            "paged_ademamix_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit",
        ), _BITSANDBYTES),
        **dict.fromkeys((
            "galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise",
            "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise",
        ), _GALORE),
        **dict.fromkeys(("lomo", "adalomo"), _LOMO),
        **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), _TORCHAO),
        **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), _FREE),
        **dict.fromkeys(("apollo_adamw", "apollo_adamw_layerwise"), _APOLLO),
        "grokadamw": Extra("grokadamw", ("grokadamw",), "grokadamw"),
        "stable_adamw": Extra("torch-optimi", ("optimi",), "torch-optimi"),
        "adamw_anyprecision": Extra("torchdistx", ("torchdistx",), "torchdistx"),
        "adamw_torch_xla": Extra("torch-xla", ("torch_xla",), "torch-xla"),
        "adamw_torch_npu_fused": Extra("torch-npu", ("torch_npu",), "torch-npu"),
    },
    "report_to": {
        "wandb": Extra("wandb", ("wandb",), "wandb"),
        "tensorboard": Extra("tensorboard", ("tensorboard", "tensorboardX"), "tensorboard"),
        "trackio": Extra("trackio", ("trackio",), "trackio"),
        "mlflow": Extra("mlflow", ("mlflow",), "mlflow"),
        "comet_ml": Extra("comet-ml", ("comet_ml",), "comet-ml"),
        "clearml": Extra("clearml", ("clearml",), "clearml"),
        "neptune": Extra("neptune", ("neptune",), "neptune"),
        "codecarbon": Extra("codecarbon", ("codecarbon",), "codecarbon"),
        "dagshub": Extra("dagshub", ("dagshub",), "dagshub mlflow"),
        "flyte": Extra("flytekit", ("flytekit",), "flytekit"),
        "dvclive": Extra("dvclive", ("dvclive",), "dvclive"),
        "swanlab": Extra("swanlab", ("swanlab",), "swanlab"),
        "azure_ml": Extra("azureml-mlflow", ("azureml.core.run",), "azureml-core"),
    },
}  # fmt: skip
# needed wherever the key is set at all
_OF_KEY = {"deepspeed": Extra("deepspeed", ("deepspeed",), "[deepspeed]")}
REPORTERS = (*_OF_VALUE["report_to"], "kubeflow", "all", "none")


def missing_library(values: Mapping[str, Any]) -> str | None:
    """Everything that must be installed before this recipe can train here, as a sentence; None where nothing is."""
    missing = list(dict.fromkeys(extra for extra in _needed(values) if extra.missing))
    if not missing:
        return None
    names = [extra.name for extra in missing]
    ours = [extra.install.strip("[]") for extra in missing if extra.install.startswith("[")]
    others = [extra.install for extra in missing if not extra.install.startswith("[")]
    line = " ".join([*([f"'pods-rl[{','.join(ours)}]'"] if ours else []), *others])
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"This recipe needs {listed}, which {'is' if len(names) == 1 else 'are'} not installed: pip install {line}."


def missing_module(values: Mapping[str, Any]) -> str | None:
    """A rule, task or reward of the user's whose module cannot be found, as a sentence; None where none is."""
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
    except (ImportError, ValueError):  # its parent is not there, or was blocked
        return False
