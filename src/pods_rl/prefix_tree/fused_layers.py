"""The layers of a decoder in few operations, without modules, for one token a row.

A layer is two residual branches: a norm, a product, a middle, a product back, perhaps a norm. The middles are
attention, the gated delta rule and a gated MLP. Families differ in data: where norms are, how scores are bounded, which
layers rotate by position.

Parts with the same input are one product. The weights of the norm before it and the scale of attention are multiplied
into its weights, and those of LoRA added. What is made so is a `Copy`, which `refill` writes again in place once the
model's weights have changed, so that addresses that a CUDA graph holds stay valid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu, softplus


class Memory(Protocol):
    """What the tokens before the latest have left, and the positions of the latest."""

    rotations: dict[str | None, tuple[Tensor, ...]]  # of the positions: see `PlainDecoder.rotations_at`

    def attend(self, layer: int, heads: Tensor, group: int, softcap: float | None) -> Tensor:
        """Append a key and a value for each row; return what its queries read, `[rows * K, group, D]`.

        Args:
            layer: its number in the model.
            heads: `[rows, K, group + 2 or more, D]`: of each key head its scaled queries, then the key and the value.
            group: queries that share a key.
            softcap: see `cache.read`.
        """

    def states(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the states of a recurrent layer, to be changed in place.

        These are the latest inputs of the convolution, `[rows, channels, width]`, and the state of the gated delta
        rule, `[rows, heads, size of keys, size of values]`.
        """


class Copy:
    """A tensor that `make` returns of the model's weights as they are, perhaps in another type; one of `copies`."""

    def __init__(self, make: Callable[[], Tensor], dtype: torch.dtype | None, copies: list[Copy]) -> None:
        self._make = make
        made = make()
        self.tensor = made if dtype is None else made.to(dtype)
        copies.append(self)

    def refill(self) -> None:
        """Make the tensor again, at the same address."""
        made = self._make()
        if made.data_ptr() != self.tensor.data_ptr():  # not a weight of the model itself
            self.tensor.copy_(made)


class Build(Protocol):
    """What all parts of a decoder share."""

    dtype: torch.dtype
    copies: list[Copy]


class Norm:
    """A root mean square norm; its weights have 32 bits or more until they are multiplied with others."""

    def __init__(self, module: Any) -> None:
        self._module = module
        # Where the weights are distances from 1, as Gemma's and Qwen3.5's, transformers names epsilon so.
        self._is_centered = not hasattr(module, "variance_epsilon")
        self.epsilon: float = module.eps if self._is_centered else module.variance_epsilon

    def weight(self) -> Tensor:
        """Return what the module multiplies with."""
        weight: Tensor = self._module.weight
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return 1 + weight if self._is_centered else weight

    def unweighted(self, states: Tensor) -> Tensor:
        """Return the norm of states without its weights."""
        return rms_norm(states, states.shape[-1:], None, self.epsilon)


