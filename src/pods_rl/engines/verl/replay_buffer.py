"""Replay buffers that keep m of each prompt's n sessions.

verl samples a batch once its groups are generated and scored, before any log-probability, value or advantage: sessions
that are dropped here cause no other cost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.utils import hf_tokenizer
from verl.utils.fs import copy_to_local

from ...errors import UserError
from ..ledger import LedgerWriter
from ..measuring import describe_selection, pad_rewards
from ..seeds import seeded_generator
from .groups import Group, choose, group_keys, kept_keys
from .ledger import session_rows
from .settings import read_settings

VALIDATION = "val"


class PODSMixin:
    """Selection for either of verl's replay buffers: `_materialize_batch` returns the m sessions kept of each group.

    Args:
        sampler_kwargs: `trainer.v1.sampler.sampler_kwargs` as a part of verl's configuration (docs/engines.md).
        arguments: verl's own. DAPO's filter, which verl does not pass to custom samplers, comes from the configuration.

    Raises:
        UserError: see `settings.read_settings`.
    """

    keeps_num_generations = True  # `settings` refuses samplers without it

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
        self._step = -1
        self._generator = torch.Generator()
        self._pods_metrics: dict[str, float] = {}
        self._sizes_checked = False
        self._ledger: LedgerWriter | None = None
        if self.pods.ledger:
            self._ledger = LedgerWriter(Path(self.pods.ledger), self.pods.ledger_every)
            model = config.actor_rollout_ref.model
            # as verl's HFModelConfig loads its own
            path = copy_to_local(model.get("tokenizer_path") or model.path, use_shm=model.get("use_shm", False))
            self._tokenizer = hf_tokenizer(path, trust_remote_code=model.get("trust_remote_code", False))

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return verl's batch reduced to the m kept, and its metrics with those of all n added.

        With `parameter_sync_step` k, verl samples k batches a step, and averages these metrics as its own.
        """
        if partition_id != VALIDATION and global_steps != self._step:
            self._step = global_steps
            # The draws of a rule depend on seed and step alone, so that a resumed run makes the same ones. The batches
            # of a step share the generator, so that each draws other sessions.
            self._generator = seeded_generator(self.pods.seed, global_steps)
        self._pods_metrics = {}
        batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        return batch, {**metrics, **self._pods_metrics}

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict[str, Any]]
    ) -> KVBatchMeta:
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)  # type: ignore[misc]
        if partition_id == VALIDATION:
            return batch
        groups = group_keys(batch.keys)
        self._check_sizes(groups, batch.partition_id)
        # As in verl, a session's reward is the sum over the tokens of its last trajectory.
        keys = [session[-1] for group in groups for session in group.sessions]
        scores = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["rm_scores"])["rm_scores"]
        reward_of_key = {key: float(row.sum()) for key, row in zip(keys, scores, strict=True)}
        rewards = [[reward_of_key[session[-1]] for session in group.sessions] for group in groups]
        # An agent loop may mask all tokens of a failed session, which then has no token in verl's loss.
        row_keys = [key for group in groups for session in group.sessions for key in session]
        fields = ["response_mask"]
        masks = tq.kv_batch_get(keys=row_keys, partition_id=batch.partition_id, select_fields=fields)["response_mask"]
        trained_keys = {key for key, mask in zip(row_keys, masks, strict=True) if mask.any()}
        trained = [[not trained_keys.isdisjoint(session) for session in group.sessions] for group in groups]
        rewards_PN = pad_rewards(rewards, trained)
        kept_PN = choose(rewards_PN, self.pods.num_generations, self.pods.rule, self._generator, self.pods.batch_rule)
        if not kept_PN.any():
            raise RuntimeError(
                f"none of the {len(batch.keys)} rows sampled has a usable reward (all NaN, infinite, beyond 1e15, or "
                "without a trained token). Check what reward.custom_reward_function returns, and the response_mask of "
                "your agent loop."
            )
        kept = kept_keys(groups, kept_PN)
        if self._ledger is not None and self._ledger.keeps(self._step):
            # verl may sample several batches a step (`parameter_sync_step`), which become one file
            rows = session_rows(keys, rewards, kept, partition_id=batch.partition_id, tokenizer=self._tokenizer)
            self._ledger.add(self._step, rows)
        lengths = {key: int(tag.get("response_len", 0)) for key, tag in zip(batch.keys, batch.tags, strict=True)}
        self._pods_metrics = describe_batch(rewards_PN, kept_PN, lengths, kept, len(keys))
        return _keep(batch, kept)

    def _check_sizes(self, groups: list[Group], partition_id: str) -> None:
        """Refuse a first batch whose groups all have m sessions: a manager that requested m, and nothing to select."""
        m = self.pods.num_generations
        if self._sizes_checked or self.pods.num_rollouts == m:
            return
        self._sizes_checked = True
        for group in groups:
            # A group with a failed session may have any size.
            if len(group.sessions) != m or group.uid not in self.finished_keys[partition_id]:  # type: ignore[attr-defined]
                return
        raise UserError(
            f"every group of the first batch has {m} sessions, as many as actor_rollout_ref.rollout.n (m), and "
            f"sampler_kwargs.num_rollouts (n) is {self.pods.num_rollouts}: nothing would be dropped. Check that "
            "generate_sequences of your agent_loop_manager_class calls that of PODSAgentLoopManager, and that the data "
            "set has no column __rollout_n__."
        )


