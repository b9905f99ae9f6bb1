"""PrefixTreeTrainer: TRL's GRPOTrainer with a cheaper step, for plain GRPO and as a layer of PODSTrainer.

Each distinct prefix of the rows of a prompt is computed once, in generation and in the update. A row without a gradient
is not computed, and a step without one does not move the weights. The rows and their advantages are TRL's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import override

from ....errors import UserError
from ....prefix_tree.grouping import distinct_share
from ...seeds import StepCounter
from .. import compat
from ..compat import Batch, Completions, Generated, Layer, LogProbs, Tokenized
from ..config import complete_config, group_sizes
from ..sharding import whole_weights
from .turns import Turns, other_generator, over_prefix_tree, sequences_at_once, tokenize_copies_once
from .update import Update

if TYPE_CHECKING:
    from ..config import PODSConfig


class PrefixTreeTrainer(Layer):
    """GRPO as TRL's `GRPOTrainer` trains it, in less time and memory: each distinct prefix is computed once.

    Takes the arguments of TRL's trainer, with `args` a `GRPOConfig` or a `PODSConfig`. Of `PODSConfig` it reads
    `prefix_tree`, `skip_zero_advantage_steps`, `rollout_batch_size`, `clock` and `exact_trl`; a `GRPOConfig` gets their
    defaults. With `exact_trl` it is TRL's trainer to the last bit. By default it draws its own random numbers, and its
    gradient differs by rounding (`docs/trl.md`).

    Raises:
        UserError: versions of TRL or transformers whose methods take other arguments; n > m, which needs PODSTrainer.
    """

    _turns: Turns | None = None  # of the generation that runs, in training

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: PODSConfig | None = None, *others: Any, **named: Any
    ) -> None:
        compat.check_overrides(PrefixTreeTrainer)
        compat.check_kernel(on_cpu=args is not None and args.use_cpu)
        if args is not None:
            complete_config(args)
        with nullcontext() if args is None else compat.room_in_vllm(sequences_at_once(args)):
            super().__init__(model, reward_funcs, args, *others, **named)  # type: ignore[call-arg]
        complete_config(self.args)  # of TRL's own, without `args`
        keeps_all = self.args.num_rollouts == self.args.num_generations and self.args.selection == "prompt"
        if not keeps_all and not self._selects:
            raise UserError(
                f"PrefixTreeTrainer trains every rollout: got num_rollouts = {self.args.num_rollouts}, num_generations "
                f"= {self.args.num_generations} and selection = {self.args.selection}. Use PODSTrainer, or set "
                "num_rollouts: null and selection: prompt."
            )
        self._generations = StepCounter()
        self._update = Update(self)
        self.add_callback(self._update)

    # -- generation ----------------------------------------------------------------------------------------------------

    @override
    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        # FSDP2: gather the weights, so that no process waits for another's tokens. TRL gathers those of ZeRO-3.
        gathers = self._dist.is_fsdp and not self.use_vllm
        with whole_weights(self) if gathers else nullcontext():
            if not self.model.training:
                return super()._generate(prompts)
            self._enter_phase("rollout")
            # The prompt of each row, and the key of its draws: the same ones whichever process it is on.
            n, _ = group_sizes(self.args)
            step = self.state.global_step
            generation = (self.args.seed, step, self._generations.number(step))
            first_row = self.accelerator.process_index * len(prompts)
            rows = range(first_row, first_row + len(prompts))
            turns = Turns([(*generation, row // n, row % n) for row in rows])
            with compat.replacing(self, _turns=turns):
                results = super()._generate(prompts)
        output = Generated.of(results)
        groups = [row // n for row in rows]
        self._update.tokens["generated"] += sum(output.policy_tokens())
        self._metrics["train"]["pods/distinct_tokens"].append(distinct_share(output.completion_ids, groups))
        self._enter_phase("reward")
        return results

    @override
    def _tokenize_prompts(self, prompts: list[Any]) -> Tokenized:
        tokenize = super()._tokenize_prompts
        # With environments TRL reads the tools of each prompt from a list.
        if self._turns is None or self.args.exact_trl or self.environment_factories is not None:
            return tokenize(prompts)
        return tokenize_copies_once(tokenize, prompts)

    @override
    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int,
        has_tool_images: bool = False,
    ) -> Completions:  # fmt: skip
        sample = super()._generate_single_turn
        # Without pixels TRL would add token types of images, which few models take.
        has_pixels = "pixel_values" in multimodal_fields
        options = {"has_tool_images": True} if has_tool_images and has_pixels else {}
        if self._turns is None:  # an evaluation, or a subclass's own `_generate`
            return sample(prompt_ids, images, multimodal_fields, num_generations, **options)
        count = len(prompt_ids)
        size = self.args.rollout_batch_size or count
        parts: list[slice] = [slice(None)]
        if size < count and not self.use_vllm:  # which has a limit of its own
            if has_pixels:
                raise UserError(
                    f"rollout_batch_size is {size}, and {count} rows with images cannot be split. "
                    "Set rollout_batch_size: null, and fewer rollouts if memory runs out."
                )
            parts = [slice(start, start + size) for start in range(0, count, size)]
        keys = self._turns.begin(prompt_ids)
        completion_ids: list[list[int]] = []
        logprobs = None  # also of each part: only vLLM returns any
        for part in parts:
            fields = {name: values[part] for name, values in multimodal_fields.items()}
            with over_prefix_tree(self, keys[part]):
                part_ids, logprobs = sample(prompt_ids[part], images, fields, num_generations, **options)
            completion_ids.extend(part_ids)
        self._turns.end(prompt_ids, completion_ids)
        return completion_ids, logprobs

    # -- the update ----------------------------------------------------------------------------------------------------

    @override
    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        # TRL shuffles the rows of a new generation over its micro-batches: those of a step are packed into few passes.
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        if not self._update.waiting:  # all passes of the micro-batch before are computed
            before = self._buffered_inputs
            inputs = super()._prepare_inputs(generation_batch)
            self._enter_phase("update")
            if self._buffered_inputs is not None and self._buffered_inputs is not before:
                self._buffered_inputs = self._update.pack_generation(self._buffered_inputs)
                inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
            self._update.begin_micro_batch(inputs)
        return self._update.next_pass()

    @override
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        # A micro-batch may have several passes, and `auto` repeats a step that ran out of memory in smaller ones.
        turn = super().training_step
        return self._update.train_micro_batch(lambda: turn(model, inputs, num_items_in_batch))

    @override
    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        # Skip rows and passes without a gradient, by the advantages that a subclass gives to TRL's loss.
        compute = super()._compute_loss
        return self._update.loss(inputs, lambda: compute(model, inputs))

    @override
    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int,
        batch_size: int | None = None, *args: Any, **kwargs: Any,
    ) -> LogProbs:  # fmt: skip
        # Compute each prompt once, and only rows with a gradient.
        compute = super()._get_per_token_logps_and_entropies
        positional = (model, input_ids, attention_mask, logits_to_keep, batch_size)
        if args:  # not from TRL, which passes all else by keyword
            return compute(*positional, *args, **kwargs)
        return self._update.log_probs(compute, *positional, kwargs)

    # -- for the layers around it --------------------------------------------------------------------------------------

    @override
    def _enter_phase(self, phase: str) -> None:
        self._update.clock.enter(phase)

    @override
    def _running_phase(self) -> str | None:
        return self._update.clock.phase

    @property
    def attention(self) -> str | None:
        """How the update computes the policy, and with which attention; None before its first pass."""
        return self._update.attention

    @property
    def generation(self) -> str | None:
        """How rollouts are generated, and by which code; None before the first generation."""
        otherwise = other_generator(self)
        if otherwise is not None:
            return otherwise
        from ....prefix_tree.decoding import generation_path  # not needed to generate with vLLM

        policy = self.accelerator.unwrap_model(self.model_wrapped)
        return generation_path(policy.get_base_model() if hasattr(policy, "get_base_model") else policy)

    @property
    def token_budget(self) -> str | None:
        """What `max_tokens_per_microbatch: auto` has chosen; None with another setting."""
        return str(self._update.budget) if self._update.budget.is_auto else None
