"""Speed of the max-variance rule against the paper's Algorithm 2 in a Python loop, and against a sort.

The rule over the batch (`select_batch`) is timed next to `select` of as many rows, and next to the same sort.

    python benchmarks/selection.py [--repeats 31] [--json FILE]

One thread, CPU time. Each round times every contender once; the table has the median and quartiles of the ratios
within rounds. The lower bound is a plain `torch.sort` of the same rewards: float32, as in the engine, and float64
below the table. `normal` rewards are all different; `binary` ones, 0 or 1, are what a verifier gives, and sort
faster.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from measuring import alternate, command_line, write_json
from pods_rl.selection import RULES, select, select_batch

SETTINGS = [(256, 512, 128), (1, 64, 16), (4096, 64, 16)]
GOAL_SETTING = (256, 512, 128)
GOAL_LOOP = 100.0
GOAL_SORT = 2.0
BATCH_SETTINGS = [(8, 16, 32), (64, 16, 256), (512, 64, 8192)]  # P, n, R
GOAL_BATCH_SETTING = (512, 64, 8192)
GOAL_BATCH_SECONDS = 0.05
KINDS: dict[str, Callable[[Tensor], Tensor]] = {"normal": lambda x_PN: x_PN, "binary": lambda x_PN: (x_PN > 0).float()}


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
    """Return each contender's seconds per round, `[rounds]`, after a warm-up.

    Contenders faster than half a millisecond repeat within a round, so that the clock's cost does not matter.
    """
    calls = {}
    for name, contender in contenders.items():
        calls[name] = max(1, round(5e-4 / mean_seconds(contender, 1)))
    timed = alternate(
        {name: (contenders[name], calls[name]) for name in contenders},
        rounds,
        lambda contender_and_calls, _: mean_seconds(*contender_and_calls),
    )
    return {name: np.array(seconds) for name, seconds in timed.items()}


def mean_seconds(contender: Callable[[], object], calls: int) -> float:
    started = time.process_time()
    for _ in range(calls):
        contender()
    return (time.process_time() - started) / calls


def quartiles(values: np.ndarray) -> list[float]:
    """Return first quartile, median and third quartile."""
    return [float(q) for q in np.quantile(values, [0.25, 0.5, 0.75])]


def compare(prompts: int, n: int, m: int, kind: str, repeats: int, loop_repeats: int) -> dict:
    """Measure one setting: seconds of each contender, and the rule's ratios to the loop and the sorts."""
    normal_PN = torch.randn(prompts, n, generator=torch.Generator().manual_seed(0))
    rewards_PN = KINDS[kind](normal_PN)
    double_PN = rewards_PN.double()
    max_variance = RULES["max_variance"]
    kept_PM = rewards_PN.gather(1, max_variance(rewards_PN, m))
    looped_PM = rewards_PN.gather(1, algorithm_2(rewards_PN, m))
    torch.testing.assert_close(kept_PM.var(dim=1), looped_PM.var(dim=1), rtol=1e-5, atol=0)

    contenders: dict[str, Callable[[], object]] = {
        "rule": lambda: max_variance(rewards_PN, m),
        "select": lambda: select(rewards_PN, m),
        "sort_float32": lambda: rewards_PN.sort(dim=1),
        "rule_float64": lambda: max_variance(double_PN, m),
        "sort_float64": lambda: double_PN.sort(dim=1),
    }
    seconds = measure(contenders, repeats)
    with_loop = {"rule": contenders["rule"], "loop": lambda: algorithm_2(rewards_PN, m)}
    loop_seconds = measure(with_loop, loop_repeats)
    return {
        "setting": [prompts, n, m],
        "rewards": kind,
        "seconds": {name: quartiles(values) for name, values in (loop_seconds | seconds).items()},
        "times_faster_than_loop": quartiles(loop_seconds["loop"] / loop_seconds["rule"]),
        "times_sort_float32": quartiles(seconds["rule"] / seconds["sort_float32"]),
        "times_sort_float64": quartiles(seconds["rule_float64"] / seconds["sort_float64"]),
    }


