"""Published sets of mathematics: GSM8K, MATH with MATH-500, AMC 2023; from the hub, or from local files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from .base import Task
from .files import Source, named_sources, sourced_task
from .reading import READERS, listing


@dataclass(frozen=True)
class Home:
    """Where one split of a published set is: its hub id and configuration, and its folders under `data_dir`."""

    hub: str
    config: str | None
    folders: tuple[str, ...]


GSM8K = Home("openai/gsm8k", "main", ("gsm8k",))
MATH_TRAIN = Home("DigitalLearningGmbH/MATH-lighteval", "default", ("math",))
MATH_500 = Home("HuggingFaceH4/MATH-500", None, ("math500", "math"))
AMC23 = Home("math-ai/amc23", None, ("amc23",))
_FOLDERS = {name for home in (GSM8K, MATH_TRAIN, MATH_500, AMC23) for name in home.folders}


def gsm8k_task(settings: Mapping[str, Any]) -> Task:
    """Make GSM8K: 7473 word problems to train on, 1319 to test; gold answers follow `####`.

    Read from `dataset_name` or `data_dir` where given, else from the hub (openai/gsm8k). Raises UserError as
    `dataset_task` does.
    """
    return _published("gsm8k", GSM8K, GSM8K, {"answer_after": "####"}, settings)


def math_task(settings: Mapping[str, Any]) -> Task:
    """Make MATH: its 7500 training problems, and MATH-500 to test.

    Gold answers are the last box of `solution`, or `answer` where there is one. Read from `dataset_name` or
    `data_dir` where given, else from the hub (DigitalLearningGmbH/MATH-lighteval, HuggingFaceH4/MATH-500).
    """
    return _published("math", MATH_TRAIN, MATH_500, {}, settings)


def amc23_task(settings: Mapping[str, Any]) -> Task:
    """Make AMC 2023: its 40 problems to test (hub: math-ai/amc23), and those of `math` to train on."""
    return _published("amc23", MATH_TRAIN, AMC23, {}, settings)


def _published(
    name: str, train: Home, test: Home, own: Mapping[str, Any], settings: Mapping[str, Any], number: int = 1
) -> Task:
    given = {**own, **{key: value for key, value in settings.items() if value is not None}}
    if "dataset_name" in given:
        return sourced_task(name, named_sources(given), given, number=number)
    splits = (given.get("dataset_train_split", "train"), given.get("dataset_test_split", "test"))
    if "data_dir" not in given:
        hub = (Source(train.hub, splits[0], train.config), Source(test.hub, splits[1], test.config))
        return sourced_task(name, hub, given, number=number)
    folder = local_folder(given["data_dir"])
    own_folders = {*train.folders, *test.folders}
    if folder.resolve().name in _FOLDERS - own_folders:  # its files would pass for ours, but for what they ask
        raise UserError(
            f"data_dir = {folder}: task {name} is in {' or '.join(sorted(own_folders))}/, and this is another task's "
            "folder; name that one, or the folder above it"
        )
    local_test = find_split(folder, test.folders, splits[1])
    if local_test is None:
        raise UserError(
            f"data_dir = {folder}: task {name} found no test file there or in its folder {test.folders[0]}/: expected "
            f"test.jsonl (or {', '.join(READERS)}); the folder holds {listing(folder)}"
        )
    local_train = find_split(folder, train.folders, splits[0])
    return sourced_task(name, (local_train, local_test), given, number=number)


def local_folder(data_dir: str) -> Path:
    """The folder that a recipe names as `data_dir`; raises UserError where there is none."""
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise UserError(f"data_dir = {data_dir}: there is no such folder (looked in {Path.cwd()})")
    return folder


def find_split(folder: Path, inner: tuple[str, ...], split: str) -> Source | None:
    """The file of a split (`train.jsonl`, `test.parquet`, ...): in one of the inner folders, else in the folder itself.

    `split` may carry a slice. None where there is no such file.
    """
    stem = split.partition("[")[0]
    for place in (*(folder / name for name in inner), folder):
        for ending in READERS:
            if (place / f"{stem}{ending}").is_file():
                return Source(str(place / f"{stem}{ending}"), split)
    return None
