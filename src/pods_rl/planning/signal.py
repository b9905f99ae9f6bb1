"""Signal and work of a step, simulated from measured rollouts with the functions that training itself uses.

**Signal.** E, the sum over prompts of k (m - k) / m with k of m kept rows right, is the precision of the difference
between the mean gradients of right and of wrong rows. The signal of a step is its square root: the ratio of signal to
noise, by which a step moves at a fixed learning rate under Adam. For graded rewards E is m times the variance of the
kept answer rewards, scaled to [0, 1], which is the same for right and wrong.

**Prompts.** A prompt with s right answers of t has pass rate Beta(a + s, b + t - s); a and b are fitted to all sampled
prompts by moments. Given right or wrong, a rollout is one that was observed: its reward, text and length go together.
Axes: R observed rollouts, Q sampled prompts, S simulated steps, G groups of all steps, N rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..rollouts.allocating import live, select_rows, share_rows
from ..rollouts.stopping import Stopping, wave_end, wave_sizes
from ..selection import Rule, is_constant, select
from .costs import Work
from .grid import Setting

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Observed:
    """A rollout that was seen: its prompt, its answer's reward, the total, its text, and whether the answer is right.

    Any whole number may name a prompt or a text, the same for the same; `answer` is scaled to [0, 1].
    """

    prompt: int
    answer: float
    total: float
    text: int

    @property
    def right(self) -> bool:
        return self.answer > 0.5


def observed(
    prompts: Sequence[int],
    answers: Sequence[float],
    totals: Sequence[float],
    texts: Sequence[int],
    low: float | None = None,
    high: float | None = None,
) -> list[Observed]:
    """Return the scored ones of these rollouts, their answers scaled to [0, 1] by their range, or by what was seen.

    >>> [one.answer for one in observed([0, 0, 1], [2.0, math.nan, -2.0], [2.0, 0.0, -2.0], [1, 2, 3])]
    [1.0, 0.0]
    """
    scored = [one for one in zip(prompts, answers, totals, texts, strict=True) if math.isfinite(one[1] + one[2])]
    low = min((one[1] for one in scored), default=0.0) if low is None else low
    width = (max((one[1] for one in scored), default=1.0) if high is None else high) - low or 1.0
    return [Observed(p, min(max((a - low) / width, 0.0), 1.0), total, text) for p, a, total, text in scored]


class Pool:
    """Observed rollouts, by prompt, from which groups are drawn.

    Args:
        rollouts: at least one; unscored ones left out.

    >>> pool = Pool([Observed(0, 1.0, 1.1, 5), Observed(0, 0.0, 0.1, 6), Observed(1, 0.0, 0.0, 7)])
    >>> pool.right_Q.tolist(), pool.rollouts_Q.tolist()
    ([1, 0], [2, 1])
    """

    def __init__(self, rollouts: Sequence[Observed]) -> None:
        rollouts = [*rollouts, *_missing(rollouts)]
        numbers: dict[int, int] = {}
        prompt_R = np.array([numbers.setdefault(one.prompt, len(numbers)) for one in rollouts])
        right_R = np.array([one.right for one in rollouts])
        real_R = np.array([one.prompt >= 0 for one in rollouts])
        self.prompts = int(prompt_R[real_R].max()) + 1
        self.answers_R = torch.tensor([one.answer for one in rollouts], dtype=torch.float64)
        self.totals_R = torch.tensor([one.total for one in rollouts], dtype=torch.float64)
        self.texts_R = torch.tensor([one.text for one in rollouts])
        self.rollouts_Q = np.bincount(prompt_R[real_R], minlength=self.prompts)
        self.right_Q = np.bincount(prompt_R[real_R & right_R], minlength=self.prompts)
        # Rollouts of a prompt and outcome lie together, in a random order; all of an outcome lie behind these.
        shuffled = np.random.default_rng(0).permutation(len(rollouts))
        own = [[shuffled[(prompt_R == q)[shuffled] & (right_R == side)[shuffled]] for q in range(self.prompts)]
               for side in (False, True)]  # fmt: skip
        everywhere = [shuffled[(right_R == side)[shuffled]] for side in (False, True)]
        parts = [part for side in own for part in side] + everywhere
        self._order = np.concatenate(parts)
        lengths = np.array([len(part) for part in parts])
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        # [2, Q]: where a prompt has none of an outcome, those of all prompts stand in
        self._count, self._start = (x[: 2 * self.prompts].reshape(2, -1).copy() for x in (lengths, starts))
        for side in (0, 1):
            none = self._count[side] == 0
            self._count[side][none], self._start[side][none] = lengths[side - 2], starts[side - 2]
        self.prior = fit_prior(self.right_Q, self.rollouts_Q)

    def rates(self, prompts_G: Array, rng: np.random.Generator) -> Array:
        """Return a pass rate for each of these prompts, drawn from what is known about it, `[G]`."""
        a, b = self.prior
        right, wrong = self.right_Q[prompts_G], (self.rollouts_Q - self.right_Q)[prompts_G]
        return rng.beta(a + right, b + wrong)

    def groups(self, count: int, n: int, rng: np.random.Generator, among: Array | None = None) -> Tensor:
        """Return the observed rollouts that stand for n rollouts of random prompts, `[count, n]`.

        A rollout repeats only where a group has more of an outcome than were observed.

        Args:
            among: the prompts to draw from; None: all.
        """
        prompts_G = rng.integers(self.prompts, size=count) if among is None else rng.choice(among, size=count)
        right_GN = rng.random((count, n)) < self.rates(prompts_G, rng)[:, None]
        place_GN = np.zeros((count, n), dtype=np.int64)
        for side in (0, 1):
            here_GN = right_GN == bool(side)
            first_G1 = rng.integers(self._count[side][prompts_G])[:, None]
            turn_GN = (first_G1 + here_GN.cumsum(axis=1)) % self._count[side][prompts_G][:, None]
            place_GN = np.where(here_GN, self._start[side][prompts_G][:, None] + turn_GN, place_GN)
        return torch.from_numpy(self._order[place_GN])


def _missing(rollouts: Sequence[Observed]) -> list[Observed]:
    """A rollout of an outcome that was never observed: its prompt is no prompt."""
    totals = [one.total for one in rollouts]
    seen = {one.right for one in rollouts}
    return [
        Observed(-1, float(side), max(totals) + 1 if side else min(totals) - 1, -1) for side in {False, True} - seen
    ]


def fit_prior(right_Q: Array, rollouts_Q: Array) -> tuple[float, float]:
    """Return a and b of the Beta distribution with the mean and the spread of the prompts' pass rates, by moments.

    The variance that sampling alone explains is taken off. Half a right and half a wrong answer are added to the mean,
    and the correlation between two rollouts of a prompt lies between 0.02 and 0.95, since few prompts tell little.

    >>> [round(end, 2) for end in fit_prior(np.array([0, 8, 4, 4]), np.array([8, 8, 8, 8]))]
    [0.31, 0.31]
    """
    mean = (right_Q.sum() + 0.5) / (rollouts_Q.sum() + 1)
    noise = float(np.mean(1 / rollouts_Q))
    spread = float(np.var(right_Q / rollouts_Q, ddof=1)) if len(right_Q) > 1 else 0.0
    unit = mean * (1 - mean)
    correlation = (spread - unit * noise) / (unit * (1 - noise)) if noise < 1 else 0.5
    weight = 1 / min(max(correlation, 0.02), 0.95) - 1
    return float(mean * weight), float((1 - mean) * weight)


@dataclass(frozen=True)
class Batches:
    """What decides a generation batch besides the setting, the same for all settings.

    Args:
        rows: of a batch, over all prompts.
        chunk: rollouts of a call at most (`rollout_batch_size`); None: no limit.
        skips: rows without an advantage are left out of the update.
        merges: equal rows of a prompt are computed once.
        repeats: how often the rows are trained (`num_iterations`).
    """

    rows: int
    chunk: int | None = None
    skips: bool = True
    merges: bool = True
    repeats: int = 1
    rule: str | Rule = "max_variance"
    refill_limit: int = 3


@dataclass(frozen=True)
class Simulated:
    """Means over simulated generation batches.

    `signal` is the mean square root of E, `precision` the mean E; `dead` is the share of groups without signal.
    """

    work: Work
    signal: float
    precision: float
    dead: float


def simulate(
    setting: Setting, pool: Pool, batches: Batches, *, steps: int = 400, seed: int = 0, among: Array | None = None
) -> Simulated:
    """Simulate generation batches of a setting.

    Args:
        steps: how many.
        seed: the same seed draws similar prompts for every setting.
        among: the prompts of the pool to draw from; None: all.
    """
    rng, m = np.random.default_rng(seed), setting.num_generations
    drawing = _Drawing(setting, pool, batches, steps, rng, among)
    step_G = torch.arange(steps).repeat_interleave(batches.rows // m)
    index_GN, seen_GN = drawing.groups(step_G)
    for _ in range(batches.refill_limit if setting.dead_groups == "refill" else 0):
        dead = (~live(pool.answers_R[index_GN].masked_fill(~seen_GN, torch.nan))).nonzero().flatten()
        if not len(dead):
            break
        index_GN[dead], seen_GN[dead] = drawing.groups(step_G[dead])
    answers_GN, totals_GN = pool.answers_R[index_GN], pool.totals_R[index_GN].masked_fill(~seen_GN, torch.nan)
    kept_GN = _kept(setting, batches, answers_GN.masked_fill(~seen_GN, torch.nan), totals_GN, steps, seed)
    rows_G = kept_GN.sum(dim=1)
    mean_G = (answers_GN * kept_GN).sum(dim=1) / rows_G.clamp(min=1)
    precision_G = ((answers_GN - mean_G.unsqueeze(1)).square() * kept_GN).sum(dim=1)
    precision_S = torch.zeros(steps, dtype=torch.float64).index_add(0, step_G, precision_G)
    only_GN = totals_GN.masked_fill(~kept_GN, torch.nan)
    live_G = ~is_constant(only_GN) if batches.skips else torch.ones(len(kept_GN), dtype=torch.bool)
    texts_GN = pool.texts_R[index_GN]
    computed_G = distinct(texts_GN, kept_GN) if batches.merges else rows_G
    calls, prompts, rollouts, groups, rows = (
        float(total.sum()) / steps
        for total in (drawing.calls_S, drawing.prompts_S, drawing.rollouts_S, live_G, computed_G * live_G)
    )
    work = Work(calls, prompts, rollouts, groups * batches.repeats, rows * batches.repeats)
    return Simulated(
        work,
        signal=float(precision_S.sqrt().mean()),
        precision=float(precision_S.mean()),
        dead=float((precision_G < 1e-12).double().mean()),
    )


class _Drawing:
    """Groups drawn for some steps, in waves, and the calls of the generator that this takes."""

    def __init__(
        self, setting: Setting, pool: Pool, batches: Batches, steps: int, rng: np.random.Generator, among: Array | None
    ) -> None:
        n, m, waves = setting.num_rollouts, setting.num_generations, setting.rollout_waves
        self._n, self._draw = n, lambda count: pool.groups(count, n, rng, among)
        self._pool, self._chunk = pool, batches.chunk
        self._sizes = wave_sizes(list(waves or [n]), n, m)
        after = setting.give_up_after
        self._stopping = waves and Stopping(
            m, n, low=0.0, high=1.0, give_up_after=None if after is None else wave_end(self._sizes, after)
        )
        self.calls_S, self.prompts_S, self.rollouts_S = (torch.zeros(steps) for _ in range(3))

    def groups(self, step_G: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a group for each of these steps; return its rollouts, and which of them are generated, `[G, N]`."""
        index_GN = self._draw(len(step_G))
        generated_G = torch.full((len(step_G),), self._n)
        if self._stopping:
            generated_G, _ = self._stopping.replay(self._pool.answers_R[index_GN], self._sizes)
        for start, size in zip(accumulate((0, *self._sizes)), self._sizes, strict=False):
            open_S = torch.bincount(step_G[generated_G > start], minlength=len(self.calls_S))
            self.calls_S += (open_S * size / (self._chunk or max(int(open_S.max()) * size, 1))).ceil()
            self.prompts_S += open_S
            self.rollouts_S += open_S * size
        return index_GN, torch.arange(self._n) < generated_G.unsqueeze(1)


