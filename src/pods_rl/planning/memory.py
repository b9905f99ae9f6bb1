"""Estimate the GPU memory of a recipe from the sizes of its model, without loading it and without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..errors import UserError
from ..policies import policy_path
from ..recipe import Recipe
from ..recipe.schema import COMPUTED

GIB = 2**30
_PROMPT_TOKENS = 512  # of a recipe without max_prompt_length
_FLOAT32 = 4
_FLOAT16 = 2
_NF4 = 0.5625  # bytes of a 4-bit weight: half a byte, and 4 bytes for each block of 64
_SAMPLING = 16  # bytes of a logit while a token is drawn: twice the logit, its probability, and the running sum
_TILE_TOKENS = 4096  # TRL's head computes this many tokens at once,
_TILE_VOCABULARY = 32768  # for this many entries of the vocabulary


@dataclass(frozen=True)
class Memory:
    """The estimated GPU memory of one process, in bytes.

    Args:
        weights: of the policy, its adapter and the reference policy.
        optimizer: its states.
        vllm: what a colocated vLLM reserves.
        gradients: of the trained weights.
        activations: of the rows of one micro-batch.
        cache: keys and values of the rollouts that are generated at once.
        sampling: the logits of their next tokens.

    >>> memory = Memory(weights=6, optimizer=4, vllm=0, gradients=2, activations=3, cache=7, sampling=1)
    >>> memory.update, memory.generation, memory.peak
    (5, 8, 18)
    """

    weights: float
    optimizer: float
    vllm: float
    gradients: float
    activations: float
    cache: float
    sampling: float

    @property
    def update(self) -> float:
        """What the update needs in addition to weights and optimizer."""
        return self.gradients + self.activations

    @property
    def generation(self) -> float:
        """What generation needs in addition to weights and optimizer."""
        return self.cache + self.sampling

    @property
    def peak(self) -> float:
        """What always stays, and the larger of update and generation, which take turns."""
        return self.weights + self.optimizer + self.vllm + max(self.update, self.generation)

    def lines(self) -> list[str]:
        """Return a line for each part, and the peak, in GiB."""
        parts = {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "vLLM": self.vllm,
            "update: gradients": self.gradients,
            "update: activations": self.activations,
            "generation: cache": self.cache,
            "generation: sampling": self.sampling,
            "peak": self.peak,
        }
        return [f"{name:<22}{size / GIB:>6.1f} GiB" for name, size in parts.items()]


def estimate_memory(
    recipe: Recipe, config: PreTrainedConfig | None = None, *, gpu_gib: float = 24.0, prompt_tokens: int | None = None
) -> Memory:
    """Estimate the GPU memory that each process of a recipe needs, by arithmetic.

    The estimate assumes that the weights are complete on every GPU (`ddp`), AdamW, an attention that stores no matrix
    of scores, and prompts and completions of the greatest length. It does not contain the CUDA context (about 0.5 GiB),
    fragmentation and the temporary buffers of libraries. It has not been compared with a GPU.

    Args:
        recipe: a checked recipe.
        config: of the model; if None, read from the recipe's `model_name_or_path`.
        gpu_gib: the memory of the GPU, of which a colocated vLLM reserves a share.
        prompt_tokens: of the longest prompt; if None, `max_prompt_length` of the recipe, or else 512.

    Raises:
        UserError: the optimizer is not AdamW.

    Example:
        >>> from pods_rl.recipe import load_recipe
        >>> for line in estimate_memory(load_recipe("tiny-pods")).lines()[:2]:
        ...     print(line)
        weights                  0.0 GiB
        optimizer                0.0 GiB
    """
    values = recipe.every_value()
    if config is None:
        config = AutoConfig.from_pretrained(policy_path(values["model_name_or_path"]), trust_remote_code=False)
    with torch.device("meta"):  # names and shapes without weights
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    if prompt_tokens is None:
        prompt_tokens = values["max_prompt_length"] or _PROMPT_TOKENS
    tokens = prompt_tokens + values["max_completion_length"]
    plan = recipe.batch_plan()
    compute = _compute_bytes(values)
    weights, trained, trained_bytes = _weights(model, values)
    rollouts = plan.shares.rollouts_each
    if values["rollout_batch_size"] is not None:
        rollouts = min(rollouts, values["rollout_batch_size"])
    vllm = 0.0
    if values["use_vllm"]:
        rollouts = 0
        if values["vllm_mode"] == "colocate":
            vllm = values["vllm_gpu_memory_utilization"] * gpu_gib * GIB
    head_size = _head_size(text)
    cache_of_token = 2 * text.num_hidden_layers * _key_heads(text) * head_size * compute
    return Memory(
        weights=weights,
        optimizer=trained * _optimizer_bytes(values, trained_bytes),
        vllm=vllm,
        gradients=trained * trained_bytes,
        activations=_activations(text, values, plan.micro_batch_rows, prompt_tokens),
        cache=rollouts * tokens * cache_of_token,
        sampling=rollouts * text.vocab_size * _SAMPLING,
    )


def _activations(config: Any, values: Mapping[str, Any], rows: int, prompt_tokens: int) -> float:
    """Return the bytes of the activations of a micro-batch, as if its rows shared no prefix.

    Args:
        config: of the text model.
        values: of the recipe.
        rows: of the micro-batch.
        prompt_tokens: of each prompt.
    """
    compute = _compute_bytes(values)
    completion_tokens = rows * values["max_completion_length"]
    tokens = rows * prompt_tokens + completion_tokens
    layers = config.num_hidden_layers
    one_layer = layer_bytes(config, compute)
    if values["gradient_checkpointing"]:
        # Each layer keeps its input, and the backward pass computes one layer again.
        of_layers = tokens * (layers * config.hidden_size * compute + one_layer)
    else:
        of_layers = tokens * layers * one_layer
    # In the backward pass one MLP also has the gradients of three of its vectors.
    gradients = tokens * 3 * config.intermediate_size * compute
    # The head keeps the last hidden states and their gradient, and a tile of the logits instead of all of them.
    head = completion_tokens * config.hidden_size * (compute + _FLOAT32)
    head += min(completion_tokens, _TILE_TOKENS) * min(config.vocab_size, _TILE_VOCABULARY) * compute
    if not values["use_peft"]:
        head += config.vocab_size * config.hidden_size * _FLOAT32  # the gradient of its weight
    return float(of_layers + gradients + head)


def layer_bytes(config: Any, compute: int) -> float:
    """Return the bytes of activations that one token leaves in one decoder layer for the backward pass.

    The layer is that of Llama, Qwen and Mistral: two norms computed in float32, queries, keys and values before and
    after their rotation, the output of the attention, and a gated MLP with four vectors of its inner size.

    Args:
        config: of the text model.
        compute: bytes of a number of the computation: 2 in 16 bits, 4 in float32.
    """
    hidden = config.hidden_size
    head_size = _head_size(config)
    query = config.num_attention_heads * head_size
    key = _key_heads(config) * head_size
    norms = 2 * hidden * (_FLOAT32 + 2 * compute)
    attention = (2 * query + 4 * key) * compute
    mlp = 4 * config.intermediate_size * compute
    return float(norms + attention + mlp)


def _weights(model: PreTrainedModel, values: Mapping[str, Any]) -> tuple[float, int, int]:
    """Return the bytes of all weights, the number of trained ones, and the bytes of each of these."""
    parameters = sum(weight.numel() for weight in model.parameters())
    linear = _linear_layers(model)
    size = _FLOAT16 if values["dtype"] in ("bfloat16", "float16") else _FLOAT32
    total = float(parameters * size)
    in_linear = sum(layer.weight.numel() for layer in linear)
    if values["load_in_4bit"] or values["load_in_8bit"]:
        quantised = _NF4 if values["load_in_4bit"] else 1
        total = in_linear * quantised + (parameters - in_linear) * _FLOAT16
    if values["use_peft"]:
        adapter = values["lora_r"] * sum(layer.in_features + layer.out_features for layer in linear)
        return total + adapter * _FLOAT32, adapter, _FLOAT32  # PEFT keeps adapters in float32
    if values["beta"]:
        total *= 2  # the reference policy
    if size == _FLOAT32 and _compute_bytes(values) == _FLOAT16:
        total += in_linear * _FLOAT16  # autocast keeps a copy in 16 bits
    return total, parameters, size


def _linear_layers(model: PreTrainedModel) -> list[nn.Linear]:
    """Return the linear layers without the head: those that LoRA adapts and that are quantised."""
    head = model.get_output_embeddings()
    return [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]


def _compute_bytes(values: Mapping[str, Any]) -> int:
    """Return the bytes of a number in the forward pass, on a GPU: in bf16 unless the recipe says otherwise."""
    if values["dtype"] in ("bfloat16", "float16") or values["fp16"]:
        return _FLOAT16
    if values["bf16"] is False:
        return _FLOAT32
    return _FLOAT16


def _optimizer_bytes(values: Mapping[str, Any], weight_bytes: int) -> int:
    """Return the bytes of AdamW's two states of one weight."""
    name = "adamw_torch_fused" if values["optim"] == COMPUTED else str(values["optim"])
    if "adamw" not in name:
        raise UserError(
            f"optim = {name}: the estimate of memory knows AdamW only. Use an optim with adamw in its name."
        )
    if "8bit" in name:
        return 2
    return 2 * weight_bytes


def _head_size(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _key_heads(config: Any) -> int:
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads
