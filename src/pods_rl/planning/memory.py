"""Estimate the memory a recipe needs on one process, from the policy's config.json alone. No torch, no weights.

Two phases hold different things: generation the cache of keys and values; the update activations, gradients and the
tile of logits that TRL projects at a time (at most 4096 tokens x 32768 entries of the vocabulary, never all of
B x T x vocabulary). Both hold weights, adapter, reference and optimizer. Rows are assumed to have their maximum length.
Not included: Python, its libraries, the device's context, and memory that the allocator caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..engines.trl.batching import BatchPlan
from ..errors import UserError

GENERATION, UPDATE = "generation", "update"
TILE = (4096, 32768)  # TRL 1.16: tokens, and entries of the vocabulary, projected at once
_PROMPT = 256  # tokens, if neither max_prompt_length nor the task says
_PROMPTS = {"arithmetic": 24, "words": 190, "countdown": 40, "sorting": 40}  # generated, so of known length
_TARGETS = ("q_proj", "v_proj")  # PEFT's for Qwen2 and Llama, if lora_target_modules is not set
_STATES = {"sgd": 0.0, "adagrad": 4.0, "lion": 4.0, "rmsprop": 4.0, "adafactor": 0.1}  # bytes a trained parameter
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shape:
    """The sizes of a dense decoder: hidden_size, intermediate_size, ... of config.json."""

    vocabulary: int
    hidden: int
    wide: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    tied: bool
    dtype: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Read a config.json; raise UserError if it does not describe a dense decoder."""
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        missing = [name for name in names if not isinstance(config.get(name), int)]
        if missing or "num_experts" in config or "num_local_experts" in config:
            why = f"its config.json has no {', '.join(missing)}" if missing else "it is a mixture of experts"
            raise UserError(f"No estimate of memory for this policy: {why}; dense decoders only.")
        vocabulary, hidden, wide, layers, heads = (config[name] for name in names)
        return cls(
            vocabulary, hidden, wide, layers, heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head=config.get("head_dim") or hidden // heads,
            tied=bool(config.get("tie_word_embeddings", False)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )  # fmt: skip

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each linear layer in a block."""
        h, q, kv = self.hidden, self.heads * self.head, self.kv_heads * self.head
        return {
            "q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h),
            "gate_proj": (h, self.wide), "up_proj": (h, self.wide), "down_proj": (self.wide, h),
        }  # fmt: skip

    @property
    def in_blocks(self) -> int:
        """Parameters of the linear layers, the ones that quantisation shrinks."""
        return self.layers * sum(a * b for a, b in self.linears.values())

    @property
    def embeddings(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    def adapter(self, rank: int, targets: Any) -> int:
        """Parameters of a LoRA adapter."""
        names = [targets] if isinstance(targets, str) else list(targets or _TARGETS)
        chosen = self.linears if "all-linear" in names else {k: v for k, v in self.linears.items() if k in names}
        return self.layers * rank * sum(a + b for a, b in chosen.values())


@dataclass(frozen=True)
class Part:
    """The bytes of one part, in each phase."""

    name: str
    generation: float = 0.0
    update: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """The peak memory of a process in the two phases, in bytes, for rows of maximum length."""

    parts: tuple[Part, ...]
    prompt: int

    def total(self, phase: str) -> float:
        return sum(getattr(part, phase) for part in self.parts)

    @property
    def phase(self) -> str:
        """The phase that peaks."""
        return max((UPDATE, GENERATION), key=self.total)

    @property
    def peak(self) -> float:
        return self.total(self.phase)


@dataclass(frozen=True)
class Change:
    """A change of settings that needs less memory, as recipe keys, and the bytes that a process would then hold."""

    settings: str
    left: float


def advice(
    values: Mapping[str, Any], shape: Shape, plan: BatchPlan, phase: str, *, bf16: bool, on_cpu: bool
) -> list[Change]:
    """Return the two changes that lower the peak of a phase most, best first; fewer if nothing lowers it."""
    now = estimate(values, shape, plan, bf16=bf16, on_cpu=on_cpu).total(phase)
    found = [
        Change(words, estimate({**values, **changed}, shape, other, bf16=bf16, on_cpu=on_cpu).total(phase))
        for words, changed, other in _changes(values, plan)
    ]
    return sorted((one for one in found if one.left < 0.99 * now), key=lambda one: one.left)[:2]


def estimate(values: Mapping[str, Any], shape: Shape, plan: BatchPlan, *, bf16: bool, on_cpu: bool) -> Estimate:
    """Return the estimated memory of a recipe on one process.

    Args:
        values: the resolved settings, by TRL's names and ours; a missing one is off.
        plan: the batch plan; weights count as whole on each process, not sharded.
        bf16: matrices are multiplied in 16 bits.
        on_cpu: TRL folds tiles of logits in several steps on a CPU, and in one kernel on a GPU.
    """
    weight = _BYTES.get(_dtype(values, shape), 4)
    compute = 2 if bf16 else weight
    lora = bool(values.get("use_peft"))
    rank, targets = values.get("lora_r") or 16, values.get("lora_target_modules")
    adapter = shape.adapter(rank, targets) if lora else 0
    full = shape.in_blocks + shape.embeddings
    trained = adapter or full
    each = 4 if lora else weight  # PEFT keeps its adapter in float32
    blocks = 0.5 if values.get("load_in_4bit") else 1 if values.get("load_in_8bit") else weight
    weights = shape.in_blocks * blocks + shape.embeddings * weight
    static = {
        "weights": weights,
        "LoRA adapter": adapter * 4,
        "reference": weights if (values.get("beta") or 0) > 0 and not lora else 0,
        "optimizer": trained * _state_bytes(str(values.get("optim")), each),
    }
    prompt = values.get("max_prompt_length") or _PROMPTS.get(str(values.get("task")), _PROMPT)
    length = prompt + values["max_completion_length"]
    rows = min(plan.shares.most, plan.rollout_batch_size or plan.shares.most)
    tokens = plan.micro_batch_rows * length
    return Estimate(
        (
            *(Part(name, size, size) for name, size in static.items()),
            Part("gradients", update=trained * each),
            *_generating(shape, rows, prompt, length, compute, plain=not values.get("use_vllm")),
            Part("activations", update=_activations(values, shape, tokens, compute)),
            Part("logits", update=_logits(shape, tokens, compute, on_cpu=on_cpu, trained=not lora)),
        ),
        prompt,
    )


def _dtype(values: Mapping[str, Any], shape: Shape) -> str:
    """The precision of the weights; TRL's default is float32."""
    wanted = values.get("dtype")
    return shape.dtype if wanted == "auto" else str(wanted or "float32").removeprefix("torch.")


def _state_bytes(optimizer: str, each: int) -> float:
    """Bytes of state per trained parameter: two moments, less for some optimizers."""
    if "8bit" in optimizer:
        return 1.0 if "lion" in optimizer else 2.0
    return next((size for name, size in _STATES.items() if optimizer.startswith(name)), 2.0 * each)


def _generating(shape: Shape, rows: int, prompt: int, length: int, compute: int, *, plain: bool) -> tuple[Part, ...]:
    """Cache and activations at the peak of generation: the prompts' pass through a block, or the last token's sampling.

    vLLM takes a fixed share of the device instead (`vllm_gpu_memory_utilization`).
    """
    if not plain:
        return ()
    token = 2 * rows * shape.kv_heads * shape.head * compute  # of a layer
    attention = 2 * shape.heads * shape.head
    block = rows * prompt * (2 * shape.hidden + max(3 * shape.wide, attention + 3 * shape.hidden)) * compute
    first = (token * prompt * shape.layers, block)
    # To add a token, a layer's keys are copied, then its values; logits are copied to float32 three times over.
    last = (token * length * (shape.layers + 0.5), rows * shape.vocabulary * (compute + 4 * 4))
    cache, passes = max(first, last, key=sum)
    return Part("KV cache", generation=cache), Part("sampling", generation=passes)


def _activations(values: Mapping[str, Any], shape: Shape, tokens: int, compute: int) -> float:
    """Activations kept for the backward pass, and the memory of that pass in one block."""
    attention = shape.heads * shape.head
    kept = (6 * shape.hidden + 4 * attention + 4 * shape.wide) * compute
    working = 3 * shape.wide * compute
    checkpointed = bool(values.get("gradient_checkpointing"))
    blocks = shape.layers * shape.hidden * compute + kept if checkpointed else shape.layers * kept
    return tokens * (blocks + working)


def _logits(shape: Shape, tokens: int, compute: int, *, on_cpu: bool, trained: bool) -> float:
    """A tile of logits; in torch's own operations seven float32 copies of it; gradients in float32."""
    rows, columns = min(tokens, TILE[0]), min(shape.vocabulary, TILE[1])
    tile = rows * columns * (compute + 7 * 4) if on_cpu else rows * TILE[1] * compute
    head = shape.vocabulary * shape.hidden * 4 if trained else 0
    return tile + head + 2 * tokens * shape.hidden * 4


def _changes(values: Mapping[str, Any], plan: BatchPlan) -> Iterator[tuple[str, dict[str, Any], BatchPlan]]:
    """Yield settings that need less memory: in words, as values, and the resulting plan."""
    rows = min(plan.shares.most, plan.rollout_batch_size or plan.shares.most)
    if rows > 1 and not values.get("use_vllm"):
        yield f"rollout_batch_size: {rows // 2}", {}, replace(plan, rollout_batch_size=rows // 2)
    if plan.micro_batch_rows % 2 == 0:
        half, twice = plan.micro_batch_rows // 2, plan.micro_batches * 2
        words = f"per_device_train_batch_size: {half} with gradient_accumulation_steps: {twice}"
        steps = plan.steps_per_generation * 2
        yield words, {}, replace(plan, micro_batch_rows=half, micro_batches=twice, steps_per_generation=steps)
    if plan.num_rollouts // 2 >= plan.num_generations and not plan.rollout_batch_size:
        yield f"num_rollouts: {plan.num_rollouts // 2}", {}, replace(plan, num_rollouts=plan.num_rollouts // 2)
    length = values["max_completion_length"]
    yield f"max_completion_length: {length // 2}", {"max_completion_length": length // 2}, plan
    if not values.get("gradient_checkpointing"):
        yield "gradient_checkpointing: true", {"gradient_checkpointing": True}, plan
