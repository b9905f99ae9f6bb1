"""Compare what runs on a device with slower references: the first cells of `gpu_day.py`.

1. `attention`: the attention of a tree against float64 with a dense mask, forward and backward.
2. `tree`: log-probabilities and gradients of a tree against those of its rows, in three precisions.
3. `generation`: greedy completions over the tree against those of `generate`.
4. `families`: 2 and 3 again with tiny random models of what people train: windows, sinks, softcaps, experts and
   recurrent layers.

Each check is an error and the limit that it must not exceed. 16 bits round to about 0.004.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import add_fused_lm_head

from gpu_device import Device
from gpu_generation import OURS, WAYS
from pods_rl.policies import tiny_policy_path
from pods_rl.prefix_tree.attention import TreeAttention
from pods_rl.prefix_tree.decoding import complete_prompts, generation_path
from pods_rl.prefix_tree.packing import TreePass, probe_trees
from pods_rl.prefix_tree.tree import Branch, prefix_tree
from pods_rl.tasks import load_task

PROMPT = 40  # tokens of the rows' prompts
COMPLETION = 32
ROWS = 8
# Query heads, heads of keys and values, their size; the first are those of a policy of 3 billion parameters.
HEADS = ((16, 2, 128), (4, 4, 64), (14, 2, 64), (8, 1, 96))
WINDOWS = (0, 20)
FORWARD_LIMITS = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 1e-4}
GRADIENT_LIMITS = {torch.bfloat16: 0.02, torch.float16: 0.004, torch.float32: 1e-4}
TIE = 1e-3  # a difference of two logits that rounding may turn around
Check = dict[str, Any]


def check(name: str, error: float, limit: float) -> Check:
    """Return an error with its limit and whether it is within; NaN is not."""
    return {"check": name, "error": error, "limit": limit, "ok": error <= limit}


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference as a share of the expected norm."""
    expected = expected.double().cpu()
    difference = found.detach().double().cpu() - expected.detach()
    return (difference.norm() / expected.norm()).item()


def ragged_rows() -> tuple[Tensor, Tensor]:
    """Return tokens and mask `[ROWS, PROMPT + COMPLETION]` of one prompt; every second row shares five tokens more."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 500, (ROWS, PROMPT + COMPLETION), generator=generator)
    ids[:, :PROMPT] = ids[0, :PROMPT]
    ids[1::2, PROMPT : PROMPT + 5] = ids[0, PROMPT : PROMPT + 5]
    mask = torch.ones_like(ids)
    for row in range(ROWS):
        missing = 3 * (row % 5)
        mask[row, PROMPT + COMPLETION - missing :] = 0
    return ids, mask


# ------------------------------------------------------------------------------------------- 1. the attention


def nodes_seen(branches: list[Branch], count: int, window: int) -> Tensor:
    """Return which nodes each node attends to, `[count, count]`."""
    seen = torch.zeros(count, count, dtype=torch.bool)
    for branch in branches:
        path = torch.from_numpy(branch.path)
        for depth, node in enumerate(path.tolist()):
            first = max(0, depth + 1 - window) if window else 0
            seen[node, path[first : depth + 1]] = True
    return seen


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Return the attention `[1, L, H, D]` under a mask."""
    shared_by = q.size(1) // k.size(1)
    scores = q @ k.repeat_interleave(shared_by, 1).transpose(2, 3) * q.size(3) ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ v.repeat_interleave(shared_by, 1)).transpose(1, 2)


def attention_cases() -> list[tuple[torch.dtype, tuple[int, int, int], int]]:
    """Return data types, heads and windows."""
    cases = list(product([torch.bfloat16], HEADS, WINDOWS))
    cases += product([torch.float16, torch.float32], HEADS[:1], WINDOWS)
    return cases


def check_attention(device: Device) -> dict[str, Any]:
    ids, mask = ragged_rows()
    tree = prefix_tree(ids.masked_fill(mask == 0, -1).numpy(), PROMPT)
    count = len(tree.tokens)
    checks: list[Check] = []
    kernels: set[str] = set()
    for dtype, (query_heads, key_heads, size), window in attention_cases():
        generator = torch.Generator().manual_seed(0)
        inputs = []
        for heads in (query_heads, key_heads, key_heads):
            values = torch.randn(1, heads, count, size, generator=generator).to(dtype)
            inputs.append(values.to(device.place).requires_grad_())
        upstream = torch.randn(1, count, query_heads, size, generator=generator).to(dtype)
        attention = TreeAttention(tree.branches, device.place)
        output = attention(*inputs, scale=None, window=window)
        output.backward(upstream.to(device.place))
        exact_inputs = [values.detach().double().cpu().requires_grad_() for values in inputs]
        expected = dense(*exact_inputs, nodes_seen(tree.branches, count, window))
        expected.backward(upstream.double())
        (kernel,) = attention.kernels.values()
        kernels.add(f"{dtype}: {kernel}")
        name = f"{dtype}, heads {query_heads}/{key_heads} of {size}, window {window}"
        checks.append(check(f"{name}: forward", distance(output, expected), FORWARD_LIMITS[dtype]))
        for letter, values, exact in zip("qkv", inputs, exact_inputs, strict=True):
            assert values.grad is not None
            assert exact.grad is not None
            checks.append(check(f"{name}: d{letter}", distance(values.grad, exact.grad), GRADIENT_LIMITS[dtype]))
    return {"checks": checks, "attention": "; ".join(sorted(kernels))}


