"""Completions with vLLM. Only this module uses its API (0.22 to 0.31)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..errors import UserError
from ..policies.files import Policy, lora_rank
from ..policies.loading import load_tokenizer
from ..recipe import Recipe
from .sampling import Completion, RowsDone, Sampling

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM takes for max_lora_rank


def is_installed() -> bool:
    """Return whether vLLM is installed."""
    try:
        return find_spec("vllm") is not None
    except ValueError:  # already imported, by a loader without a spec
        return True


class VLLMSampler:
    """Completes prompts with a vLLM engine.

    Each row is a request of token ids with its own seed. Weights are read as safetensors, and code in the model's
    repository is not run.

    Args:
        policy: the folders of the model and its adapter.
        recipe: its `dtype` and `load_in_4bit` if set, `vllm_tensor_parallel_size`, `vllm_max_model_length` and
            `vllm_gpu_memory_utilization` (default 0.9: nothing else is on the device).
        seed: of the engine.

    Raises:
        UserError: vLLM is not installed, or does not support the adapter's rank.
    """

    backend = "vllm"

    def __init__(self, policy: Policy, recipe: Recipe, seed: int = 0) -> None:
        if not is_installed():
            raise UserError("vLLM is not installed: pip install '.[vllm]' in a checkout, or use --backend generate.")
        try:
            vllm: Any = import_module("vllm")
        except Exception as error:  # built for another CUDA or torch, it may raise anything
            raise UserError(
                f"vLLM cannot be imported: {type(error).__name__}: {error}. Use --backend generate."
            ) from error
        self.tokenizer = load_tokenizer(policy.tokenizer)
        self._params = vllm.SamplingParams
        self._lora: Any = None
        self._llm = vllm.LLM(**engine_arguments(policy, recipe, seed))
        self.dtype = self._llm.llm_engine.model_config.dtype  # `auto` is bf16 or float16 for float32 weights
        if policy.adapter is not None:
            request: Any = import_module("vllm.lora.request")
            self._lora = request.LoRARequest("adapter", 1, str(policy.adapter))

    def sample(
        self, prompts_ids: Sequence[Sequence[int]], rows: Sequence[int], how: Sampling, done: RowsDone
    ) -> list[Completion]:
        """Complete each prompt, in order (see `Sampler`); all rows are one batch, which vLLM schedules."""
        params = [
            self._params(
                n=1,
                temperature=how.temperature,
                top_p=1.0,
                top_k=0,
                max_tokens=how.max_completion_length,
                seed=row_seed(how.seed, row),
            )
            for row in rows
        ]
        requests = [{"prompt_token_ids": list(ids)} for ids in prompts_ids]
        outputs = self._llm.generate(requests, sampling_params=params, use_tqdm=False, lora_request=self._lora)
        done(len(rows), len(rows))
        first = [output.outputs[0] for output in outputs]
        return [Completion(o.text, len(o.token_ids), o.finish_reason == "stop") for o in first]


def engine_arguments(policy: Policy, recipe: Recipe, seed: int) -> dict[str, Any]:
    """The keywords of `vllm.LLM` for a policy."""
    quantised = recipe.values.get("load_in_4bit")
    arguments: dict[str, Any] = {
        "model": str(policy.model),
        "tokenizer": str(policy.tokenizer),
        "dtype": recipe.given.get("dtype") or "auto",
        "seed": seed,
        "tensor_parallel_size": recipe.given.get("vllm_tensor_parallel_size", 1),
        "gpu_memory_utilization": recipe.given.get("vllm_gpu_memory_utilization", 0.9),
        "max_model_len": recipe.given.get("vllm_max_model_length"),
        "load_format": "bitsandbytes" if quantised else "safetensors",
        "quantization": "bitsandbytes" if quantised else None,
        "trust_remote_code": False,
    }
    if policy.adapter is not None:
        rank = lora_rank(policy.adapter)
        room = next((room for room in _LORA_RANKS if rank <= room), None)
        if room is None:
            raise UserError(
                f"The adapter has rank {rank}, and vLLM takes {_LORA_RANKS[-1]} at most: use --backend generate."
            )
        arguments |= {"enable_lora": True, "max_lora_rank": room}
    return arguments


def row_seed(seed: int, row: int) -> int:
    """Return the seed of a row; the rows of the next evaluation have other seeds.

    >>> row_seed(0, 3), row_seed(1, 3)
    (3, 1000006)
    """
    return (1_000_003 * seed + row) % 2**31
