"""One run of TRL's generation: n rollouts of each prompt, of which m are kept.

TRL's method runs once, on n rows a prompt. Between its generation and its log-probabilities the rollouts are scored and
selected, and its lists are shortened to the kept rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ...errors import UserError
from ...selection import Selection, advantages, is_constant, spread
from ...text import change_text, utf8_text
from .batching import Shares
from .compat import Batch, TRLTrainer, nanstd
from .config import group_sizes
from .record import Rollouts

Output = tuple[Any, ...]  # TRL's eight results of `_generate`, a list or None each; the sixth is a mapping of lists
Columns = dict[Any, Sequence[Any]]  # by name, a value for each rollout of this process
FIELDS, IMAGES, TOOL_IMAGES = 5, 6, 7  # places in Output


def copies(values: Sequence[Any]) -> list[Any]:
    """Copy each value by itself: `copy.deepcopy` of the list would keep objects that two values share."""
    return [copy.deepcopy(value) for value in values]


def stable_seed(*numbers: int) -> int:
    """Return a seed that depends on these numbers alone, the same in every version of Python.

    >>> stable_seed(3, 1) == stable_seed(3, 1) != stable_seed(1, 3)
    True
    """
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=7).digest(), "little")


@dataclass
class Generation:
    """The rollouts of one run of TRL's method.

    Rollouts are numbered over all processes: rollout i of group g is number g n + i. Rows are the kept ones, P x m.

    Args:
        shares: the rollouts that each process generates, and the rows that it trains.
        process: this one.
        inputs: TRL's rows of this process, m of each prompt.
        key: of this generation's random draws; seed, step, and how many generations the step had before.
    """

    shares: Shares
    process: int
    inputs: list[Batch]
    key: tuple[int, int, int]
    rollouts: list[Batch] = field(init=False)  # the list that TRL's method runs on
    calculate_rewards: Callable[..., Tensor] | None = None  # TRL's method, or a subclass's
    scores: Tensor | None = None  # [P * n, F], as that method gave them
    kept_scores: Tensor | None = None  # [P * m, F], once rows are selected
    record: Rollouts | None = None
    dead: Tensor | None = None  # [P] bool, groups that dynamic sampling could not replace

    def __post_init__(self) -> None:
        # Each rollout has its own objects, as TRL's rows have: a tool or a reward may change its arguments.
        self.rollouts = copies([self.row_of(number) for number in self.numbers])

    @property
    def numbers(self) -> range:
        """The rollouts that this process generates."""
        return self.shares.rollouts(self.process)

    @property
    def rows(self) -> range:
        """The rows that this process trains."""
        return self.shares.rows(self.process)

    @property
    def rollout_keys(self) -> list[tuple[int, ...]]:
        """The key of each rollout's random draws: they do not depend on the process that generates it."""
        return [(*self.key, *divmod(number, self.shares.num_rollouts)) for number in self.numbers]

    def row_of(self, number: int) -> Batch:
        """Return TRL's row of a rollout's prompt; this process trains rows of every prompt that it generates for."""
        first = number // self.shares.num_rollouts * self.shares.num_generations
        return self.inputs[max(first, self.rows.start) - self.rows.start]

    def place(self, number: int) -> int:
        """Return where a rollout stands in this process's lists; another of its prompt for one of other processes."""
        own, first = self.numbers, number // self.shares.num_rollouts * self.shares.num_rollouts
        return (number if number in own else max(first, own.start)) - own.start

    def result(self) -> tuple[Rollouts, Tensor]:
        """Return the record of the rollouts and their scores, once they are selected."""
        assert self.record is not None
        assert self.scores is not None
        return self.record, self.scores

    def scores_of_kept_rows(self, *columns: Sequence[Any]) -> Tensor:
        """Stand in for `_calculate_rewards` where TRL calls it after `_generate`: the kept rows are scored already."""
        assert self.calculate_rewards is not None
        if self.kept_scores is None:  # a subclass's `_generate` that did not call ours: `check_rows` raises
            return self.calculate_rewards(*columns)
        return self.kept_scores

    def check_rows(self, batch: Batch, name: str) -> None:
        """Raise UserError unless TRL built its batch from the kept rows."""
        if self.record is None or len(batch["completion_ids"]) != len(self.rows):
            raise UserError(
                f"{name}._generate returned {len(batch['completion_ids'])} rows without a selection; PODSTrainer keeps "
                f"{len(self.rows)} of them in its own `_generate`. Call super()._generate(prompts) with TRL's list of "
                "prompts, or override `_generate_single_turn`."
            )


