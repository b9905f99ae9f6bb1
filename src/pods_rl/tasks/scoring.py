"""Our graders as verl's reward function: `reward.custom_reward_function.{path,name}`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyarrow import dataset

from ..errors import UserError
from ..rewards import get_reward, graded_text
from ..rewards.thinking import OPENING
from . import TASKS, TaskEntry


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, opens_thought: bool = False, **_: Any
) -> dict[str, float]:
    """Return a completion's reward, whether its answer is right (`acc`), and each of the task's rewards.

    Args:
        data_source: a task's name (`pods tasks`); its default rewards and weights are used.
        solution_str: the completion's text.
        ground_truth: the gold answer.
        opens_thought: whether prompts end with `<think>`, which verl does not show to a reward function. Set it as
            `reward.custom_reward_function.reward_kwargs.opens_thought`.

    Raises:
        UserError: see `scored_task`.

    >>> compute_score("arithmetic", "<think>1+1=2</think><answer>2</answer>", "2")["acc"]
    1.0
    """
    entry = scored_task(data_source)
    text = graded_text(OPENING if opens_thought else "", solution_str)
    scores: dict[str, float] = {}
    total = 0.0
    for name, weight in entry.rewards.items():
        scores[name] = get_reward(name)(text, ground_truth)
        total += weight * scores[name]
    return {"score": total, "acc": float(scores[entry.answer] >= 1), **scores}


def scored_task(data_source: str) -> TaskEntry:
    """Return the task whose rewards score the rows of a data source."""
    entry = TASKS.get(data_source)
    if entry is None:
        raise UserError(
            f"the column data_source is {data_source!r}; expected the task whose rewards to use: {', '.join(TASKS)}. "
            "For other data name a reward function of your own there."
        )
    return entry


def check_sources(files: Iterable[Any], column: str) -> None:
    """Raise UserError if `compute_score` cannot score the rows of verl's files: paths, lists of paths, or None."""
    paths: list[str] = []
    for setting in files:
        paths += [setting] if isinstance(setting, str) else (setting or ())
    for path in paths:
        try:
            # a repeated name stays encoded, so that a small file takes little memory
            encoded = dataset.ParquetFileFormat(read_options={"dictionary_columns": [column]})
            rows = dataset.dataset(path, format=encoded if path.endswith(".parquet") else "json")
            sources = rows.to_table(columns=[column])[column].unique().to_pylist()
        except (OSError, ValueError):
            continue
        for source in sources:
            try:
                scored_task(source)
            except UserError as error:
                raise UserError(f"{path}: {error}") from None
