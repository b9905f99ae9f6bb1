"""Tiny random models of the families that people train, and how a step of PODSTrainer computes each.

python -m tests.engines.families    # write the table of docs/trl.md
"""

import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import LoraConfig
from tools.pretrain import build_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, set_seed
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from pods_rl import PODSConfig, PODSTrainer
from pods_rl.prefix_tree import decoding
from tests.engines.conftest import Gradients, around, update_of

try:
    from tests.engines.vision import FAMILIES as VISION
    from tests.engines.vision import make_vlm, picture
except ImportError:  # older transformers lack its image processors
    VISION = {}

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trl.md"
BEGIN = "<!-- families: written by python -m tests.engines.families -->\n"
END = "<!-- end of families -->\n"

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "num_key_value_heads": 4, "first_k_dense_replace": 1,
}  # fmt: skip

# What these classes of `vision.py` are called; other classes are called as there.
CLASSES = {name: name for name in VISION} | {
    "Qwen2VL": "Qwen2-VL", "Qwen2_5_VL": "Qwen2.5-VL", "Qwen3_5": "Qwen3.5", "Qwen3_5Moe": "Qwen3.5-MoE",
    "Gemma3": "Gemma 3", "Gemma4": "Gemma 4", "LlavaNext": "LLaVA-NeXT", "Idefics3": "Idefics 3",
}  # fmt: skip

DENSE = "attention"
EXPERT = "experts, with TRL's defaults"
HYBRID = "recurrent layers"
ADAPTER = "LoRA with TRL's default dropout"
IMAGE_CLASS = "`...ForConditionalGeneration`, on text"
IMAGES = "`...ForConditionalGeneration`, on images"


@dataclass(frozen=True)
class Family:
    """A family, and what makes its tiny model.

    Args:
        kind: its row in the table.
        model_type: of transformers, or the name of a class with images in `vision.py`.
        config: what differs from `SIZES`.
    """

    kind: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "Llama": Family(DENSE, "llama"),
    "Mistral": Family(DENSE, "mistral", {"sliding_window": 6}),
    "Qwen2": Family(DENSE, "qwen2"),
    "Qwen3": Family(DENSE, "qwen3"),
    "SmolLM3": Family(DENSE, "smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "Phi-3": Family(DENSE, "phi3"),
    "OLMo 2": Family(DENSE, "olmo2"),
    "Granite": Family(DENSE, "granite"),
    "Gemma 2": Family(
        DENSE,
        "gemma2",
        {
            "sliding_window": 6, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.5,
            "attn_implementation": "eager",  # older sdpa has no softcap
        },
    ),
    "Gemma 3": Family(DENSE, "gemma3_text", SLIDING),
    "GLM-4": Family(DENSE, "glm4"),
    "Mixtral": Family(EXPERT, "mixtral", LOCAL_EXPERTS),
    "Qwen3-MoE": Family(EXPERT, "qwen3_moe", EXPERTS),
    "gpt-oss": Family(EXPERT, "gpt_oss", LOCAL_EXPERTS | SLIDING),
    "DeepSeek-V3": Family(EXPERT, "deepseek_v3", LATENT),
    "Qwen3.5": Family(HYBRID, "qwen3_5_text", LINEAR),
    "Qwen3.5-MoE": Family(HYBRID, "qwen3_5_moe_text", LINEAR | EXPERTS),
    "Qwen3-Next": Family(HYBRID, "qwen3_next", LINEAR | EXPERTS | {"decoder_sparse_step": 1}),
    "OLMo-Hybrid": Family(HYBRID, "olmo_hybrid", LINEAR),
    "Kimi Linear": Family(
        HYBRID, "kimi_linear",
        LATENT | {"linear_head_dim": 8, "linear_num_heads": 4, "layer_types": LINEAR["layer_types"]},
    ),
    "LFM2": Family(
        HYBRID, "lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3}
    ),
    "Qwen2 on an adapter": Family(ADAPTER, "qwen2"),
    **{f"{CLASSES[name]} on text": Family(IMAGE_CLASS, name) for name in VISION},
    **{f"{CLASSES[name]} on images": Family(IMAGES, name) for name in VISION},
}  # fmt: skip


