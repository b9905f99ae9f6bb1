"""Cost of selection and row exchange on many processes: python benchmarks/scaling.py [--json FILE]

First it measures 1, 2 and 4 gloo processes on this machine, without a model: the gathers of a generation,
`selection.select`, and the exchange of kept rows by `exchange_rows`. Rewards are random and all different; every
completion has T tokens of four letters. Then a model of traffic and time (`traffic.py`), checked against those
points, predicts 8 to 1024 processes.

The model's constants for gloo are measured here, with gathers of one number and parcels of 8 MB. Those of a GPU
network are arguments, assumed and not measured: 50 us a call, 10 us a message, 20 GB/s (a 200 Gb/s port a GPU, four
fifths used). Selection is the same on every process, so one process measures it at any scale. More processes than
cores take turns, so gloo's column at scale predicts this machine, not a cluster.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from trl.trainer import grpo_trainer

from pods_rl.engines.trl.rows import (
    KeptRow,
    check_agreement,
    exchange_rows,
    from_bytes,
    own_rows,
    to_bytes,
    uneven_gathers,
)
from pods_rl.selection import select
from traffic import LETTERS, Network, Setting, communication, compare, errors, gloo, quartiles, traffic

SETTINGS = (Setting(1, 64, 16, 512), Setting(3, 63, 16, 512), Setting(4, 64, 16, 512), Setting(8, 128, 32, 1024))
LAYOUTS = {"whole groups": 1, "over 2": 2, "over 8": 8}  # processes that share a group of 64 -> 16
SCALES = (8, 16, 64, 256, 1024)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the bytes that this process sends inside the block, by collective."""
    sent = {"gathered": 0, "exchanged": 0}
    gather, exchange = dist.all_gather, dist.all_to_all_single

    def counting_gather(output: Any, tensor: torch.Tensor, *rest: Any) -> Any:
        sent["gathered"] += tensor.nbytes * (dist.get_world_size() - 1)
        return gather(output, tensor, *rest)

    def counting_exchange(output: Any, tensor: torch.Tensor, *rest: Any) -> Any:
        # Without sizes each process has an equal part, including this one.
        own = 0 if rest else tensor.nbytes // dist.get_world_size()
        sent["exchanged"] += tensor.nbytes - own
        return exchange(output, tensor, *rest)

    dist.all_gather, dist.all_to_all_single = counting_gather, counting_exchange
    try:
        yield sent
    finally:
        dist.all_gather, dist.all_to_all_single = gather, exchange


def generation(setting: Setting, accelerator: Accelerator, seed: int) -> dict[str, Any]:
    """Run one generation's gathers, selection and exchange as the trainer does; return seconds and bytes."""
    shares, process = setting.shares(accelerator.num_processes), accelerator.process_index
    here = shares.rollouts(process)
    rewards_PN = torch.randn(setting.prompts, setting.n, generator=torch.Generator().manual_seed(seed))
    mine = rewards_PN.flatten()[here.start : here.stop]
    completion_ids = [[i % 100_000] * setting.tokens for i in here]
    completions = ["a" * (LETTERS * setting.tokens) for _ in here]
    lengths = torch.full((len(here),), setting.tokens)
    accelerator.wait_for_everyone()
    clock = [time.perf_counter()]
    with counted() as sent:
        with uneven_gathers(accelerator, shares.counts):
            for values in (lengths, lengths, lengths == 0):
                accelerator.gather(values)
            everyone = grpo_trainer.gather(mine.unsqueeze(1))
        clock.append(time.perf_counter())
        kept_PM = select(everyone.view(setting.prompts, setting.n), setting.m).indices.sort(dim=1).values
        clock.append(time.perf_counter())
        if setting.n > setting.m:
            check_agreement(kept_PM, "max_variance", accelerator)
        kept = (torch.arange(setting.prompts).unsqueeze(1) * setting.n + kept_PM).flatten().tolist()
        own = own_rows(kept, here, completion_ids, completions, None, {})
        sources = [shares.generator(rollout) for rollout in kept]
        rows = exchange_rows(shares, process, kept, own, accelerator.device, sources)
        clock.append(time.perf_counter())
    assert torch.equal(everyone.flatten(), rewards_PN.flatten())
    assert [row.completion_ids[0] for row in rows] == [kept[row] % 100_000 for row in shares.rows(process)]
    gather, choose, exchange = (b - a for a, b in pairwise(clock))
    return {"gather": gather, "select": choose, "exchange": exchange, **sent, "kept": kept}


