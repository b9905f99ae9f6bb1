"""Measure the steps of one trainer on one device: what the cells of `gpu_day.py` run.

Arms: `tree` is PODS over prefix trees, `rows` is PODS without them, and `trl` is TRL's GRPO trainer. The model has
random weights (no download) and LoRA of rank 64 on all linear layers.

Completions are generated, without vLLM, or ragged: prepared tokens of various lengths, so that a step is its update.
Random weights never end a completion, so generated ones all have the same length.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

from gpu_device import Device
from pods_rl import PODSConfig, PODSTrainer
from pods_rl.engines import PHASES
from pods_rl.engines.trl.guarded.stability import is_out_of_memory
from pods_rl.engines.trl.step.update import PhaseClock
from pods_rl.policies import tiny_policy_path
from step import reward

QWEN_3B = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008,
    "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-3b": QWEN_3B,
    "tiny": QWEN_3B | {
        "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4
    },
}  # fmt: skip
WARM_UP = 1  # steps: torch chooses kernels in the first
SPREAD = 0.7  # of the logarithm of ragged lengths; their median is a quarter of the longest


@dataclass(frozen=True)
class StepCell:
    """What is trained.

    Args:
        arm: `tree`, `rows` or `trl`.
        n: rollouts of a prompt.
        m: rows trained of a prompt; of TRL's trainer n.
        prompts: of a step.
        micro_batch: rows of a forward pass.
        prompt_tokens: of each prompt.
        completion_tokens: of each completion, or of the longest of ragged ones.
        ragged: whether completions are prepared; else they are generated.
        budget: `max_tokens_per_microbatch`.
        shape: of the model, in bf16; on a CPU in float32.
        steps: most timed steps.
        seconds: after these no step begins, if `WARM_UP` steps are done.
    """

    arm: str
    n: int
    m: int
    prompts: int
    micro_batch: int
    prompt_tokens: int
    completion_tokens: int
    shape: str
    steps: int
    seconds: float
    ragged: bool = False
    budget: int | str | None = None

    @property
    def rows(self) -> int:
        """Rows trained in a step."""
        return self.prompts * self.group

    @property
    def group(self) -> int:
        """Rows trained of a prompt."""
        return self.n if self.arm == "trl" else self.m


class RaggedCompletions:
    """A rollout function of prepared tokens: the same for every trainer in the same generation."""

    def __init__(self, cell: StepCell, end: int) -> None:
        self._cell = cell
        self._end = end
        self._generations = 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        draws = random.Random(self._generations)
        self._generations += 1
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": [self._completion(draws) for _ in prompts],
            "logprobs": None,
        }

    def _completion(self, draws: random.Random) -> list[int]:
        longest = self._cell.completion_tokens
        length = math.ceil(draws.lognormvariate(math.log(longest / 4), SPREAD))
        ids = draws.choices(range(20, 220), k=min(length, longest))
        if length < longest:
            ids[-1] = self._end
        return ids


class MemoryClock(PhaseClock):
    """The trainer's own clock, which also records each phase's peak memory."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.place)
        self._memory = device
        self.peaks: dict[str, dict[str, int]] = {}

    def enter(self, phase: str | None) -> None:
        left_phase = self.phase
        super().enter(phase)
        if left_phase is not None:
            highest = self.peaks.setdefault(left_phase, {})
            for name, size in self._memory.peak().items():
                highest[name] = max(size, highest.get(name, 0))
        self._memory.reset_peak()


class StopInTime(TrainerCallback):
    """Stop once the seconds are over and the steps of the warm-up are done."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= WARM_UP and time.monotonic() > self._end:
            control.should_training_stop = True


class Passes(TrainerCallback):
    """Counts the passes of the last step's update: calls of the model that keep a gradient."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        model.register_forward_hook(self._after_a_call)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.count = 0

    def _after_a_call(self, *_: Any) -> None:
        self.count += torch.is_grad_enabled()


def build_model(shape: str, tokenizer: Any, device: Device) -> PreTrainedModel:
    set_seed(0)
    config = AutoConfig.for_model(
        **SHAPES[shape],
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    with device.place:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device.is_gpu else torch.float32)


def lora() -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=64, lora_alpha=64, target_modules="all-linear")


