"""The policy that a run leaves: a folder that `from_pretrained` reads, whatever the processes shared."""

from __future__ import annotations

from pathlib import Path

from .trainer import PODSTrainer


def save_policy(trainer: PODSTrainer, folder: Path) -> None:
    """Write the policy and its tokenizer as safetensors and JSON; every process must call it, the first one writes.

    Sharded weights (FSDP2, ZeRO-3) are gathered in the first process's memory. Of a LoRA run the adapter is written.

    Args:
        folder: made where it is missing; what it holds of the same names is replaced.
    """
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if trainer.weights_are_sharded else None
    if trainer.is_world_process_zero():
        policy = trainer.accelerator.unwrap_model(trainer.model)
        if weights:  # tied ones were gathered twice, as tensors of their own
            for tied in getattr(policy, "all_tied_weights_keys", ()):
                weights.pop(tied, None)
        policy.save_pretrained(folder, state_dict=weights)
        trainer.processing_class.save_pretrained(folder)
