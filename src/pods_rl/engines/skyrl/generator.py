"""The generator that requests n trajectories of each training prompt and returns the m to train on.

Axes: P prompts, N trajectories of a prompt, M of them kept. A trajectory has one row of SkyRL's output, or several.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput

from ...errors import UserError
from ...selection import select
from ..ledger import LedgerWriter
from ..measuring import describe_selection, pad_rewards
from ..seeds import seeded_generator
from .batches import is_training, rows_of_trajectories, silence, take_rows, total, widen
from .ledger import ledger_row
from .settings import read_settings


@dataclass
class _PromptGroup:
    """A prompt's n trajectories and what is kept of them."""

    trajectories: list[list[int]]  # [N], the rows of each
    rewards: torch.Tensor  # [1, N], NaN where unusable
    kept: list[int]  # [M]
    is_silent: bool  # a kept trajectory has no usable reward


class PODSGenerator(GeneratorInterface):
    """A generator around another: training batches are generated with n trajectories a prompt, and m are returned.

    Source: PODS (arXiv 2504.13818), Algorithm 1. `generator.n_samples_per_prompt`, from which SkyRL computes
    mini-batches and checks lengths, stays the number that is trained. Other batches are passed on as they are.

    Args:
        generator: SkyRL's own, as `BasePPOExp.get_generator` returns it, or yours.
        config: SkyRL's full configuration.
        tokenizer: of the policy; required with `ledger`.
        options: `num_rollouts` (n), and optionally `rule`, `seed`, `ledger` and `ledger_every` (docs/engines.md).

    Edges: a trajectory is not kept if its reward is None, NaN, infinite or larger than 1e15, or if its loss masks are
    all 0 (a failed one, or an overlong one that SkyRL filters). A prompt with fewer than m usable trajectories is
    returned with reward 0 and loss mask 0, because SkyRL needs m rows of each prompt.

    Raises:
        UserError: see `settings.read_settings`; a ledger without a tokenizer.

    Example:
        class PODSExp(BasePPOExp):
            def get_generator(self, cfg, tokenizer, inference_engine_client):
                generator = super().get_generator(cfg, tokenizer, inference_engine_client)
                return PODSGenerator(generator, cfg, num_rollouts=16)
    """

    def __init__(self, generator: GeneratorInterface, config: Any, *, tokenizer: Any = None, **options: Any) -> None:
        self.pods = read_settings(config, options)
        self._generator = generator
        self._tokenizer = tokenizer
        self._ledger: LedgerWriter | None = None
        if self.pods.ledger is not None:
            if tokenizer is None:
                raise UserError(
                    f"pods.ledger is {self.pods.ledger}: the ledger needs the tokenizer. Pass tokenizer=tokenizer to "
                    "PODSGenerator."
                )
            self._ledger = LedgerWriter(Path(self.pods.ledger), self.pods.ledger_every)

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Return SkyRL's output for the batch, for training with the m trajectories kept of each prompt."""
        if not is_training(input_batch):
            return await self._generate(input_batch, disable_tqdm)
        n = self.pods.num_rollouts
        wide = widen(input_batch, self.pods.num_generations, n)
        output = await self._generate(wide, disable_tqdm)
        trajectories = rows_of_trajectories(output, len(wide["prompts"]), step_wise=self.pods.step_wise)
        starts = range(0, len(trajectories), n)
        groups = [self._select(output, trajectories[start : start + n], wide, start) for start in starts]
        if self._ledger is not None:
            self._write(self._ledger, output, groups, wide)
        return _keep_rows(output, groups)

    async def _generate(self, batch: Any, disable_tqdm: bool) -> GeneratorOutput:
        # SkyRL's fully asynchronous trainer passes it to a generator whose signature has it, as ours does.
        if "disable_tqdm" in inspect.signature(self._generator.generate).parameters:
            return await self._generator.generate(batch, disable_tqdm=disable_tqdm)
        return await self._generator.generate(batch)

    def _select(self, output: GeneratorOutput, trajectories: list[list[int]], wide: Any, start: int) -> _PromptGroup:
        """Choose among a prompt's trajectories; `start` is the index of the first in the batch."""
        rewards_N = [total(output["rewards"][trajectory[-1]]) for trajectory in trajectories]
        trained_N = [any(any(output["loss_masks"][row]) for row in trajectory) for trajectory in trajectories]
        rewards_1N = pad_rewards([rewards_N], [trained_N])
        # The draws of a rule depend on seed, step and prompt alone.
        trajectory_ids = wide.get("trajectory_ids")
        prompt = str(start if trajectory_ids is None else trajectory_ids[start].instance_id)
        generator = seeded_generator(self.pods.seed, wide["batch_metadata"].global_step, prompt)
        selection = select(rewards_1N, self.pods.num_generations, self.pods.rule, generator)
        is_silent = bool(selection.take(rewards_1N).isnan().any())
        return _PromptGroup(trajectories, rewards_1N, selection.indices[0].tolist(), is_silent)

    def _write(self, ledger: LedgerWriter, output: GeneratorOutput, groups: list[_PromptGroup], wide: Any) -> None:
        """Write the groups to the ledger if it keeps their step."""
        step = wide["batch_metadata"].global_step
        if not ledger.keeps(step):
            return
        extras = wide.get("env_extras")
        rows_of_groups: list[list[dict[str, Any]]] = []
        for number, group in enumerate(groups):
            extras_of_prompt = extras[number * self.pods.num_rollouts] if extras else None
            rows = [
                ledger_row(
                    output,
                    trajectory,
                    rollout=rollout,
                    is_kept=rollout in group.kept and not group.is_silent,
                    extras=extras_of_prompt,
                    tokenizer=self._tokenizer,
                )
                for rollout, trajectory in enumerate(group.trajectories)
            ]
            rows_of_groups.append(rows)
        ledger.add(step, rows_of_groups)


def _keep_rows(output: GeneratorOutput, groups: list[_PromptGroup]) -> GeneratorOutput:
    """Return the rows of the kept trajectories, with SkyRL's metrics of all n and those of the selection."""
    kept_rows: list[int] = []
    silent: list[int] = []  # indices in the result
    for group in groups:
        for rollout in group.kept:
            trajectory = group.trajectories[rollout]
            if group.is_silent:
                silent += range(len(kept_rows), len(kept_rows) + len(trajectory))
            kept_rows += trajectory
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    kept: GeneratorOutput = take_rows(output, kept_rows, trajectories)
    silence(kept, silent)
    rewards_PN = torch.cat([group.rewards for group in groups])
    kept_PN = torch.zeros(rewards_PN.shape, dtype=torch.bool)
    for number, group in enumerate(groups):
        kept_PN[number, group.kept] = not group.is_silent
    metrics: dict[str, float] = {}
    for name, value in describe_selection(rewards_PN, kept_PN).items():
        # SkyRL averages over groups the metrics whose names have `mean`, and sums others.
        if "mean" not in name:
            name += "_mean"
        metrics[name] = value
    metrics["pods/all/rows"] = float(len(output["response_ids"]))
    metrics["pods/selected/rows"] = float(len(kept["response_ids"]))
    metrics["pods/tokens/generated"] = float(sum(map(len, output["response_ids"])))
    metrics["pods/tokens/trained"] = float(sum(map(len, kept["response_ids"])))
    metrics["pods/unusable_rewards"] = float(rewards_PN.isnan().sum())
    metrics["pods/skipped_groups"] = float(sum(group.is_silent for group in groups))
    kept["rollout_metrics"] = {**(output.get("rollout_metrics") or {}), **metrics}
    return kept
