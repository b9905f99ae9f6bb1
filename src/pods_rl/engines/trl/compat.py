"""What we rely on in TRL: the versions tested, the signature of every method we override, and stand-ins for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import transformers
import trl
from trl import GRPOTrainer

from ...errors import UserError

TESTED = {"trl": "1.16.0", "transformers": "5.23.0"}

# Every method of GRPOTrainer or Trainer that PODSTrainer overrides, with the parameters it was written for.
SIGNATURES = {
    "_prepare_inputs": "self, generation_batch",
    "_generate_and_score_completions": "self, inputs",
    "_generate": "self, prompts",
    "_generate_single_turn": "self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images",
    "_calculate_rewards": "self, inputs, prompts, completions, completion_ids_list",
    "training_step": "self, model, inputs, num_items_in_batch",
    "_get_grad_norm": "self, model, grad_norm",
    "log": "self, logs, start_time",
    "_save": "self, output_dir, state_dict",
    "create_accelerator_and_postprocess": "self",
    "_save_checkpoint": "self, model, trial",
    "_finalize_training": "self, trial, num_train_samples, start_time",
    "create_model_card": "self, model_name, dataset_name, tags",
    "_push_from_checkpoint": "self, checkpoint_folder",
    "compute_loss": "self, model, inputs, return_outputs, num_items_in_batch",
    "_get_per_token_logps_and_entropies": (
        "self, model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss, "
        "pixel_values, image_grid_thw, num_images, pixel_attention_mask, spatial_shapes, num_tiles, image_sizes, "
        "token_type_ids, mm_token_type_ids, image_position_ids"
    ),
    "_get_train_sampler": "self, dataset",
    "_save_rng_state": "self, output_dir",
    "_load_rng_state": "self, checkpoint",
    "_init_training_state": (
        "self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial"
    ),
    "_run_epoch": (
        "self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial, "
        "ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch"
    ),
    "train": "self, resume_from_checkpoint, trial, ignore_keys_for_eval",
}


@cache
def check_signatures() -> None:
    """Refuse versions of TRL and transformers in which a method that PODSTrainer overrides takes other arguments.

    Raises:
        UserError: the method, its parameters here and those expected, and the versions to install.
    """
    for name, expected in SIGNATURES.items():
        method = getattr(GRPOTrainer, name, None)
        found = None if method is None else ", ".join(inspect.signature(method).parameters)
        if found != expected:
            here = f"trl {trl.__version__} and transformers {transformers.__version__}"
            pins = " ".join(f"'{package}=={version}'" for package, version in TESTED.items())
            raise UserError(
                f"PODSTrainer overrides GRPOTrainer.{name}({expected}), but in {here}, which are installed, "
                + ("that method does not exist" if found is None else f"it is {name}({found})")
                + f". PODSTrainer is tested with trl {TESTED['trl']} and transformers {TESTED['transformers']}: "
                f"pip install {pins}"
            )


@contextmanager
def standing_in(trainer: Any, **values: Any) -> Iterator[None]:
    """Inside, the trainer has these attributes; afterwards its own again, those of its class included."""
    own = {name: vars(trainer)[name] for name in values if name in vars(trainer)}
    vars(trainer).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(trainer)[name]
        vars(trainer).update(own)
