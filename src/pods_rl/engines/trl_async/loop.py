"""The loop in the worker's process: request n rollouts of a prompt, score them, and queue the m that are kept."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import threading
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample, _AsyncRolloutLoop

from ...selection import REWARD_LIMIT, Rule, is_constant, select
from ...selection import advantages as pods_advantages

GIVE_UP_AFTER = 256  # groups dropped in a row, and at least one pass over the prompts


@dataclass(slots=True)
class KeptSample(RolloutSample):
    """A row of a kept rollout."""

    group_metrics: dict[str, float] = field(default_factory=dict)  # means over the n rollouts of its group
    passed: tuple[int, ...] = ()  # ids of the groups that were dropped since the last kept group


class PODSRolloutLoop(_AsyncRolloutLoop):
    """TRL's loop for groups of n = `num_generations` rollouts, of which m = `num_kept` are queued."""

    def __init__(
        self,
        *,
        num_kept: int,
        rule: str | Rule,
        advantages: Any,
        dynamic_sampling: bool,
        seed: int,
        dataset_start_index: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(dataset_start_index=dataset_start_index, **settings)
        self.num_kept, self.rule, self.when = num_kept, rule, advantages
        self.dynamic_sampling, self.seed, self.first_prompt = dynamic_sampling, seed, dataset_start_index
        self._numbers = itertools.count()
        self._requested: dict[int, tuple[int, int]] = {}  # number and policy of a rollout, by id() of its tokens
        self._passed: list[int] = []
        if parent := multiprocessing.parent_process():
            threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
            self.rollout_buffer.cancel_join_thread()  # at its end the process does not wait until all is read

    async def _generate_one(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        number, version = next(self._numbers), self.model_version  # tasks start in the order of their requests
        result: tuple[Any, ...] = await super()._generate_one(*args, **kwargs)
        self._requested[id(result[1])] = (number, version)
        return result

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        versions_N = self._in_order_of_request(group)
        samples = iter(await super()._score_group(group))
        rows_N = [[next(samples) for _ in sequences] for sequences in group.completions_sequences]
        # A rollout without a trained token counts as unscored.
        rewards_N = [rows[0].metrics["reward"] if rows else math.nan for rows in rows_N]
        rewards_1N = torch.tensor([rewards_N], dtype=torch.float64)
        rewards_1N.masked_fill_(rewards_1N.abs() > REWARD_LIMIT, math.nan)
        seed = np.random.SeedSequence([self.seed, self.first_prompt + group.group_id]).generate_state(1)
        selection = select(rewards_1N, self.num_kept, self.rule, torch.Generator().manual_seed(int(seed[0])))
        kept_M = selection.indices[0].tolist()
        advantages_M = pods_advantages(rewards_1N, selection, when=self.when)[0].tolist()
        is_silent = bool(is_constant(selection.take(rewards_1N)))
        dropped = not any(rows_N[i] for i in kept_M) or (self.dynamic_sampling and not any(advantages_M))
        self._counters["pods/groups_total"] += 1
        self._counters["pods/dropped_groups_total"] += dropped
        self._counters["pods/rollouts_total"] += len(rows_N)
        self._counters["pods/kept_rollouts_total"] += 0 if dropped else len(kept_M)
        self._counters["pods/unscored_rollouts_total"] += int(rewards_1N.isnan().sum())
        if dropped:
            self._drop(group.group_id)
            return []
        means, passed, self._passed = _means(rows_N), tuple(self._passed), []
        kept: list[RolloutSample] = []
        for i, advantage in zip(kept_M, advantages_M, strict=True):
            for row in rows_N[i]:
                row.model_version = versions_N[i]
                # With n = m TRL's advantages stay, but rounding of a constant group must not become one.
                if self.num_kept < len(rows_N) or is_silent:
                    row.advantage = advantage
                kept.append(KeptSample(*(getattr(row, each.name) for each in fields(RolloutSample)), means, passed))
        return kept

    def _in_order_of_request(self, group: RolloutGroup) -> list[int]:
        """Sort the group's rollouts, which are in the order in which they ended, and return their policies.

        Among equal rewards a rule keeps the first rollouts. In the order of their ends these would be the short ones.
        """
        requested = [self._requested.pop(id(ids)) for ids in group.completions_ids]
        order = sorted(range(len(requested)), key=requested.__getitem__)
        for each in fields(group):
            values = getattr(group, each.name)
            if isinstance(values, list) and len(values) == len(order):
                setattr(group, each.name, [values[i] for i in order])
        return [requested[i][1] for i in order]

    def _drop(self, group: int) -> None:
        self._passed.append(group)
        prompts = len(self.dataset) if hasattr(self.dataset, "__len__") else 0
        if len(self._passed) >= max(prompts, GIVE_UP_AFTER):
            raise RuntimeError(
                f"the last {len(self._passed)} groups were dropped, because the rewards within each were equal: use "
                "other prompts, another reward or more rollouts"
            )


def _means(rows_N: list[list[RolloutSample]]) -> dict[str, float]:
    """The mean of each metric over the group's rollouts without NaN; NaN if there are none."""
    metrics = [rows[0].metrics for rows in rows_N if rows]
    values = {name: [one[name] for one in metrics if not math.isnan(one[name])] for name in metrics[0]}
    return {name: sum(some) / len(some) if some else math.nan for name, some in values.items()}


def _end_with(parent: Any) -> None:
    """End this process when the trainer's has ended, however it did."""
    parent.join()
    os._exit(1)