def _kept(setting: Setting, batches: Batches, answers_GN: Tensor, totals_GN: Tensor, steps: int, seed: int) -> Tensor:
    """Return which rollouts are trained, `[G, N]`, by the rule and the shared places of dead groups."""
    m, kept_GN = setting.num_generations, torch.zeros(totals_GN.shape, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    if setting.dead_groups == "share":
        rows_G = torch.cat([share_rows(group, m) for group in answers_GN.chunk(steps)])
        for group, chosen in enumerate(select_rows(totals_GN, rows_G, batches.rule, generator)):
            kept_GN[group, chosen] = True
        return kept_GN
    if setting.num_rollouts == m:
        return ~kept_GN
    return kept_GN.scatter(1, select(totals_GN, m, batches.rule, generator=generator).indices, True)


def distinct(labels_GN: Tensor, among_GN: Tensor) -> Tensor:
    """Return how many different labels, of at least 0, each group has among some places, `[G]`.

    >>> distinct(torch.tensor([[7, 7, 5, 6]]), torch.tensor([[True, True, True, False]]))
    tensor([2])
    """
    sorted_GN = labels_GN.masked_fill(~among_GN, -2).sort(dim=1).values
    new_GN = torch.cat([torch.ones(len(sorted_GN), 1, dtype=torch.bool), sorted_GN[:, 1:] != sorted_GN[:, :-1]], dim=1)
    return (new_GN & (sorted_GN != -2)).sum(dim=1)