class Product:
    """A linear map, or several of the same input side by side.

    Args:
        maps: modules of the model, perhaps with LoRA's adapters.
        columns: returns what is multiplied into the columns, such as the weights of a norm. If None, 1.
        order, factors: of the rows. If None, the order of the maps, and 1.
    """

    def __init__(
        self,
        maps: list[Any],
        build: Build,
        columns: Callable[[], Tensor] | None = None,
        order: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> None:
        biases = [part for part in maps if part.bias is not None]
        if len(biases) not in (0, len(maps)):
            raise ValueError("some parts of a product have a bias, and others have none")

        def in_order(parts: list[Tensor]) -> Tensor:
            rows = parts[0] if len(parts) == 1 else torch.cat(parts)
            if order is not None:
                rows = rows[order]
            return rows if factors is None else (rows.movedim(0, -1) * factors).movedim(-1, 0)

        def make_weight() -> Tensor:
            weight = in_order([_weight_of(part) for part in maps])
            return weight if columns is None else weight * columns()

        self._weight = Copy(make_weight, build.dtype, build.copies)
        self._bias = None
        if biases:
            self._bias = Copy(lambda: in_order([part.bias for part in maps]), build.dtype, build.copies)

    def __call__(self, states: Tensor) -> Tensor:
        return linear(states, self._weight.tensor, None if self._bias is None else self._bias.tensor)

    def add_to(self, hidden: Tensor, states: Tensor, factor: float) -> None:
        """Add the product to `hidden`, in place."""
        weight = self._weight.tensor
        if self._bias is None and hidden.dtype == weight.dtype:
            hidden.addmm_(states, weight.t(), alpha=factor)
        else:  # with autocast `hidden` has more bits
            hidden.add_(self(states), alpha=factor)


def _weight_of(part: Any) -> Tensor:
    """Return the weight of a linear map, with that of its LoRA adapters."""
    weight: Tensor = part.weight  # of the base layer, where there are adapters
    if not has_lora(part) or part.disable_adapters or part.merged:
        return weight
    for adapter in part.active_adapters:
        if adapter in part.lora_A:
            weight = weight + part.get_delta_weight(adapter)
    return weight


def has_lora(part: Any) -> bool:
    """Return whether a module is PEFT's linear map with adapters of the form B A, without a bias of their own."""
    # Compared by name, because importing PEFT takes seconds that a run without adapters need not spend.
    kind = type(part)
    if kind.__name__ != "Linear" or kind.__module__ != "peft.tuners.lora.layer":
        return False
    is_plain_map: bool = type(part.base_layer) is nn.Linear
    has_variant = bool(part.lora_variant) or any(part.lora_bias.values())  # such as DoRA
    return is_plain_map and not has_variant


class Attention:
    """Softmax attention, perhaps with norms of queries and keys, and with gates of what is read.

    The number and the kind of the layer find its memory and its rotation.
    """

    def __init__(self, module: Any, number: int, kind: str | None, columns: Callable[[], Tensor], build: Build) -> None:
        self._number = number
        self._kind = kind
        self._softcap: float | None = getattr(module, "attn_logit_softcapping", None)
        self._rotates = bool(getattr(module, "use_rope", True))
        is_one_map = "qkv_proj" in module._modules
        maps = [module.qkv_proj] if is_one_map else [module.q_proj, module.k_proj, module.v_proj]
        size: int = module.head_dim
        query_size: int = module.o_proj.in_features
        key_size = (maps[0].out_features - query_size) // 2 if is_one_map else maps[1].out_features
        group = query_size // key_size
        key_heads = key_size // size
        self._size = size
        self._group = group
        self._key_heads = key_heads
        device = maps[0].weight.device
        rows = torch.arange(sum(part.out_features for part in maps), device=device)
        # A query that gates what it reads is followed by its gate.
        queries, *gates = rows[: -2 * key_size].view(key_heads, group, -1, size).unbind(2)
        keys, values = rows[-2 * key_size :].view(2, key_heads, 1, size)
        # Heads that share a key are next to it, so that all of them are views of one product.
        order = torch.cat([queries, keys, values, *gates], 1)  # [K, heads, D]
        self._is_gated = bool(gates)
        self._norm_weight: Copy | None = None  # [group + 1, D], of each head's norm
        factors = None
        if "q_norm" in module._modules:
            query_norm = Norm(module.q_norm)
            key_norm = Norm(module.k_norm)

            def weight() -> Tensor:
                of_queries = (query_norm.weight() * module.scaling).expand(group, size)
                return torch.cat([of_queries, key_norm.weight().view(1, size)])

            self._epsilon = query_norm.epsilon
            self._norm_weight = Copy(weight, None, build.copies)
        elif module.scaling != 1:
            factors = torch.ones(order.shape, device=device)
            factors[:, :group] = module.scaling
            factors = factors.flatten()
        self.input = Product(maps, build, columns, order.flatten(), factors)
        self.output = Product([module.o_proj], build)

    def __call__(self, products: Tensor, memory: Memory) -> Tensor:
        rows = len(products)
        heads = products.view(rows, self._key_heads, -1, self._size)
        if self._norm_weight is not None:
            states = heads[:, :, : self._group + 1]  # queries and keys
            torch.mul(rms_norm(states, (self._size,), None, self._epsilon), self._norm_weight.tensor, out=states)
        if self._rotates:
            cos, sin = memory.rotations[self._kind]
            rotated_size = cos.shape[-1]
            states = heads[:, :, : self._group + 1, :rotated_size]  # queries and keys
            torch.addcmul(states * cos, states.roll(rotated_size // 2, -1), sin, out=states)
        read = memory.attend(self._number, heads, self._group, self._softcap)
        if self._is_gated:
            read = read.view(rows, self._key_heads, self._group, -1) * heads[:, :, self._group + 2 :].sigmoid()
        return read.view(rows, -1)


class GatedDeltaRule:
    """A Gated DeltaNet layer: https://arxiv.org/abs/2412.06464. Its four products of the input are one."""

    def __init__(self, module: Any, number: int, columns: Callable[[], Tensor], build: Build) -> None:
        self._number = number
        self._key_heads: int = module.num_k_heads
        self._value_heads: int = module.num_v_heads
        self._key_size: int = module.head_k_dim
        self._value_size: int = module.head_v_dim
        maps = [module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a]
        self._parts = [part.out_features for part in maps]
        self.input = Product(maps, build, columns)
        norm = Norm(module.norm)
        self._norm = norm
        self.output = Product([module.out_proj], build, lambda: norm.weight().repeat(self._value_heads))
        self._filter = Copy(lambda: module.conv1d.weight.squeeze(1), torch.float32, build.copies)  # [channels, width]
        self._rate = Copy(lambda: -module.A_log.float().exp(), torch.float32, build.copies)
        self._rate_bias = Copy(lambda: module.dt_bias, torch.float32, build.copies)
        # Queries and keys have length 1, and queries are then divided by the root of their size.
        root = self._key_size**-0.5
        factors = torch.tensor([[root * root], [root]], device=module.dt_bias.device)
        self._factors = factors.unsqueeze(2)  # [2, 1, 1]

    def __call__(self, products: Tensor, memory: Memory) -> Tensor:
        rows = len(products)
        latest, gates, strengths, steps = products.split(self._parts, -1)
        inputs, state = memory.states(self._number)
        width = self._filter.tensor.shape[1]
        window = torch.cat([inputs[:, :, 1 - width :], latest.unsqueeze(2)], 2)  # [rows, channels, width]
        inputs.copy_(window)
        mixed = silu((window * self._filter.tensor).sum(2))
        queries_keys, values = mixed.split([2 * self._key_heads * self._key_size, self._parts[1]], -1)
        vectors = queries_keys.view(rows, 2, self._key_heads, self._key_size)
        # With this epsilon the mean of squares is the sum of squares plus 1e-6, up to the size.
        vectors = rms_norm(vectors, (self._key_size,), None, 1e-6 / self._key_size) * self._factors
        shared = self._value_heads // self._key_heads  # value heads that share a key head
        vectors = vectors.transpose(0, 1).unsqueeze(3).expand(-1, -1, -1, shared, -1)
        query, key = vectors.reshape(2, rows * self._value_heads, 1, self._key_size)
        decay = (self._rate.tensor * softplus(steps + self._rate_bias.tensor)).exp()
        state = state.view(-1, self._key_size, self._value_size)  # [rows * heads, size of keys, size of values]
        state.mul_(decay.view(-1, 1, 1))
        known = torch.bmm(key, state)
        change = (values.reshape(-1, 1, self._value_size) - known) * strengths.sigmoid().reshape(-1, 1, 1)
        state.addcmul_(key.transpose(1, 2), change)
        read = self._norm.unweighted(torch.bmm(query, state)).view(rows, -1)
        return read.to(products.dtype) * silu(gates)


class GatedMlp:
    """A product of two maps of the input, one of them after an activation."""

    def __init__(self, module: Any, columns: Callable[[], Tensor], build: Build) -> None:
        is_one_map = "gate_up_proj" in module._modules
        maps = [module.gate_up_proj] if is_one_map else [module.gate_proj, module.up_proj]
        self._activation = module._modules["activation_fn" if is_one_map else "act_fn"]
        self.input = Product(maps, build, columns)
        self.output = Product([module.down_proj], build)

    def __call__(self, products: Tensor, memory: Memory) -> Tensor:
        gates, states = products.chunk(2, -1)
        return self._activation(gates) * states


class ResidualBranch:
    """A residual branch, whose result is added to what it received.

    Args:
        before, after: the norms; after may be None.
        middle: given what is multiplied into the columns of its first product, returns what lies between the norms.
        factor: of the result.
    """

    def __init__(
        self,
        before: Any,
        after: Any,
        middle: Callable[[Callable[[], Tensor]], Attention | GatedDeltaRule | GatedMlp],
        factor: float,
        build: Build,
    ) -> None:
        self._before = Norm(before)
        self._after = None if after is None else Norm(after)
        self._middle = middle(self._before.weight)
        self._factor = factor
        self._dtype = build.dtype
        if self._after is not None:
            self._after_weight = Copy(self._after.weight, None, build.copies)

    def __call__(self, hidden: Tensor, memory: Memory) -> None:
        """Add the branch's result to `[rows, hidden size]`, in place."""
        states = self._before.unweighted(hidden).to(self._dtype)
        states = self._middle(self._middle.input(states), memory)
        if self._after is None:
            self._middle.output.add_to(hidden, states, self._factor)
        else:
            normed = self._after.unweighted(self._middle.output(states))
            hidden.addcmul_(normed, self._after_weight.tensor, value=self._factor)


def branches_of(layer: Any, number: int, kind: str | None, config: Any, build: Build) -> list[ResidualBranch]:
    """Return the two branches of a layer."""
    norms = layer._modules
    factor: float = getattr(config, "residual_multiplier", 1.0)

    def mixer(columns: Callable[[], Tensor]) -> Attention | GatedDeltaRule:
        if "linear_attn" in layer._modules:
            return GatedDeltaRule(layer.linear_attn, number, columns, build)
        return Attention(layer.self_attn, number, kind, columns, build)

    after_mlp = norms.get("post_feedforward_layernorm")
    after_attention = norms["post_attention_layernorm"]
    before_mlp = norms.get("pre_feedforward_layernorm")
    if after_mlp is None:  # then the name means that it comes after attention, but before the MLP
        before_mlp = after_attention
        after_attention = None
    return [
        ResidualBranch(norms["input_layernorm"], after_attention, mixer, factor, build),
        ResidualBranch(before_mlp, after_mlp, lambda columns: GatedMlp(layer.mlp, columns, build), factor, build),
    ]


def rotation_table(rotary: Any, like: Tensor, positions: Tensor, kind: str | None) -> Tensor:
    """Return cosine and signed sine of positions, `[positions, 2, rotated size]`, by a model's module.

    The rotated states are `states * cosine + states.roll(size / 2) * sine`. If `kind` is None, all layers rotate alike.
    """
    arguments = () if kind is None else (kind,)
    cos, sin = rotary(like, positions.unsqueeze(0), *arguments)  # [1, positions, rotated size]
    first, second = sin.squeeze(0).chunk(2, -1)
    return torch.stack([cos.squeeze(0), torch.cat([-first, second], -1)], 1)
