"""Speed of the max-variance rule against the paper's Algorithm 2 in a Python loop: python benchmarks/selection.py

256 prompts of 512 rollouts, of which 128 are kept. One thread, CPU time. The two alternate. Prints the median
milliseconds of the rule, and how many times as long the loop takes: the median, the least and the greatest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from measuring import alternate, command_line, ratios, set_up_torch, spread
from pods_rl.selection import RULES

P = 256
N = 512
M = 128


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


def milliseconds(contender: Callable[[Tensor, int], Tensor], rewards_PN: Tensor) -> float:
    started = time.process_time()
    contender(rewards_PN, M)
    return 1000 * (time.process_time() - started)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    set_up_torch(threads=1)
    # After freeing a large block glibc keeps freed memory, as in a training process; otherwise each call faults it in.
    torch.zeros(16 << 20, dtype=torch.uint8)
    rewards_PN = torch.randn(P, N, generator=torch.Generator().manual_seed(0))
    contenders: dict[str, Callable[[Tensor, int], Tensor]] = {"rule": RULES["max_variance"], "loop": algorithm_2}
    # The first call of each is a warm-up, and both must keep the same variance.
    variances = [rewards_PN.gather(1, keep(rewards_PN, M)).var(dim=1) for keep in contenders.values()]
    torch.testing.assert_close(*variances, rtol=1e-5, atol=0)
    timed = alternate(contenders, options.repeats, lambda contender, _: milliseconds(contender, rewards_PN))
    times = spread(ratios(timed["loop"], timed["rule"]), ".0f")
    print(f"{P} x {N} -> {M}: {statistics.median(timed['rule']):.1f} ms; the loop takes {times} times as long")


if __name__ == "__main__":
    main()