def policy_tokens(output: Output) -> int:
    """Return how many tokens the policy wrote, without those of tools and environments."""
    _, completion_ids, tool_mask, *_ = output
    return sum(map(len, completion_ids)) if tool_mask is None else sum(map(sum, tool_mask))


def add_fields(rows: list[Batch], output: Output) -> None:
    """Add the fields that a rollout function returned to its rows, as TRL passes them to reward functions."""
    for name, values in output[FIELDS].items():
        for i, row in enumerate(rows):
            row[name] = values[i] if isinstance(values, list) else values


def record_of(
    generation: Generation, trainer: TRLTrainer, prompts: Sequence[Any], output: Output, scores: Tensor
) -> Rollouts:
    """Return the record of a generation that is scored, before its lists are shortened; nothing is kept yet.

    Args:
        scores: `[P * n, F]` of all processes.
    """
    numbers = list(generation.numbers)
    # copies: the environment's next rollout may change its own
    own = [copy.deepcopy(getattr(environment, "turn_rewards", None)) for environment in trainer.environments or ()]
    turns = own if any(rewards is not None for rewards in own) else output[FIELDS].get("turn_rewards")
    n, aggregation = generation.shares.num_rollouts, trainer.multi_objective_aggregation
    return Rollouts(
        step=trainer.state.global_step + 1,
        inputs=[generation.row_of(number) for number in numbers],
        prompts=list(prompts),
        completions=list(output[3]),
        completion_tokens=[len(ids) for ids in output[1]],
        reward_names=list(trainer.reward_func_names),
        rewards_per_func=scores[numbers],
        numbers=numbers,
        rewards=total_reward(scores.cpu(), trainer.reward_weights, n, aggregation),
        kept=torch.empty(0, dtype=torch.int64),
        groups=torch.arange(generation.shares.prompts),
        turn_rewards=list(turns or ()),
        masked=masked_rollouts(generation.shares, output[1], trainer),
    )


def masked_rollouts(shares: Shares, completion_ids: Sequence[Sequence[int]], trainer: TRLTrainer) -> Tensor | None:
    """Return which rollouts TRL would mask out of the loss, as truncated, over all processes, bool `[P, N]`.

    None if `mask_truncated_completions` is off, and with n = m: there is nothing to select, and the rows stay TRL's.
    Call this on every process.

    Args:
        completion_ids: of this process's rollouts.
    """
    n = shares.num_rollouts
    if not trainer.mask_truncated_completions or n == shares.num_generations:
        return None
    ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}  # as TRL decides
    flags = [int(not ids or ids[-1] not in ends) for ids in completion_ids]
    masked = trainer.accelerator.gather(torch.tensor(flags, device=trainer.accelerator.device)).view(-1, n).bool().cpu()
    trainer._metrics["train"]["pods/masked_rollouts"].append(float(masked.sum()))
    return masked


def scores_of_rows(generation: Generation, kept: Sequence[int]) -> Tensor:
    """Return the scores of the kept rows for TRL, `[P * m, F]`.

    A row that is masked out has none, so that it has advantage 0 and is no part of its group's mean.

    Args:
        kept: the numbers of the kept rollouts.
    """
    record, scores = generation.result()
    rows = scores[kept]
    if record.masked is None:
        return rows
    masked = record.masked.flatten()[kept].to(rows.device)
    return rows.masked_fill(masked.unsqueeze(1), torch.nan)


