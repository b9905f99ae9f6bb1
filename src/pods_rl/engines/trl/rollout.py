"""One run of TRL's generation: n rollouts of each prompt, of which m are kept.

TRL's method runs once, on n rows a prompt. Between its generation and its log-probabilities the rollouts are scored and
selected, and its lists are shortened to the kept rows.
"""

from __future__ import annotations

import copy
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import pad

from ...errors import UserError
from ...rollouts.record import Rollouts
from ...selection import Selection, advantages, is_constant, select, spread
from ...text import plain_text
from .batching import Shares
from .compat import Batch, TRLTrainer, gather, gathering_with, nanstd
from .config import PODSConfig, group_sizes

Row = TypeVar("Row")
Output = tuple[Any, ...]  # TRL's eight results of `_generate`, a list or None each; the sixth is a mapping of lists


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
    scores: Tensor | None = None  # [P * n, F], as reward functions gave them
    kept_scores: Tensor | None = None  # [P * m, F], once rows are selected
    record: Rollouts | None = None

    def __post_init__(self) -> None:
        # Each rollout has its own objects, as TRL's rows have: a tool or a reward may change its arguments.
        self.rollouts = copies([self.row_of(number) for number in self.numbers])

    def place(self, number: int) -> int:
        """Return where a rollout stands in this process's lists; another of its prompt for one of other processes."""
        n, own = self.shares.num_rollouts, self.numbers
        return (number if number in own else max(number // n * n, own.start)) - own.start

    def result(self) -> tuple[Rollouts, Tensor]:
        """Return the record of the rollouts and their scores, once TRL's method has run."""
        assert self.record is not None
        assert self.scores is not None
        return self.record, self.scores

    def check_rows(self, batch: Batch, name: str) -> None:
        """Raise UserError unless TRL built its batch from the kept rows."""
        if self.record is None or len(batch["completion_ids"]) != len(self.rows):
            raise UserError(
                f"{name}._generate returned {len(batch['completion_ids'])} rows without a selection; PODSTrainer keeps "
                f"{len(self.rows)} of them in its own `_generate`. Call super()._generate(prompts) with TRL's list of "
                "prompts, or override `_generate_single_turn`."
            )

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

    def select(self, rewards_PN: Tensor, args: PODSConfig) -> Tensor:
        """Return which m rollouts of each prompt the rule keeps, int64 `[P, M]`, ascending."""
        m, n = self.shares.num_generations, self.shares.num_rollouts
        if n == m:
            return torch.arange(n).repeat(self.shares.prompts, 1)
        generator = torch.Generator().manual_seed(stable_seed(*self.key))
        return select(rewards_PN, m, args.rule, generator=generator).indices.sort(dim=1).values


def policy_tokens(output: Output) -> int:
    """Return how many tokens the policy wrote, without those of tools and environments."""
    _, completion_ids, tool_mask, *_ = output
    return sum(map(len, completion_ids)) if tool_mask is None else sum(map(sum, tool_mask))


def record_of(
    generation: Generation, trainer: TRLTrainer, prompts: Sequence[Any], output: Output, scores: Tensor
) -> Rollouts:
    """Return the record of a generation that is scored, before its lists are shortened; nothing is kept yet.

    Args:
        scores: `[P * n, F]` of all processes.
    """
    n = generation.shares.num_rollouts
    numbers = list(generation.numbers)
    given = output[5].get("turn_rewards")
    # copies: the environment's next rollout may change its own
    own = [copy.deepcopy(getattr(environment, "turn_rewards", None)) for environment in trainer.environments or ()]
    turns = own if any(rewards is not None for rewards in own) else given
    return Rollouts(
        step=trainer.state.global_step + 1,
        inputs=[generation.row_of(number) for number in numbers],
        prompts=list(prompts),
        completions=list(output[3]),
        completion_tokens=[len(ids) for ids in output[1]],
        reward_names=list(trainer.reward_func_names),
        rewards_per_func=scores[numbers],
        numbers=numbers,
        rewards=total_reward(scores, trainer.reward_weights, n, trainer.multi_objective_aggregation).cpu(),
        kept=torch.empty(0, dtype=torch.int64),
        groups=torch.arange(generation.shares.prompts),
        turn_rewards=list(turns or ()),
    )


# -- a rollout between TRL's lists and the process that trains it ----------------------------------------------------


@dataclass(frozen=True)
class KeptRollout:
    """What TRL has of one rollout, ready to move to the process that trains it.

    Args:
        prompt: TRL's prompt, with images and with what the environment said first.
        results: its part of the eight results of `_generate`.
        extra: the columns that reward functions logged about it.
    """

    prompt: Any
    results: Output
    extra: dict[str, Any]


def take_rollout(i: int, rollouts: Sequence[Batch], prompts: Sequence[Any], output: Output, logged: Any) -> KeptRollout:
    """Return rollout i of this process.

    Args:
        rollouts: rows of the data set.
        prompts: TRL's argument of `_generate`.
        output: its results.
        logged: columns of values by rollout that reward functions logged.
    """
    prompt_ids, completion_ids, tool_mask, completions, logprobs, fields, images, tool_images = output
    results = (
        prompt_ids[i],
        completion_ids[i],
        None if tool_mask is None else tool_mask[i],
        completions[i],
        None if logprobs is None else logprobs[i],
        {name: values[i] if isinstance(values, list) else values for name, values in fields.items()},
        # TRL would take the images of all n rows from the data set where it gets none.
        _data_images(rollouts[i]) if images is None else images[i],
        tool_images[i] if tool_images else [],
    )
    return KeptRollout(prompts[i], results, {name: values[i] for name, values in logged.items()})


def _data_images(row: Batch) -> list[Any] | None:
    if "images" in row:
        return row["images"]
    return None if row.get("image") is None else [row["image"]]


def as_output(kept: Sequence[KeptRollout]) -> Output:
    """Return TRL's eight results of `_generate` for these rollouts."""
    prompt_ids, completion_ids, masks, completions, logprobs, fields, images, tool_images = map(
        list, zip(*(one.results for one in kept), strict=True)
    )
    return (
        prompt_ids,
        completion_ids,
        masks if any(mask is not None for mask in masks) else None,
        completions,
        logprobs if any(values is not None for values in logprobs) else None,
        {name: [own.get(name) for own in fields] for name in fields[0]},
        images if any(images) else None,
        tool_images if any(tool_images) else [],
    )


def shorten(values: Any, places: Sequence[int], rows: int) -> Any:
    """Keep the entries of a list that has one a row, in place; anything else stays as it is.

    >>> values = ["a", "b", "c"]
    >>> shorten(values, [2, 0], rows=3), values
    (['c', 'a'], ['c', 'a'])
    """
    if isinstance(values, list) and len(values) == rows:
        values[:] = [values[i] for i in places]
    return values


# -- groups that are spread over several processes -------------------------------------------------------------------


def move_rows(
    sources: Sequence[int], targets: Sequence[int], own: Callable[[int], Row], accelerator: Accelerator
) -> list[Row]:
    """Return the rows whose target is this process, in their order. Call this on every process.

    Args:
        sources: the process that has each row, over all processes.
        targets: the process that each row moves to.
        own: returns a row that this process has, by its number.
        accelerator: of this process. Rows travel as pickles between processes of one run, as accelerate sends objects.

    Example:
        >>> from accelerate import Accelerator
        >>> move_rows([0, 0], [0, 0], "ab".__getitem__, Accelerator(cpu=True))
        ['a', 'b']
    """
    process, processes = accelerator.process_index, accelerator.num_processes
    arriving: list[Iterator[Row]] = [iter(())] * processes
    if moved_rows(sources, targets):
        outgoing: list[list[Row]] = [[] for _ in range(processes)]
        for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
            if source == process != target:
                outgoing[target].append(own(row))
        parcels = _all_to_all([pickle.dumps(rows) for rows in outgoing], accelerator.device)
        arriving = [iter(pickle.loads(parcel)) for parcel in parcels]
    return [
        own(row) if source == process else next(arriving[source])
        for row, (source, target) in enumerate(zip(sources, targets, strict=True))
        if target == process
    ]


def moved_rows(sources: Sequence[int], targets: Sequence[int]) -> int:
    """Return how many rows move to another process.

    >>> moved_rows([0, 0, 1], [0, 1, 1])
    1
    """
    return sum(source != target for source, target in zip(sources, targets, strict=True))


def _all_to_all(parcels: Sequence[bytes], device: torch.device) -> list[bytes]:
    """Send each process its parcel; return what each process sent here."""
    sizes = torch.tensor([len(parcel) for parcel in parcels], device=device)
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes)
    lengths = incoming.tolist()
    sent = torch.frombuffer(bytearray(b"".join(parcels)), dtype=torch.uint8).to(device)
    got = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
    dist.all_to_all_single(got, sent, lengths, sizes.tolist())
    return [part.cpu().numpy().tobytes() for part in got.split(lengths)]


def check_agreement(kept: Tensor, rule: str, accelerator: Accelerator) -> None:
    """Raise UserError, on every process, if the processes did not keep the same rollouts."""
    if accelerator.num_processes == 1:
        return
    checksum = zlib.crc32(kept.contiguous().numpy().tobytes())
    seen = gather(torch.tensor([checksum], device=accelerator.device)).tolist()
    if len(set(seen)) > 1:
        others = [process for process, value in enumerate(seen) if value != seen[0]]
        raise UserError(
            f"rule {rule!r} kept other rollouts on process {', '.join(map(str, others))} than on process 0, from the "
            "same rewards: a rule may depend only on its arguments. Draw random numbers from its `generator`."
        )


@contextmanager
def uneven_gathers(accelerator: Accelerator, counts: Sequence[int]) -> Iterator[None]:
    """Let TRL gather one value for each rollout although the processes' shares differ by one.

    Collectives need equal shapes: each share is padded to the largest, gathered, and cut again. Nothing changes where
    all shares are equal.
    """
    if len(set(counts)) <= 1:
        yield
        return
    with gathering_with(accelerator, partial(gather_shares, counts=counts)):
        yield


def gather_shares(tensor: Tensor, counts: Sequence[int]) -> Tensor:
    """Gather a tensor of `counts[process]` rows on each process; a number is gathered as it is."""
    if tensor.ndim == 0:
        return gather(tensor)
    largest = max(counts)
    padded = pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, largest - len(tensor)])
    parts = gather(padded).split(largest)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