class PODSReplayBuffer(PODSMixin, ReplayBuffer):
    """PODS for `trainer.v1.trainer_mode: sync`."""


class PODSReplayBufferAsync(PODSMixin, ReplayBufferAsync):
    """PODS for `colocate_async` and `separate_async`."""


def replay_buffer(trainer_mode: str, **arguments: Any) -> PODSReplayBuffer | PODSReplayBufferAsync:
    """Return the buffer of a trainer's mode: the name for `trainer.v1.sampler.custom_sampler`."""
    buffer = PODSReplayBuffer if trainer_mode == "sync" else PODSReplayBufferAsync
    return buffer(trainer_mode=trainer_mode, **arguments)


replay_buffer.keeps_num_generations = True  # type: ignore[attr-defined]  # as of the classes


def describe_batch(
    rewards_PN: Tensor, kept_PN: Tensor, lengths: dict[str, int], kept_keys: set[str], sessions: int
) -> dict[str, float]:
    """Return the metrics of a batch (docs/metrics.md), from the response tokens of each row by key."""
    prompts_trained = int(kept_PN.any(dim=1).sum())
    generated = sum(lengths.values())
    return {
        **describe_selection(rewards_PN, kept_PN),
        "pods/all/rows": float(len(lengths)),
        "pods/all/response_length_mean": generated / len(lengths),
        "pods/all/response_length_max": float(max(lengths.values())),
        "pods/selected/rows": float(len(kept_keys)),
        "pods/prompts_trained": float(prompts_trained),
        "pods/rows_a_prompt": float(kept_PN.sum()) / prompts_trained,
        "pods/tokens/generated": float(generated),
        "pods/tokens/trained": float(sum(lengths[key] for key in kept_keys)),
        "pods/unusable_rewards": float(sessions - int((~rewards_PN.isnan()).sum())),
    }


def _keep(batch: KVBatchMeta, kept: set[str]) -> KVBatchMeta:
    """Return the kept rows in order; clear the others from the queue, since verl clears only trained rows."""
    dropped = [key for key in batch.keys if key not in kept]
    if dropped:
        tq.kv_clear(keys=dropped, partition_id=batch.partition_id)
    return KVBatchMeta(
        partition_id=batch.partition_id,
        keys=[key for key in batch.keys if key in kept],
        tags=[tag for key, tag in zip(batch.keys, batch.tags, strict=True) if key in kept],
        fields=batch.fields,
        extra_info=batch.extra_info,
    )
