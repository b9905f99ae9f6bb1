"""PODSTrainer: the three layers together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from . import compat
from .config import PODSConfig
from .guarded.trainer import Guarded
from .selecting.trainer import Selecting
from .step.micro_batches import mask_constant_groups
from .step.trainer import PrefixTreeTrainer

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig, PreTrainedModel, ProcessorMixin, TrainerCallback
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from .compat import Batch, Data, EvalData, RewardFunc


class PODSTrainer(Guarded, Selecting, PrefixTreeTrainer):
    """GRPO with down-sampling (paper Algorithm 1): generate n, keep m by a rule, train on those.

    Takes the arguments of TRL's `GRPOTrainer`, with `args` a `PODSConfig`. Evaluation never down-samples. With
    `num_rollouts` equal to `num_generations` and `exact_trl` it is TRL's trainer to the last bit; by default it draws
    its own random numbers, and its gradient differs by rounding (`docs/trl.md`). After each generation
    `trainer.rollouts` holds all n rollouts, which were kept, and their rewards.

    Its layers do not import each other. `Selecting` is PODS. `PrefixTreeTrainer` makes the step cheaper, and `Guarded`
    protects the run; it is the outermost one, so it checks rewards before they select.

    Raises:
        UserError: versions of TRL or transformers whose methods take other arguments; in training, memory that runs
            out.
        TypeError: `args` is a GRPOConfig and not a PODSConfig.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: PODSConfig | None = None,
        train_dataset: Data | None = None,
        eval_dataset: EvalData | None = None,
        processing_class: Tokenizer | ProcessorMixin | None = None,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., dict[str, Any]] | None = None,
        environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | None = None,
    ) -> None:
        # All of TRL's arguments by name; the call of `super` below adds `__class__` to the local names.
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if args is None:
            name = model if isinstance(model, str) else compat.get_config_model_id(model.config)
            arguments["args"] = PODSConfig(f"{name.split('/')[-1]}-PODS")
        compat.refuse_unsupported(arguments)
        super().__init__(**arguments)

    @override
    def _generate_and_score_completions(self, inputs: list[Batch]) -> Batch:
        # Which groups are constant is known once the selecting layer has set the advantages.
        batch = super()._generate_and_score_completions(inputs)
        if self.args.mask_constant_groups and self.model.training:
            mask_constant_groups(batch, self)
        return batch
