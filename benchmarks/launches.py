"""Count what a GPU would wait for in a step, next to TRL's GRPO 16: python benchmarks/launches.py

Two counts of each phase of a step, generation and update (loss, log-probabilities and backward):

- launches: the operations of torch that compute or copy, each of which would be a kernel on a device; one that returns
  a view of its argument is free.
- reads: the times the host waits for a number of a tensor (`item`, `tolist`, `cpu`, `nonzero`, `unique`, a boolean
  index). On a CPU every tensor counts, also one that a device would not have.

The counts are of the path that a CPU takes, and they do not depend on the processor or its load. The policy is the
shipped one of the sums, with random text: prompts of 60 tokens and completions of 24.

A second table counts `generate` alone, of TRL's rows and of ours by the paths that a GPU takes, here on a CPU: rows of
the device, and the step that a CUDA graph captures, as operations. Captured it is one launch for each token.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from accelerate import Accelerator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoTokenizer, GenerationMixin
from trl import GRPOTrainer

from measuring import command_line, set_up_torch
from pods_rl.prefix_tree import decoding
from pods_rl.prefix_tree.decoding import Path
from step import Arm, Case, M, N, divided, random_text, trainer_of

# Operations whose result has a shape or a value that the host must know.
READS = {"_local_scalar_dense", "_unique2", "bincount", "equal", "masked_select", "nonzero", "unique_consecutive"}
READING_METHODS = {torch.Tensor.cpu, torch.Tensor.tolist}  # `numpy` only views what is on the host
PHASES = ("generation", "update")


@dataclass
class Counts:
    """Launches and reads by phase; outside of a phase nothing is counted."""

    phase: str | None = None
    launches: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def within(self, phase: str | None) -> Iterator[None]:
        before = self.phase
        self.phase = phase
        try:
            yield
        finally:
            self.phase = before


class CountOperations(TorchDispatchMode):
    """Inside, counts the operations that torch runs."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        phase = self._counts.phase
        name = function.overloadpacket.__name__
        result = function(*args, **(kwargs or {}))
        if phase is not None:
            if function._schema.is_mutable or not _is_view(result, args):
                self._counts.launches[phase] += 1
            if name in READS or (name.startswith("index") and _has_boolean(args)):
                self._counts.reads[phase] += 1
        return result


