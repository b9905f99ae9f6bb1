"""One token a row through a plain decoder, such as Llama, Mistral, Qwen2 and Qwen3, with fewer operations.

On a CPU much of a token's time goes to calls of modules and to small products. Here queries, keys and values are one
product, and so are gate and up. LoRA's weights are added to the model's, and no module is called. A model takes part if
its modules have the names and the arrangement that transformers gives all such decoders, and if its logits are then the
model's own.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from .cache import attend

_TOLERANCE = 1e-4  # of the logits, as a share of their norm: rounding gives 1e-6 in float32
# The names of all modules; layers have numbers.
_NAMES = frozenset({
    "", "model", "embed_tokens", "layers", "rotary_emb", "norm", "lm_head", "input_layernorm", "self_attn", "q_proj",
    "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "post_attention_layernorm", "mlp", "gate_proj", "up_proj",
    "down_proj", "act_fn",
})  # fmt: skip

_is_exact: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()  # whether a model's logits are its own


class _Product(NamedTuple):
    """A linear map, or several of the same input side by side."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *parts: Any) -> _Product:
        weights = [_weight_of(part) for part in parts]
        if len(parts) == 1:
            return cls(weights[0], parts[0].bias)
        biases = tuple(part.bias for part in parts if part.bias is not None)
        if len(biases) not in (0, len(parts)):
            raise ValueError("some parts of a product have a bias, and others have none")
        return cls(torch.cat(weights), torch.cat(biases) if biases else None)

    def __call__(self, states: Tensor) -> Tensor:
        return linear(states, self.weight, self.bias)


def _weight_of(part: Any) -> Tensor:
    """Return the weight of a linear map, with that of its LoRA adapters."""
    weight: Tensor = part.weight  # of the base layer, where there are adapters
    if not _has_lora(part) or part.disable_adapters or part.merged:
        return weight
    for adapter in part.active_adapters:
        if adapter in part.lora_A:
            weight = weight + part.get_delta_weight(adapter)
    return weight


def _has_lora(part: Any) -> bool:
    """Return whether a module is PEFT's linear map with adapters of the form B A, without a bias of their own."""
    # Compared by name, because importing PEFT takes seconds that a run without adapters need not spend.
    kind = type(part)
    if kind.__name__ != "Linear" or kind.__module__ != "peft.tuners.lora.layer":
        return False
    is_plain_map: bool = type(part.base_layer) is nn.Linear
    has_variant = bool(part.lora_variant) or any(part.lora_bias.values())  # such as DoRA
    return is_plain_map and not has_variant


class _Norm(NamedTuple):
    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> _Norm:
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, states: Tensor) -> Tensor:
        return rms_norm(states, self.weight.shape, self.weight, self.epsilon)


class _Layer:
    """The weights of a layer, where a token finds them without a search among modules."""

    def __init__(self, layer: Any) -> None:
        self.attention = layer.self_attn
        self.head_size = self.attention.head_dim
        self.key_heads = self.attention.k_proj.out_features // self.head_size
        self.scaling = self.attention.scaling
        self.input_norm = _Norm.of(layer.input_layernorm)
        self.query_key_value = _Product.of(self.attention.q_proj, self.attention.k_proj, self.attention.v_proj)
        self.head_norms = None
        if "q_norm" in self.attention._modules:
            self.head_norms = (_Norm.of(self.attention.q_norm), _Norm.of(self.attention.k_norm))
        self.output = _Product.of(self.attention.o_proj)
        self.mlp_norm = _Norm.of(layer.post_attention_layernorm)
        self.gate_up = _Product.of(layer.mlp.gate_proj, layer.mlp.up_proj)
        self.activation = layer.mlp.act_fn
        self.down = _Product.of(layer.mlp.down_proj)


