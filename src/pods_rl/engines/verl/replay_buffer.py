"""Replay buffers that keep m of each prompt's n sessions, and the advantage estimator `pods_before`.

verl samples a batch once its groups are generated and scored, before any log-probability, value or advantage: sessions
that are dropped here cause no other cost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import register_adv_est
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.utils import hf_tokenizer

from ...runs import write_parquet
from ...selection import Selection, advantages
from .groups import Group, choose, describe_selection, group_keys, pad_rewards
from .settings import BEFORE, read_settings

VALIDATION = "val"

# uid -> rewards [N] of each group sampled last. verl computes advantages in this process before it samples again.
_REWARDS: dict[str, Tensor] = {}


class PODSMixin:
    """Selection for either of verl's replay buffers: `_materialize_batch` returns the m sessions kept of each group.

    Args:
        sampler_kwargs: `trainer.v1.sampler.sampler_kwargs` as a part of verl's configuration (docs/verl.md).
        arguments: verl's own. DAPO's filter, which verl does not pass to custom samplers, comes from the configuration.

    Raises:
        UserError: see `settings.read_settings`.
    """

    def __init__(self, *, sampler_kwargs: DictConfig, **arguments: Any) -> None:
        # verl passes only this part of its configuration: one dot for itself, one for each level above.
        config = OmegaConf.select(sampler_kwargs, ".....")
        self.pods = read_settings(config)
        verl_arguments = {
            "sampler_kwargs": sampler_kwargs,
            "poll_interval": self.pods.poll_interval,
            **self.pods.filter_arguments,
            **arguments,
        }
        super().__init__(**verl_arguments)
        self._step = 0
        self._pods_metrics: dict[str, float] = {}
        self._tokenizer = None
        if self.pods.ledger:
            self._tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return verl's batch reduced to the m kept, and its metrics with those of all n added."""
        self._step = global_steps
        self._pods_metrics = {}
        batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        return batch, {**metrics, **self._pods_metrics}

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict[str, Any]]
    ) -> KVBatchMeta:
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)  # type: ignore[misc]
        if partition_id == VALIDATION:
            return batch
        return self._down_sample(batch)

    def _down_sample(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Return the rows of the m sessions kept of each group, and remove the others from the queue."""
        groups = group_keys(batch.keys)
        rewards = _rewards(groups, batch.partition_id)
        rewards_PN = pad_rewards(rewards)
        # The draws of a rule depend on seed and step alone, so that a resumed run makes the same ones.
        generator = torch.Generator().manual_seed(self.pods.seed * 1_000_003 + self._step)
        kept_PN = choose(rewards_PN, self.pods.num_generations, self.pods.rule, generator)
        if not kept_PN.any():
            raise RuntimeError(
                f"none of the {len(batch.keys)} rows sampled has a usable reward (all NaN, infinite or beyond 1e15). "
                "Check what reward.custom_reward_function returns."
            )
        kept_keys = _kept_keys(groups, kept_PN)
        if self.pods.before:
            _REWARDS.clear()
            for group, rewards_N in zip(groups, rewards_PN, strict=True):
                _REWARDS[group.uid] = rewards_N
        scored = int((~rewards_PN.isnan()).sum())
        sessions = sum(len(group.sessions) for group in groups)
        self._pods_metrics = {
            **describe_selection(rewards_PN, kept_PN),
            **_count_rows(batch, kept_keys),
            "pods/unusable_rewards": float(sessions - scored),
        }
        if self.pods.ledger and (self._step == 1 or self._step % self.pods.ledger_every == 0):
            columns = ledger_columns(groups, rewards, kept_keys, batch.partition_id, self._tokenizer)
            steps = {"step": [self._step] * len(columns["group"])}
            write_parquet(Path(self.pods.ledger) / f"step-{self._step:06d}.parquet", steps | columns)
        return _keep(batch, kept_keys)


class PODSReplayBuffer(PODSMixin, ReplayBuffer):
    """PODS for `trainer.v1.trainer_mode: sync`."""


class PODSReplayBufferAsync(PODSMixin, ReplayBufferAsync):
    """PODS for `colocate_async` and `separate_async`."""


def replay_buffer(trainer_mode: str, **arguments: Any) -> PODSReplayBuffer | PODSReplayBufferAsync:
    """Return the buffer of a trainer's mode: the name for `trainer.v1.sampler.custom_sampler`."""
    buffer = PODSReplayBuffer if trainer_mode == "sync" else PODSReplayBufferAsync
    return buffer(trainer_mode=trainer_mode, **arguments)


@register_adv_est(BEFORE)
def pods_before(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Return advantages of the kept rows with the mean and standard deviation of their group's n rewards.

    Source: PODS (arXiv 2504.13818), the arm "before" of its ablation; see `selection.advantages`.

    Args:
        token_level_rewards: `[rows, T]`; a row's sum is its session's reward.
        response_mask: `[rows, T]`, 1 on the tokens that are trained.
        index: `[rows]`, each row's uid.
        config: verl's `algorithm`; `norm_adv_by_std_in_grpo: false` only centres.

    Returns:
        Advantages and returns, the same tensor `[rows, T]`. All trajectories of a session share its advantage.

    Raises:
        ValueError: a row of a group that PODS's replay buffer did not sample.
    """
    by_deviation = config is None or config.get("norm_adv_by_std_in_grpo", True)
    scale: Literal["group", "none"] = "group" if by_deviation else "none"
    scores = token_level_rewards.sum(dim=-1)  # [rows]
    trained = response_mask.bool().any(dim=-1)  # [rows]
    result = torch.zeros_like(scores)
    for uid in dict.fromkeys(index[trained.cpu().numpy()].tolist()):  # verl's padding rows train no token
        if uid not in _REWARDS:
            raise ValueError(
                f"the estimator {BEFORE} has no rewards of prompt {uid}: expected one that PODS's replay buffer "
                "sampled last. Set trainer.v1.sampler.custom_sampler, and leave skip.rollout_tq off."
            )
        rewards_1N = _REWARDS[uid][None]
        all_sessions = Selection(torch.arange(rewards_1N.shape[1])[None])
        advantage_N = advantages(rewards_1N, all_sessions, when="before", scale=scale)[0].to(scores)
        rows = torch.from_numpy(index == uid).to(scores.device)
        # Rows do not name their session: match each to the nearest reward of the group.
        distance = (scores[rows, None].double() - _REWARDS[uid].to(scores.device)).abs().nan_to_num(nan=torch.inf)
        result[rows] = advantage_N[distance.argmin(dim=1)]
    per_token = result.unsqueeze(-1) * response_mask  # [rows, T]
    return per_token, per_token


def _rewards(groups: list[Group], partition_id: str) -> list[list[float]]:
    """Return each group's rewards: the sum over the tokens of a session's last trajectory, as in verl."""
    keys = _last_keys(groups)
    scores = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["rm_scores"])["rm_scores"]
    sums = [float(row.sum()) for row in scores]
    rewards: list[list[float]] = []
    start = 0
    for group in groups:
        end = start + len(group.sessions)
        rewards.append(sums[start:end])
        start = end
    return rewards


def _last_keys(groups: Sequence[Group]) -> list[str]:
    """Return the key of each session's last trajectory, group by group."""
    keys: list[str] = []
    for group in groups:
        keys += [session[-1] for session in group.sessions]
    return keys


def _kept_keys(groups: Sequence[Group], kept_PN: Tensor) -> set[str]:
    """Return the keys of all rows of the kept sessions."""
    keys: set[str] = set()
    for group, kept_N in zip(groups, kept_PN.tolist(), strict=True):
        # A row of the mask is padded to the size of the largest group.
        for session, is_kept in zip(group.sessions, kept_N, strict=False):
            if is_kept:
                keys.update(session)
    return keys


def _count_rows(batch: KVBatchMeta, kept: set[str]) -> dict[str, float]:
    lengths: dict[str, int] = {}
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        lengths[key] = int(tag.get("response_len", 0))
    return {
        "pods/all/rows": float(len(lengths)),
        "pods/all/response_length_mean": sum(lengths.values()) / len(lengths),
        "pods/all/response_length_max": float(max(lengths.values())),
        "pods/selected/rows": float(len(kept)),
        "pods/tokens/generated": float(sum(lengths.values())),
        "pods/tokens/trained": float(sum(lengths[key] for key in kept)),
    }


def _keep(batch: KVBatchMeta, kept: set[str]) -> KVBatchMeta:
    """Return the kept rows in order; clear the others from the queue, since verl clears only trained rows."""
    kept_keys: list[str] = []
    kept_tags: list[dict[str, Any]] = []
    dropped: list[str] = []
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        if key in kept:
            kept_keys.append(key)
            kept_tags.append(tag)
        else:
            dropped.append(key)
    if dropped:
        tq.kv_clear(keys=dropped, partition_id=batch.partition_id)
    return KVBatchMeta(
        partition_id=batch.partition_id,
        keys=kept_keys,
        tags=kept_tags,
        fields=batch.fields,
        extra_info=batch.extra_info,
    )


def ledger_columns(
    groups: Sequence[Group],
    rewards: Sequence[Sequence[float]],
    kept: Collection[str],
    partition_id: str,
    tokenizer: Any,
) -> dict[str, list[Any]]:
    """Return a value per session in each column, from the last trajectory of each.

    `reward/<name>` are the numbers that the reward function returned, without verl's `score` and `acc`. `advantage` is
    empty: verl computes it later. `turn_rewards` are the `turn_scores` of verl's tool agent loop, where there are any.

    Args:
        groups: of the batch.
        rewards: of each group's sessions.
        kept: the keys of the rows to train on.
        partition_id: of verl's queue.
        tokenizer: of the policy.
    """
    keys = _last_keys(groups)
    fields = ["prompts", "responses", "reward_model", "extra_fields"]
    data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=fields)
    responses = list(data["responses"])
    models = [_plain(model) for model in data["reward_model"]]
    extras = [_plain(extra) for extra in data["extra_fields"]]
    group_numbers: list[int] = []
    session_rewards: list[float] = []
    for number, group_rewards in enumerate(rewards):
        group_numbers += [number] * len(group_rewards)
        session_rewards += group_rewards
    columns: dict[str, list[Any]] = {
        "group": group_numbers,
        "rollout": [int(key.rsplit("_", 2)[1]) for key in keys],
        "prompt": [tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in data["prompts"]],
        "completion": [tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in responses],
        "answer": [str(model.get("ground_truth", "")) for model in models],
        "reward": session_rewards,
        **_reward_columns([extra.get("reward_extra_info", {}) for extra in extras]),
        "selected": [key in kept for key in keys],
        "advantage": [None] * len(keys),
        "completion_tokens": [len(ids) for ids in responses],
    }
    turn_scores = [extra.get("turn_scores") for extra in extras]
    if any(turn_scores):
        columns["turn_rewards"] = [list(map(float, scores)) if scores else None for scores in turn_scores]
    return columns


def _reward_columns(infos: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the numbers that the reward function returned for each session, in columns `reward/<name>`."""
    columns: dict[str, list[float]] = {}
    for name, value in infos[0].items():
        if name not in ("score", "acc") and isinstance(value, int | float):
            columns[f"reward/{name}"] = [float(info.get(name, "nan")) for info in infos]
    return columns


def _plain(value: Any) -> dict[str, Any]:
    """Return a row's mapping out of the queue's wrapper."""
    value = getattr(value, "data", value)
    return value if isinstance(value, dict) else {}
