"""What we override in TRL, pinned: an upgrade that moves one of these seams fails here, not in a run."""

from __future__ import annotations

import inspect
import logging

import accelerate
import pytest
from transformers import Trainer
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from pods_rl.engines.trl.rewarding import UNSCORED_WARNING

SIGNATURES = {
    "_prepare_inputs": ["self", "generation_batch"],
    "_generate_and_score_completions": ["self", "inputs"],
    "_generate": ["self", "prompts"],
    "_generate_single_turn": [
        "self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images",
    ],
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
    "log": ["self", "logs", "start_time"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
}  # fmt: skip
LOGPS = ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"]


@pytest.mark.parametrize("method", sorted(SIGNATURES))
def test_overridden_signatures(method):
    assert list(inspect.signature(getattr(GRPOTrainer, method)).parameters) == SIGNATURES[method]


def test_log_probability_signature():
    names = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    assert names[: len(LOGPS)] == LOGPS


def test_what_generate_returns():
    """Eight values, of which we index each list by row and read the completions' ids and texts."""
    source = inspect.getsource(GRPOTrainer._generate)
    order = "prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"
    assert f"return {order}" in source


def test_what_is_gathered_while_rollouts_are_unevenly_shared():
    """The two names that `uneven_gathers` replaces, and nothing else that talks to other processes."""
    source = inspect.getsource(GRPOTrainer._calculate_rewards)
    assert source.count(" gather(") == 1
    assert "self.accelerator" not in source.replace("self.accelerator.device", "")
    assert grpo_trainer.gather is accelerate.utils.gather
    source = inspect.getsource(GRPOTrainer._generate).split("if self.tools:")
    assert source[1].count("self.accelerator.gather(") == 3
    assert "gather(" not in source[0]


def test_rewards_are_asked_for_once_and_after_generation():
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert source.count("self._calculate_rewards(") == 1
    assert source.index("self._generate(") < source.index("self._calculate_rewards(")


def test_the_warning_that_we_leave_out_is_the_one_that_prints_a_completion():
    source = inspect.getsource(GRPOTrainer._calculate_rewards)
    assert source.count("logger.warning(") == 1
    assert f'f"{UNSCORED_WARNING} for the following kwargs' in source
    assert isinstance(grpo_trainer.logger.logger, logging.Logger)


def test_every_step_s_gradient_norm_is_taken_before_the_callbacks_that_may_clear_it():
    source = inspect.getsource(Trainer._run_epoch)
    order = ["self._get_grad_norm(", "on_pre_optimizer_step(", "self.optimizer.step()", "self.state.global_step += 1"]
    order += ["on_step_end(", "self._maybe_log_save_evaluate("]
    assert [source.index(name) for name in order] == sorted(source.index(name) for name in order)


def test_buffer_and_names_we_read(make_trainer):
    trainer = make_trainer(num_rollouts=8)
    for name in (
        "_buffered_inputs", "_step", "_metrics", "_logs", "_pending_extra_logs", "reward_func_names", "reward_weights",
        "multi_objective_aggregation", "scale_rewards", "top_entropy_quantile", "aux_loss_enabled", "num_generations",
        "_entropy_bonus_enabled", "pad_to_multiple_of", "use_vllm", "loss_type",
    ):  # fmt: skip
        assert hasattr(trainer, name), name
