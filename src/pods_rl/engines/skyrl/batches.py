"""SkyRL's batches as PODS needs them: widened to n a prompt, and read trajectory by trajectory. Does not import SkyRL.

SkyRL's generator takes and returns dictionaries of lists. A batch has m rows a prompt, one after the other. An output
has one row a trajectory, or with step-wise trajectories one for each turn, the last of which has `is_last_step`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import UserError


def is_training(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch is for training and not for evaluation.

    Raises:
        UserError: a batch that does not say so.
    """
    metadata = batch.get("batch_metadata")
    if metadata is None:
        raise UserError(
            "the batch has no batch_metadata, so PODS cannot see whether it is for training or for evaluation. "
            "Make it with skyrl.train.generators.utils.prepare_generator_input."
        )
    return bool(metadata.training_phase == "train")


def widen(batch: Mapping[str, Any], m: int, n: int) -> dict[str, Any]:
    """Return SkyRL's `GeneratorInput` with n rows a prompt instead of m; the fields of each new row are copies.

    Raises:
        UserError: rows that are not m of each prompt.

    >>> widen({"prompts": ["a", "a", "b", "b"], "sampling_params": {"top_p": 1.0}}, 2, 3)
    {'prompts': ['a', 'a', 'a', 'b', 'b', 'b'], 'sampling_params': {'top_p': 1.0}}
    """
    rows = len(batch["prompts"])
    trajectory_ids = batch.get("trajectory_ids")
    message = (
        f"expected a batch of {m} rows a prompt, one after the other (generator.n_samples_per_prompt); got {{}}. "
        "Make it with skyrl.train.generators.utils.prepare_generator_input."
    )
    if rows == 0 or rows % m != 0:
        raise UserError(message.format(f"{rows} rows"))
    if trajectory_ids is not None:  # only they name the prompt of a row
        for start in range(0, rows, m):
            prompts = {trajectory_id.instance_id for trajectory_id in trajectory_ids[start : start + m]}
            if len(prompts) > 1:
                raise UserError(message.format(f"rows of {len(prompts)} prompts in the {m} from row {start}"))
    wide = dict(batch)
    for name, values in batch.items():
        if isinstance(values, list) and len(values) == rows:
            wide[name] = [copy.deepcopy(values[start]) for start in range(0, rows, m) for _ in range(n)]
    if trajectory_ids is not None:
        for row, trajectory_id in enumerate(wide["trajectory_ids"]):
            wide["trajectory_ids"][row] = replace(trajectory_id, repetition_id=row % n)
    return wide


def rows_of_trajectories(output: Mapping[str, Any], trajectories: int, *, step_wise: bool) -> list[list[int]]:
    """Return the rows of each trajectory of SkyRL's `GeneratorOutput`, in the order of the batch.

    Raises:
        RuntimeError: another number of trajectories than requested, or turns without `is_last_step`.

    >>> rows_of_trajectories({"response_ids": [[1], [2], [3]], "is_last_step": [False, True, True]}, 2, step_wise=True)
    [[0, 1], [2]]
    """
    if step_wise and output.get("is_last_step") is None:
        raise RuntimeError(
            "generator.step_wise_trajectories is true, and the generator returned no is_last_step: PODS cannot see "
            "which rows are one trajectory. Return it, or set step_wise_trajectories to false."
        )
    rows: list[list[int]] = []
    current: list[int] = []
    for row in range(len(output["response_ids"])):
        current.append(row)
        if not step_wise or output["is_last_step"][row]:
            rows.append(current)
            current = []
    if current or len(rows) != trajectories:
        raise RuntimeError(
            f"the generator returned {len(rows)} complete trajectories for a batch of {trajectories}. A trajectory "
            "that fails must still be returned, with loss mask 0."
        )
    return rows


def take_rows(output: Mapping[str, Any], rows: Sequence[int], trajectories: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return SkyRL's `GeneratorOutput` with the rows of complete trajectories; `rollout_metrics` stay those of all.

    A field has an entry for each row, or for each trajectory, or is a dictionary of such lists. Other fields stay.

    >>> times = {"llm": [1.0, 2.0, 3.0], "env": [0.1, 0.2, 0.3]}
    >>> take_rows({"response_ids": [[5], [6], [7]], "trajectory_time_splits": times}, [0, 2], [[0], [1], [2]])
    {'response_ids': [[5], [7]], 'trajectory_time_splits': {'llm': [1.0, 3.0], 'env': [0.1, 0.3]}}
    """
    number_of_last_row = {trajectory[-1]: number for number, trajectory in enumerate(trajectories)}
    kept = [number_of_last_row[row] for row in rows if row in number_of_last_row]
    # If both lengths are equal, each trajectory has one row, and both lists are the same.
    taken = {len(trajectories): kept, len(output["response_ids"]): rows}

    def take(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: take(part) for name, part in value.items()}
        if isinstance(value, list) and len(value) in taken:
            return [value[index] for index in taken[len(value)]]
        return value

    return {name: value if name == "rollout_metrics" else take(value) for name, value in output.items()}


def total(reward: float | list[float] | None) -> float:
    """Return the reward of a row, which SkyRL holds as a number or as one for each token; NaN for None.

    >>> total([0.0, 0.5, 0.25])
    0.75
    """
    if reward is None:
        return math.nan
    if isinstance(reward, list):
        return float(sum(reward))
    return float(reward)


def silence(output: dict[str, Any], rows: Iterable[int]) -> None:
    """Give rows reward 0 and loss mask 0, in place: no token of theirs is trained.

    >>> output = {"rewards": [1.0, [0.0, 2.0]], "loss_masks": [[1], [1, 1]]}
    >>> silence(output, [1])
    >>> output
    {'rewards': [1.0, [0.0, 0.0]], 'loss_masks': [[1], [0, 0]]}
    """
    for row in rows:
        length = len(output["loss_masks"][row])
        output["loss_masks"][row] = [0] * length
        if isinstance(output["rewards"][row], list):
            output["rewards"][row] = [0.0] * length
        else:
            output["rewards"][row] = 0.0