# ------------------------------------------------------------------------------------------- 2. a tree and its rows


PRECISIONS = {
    "bf16 weights": (torch.bfloat16, False),
    "float32 weights under bf16 autocast": (torch.float32, True),
    "float32": (torch.float32, False),
}


SMALL = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip


def small_model(dtype: torch.dtype, device: Device, model_type: str = "qwen2", **differs: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL | differs)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    model.gradient_checkpointing_enable()
    return model.to(device.place).train()


def scores_and_gradient(model: Any, call: Callable[..., Any], device: Device) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the completions' tokens, and the gradient of all weights."""
    ids, mask = ragged_rows()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :PROMPT] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    batch = {name: values.to(device.place) for name, values in batch.items()}
    model.zero_grad(set_to_none=True)
    log_probs = call(**batch, fused_lm_head=True).log_probs[:, -COMPLETION:]
    weights = torch.linspace(0.5, 1.5, COMPLETION, device=device.place) * batch["attention_mask"][:, PROMPT:]
    (log_probs * weights).sum().backward()
    gradient = torch.cat([weight.grad.float().flatten() for weight in model.parameters()])
    return log_probs.detach().cpu()[mask[:, PROMPT:] == 1], gradient


def check_tree(device: Device) -> dict[str, Any]:
    checks: list[Check] = []
    attention: dict[str, str] = {}
    for name, (dtype, autocast) in PRECISIONS.items():
        found, attention[name] = tree_against_rows(small_model(dtype, device), name, device, autocast=autocast)
        checks += found
    return {"checks": checks, **described(attention)}


def described(attention: dict[str, str]) -> dict[str, Any]:
    """Return what computed each model, and whether all were trees."""
    text = "; ".join(f"{name}: {probe}" for name, probe in attention.items())
    return {"attention": text, "trees": all(probe.startswith("prefix trees") for probe in attention.values())}


def tree_against_rows(model: Any, name: str, device: Device, *, autocast: bool = False) -> tuple[list[Check], str]:
    """Return the checks of a tree's log-probabilities and gradient, and what computed its attention."""
    exact = model.dtype == torch.float32 and not autocast
    with torch.autocast(device.place.type, torch.bfloat16, enabled=autocast):
        probe = probe_trees(model, model, tolerance=1e-3 if exact else 0.1)
        if probe.why_rows is not None:
            return [check(f"{name}: {probe}", float("nan"), 0.0)], str(probe)
        tree = scores_and_gradient(model, TreePass(model, COMPLETION, tree=True), device)
        rows = scores_and_gradient(model, model, device)
    checks = [
        check(f"{name}: log-probabilities", distance(tree[0], rows[0]), 1e-4 if exact else 0.02),
        check(f"{name}: gradient", distance(tree[1], rows[1]), 1e-3 if exact else 0.05),
    ]
    return checks, str(probe)


# ------------------------------------------------------------------------------------------- 3. generation


def first_differences(found: list[list[int]], expected: list[list[int]]) -> Iterator[tuple[int, int]]:
    """Yield row and place of the first token that differs, of each row that differs."""
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for place, tokens in enumerate(zip(ours, theirs, strict=True)):
            if tokens[0] != tokens[1]:
                yield row, place
                break


def check_generation(device: Device) -> dict[str, Any]:
    """Compare in float32 with the shipped policy, where few tokens are close to equal."""
    path = tiny_policy_path("tiny-words")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device.place).eval()
    task = load_task({"task": "words", "task_difficulty": "mixed", "task_train_size": 8, "task_test_size": 1})
    prompts = []
    for row in task.train:
        prompts += [tokenizer(row["prompt"])["input_ids"]] * 2
    checks = [same_completions(model, prompts, tokenizer.eos_token_id, tokenizer.pad_token_id, "words", device)]
    checks += same_draws(model, prompts, "words")
    adapted = get_peft_model(small_model(torch.float32, device), LoraConfig(init_lora_weights=False))
    checks += same_draws(adapted.eval(), ragged_rows()[0][:, :PROMPT].tolist(), "LoRA")
    return {"checks": checks}