def compare_batch(prompts: int, n: int, rows: int, kind: str, repeats: int) -> dict:
    """Measure the rule over a batch: seconds of `select_batch`, of `select` of as many rows, and of a sort."""
    normal_PN = torch.randn(prompts, n, generator=torch.Generator().manual_seed(0))
    rewards_PN = KINDS[kind](normal_PN)
    contenders: dict[str, Callable[[], object]] = {
        "select_batch": lambda: select_batch(rewards_PN, rows),
        "select": lambda: select(rewards_PN, rows // prompts),
        "sort": lambda: rewards_PN.sort(dim=1),
    }
    seconds = measure(contenders, repeats)
    return {
        "setting": [prompts, n, rows],
        "rewards": kind,
        "seconds": {name: quartiles(values) for name, values in seconds.items()},
    }


def batch_table(results: list[dict]) -> str:
    """Return a line per setting of a batch: medians in ms."""
    header = f"{'P x n -> R':19}{'rewards':7}{'select_batch ms':>17}{'select ms':>11}{'sort ms':>9}"
    lines = [header, "-" * len(header)]
    for result in results:
        prompts, n, rows = result["setting"]
        setting = f"{prompts} x {n} -> {rows}"
        batch, one_prompt, sort = (1e3 * result["seconds"][name][1] for name in ("select_batch", "select", "sort"))
        lines.append(f"{setting:19}{result['rewards']:7}{batch:17.3f}{one_prompt:11.3f}{sort:9.3f}")
    return "\n".join(lines)


def table(results: list[dict]) -> str:
    """Return a line per setting, within 80 columns: medians in ms, ratios with quartiles."""
    header = f"{'P x n -> m':17}{'rewards':7}{'rule ms':>9}{'sort ms':>9}{'loop / rule':>18}{'rule / sort':>18}"
    lines = [header, "-" * len(header)]
    for result in results:
        prompts, n, m = result["setting"]
        setting = f"{prompts} x {n} -> {m}"
        rule = 1e3 * result["seconds"]["rule"][1]
        sort = 1e3 * result["seconds"]["sort_float32"][1]
        to_loop = "{1:.3g} ({0:.3g}-{2:.3g})".format(*result["times_faster_than_loop"])
        to_sort = "{1:.3g} ({0:.3g}-{2:.3g})".format(*result["times_sort_float32"])
        lines.append(f"{setting:17}{result['rewards']:7}{rule:9.3f}{sort:9.3f}{to_loop:>18}{to_sort:>18}")
    return "\n".join(lines)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=31, help="rounds next to the sorts (default: %(default)s)")
    parser.add_argument("--loop-repeats", type=int, default=3, help="rounds next to the loop (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    # After freeing a large block glibc keeps freed memory, as in a training process; otherwise each call faults it in.
    torch.zeros(16 << 20, dtype=torch.uint8)
    results = []
    for setting, kind in product(SETTINGS, KINDS):
        results.append(compare(*setting, kind, arguments.repeats, arguments.loop_repeats))
    print(table(results))
    print("float32 rewards, one thread; medians, and quartiles of the ratios within rounds.")
    in_float64 = ", ".join(f"{result['times_sort_float64'][1]:.2f}" for result in results)
    print(f"The same in float64, rule / sort: {in_float64}")
    judged = next(result for result in results if tuple(result["setting"]) == GOAL_SETTING)
    met = judged["times_faster_than_loop"][1] >= GOAL_LOOP and judged["times_sort_float32"][1] <= GOAL_SORT
    setting = "{} x {} -> {}".format(*GOAL_SETTING)
    print(f"Goal at {setting}: >= {GOAL_LOOP:.0f} x the loop, <= {GOAL_SORT:.0f} sorts: {'met' if met else 'MISSED'}")

    batch_results = []
    for (prompts, n, rows), kind in product(BATCH_SETTINGS, KINDS):
        batch_results.append(compare_batch(prompts, n, rows, kind, arguments.repeats))
    print(batch_table(batch_results))
    judged_batches = [result for result in batch_results if tuple(result["setting"]) == GOAL_BATCH_SETTING]
    slowest = max(result["seconds"]["select_batch"][1] for result in judged_batches)
    setting = "{} x {} -> {}".format(*GOAL_BATCH_SETTING)
    verdict = "met" if slowest < GOAL_BATCH_SECONDS else "MISSED"
    print(f"Goal at {setting}: below {1e3 * GOAL_BATCH_SECONDS:.0f} ms: {verdict}")
    environment = {"torch": torch.__version__, "processor": platform.processor(), "threads": 1}
    write_json(arguments.json, {"environment": environment, "results": results, "batches": batch_results})


if __name__ == "__main__":
    main()
