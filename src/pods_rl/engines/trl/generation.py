"""Generation with the policy, over the tree of its prefixes, or with vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from ...distributed.processes import version
from ...errors import UserError
from ...prefix_tree.decoding import RowDraws, complete
from .batching import Shares
from .compat import Completions, TRLTrainer, standing_in
from .config import PODSConfig

Key = tuple[int, ...]  # of a turn's draws: seed, step, generation in it, prompt, number, and the turn after the first
ROLLOUT = 5  # numbers of a key that are the rollout's


@contextmanager
def over_prefix_tree(trainer: TRLTrainer, keys: Sequence[Key]) -> Iterator[None]:
    """Inside, `generate` of the policy computes each distinct prefix once, and row i draws by `keys[i]`.

    Nothing changes without keys, with another generator, with `prefix_tree` off, and where ZeRO-3 gathers
    the weights layer by layer: processes would run different numbers of forward passes.
    """
    args = trainer.args
    elsewhere = trainer.use_vllm or trainer.use_transformers_continuous_batching
    by_layer = trainer._dist.is_zero3 and not args.ds3_gather_for_generation
    if not keys or not args.prefix_tree or elsewhere or by_layer:
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


class Turns:
    """The turns of one `_generate`: each in parts of `rollout_batch_size` rows, every row with draws of its own.

    Args:
        trainer: the settings.
        keys: of the rows of the first turn.
    """

    def __init__(self, trainer: TRLTrainer, keys: list[Key]) -> None:
        self._trainer, self.keys = trainer, keys
        self._number = 0
        self._rows: list[list[int]] = []  # of the turn before, its prompts and completions

    def generate(
        self, prompt_ids: list[list[int]], images: bool, sample: Callable[[slice, list[Key]], Completions]
    ) -> Completions:
        """Call `sample` for the rows of a turn, part by part; for all at once if it is vLLM.

        Raises:
            UserError: rows with `images` would be split.
        """
        keys, count = self._turn_keys(prompt_ids), len(prompt_ids)
        size = self._trainer.args.rollout_batch_size or count
        if self._trainer.use_vllm or size >= count:
            completion_ids, logprobs = sample(slice(None), keys)
        elif images:
            raise UserError(
                f"rollout_batch_size is {size}, and {count} rows with images cannot be split. "
                "Set rollout_batch_size: null, and fewer rollouts if memory runs out."
            )
        else:
            parts = [slice(start, start + size) for start in range(0, count, size)]
            completion_ids = [ids for part in parts for ids in sample(part, keys[part])[0]]
            logprobs = None  # generators that work in parts return none
        self._rows = [[*ids, *new] for ids, new in zip(prompt_ids, completion_ids, strict=True)]
        self._number, self.keys = self._number + 1, keys
        return completion_ids, logprobs

    def _turn_keys(self, prompt_ids: list[list[int]]) -> list[Key]:
        """Return the keys of the rows that go on, in their order, with the turn's number after the first turn."""
        if not self._number:
            return self.keys
        before = iter(zip(self.keys, self._rows, strict=True))
        found = [next((key for key, row in before if ids[: len(row)] == row), None) for ids in prompt_ids]
        return [(*key[:ROLLOUT], self._number) for key in found if key is not None]


def sequences_at_once(args: PODSConfig) -> int:
    """Return how many rollouts colocated vLLM works on at once: a generation's, or `rollout_batch_size`."""
    assert args.generation_batch_size is not None
    m = args.num_generations
    rollouts = Shares(args.generation_batch_size // m, args.num_rollouts or m, m, args.world_size).rollouts_each
    return min(rollouts, args.rollout_batch_size or rollouts) * args.vllm_tensor_parallel_size


def check_completions(prompts: int, completion_ids: Sequence[Sequence[int]]) -> None:
    """Raise RuntimeError unless there is one completion for each prompt, with a token at least.

    Continuous batching logs a request that failed and skips it; those after it would then be scored against the answers
    of other prompts.
    """
    empty = sum(len(ids) == 0 for ids in completion_ids)
    if len(completion_ids) != prompts or empty:
        raise RuntimeError(
            f"the generator returned {len(completion_ids)} completions for {prompts} prompts, {empty} of them without "
            "a token, so they cannot be matched to prompts. The generator's log above says why; if it ran out of "
            "memory, set a smaller rollout_batch_size."
        )


def describe_vllm(trainer: TRLTrainer) -> dict[str, dict[str, str | None]]:
    """Return vLLM's version and, of a colocated engine, the dtype it computes in: by default not that of training."""
    if not trainer.use_vllm:
        return {}
    engine = getattr(trainer.vllm_generation, "llm", None)  # a server keeps its dtype to itself
    dtype = {"dtype": str(engine.llm_engine.model_config.dtype)} if engine else {}
    return {"vllm": {"version": version("vllm"), **dtype}}


IMAGE_INPUTS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


def has_images(inputs: Mapping[str, Any]) -> bool:
    """Return whether a batch, or the arguments of a pass over it, have inputs of images."""
    return any(inputs.get(name) is not None for name in IMAGE_INPUTS)


def present_images(more: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs of images; if no row has an image, only the token types: models fail on tensors of no image."""
    found = {name: value for name, value in more.items() if name in IMAGE_INPUTS}
    if any(more.get("num_images") or [True]):
        return found
    return {name: value if name.endswith("token_type_ids") else None for name, value in found.items()}