class Step(NamedTuple):
    """One step of training: its gradient, and why something was computed by rows.

    Args:
        gradient: by parameter, as the optimizer gets it.
        generation: why the rollouts were generated row by row; None if over trees.
        update: why the update computed rows; None if over trees.
        rollouts: prompt and completion tokens of each rollout, as a rollout function returns them.
    """

    gradient: dict[str, torch.Tensor]
    generation: str | None
    update: str | None
    rollouts: dict[str, list[Any]]


def is_installed(family: Family) -> bool:
    """Return whether the installed transformers has the family."""
    return family.model_type in VISION or family.model_type in CONFIG_MAPPING_NAMES


def build(family: Family) -> tuple[Any, Any]:
    """Return a tiny random model of a family, and its tokenizer or processor."""
    if family.model_type in VISION:
        return make_vlm(family.model_type)
    tokenizer = build_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = AutoConfig.for_model(family.model_type, **SIZES | ids | {"vocab_size": len(tokenizer)} | family.config)
    set_seed(7)
    return AutoModelForCausalLM.from_config(config).float(), tokenizer


def _prompts(family: Family) -> Dataset:
    sums = [f"{number}+{number}=" for number in range(8, 16)]
    if family.model_type not in VISION:
        return Dataset.from_dict({"prompt": sums})
    rows: dict[str, list[Any]] = {"prompt": [[{"role": "user", "content": text}] for text in sums]}
    if family.kind == IMAGES:
        rows["images"] = [[picture(16, 16, seed)] for seed in range(len(sums))]
    return Dataset.from_dict(rows)


def _reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 5) for ids in completion_ids]


def train_step(family: Family, *, prefix_tree: bool, rollouts: dict[str, list[Any]] | None = None) -> Step:
    """Train one step; `rollouts` replace those of the policy."""
    model, processing_class = build(family)
    lora = LoraConfig(r=4, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    config = PODSConfig(
        tempfile.mkdtemp(), num_generations=4, num_rollouts=8, per_device_train_batch_size=8, max_completion_length=12,
        max_steps=1, temperature=0.5, seed=3, prefix_tree=prefix_tree, use_cpu=True, bf16=False, report_to="none",
        gradient_checkpointing=False, disable_tqdm=True, logging_steps=1, save_strategy="no",
    )  # fmt: skip
    trainer = PODSTrainer(
        model=model, reward_funcs=_reward, args=config, train_dataset=_prompts(family),
        processing_class=processing_class, peft_config=lora if family.kind == ADAPTER else None,
        rollout_func=None if rollouts is None else lambda prompts, trainer: rollouts,
    )  # fmt: skip
    drawn: dict[str, list[Any]] = {}

    @around(trainer, "_generate_single_turn")
    def keep(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = generate(*args, **kwargs)
        drawn["prompt_ids"] = [list(ids) for ids in args[0]]
        drawn["completion_ids"] = [list(ids) for ids in result[0]]
        drawn["logprobs"] = [[0.0] * len(ids) for ids in result[0]]
        return result

    watch = Gradients(trainer)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    decoding._logged_paths.clear()
    decoding.logger.addHandler(handler)
    try:
        trainer.train()
    finally:
        decoding.logger.removeHandler(handler)
    update = update_of(trainer).attention
    return Step(
        gradient=watch.steps[0],
        generation=messages[0] if messages else None,
        update=None if update.startswith("prefix trees") else update,
        rollouts=drawn,
    )


# -- the table -----------------------------------------------------------------------------------------------------


def table(steps: dict[str, Step]) -> str:
    """Return the Markdown table of families by generation and update."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, step in steps.items():
        family = FAMILIES[name]
        generation = "trees" if step.generation is None else "rows"
        update = "trees" if step.update is None else "rows"
        rows.setdefault((family.kind, generation, update), []).append(name.partition(" on ")[0])
    lines = ["| model | families | generation | update |", "|---|---|---|---|"]
    for (kind, generation, update), names in rows.items():
        lines.append(f"| {kind} | {', '.join(names)} | {generation} | {update} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, text: str) -> str:
    """Return a page with its table replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    steps = {name: train_step(family, prefix_tree=True) for name, family in FAMILIES.items() if is_installed(family)}
    PAGE.write_text(with_table(PAGE.read_text(), table(steps)))


if __name__ == "__main__":
    main()
