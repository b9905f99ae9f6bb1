"""One training generation: n rollouts per prompt, their rewards, and the m that TRL trains on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...distributed import busy
from ...planning.batching import Shares
from ...selection import Selection, advantages, is_constant, select, spread
from ...selection.registry import rule_name
from .compat import Batch, Completions, TRLTrainer, nanstd, standing_in
from .config import PODSConfig
from .generation import Key
from .rollouts import Rollouts
from .rows import check_agreement, exchange_rows, own_rows, rows_moved, uneven_gathers
from .update import Update


class SelectionDraws:
    """The draws of each generation, by run, step and generation in it: equal on all processes and after a resume."""

    def __init__(self) -> None:
        self._last = (-1, 0)  # step, generations in it

    def begin(self, seed: int, step: int) -> Key:
        """Return the key of the next generation, with which the keys of its rollouts begin."""
        self._last = (step, self._last[1] + 1 if self._last[0] == step else 0)
        return (seed, *self._last)


class RolloutRound:
    """Generate, score, select; pass the kept rows and their rewards to TRL, and correct its statistics to all n.

    Args:
        trainer: generates and scores; a user's overrides of `_generate` and `_calculate_rewards` are called.
        update: its clock and token counts.
        draws: for rules that draw.
        inputs: TRL's rows of this process, m of each prompt.
    """

    def __init__(self, trainer: TRLTrainer, update: Update, draws: SelectionDraws, inputs: list[Batch]) -> None:
        self._trainer, self._update, self._draws, self._inputs = trainer, update, draws, inputs
        self._process = trainer.accelerator.process_index
        self.n, self.m = rollouts_of(trainer.args), trainer.num_generations
        processes = trainer.accelerator.num_processes
        self.shares = Shares(len(inputs) * processes // self.m, self.n, self.m, processes)
        self.here, self.rows = self.shares.rollouts(self._process), self.shares.rows(self._process)
        self.drawn: list[Key] = []  # for each row of the current `_generate` on this process, the key of its draws

    def generate_and_select(self) -> tuple[tuple[Any, ...], Tensor]:
        """Return the kept rows in the form of TRL's `_generate`, and their rewards `[P * M, F]`."""
        trainer, clock, shares = self._trainer, self._update.clock, self.shares
        self._key = self._draws.begin(trainer.args.seed, trainer.state.global_step)
        self.drawn = [(*self._key, *divmod(r, self.n)) for r in self.here]
        # A rollout's input is the first row here of its prompt.
        of_row = [max(r // self.n * self.m, self.rows.start) - self.rows.start for r in self.here]
        inputs = [self._inputs[i] for i in of_row]
        prompts = [row["prompt"] for row in inputs]
        with uneven_gathers(trainer.accelerator, shares.counts):
            clock.enter("rollout")
            with standing_in(trainer, num_generations=self.n):
                generated = trainer._generate(prompts)
            completion_ids, completions = generated[1], generated[3]
            self._update.tokens["generated"] += sum(len(ids) for ids in completion_ids)
            clock.enter("reward")
            # Each rollout has its own objects, as TRL's rows have: a reward may change its arguments.
            ids = [list(ids) for ids in completion_ids]
            scores = trainer._calculate_rewards(_copies(inputs), _copies(prompts), _copies(completions), ids)
        clock.enter("selection")
        # On the CPU: these are a few hundred numbers, and their indices are needed there.
        rewards = total_reward(scores, trainer.reward_weights, self.n, trainer.multi_objective_aggregation).cpu()
        kept = self._select(rewards)
        log_selection(trainer._metrics["train"], rewards, kept)
        self._scores = scores
        self.record = Rollouts(
            step=trainer.state.global_step + 1,
            inputs=inputs,
            prompts=prompts,
            completions=completions,
            completion_tokens=[len(ids) for ids in completion_ids],
            reward_names=list(trainer.reward_func_names),
            rewards_per_func=scores[self.here.start : self.here.stop],
            first=self.here.start,
            rewards=rewards,
            kept=kept,
        )
        flat = (torch.arange(shares.prompts).unsqueeze(1) * self.n + kept).flatten()
        trained = self.trained_rows(generated, flat.tolist())
        clock.enter("update")
        return trained, scores[flat.to(scores.device)]

    def _select(self, rewards_PN: Tensor) -> Tensor:
        """The kept rollouts' indices `[P, M]`, ascending, over all processes."""
        if self.n == self.m:
            return torch.arange(self.n).repeat(len(rewards_PN), 1)
        args, name = self._trainer.args, rule_name(self._trainer.args.rule)
        draw = torch.Generator().manual_seed(hash(self._key) % 2**63)
        with busy(f"rule {name}"):
            chosen = select(rewards_PN, self.m, args.rule, generator=draw)
        kept = chosen.indices.sort(dim=1).values
        check_agreement(kept, name, self._trainer.accelerator)
        return kept

    def trained_rows(self, generated: tuple[Any, ...], kept: list[int]) -> tuple[Any, ...]:
        """Exchange kept rows between processes; return the `_generate` result for the rows trained here."""
        trainer, here = self._trainer, self.here
        prompt_ids, completion_ids, tool_mask, completions, logprobs, *rest = generated
        # TRL's completions table holds the trained rows only, so columns logged by reward functions must match them.
        logged = trainer._pending_extra_logs
        columns = {name: values for name, values in logged.items() if len(values) == len(here)}
        own = own_rows(kept, here, completion_ids, completions, logprobs, columns)
        mine = exchange_rows(self.shares, self._process, kept, own, trainer.accelerator.device)
        for name in {*columns, *(name for row in mine for name in row.extra)}:
            logged[name] = [row.extra.get(name) for row in mine]
        if self.shares.processes > 1:
            trainer._metrics["train"]["pods/rows_moved"].append(float(rows_moved(self.shares, kept)))
        # Every prompt of this process's rows has a rollout here, with its tokens.
        of_rollout = [max(row // self.m * self.n, here.start) - here.start for row in self.rows]
        return (
            [prompt_ids[i] for i in of_rollout],
            [row.completion_ids for row in mine],
            tool_mask,
            [row.completion for row in mine],
            logprobs and [row.logprobs for row in mine],
            *rest,
        )

    def in_parts(
        self, prompt_ids: list[list[int]], generate: Callable[[list[list[int]], list[Key]], Completions]
    ) -> Completions:
        """Call the generator for `rollout_batch_size` rows and their keys at a time, unless it is vLLM."""
        most = max(self.shares.counts)
        rows = self._trainer.args.rollout_batch_size or most
        completion_ids: list[list[int]] = []
        with busy("generation"):
            if self._trainer.use_vllm or rows >= most:
                return generate(prompt_ids, self.drawn)
            for start in range(0, most, rows):
                # The same number of calls on every process, since each gathers sharded weights: without rows, repeat.
                part = slice(start, start + rows) if start < len(prompt_ids) else slice(-1, None)
                completion_ids.extend(generate(prompt_ids[part], self.drawn[part])[0])
        return completion_ids[: len(prompt_ids)], None  # these generators return no sampling log-probabilities

    def finish(self, output: Batch) -> Rollouts:
        """Put our advantages into TRL's batch, correct its statistics to all n, and return the record."""
        trainer, record = self._trainer, self.record
        own, device = slice(self.rows.start, self.rows.stop), output["advantages"].device
        when, baseline = trainer.args.advantages, trainer.args.advantage_baseline
        if (when == "before" and self.n != self.m) or baseline != "mean":
            how: dict[str, Any] = {"when": when, "baseline": baseline, "scale": trainer.scale_rewards}
            all_rows = advantages(record.rewards, Selection(record.kept), **how).float().flatten()
            logged = trainer._logs["advantages"]
            for _ in range(min(len(logged), len(all_rows))):
                logged.pop()
            logged.extend(all_rows.tolist())
            output["advantages"] = all_rows[own].to(device)
        elif trainer.args.skip_zero_advantage_steps and trainer.multi_objective_aggregation == "sum_then_normalize":
            # The mean of equal float32 rewards can differ from them by rounding: TRL's advantages are then not zero.
            constant = is_constant(record.rewards.gather(1, record.kept)).repeat_interleave(self.m)[own].to(device)
            output["advantages"] = output["advantages"].masked_fill(constant, 0.0)
        if self.n != self.m:
            totals = total_reward(self._scores, trainer.reward_weights, self.n, "sum_then_normalize")
            log_all_rollouts(trainer._metrics["train"], self._scores, totals, trainer.reward_func_names)
        record.advantages = trainer.accelerator.gather(output["advantages"]).view(-1, self.m).cpu()
        return record


def rollouts_of(args: PODSConfig) -> int:
    """Return n; PODSConfig sets it when it is built."""
    assert args.num_rollouts is not None
    return args.num_rollouts


def sequences_at_once(args: PODSConfig) -> int:
    """Return how many rollouts colocated vLLM works on at once: a generation's, or `rollout_batch_size`."""
    assert args.generation_batch_size is not None
    m = args.num_generations
    rollouts = max(Shares(args.generation_batch_size // m, rollouts_of(args), m, args.world_size).counts)
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


def _copies(values: list[Any]) -> list[Any]:
    """Copy each value by itself: `copy.deepcopy` of the list would keep objects that two values share."""
    return [copy.deepcopy(value) for value in values]


def total_reward(rewards_per_func: Tensor, weights: Tensor, group: int, aggregation: str) -> Tensor:
    """Return one reward per rollout, `[P, group]`, added up as TRL does; NaN if every function returned NaN.

    Args:
        rewards_per_func: `[P * group, F]`.
        weights: `[F]`.
        group: rollouts per prompt.
        aggregation: TRL's `multi_objective_aggregation`.
    """
    unscored = rewards_per_func.isnan().all(dim=1)
    if aggregation == "normalize_then_sum":
        grouped = rewards_per_func.view(-1, group, rewards_per_func.size(1))
        centred = grouped - grouped.nanmean(dim=1, keepdim=True)
        count = (~grouped.isnan()).sum(dim=1, keepdim=True)
        std = (centred.square().nansum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        rewards_per_func = (centred / (std + 1e-4)).view_as(rewards_per_func)
    total = (rewards_per_func * weights.to(rewards_per_func)).nansum(dim=1)
    return total.masked_fill(unscored, torch.nan).view(-1, group)


def log_selection(metrics: dict[str, list[float]], rewards_PN: Tensor, kept_PM: Tensor) -> None:
    """Log the kept rollouts' rewards and the groups without spread, over all processes."""
    kept = rewards_PN.gather(1, kept_PM)
    constant = is_constant(kept)
    metrics["pods/selected/reward_mean"].append(kept.nanmean().item())
    metrics["pods/selected/reward_std"].append(spread(kept).mean().item())
    metrics["pods/zero_variance_groups"].append(float(constant.sum()))
    metrics["pods/zero_variance_share"].append(constant.float().mean().item())


def log_all_rollouts(
    metrics: dict[str, list[float]], rewards_per_func: Tensor, rewards_PN: Tensor, names: list[str]
) -> None:
    """Replace the reward statistics that TRL just logged over the kept rows by those over all n."""
    for i, name in enumerate(names):
        metrics[f"rewards/{name}/mean"][-1] = rewards_per_func[:, i].nanmean().item()
        metrics[f"rewards/{name}/std"][-1] = nanstd(rewards_per_func[:, i]).item()
    metrics["reward"][-1] = rewards_PN.nanmean().item()
    metrics["reward_std"][-1] = nanstd(rewards_PN.flatten()).item()
    metrics["frac_reward_zero_std"][-1] = is_constant(rewards_PN).float().mean().item()
