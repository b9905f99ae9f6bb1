"""Verl's own trainers on a CPU: everything runs except the engines, which only record what they get."""

from types import SimpleNamespace
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl.utils import tensordict_utils as tu

from pods_rl.engines.verl.agent_loop import PODSAgentLoopManager


class Workers:
    """What a group of `processes` training workers answers, without a model: each token has log-probability -0.5."""

    def __init__(self, processes: int) -> None:
        self._dispatch_info = {"actor": list(range(processes))}
        self.updates: list[dict[str, Any]] = []
        self.log_prob_rows: list[list[str]] = []
        self.models_on_cpu: list[tuple[str, int]] = []

    def save_model_to_cpu(self, number: int) -> None:
        self.models_on_cpu.append(("save", number))

    def restore_model_from_cpu(self, number: int) -> None:
        self.models_on_cpu.append(("restore", number))

    def clear_cpu_model(self, number: int) -> None:
        self.models_on_cpu.append(("clear", number))

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        self.log_prob_rows.append(list(batch.keys))
        return self.write_log_probs(batch, -0.5)

    def compute_ref_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        return self.write_log_probs(batch, -0.75)

    @staticmethod
    def write_log_probs(batch: KVBatchMeta, value: float) -> KVBatchMeta:
        rows = [torch.full((tag["seq_len"],), value) for tag in batch.tags]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=tu.get_tensordict({"log_probs": nested, "entropy": nested.clone()}),
        )
        return batch

    def infer_batch(self, batch: KVBatchMeta) -> Any:
        rows = [torch.zeros(tag["seq_len"]) for tag in batch.tags]
        values = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=tu.get_tensordict({"values": values}))
        return SimpleNamespace(futures=[])

    def train_mini_batch(self, batch: KVBatchMeta) -> Any:
        self.updates.append({"keys": list(batch.keys), **batch.extra_info})
        return SimpleNamespace(get=lambda: {"metrics": {"mfu": [0.0]}})

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        """Record the update and its advantages."""
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages"])
        self.updates.append(
            {
                "keys": list(batch.keys),
                "padding": sum(tag.get("is_padding", False) for tag in batch.tags),
                "advantages": list(data["advantages"].unbind()),
                **batch.extra_info,
            }
        )
        return {"metrics": {"mfu": [0.0], "loss": [0.0]}}


def make_trainer(config: Any, workers: list[Any], processes: int = 2) -> Any:
    """The trainer of the configured mode before its first step; an empty list of agent-loop workers is filled."""
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    trainer.replay_buffer.poll_interval = 0.02
    trainer._init_tokenizer()
    trainer._init_dataloader()
    trainer._init_dump_executor()
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: processes)
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer.checkpoint_manager = SimpleNamespace(
        sleep_replicas=lambda: None, abort_replicas=lambda: None, update_weights=lambda *_: None
    )
    workers_of_all_roles = Workers(processes)
    trainer.actor_rollout_wg = workers_of_all_roles
    trainer.critic_wg = workers_of_all_roles
    trainer.ref_policy_wg = workers_of_all_roles
    trainer.distillation_config = None
    trainer.curr_step_profile = False
    trainer.current_mode = HybridEngineMode.TRAINER  # of separate_async: the training GPUs train
    trainer.ref_in_actor = False
    trainer.global_steps = 1
    clients = {"llm_client": None, "teacher_client": None, "reward_loop_worker_handles": []}
    if not workers:
        workers += PODSAgentLoopManager.create(config=config, **clients).agent_loop_workers
    trainer.agent_loop_manager = PODSAgentLoopManager(config=config, **clients)
    trainer.agent_loop_manager.agent_loop_workers = workers
    return trainer


def train_step(trainer: Any) -> tuple[KVBatchMeta, dict[str, Any]]:
    """One step of verl's own, and what it logs about it."""
    metrics: dict[str, Any] = {}
    timing: dict[str, float] = {"step": 1.0}
    trainer.on_step_begin()
    batch = trainer.step(metrics, timing)
    trainer._compute_metrics(batch, metrics, timing, global_steps=trainer.global_steps, epoch=0)
    return batch, metrics


def left_in_queue() -> set[str]:
    """The keys that the queue holds."""
    return set((tq.kv_list() or {}).get("train", {}))


def kept_sessions(keys: list[str]) -> dict[str, list[int]]:
    """uid -> numbers of its sessions among the keys, without padding."""
    found: dict[str, set[int]] = {}
    for key in keys:
        uid, session, _ = key.rsplit("_", 2)
        if not uid.startswith("pad"):
            found.setdefault(uid, set()).add(int(session))
    return {uid: sorted(sessions) for uid, sessions in found.items()}