class PlainDecoder:
    """A model whose weights do not change while this lives, and which computes one token a row.

    Args:
        model: one that `plain_decoder` accepts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        backbone: Any = model.model
        self._embeddings = backbone.embed_tokens.weight
        self._rotary = backbone.rotary_emb
        self._layers = [_Layer(layer) for layer in backbone.layers]
        self._norm = _Norm.of(backbone.norm)
        self._head = _Product.of(model.lm_head)

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
        """Return the logits `[rows, 1, V]` after the tokens, and append them to the cache.

        Args:
            ids: `[rows, 1]`.
            positions: `[rows or 1, 1]`.
            mask: `[rows, columns]`, 0 at padding. If None, there is none.
            cache: of the tokens before.
        """
        rows = len(ids)
        hidden = embedding(ids.squeeze(1), self._embeddings)  # [rows, hidden size]
        cos, sin = self._rotary(hidden, positions)
        cos = cos.unsqueeze(1)  # [rows or 1, 1, 1, D]
        sin = sin.unsqueeze(1)
        seen = None if mask is None else mask.bool()[:, None, None, :]
        for number, layer in enumerate(self._layers):
            products = layer.query_key_value(layer.input_norm(hidden))
            heads = products.view(rows, -1, 1, layer.head_size)  # [rows, H + 2 K, 1, D]
            values = heads[:, -layer.key_heads :]
            rotated = heads[:, : -layer.key_heads]  # queries and keys: their positions rotate them
            if layer.head_norms is not None:
                query_norm, key_norm = layer.head_norms
                queries = query_norm(rotated[:, : -layer.key_heads])
                rotated = torch.cat([queries, key_norm(rotated[:, -layer.key_heads :])], 1)
            first, second = rotated.chunk(2, -1)
            rotated = rotated * cos + torch.cat([-second, first], -1) * sin
            keys, values = cache.update(rotated[:, -layer.key_heads :], values, number)
            queries = rotated[:, : -layer.key_heads]
            read, _ = attend(layer.attention, queries, keys, values, seen, scaling=layer.scaling)
            hidden = hidden + layer.output(read.view(rows, -1))
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, -1)
            hidden = hidden + layer.down(layer.activation(gate) * up)
        return self._head(self._norm(hidden)).unsqueeze(1)


def plain_decoder(model: PreTrainedModel) -> PlainDecoder | None:
    """Return what computes single tokens of a model on a CPU in 32 bits or more; None if the model must do it.

    A model with hooks, quantized weights, adapters other than LoRA or another arrangement computes its tokens itself.
    """
    weights = next(model.parameters())
    if weights.device.type != "cpu" or weights.dtype.itemsize < 4 or torch.is_autocast_enabled("cpu"):
        return None
    if not _is_arranged(model):
        return None
    if model not in _is_exact:
        _is_exact[model] = _compare(model)
    return PlainDecoder(model) if _is_exact[model] else None


def _is_arranged(model: PreTrainedModel) -> bool:
    """Return whether the modules have the names and kinds of a plain decoder, and no hooks."""
    if "llama_4_scaling_beta" in (getattr(model.config, "rope_parameters", None) or {}):
        return False  # queries are scaled from some position on; older transformers do not show it to `_compare`
    within_lora = "\n"  # the path of the latest map with adapters; no path begins with this
    for path, module in model.named_modules():
        is_patched = "forward" in vars(module) and module is not model  # TRL patches the model's own
        if is_patched or module._forward_hooks or module._forward_pre_hooks:
            return False
        if path.startswith(within_lora):
            continue
        name = path.rpartition(".")[2]
        if name not in _NAMES and not name.isdecimal():
            return False
        if name == "embed_tokens" and type(module) is not nn.Embedding:
            return False
        if name.endswith(("_proj", "_head")) and type(module) is not nn.Linear:
            if not _has_lora(module):
                return False
            within_lora = f"{path}."
    return True


def _compare(model: PreTrainedModel) -> bool:
    """Return whether the second and the third of three tokens have the logits that the model gives them."""
    ids = torch.arange(6).view(2, 3) * 7 % model.config.vocab_size
    # The last position is far away, because some models scale queries from some position on.
    positions = torch.tensor([[0, 1, model.config.max_position_embeddings - 1]])
    own_cache = DynamicCache(config=model.config)
    plain_cache = DynamicCache(config=model.config)
    try:
        expected = model(input_ids=ids, position_ids=positions, past_key_values=own_cache, use_cache=True).logits
        model(input_ids=ids[:, :1], position_ids=positions[:, :1], past_key_values=plain_cache, use_cache=True)
        decoder = PlainDecoder(model)
        columns = [decoder(ids[:, i : i + 1], positions[:, i : i + 1], None, plain_cache) for i in (1, 2)]
    except Exception:  # another arrangement may fail anywhere
        return False
    logits = torch.cat(columns, 1)
    distance = (logits - expected[:, 1:]).norm() / expected[:, 1:].norm()
    return bool(distance < _TOLERANCE)
