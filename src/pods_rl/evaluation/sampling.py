"""Completions of a policy: the settings, what a backend offers, and the backends, `generate` and vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import torch
from peft import LoraConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError
from ..loading.folders import Policy
from ..loading.prompts import template_options
from ..prefix_tree.decoding import RowDraws, complete_prompts
from ..recipe import Recipe

RowsDone = Callable[[int, int], None]  # called with the number of finished rows and of all rows of this process


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. Draws are from all tokens, without top-k, top-p or penalties.

    Args:
        temperature: 0 means greedy.
        max_completion_length: tokens after which a completion is truncated.
        batch_size: rows that `generate` completes at once.
        seed: the seed of all draws, which do not depend on batches or processes.
        chat_template_kwargs: more arguments of the chat template.
        tool_turns: the most turns of a conversation whose tool calls are answered. If None, no limit.
        tool_timeout: seconds of one tool call. If None, no limit.
    """

    temperature: float = 1.0
    max_completion_length: int = 256
    batch_size: int = 256
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_turns: int | None = None
    tool_timeout: float | None = None


def sampling_of(recipe: Recipe) -> Sampling:
    """Return a recipe's settings of evaluations."""
    settings = recipe.run_settings()
    return Sampling(
        temperature=settings["eval_temperature"],
        max_completion_length=recipe.values["max_completion_length"],
        batch_size=settings["eval_batch_size"],
        seed=recipe.values["seed"],
        chat_template_kwargs=template_options(recipe),
        tool_turns=recipe.values.get("max_tool_calling_iterations"),
        tool_timeout=recipe.values["tool_timeout"],
    )


@dataclass(frozen=True)
class Completion:
    """One sampled completion: its text without special tokens, its length, whether it has an end token, its tokens."""

    text: str
    tokens: int
    ended: bool
    ids: Sequence[int] = ()


class Sampler(Protocol):
    """A policy that completes prompts with the library that `backend` names, in `dtype`."""

    backend: str
    dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase

    def sample(
        self, prompts_ids: Sequence[Sequence[int]], rows: Sequence[int], sampling: Sampling, done: RowsDone
    ) -> list[Completion]:
        """Return a completion of each prompt (token ids), in order; `rows` seed their draws."""


class GenerateSampler:
    """Completes prompts with `model.generate`.

    It restores the random state and the mode of the model, so an evaluation never changes a run. Each row has its own
    draws, so its completion is the same in every batch, up to rounding.

    Args:
        model: a causal language model, on any device.
        tokenizer: of that model.
    """

    backend = "generate"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.dtype = model.dtype
        self.tokenizer = tokenizer
        model_ends = model.generation_config.eos_token_id
        if not isinstance(model_ends, list):
            model_ends = [model_ends]
        self._ends = {*model_ends, tokenizer.eos_token_id} - {None}
        self._pad = min(self._ends, default=0) if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    @torch.no_grad()
    def sample(
        self, prompts_ids: Sequence[Sequence[int]], rows: Sequence[int], sampling: Sampling, done: RowsDone
    ) -> list[Completion]:
        """Complete each prompt, in order (see `Sampler`)."""
        # Longest first: an out-of-memory error shows at once, and the estimated time left does not grow.
        order = sorted(range(len(rows)), key=lambda i: -len(prompts_ids[i]))
        completions: dict[int, Completion] = {}
        was_training = self.model.training
        try:
            self.model.eval()
            for start in range(0, len(order), sampling.batch_size):
                batch = order[start : start + sampling.batch_size]
                keys = [(sampling.seed, rows[i]) for i in batch]
                completed = self._complete([prompts_ids[i] for i in batch], keys, sampling)
                for i, completion in zip(batch, completed, strict=True):
                    completions[i] = completion
                done(start + len(batch), len(order))
        finally:
            self.model.train(was_training)
        return [completions[i] for i in range(len(rows))]

    def _complete(
        self, prompts_ids: Sequence[Sequence[int]], keys: Sequence[tuple[int, int]], sampling: Sampling
    ) -> list[Completion]:
        """Complete one batch, the longest prompt first."""
        length = sampling.max_completion_length
        draws = None
        if sampling.temperature:
            draws = RowDraws(keys, length, self.model.device, prompt_width=len(prompts_ids[0]))
        completions_ids = complete_prompts(
            self.model,
            prompts_ids,
            draws,
            length=length,
            ends=sorted(self._ends),
            pad=self._pad,
            temperature=sampling.temperature,
        )
        completions = []
        for ids in completions_ids.tolist():
            # A completion ends with its first end token; padding follows.
            end = next((count for count, token in enumerate(ids, start=1) if token in self._ends), None)
            kept = ids[:end]
            text = self.tokenizer.decode(kept, skip_special_tokens=True)
            completions.append(Completion(text, len(kept), end is not None, kept))
        return completions


