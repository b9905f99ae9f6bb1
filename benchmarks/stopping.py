"""Rollouts that groups generate in waves, against a fixed 64: python benchmarks/stopping.py

Simulates groups of right and wrong answers at each pass rate, and replays the groups of two trainings, with the rule
that training uses (`pods_rl.rollouts.stopping`). Prints both tables and writes `waves.csv` and `waves.png` to
`docs/results/rollouts/`. No model runs, so the figures do not depend on the machine.

The trainings are the study's arm pods-64-16, seeds 1 and 2, 190 steps, every group logged; `groups.json` has their
rewards by rollout number. To make it again, train with `--ledger_every 1` and give the runs' directories:

    python benchmarks/stopping.py --ledgers runs/seed-1 runs/seed-2

In the tables n is the mean number of rollouts generated of a group; v its selected variance, as a share of the
greatest that 16 rewards can have; dead the share of groups whose kept rewards are all equal.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from matplotlib.figure import Figure
from torch import Tensor

from pods_rl.report.plots import BASELINE_COLOUR, COLOURS, styled
from pods_rl.rollouts.allocating import live
from pods_rl.rollouts.stopping import Stopping, wave_sizes
from pods_rl.runs import Run
from pods_rl.selection import select

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "rollouts"
N, M, WAVES = 64, 16, (16, 8)
RATES = tuple(round(0.02 * step, 2) for step in range(1, 50))
MIDDLE = (0.2, 0.8)  # pass rates of the goal
GOAL = 0.6
RIGHT = 1.0  # totals of right answers of the arithmetic task are at least this, of wrong ones at most 0.2
ARMS = {
    "fixed 64": None,
    "waves, lossless": Stopping(M, N, low=0.0, high=1.0),
    "waves, 0.9": Stopping(M, N, 0.9, 0.0, 1.0),
    "waves, 0.75, give up at 32": Stopping(M, N, 0.75, 0.0, 1.0, give_up_after=32),
}


@dataclass(frozen=True)
class Outcome:
    """What one arm does with some groups."""

    n: float
    v: float
    dead: float
    mismatches: int  # groups whose kept rollouts are not those of all 64


def outcome(stopping: Stopping | None, rewards_PN: Tensor) -> Outcome:
    """Replay groups of rewards 0 and 1."""
    generated_P = torch.full((len(rewards_PN),), N)
    if stopping is not None:
        generated_P, _ = stopping.replay(rewards_PN, wave_sizes(WAVES, N, M))
    unseen_PN = torch.arange(N) >= generated_P.unsqueeze(1)
    kept_PM = select(rewards_PN.masked_fill(unseen_PN, torch.nan), M).indices
    kept = rewards_PN.gather(1, kept_PM)
    whole_PM = select(rewards_PN, M).indices
    return Outcome(
        n=generated_P.double().mean().item(),
        v=kept.double().var(dim=1, correction=0).mean().item() / 0.25,
        dead=1 - live(kept).double().mean().item(),
        mismatches=int((kept_PM != whole_PM).any(dim=1).sum()),
    )


def simulated(groups: int, rates: Sequence[float] = RATES) -> dict[float, dict[str, Outcome]]:
    """The outcome of each arm at each pass rate, of the same groups."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for rate in rates:
        rewards_PN = (torch.rand(groups, N, generator=generator) < rate).double()
        found[rate] = {name: outcome(stopping, rewards_PN) for name, stopping in ARMS.items()}
    return found


def read_groups(path: Path = RESULTS / "groups.json") -> Tensor:
    """Return the total rewards `[R, P, N]` of the stored runs' groups, float32, by rollout number; NaN: unscored."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    totals = {letter: float("nan") if total is None else total for letter, total in stored["totals"].items()}
    return torch.tensor([[[totals[letter] for letter in group] for group in run] for run in stored["runs"]])


def write_groups(runs: list[Path], path: Path = RESULTS / "groups.json") -> None:
    """Write the total rewards of the runs' ledgers: a text for each group, a letter for each different total."""
    columns = ["group", "rollout", "reward"]
    tables = [[pq.read_table(file, columns=columns).to_pandas() for file in Run(run).rollout_files()] for run in runs]
    found = [
        [rows.sort_values("rollout")["reward"].tolist() for table in run for _, rows in table.groupby("group")]
        for run in tables
    ]
    totals = sorted({total for run in found for group in run for total in group if total == total})
    letters = {total: chr(ord("A") + place) for place, total in enumerate(totals)}
    stored = {
        "totals": {letter: total for total, letter in letters.items()} | {"-": None},
        "runs": [["".join(letters.get(total, "-") for total in group) for group in run] for run in found],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stored, indent=0) + "\n", encoding="utf-8")