def show_scores(logged: Mapping[str, Any], generation: Generation) -> None:
    """Put the scores of rows that are masked out into TRL's table of completions, which has NaN for them.

    Args:
        logged: by reward function, the column of the table; its last rows are those of this generation.
    """
    record, scores = generation.result()
    if record.masked is None:
        return
    rows = scores[record.kept_numbers()]
    for i, name in enumerate(record.reward_names):
        column = rows[:, i].tolist()
        for _ in range(min(len(logged[name]), len(column))):
            logged[name].pop()
        logged[name].extend(column)


# -- kept rollouts: from TRL's lists to those of the process that trains them ------------------------------------------


def columns_of(generation: Generation, prompts: list[Any], output: Output, logged: Mapping[str, list[Any]]) -> Columns:
    """Return all that TRL has of each rollout of this process.

    Args:
        prompts: TRL's argument of `_generate`, with images and with what the environment said first.
        output: its results.
        logged: columns that reward functions logged.
    """
    results: dict[Any, Any] = dict(enumerate(output))
    # TRL would take the images of all n rows from the data set where it gets none.
    results[IMAGES] = output[IMAGES] or [_data_images(row) for row in generation.rollouts]
    results[TOOL_IMAGES] = output[TOOL_IMAGES] or [[]] * len(prompts)
    fields = results.pop(FIELDS).items()
    results |= {("field", name): x if isinstance(x, list) else [x] * len(prompts) for name, x in fields}
    results |= {("logged", name): values for name, values in logged.items() if len(values) == len(prompts)}
    return {"prompt": prompts} | {name: values for name, values in results.items() if values is not None}


def _data_images(row: Batch) -> list[Any] | None:
    return row["images"] if "images" in row else None if row.get("image") is None else [row["image"]]


def output_of(columns: Columns) -> Output:
    """Return TRL's eight results of `_generate`, from the columns of `columns_of`."""
    results: list[Any] = [columns.get(place) for place in range(TOOL_IMAGES + 1)]
    results[FIELDS] = named(columns, "field")
    results[IMAGES] = results[IMAGES] if any(results[IMAGES]) else None
    results[TOOL_IMAGES] = results[TOOL_IMAGES] if any(results[TOOL_IMAGES]) else []
    return tuple(results)


def named(columns: Columns, kind: str) -> dict[str, Any]:
    """Return the columns of one kind by their own names.

    >>> named({0: [1], ("logged", "length"): [7]}, "logged")
    {'length': [7]}
    """
    return {name[1]: values for name, values in columns.items() if isinstance(name, tuple) and name[0] == kind}


def move_rows(
    columns: Columns, places: Sequence[int], sources: Sequence[int], targets: Sequence[int], accelerator: Accelerator
) -> Columns:
    """Return the columns of the rows whose target is this process. Call this on every process.

    Rows that change their process travel to all of them as pickles, as accelerate sends objects.

    Args:
        columns: of this process's rows.
        places: of each moved or kept row, over all processes, its place in the columns of its source.
        sources: the process that has each row.
        targets: the process that each row moves to.
        accelerator: of this process.

    Example:
        >>> from accelerate import Accelerator
        >>> move_rows({"text": ["a", "b", "c"]}, [2, 0], [0, 0], [0, 0], Accelerator(cpu=True))
        {'text': ['c', 'a']}
    """
    process = accelerator.process_index
    own = {
        row: {name: values[places[row]] for name, values in columns.items()}
        for row, source in enumerate(sources)
        if source == process
    }
    if list(sources) != list(targets):
        leaving = [(row, values) for row, values in own.items() if targets[row] != process]
        own |= dict(gather_object(leaving))
    mine = [own[row] for row, target in enumerate(targets) if target == process]
    # Another process may have columns of its own: a reward function may log one for some rows only.
    return {name: [row.get(name) for row in mine] for name in dict.fromkeys(name for row in mine for name in row)}


# -- rewards and advantages ------------------------------------------------------------------------------------------


