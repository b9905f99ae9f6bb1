"""The budget of a pass: the most tokens that it computes, and which rows share it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from ....errors import UserError
from ....prefix_tree.grouping import divide_rows
from ..compat import TRLTrainer

MARGIN = 0.8  # of the free memory: other passes have trees of other shapes, and memory has gaps
KEY = "max_tokens_per_microbatch"


class Budget:
    """Divide rows into passes of at most `max_tokens_per_microbatch` distinct tokens.

    `auto` starts with the default, the tokens of a micro-batch of TRL. After the first optimizer step, which allocates
    the state of the optimizer, it chooses what the memory of the GPU has room for.

    Args:
        trainer: whose setting is read.
        log: logs a text once, on the first process.
    """

    def __init__(self, trainer: TRLTrainer, log: Callable[[str, int], None]) -> None:
        self._trainer = trainer
        self._log = log
        setting = trainer.args.max_tokens_per_microbatch
        self.is_auto = setting == "auto"
        self.tokens = setting if isinstance(setting, int) else None  # None: those of TRL's micro-batch
        device = trainer.accelerator.device
        self._measures = self.is_auto and device.type == "cuda" and torch.cuda.is_available()
        self._largest = 0  # tokens of the largest pass that was measured
        self._growth = 0  # bytes that it took above what was held before
        if self.is_auto and not self._measures:
            log(f"{KEY} = {self}, because {device.type} does not report its free memory.", logging.WARNING)

    def __str__(self) -> str:
        tokens = "as TRL's micro-batch" if self.tokens is None else str(self.tokens)
        return f"auto ({tokens})" if self.is_auto else tokens

    def divide(
        self,
        rows: NDArray[np.int64],
        micro_batch_rows: int,
        *,
        trees: bool,
        gather: Callable[[list[int]], list[list[int]]],
        passes: int | None = None,
    ) -> list[list[int]]:
        """Return the rows of each pass, with the same number of passes on every process. Call this on every process.

        `rows` are tokens `[R, T]` as of `tokens_of`, with R the same on all processes. Without `trees` a pass computes
        each row, padded. `passes` is their number, whatever the budget; None means as few as it allows.
        """
        count, width = rows.shape
        budget = self.tokens or micro_batch_rows * width
        if not trees:
            # A padded row costs its columns: for `divide_rows` it becomes as many equal tokens, which no other row has,
            # and one more, since the last token of a row has no node.
            numbers = np.where((rows >= 0).any(1), np.arange(count), -1)
            rows = numbers[:, None].repeat(width + 1, axis=1)
        longest = int((rows >= 0).sum(1).max(initial=1)) - 1  # nodes
        if longest > budget:
            text = f"{KEY} = {self} is less than the longest row has. Such a row is alone in its pass."
            self._log(text, logging.WARNING)
        divided = divide_rows(rows, budget, least_passes=passes or 1, most_passes=passes)
        agreed = max(number for (number,) in gather([len(divided)]))
        if agreed == len(divided):
            return divided
        return divide_rows(rows, budget, least_passes=agreed, most_passes=agreed)

    @contextmanager
    def measuring(self, computed: Callable[[], int]) -> Iterator[None]:
        """Measure the memory of a pass, forward and backward, until `auto` has chosen.

        Args:
            computed: returns how many tokens were computed so far.
        """
        if not self._measures:
            yield
            return
        device = self._trainer.accelerator.device
        before = computed()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        yield
        tokens = computed() - before
        # The largest pass decides: from it the memory of a token is estimated.
        if tokens >= max(1, self._largest):
            self._largest = tokens
            self._growth = torch.cuda.max_memory_allocated(device) - held

    def choose(self, gather: Callable[[list[int]], list[list[int]]]) -> None:
        """After an optimizer step: choose the budget, the smallest of all processes. Call this on every process."""
        if not self._measures:
            return
        fits = 0
        if self._growth > 0:
            device = self._trainer.accelerator.device
            free, _ = torch.cuda.mem_get_info(device)
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch keeps it for reuse
            # The next passes hold gradients too, which this step has freed. They count twice if it had one pass.
            gradient_bytes = 0
            for parameter in self._trainer.model_wrapped.parameters():
                if parameter.requires_grad:
                    here = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # of a sharded weight
                    gradient_bytes += here.numel() * here.element_size()
            room = MARGIN * (free - gradient_bytes)
            fits = max(1, int(self._largest * room / self._growth))
        agreed = min(number for (number,) in gather([fits]))
        if agreed == 0:  # a process had no pass
            return
        self._measures = False
        self.tokens = agreed
        text = f"{KEY} = {self}: a pass of {self._largest} tokens took {self._growth / 1e6:,.0f} MB."
        self._log(text, logging.WARNING)

    def lower(self, tokens: int) -> None:
        """Halve the budget, because a pass of this many tokens ran out of memory.

        Raises:
            UserError: the step cannot start again: the budget is a number, or there are several processes or DeepSpeed.
        """
        trainer = self._trainer
        self._measures = False
        self.tokens = max(1, tokens // 2)
        if not self.is_auto or trainer.accelerator.num_processes > 1 or trainer.is_deepspeed_enabled:
            raise UserError(
                f"{KEY} = {trainer.args.max_tokens_per_microbatch}: a pass of {tokens} tokens ran out of memory. Set "
                f"{KEY}: {self.tokens}, and continue from the last checkpoint."
            )
        text = f"A pass of {tokens} tokens ran out of memory. The step starts again with {KEY} = {self}."
        self._log(text, logging.WARNING)
