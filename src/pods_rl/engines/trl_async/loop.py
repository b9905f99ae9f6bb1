"""The loop in the worker's process: request n rollouts of a prompt, score them, and queue the m that are kept.

Axes: N rollouts of a group, M of them kept. A rollout has one row, or several if its conversation was rewritten
between turns.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from trl.chat_template_utils import parse_response
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample, _AsyncRolloutLoop

from ...sandbox.limits import parsing_anything
from ...selection import REWARD_LIMIT, Rule, is_constant, select
from ...selection import advantages as pods_advantages
from ..measuring import mark_unusable
from ..seeds import seeded_generator

GIVE_UP_AFTER = 256  # dropped groups in a row, and at least one pass over the prompts


class DeadGroupsError(RuntimeError):
    """`GIVE_UP_AFTER` groups in a row were dropped, so that no other is expected."""


class FrozenServerError(RuntimeError):
    """The vLLM server answers no request."""


@dataclass(slots=True)
class KeptSample(RolloutSample):
    """A row of a kept rollout."""

    group_metrics: dict[str, float] = field(default_factory=dict)  # means over the n rollouts of its group
    dropped_groups: tuple[int, ...] = ()  # ids of the groups that were dropped since the last kept group


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
        self.num_kept = num_kept
        self.rule = rule
        self.when = advantages
        self.dynamic_sampling = dynamic_sampling
        self.seed = seed
        self.first_prompt = dataset_start_index
        self._numbers = itertools.count()  # of the requests
        self._requested: dict[int, tuple[int, int]] = {}  # number and policy of a rollout, by id() of its tokens
        self._dropped_groups: list[int] = []  # since the last kept group
        self._answered_at = -math.inf  # the time of the server's last answer
        # Each function needs a column of its own in a row's metrics, from which its rewards are read.
        self.reward_func_names: list[str] = _distinct(self.reward_func_names)
        # A parser's error, as for arguments that are nested deeply, would end the worker.
        async_rollout_worker.parse_response = parsing_anything(parse_response)
        parent = multiprocessing.parent_process()
        if parent is not None:
            threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
            self.rollout_buffer.cancel_join_thread()  # at its end the process does not wait until all is read

    async def _generate_one(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        # Tasks start in the order of their requests, so this number and this policy are those of the request.
        number = next(self._numbers)
        version = self.model_version
        rollout: tuple[Any, ...] = await super()._generate_one(*args, **kwargs)
        _, completion_ids, *_ = rollout
        # TRL puts this list into its group, where `_in_order_of_request` finds it.
        self._requested[id(completion_ids)] = (number, version)
        return rollout

    async def _retry(self, coro_factory: Callable[[], Awaitable[Any]], *, label: str, max_attempts: int = 1) -> Any:
        """Call the server as TRL does; raise FrozenServerError if nothing was answered for `request_timeout`.

        TRL would send the request 90 times, and wait for `request_timeout` (600 seconds) each time.
        """

        async def attempt() -> Any:
            asked_at = time.monotonic()
            try:
                answer = await coro_factory()
            except TimeoutError as error:
                if self._answered_at < asked_at:
                    raise FrozenServerError(
                        f"the vLLM server at {self.vllm_server_url} answered no request for {self.request_timeout} "
                        "seconds (request_timeout)"
                    ) from error
                raise
            self._answered_at = time.monotonic()
            return answer

        return await super()._retry(attempt, label=label, max_attempts=max_attempts)

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        versions_N = self._in_order_of_request(group)
        samples = await super()._score_group(group)
        # TRL returns the rows of a group's rollouts one after the other.
        remaining = iter(samples)
        rows_N = [list(itertools.islice(remaining, len(sequences))) for sequences in group.completions_sequences]
        rewards_1N = _rewards(rows_N, self.reward_func_names)
        # The draws of a rule depend on the seed and on the number of the prompt alone.
        generator = seeded_generator(self.seed, self.first_prompt + group.group_id)
        selection = select(rewards_1N, self.num_kept, self.rule, generator)
        kept_M = selection.indices[0].tolist()
        advantages_M = pods_advantages(rewards_1N, selection, when=self.when)[0].tolist()

        has_no_token = not any(rows_N[i] for i in kept_M)  # no kept rollout has a trained one
        is_dropped = has_no_token or (self.dynamic_sampling and not any(advantages_M))
        kept_count = 0 if is_dropped else len(kept_M)
        self._counters["pods/groups_total"] += 1
        self._counters["pods/dropped_groups_total"] += int(is_dropped)
        self._counters["pods/rollouts_total"] += len(rows_N)
        self._counters["pods/kept_rollouts_total"] += kept_count
        self._counters["pods/unscored_rollouts_total"] += int(rewards_1N.isnan().sum())
        if is_dropped:
            self._dropped_groups.append(group.group_id)
            prompts = len(self.dataset) if hasattr(self.dataset, "__len__") else 0
            if len(self._dropped_groups) >= max(prompts, GIVE_UP_AFTER):
                raise DeadGroupsError(
                    f"the last {len(self._dropped_groups)} groups were dropped, because the rewards within each were "
                    "equal: use other prompts, another reward or more rollouts"
                )
            return []

        # With n = m TRL's advantages stay, but rounding of a constant group must not become one.
        if self.num_kept < len(rows_N) or bool(is_constant(selection.take(rewards_1N))):
            for i, advantage in zip(kept_M, advantages_M, strict=True):
                for row in rows_N[i]:
                    row.advantage = advantage
        group_metrics = _means(rows_N)
        dropped_groups = tuple(self._dropped_groups)
        self._dropped_groups = []
        # A group has one version, that of its oldest kept rollout. The trainer drops rows by their version, and
        # advantages of a part of a group do not sum to 0.
        version = min(versions_N[i] for i in kept_M)
        kept_samples: list[RolloutSample] = []
        for i in kept_M:
            for row in rows_N[i]:
                row.model_version = version
                values = {row_field.name: getattr(row, row_field.name) for row_field in fields(RolloutSample)}
                kept_samples.append(KeptSample(**values, group_metrics=group_metrics, dropped_groups=dropped_groups))
        return kept_samples

    def _in_order_of_request(self, group: RolloutGroup) -> list[int]:
        """Sort the group's rollouts, which are in the order of their ends, and return their policies."""
        # Among equal rewards a rule keeps the first rollouts. In the order of their ends these would be the short ones.
        requests = [self._requested.pop(id(ids)) for ids in group.completions_ids]
        order = sorted(range(len(requests)), key=requests.__getitem__)
        for group_field in fields(group):
            values = getattr(group, group_field.name)
            if isinstance(values, list) and len(values) == len(order):
                setattr(group, group_field.name, [values[i] for i in order])
        return [version for _, version in sorted(requests)]


