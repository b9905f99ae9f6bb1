"""The batch arithmetic of GRPO and PODS, and checks of settings that contradict each other. Does not import torch.

Three units, always named: a **prompt**; a **rollout**, one completion generated for it (n = ``num_rollouts`` each);
a **row**, a rollout that was kept and is trained on (m = ``num_generations`` a prompt). Batch sizes count rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ...distributed.processes import get_world_size
from ...errors import UserError

_BATCH_KEYS = (
    "num_generations", "num_rollouts", "per_device_train_batch_size", "gradient_accumulation_steps",
    "steps_per_generation", "generation_batch_size", "rollout_batch_size", "use_vllm",
)  # fmt: skip


@dataclass(frozen=True)
class Shares:
    """The rollouts of a batch, generated at once without waves, that each process generates, and the rows it trains.

    Both are numbered over all processes, prompt by prompt: rollout p * n + i is the i-th of prompt p. Each process
    has a contiguous range of each: its rows are those that TRL's sampler gives it, the same number everywhere; its
    rollouts are balanced to within one. It generates rollouts of only the prompts whose rows it trains, at least one
    of each, so prompts never move.

    Args:
        prompts: P of the generation batch, over all processes.
        num_rollouts: n, at least m.
        num_generations: m; P * m is a multiple of ``processes``.

    Raises:
        ValueError: the rows cannot be shared equally.

    >>> shares = Shares(prompts=1, num_rollouts=7, num_generations=4, processes=2)
    >>> [shares.rollouts(process) for process in range(2)], shares.rows(1)
    ([range(0, 3), range(3, 7)], range(2, 4))
    """

    prompts: int
    num_rollouts: int
    num_generations: int
    processes: int = 1

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.prompts * self.num_generations % self.processes:
            rows = f"{self.prompts} prompts x {self.num_generations} rows"
            raise ValueError(
                f"{rows} cannot be shared equally by {self.processes} processes: use whole groups, and a multiple of "
                "the processes as rows"
            )

    @property
    def total_rollouts(self) -> int:
        return self.prompts * self.num_rollouts

    def rollouts(self, process: int) -> range:
        """The rollouts that a process generates."""
        total, each = self.total_rollouts, self.processes
        return range(process * total // each, (process + 1) * total // each)

    def rows(self, process: int) -> range:
        """The rows that a process trains."""
        each = self.prompts * self.num_generations // self.processes
        return range(process * each, (process + 1) * each)

    def generator(self, rollout: int) -> int:
        """The process that generates a rollout."""
        return ((rollout + 1) * self.processes - 1) // self.total_rollouts

    def trainer(self, row: int) -> int:
        """The process that trains a row."""
        return row * self.processes // (self.prompts * self.num_generations)

    @property
    def counts(self) -> list[int]:
        """The number of rollouts of each process."""
        return [len(self.rollouts(process)) for process in range(self.processes)]

    @property
    def most(self) -> int:
        """The most rollouts that any process generates; the others generate as many, or one fewer."""
        return -(-self.total_rollouts // self.processes)

    @property
    def even(self) -> bool:
        """Whether every process generates the same number."""
        return self.total_rollouts % self.processes == 0

    @property
    def whole_groups(self) -> bool:
        """Whether no group is spread over processes, so that rows never move."""
        return self.prompts % self.processes == 0


@dataclass(frozen=True)
class BatchPlan:
    """How many prompts, rollouts and rows each part of training handles.

    A generation batch is sampled at once, from one fixed policy; an optimizer step consumes all of it, or a part if
    ``steps_per_generation`` exceeds ``gradient_accumulation_steps``.
    """

    num_generations: int
    num_rollouts: int
    processes: int
    micro_batch_rows: int
    micro_batches: int
    steps_per_generation: int
    rollout_batch_size: int | None

    @property
    def rows_per_process(self) -> int:
        """Rows one process trains on in an optimizer step."""
        return self.micro_batch_rows * self.micro_batches

    @property
    def rows_per_step(self) -> int:
        return self.rows_per_process * self.processes

    @property
    def rows_per_generation(self) -> int:
        return self.micro_batch_rows * self.processes * self.steps_per_generation

    @property
    def prompts_per_generation(self) -> int:
        return self.rows_per_generation // self.num_generations

    @property
    def prompts_per_step(self) -> float:
        """Prompts an optimizer step learns from; a fraction if a group is spread over several steps."""
        return self.rows_per_step / self.num_generations

    @property
    def rollouts_per_generation(self) -> int:
        return self.prompts_per_generation * self.num_rollouts

    @property
    def rollouts_per_step(self) -> float:
        return self.prompts_per_step * self.num_rollouts

    @property
    def shares(self) -> Shares:
        """Which process generates and trains what of a generation batch."""
        return Shares(self.prompts_per_generation, self.num_rollouts, self.num_generations, self.processes)

    @property
    def rollout_chunks(self) -> int:
        """Calls of ``generate`` that one process makes for a generation batch."""
        return math.ceil(self.shares.most / (self.rollout_batch_size or self.shares.most))

    @property
    def is_plain_grpo(self) -> bool:
        return self.num_rollouts == self.num_generations

    def describe(self) -> list[tuple[str, str]]:
        """Return (label, value) lines to display.

        >>> check_batch(num_generations=16, num_rollouts=64, per_device_train_batch_size=8,
        ...             gradient_accumulation_steps=4, processes=1).describe()[2]
        ('an optimizer step', '2 prompts, 128 rollouts generated, 32 rows trained')
        """
        method = "plain GRPO" if self.is_plain_grpo else "PODS"
        split = f"{counted(self.micro_batches, 'micro-batch', 'es')} of {counted(self.micro_batch_rows, 'row')}"
        step = (counted(self.prompts_per_step, "prompt"), counted(self.rollouts_per_step, "rollout"))
        lines = [
            ("method", f"{method}: {self.num_rollouts} rollouts a prompt, {self.num_generations} trained on"),
            ("processes", str(self.processes)),
            ("an optimizer step", f"{', '.join(step)} generated, {counted(self.rows_per_step, 'row')} trained"),
            ("on each process", f"{split}, generated in {counted(self.rollout_chunks, 'call')}"),
        ]
        if self.processes > 1:
            lines.append(("groups", self._spread()))
        if self.steps_per_generation != self.micro_batches:
            held = (counted(self.prompts_per_generation, "prompt"), counted(self.rollouts_per_generation, "rollout"))
            used = f"used for {self.steps_per_generation / self.micro_batches:g} optimizer steps"
            lines.append(("a generation batch", ", ".join((*held, used))))
        return lines

    def _spread(self) -> str:
        if self.shares.whole_groups:
            return f"whole: {counted(self.prompts_per_generation // self.processes, 'prompt')} on each process"
        low, high = self.shares.total_rollouts // self.processes, self.shares.most
        generated = str(low) if low == high else f"{low} or {high}"
        both = f"each generates {generated} rollouts and trains {len(self.shares.rows(0))}"
        return f"spread over processes: {both}; kept ones move between them"


def check_batch(
    *,
    num_generations: int | None,
    num_rollouts: int | None = None,
    per_device_train_batch_size: int = 8,
    gradient_accumulation_steps: int = 1,
    steps_per_generation: int | None = None,
    generation_batch_size: int | None = None,
    rollout_batch_size: int | None = None,
    use_vllm: bool = False,
    processes: int | None = None,
) -> BatchPlan:
    """Return the batch plan for these settings; names and meanings are TRL's.

    Args:
        num_generations: m, at least 2 (one row has no spread, so no advantage).
        num_rollouts: n, at least m; None: n = m, plain GRPO.
        steps_per_generation: micro-batches of one generation batch; None: ``gradient_accumulation_steps``.
        generation_batch_size: its rows, instead of ``steps_per_generation``.
        use_vllm: TRL cuts what vLLM returns into equal parts, so every process must generate as many rollouts.
        processes: None: as many as the launcher started (``WORLD_SIZE``).

    Raises:
        UserError: a number is below its minimum, n < m, or a batch splits a group (two values that work are named).

    >>> check_batch(num_generations=8, num_rollouts=32, per_device_train_batch_size=16).rollouts_per_step
    64.0
    """
    processes = get_world_size() if processes is None else processes
    m = _at_least("num_generations", num_generations, 2, "a single row has no advantage")
    n = m if num_rollouts is None else _at_least("num_rollouts", num_rollouts, 1)
    if n < m:
        raise UserError(
            f"num_rollouts = {n} is less than num_generations = {m}: cannot keep {m} of {n} rollouts. "
            "num_rollouts is n, generated per prompt; num_generations is m, trained on. "
            f"Raise num_rollouts to {m} or more, or lower num_generations to {max(n, 2)} or less."
        )
    rows = _at_least("per_device_train_batch_size", per_device_train_batch_size, 1)
    accumulation = _at_least("gradient_accumulation_steps", gradient_accumulation_steps, 1)
    _at_least("processes", processes, 1)
    if rollout_batch_size is not None:
        _at_least("rollout_batch_size", rollout_batch_size, 1, "unset it to generate all rollouts at once")
    steps = _steps(m, rows, processes, accumulation, steps_per_generation, generation_batch_size)
    plan = BatchPlan(m, n, processes, rows, accumulation, steps, rollout_batch_size)
    if use_vllm and not plan.shares.even:
        _refuse_uneven(plan)
    return plan


def batch_plan(values: Mapping[str, Any], processes: int | None = None) -> BatchPlan:
    """Return the batch plan; raise UserError if the batches do not hold whole groups."""
    return check_batch(**{key: values[key] for key in _BATCH_KEYS if key in values}, processes=processes)


def _refuse_uneven(plan: BatchPlan) -> NoReturn:
    prompts, n = plan.prompts_per_generation, plan.num_rollouts
    low, high = _neighbours(n, plan.processes // math.gcd(plan.processes, prompts))
    raise UserError(
        f"With use_vllm every process must generate the same number of rollouts, but {plan.processes} processes share "
        f"{counted(prompts, 'prompt')} x num_rollouts {n} = {plan.rollouts_per_generation}. "
        f"Set num_rollouts to {f'{low} or {high}' if low >= plan.num_generations else high}."
    )


def _steps(
    m: int, rows: int, processes: int, accumulation: int, steps_per_generation: int | None, size: int | None
) -> int:
    """Micro-batches of a generation batch, which must hold whole groups."""
    if size is not None and steps_per_generation is not None:
        raise UserError(
            f"generation_batch_size = {size} and steps_per_generation = {steps_per_generation} set the same "
            "quantity: keep one of them."
        )
    if size is not None:
        whole = math.lcm(m, rows * processes)
        if _at_least("generation_batch_size", size, 1) % whole:
            low, high = _neighbours(size, whole)
            raise UserError(
                f"generation_batch_size = {size} rows must be a multiple of num_generations ({m} rows a "
                f"group) and of per_device_train_batch_size x processes ({rows} x {processes} rows). "
                f"Rows are kept rollouts, not prompts. Set generation_batch_size to {low} or {high}."
            )
        return size // (rows * processes)
    unit, steps = "gradient_accumulation_steps", accumulation
    if steps_per_generation is not None:
        unit, steps = "steps_per_generation", _at_least("steps_per_generation", steps_per_generation, 1)
    held = rows * processes * steps
    if held % m:
        low, high = _neighbours(rows, m // math.gcd(m, processes * steps))
        raise UserError(
            f"A generation batch must hold whole groups of num_generations = {m} rows, but it holds "
            f"{held} rows (per_device_train_batch_size {rows} x processes {processes} x {unit} {steps}). "
            f"Rows are kept rollouts, not prompts. Set per_device_train_batch_size to {low} or {high}."
        )
    return steps


def _neighbours(value: int, step: int) -> tuple[int, int]:
    """Two neighbouring multiples of ``step`` near ``value``, both at least ``step``."""
    low = max(value // step, 1) * step
    return low, low + step


def _at_least(key: str, value: int | None, minimum: int, why: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        reason = f" ({why})" if why else ""
        raise UserError(f"{key} = {value!r}: expected a whole number of at least {minimum}{reason}.")
    return value


def counted(number: float, noun: str, plural: str = "s") -> str:
    """A number with its noun.

    >>> counted(1, "CPU thread"), counted(2, "batch", "es")
    ('1 CPU thread', '2 batches')
    """
    return f"{number:,.10g} {noun}{'' if number == 1 else plural}"


# -- choices, and settings that contradict each other or TRL's -------------------------------------------------------

ADVANTAGES = ("after", "before")
BASELINES = ("mean", "leave_one_out")
REWARD_ERRORS = ("raise", "zero", "drop")
CLOCKS = ("wall", "cpu")
LEVERS = ("prompt_once", "skip_zero_advantage_steps")  # `exact_trl` turns them off

_CHOICES = {"advantages": ADVANTAGES, "advantage_baseline": BASELINES, "reward_errors": REWARD_ERRORS, "clock": CLOCKS}
_SEQUENCE_CORRECTIONS = ("sequence_mask", "sequence_truncate")


def check_losses(settings: Mapping[str, Any]) -> None:
    """Refuse loss settings that contradict each other or would train something else than they state.

    Args:
        settings: by TRL's names and ours; a missing one has TRL's default.

    Raises:
        UserError: an unknown choice or a combination that cannot work, with the reason and a fix.

    >>> check_losses({"advantage_baseline": "leave_one_out", "scale_rewards": "none"})
    >>> check_losses({"loss_type": "cispo"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    pods_rl.errors.UserError: loss_type = cispo caps each token's importance weight at epsilon_high...
    """
    refuse_impossible(settings)
    for doubt in loss_doubts(settings):
        raise UserError(doubt)


def loss_doubts(settings: Mapping[str, Any]) -> list[str]:
    """Return warnings about settings that TRL accepts: a recipe refuses them, PODSConfig warns.

    >>> loss_doubts({"loss_type": "cispo", "epsilon_high": 5.0})
    []
    """
    doubts = []
    cap = settings.get("epsilon_high")
    if settings.get("loss_type") == "cispo" and (cap is None or cap < 1):
        given = "is not set (TRL then takes epsilon)" if cap is None else f"= {cap:g}"
        doubts.append(
            f"loss_type = cispo caps each token's importance weight at epsilon_high, which {given}: a cap below 1 "
            "replaces nearly every weight by the cap. Set epsilon_high: 5.0, as in ScaleRL (arXiv 2510.13786)."
        )
    if settings.get("loss_type") == "vespo" and settings.get("importance_sampling_level") == "sequence":
        doubts.append(
            "loss_type = vespo weighs whole sequences by itself, so importance_sampling_level = sequence would change "
            "only its KL term: unset importance_sampling_level."
        )
    return doubts


def refuse_impossible(settings: Mapping[str, Any]) -> None:
    """Refuse settings that cannot work: unknown values of our keys, and contradictory combinations.

    Raises:
        UserError: what was given, and what to set.
    """
    mode = settings.get("vllm_importance_sampling_mode") or "sequence_mask"
    corrected = settings.get("use_vllm") and settings.get("vllm_importance_sampling_correction", True)
    if settings.get("loss_type") == "vespo" and corrected and mode in _SEQUENCE_CORRECTIONS:
        raise UserError(
            "loss_type = vespo sums vLLM's correction over a sequence's tokens, so it needs one for each token; got "
            f"vllm_importance_sampling_mode = {mode}: set token_truncate or token_mask."
        )
    for key, known in _CHOICES.items():
        given = settings.get(key, known[0])
        if given not in known:
            raise UserError(f"{key} = {given!r}: expected {', '.join(known[:-1])} or {known[-1]}.")
    when, baseline = settings.get("advantages", "after"), settings.get("advantage_baseline", "mean")
    aggregation = settings.get("multi_objective_aggregation", "sum_then_normalize")
    used = {
        "advantages = before": when == "before",
        "advantage_baseline = leave_one_out": baseline == "leave_one_out",
        "dynamic_sampling": bool(settings.get("dynamic_sampling")),
    }
    for name in [name for name, on in used.items() if on and aggregation != "sum_then_normalize"]:
        raise UserError(
            f"{name} works on the summed reward: got multi_objective_aggregation = {aggregation}. Set "
            "multi_objective_aggregation: sum_then_normalize."
        )
    rounds = settings.get("dynamic_sampling_rounds", 3)
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise UserError(
            f"dynamic_sampling_rounds = {rounds!r}: expected a whole number of at least 1. To draw no new prompts, "
            "set dynamic_sampling: false."
        )
    # TRL reads true as group and false as none.
    if baseline == "leave_one_out" and settings.get("scale_rewards", "group") in ("group", True, "True", "true"):
        raise UserError(
            "advantage_baseline = leave_one_out leaves each reward out of its own baseline, and scale_rewards = group "
            "would put it back by dividing by the deviation of all of them (m / (m - 1) times the mean's advantages). "
            "Set scale_rewards: none (RLOO's own), or batch."
        )