def total_reward(
    rewards_per_func: Tensor, weights: Tensor, group: int, aggregation: str, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return one reward per rollout, `[P, group]`, added up as TRL does; NaN if every function returned NaN.

    The sum is exact to float64 and then rounded, so that equal parts have one sum in whatever order they are.

    Args:
        rewards_per_func: `[P * group, F]`.
        weights: `[F]`.
        group: rollouts per prompt.
        aggregation: TRL's `multi_objective_aggregation`.
        dtype: of the sum. In float64 the order of equal parts hardly changes it; TRL adds in float32.
    """
    scores = rewards_per_func.to(dtype)
    unscored = scores.isnan().all(dim=1)
    if aggregation == "normalize_then_sum":
        grouped = scores.view(-1, group, scores.size(1))
        centred = grouped - grouped.nanmean(dim=1, keepdim=True)
        count = (~grouped.isnan()).sum(dim=1, keepdim=True)
        std = (centred.square().nansum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        # Divided by a deviation of 0, rounding would become a reward.
        constant = torch.stack([is_constant(column) for column in grouped.unbind(dim=2)], dim=1)
        scores = (centred / (std + 1e-4)).masked_fill(constant.unsqueeze(1), 0.0).view_as(scores)
    total = (scores * weights.to(scores)).nansum(dim=1)
    return total.masked_fill(unscored, torch.nan).view(-1, group)


def set_advantages(batch: Batch, generation: Generation, trainer: TRLTrainer) -> None:
    """Put the advantages of this process's rows into TRL's batch, where TRL's own are not right.

    TRL's are right for the mean of the kept rows. They are not for other baselines, nor for a batch that dynamic
    sampling changed and that is scaled as one. Groups without a signal have advantages of exactly 0.
    """
    record, _ = generation.result()
    args, scale, m = trainer.args, trainer.scale_rewards, record.kept.size(1)
    rows = slice(generation.rows.start, generation.rows.stop)
    is_plain = args.num_rollouts == args.num_generations
    before = args.advantages == "before" and not is_plain
    joined = len(record.rewards) != len(record.groups) and scale == "batch"
    advantages_B = batch["advantages"].clone()
    silent_P = torch.zeros(len(record.groups), dtype=torch.bool)
    if before or joined or args.advantage_baseline != "mean":
        how: Any = {"when": args.advantages, "baseline": args.advantage_baseline, "scale": scale}
        ours_PM = advantages(_single_rewards(generation, trainer), Selection(record.kept), **how)
        advantages_B = ours_PM.flatten()[rows].to(advantages_B.device)
        silent_P |= is_constant(record.scored_rewards()[record.groups] if before else record.kept_rewards())
    elif not (is_plain and args.exact_trl):
        # The mean of equal float32 rewards can differ from them by rounding: TRL's advantages are then not zero.
        silent_P |= has_constant_rows(generation, trainer)
    if generation.dead is not None:
        # The named reward is equal for all of the group; others may differ, and must not train it.
        silent_P |= generation.dead
    advantages_B[silent_P.repeat_interleave(m)[rows].to(advantages_B.device)] = 0.0
    if not torch.equal(advantages_B, batch["advantages"]):
        batch["advantages"] = advantages_B


def _single_rewards(generation: Generation, trainer: TRLTrainer) -> Tensor:
    """Return the rewards of each prompt's n rollouts in float32, as TRL adds them up, `[P, N]`."""
    record, scores = generation.result()
    n, aggregation = record.rewards.size(1), trainer.multi_objective_aggregation
    totals_GN = total_reward(scores.cpu(), trainer.reward_weights, n, aggregation, dtype=torch.float32)
    if record.masked is not None:
        totals_GN = totals_GN.masked_fill(record.masked, torch.nan)
    return totals_GN[record.groups]


def has_constant_rows(generation: Generation, trainer: TRLTrainer) -> Tensor:
    """Return which prompts have kept rows of equal rewards, added up as TRL does for its advantages, bool `[P]`."""
    record, _ = generation.result()
    if trainer.multi_objective_aggregation == "sum_then_normalize":
        return is_constant(record.kept_rewards())
    # Each function is normalised over the kept rows. Dynamic sampling never joins such batches.
    assert generation.kept_scores is not None
    scores, m = generation.kept_scores.cpu(), record.kept.size(1)
    return is_constant(total_reward(scores, trainer.reward_weights, m, trainer.multi_objective_aggregation))


def gather_advantages(batch: Batch, trainer: TRLTrainer) -> Tensor:
    """Return the advantages of the rows of all processes, `[P, M]` on the CPU. Call this on every process."""
    return trainer.accelerator.gather(batch["advantages"]).view(-1, group_sizes(trainer.args)[1]).cpu()


# -- metrics ---------------------------------------------------------------------------------------------------------

Metrics = dict[str, list[float]]

# Numbers of rollouts, rows or steps: they add up within a step, and are not logged while they are zero.
COUNTERS = (
    "pods/unusable_rewards", "pods/unscored_rollouts", "pods/reward_errors", "pods/reward_timeouts",
    "pods/masked_rollouts", "pods/verifier_timeouts", "pods/verifier_crashes", "pods/rows_moved",
    "pods/rows/left_out", "pods/rows/merged", "pods/skipped_step", "pods/bad_loss", "pods/bad_gradient",
)  # fmt: skip


def drop_zero_counters(metrics: Metrics) -> None:
    """Remove counters that were zero in every step since the last line of the log.

    >>> metrics = {"pods/bad_loss": [0.0, 0.0], "reward": [0.0]}
    >>> drop_zero_counters(metrics); metrics
    {'reward': [0.0]}
    """
    for name in COUNTERS:
        if name in metrics and not any(metrics[name]):
            del metrics[name]


def add_up_counters(metrics: Metrics, before: Mapping[str, int]) -> None:
    """Add up what several generations of one step counted: TRL logs the mean of the entries.

    Args:
        before: the number of entries before the first of them.
    """
    for name in COUNTERS:
        start = before.get(name, 0)
        if len(metrics.get(name, ())) > start + 1:
            metrics[name][start:] = [sum(metrics[name][start:])]


def log_selection(metrics: Metrics, record: Rollouts) -> None:
    """Log the kept rollouts' rewards and the groups without spread, over all processes."""
    kept_PM = record.kept_rewards()
    metrics["pods/selected/reward_mean"].append(kept_PM.nanmean().item())
    metrics["pods/selected/reward_std"].append(spread(kept_PM).mean().item())
    metrics["pods/zero_variance_share"].append(is_constant(kept_PM).float().mean().item())


def log_all_rollouts(trainer: TRLTrainer, scores: Tensor, before: Mapping[str, int]) -> None:
    """Log reward statistics of all rollouts instead of those that TRL logged of the kept rows.

    Args:
        scores: `[G * n, F]` of the reward functions.
        before: the number of entries of each metric before TRL's method ran.
    """
    metrics = trainer._metrics["train"]
    totals_GN = total_reward(scores.cpu(), trainer.reward_weights, group_sizes(trainer.args)[0], "sum_then_normalize")
    found = {
        "reward": totals_GN.nanmean(),
        "reward_std": nanstd(totals_GN.flatten()),
        "frac_reward_zero_std": is_constant(totals_GN).float().mean(),
    }
    for i, name in enumerate(trainer.reward_func_names):
        found |= {f"rewards/{name}/mean": scores[:, i].nanmean(), f"rewards/{name}/std": nanstd(scores[:, i])}
    for name, value in found.items():
        metrics[name][before.get(name, 0) :] = [value.item()]


def show_advantages(logged: Any, record: Rollouts) -> None:
    """Put the advantages of the batch into TRL's table of completions, which has those that TRL computed."""
    assert record.advantages is not None
    if len(record.rewards) != len(record.groups):  # dynamic sampling: the table has rows that were replaced
        return
    rows = record.advantages.flatten().tolist()
    for _ in range(min(len(logged), len(rows))):
        logged.pop()
    logged.extend(rows)


def make_table_storable(logs: Mapping[str, Any]) -> None:
    """Escape characters in TRL's table of completions, in place, that its Parquet file cannot hold."""
    for rows in (logs["prompt"], logs["completion"], *logs["extra"].values()):
        storable = [change_text(entry, utf8_text) for entry in rows]
        rows.clear()
        rows.extend(storable)