# -- rewards and advantages ------------------------------------------------------------------------------------------


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


def set_advantages(batch: Batch, record: Rollouts, rows: range, trainer: TRLTrainer) -> None:
    """Put the advantages of this process's rows into TRL's batch, where TRL's own are not right.

    TRL's are right for the mean of the kept rows. They are not for other baselines, nor for a batch that dynamic
    sampling changed and that is scaled as one.
    """
    args, scale = trainer.args, trainer.scale_rewards
    before = args.advantages == "before" and args.num_rollouts != args.num_generations
    joined = len(record.rewards) != len(record.groups) and scale == "batch"
    device = batch["advantages"].device
    if before or joined or args.advantage_baseline != "mean":
        how: Any = {"when": args.advantages, "baseline": args.advantage_baseline, "scale": scale}
        all_rows = advantages(record.rewards[record.groups], Selection(record.kept), **how).float().flatten()
        batch["advantages"] = all_rows[rows.start : rows.stop].to(device)
    elif (
        args.skip_zero_advantage_steps or args.prompt_once
    ) and trainer.multi_objective_aggregation == "sum_then_normalize":
        # The mean of equal float32 rewards can differ from them by rounding: TRL's advantages are then not zero.
        constant = is_constant(record.kept_rewards()).repeat_interleave(record.kept.size(1))[rows.start : rows.stop]
        batch["advantages"] = batch["advantages"].masked_fill(constant.to(device), 0.0)


