"""One token a row through a decoder, such as Llama, Qwen3, Gemma 3 or Qwen3.5, with fewer operations than its modules.

Much of a token's time goes to calls of modules and to small operations, which a GPU waits for one by one. Here a
token is a few products (`fused_layers`), and no module is called. A model takes part if its modules have names and
kinds that `fused_layers` knows, and if its logits are then the model's own.
"""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .cache import NodeLayer, read
from .fused_layers import Copy, Memory, Norm, Product, ResidualBranch, branches_of, has_lora, rotation_table

_TOLERANCE = 1e-4  # of the logits in 32 bits, as a share of their norm: rounding gives 1e-6
# The names of all modules; layers have numbers.
_MODULE_NAMES = frozenset({
    "", "model", "embed_tokens", "layers", "rotary_emb", "norm", "lm_head", "input_layernorm", "self_attn", "q_proj",
    "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "post_attention_layernorm",
    "pre_feedforward_layernorm", "post_feedforward_layernorm", "resid_attn_dropout", "resid_mlp_dropout", "mlp",
    "gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn", "linear_attn", "conv1d",
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
})  # fmt: skip
_MAPS = ("_proj", "_head", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # how the names of linear maps end
# Values of `model_type`, whose arrangement tests compare in 32 bits. In 16 bits only these take part, because a small
# difference of arrangement would look like rounding.
FAMILIES = frozenset({
    "cwm", "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_5_text",
    "seed_oss", "smollm3",
})  # fmt: skip

# The type of a model's products, or None if its logits are not its own, by what that depends on.
_types: WeakKeyDictionary[PreTrainedModel, dict[Any, torch.dtype | None]] = WeakKeyDictionary()


class PlainDecoder:
    """The weights of a model, as few products, which compute one token a row.

    Args:
        positions: `[count]`, those that tokens may have; a token then names its position by its number among these.
        dtype: of products, keys and values.
    """

    def __init__(self, model: PreTrainedModel, positions: Tensor, dtype: torch.dtype) -> None:
        backbone: Any = model.model
        config = model.config
        embed: Any = backbone.embed_tokens
        self._embeddings: Tensor = embed.weight
        self.dtype = dtype
        self.copies: list[Copy] = []  # what is made of the model's weights: see `refill`
        self._scale: Tensor | float = getattr(config, "embedding_multiplier", 1.0)
        if hasattr(embed, "embed_scale"):
            self._scale = embed.embed_scale.to(embed.weight)
        rotary: Any = backbone.rotary_emb
        kinds: list[str | None] = [None] * len(backbone.layers)
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            kinds = list(config.layer_types)
        self.branches: list[ResidualBranch] = []  # two of each layer
        for number, layer in enumerate(backbone.layers):
            self.branches += branches_of(layer, number, kinds[number], config, self)
        self._norm = Norm(backbone.norm)
        self._norm_weight = Copy(self._norm.weight, embed.weight.dtype, self.copies)
        self._head = Product([model.lm_head], self)
        self._divisor: float = getattr(config, "logits_scaling", 1.0)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Most models have one table, of kind None.
        self._rotation_tables = {kind: rotation_table(rotary, embed.weight, positions, kind) for kind in set(kinds)}

    def refill(self) -> None:
        """Read the weights of the model again; what is made of them keeps its addresses."""
        for copy in self.copies:
            copy.refill()

    def rotations_at(self, positions: Tensor) -> dict[str | None, tuple[Tensor, ...]]:
        """Return cosine and signed sine of positions, `[rows or 1, 1, 1, rotated size]`, by the kind of layer."""
        tables = self._rotation_tables.items()
        return {kind: table.index_select(0, positions)[:, None, None].unbind(3) for kind, table in tables}

    def __call__(self, ids: Tensor, memory: Memory) -> Tensor:
        """Return the logits `[rows, V]` after tokens `[rows]`; the memory keeps what these leave."""
        with torch.autocast(ids.device.type, enabled=False):  # types are chosen here
            hidden = embedding(ids, self._embeddings)  # [rows, hidden size]
            if isinstance(self._scale, Tensor) or self._scale != 1:
                hidden = hidden * self._scale
            for branch in self.branches:
                branch(hidden, memory)
            weight = self._norm_weight.tensor
            logits = self._head(rms_norm(hidden, weight.shape, weight, self._norm.epsilon).to(self.dtype))
            if self._divisor != 1:
                logits = logits / self._divisor
            if self._softcap is not None:
                logits = (logits / self._softcap).tanh() * self._softcap
            return logits


class CacheMemory:
    """The memory of a decoder in transformers' cache: see `fused_layers.Memory`.

    Args:
        positions: `[rows or 1]`, the numbers of the latest tokens' positions.
        mask: `[rows, columns]`, 0 at padding. If None, there is none.
    """

    def __init__(self, decoder: PlainDecoder, positions: Tensor, mask: Tensor | None, cache: Cache) -> None:
        self._layers: Any = cache.layers
        self._hidden = None if mask is None else (mask == 0)[:, None, None, :]
        self.rotations = decoder.rotations_at(positions)

    def attend(self, layer: int, heads: Tensor, group: int, softcap: float | None) -> Tensor:
        cached = self._layers[layer]
        queries = heads.flatten(0, 1)[:, :group]
        if isinstance(cached, NodeLayer):
            cached.append(heads[:, :, group : group + 2])
            return cached.read(queries, self._hidden, softcap)
        keys, values = cached.update(heads[:, :, group : group + 1], heads[:, :, group + 1 : group + 2])
        hidden = self._hidden
        if hidden is not None:
            hidden = hidden[..., -keys.shape[2] :]  # a sliding window has the last columns
        return read(queries, keys, values, hidden, softcap)

    def states(self, layer: int) -> tuple[Tensor, Tensor]:
        cached = self._layers[layer]
        return cached.conv_states[0], cached.recurrent_states[0]


def cast_cache(cache: Cache, dtype: torch.dtype) -> None:
    """Cast the keys and values of a cache that the model has filled to the type in which a decoder continues it."""
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            layer.keys = layer.keys.to(dtype)
            layer.values = layer.values.to(dtype)


def product_type(model: PreTrainedModel) -> torch.dtype:
    """Return the type in which a model computes products here: autocast's, or that of its weights."""
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


def plain_decoder(model: PreTrainedModel, length: int) -> PlainDecoder | None:
    """Return what computes single tokens of a model, of at most `length` with the prompt; None if the model must."""
    dtype = plain_type(model)
    if dtype is None:
        return None
    if model.device.type == "cuda" and torch.cuda.is_available():
        # A GPU needs room for another copy of the layers, and as much again for keys and values.
        free, _ = torch.cuda.mem_get_info(model.device)
        free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
        backbone: Any = model.model
        size: int = sum(weight.nbytes for weight in backbone.layers.parameters())
        if 2 * size >= free:
            return None
    with torch.no_grad():
        return PlainDecoder(model, torch.arange(length, device=model.device), dtype)


@torch.no_grad()
def plain_type(model: PreTrainedModel) -> torch.dtype | None:
    """Return the type of a decoder's products; None if the model computes its tokens itself."""
    # One with hooks, quantized weights, adapters other than LoRA or another arrangement does.
    if model.device.type not in ("cpu", "cuda") or not _is_arranged(model):
        return None
    # accelerate lets the method `forward` enter autocast.
    circumstances = (model.device.type, model.dtype, product_type(model), "forward" in vars(model))
    types = _types.setdefault(model, {})
    if circumstances not in types:
        types[circumstances] = _compare_with_model(model)
    return types[circumstances]


def _is_arranged(model: PreTrainedModel) -> bool:
    """Return whether the modules have the names and kinds that a decoder is made of, and no hooks."""
    if "llama_4_scaling_beta" in (getattr(model.config, "rope_parameters", None) or {}):
        return False  # queries are scaled from some position on; `_compare_with_model` misses it in older transformers
    within_lora = "\n"  # the path of the latest map with adapters; no path begins with this
    for path, module in model.named_modules():
        is_patched = "forward" in vars(module) and module is not model  # TRL patches the model's own
        # With gradient checkpointing transformers marks the embeddings as inputs that need a gradient.
        hooks = {getattr(hook, "__name__", "") for hook in module._forward_hooks.values()}
        if is_patched or hooks - {"make_inputs_require_grads"} or module._forward_pre_hooks:
            return False
        if path.startswith(within_lora):
            continue
        name = path.rpartition(".")[2]
        if name not in _MODULE_NAMES and not name.isdecimal():
            return False
        if name == "embed_tokens" and type(module) is not nn.Embedding and not hasattr(module, "embed_scale"):
            return False
        if name.endswith(_MAPS) and type(module) is not nn.Linear:
            if not has_lora(module):
                return False
            within_lora = f"{path}."
    return True


def _compare_with_model(model: PreTrainedModel) -> torch.dtype | None:
    """Return the type of a model's products if a decoder gives two tokens the logits of the model, else None."""
    device = model.device
    ids = torch.arange(6, device=device).view(2, 3) * 7 % model.config.vocab_size
    # The last position is far away, because some models scale queries from some position on.
    positions = torch.tensor([0, 1, model.config.max_position_embeddings - 1], device=device)
    own_cache = DynamicCache(config=model.config)
    plain_cache = DynamicCache(config=model.config)
    types: list[torch.dtype] = []
    backbone: Any = model.model
    hook = backbone.register_forward_pre_hook(lambda module, args: types.append(product_type(model)))
    try:
        expected = model(
            input_ids=ids, position_ids=positions.unsqueeze(0), past_key_values=own_cache, use_cache=True
        ).logits
        dtype = types[0]
        if dtype.itemsize < 4 and model.config.model_type not in FAMILIES:
            return None
        model(input_ids=ids[:, :1], position_ids=positions[None, :1], past_key_values=plain_cache, use_cache=True)
        decoder = PlainDecoder(model, positions, dtype)
        cast_cache(plain_cache, dtype)
        columns = []
        for column in (1, 2):
            memory = CacheMemory(decoder, torch.tensor([column], device=device), None, plain_cache)
            columns.append(decoder(ids[:, column], memory))
    except Exception:  # another arrangement may fail anywhere
        return None
    finally:
        hook.remove()
    logits = torch.stack(columns, 1).float()
    expected = expected[:, 1:].float()
    distance = (logits - expected).norm() / expected.norm()
    # With 16 bits each branch rounds several times, in another order than the model's, and these errors add up like a
    # random walk. Measured in bfloat16, models of 9 layers are 0.01 apart, and tiny ones with large weights up to 0.1:
    # the decoder is then as far from the logits in 32 bits as the model is.
    rounding = 4 * torch.finfo(dtype).eps * len(decoder.branches) ** 0.5
    tolerance = rounding if dtype.itemsize < 4 else _TOLERANCE
    return dtype if distance < tolerance else None