def settings_of(cell: StepCell, device: Device) -> dict[str, Any]:
    """Return the trainer's settings: the paper's setting a without its 4-bit base."""
    settings: dict[str, Any] = {
        "num_generations": cell.group,
        "per_device_train_batch_size": min(cell.micro_batch, cell.rows),
        "gradient_accumulation_steps": max(1, cell.rows // cell.micro_batch),
        "max_steps": WARM_UP + cell.steps,
        "max_completion_length": cell.completion_tokens,
        "shuffle_dataset": False,  # the prompts of a step are then all different
        "temperature": 0.9,
        "beta": 0.0,
        "loss_type": "grpo",
        "gradient_checkpointing": True,
        "learning_rate": 5e-6,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "bf16": device.is_gpu,
        "use_cpu": device.place.type == "cpu",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    if not cell.ragged:
        settings["generation_kwargs"] = {"min_new_tokens": cell.completion_tokens}
    if cell.arm != "trl":
        settings["num_rollouts"] = cell.n
        settings["prefix_tree"] = cell.arm == "tree"
        settings["max_tokens_per_microbatch"] = cell.budget
    return settings


def build(cell: StepCell, device: Device, folder: str) -> Any:
    """Return a trainer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_path())
    tokenizer.model_max_length = cell.prompt_tokens + cell.completion_tokens
    trainer_class: type[GRPOTrainer] = GRPOTrainer
    config_class: type[GRPOConfig] = GRPOConfig
    if cell.arm != "trl":
        trainer_class = PODSTrainer
        config_class = PODSConfig
    # The tokenizer has a token for each byte. Prompts differ in their first one.
    prompts = [f"{i % 10}{'7' * (cell.prompt_tokens - 1)}" for i in range(cell.prompts)]
    trainer = trainer_class(
        model=build_model(cell.shape, tokenizer, device),
        reward_funcs=reward,
        args=config_class(folder, **settings_of(cell, device)),
        train_dataset=Dataset.from_dict({"prompt": prompts * (2 * (WARM_UP + cell.steps))}),
        processing_class=tokenizer,
        peft_config=lora(),
        rollout_func=RaggedCompletions(cell, tokenizer.eos_token_id) if cell.ragged else None,
    )
    trainer.remove_callback(PrinterCallback)  # prints every line of metrics
    return trainer


def time_from_outside(trainer: Any, clock: MemoryClock) -> None:
    """Time TRL's trainer with PODSTrainer's clock: the same phases, entered at the same calls."""

    def within(phase: str, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            clock.enter(phase)
            result = function(*args, **kwargs)
            clock.enter("update")
            return result

        return timed

    class Step(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.seconds = dict.fromkeys(clock.seconds, 0.0)
            clock.enter("update")

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.enter(None)
            for phase, seconds in clock.seconds.items():
                trainer._metrics["train"][f"pods/seconds/{phase}"].append(seconds)

    trainer._generate = within("rollout", trainer._generate)
    trainer._calculate_rewards = within("reward", trainer._calculate_rewards)
    trainer.add_callback(Step())


def attention_of(cell: StepCell, trainer: Any) -> dict[str, Any]:
    """Return what computed the policy in the update, and whether that were prefix trees."""
    config = trainer.accelerator.unwrap_model(trainer.model).config
    of_rows = f"transformers' {config._attn_implementation}"
    if cell.arm == "trl":
        return {"attention": f"rows, with attention by {of_rows}", "trees": False}
    text = str(trainer._update.attention)
    trees = text.startswith("prefix trees")
    if not trees:
        text += f"; attention by {of_rows}"
    return {"attention": text, "trees": trees}


def run_cell(cell: StepCell, device: Device) -> dict[str, Any]:
    """Train, and return each step's seconds by phase and the phases' peaks, or the phase that ran out of memory."""
    stop = StopInTime(cell.seconds)
    device.release()
    held = device.memory()
    clock = MemoryClock(device)
    try:
        with tempfile.TemporaryDirectory(prefix="pods-bench-") as folder:
            trainer = build(cell, device, folder)
            held = device.memory()  # of the weights: what a step needs is above that
            trainer.add_callback(stop)
            passes = Passes(trainer.model)
            trainer.add_callback(passes)
            if cell.arm == "trl":
                time_from_outside(trainer, clock)
            else:
                trainer._update.clock = clock
            trainer.train()
    except Exception as error:
        cause = error.__cause__ or error  # PODSTrainer adds advice to torch's error
        if not is_out_of_memory(cause):
            raise
        message = str(cause).splitlines()[0]
        return {"out_of_memory": clock.phase or "loading", "message": message, "peaks": clock.peaks, "held": held}
    rows = [row for row in trainer.state.log_history if "pods/seconds/update" in row]
    lengths = [row["completions/mean_length"] for row in rows]
    if not cell.ragged:
        assert min(lengths) == cell.completion_tokens, f"completions of {min(lengths):g} tokens"
    steps = [{phase: row[f"pods/seconds/{phase}"] for phase in PHASES} for row in rows]
    # If there was no time for more, the step of the warm-up is the one that counts.
    warm_up = min(WARM_UP, len(steps) - 1)
    timed = rows[warm_up:]
    result = {
        **attention_of(cell, trainer),
        "steps": steps,
        "warm_up": warm_up,
        "passes": passes.count,
        "peaks": clock.peaks,
        "held": held,
        "completion_tokens": statistics.mean(lengths),
    }
    if cell.arm != "trl":
        result["budget"] = trainer.token_budget
        result["computed_tokens"] = statistics.median(row["pods/tokens/computed"] for row in timed)
    return result
