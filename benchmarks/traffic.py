"""The model that `scaling.py` checks: bytes and seconds of a generation's gathers and exchange, without torch.

Bytes are those that the busiest process sends: a gather passes every share on, (K - 1) x its own; rows are sent once.
Every m of n rollouts are taken as equally likely to be kept, which is exact for exchangeable rollouts without ties.
Time is calls + messages x latency + bytes / bandwidth + packing. A call sends K - 1 messages one after the other, as
in a ring gather; an exchange that overlaps them is faster.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from functools import cache
from math import comb
from typing import Any

from pods_rl.engines.trl.batching import Shares

LETTERS = 4  # per token of text
PER_ROLLOUT = 8 + 8 + 1 + 4  # bytes gathered: prompt and completion length, truncated or not, reward
GATHERS = 5  # those four, and the check that all processes keep the same


@dataclass(frozen=True)
class Setting:
    """P prompts over all processes, N rollouts each, M kept, T tokens a completion."""

    prompts: int
    n: int
    m: int
    tokens: int

    def shares(self, processes: int) -> Shares:
        return Shares(self.prompts, self.n, self.m, processes)

    def __str__(self) -> str:
        return f"{self.prompts} x {self.n} -> {self.m}, T {self.tokens}"


@dataclass(frozen=True)
class Network:
    """Costs of a network; `packing` is seconds per moved row, both ends together."""

    name: str
    call: float
    latency: float
    bandwidth: float
    packing: float


@dataclass(frozen=True)
class Traffic:
    """Bytes and rows that the busiest process sends, by kind.

    `moving` is the share of all rows that move, `exchanged_by_all` the bytes that all processes exchange for them.
    """

    gathered: float
    sizes: float
    rows: float
    rows_out: float
    moving: float
    exchanged_by_all: float

    @property
    def total(self) -> float:
        return self.gathered + self.sizes + self.rows


def row_bytes(tokens: int) -> int:
    """Four int32 lengths, the tokens as int32, and `["text", {}]`."""
    return 16 + 4 * tokens + LETTERS * tokens + len('["", {}]')


def traffic(setting: Setting, processes: int) -> Traffic:
    """Return the expected traffic of one generation."""
    shares = setting.shares(processes)
    others = processes - 1
    check = 8 if setting.n > setting.m else 0
    gathered = (PER_ROLLOUT * max(shares.counts) + check) * others
    leaving = rows_leaving(shares)
    moving = sum(leaving)
    return Traffic(
        gathered=gathered,
        sizes=8 * others if moving else 0,
        rows=max(leaving) * row_bytes(setting.tokens),
        rows_out=max(leaving),
        moving=moving / (setting.prompts * setting.m),
        exchanged_by_all=moving * row_bytes(setting.tokens) + (8 * others * processes if moving else 0),
    )


def rows_leaving(shares: Shares) -> list[float]:
    """Return the expected rows that each process generates and another trains."""
    leaving = [0.0] * shares.processes
    if shares.whole_groups:
        return leaving
    n, m = shares.num_rollouts, shares.num_generations
    for p in range(shares.prompts):
        makers = [shares.generator(p * n + i) for i in range(n)]
        for j in range(m):
            trainer = shares.trainer(p * m + j)
            for i, maker in enumerate(makers):
                if maker != trainer:
                    leaving[maker] += chance(n, m, j, i)
    return leaving


@cache
def chance(n: int, m: int, j: int, i: int) -> float:
    """Probability that the j-th of m kept is rollout i of n (from 0), if all subsets are equally likely.

    >>> [round(chance(4, 2, 0, i), 3) for i in range(4)]
    [0.5, 0.333, 0.167, 0.0]
    """
    return comb(i, j) * comb(n - 1 - i, m - 1 - j) / comb(n, m)


def communication(setting: Setting, processes: int, network: Network) -> float:
    """Return seconds of gathers and exchange, without selection."""
    if processes == 1:
        return 0.0
    expected = traffic(setting, processes)
    calls = GATHERS - (setting.n == setting.m) + (2 if expected.moving else 0)
    messages = calls * (processes - 1)
    rows = expected.rows_out * network.packing
    return calls * network.call + messages * network.latency + expected.total / network.bandwidth + rows


def gloo(calibrations: dict[int, dict[str, float]], row: float, processes: int) -> Network:
    """Fit the constants of this machine: latency from gathers of a number, bandwidth from 8 MB parcels.

    Latency is that of the largest measured world of at most this size: processes that share a core wait for it.
    """
    smallest = min(calibrations)
    near = max((world for world in calibrations if world <= processes), default=smallest)
    message = calibrations[near]["number"] / (near - 1)
    return Network("gloo here", 0.0, message, (smallest - 1) * 8 * 2**20 / calibrations[smallest]["parcel"], row)


def compare(seen: dict[str, Any], network: Network) -> dict[str, Any]:
    """A point beside what the model says of it."""
    setting, world = Setting(**seen["setting"]), seen["processes"]
    expected = traffic(setting, world)
    return seen | {
        "predicted": asdict(expected),
        "predicted_exchanged": expected.exchanged_by_all,
        "predicted_communication": communication(setting, world, network),
    }


def errors(points: list[dict[str, Any]]) -> dict[str, float]:
    """Relative error of predicted seconds, the median; of predicted bytes of rows, all points together."""
    several = [seen for seen in points if seen["processes"] > 1]
    seconds = [abs(seen["predicted_communication"] / seen["communication"][1] - 1) for seen in several]
    expected = sum(seen["predicted_exchanged"] for seen in several)
    measured = sum(statistics.mean(seen["exchanged"]) for seen in several)
    return {"time": statistics.median(seconds), "bytes": abs(expected / measured - 1) if measured else 0.0}


def quartiles(values: list[float]) -> list[float]:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return values * 3
    return statistics.quantiles(values, n=4, method="inclusive")