class CountReads(TorchFunctionMode):
    """Inside, counts the methods that copy a tensor to the host, which run no operation on a CPU."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts
        self._on_host: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()  # what `cpu` returned

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._counts.phase is None or function not in READING_METHODS or id(args[0]) in self._on_host:
            return function(*args, **(kwargs or {}))
        self._counts.reads[self._counts.phase] += 1
        with torch._C.DisableTorchFunction():
            result = function(*args, **(kwargs or {}))
            if function is torch.Tensor.cpu:
                # `tolist` and `numpy` of what `cpu` returned are not a second read.
                result = result.view_as(result)  # a tensor of its own, where the device is the CPU
                self._on_host[id(result)] = result
        return result


def _is_view(result: Any, args: Any) -> bool:
    """Return whether an operation only describes the memory of its first argument anew, or returns no tensor."""
    memories = {value.untyped_storage()._cdata for value in tree_leaves(result) if isinstance(value, torch.Tensor)}
    return memories <= {value.untyped_storage()._cdata for value in args[:1] if isinstance(value, torch.Tensor)}


def _has_boolean(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)


def count_step(arm: Arm, case: Case, path: Path | None = None) -> Counts:
    """Train two steps; return the counts of the second.

    Args:
        path: over which rollouts are generated, of which then `generate` alone is counted. If None, that of a CPU.
    """
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="pods-bench-") as folder, ExitStack() as stack:
        trainer = trainer_of(arm, case, 2, folder)

        def count(owner: Any, method: str, phase: str) -> None:
            """Count a method of a class as a phase, in the second step."""
            function = getattr(owner, method)

            @wraps(function)
            def counted(*args: Any, **kwargs: Any) -> Any:
                with counts.within(phase if trainer.state.global_step == 1 else None):
                    return function(*args, **kwargs)

            stack.enter_context(patch.object(owner, method, counted))

        if path is not None:
            stack.enter_context(patch.object(decoding, "choose_path", lambda *_: path))
        # Of TRL and accelerate, because a method that a subclass or an object replaces counts as a user's.
        if path is None:
            count(GRPOTrainer, "_generate_single_turn", "generation")
        else:
            count(GenerationMixin, "generate", "generation")
        count(GRPOTrainer, "compute_loss", "update")
        count(GRPOTrainer, "_get_per_token_logps_and_entropies", "update")
        count(Accelerator, "backward", "update")
        stack.enter_context(CountOperations(counts))
        stack.enter_context(CountReads(counts))
        trainer.train()
    return counts


@dataclass(frozen=True)
class Row:
    """A row of the table: a step in micro-batches."""

    prompts: int
    micro_batch_rows: int

    @property
    def rows(self) -> int:
        return self.prompts * M

    def case(self, completion: int = 24) -> Case:
        text = random_text("embedded", 60, completion)
        return divided(text, prompts=self.prompts, micro_batches=self.rows // self.micro_batch_rows)


ROWS = (Row(1, 16), Row(4, 8), Row(4, 1))
BUDGET = 16_000
TRL_ARM = Arm("TRL's GRPO 16", M)
PODS_ARM = Arm(f"PODS {N} -> {M}", N, {})
# What a GPU has room for, instead of the tokens of TRL's micro-batch.
BUDGET_ARM = Arm(f"PODS, {BUDGET:,} tokens", N, {"max_tokens_per_microbatch": BUDGET})

DEVICE_PATHS = (  # TRL's own loop takes no path
    (TRL_ARM, "TRL's GRPO 16", Path.TREE),
    (PODS_ARM, "tree of the CPU", Path.TREE),
    (PODS_ARM, "rows of a device", Path.ROWS),
    (PODS_ARM, "step to capture", Path.CAPTURED),
)


def main() -> None:
    command_line(__doc__).parse_args()
    set_up_torch(1)
    print(f"{'rows, micro-batch':<20}{'arm':<22}" + "".join(f"{phase:>22}" for phase in PHASES))
    for row in ROWS:
        case = row.case()
        base = count_step(TRL_ARM, case)
        arms = (TRL_ARM, PODS_ARM) if row.micro_batch_rows == row.rows else (TRL_ARM, PODS_ARM, BUDGET_ARM)
        for arm in arms:
            counts = base if arm is TRL_ARM else count_step(arm, case)
            line = f"{f'{row.rows}, {row.micro_batch_rows}':<20}{arm.name:<22}"
            for phase in PHASES:
                ratio = counts.launches[phase] / base.launches[phase]
                line += f"{counts.launches[phase]:>9,} ({ratio:.2f}) {counts.reads[phase]:>5}"
            print(line, flush=True)
    print("Each cell: launches (as a share of TRL's) and reads by the host.")
    print(f"\n{'rows':<20}{'generate, by':<22}{'launches':>12}{'reads':>8}")
    for prompts in (1, 4):
        case = Row(prompts, prompts * M).case()
        end = AutoTokenizer.from_pretrained(case.tokenizer).eos_token_id
        # Not a least length, which reads how many tokens there are: a graph has no such number.
        case = replace(case, settings=case.settings | {"generation_kwargs": {"suppress_tokens": [end]}})
        for arm, name, path in DEVICE_PATHS:
            counts = count_step(arm, case, path)
            numbers = f"{counts.launches['generation']:>12,}{counts.reads['generation']:>8}"
            print(f"{prompts * arm.n:<20}{name:<22}{numbers}", flush=True)


if __name__ == "__main__":
    main()
