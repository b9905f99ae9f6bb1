"""One optimizer step: its micro-batches, seconds and tokens, and whether it updates the weights."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ....errors import UserError
from ....prefix_tree.grouping import count_nodes
from ....prefix_tree.packing import Probe, TreePass, probe_trees
from ....prefix_tree.recurrence import unregister_tree_recurrence
from ... import PHASES
from ..compat import IMAGE_INPUTS, Batch, LogProbs, TRLTrainer, is_overridden, replacing
from .budget import Budget
from .micro_batches import LOSS_SHARE, MEANS_OVER_ROWS, REPEATED_ROWS, ROW_SCALE, StepMetrics, pack_rows, tokens_of

logger = logging.getLogger(__name__)

# A subclass that replaces one of these may read every row, or add a term to the loss that we do not know.
LOSS_METHODS = (
    "compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies", "get_high_entropy_mask",
    "get_off_policy_mask", "get_gamma_weights",
)  # fmt: skip


class PhaseClock:
    """Seconds per phase of one step; exactly one phase runs at a time, so the phases sum to the step.

    Accelerators run asynchronously, so each switch waits for the device, four times a step.

    Example:
        >>> now = iter([0.0, 1.0, 3.0])
        >>> clock = PhaseClock(device=None, now=lambda: next(now))
        >>> clock.enter("rollout"); clock.enter("update"); clock.enter(None)
        >>> clock.seconds["rollout"], clock.seconds["update"]
        (1.0, 2.0)
    """

    def __init__(self, device: torch.device | None, now: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._now = now
        self._since = 0.0
        self.phase: str | None = None  # the running one
        self.seconds = dict.fromkeys(PHASES, 0.0)  # since the step began

    def enter(self, phase: str | None) -> None:
        """Close the running phase, if any, and start `phase`; None starts none."""
        if phase == self.phase:
            return
        # A GPU still works on what was called in this phase. Without waiting, the next phase would be charged for it.
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = self._now()
        if self.phase is not None:
            self.seconds[self.phase] += now - self._since
        self.phase = phase
        self._since = now


class Update(TrainerCallback):
    """Compute each micro-batch without repeats and without rows that have no gradient, and time the step by phase.

    Rows with a gradient are found by the advantages and masks that TRL's loss receives, so a subclass may change them.

    A step whose advantages are all zero has a zero policy gradient, but AdamW's momentum and weight decay would move
    the weights anyway. The gradients of such a step are cleared: the optimizer skips parameters without gradients.

    Args:
        trainer: whose loss is computed.
    """

    def __init__(self, trainer: TRLTrainer) -> None:
        if trainer.args.mask_constant_groups and (trainer._entropy_bonus_enabled or trainer.aux_loss_enabled):
            raise UserError(
                "mask_constant_groups counts the rows of a generation, and an entropy bonus or an auxiliary loss of "
                "experts is a mean over each micro-batch. Set entropy_coef and router_aux_loss_coef to 0, or "
                "mask_constant_groups: false."
            )
        self._trainer = trainer
        self._trees: WeakKeyDictionary[Any, Probe] = WeakKeyDictionary()  # by model: whether it computes trees
        self._rows_because: str | None = None  # why TRL computed the latest rows of a loss, and no tree
        self._logged: set[str] = set()
        self._batch: Batch = {}  # whose loss is being computed
        self._computed: Tensor | None = None  # its rows that are, `[B]`. If None, all
        self._step_metrics = StepMetrics(by_row=trainer.importance_sampling_level == "sequence")
        self.budget = Budget(trainer, self._log)
        self._unsynced: ExitStack | None = None  # around a pass of `train_micro_batch`
        self.waiting: list[Batch]  # passes of the running micro-batch
        now = time.process_time if trainer.args.clock == "cpu" else time.perf_counter
        self.clock = PhaseClock(trainer.accelerator.device, now)
        self.begin_step()

    def begin_step(self) -> None:
        """Reset the last step's seconds, tokens, rows, signal and metrics."""
        self.waiting = []
        self.clock.seconds = dict.fromkeys(PHASES, 0.0)
        # `computed`: by the passes of the update's loss, padding included.
        self.tokens = Counter(generated=0, computed=0)
        self._losses: list[Tensor] = []  # of the micro-batches
        self.is_skipped = False  # whether its gradients were cleared because all of them were 0
        self._begin_passes()

    def _begin_passes(self) -> None:
        """Reset what the passes of a step add up."""
        self._step_metrics.reset()
        # Of steps that update the weights, including rows that are skipped. It stays on the device until the step is
        # logged, since reading a number waits for the device.
        self.trained_tokens: int | Tensor = 0
        self.tokens["computed"] = 0
        self.rows_left_out = 0  # which have no gradient
        self._has_signal = False  # in a row that reached TRL's loss
        self._reached_loss = False  # whether a pass reached `loss`: a subclass's `training_step` may not call it
        self._passes = 0  # that were computed
        self._taken: list[Batch] = []  # of these and the skipped ones, the rows

    # -- passes --------------------------------------------------------------------------------------------------------

    def train_micro_batch(self, turn: Callable[[], Tensor]) -> Tensor:
        """Compute the passes of a micro-batch, each forward and backward, and return the sum of their losses.

        Args:
            turn: TRL's `training_step`, which computes the pass that `next_pass` returns.
        """
        trainer = self._trainer
        step = trainer._step
        metrics = trainer._metrics["train"]
        logged_times = len(metrics.get("step_time", ()))
        total: Tensor | float = 0.0
        while True:
            smaller_passes: list[Batch] = []
            with ExitStack() as self._unsynced, self.budget.measuring(lambda: self.tokens["computed"]):
                try:
                    total = total + turn()
                except torch.OutOfMemoryError as error:
                    smaller_passes = self._smaller_passes(error)
            # Outside of the handler, which holds what the failed pass has allocated.
            if smaller_passes:
                gc.collect()
                torch.cuda.empty_cache()
                trainer.model_wrapped.zero_grad(set_to_none=True)
                self._begin_passes()
                self.waiting = smaller_passes
                # The step starts again, without the losses that were returned for its micro-batches before.
                total = -sum(self._losses)
            if not self.waiting:
                break
            # TRL counts passes. This one is not the last of its micro-batch.
            trainer._step = step
            if len(metrics.get("step_time", ())) > logged_times:
                trainer._current_train_step_time = metrics["step_time"].pop()
        self._unsynced = None
        assert isinstance(total, Tensor)
        self._losses.append(total)
        return total

    def begin_micro_batch(self, micro_batch: Batch | list[Batch]) -> None:
        """Take a micro-batch of TRL, or the passes of one."""
        self.waiting = list(micro_batch) if isinstance(micro_batch, list) else [micro_batch]

    def next_pass(self) -> Batch:
        """Return the next pass of the running micro-batch; without a row, if another one of the step has its rows."""
        batch: Batch = self.waiting.pop(0) if self.waiting else {}
        if self.waiting and self._trainer.accelerator.sync_gradients and self._unsynced is not None:
            # Only the last pass sends the gradients to the other processes.
            self._unsynced.enter_context(self._trainer.accelerator.no_sync(self._trainer.model_wrapped))
        if batch:
            self._taken.append(batch)
            self.trained_tokens += policy_tokens(batch).sum()
        return batch

    def loss(self, batch: Batch, compute: Callable[[], Tensor]) -> Tensor:
        """Call TRL's `compute` on a pass, or return 0 where it cannot change a gradient.

        Call this on every process, with the batch that TRL's loss reads.
        """
        trainer = self._trainer
        if not trainer.model.training:
            return compute()
        self._reached_loss = True
        if not batch:
            return torch.zeros((), device=trainer.accelerator.device, requires_grad=True)
        row_counts = token_counts(batch)
        tokens, with_gradient = row_counts.tolist()  # the only wait for the device
        repeated_rows = batch.get(REPEATED_ROWS, 0)
        has_gradient = self._has_other_terms or any(with_gradient)
        may_skip_rows = self._may_skip_rows(batch)
        if may_skip_rows:
            self.rows_left_out += with_gradient.count(0) - repeated_rows
        counts: dict[str, int] = {}
        if not self._has_user_loss:  # its code may not reach this line on all processes: they need not agree
            # One message for all of them.
            counts = self._sums({
                "has_gradient": int(has_gradient),
                "needs_all_rows": int(not may_skip_rows),
                "rows": len(tokens),
                "repeated_rows": repeated_rows,
                "tokens": sum(tokens),
                "computed": sum(with_gradient if may_skip_rows else tokens),
            })  # fmt: skip
            has_gradient = counts["has_gradient"] > 0
            if batch["completion_mask"].shape[1] == 1:  # TRL's means are then over rows
                rows = counts["rows"]
                computed_rows = rows * counts["computed"] / counts["tokens"] if counts["tokens"] else rows
                counts |= {"tokens": rows, "computed": round(computed_rows)}
            if not has_gradient and self._can_skip(may_skip_rows_everywhere=counts["needs_all_rows"] == 0):
                self._step_metrics.skip(counts)
                return torch.zeros((), device=trainer.accelerator.device, requires_grad=True)
        self._has_signal |= has_gradient
        self._passes += 1
        computed = row_counts[1] > 0 if may_skip_rows else None
        metrics = trainer._metrics["train"]
        before = {name: len(values) for name, values in metrics.items()}
        with replacing(self, _batch=batch, _computed=computed):
            loss = compute()
        if counts and not trainer.args.exact_trl:
            self._step_metrics.take(metrics, before, counts)
        # TRL divides a mean over rows by the number of micro-batches. Sums over tokens have one divisor for all rows.
        if trainer.loss_type in MEANS_OVER_ROWS:
            loss = loss * batch.get(LOSS_SHARE, 1.0) * batch.get(ROW_SCALE, 1.0)
        return loss

    # -- which rows share a pass ---------------------------------------------------------------------------------------

    def pack_generation(self, batches: list[Batch]) -> list[Any]:
        """Return the micro-batches of a generation as lists of passes, with as few passes as possible in each step.

        Only rows of one pass share a tree. A row stays in its optimizer step, on its process. Call this on every
        process. Where rows may not be moved, the micro-batches are returned as they are.
        """
        # The most micro-batches that are always in one optimizer step. With 6 of a generation and 4 of a step these are
        # 2: a step takes 4 and 5, and then 0 and 1 of the next iteration.
        window = math.gcd(len(batches), self._trainer.args.gradient_accumulation_steps)
        if window == 1 and self.budget.tokens is None:
            return batches
        if self._unsynced is None:  # a user's `training_step` does not call ours, which computes several passes
            return batches
        if self._on_any_process(not all(map(self._may_pack, batches))):  # one process alone may have images
            return batches
        packed: list[Any] = []
        for start in range(0, len(batches), window):
            of_step = batches[start : start + window]
            passes = self._pack(of_step)
            if passes is None:
                packed += of_step
                continue
            # In the last micro-batches, because the last one of a step sends the gradients to all processes.
            first = max(1, len(passes) - len(of_step) + 1)
            packed += [[]] * (len(of_step) - len(passes))
            packed += [passes[:first], *([batch] for batch in passes[first:])]
        return packed

    def _pack(self, batches: list[Batch]) -> list[Batch] | None:
        """Return the rows of some batches in as few passes as the budget allows; None if they cannot be moved."""
        trainer = self._trainer
        may_skip_rows = all(map(self._may_skip_rows, batches))
        computed = torch.cat([rows_with_gradient(batch) for batch in batches]) if may_skip_rows else None
        divide = partial(
            self.budget.divide,
            trees=self._takes_trees(trainer.model_wrapped),
            gather=self._gather,
            passes=len(batches) if trainer.is_deepspeed_enabled else None,  # which counts the passes of a step
        )
        return pack_rows(batches, computed, divide, self._gather)

    def _smaller_passes(self, error: torch.OutOfMemoryError) -> list[Batch]:
        """Return the rows of the step so far, in smaller passes than one that ran out of memory, or raise its error."""
        trainer = self._trainer
        failed = self._taken[-1] if self._taken else {}
        # By default nothing says that passes may differ from TRL's micro-batches.
        may_differ = trainer.args.max_tokens_per_microbatch is not None
        if not may_differ or not failed or not all(map(self._may_pack, self._taken)):
            raise error
        rows = tokens_of(failed, rows_with_gradient(failed) if self._may_skip_rows(failed) else None)
        rows = rows[(rows >= 0).any(1)]
        trees = self._takes_trees(trainer.model_wrapped)
        parts = len(np.unique(rows, axis=0)) if trees else len(rows)
        if parts < 2:
            raise error
        self.budget.lower(count_nodes(rows) if trees else rows.size)
        passes = self._pack([*self._taken, *self.waiting])
        if passes is None:
            raise error
        return passes

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of every process. Call this on every process, with as many numbers."""
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1:
            return [numbers]
        gathered = accelerator.gather(torch.tensor(numbers, device=accelerator.device))
        return gathered.view(accelerator.num_processes, len(numbers)).tolist()

    def _sums(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """Return the sum of each number over the processes. Call this on every process."""
        of_processes = self._gather(list(numbers.values()))
        return {name: sum(values) for name, values in zip(numbers, zip(*of_processes, strict=True), strict=True)}

    def _on_any_process(self, flag: bool) -> bool:
        """Return whether a flag is set on any process. Call this on every process."""
        return any(number for (number,) in self._gather([int(flag)]))

    def _may_pack(self, batch: Batch) -> bool:
        """Return whether the gradient of a step does not depend on which of its rows share a pass."""
        trainer = self._trainer
        # Compiled models are compiled again for each number of rows.
        if not trainer.args.prefix_tree or trainer.args.torch_compile or has_images(batch):
            return False
        if self._has_user_loss or is_overridden(trainer, ["_prepare_inputs"]):
            return False  # a user's code may compare the rows of a micro-batch
        if trainer.loss_type == "bnpo" or trainer._entropy_bonus_enabled or trainer.aux_loss_enabled:
            return False  # a mean over the tokens of the micro-batch
        return trainer.top_entropy_quantile >= 1.0  # a quantile over them

    @property
    def _has_user_loss(self) -> bool:
        return is_overridden(self._trainer, LOSS_METHODS)

    @property
    def _has_other_terms(self) -> bool:
        trainer = self._trainer
        return trainer.beta != 0.0 or trainer.aux_loss_enabled or trainer._entropy_bonus_enabled

    def _may_skip_rows(self, batch: Batch) -> bool:
        """Return whether a row with advantage 0 matters neither to a gradient nor to a metric but the entropy."""
        trainer = self._trainer
        if not trainer.args.prefix_tree or has_images(batch):
            return False
        if self._has_other_terms or self._has_user_loss:
            return False
        return trainer.top_entropy_quantile >= 1.0 and trainer.loss_type != "vespo"  # logs the weight of each row

    def _can_skip(self, may_skip_rows_everywhere: bool) -> bool:
        """Return whether a pass without a gradient is skipped, given `_may_skip_rows` of all processes."""
        trainer = self._trainer
        if trainer.accelerator.sync_gradients and not self.waiting:
            # The last pass before an optimizer step sends the sum of the gradients to all processes, if there is one.
            return bool(trainer.args.skip_zero_advantage_steps) and self._passes == 0
        return may_skip_rows_everywhere and not trainer.is_deepspeed_enabled  # which counts the passes of a step

    def _a_parameter_has_gradient(self) -> bool:
        """Return whether a parameter has a gradient, from a term that TRL's loss does not have."""
        trainer = self._trainer
        if trainer.is_deepspeed_enabled:  # it keeps the gradients to itself
            return self._has_user_loss
        flags = []
        for parameter in trainer.model_wrapped.parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            if hasattr(gradient, "to_local"):  # of a sharded weight
                gradient = gradient.to_local()
            flags.append(gradient.any().to(trainer.accelerator.device))
        return bool(flags) and bool(torch.stack(flags).any())

    # -- events of the trainer ----------------------------------------------------------------------------------------

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begin_step()
        self.clock.enter("update")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        trainer = self._trainer
        self.is_skipped = bool(trainer.args.skip_zero_advantage_steps) and not self._on_any_process(
            self._has_signal or self._a_parameter_has_gradient()
        )
        if self.is_skipped:
            trainer.model_wrapped.zero_grad(set_to_none=True)
            self.trained_tokens = 0
        elif self._reached_loss and not self._passes:
            # A subclass's own term trains a step whose passes were all skipped. The optimizer skips a parameter without
            # a gradient; after TRL's passes it has one of 0.
            for parameter in trainer.model_wrapped.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        trainer._metrics["train"]["pods/skipped_step"].append(float(self.is_skipped))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Put the step's seconds of this process, and the tokens, rows and metrics of all, into TRL's metrics."""
        trainer = self._trainer
        if self.is_skipped and trainer.use_vllm and trainer._last_loaded_step == state.global_step - 1:
            trainer._last_loaded_step = state.global_step  # the generator already has these weights
        self.clock.enter(None)
        self.budget.choose(self._gather)
        metrics = trainer._metrics["train"]
        self._step_metrics.put(metrics)
        for phase, seconds in self.clock.seconds.items():
            metrics[f"pods/seconds/{phase}"].append(seconds)
        counts = {
            "pods/tokens/generated": self.tokens["generated"],
            "pods/tokens/trained": int(self.trained_tokens),
            "pods/tokens/computed": self.tokens["computed"],
            "pods/rows/left_out": self.rows_left_out,
        }
        for name, total in self._sums(counts).items():
            metrics[name].append(float(total))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        unregister_tree_recurrence()

    # -- how the policy is computed ------------------------------------------------------------------------------------

    def log_probs(
        self, compute: Callable[..., LogProbs], model: Any, ids: Tensor, mask: Tensor, keep: int,
        batch_size: int | None, inputs: Mapping[str, Any],
    ) -> LogProbs:  # fmt: skip
        """Call TRL's `compute`; in training with `prefix_tree` over the tree of its rows.

        Args:
            compute: takes the model, ids and mask `[B, T]`, columns to keep, rows a pass, and `inputs`.
            inputs: what else TRL passes. Rows with images are computed as TRL does.
        """
        trainer = self._trainer
        images = has_images(inputs)
        if images:
            inputs = {**inputs, **present_images(inputs)}
        if not trainer.model.training:
            return compute(model, ids, mask, keep, batch_size, **inputs)
        # Old and reference log-probabilities have no gradient. A user's own loss may not pass through `loss`.
        in_loss = torch.is_grad_enabled()
        why_rows = "its batch has images" if images else None  # whatever the model
        if not trainer.args.prefix_tree:
            why_rows = "prefix_tree is false"
        if in_loss:
            self._rows_because = why_rows
        if why_rows is None:
            model = TreePass(
                model,
                keep,
                tree=self._takes_trees(model),
                read=self._computed,
                unread_log_probs=self._batch.get("old_per_token_logps"),
                tokens=self.tokens if in_loss else Counter(),
            )
        elif in_loss:
            if trainer.args.prefix_tree:
                self._log_rows(model, why_rows)
            self.tokens["computed"] += ids.size(0) * (ids.size(1) - 1)  # a row's last token predicts nothing
        may_pack = why_rows is None and not in_loss and not trainer.args.torch_compile
        is_one_pass = self.budget.tokens is None and (batch_size or len(ids)) >= len(ids)
        if not may_pack or is_one_pass:
            return compute(model, ids, mask, keep, batch_size, **inputs)
        rows = ids.masked_fill(mask == 0, -1).cpu().numpy()
        passes = self.budget.divide(rows, batch_size or len(ids), trees=model.tree, gather=self._gather)
        # One copy to the device for all passes.
        order = torch.tensor([row for members in passes for row in members], device=ids.device)
        rows_of_passes = order.split([len(members) for members in passes])
        results = [compute(model, ids[index], mask[index], keep, len(index), **inputs) for index in rows_of_passes]
        row_order = order.argsort()
        log_probs = torch.cat([result[0] for result in results])[row_order]
        entropies = [result[1] for result in results if result[1] is not None]
        entropy = torch.cat(entropies)[row_order] if entropies else None
        return log_probs, entropy, results[0][2]

    @property
    def attention(self) -> str | None:
        """How the update computes the policy, and with which attention; None before its first pass."""
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
        if self._rows_because is not None:
            return f"rows: {self._rows_because}"
        if policy not in self._trees:
            return None
        return str(self._trees[policy])

    def _takes_trees(self, model: Any) -> bool:
        """Return whether a model computes trees, in the precision in which it trains; decided at its first pass."""
        accelerator = self._trainer.accelerator
        bare = accelerator.unwrap_model(model)
        if bare in self._trees:
            return self._trees[bare].why_rows is None
        weights = {weight.dtype for weight in bare.parameters()}
        in_16_bits = accelerator.mixed_precision != "no" or bool(weights - {torch.float32, torch.float64})
        tolerance = 0.1 if in_16_bits else 1e-3

        if self._trainer.args.torch_compile:
            probe = Probe("torch.compile would compile it for every batch")
        else:
            with accelerator.autocast():  # as TRL calls the model
                trains = bare is accelerator.unwrap_model(self._trainer.model)
                probe = probe_trees(
                    bare, model, tolerance=tolerance, on_any_process=self._on_any_process, trains=trains
                )
        self._trees[bare] = probe
        if probe.why_rows is not None:
            self._log_rows(bare, probe.why_rows)
        else:
            # A warning where it matters to memory and time.
            level = logging.INFO if accelerator.device.type == "cpu" else logging.WARNING
            self._log(f"The update computes {type(bare).__name__} as {probe}.", level)
        return probe.why_rows is None

    def _log_rows(self, model: Any, reason: str) -> None:
        name = type(self._trainer.accelerator.unwrap_model(model)).__name__
        text = f"The update computes {name} row by row, each with its prompt, and not as a prefix tree: {reason}."
        self._log(text, logging.WARNING)

    def _log(self, text: str, level: int) -> None:
        """Log a text once, on the first process."""
        if text not in self._logged and self._trainer.accelerator.is_main_process:
            logger.log(level, text)
        self._logged.add(text)


def policy_tokens(batch: Batch) -> Tensor:
    """Return how many tokens of each row the policy wrote, `[B]`: not those of tools; a masked-out row has 0."""
    tokens = batch["completion_mask"]
    if "tool_mask" in batch:
        tokens = tokens * batch["tool_mask"]
    return tokens.sum(dim=1)  # [B, T] -> [B]


def token_counts(batch: Batch) -> Tensor:
    """Return the tokens of each row that the policy wrote, and of these, those in rows with a gradient, `[2, B]`.

    A row has a policy gradient if it has an advantage, and a token of the policy.
    """
    tokens = policy_tokens(batch)
    # An advantage for each row, `[B]`, or for each token, `[B, T]`.
    has_advantage = batch["advantages"] != 0
    if has_advantage.dim() > 1:
        has_advantage = has_advantage.any(dim=1)
    return torch.stack([tokens, tokens * has_advantage])


def rows_with_gradient(batch: Batch) -> Tensor:
    """Return which rows have a policy gradient, `[B]`."""
    return token_counts(batch)[1] > 0


def has_images(inputs: Mapping[str, Any]) -> bool:
    """Return whether a batch, or the arguments of a pass over it, have inputs of images."""
    return any(inputs.get(name) is not None for name in IMAGE_INPUTS)


def present_images(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs of images; if no row has an image, only the token types: models fail on tensors of no image."""
    images = {name: value for name, value in inputs.items() if name in IMAGE_INPUTS}
    if not any(inputs.get("num_images") or [True]):
        for name in images:
            if not name.endswith("token_type_ids"):
                images[name] = None
    return images
