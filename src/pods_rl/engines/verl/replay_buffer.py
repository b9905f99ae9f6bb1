"""Replay buffers that keep m of each prompt's n sessions and clear the others from the queue.

Verl samples a batch when its groups have ended and been scored, before any log-probability, value or advantage is
computed: what is dropped here costs nothing more.
"""

from __future__ import annotations

from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from .estimator import remember_rewards
from .groups import Group, choose, describe_selection, group_keys, pad_rewards
from .settings import read_settings, whole_config

VALIDATION = "val"


class PODSMixin:
    """Selection for a replay buffer of verl, of either mode: what `_materialize_batch` returns is the m kept.

    Args:
        sampler_kwargs: `trainer.v1.sampler.sampler_kwargs` as a part of verl's configuration (docs/engines.md).
        arguments: verl's own. What verl keeps from custom samplers (DAPO's filter) is read from the configuration.

    Raises:
        UserError: see `settings.read_settings`.
    """

    def __init__(self, *, sampler_kwargs: DictConfig, **arguments: Any) -> None:
        self.pods = read_settings(whole_config(sampler_kwargs))
        verl_arguments = {"sampler_kwargs": sampler_kwargs, **self.pods.filter_arguments, **arguments}
        super().__init__(**verl_arguments)
        self._step = 0
        self._pods_metrics: dict[str, float] = {}

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """Verl's batch, cut to the m kept, and its metrics with ours on all n."""
        self._step, self._pods_metrics = global_steps, {}
        batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        return batch, {**metrics, **self._pods_metrics}

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict]
    ) -> KVBatchMeta:
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)  # type: ignore[misc]
        return batch if partition_id == VALIDATION else self._down_sample(batch)

    def _down_sample(self, batch: KVBatchMeta) -> KVBatchMeta:
        groups = group_keys(batch.keys)
        rewards = _rewards(groups, batch.partition_id)
        rewards_PN = pad_rewards(rewards)
        generator = torch.Generator().manual_seed(self.pods.seed * 1_000_003 + self._step)
        kept_PN = choose(rewards_PN, self.pods.num_generations, self.pods.rule, generator)
        if not kept_PN.any():
            raise RuntimeError(
                f"none of the {len(batch.keys)} rows sampled has a usable reward (all NaN, infinite or beyond 1e15). "
                "Look at what reward.custom_reward_function returns."
            )
        kept = {
            key
            for group, mask_N in zip(groups, kept_PN.tolist(), strict=True)
            for keys, keep in zip(group.sessions, mask_N, strict=False)
            if keep
            for key in keys
        }
        if self.pods.before:
            remember_rewards({group.uid: row for group, row in zip(groups, rewards_PN, strict=True)})
        unusable = sum(map(len, rewards)) - int((~rewards_PN.isnan()).sum())
        self._pods_metrics = {
            **describe_selection(rewards_PN, kept_PN),
            **_count_rows(batch, kept),
            "pods/unusable_rewards": float(unusable),
        }
        return _keep(batch, kept)


class PODSReplayBuffer(PODSMixin, ReplayBuffer):
    """PODS for `trainer.v1.trainer_mode: sync`."""


class PODSReplayBufferAsync(PODSMixin, ReplayBufferAsync):
    """PODS for `colocate_async` and `separate_async`."""


def replay_buffer(trainer_mode: str, **arguments: Any) -> PODSReplayBuffer | PODSReplayBufferAsync:
    """The buffer of a trainer's mode: the name to give `trainer.v1.sampler.custom_sampler`."""
    buffer = PODSReplayBuffer if trainer_mode == "sync" else PODSReplayBufferAsync
    return buffer(trainer_mode=trainer_mode, **arguments)


def _rewards(groups: list[Group], partition_id: str) -> list[list[float]]:
    """Of each group its sessions' rewards: the sum over the tokens of the last trajectory, as verl takes it."""
    keys = [key for group in groups for key in group.last_keys]
    scores = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["rm_scores"])["rm_scores"]
    each = iter([float(row.sum()) for row in scores])
    return [[next(each) for _ in group.sessions] for group in groups]


def _count_rows(batch: KVBatchMeta, kept: set[str]) -> dict[str, float]:
    lengths = {key: int(tag.get("response_len", 0)) for key, tag in zip(batch.keys, batch.tags, strict=True)}
    return {
        "pods/all/rows": float(len(lengths)),
        "pods/all/response_length_mean": sum(lengths.values()) / len(lengths),
        "pods/all/response_length_max": float(max(lengths.values())),
        "pods/selected/rows": float(len(kept)),
        "pods/tokens/generated": float(sum(lengths.values())),
        "pods/tokens/trained": float(sum(lengths[key] for key in kept)),
    }


def _keep(batch: KVBatchMeta, kept: set[str]) -> KVBatchMeta:
    """The kept rows in the order they came; the others leave the queue, which nobody else would clear of them."""
    dropped = [key for key in batch.keys if key not in kept]
    if dropped:
        tq.kv_clear(keys=dropped, partition_id=batch.partition_id)
    rows = [(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if key in kept]
    return KVBatchMeta(
        partition_id=batch.partition_id,
        keys=[key for key, _ in rows],
        tags=[tag for _, tag in rows],
        fields=batch.fields,
        extra_info=batch.extra_info,
    )