class VLLMSampler:
    """Completes prompts with a vLLM engine (0.22 to 0.32).

    Each row is a request of token ids with its own seed. Weights are read as safetensors, and code in the model's
    repository is not run. `vllm_gpu_memory_utilization` is 0.9 by default: nothing else is on the device.

    Raises:
        UserError: vLLM is not installed, or refuses the policy or the settings.
    """

    backend = "vllm"

    def __init__(self, policy: Policy, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        quantised = recipe.values.get("load_in_4bit")
        lora: dict[str, Any] = {}
        self._lora: Any = None
        try:
            self._vllm: Any = import_module("vllm")
            if policy.adapter is not None:
                adapter = LoraConfig.from_pretrained(str(policy.adapter))
                rank = max(adapter.r, *adapter.rank_pattern.values(), 8)
                power_of_two = 1 << (rank - 1).bit_length()  # vLLM takes powers of two from 8 on
                lora = {"enable_lora": True, "max_lora_rank": power_of_two}
                request: Any = import_module("vllm.lora.request")
                self._lora = request.LoRARequest("adapter", 1, str(policy.adapter))
            self._llm = self._vllm.LLM(
                model=str(policy.model),
                tokenizer=str(policy.tokenizer),
                dtype=recipe.given.get("dtype") or "auto",
                seed=recipe.values["seed"],
                tensor_parallel_size=recipe.given.get("vllm_tensor_parallel_size", 1),
                gpu_memory_utilization=recipe.given.get("vllm_gpu_memory_utilization", 0.9),
                max_model_len=recipe.given.get("vllm_max_model_length"),
                load_format="bitsandbytes" if quantised else "safetensors",
                quantization="bitsandbytes" if quantised else None,
                trust_remote_code=False,
                **lora,
            )
        except Exception as error:  # vLLM and what it loads may raise anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            raise UserError(f"vLLM cannot be used: {reason}. Use --backend generate, or change vllm_* keys.") from error
        self.dtype = self._llm.llm_engine.model_config.dtype  # `auto` is bf16 or float16 for float32 weights

    def sample(
        self, prompts_ids: Sequence[Sequence[int]], rows: Sequence[int], sampling: Sampling, done: RowsDone
    ) -> list[Completion]:
        """Complete each prompt, in order (see `Sampler`); all rows are one batch, which vLLM schedules."""
        params = [
            self._vllm.SamplingParams(
                n=1,
                temperature=sampling.temperature,
                top_p=1.0,
                top_k=0,
                max_tokens=sampling.max_completion_length,
                seed=(1_000_003 * sampling.seed + row) % 2**31,  # the rows of the next evaluation have other seeds
            )
            for row in rows
        ]
        requests = [{"prompt_token_ids": list(ids)} for ids in prompts_ids]
        outputs = self._llm.generate(requests, sampling_params=params, use_tqdm=False, lora_request=self._lora)
        done(len(rows), len(rows))
        firsts = [output.outputs[0] for output in outputs]
        return [Completion(first.text, len(first.token_ids), first.finish_reason == "stop") for first in firsts]