# -- metrics ---------------------------------------------------------------------------------------------------------

Metrics = dict[str, list[float]]

# Numbers of rollouts, rows or steps: they add up within a step, and are not logged while they are zero.
COUNTERS = (
    "pods/unusable_rewards", "pods/unscored_rollouts", "pods/reward_errors", "pods/reward_timeouts",
    "pods/verifier_timeouts", "pods/verifier_crashes", "pods/rows_moved", "pods/rows/left_out", "pods/rows/merged",
    "pods/skipped_step", "pods/bad_loss", "pods/bad_gradient",
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
    totals_GN = total_reward(scores, trainer.reward_weights, group_sizes(trainer.args)[0], "sum_then_normalize")
    found = {
        "reward": totals_GN.nanmean(),
        "reward_std": nanstd(totals_GN.flatten()),
        "frac_reward_zero_std": is_constant(totals_GN).float().mean(),
    }
    for i, name in enumerate(trainer.reward_func_names):
        found |= {f"rewards/{name}/mean": scores[:, i].nanmean(), f"rewards/{name}/std": nanstd(scores[:, i])}
    for name, value in found.items():
        metrics[name][before.get(name, 0) :] = [value.item()]


def entries(metrics: Mapping[str, list[float]]) -> dict[str, int]:
    """Return the number of entries of each metric since the last line of the log."""
    return {name: len(values) for name, values in metrics.items()}


def show_advantages(logged: Any, record: Rollouts) -> None:
    """Put the advantages of the batch into TRL's table of completions, which has those that TRL computed."""
    assert record.advantages is not None
    if len(record.rewards) != len(record.groups):  # dynamic sampling: the table has rows that were replaced
        return
    rows = record.advantages.flatten().tolist()
    for _ in range(min(len(logged), len(rows))):
        logged.pop()
    logged.extend(rows)


def escape_table(logs: Mapping[str, Any]) -> None:
    """Escape TRL's table of completions in place, which it prints to the terminal."""
    for rows in (logs["prompt"], logs["completion"], *logs["extra"].values()):
        escaped = [escape(entry) for entry in rows]
        rows.clear()
        rows.extend(escaped)


def escape(entry: Any) -> Any:
    """Return a text, or a chat's messages, with terminal control characters escaped.

    >>> escape([{"role": "user", "content": "\\x1b[2J"}])
    [{'role': 'user', 'content': '\\\\x1b[2J'}]
    """
    if isinstance(entry, str):
        return plain_text(entry)
    if isinstance(entry, Mapping):
        return {escape(key): escape(value) for key, value in entry.items()}
    return [escape(part) for part in entry] if isinstance(entry, list) else entry