def gather_seconds(accelerator: Accelerator, calls: int = 4) -> float:
    """Return seconds of a gather of one number, over several calls: processes leave a barrier at different times."""
    number = torch.zeros(1, dtype=torch.int64)
    accelerator.wait_for_everyone()
    start = time.perf_counter()
    for _ in range(calls):
        accelerator.gather(number)
    return (time.perf_counter() - start) / calls


def parcel_seconds(accelerator: Accelerator, calls: int = 8) -> float:
    """Return seconds of an all-to-all that sends 8 MB to each other process."""
    parcel = torch.zeros(accelerator.num_processes << 20, dtype=torch.int64)
    got = torch.empty_like(parcel)
    accelerator.wait_for_everyone()
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_to_all_single(got, parcel)
    return (time.perf_counter() - start) / calls


def process(rank: int, world: int, port: int, settings: list[Setting], rounds: int, queue: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    seen: dict[int, list[dict[str, Any]]] = {}
    seconds: dict[str, list[float]] = {"number": [], "parcel": []}
    for number, setting in enumerate(settings):
        if setting.prompts * setting.m % world == 0:
            seen[number] = []
            for seed in range(rounds + 1):
                seen[number].append(generation(setting, accelerator, seed))
                if world > 1:  # interleaved with the rounds that they calibrate
                    seconds["number"].append(gather_seconds(accelerator))
            del seen[number][0]
    if world > 1:
        seconds["parcel"] = [parcel_seconds(accelerator) for _ in range(5)]
    queue.put((rank, seen, {name: statistics.median(values) for name, values in seconds.items() if values}))
    if world > 1:
        dist.destroy_process_group()


def measure(world: int, settings: list[Setting], rounds: int) -> tuple[dict[int, list[list[dict]]], dict[str, float]]:
    """Return for each setting the rounds of every process, and the calibration of process 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    started = [context.Process(target=process, args=(r, world, port, settings, rounds, queue)) for r in range(world)]
    for one in started:
        one.start()
    reports = sorted((queue.get() for _ in started), key=lambda report: report[0])
    for one in started:
        one.join()
    return {number: [seen[number] for _, seen, _ in reports] for number in reports[0][1]}, reports[0][2]


def point(setting: Setting, world: int, reports: list[list[dict]]) -> dict[str, Any]:
    """Summarise a setting: the slowest and the busiest process of each round, over the rounds."""
    rounds = list(zip(*reports, strict=True))
    seconds = {
        part: quartiles([max(one[part] for one in each) for each in rounds])
        for part in ("gather", "select", "exchange")
    }
    shares = setting.shares(world)
    moved = [
        sum(shares.generator(rollout) != shares.trainer(row) for row, rollout in enumerate(each[0]["kept"]))
        for each in rounds
    ]
    communicated = [max(one["gather"] + one["exchange"] for one in each) for each in rounds]
    return {
        "setting": asdict(setting),
        "processes": world,
        "seconds": seconds,
        "communication": quartiles(communicated),
        "gathered": max(one["gathered"] for each in rounds for one in each),
        "exchanged": [sum(one["exchanged"] for one in each) for each in rounds],
        "moving": [count / (setting.prompts * setting.m) for count in moved],
    }


def packing(tokens: int, rounds: int) -> float:
    """Return median seconds to pack and unpack a row of that many tokens."""
    row = KeptRow([5] * tokens, "a" * (LETTERS * tokens), None, {})
    seconds = []
    for _ in range(max(rounds, 5)):
        start = time.perf_counter()
        from_bytes(to_bytes([row] * 16))
        seconds.append((time.perf_counter() - start) / 16)
    return statistics.median(seconds)


def project(networks: list[Network], rounds: int) -> list[dict[str, Any]]:
    """Return the layouts at 8 to 1024 processes: bytes, seconds on each network, and seconds of selection."""
    rows = []
    for name, over in LAYOUTS.items():
        for world in SCALES:
            setting = Setting(world // over, 64, 16, 512)
            expected = traffic(setting, world)
            rows.append(
                {
                    "layout": name,
                    "processes": world,
                    "setting": asdict(setting),
                    "traffic": asdict(expected),
                    "select": selection_seconds(setting, rounds),
                    "seconds": {net.name: communication(setting, world, net) for net in networks},
                }
            )
    return rows


def selection_seconds(setting: Setting, rounds: int) -> float:
    rewards_PN = torch.randn(setting.prompts, setting.n, generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        select(rewards_PN, setting.m)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def show(results: dict[str, Any]) -> None:
    """Print three tables within 80 columns."""
    print(f"{'ms: median (quartiles)':22}{'K':>3}{'gather':>19}{'select':>17}{'exchange':>19}")
    for seen in results["points"]:
        cells = "".join(
            f"{f'{m * 1e3:.1f} ({a * 1e3:.1f}-{b * 1e3:.1f})':>{width}}"
            for (a, m, b), width in zip(seen["seconds"].values(), (19, 17, 19), strict=True)
        )
        print(f"{Setting(**seen['setting'])!s:22}{seen['processes']:>3}{cells}")
    print(f"\n{'model / measured':22}{'K':>3}{'gathered, B':>14}{'rows, KB':>15}{'moving':>12}{'ms':>14}")
    for seen in results["points"]:
        if seen["processes"] == 1:
            continue
        pairs = (
            f"{seen['predicted']['gathered']:.0f}/{seen['gathered']}",
            f"{seen['predicted_exchanged'] / 1e3:.1f}/{statistics.mean(seen['exchanged']) / 1e3:.1f}",
            f"{seen['predicted']['moving']:.2f}/{statistics.mean(seen['moving']):.2f}",
            f"{seen['predicted_communication'] * 1e3:.1f}/{seen['communication'][1] * 1e3:.1f}",
        )
        cells = "".join(f"{cell:>{width}}" for cell, width in zip(pairs, (14, 15, 12, 14), strict=True))
        print(f"{Setting(**seen['setting'])!s:22}{seen['processes']:>3}{cells}")
    off = results["errors"]
    print("gathered: by the busiest process; rows: of all processes, mean of the rounds")
    print(f"Error of the model: seconds {off['time']:.0%} (median), bytes of rows {off['bytes']:.1%} (all together).")
    for network in results["networks"]:
        print(
            f"{network['name']}: {network['call'] * 1e6:.0f} us a call, {network['latency'] * 1e6:.0f} us a message, "
            f"{network['bandwidth'] / 1e9:.2f} GB/s, {network['packing'] * 1e6:.0f} us a row"
        )
    print(f"\n{'model: 64 -> 16, T 512':22}{'K':>5}{'moving':>8}{'out, KB':>10}{'select ms':>11}", end="")
    print("".join(f"{network['name'] + ' ms':>12}" for network in results["networks"]))
    for row in results["model"]:
        total = sum(row["traffic"][part] for part in ("gathered", "sizes", "rows"))
        print(
            f"{'group ' + row['layout'] if row['layout'] != 'whole groups' else row['layout']:22}{row['processes']:>5}"
            f"{row['traffic']['moving']:>8.2f}{total / 1e3:>10.1f}{row['select'] * 1e3:>11.2f}"
            + "".join(f"{seconds * 1e3:>12.2f}" for seconds in row["seconds"].values())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="generations measured (default: %(default)s)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--call-us", type=float, default=50.0, help="cost of a call (default: %(default)s)")
    parser.add_argument("--latency-us", type=float, default=10.0, help="cost of a message (default: %(default)s)")
    parser.add_argument("--bandwidth-gb", type=float, default=20.0, help="GB/s a GPU sends (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    options = parser.parse_args()
    points, calibrations = [], {}
    for world in options.processes:
        reports, calibration = measure(world, list(SETTINGS), options.rounds)
        if calibration:
            calibrations[world] = calibration
        points += [point(SETTINGS[number], world, seen) for number, seen in reports.items()]
    torch.set_num_threads(1)
    row = packing(512, options.rounds)
    here = gloo(calibrations, row, max(options.processes))
    assumed = (options.call_us * 1e-6, options.latency_us * 1e-6, options.bandwidth_gb * 1e9)
    gpus = Network("GPUs", *assumed, here.packing)
    points = [compare(seen, gloo(calibrations, row, seen["processes"])) for seen in points]
    results = {
        "cores": os.cpu_count(),
        "rounds": options.rounds,
        "networks": [asdict(here), asdict(gpus)],
        "points": points,
        "errors": errors(points),
        "model": project([here, gpus], options.rounds),
    }
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
