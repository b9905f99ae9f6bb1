"""From a task's rewards to TRL's reward functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from accelerate import PartialState

from ...recipe import Recipe
from ...rewards import Reward, binarise, get_reward
from ...rewards import score as score_texts
from ...rewards.user_rewards import RewardFailure, Scores
from ...rewards.verifier import verifier_losses
from ...tasks import Task
from .rollouts import as_text

RewardFunction = Callable[..., Scores]


def reward_functions(recipe: Recipe, task: Task) -> list[RewardFunction]:
    """The task's rewards as TRL calls them, in the task's order, under the recipe's settings.

    Raises UserError for an unknown reward, and with `task_binary` for one whose range is not known.
    """
    return [
        trl_reward(
            get_reward(name),
            limit=recipe.values["max_completion_length"],
            buffer=recipe.values["overlong_buffer"],
            binary=recipe.values["task_binary"],
            seconds=recipe.values["reward_seconds"],
        )
        for name in task.rewards
    ]


def trl_reward(
    reward: Reward,
    *,
    limit: int,
    buffer: int | None = None,
    binary: float | None = None,
    seconds: float | None = None,
) -> RewardFunction:
    """A reward in TRL's signature: completions and the dataset's `answer` column in, a list of floats out.

    A reward that starts verifier processes logs the answers it had to give up. One of a user's own scores each
    completion apart; where it raised or hung a RewardFailure stands, which PODSTrainer treats as `reward_errors` says.

    Args:
        limit: most tokens of a completion; what `overlong` measures by.
        buffer: tokens before it over which the penalty of `overlong` grows; None: a fifth of it.
        binary: share of the reward's range from which a score counts as 1, below it as 0; None: scores stay.
        seconds: what a user's own may take for one completion, in processes that are killed then; None: any time, in
            this process.
    """
    if binary is not None:
        binarise(reward, [], binary)  # an unknown range is refused before anything is generated

    def score(
        completions: list[Any],
        answer: list[str],
        completion_ids: list[list[int]],
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> Scores:
        before = verifier_losses()
        scores: Scores
        if reward.reads == "tokens":
            scores = reward.of_lengths([len(ids) for ids in completion_ids], limit, buffer)
        else:
            scores = score_texts(reward, [as_text(completion) for completion in completions], answer, seconds)
        if reward.verifies and log_metric is not None:
            _log_losses(before, log_metric)
        return _unscored(scores if binary is None else _binarised(reward, scores, binary))

    score.__name__ = reward.name
    return score


def _binarised(reward: Reward, scores: Scores, share: float) -> Scores:
    return [x if isinstance(x, RewardFailure) else binarise(reward, [x], share)[0] for x in scores]


def _unscored(scores: Scores) -> Scores:
    """NaN as inf: nobody could tell, so the whole rollout is unscored. (From TRL's functions NaN is None.)"""
    return [math.inf if isinstance(x, float) and math.isnan(x) else x for x in scores]


def _log_losses(before: tuple[int, int], log_metric: Callable[[str, float], None]) -> None:
    # TRL averages over processes: times their number, that is the sum over all of them.
    processes = PartialState().num_processes
    for name, earlier, now in zip(("timeouts", "crashes"), before, verifier_losses(), strict=True):
        log_metric(f"pods/verifier_{name}", float((now - earlier) * processes))
