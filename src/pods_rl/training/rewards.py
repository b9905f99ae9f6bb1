"""The rewards of a task as functions that TRL calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from accelerate import PartialState

from ..loading.turns import TurnReader
from ..recipe import Recipe
from ..rewards import Reward
from ..rewards import score as score_texts
from ..rewards.verifier import default_pool
from ..sandbox import Scores
from ..tasks import Task, last_turn

RewardFunction = Callable[..., Scores]


def reward_functions(recipe: Recipe, task: Task, turns: TurnReader | None = None) -> list[RewardFunction]:
    """Return the task's rewards in TRL's signature, in the task's order; raise UserError for an unknown reward."""
    limit = recipe.values["max_completion_length"]
    seconds = recipe.values["reward_seconds"]
    return [trl_reward(task.reward(name), limit=limit, seconds=seconds, turns=turns) for name in task.rewards]


def trl_reward(
    reward: Reward, *, limit: int, seconds: float | None = None, turns: TurnReader | None = None
) -> RewardFunction:
    """Return a reward in TRL's signature: it takes completions and the `answer` column and returns a list of floats.

    A reward that uses verifier processes logs the answers whose verification timed out or crashed. A user's reward
    scores each completion separately; an error or timeout gives a RewardFailure, handled as `reward_errors` says.

    Args:
        limit: most tokens of a completion, for `overlong`.
        seconds: limit of a user's reward for one completion, in a process that is then killed. If None, there is no
            limit, and the reward runs in this process.
        turns: reads a completion with the thought that its prompt opens. If None, prompts open none.
    """

    def score(
        completions: list[Any],
        answer: list[str],
        completion_ids: list[list[int]],
        prompts: Sequence[Any] = (),
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> Scores:
        pool = default_pool()
        timeouts_before = pool.timeouts
        crashes_before = pool.crashes
        scores: Scores
        if reward.reads == "tokens":
            scores = reward.of_lengths([len(ids) for ids in completion_ids], limit)
        else:
            if turns is None:
                texts = [last_turn(completion) for completion in completions]
            else:
                texts = turns.texts(prompts, completions, completion_ids)
            scores = score_texts(reward, texts, answer, seconds)
        if reward.verifies and log_metric is not None:
            processes = PartialState().num_processes  # TRL averages over them, and the sum is logged
            log_metric("pods/verifier_timeouts", float((pool.timeouts - timeouts_before) * processes))
            log_metric("pods/verifier_crashes", float((pool.crashes - crashes_before) * processes))
        # NaN means here that the rollout cannot be scored, and to TRL that the reward does not apply.
        return [math.inf if isinstance(value, float) and math.isnan(value) else value for value in scores]

    score.__name__ = reward.name  # the reward's name in TRL's metrics
    return score