@torch.no_grad()
def same_draws(model: Any, prompts: list[list[int]], name: str) -> list[Check]:
    """Return the checks that each of our ways to generate draws the tokens that the model's modules draw."""
    policy = getattr(model, "get_base_model", lambda: model)()
    expected = WAYS[OURS[0]](model, prompts, COMPLETION)
    checks = []
    for way in OURS[1:]:
        differing = (WAYS[way](model, prompts, COMPLETION) != expected).any(dim=1).sum().item()
        text = f"{name}, {way}: rows with other tokens, of {len(prompts)}; {generation_path(policy)}"
        checks.append(check(text, differing, 0.0))
    return checks


def same_completions(model: Any, prompts: list[list[int]], end: int, pad: int, name: str, device: Device) -> Check:
    """Return the check that the tree's greedy completions have the tokens of `generate`, but for tokens that tie."""
    length = 40
    with torch.no_grad():
        ours = complete_prompts(model, prompts, None, length=length, ends=[end], pad=pad)
        theirs = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=device.place)
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length, pad_token_id=pad,
                eos_token_id=end,
            )  # fmt: skip
            completion = output[0, ids.size(1) :].tolist()
            theirs.append(completion + [pad] * (ours.size(1) - len(completion)))
        differing = 0
        wrong = 0
        for row, place in first_differences(ours.tolist(), theirs):
            differing += 1
            prefix = torch.tensor([prompts[row] + theirs[row][:place]], device=device.place)
            logits = model(prefix).logits[0, -1]
            gap = logits[theirs[row][place]] - logits[ours[row, place]]
            if gap.abs().item() > TIE:
                wrong += 1
    text = f"{name}: greedy completions that differ, of {len(prompts)}; {differing} with tokens that are close to equal"
    return check(text, float(wrong), 0.0)


# ------------------------------------------------------------------------------------------- 4. families

SLIDING = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LINEAR = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"model_type": "qwen3"},
    "Gemma 2": {"model_type": "gemma2", "query_pre_attn_scalar": 16, "attn_implementation": "eager", **SLIDING},
    "Gemma 3": {"model_type": "gemma3_text", **SLIDING},
    "gpt-oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, **SLIDING},
    "Qwen3-MoE": {"model_type": "qwen3_moe", **EXPERTS},
    "Qwen3.5": {"model_type": "qwen3_5_text", **LINEAR},
    "LFM2": {"model_type": "lfm2", "layer_types": ["conv", "conv", "full_attention"], "conv_L_cache": 3},
}


def rounding_check(model: Any, exact: Any, name: str, device: Device) -> Check:
    """Return the check that a tree in 16 bits is as close to float32 as its rows in 16 bits are.

    Tree and rows are not compared directly, because rounding can send a token to other experts.
    """
    expected = scores_and_gradient(exact, exact, device)[1]
    rows = scores_and_gradient(model, model, device)[1]
    tree = scores_and_gradient(model, TreePass(model, COMPLETION, tree=True), device)[1]
    return check(f"{name}: gradient, from float32", distance(tree, expected), 1.5 * distance(rows, expected))


def check_families(device: Device) -> dict[str, Any]:
    """Check each family in float32 and bf16, and its completions; one that fails does not end the others."""
    ids, _ = ragged_rows()
    prompts = ids[:, : PROMPT + 5].tolist()
    checks: list[Check] = []
    attention: dict[str, str] = {}
    for family, differs in FAMILIES.items():
        model_of = partial(small_model, device=device, initializer_range=0.1, **differs)  # so that tokens matter
        try:
            model = model_of(torch.bfloat16)
            probe = probe_trees(model, model, tolerance=0.1)
            attention[family] = str(probe)
            if probe.why_rows is not None:  # the result has the reason
                continue
            exact = model_of(torch.float32)
            found, _ = tree_against_rows(exact, f"{family}, float32", device)
            checks += found
            exact.load_state_dict(model.state_dict())
            checks.append(rounding_check(model, exact, f"{family}, bfloat16", device))
            checks.append(same_completions(exact.eval(), prompts, 1, 0, family, device))
        except Exception as error:
            checks.append(check(f"{family}: {type(error).__name__}: {error}"[:300], float("nan"), 0.0))
    return {"checks": checks, **described(attention)}


CHECKS: dict[str, Callable[[Device], dict[str, Any]]] = {
    "attention": check_attention,
    "tree": check_tree,
    "generation": check_generation,
    "families": check_families,
}


def run_checks(name: str, device: Device) -> dict[str, Any]:
    """Run one of `CHECKS`; `ok` says whether all errors are within their limits."""
    result = CHECKS[name](device)
    return {"ok": all(each["ok"] for each in result["checks"]), **result}