def _distinct(names: list[str]) -> list[str]:
    """Return the names with a number after each that occurred before.

    >>> _distinct(["format", "answer", "format"])
    ['format', 'answer', 'format_2']
    """
    seen: Counter[str] = Counter()
    distinct: list[str] = []
    for name in names:
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name}_{seen[name]}"
        distinct.append(name)
    return distinct


def _rewards(rows_N: list[list[RolloutSample]], names: list[str]) -> torch.Tensor:
    """Return the reward of each rollout, `[1, N]`; NaN counts as unscored.

    As in the synchronous trainer, each function's reward is in float32 and their sum in float64, so the same rewards
    tie.
    """
    rewards_NF = torch.full((len(rows_N), len(names)), math.nan, dtype=torch.float32)
    for i, rows in enumerate(rows_N):
        if rows:  # a rollout without a trained token has no row
            rewards_NF[i] = torch.tensor([rows[0].metrics[f"rewards/{name}"] for name in names])
    is_unscored_N = rewards_NF.isnan().all(dim=1) | (rewards_NF.abs() > REWARD_LIMIT).any(dim=1)
    totals_N = rewards_NF.double().nansum(dim=1).masked_fill(is_unscored_N, math.nan)
    return mark_unusable(totals_N)[None]


def _means(rows_N: list[list[RolloutSample]]) -> dict[str, float]:
    """Return the mean of each metric over the group's rollouts without NaN; NaN if there are none."""
    metrics_of_rollouts = [rows[0].metrics for rows in rows_N if rows]
    means = {}
    for name in metrics_of_rollouts[0]:
        values = [metrics[name] for metrics in metrics_of_rollouts]
        numbers = [value for value in values if not math.isnan(value)]
        means[name] = sum(numbers) / len(numbers) if numbers else math.nan
    return means


def _end_with(parent: Any) -> None:
    """End this process when the trainer's has ended, for whatever reason."""
    parent.join()
    os._exit(1)
