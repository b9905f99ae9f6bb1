"""Speed of the max-variance rule against the paper's Algorithm 2 in a Python loop, and against a sort.

    python benchmarks/selection.py [--repeats 31]

One thread, CPU time. Each round times every contender once; the table has medians in ms, and the median and quartiles
of the ratios within rounds. The lower bound is a plain `torch.sort` of the same float32 rewards. `batch` is the rule
over the batch that keeps as many rows. `normal` rewards are all different; `binary` ones, 0 or 1, are what a verifier
gives, and sort faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product

import numpy as np
import torch
from torch import Tensor

from measuring import alternate, command_line, set_up_torch
from pods_rl.selection import RULES, select_batch

SETTINGS = [(256, 512, 128), (1, 64, 16), (4096, 64, 16)]  # P, n, m
KINDS: dict[str, Callable[[Tensor], Tensor]] = {"normal": lambda x_PN: x_PN, "binary": lambda x_PN: (x_PN > 0).float()}
LOOP_ROUNDS = 3


def algorithm_2(rewards_PN: Tensor, m: int) -> Tensor:
    """Algorithm 2 of the paper (arXiv 2504.13818, section 3.3), line by line, one prompt after the other."""
    chosen = []
    for rewards_N in rewards_PN:
        order_N = rewards_N.argsort()
        answer_M = order_N[:m]
        for k in range(1, m + 1):
            candidate_M = torch.cat([order_N[: m - k], order_N[len(order_N) - k :]])
            if rewards_N[candidate_M].var() > rewards_N[answer_M].var():
                answer_M = candidate_M
        chosen.append(answer_M)
    return torch.stack(chosen)


def measure(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, np.ndarray]:
    """Return each contender's milliseconds per round, `[rounds]`, after a warm-up.

    Contenders faster than half a millisecond repeat within a round, so that the clock's cost does not matter.
    """
    calls = {}
    for name, contender in contenders.items():
        calls[name] = max(1, round(0.5 / mean_milliseconds(contender, 1)))
    timed = alternate(
        {name: (contenders[name], calls[name]) for name in contenders},
        rounds,
        lambda contender_and_calls, _: mean_milliseconds(*contender_and_calls),
    )
    return {name: np.array(milliseconds) for name, milliseconds in timed.items()}


def mean_milliseconds(contender: Callable[[], object], calls: int) -> float:
    started = time.process_time()
    for _ in range(calls):
        contender()
    return 1000 * (time.process_time() - started) / calls


def with_quartiles(values: np.ndarray) -> str:
    """Return the median and, in brackets, the first and the third quartile."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{median:.3g} ({low:.3g}-{high:.3g})"


def compare(prompts: int, n: int, m: int, kind: str, rounds: int) -> str:
    """Measure one setting; return its row of the table."""
    normal_PN = torch.randn(prompts, n, generator=torch.Generator().manual_seed(0))
    rewards_PN = KINDS[kind](normal_PN)
    max_variance = RULES["max_variance"]
    kept_PM = rewards_PN.gather(1, max_variance(rewards_PN, m))
    looped_PM = rewards_PN.gather(1, algorithm_2(rewards_PN, m))
    torch.testing.assert_close(kept_PM.var(dim=1), looped_PM.var(dim=1), rtol=1e-5, atol=0)

    contenders: dict[str, Callable[[], object]] = {
        "rule": lambda: max_variance(rewards_PN, m),
        "sort": lambda: rewards_PN.sort(dim=1),
        "batch": lambda: select_batch(rewards_PN, prompts * m),
    }
    timed = measure(contenders, rounds)
    looped = measure({"rule": contenders["rule"], "loop": lambda: algorithm_2(rewards_PN, m)}, LOOP_ROUNDS)
    row = f"{f'{prompts} x {n} -> {m}':17}{kind:7}"
    for milliseconds in timed.values():
        row += f"{np.median(milliseconds):9.3f}"
    for shares in (looped["loop"] / looped["rule"], timed["rule"] / timed["sort"]):
        row += f"{with_quartiles(shares):>18}"
    return row


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=31, help="rounds (default: %(default)s)")
    options = parser.parse_args()
    set_up_torch(threads=1)
    # After freeing a large block glibc keeps freed memory, as in a training process; otherwise each call faults it in.
    torch.zeros(16 << 20, dtype=torch.uint8)
    print(f"{'P x n -> m':17}{'rewards':7}{'rule':>9}{'sort':>9}{'batch':>9}{'loop / rule':>18}{'rule / sort':>18}")
    for setting, kind in product(SETTINGS, KINDS):
        print(compare(*setting, kind, options.repeats), flush=True)


if __name__ == "__main__":
    main()