@styled
def draw(found: dict[float, dict[str, Outcome]], trained_rates: np.ndarray) -> Figure:
    """Rollouts by pass rate, and below them the pass rates of the trainings' groups."""
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for name, colour in zip(ARMS, (BASELINE_COLOUR, *COLOURS), strict=False):
        above.plot(list(found), [found[rate][name].n for rate in found], label=name, color=colour, linewidth=2)
    above.set_ylim(0, 1.08 * N)
    above.set_ylabel("rollouts generated")
    above.legend(loc="lower right", ncols=2)
    below.hist(trained_rates, bins=np.linspace(0, 1, 26), color=COLOURS[4])
    below.set_ylabel("groups")
    below.set_xlabel("pass rate of the prompt (below: of the groups of two trainings)")
    below.set_xlim(0, 1)
    return figure


def print_table(found: dict[str, dict[str, Outcome]]) -> None:
    print(f"{'':<24}" + "".join(f"{name:>28}" for name in ARMS))
    for label, arms in found.items():
        cells = [f"n {one.n:4.1f}  v {one.v:.3f}  dead {one.dead:3.0%}" for one in arms.values()]
        print(f"{label:<24}" + "".join(f"{cell:>28}" for cell in cells))


def mean(outcomes: list[dict[str, Outcome]]) -> dict[str, Outcome]:
    return {
        name: Outcome(
            *(float(np.mean([getattr(one[name], key) for one in outcomes])) for key in ("n", "v", "dead")),
            sum(one[name].mismatches for one in outcomes),
        )
        for name in ARMS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4000, help="simulated groups at each pass rate")
    parser.add_argument("--ledgers", type=Path, nargs="+", help="make groups.json from these runs first")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.ledgers:
        write_groups(options.ledgers)
    found = simulated(options.groups)
    totals_RPN = read_groups()
    right_RPN = (totals_RPN >= RIGHT).double()
    half = right_RPN.shape[1] // 2
    parts = {"trainings": right_RPN, "first half": right_RPN[:, :half], "second half": right_RPN[:, half:]}
    trained = {
        label: {name: outcome(stopping, part.flatten(0, 1)) for name, stopping in ARMS.items()}
        for label, part in parts.items()
    }
    middle = mean([arms for rate, arms in found.items() if MIDDLE[0] <= rate <= MIDDLE[1]])
    shown = {f"pass rate {rate}": found[rate] for rate in (0.02, 0.1, 0.2, 0.5, 0.8, 0.9, 0.98)}
    print_table(shown | {"0.2 to 0.8": middle, "all pass rates": mean(list(found.values()))} | trained)
    print(f"\nlossless waves, pass rates 0.2 to 0.8: {middle['waves, lossless'].n / N:.3f} of {N}; goal {GOAL} or less")
    for label, arms in (("simulated", mean(list(found.values()))), ("of the trainings", trained["trainings"])):
        print(f"groups {label} that keep other rollouts than all {N}: {arms['waves, lossless'].mismatches}")
    print_graded(totals_RPN.flatten(0, 1), right_RPN.flatten(0, 1))
    write_csv(options.output / "waves.csv", {str(rate): arms for rate, arms in found.items()} | trained)
    draw(found, right_RPN.mean(dim=2).flatten().numpy()).savefig(options.output / "waves.png", dpi=110)


def print_graded(totals_PN: Tensor, right_PN: Tensor) -> None:
    """Print what the same groups do by their graded totals, and what stopping by right and wrong keeps of those."""
    schedule = wave_sizes(WAVES, N, M)
    generated_P, _ = Stopping(M, N, low=0.0, high=totals_PN.nan_to_num().amax().item()).replay(totals_PN, schedule)
    print(f"the trainings by their graded totals, lossless: n {generated_P.double().mean():.1f}")
    generated_P, _ = Stopping(M, N, low=0.0, high=1.0).replay(right_PN, schedule)
    seen_PN = totals_PN.masked_fill(torch.arange(N) >= generated_P.unsqueeze(1), torch.nan)
    kept, whole = (
        totals_PN.gather(1, select(some_PN, M).indices).double().var(dim=1) for some_PN in (seen_PN, totals_PN)
    )
    share_P = (kept / whole)[whole > 0]
    print(
        "by right and wrong: share of the totals' variance kept "
        f"{share_P.mean():.3f} (mean), {share_P.min():.3f} (least); n {generated_P.double().mean():.1f}"
    )


def write_csv(path: Path, found: dict[str, dict[str, Outcome]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["groups", "arm", "generated", "variance", "dead", "mismatches"])
        for label, arms in found.items():
            for name, one in arms.items():
                writer.writerow([label, name, f"{one.n:.3f}", f"{one.v:.4f}", f"{one.dead:.4f}", one.mismatches])


if __name__ == "__main__":
    main()
