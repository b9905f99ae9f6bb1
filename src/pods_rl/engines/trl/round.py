"""One training generation: n rollouts per prompt, their rewards, and the m that TRL trains on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NoReturn

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ...distributed import busy
from ...rollouts.allocating import live
from ...rollouts.stopping import Status
from ...selection import is_constant
from ...selection.registry import rule_name
from .batching import Shares
from .compat import Batch, TRLTrainer, standing_in
from .generated import Conversation, Generated, batch_row, conversations, turn_rewards, with_turn_rewards
from .generation import Turns
from .keeping import KeptRows, distinct_order, keep_rows, row_advantages
from .rollouts import Rollouts
from .rows import check_agreement, exchange_rows, gather_shares, own_rows, rows_moved, token_labels, uneven_gathers
from .tally import OneEntry, log_all_rollouts, log_selection, log_waves, total_reward
from .tools import Tools
from .update import Update
from .waves import RoundPlan, Wave

Build = Callable[[list[Batch]], Batch]


class RolloutRound:
    """Generate in waves, score, select; pass the kept rows and their rewards to TRL, and correct its statistics.

    Args:
        trainer: generates and scores; a user's overrides of `_generate` and `_calculate_rewards` are called.
        update: its clock and token counts.
        plan: waves, and what is drawn for them.
        tools: limits tools, closes environments.
        build: TRL's `_generate_and_score_completions`.
        inputs: TRL's rows of this process, m of each prompt.
    """

    def __init__(
        self, trainer: TRLTrainer, update: Update, plan: RoundPlan, tools: Tools, build: Build, inputs: list[Batch]
    ) -> None:
        self._trainer, self._update, self._plan, self._tools, self._build = trainer, update, plan, tools, build
        self._process = trainer.accelerator.process_index
        self.n, self.m = plan.n, plan.m
        processes = trainer.accelerator.num_processes
        self.shares = Shares(len(inputs) * processes // self.m, self.n, self.m, processes)
        self.rows = self.shares.rows(self._process)
        self.inputs = inputs  # of this process's rows
        self.key = plan.key(trainer.args.seed, trainer.state.global_step)
        self.generated = Generated(self.n, len(trainer.reward_funcs), processes, trainer.accelerator.device)

    def batch(self) -> Batch:
        """Generate, score and select; return the batch that TRL builds of the kept rows."""
        trained, rewards = self.generate_and_select()
        # Return the kept rows, already generated and scored, in place of a new generation.
        ready: dict[str, Any] = {"_generate": lambda *_: trained, "_calculate_rewards": lambda *_: rewards}
        with standing_in(self._trainer, **ready, **self._tools.ended(self.inputs)):
            return self._build(self.inputs)

    def generate_and_select(self) -> tuple[tuple[Any, ...], Tensor]:
        """Return the kept rows in the form of TRL's `_generate`, and their rewards `[P * M, F]`."""
        trainer, found, entry = self._trainer, self.generated, OneEntry(self._trainer)
        slots = found.add_groups(self._prompts())
        self._generate_waves(slots)
        slots_P = self._refilled(torch.tensor(slots))
        self._update.clock.enter("selection")
        found.sort(trainer._pending_extra_logs)
        entry.settle(found)
        # On the CPU: these are a few hundred numbers, and their indices are needed there.
        flat_scores = found.scores_GNF.flatten(0, 1)
        rewards = total_reward(flat_scores, trainer.reward_weights, self.n, trainer.multi_objective_aggregation).cpu()
        self.kept = kept = self._select(rewards, slots_P)
        log_selection(trainer._metrics["train"], rewards, kept)
        log_waves(trainer._metrics["train"], self._plan, found, kept.slots)
        flat = kept.flat(self.n)
        if self._plan.spreads_prompts:
            self.inputs = [found.inputs[group] for group in kept.groups.flatten()[self.rows].tolist()]
        self.record = self._record(rewards)
        trained = self.trained_rows(flat.tolist())
        self._update.clock.enter("update")
        return trained, flat_scores[flat.to(flat_scores.device)]

    def _prompts(self) -> list[Batch]:
        """The first row of each prompt of TRL's batch; where prompts stay, only of those that this process trains."""
        rows, m = self.rows, self.m
        if self._plan.spreads_prompts and self.shares.processes > 1:
            firsts = [self.inputs[row - rows.start] for row in rows if row % m == 0]
            return list(gather_object(firsts))
        own = range(rows.start // m, (rows.stop - 1) // m + 1)
        mine = {group: self.inputs[max(group * m, rows.start) - rows.start] for group in own}
        return [mine.get(group, {}) for group in range(self.shares.prompts)]

    def _generate_waves(self, groups: Sequence[int]) -> None:
        """Generate wave after wave for the groups that nothing has stopped yet."""
        going, found = list(groups), self.generated
        for start, end in zip([0, *self._plan.ends], self._plan.ends, strict=False):
            self._generate_wave(Wave(tuple(going), start, end - start, self.shares.processes, self._trainer.use_vllm))
            statuses = self._plan.statuses(found.scores_GNF[going, :end], self.key, going)
            for group, status in zip(going, statuses, strict=True):
                found.status[group] = status
            going = [group for group in going if found.status[group] == Status.OPEN]
            if not going:
                return

    def _generate_wave(self, wave: Wave) -> None:
        """Generate and score a wave; each rollout is scored once, by the process that generated it."""
        trainer, clock, found = self._trainer, self._update.clock, self.generated
        places, asked = wave.places(self._process), wave.asked(self._process)
        self.turns = Turns(trainer, [(*self.key, *place) for place in asked], max(wave.asked_counts))
        # Each rollout has its own objects, as TRL's rows have: a tool or a reward may change its arguments.
        inputs = _copies([found.inputs[group] for group, _ in asked])
        clock.enter("rollout")
        with uneven_gathers(trainer.accelerator, wave.asked_counts), standing_in(trainer, num_generations=wave.size):
            prompts, output, more = self._prepare_and_generate(inputs)
        real = len(places)
        clock.enter("reward")
        # A process without rollouts takes part in the gather with a score of nothing, which is cut away.
        scored = [max(count, 1) for count in wave.counts]
        functions = trainer.reward_funcs if real else [_no_score] * len(trainer.reward_funcs)
        inputs = inputs[: real or 1]
        prompts = _copies(prompts[: len(inputs)])
        completions, ids = _copies(output[3][: len(inputs)]), [list(ids) for ids in output[1][: len(inputs)]]
        scoring = nullcontext() if real else standing_in(trainer, reward_funcs=functions)
        used = trainer.environments
        trainer.environments = used and used[: len(inputs)]
        with uneven_gathers(trainer.accelerator, scored), scoring:
            scores = trainer._calculate_rewards(inputs, prompts, completions, ids)
        more = with_turn_rewards(more, used)
        self._tools.close(used)
        parts = zip(scores.split(scored), wave.counts, strict=True)
        found.add(wave, places, output, more, torch.cat([part[:count] for part, count in parts]))
        self._update.tokens["generated"] += sum(found.tokens[-real:]) if real else 0

    def _prepare_and_generate(self, rows: list[Batch]) -> tuple[list[Any], tuple[Any, ...], list[Conversation]]:
        """Have TRL prepare these rows (environments, tools, images) and generate; stop before it builds a batch.

        Returns:
            The prompts as TRL gave them to `_generate`, its result, and what each row has beyond its completion.
        """
        trainer, generate = self._trainer, self._trainer._generate
        found: list[tuple[list[Any], tuple[Any, ...], list[Conversation]]] = []

        def only_generate(prompts: list[Any]) -> NoReturn:
            asked = [list(prompt) if isinstance(prompt, list) else prompt for prompt in prompts]
            output = generate(prompts)
            more = conversations(rows, asked, prompts, output) if self._tools.carries else []
            found.append((prompts, output, more))
            raise _GeneratedError

        with suppress(_GeneratedError), standing_in(trainer, _generate=only_generate):
            self._build(rows)
        for name, values in found[0][1][5].items():  # as TRL does after a generation
            for i, row in enumerate(rows):
                row[name] = values[i] if isinstance(values, list) else values
        return found[0]

    def _refilled(self, slots_P: Tensor) -> Tensor:
        """Draw and generate further prompts for the slots of dead groups; return the group of each slot."""
        plan, found, args = self._plan, self.generated, self._trainer.args
        if plan.refill is None:
            return slots_P
        for _ in range(args.refill_limit):
            dead = (~live(plan.answers(found.scores_GNF[slots_P]))).nonzero().flatten()
            if not len(dead):
                break
            rows = [self._trainer.train_dataset[index] for index in plan.refill.prompts(len(dead))]
            new = found.add_groups([{name: row[name] for name in self.inputs[0]} for row in rows])
            self._generate_waves(new)
            slots_P = slots_P.index_copy(0, dead, torch.tensor(new))
        return slots_P

    def _select(self, rewards_GN: Tensor, slots_P: Tensor) -> KeptRows:
        """The rows of all processes, the same on each."""
        plan, found, args, name = self._plan, self.generated, self._trainer.args, rule_name(self._trainer.args.rule)
        order = None
        if args.prefer_distinct:
            labels = gather_shares(token_labels(found.completion_ids, self._trainer.accelerator.device), found.counts)
            order = distinct_order(found.placed(labels.cpu()), torch.tensor(found.generated))
        with busy(f"rule {name}"):
            kept = keep_rows(
                args,
                rewards_GN,
                plan.answers(found.scores_GNF),
                slots_P,
                order_GN=order,
                weights_G=plan.weights(found.scores_GNF, self.key),
                generator=torch.Generator().manual_seed(hash(self.key) % 2**63),
            )
        if self.n != self.m:
            check_agreement(kept.flat(self.n), name, self._trainer.accelerator)
        return kept

    def _record(self, rewards_GN: Tensor) -> Rollouts:
        found, plan = self.generated, self._plan
        inputs = [found.inputs[number // self.n] for number in found.numbers]
        prompts = [each.asked for each in found.more] or [row["prompt"] for row in inputs]
        return Rollouts(
            step=self._trainer.state.global_step + 1,
            inputs=inputs,
            prompts=prompts,
            completions=found.completions,
            completion_tokens=[len(ids) for ids in found.completion_ids],
            reward_names=list(self._trainer.reward_func_names),
            rewards_per_func=found.scores_GNF.flatten(0, 1)[found.numbers],
            numbers=found.numbers,
            rewards=rewards_GN,
            kept=self.kept.numbers,
            groups=self.kept.groups,
            turn_rewards=turn_rewards(found.more),
            wave_ends=plan.ends if plan.stopping else [],
            stopped=[status.label for status in found.status] if plan.stopping else [],
        )

    def trained_rows(self, kept: list[int]) -> tuple[Any, ...]:
        """Exchange kept rows between processes; return the `_generate` result for the rows trained here."""
        trainer, found, numbers = self._trainer, self.generated, self.generated.numbers
        # TRL's completions table holds the trained rows only, so columns logged by reward functions must match them.
        logged = trainer._pending_extra_logs
        columns = {name: values for name, values in logged.items() if len(values) == len(numbers)}
        own = own_rows(kept, numbers, found.completion_ids, found.completions, found.logprobs, columns, found.more)
        sources = self.generated.process_GN.flatten()[kept].tolist()
        mine = exchange_rows(self.shares, self._process, kept, own, trainer.accelerator.device, sources)
        for name in {*columns, *(name for row in mine for name in row.extra)}:
            logged[name] = [row.extra.get(name) for row in mine]
        if self.shares.processes > 1:
            trainer._metrics["train"]["pods/rows_moved"].append(float(rows_moved(self.shares, sources)))
        more = [row.more for row in mine if row.more is not None]
        if more:
            self.inputs = [batch_row(row, each) for row, each in zip(self.inputs, more, strict=True)]
            prompt_ids = [each.prompt_ids for each in more]
        else:
            ids_of = {number // self.n: ids for number, ids in zip(numbers, found.prompt_ids, strict=True)}
            groups = [kept[row] // self.n for row in self.rows]
            for group in {*groups} - ids_of.keys():  # other processes generated all its rollouts
                ids_of[group] = trainer._tokenize_prompts([found.inputs[group]["prompt"]])[0][0]
            prompt_ids = [ids_of[group] for group in groups]
        return (
            prompt_ids,
            [row.completion_ids for row in mine],
            [each.tool_mask for each in more] if any(each.tool_mask is not None for each in more) else None,
            [row.completion for row in mine],
            found.logprobs and [row.logprobs for row in mine],
            {name: [each.fields.get(name) for each in more] for each in more[:1] for name in each.fields},
            [each.images for each in more] if any(each.images is not None for each in more) else None,
            [each.tool_images for each in more] if any(each.tool_images for each in more) else [],
        )

    def finish(self, output: Batch) -> Rollouts:
        """Put our advantages into TRL's batch, correct its statistics to all rollouts, and return the record."""
        trainer, record, kept = self._trainer, self.record, self.kept
        own, device = slice(self.rows.start, self.rows.stop), output["advantages"].device
        args = trainer.args
        all_rows = row_advantages(record.rewards, kept, args, trainer.scale_rewards)
        if all_rows is not None:
            output["advantages"] = all_rows[own].to(device)
        elif (
            args.skip_zero_advantage_steps or args.prompt_once
        ) and trainer.multi_objective_aggregation == "sum_then_normalize":
            # The mean of equal float32 rewards can differ from them by rounding: TRL's advantages are then not zero.
            constant = is_constant(kept.by_slot(record.rewards)).repeat_interleave(self.m)[own].to(device)
            output["advantages"] = output["advantages"].masked_fill(constant, 0.0)
        weighted = bool((kept.weights != 1).any())
        if weighted:
            output["advantages"] = output["advantages"] * kept.weights.flatten()[own].to(output["advantages"])
        if len(record.rewards) > self.shares.prompts or self.n != self.m:
            scores = self.generated.scores_GNF.flatten(0, 1)
            totals = total_reward(scores, trainer.reward_weights, self.n, "sum_then_normalize")
            log_all_rollouts(trainer._metrics["train"], scores, totals, trainer.reward_func_names)
        record.advantages = trainer.accelerator.gather(output["advantages"]).view(-1, self.m).cpu()
        if all_rows is not None or weighted:
            logged, rows = trainer._logs["advantages"], record.advantages.flatten().tolist()
            for _ in range(min(len(logged), len(rows))):
                logged.pop()
            logged.extend(rows)
        return record


class _GeneratedError(Exception):
    """Ends TRL's method once `_generate` has returned."""


def _copies(values: list[Any]) -> list[Any]:
    """Copy each value by itself: `copy.deepcopy` of the list would keep objects that two values share."""
    return [copy.deepcopy(value) for value in values]


def _no_score(completions: list[Any], **_: Any) -> list[float]:
    """Stand in for each reward function where a process has no rollouts."""
    return [0.0] * len(completions)
