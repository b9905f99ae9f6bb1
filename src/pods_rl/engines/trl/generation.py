"""What generates: the policy itself, each prompt computed once, or vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from ...distributed.processes import version
from ...rollouts.generating import complete
from ...rollouts.sampling import RowDraws
from .compat import TRLTrainer, standing_in

Key = tuple[int, ...]  # of a rollout's draws: seed, step, generation in it, prompt, number


@contextmanager
def prompt_once(trainer: TRLTrainer, keys: Sequence[Key]) -> Iterator[None]:
    """Inside, `generate` of the policy computes each distinct prompt of its batch once, and row i draws by `keys[i]`.

    Nothing changes without keys, with another generator, with `prompt_once_generation` off, and where ZeRO-3 gathers
    the weights layer by layer: processes would run different numbers of forward passes.
    """
    args = trainer.args
    elsewhere = trainer.use_vllm or trainer.use_transformers_continuous_batching
    by_layer = trainer._dist.is_zero3 and not args.ds3_gather_for_generation
    if not keys or not args.prompt_once_generation or elsewhere or by_layer:
        yield
        return
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)  # as TRL unwraps it
    generate = model.generate

    def once(input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any) -> Tensor:
        inputs |= {"input_ids": input_ids, "generation_config": generation_config}
        if len(input_ids) != len(keys):  # a user's `_generate` asks for other rows
            return generate(**inputs)
        draws = None
        if generation_config.do_sample:
            length = generation_config.max_new_tokens or generation_config.max_length or args.max_completion_length
            assert length is not None
            draws = RowDraws(keys, length, trainer.accelerator.device, strict=True)
        return complete(generate, inputs, draws)

    with standing_in(model, generate=once):
        yield


def describe_vllm(trainer: TRLTrainer) -> dict[str, dict[str, str | None]]:
    """Return vLLM's version and, of a colocated engine, the dtype it computes in: by default not that of training."""
    if not trainer.use_vllm:
        return {}
    engine = getattr(trainer.vllm_generation, "llm", None)  # a server keeps its dtype to itself
    dtype = {"dtype": str(engine.llm_engine.model_config.dtype)} if engine else {}
    return {"vllm": {"version": version("vllm"), **dtype}}
