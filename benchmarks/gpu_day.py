"""Measure PODS on one GPU in 27 minutes: PYTHONPATH=src python benchmarks/gpu_day.py --output runs/gpu-day

For a GPU that is there for half an hour, in commands of at most ten minutes. One command works through the plan until
`--seconds` are over, and the same command continues it: three do all. Each result is a line of `results.jsonl` as soon
as it is known, and `gpu_day.md` shows all of them. On another machine, put `results.jsonl` into its `--output` first.

1. Correctness: attention, trees and generation against slower references. If one is wrong, the plan ends. With
   `--anyway` it goes on: an error just above its limit may be rounding.
2. A step by n, with the shape of Qwen2.5-3B and random weights, next to TRL's GRPO; completions are generated.
3. The same with the shape of Qwen3.5-0.8B, whose layers are recurrent but for one in four.
4. The update alone: ragged completions of 8 prompts in micro-batches of 4, for prefix trees, rows and TRL.
5. Peak memory of an update of 64 rows of 2,000 tokens.
6. `pods train tiny-pods`, killed and resumed.
7. `pods train words-pods` for 80 seconds, with evaluations.

What matters most comes first, since the GPU may be taken away: after the checks TRL 16, then trees of 64 -> 16 and
16 -> 16, TRL 64 and a tree of 256 -> 16.

Each line names the device, the versions, the attention that ran, whether prefix trees ran, and warnings. Every cell has
a limit, after which it is ended: a plan in which everything is late takes 27 minutes. Exit code 0: the plan is done; 3:
cells are left; 1: something is wrong.

The machine needs torch and transformers. `tools/pack_wheels.py` gathers the wheels of all else.

A minute on a CPU, with tiny sizes:

    PYTHONPATH=src python benchmarks/gpu_day.py --miniature --device cpu --seconds 10000 --output /tmp/gpu-day
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_runs import kill_and_resume, train
from measuring import command_line, spread
from pods_rl.engines import PHASES
from pods_rl.runs.environment import git_commit

PARTS = {
    1: "Correctness",
    2: "A step by n",
    3: "A step with recurrent layers",
    4: "The update of ragged completions",
    5: "Peak memory of an update",
    6: "A run that is killed and resumed",
    7: "Training the shipped policy",
}
MACHINE = ("device", "torch", "transformers", "trl")  # on which every figure depends
START = 60  # seconds in which the process of the cells must import its libraries
TOTAL = 27 * 60
COMMAND = 570  # seconds of a command
GRACE = 10  # seconds in which a process without work ends
UNFINISHED = 3  # exit code
GIB = 2**30
Result = dict[str, Any]


# ------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Cell:
    """One result.

    Args:
        part: of `PARTS`.
        name: in the results, where each is there once.
        kind: `checks`, `step`, `resume` or `train`: what measures it.
        limit: seconds.
        settings: for what measures it.
    """

    part: int
    name: str
    kind: str
    limit: int
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def needs_worker(self) -> bool:
        return self.kind in ("checks", "step")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the plan; the miniature has smaller ones.

    Args:
        shape: of the model in parts 2, 4 and 5.
        hybrid: its shape in part 3.
        m: rows trained of a prompt in parts 2 and 3.
        more_rollouts: n of PODS in part 2, above m; the first is also that of the row-by-row arms and of part 3.
        prompt, completion: tokens in parts 2 and 3.
        ragged_prompts: of a step in part 4.
        longest: tokens of the longest completion in part 4, a row of the plan each.
        memory_rows, memory_tokens: of part 5.
        steps: timed steps of a cell at most.
        killed_steps: of the run that is killed.
        killed: options of that run.
        training: options of the run of part 7.
        patience: what all limits are multiplied by.
    """

    shape: str
    hybrid: str
    m: int
    more_rollouts: tuple[int, ...]
    prompt: int
    completion: int
    ragged_prompts: int
    longest: tuple[int, ...]
    memory_rows: int
    memory_tokens: int
    steps: int
    killed_steps: int
    killed: tuple[str, ...]
    training: tuple[str, ...]
    patience: int = 1


DAY = Sizes(
    shape="qwen2.5-3b", hybrid="qwen3.5-0.8b", m=16, more_rollouts=(64, 256), prompt=256, completion=128,
    ragged_prompts=8, longest=(500, 2000), memory_rows=64, memory_tokens=2000, steps=4, killed_steps=12,
    killed=("--eval_prompts", "16"), training=("--max_seconds", "80", "--eval_seconds", "20", "--bf16", "true"),
)  # fmt: skip
SMALL = (
    "--num_rollouts", "8", "--num_generations", "4", "--per_device_train_batch_size", "4", "--max_completion_length",
    "12", "--eval_prompts", "4",
)  # fmt: skip
MINIATURE = Sizes(
    shape="tiny", hybrid="tiny-hybrid", m=4, more_rollouts=(8, 12), prompt=16, completion=8, ragged_prompts=2,
    longest=(12,), memory_rows=4, memory_tokens=16, steps=1, killed_steps=6, killed=SMALL,
    training=("--max_steps", "2", *SMALL), patience=20,
)  # fmt: skip


def plan(sizes: Sizes) -> list[Cell]:
    """Return all cells in their order."""
    cells = [
        Cell(1, "attention", "checks", 30),
        Cell(1, "tree", "checks", 30),
        Cell(1, "generation", "checks", 20),
        Cell(1, "families", "checks", 60),
    ]
    cells += generated_cells(sizes)
    cells += hybrid_cells(sizes)
    cells += ragged_cells(sizes)
    cells += memory_cells(sizes)
    cells.append(Cell(6, "tiny-pods", "resume", 120, {"words": list(sizes.killed), "steps": sizes.killed_steps}))
    cells.append(Cell(7, "words-pods", "train", 180, {"words": list(sizes.training)}))
    return [replace(cell, limit=cell.limit * sizes.patience) for cell in cells]


def step_cell(part: int, limit: int, sizes: Sizes, **settings: Any) -> Cell:
    """Return a cell that times steps; it begins no step after half of its limit."""
    settings = {"shape": sizes.shape, "steps": sizes.steps, "seconds": limit / 2, **settings}
    name = f"{settings['arm']} {settings['n']} -> {settings['m']}, {settings['weights']}"
    if part > 3:
        name += f", {settings['completions']} up to {settings['completion_tokens']}"
    return Cell(part, name, "step", limit, settings)


def generated_cells(sizes: Sizes) -> list[Cell]:
    n = sizes.more_rollouts[0]
    arms = [("trl", sizes.m, "bfloat16"), ("tree", n, "bfloat16"), ("tree", sizes.m, "bfloat16")]
    arms += [("trl", n, "bfloat16")]
    arms += [("tree", more, "bfloat16") for more in sizes.more_rollouts[1:]]
    arms += [("rows", n, "bfloat16")]
    return [generated_cell(2, sizes, arm, rollouts, weights) for arm, rollouts, weights in arms]


def hybrid_cells(sizes: Sizes) -> list[Cell]:
    arms = [("trl", sizes.m), ("tree", sizes.more_rollouts[0]), ("tree", sizes.m)]
    return [generated_cell(3, sizes, arm, rollouts, "bfloat16", shape=sizes.hybrid) for arm, rollouts in arms]


def generated_cell(part: int, sizes: Sizes, arm: str, rollouts: int, weights: str, **settings: Any) -> Cell:
    """Return a cell of one prompt a step, whose completions the policy generates."""
    return step_cell(
        part, 70, sizes, arm=arm, n=rollouts, m=rollouts if arm == "trl" else sizes.m, prompts=1,
        micro_batch=min(8, sizes.m), prompt_tokens=sizes.prompt, completion_tokens=sizes.completion,
        completions="generated", weights=weights, **settings,
    )  # fmt: skip


def ragged_cells(sizes: Sizes) -> list[Cell]:
    cells = []
    for longest in sizes.longest:
        for arm in ("trl", "tree", "rows"):
            cells.append(
                step_cell(
                    4, 36, sizes, arm=arm, n=8, m=8, prompts=sizes.ragged_prompts, micro_batch=4,
                    prompt_tokens=min(200, sizes.prompt), completion_tokens=longest, completions="ragged",
                    weights="bfloat16",
                )
            )  # fmt: skip
    return cells


def memory_cells(sizes: Sizes) -> list[Cell]:
    cells = []
    for arm in ("trl", "tree"):
        cells.append(
            step_cell(
                5, 60, sizes, arm=arm, n=sizes.memory_rows, m=sizes.memory_rows, prompts=1,
                micro_batch=sizes.memory_rows, prompt_tokens=min(200, sizes.prompt),
                completion_tokens=sizes.memory_tokens, completions="given", weights="bfloat16",
            )
        )  # fmt: skip
    return cells


# ------------------------------------------------------------------------------------------- measuring a cell


def measure(cell: Cell, device: Any) -> Result:
    """Measure a cell that needs torch, with its warnings; an error is its result.

    Args:
        cell: of kind `checks` or `step`.
        device: a `gpu_device.Device`.
    """
    from gpu_checks import run_checks
    from gpu_device import noted_warnings
    from gpu_step import StepCell, run_cell

    texts: list[str] = []
    try:
        with noted_warnings(texts):
            if cell.kind == "checks":
                result = run_checks(cell.name, device)
            else:
                result = run_cell(StepCell(**cell.settings), device)
    except Exception as error:
        text = traceback.format_exc().splitlines()
        result = {"failed": f"{type(error).__name__}: {error}"[:500], "log": "\n".join(text[-12:])}
    return {**result, "warnings": texts}


def work(connection: Any, kind: str, threads: int | None) -> None:
    """Describe the machine, then measure the cells that are received."""
    import torch
    from transformers.utils import logging

    from gpu_device import Device

    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    device = Device.of(kind)
    connection.send(device.describe())
    while True:
        try:
            cell = Cell(**connection.recv())
        except EOFError:  # the other end is closed
            return
        connection.send(measure(cell, device))


class Worker:
    """A process that measures one cell after another, so that libraries are imported once.

    After a cell that failed the next one has a new process, whose memory holds nothing.
    """

    def __init__(self, kind: str, threads: int | None, start: int) -> None:
        self._kind = kind
        self._threads = threads
        self._start_limit = start
        self._process: Any = None
        self._connection: Any = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> Result:
        """Start the process; return what it says of the machine, or how it failed."""
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=work, args=(other_end, self._kind, self._threads))
        self._process.start()
        other_end.close()
        return self._receive(self._start_limit)

    def measure(self, cell: Cell) -> Result:
        self._connection.send(asdict(cell))
        result = self._receive(cell.limit)
        if "failed" in result or "out_of_memory" in result:
            self.stop()
        return result

    def stop(self) -> None:
        """End the process, which frees its memory."""
        if self._process is None:
            return
        self._connection.close()
        self._process.join(GRACE)
        self._process.kill()
        self._process.join()
        self._process = None

    def _receive(self, limit: float) -> Result:
        """Return what the process sends within the limit, or why it sends nothing."""
        try:
            if self._connection.poll(limit):
                return self._connection.recv()
            self._process.kill()
            problem = f"not done after {limit:g} s"
        except (EOFError, OSError):
            self._process.join()
            problem = f"the process ended with exit code {self._process.exitcode}"
        self.stop()
        return {"failed": problem}


# ------------------------------------------------------------------------------------------- results


class Results:
    """The lines of `results.jsonl`, with one for each cell, and one for the machine."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._path = folder / "results.jsonl"
        self.machine: Result = {}
        self._lines: dict[tuple[int, str], Result] = {}
        if self._path.is_file():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                self._read(line)

    def _read(self, line: str) -> None:
        try:
            result = json.loads(line)
        except ValueError:  # cut off, as the machine went
            return
        if result["part"] == 0:
            self.machine = result
        else:
            self._lines[result["part"], result["name"]] = result

    def add(self, part: int, name: str, result: Result) -> None:
        """Write a line, and `gpu_day.md` anew."""
        line = {"part": part, "name": name, **result}
        text = json.dumps(line)
        is_cut_off = self._path.is_file() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a", encoding="utf-8") as file:
            if is_cut_off:
                file.write("\n")
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._read(text)
        (self.folder / "gpu_day.md").write_text(page(self.machine, self.lines()), encoding="utf-8")

    def of(self, cell: Cell) -> Result | None:
        return self._lines.get((cell.part, cell.name))

    def is_done(self, cell: Cell, retry: bool = False, anyway: bool = False) -> bool:
        """Return whether a cell needs no other try.

        A check needs one until it is right, unless `anyway`; with `retry` every cell that failed does.
        """
        result = self.of(cell)
        if result is None:
            return False
        if cell.kind == "checks" and not anyway:
            return bool(result.get("ok"))
        return not (retry and "failed" in result)

    def lines(self) -> list[Result]:
        return [self._lines[key] for key in sorted(self._lines, key=lambda key: key[0])]


# ------------------------------------------------------------------------------------------- running the plan


class Day:
    """Works through the plan."""

    def __init__(self, options: argparse.Namespace, sizes: Sizes) -> None:
        self._options = options
        self._end = time.monotonic() + options.seconds
        self._start_limit = START * sizes.patience
        self.results = Results(options.output)
        self._worker = Worker(options.device, options.threads, self._start_limit)

    def run(self, cells: list[Cell]) -> int:
        """Measure the cells that have no result, while there is time; return the exit code."""
        try:
            return self._run(cells)
        finally:
            self._worker.stop()

    def _run(self, cells: list[Cell]) -> int:
        for cell in cells:
            if self.results.is_done(cell, self._options.retry, self._options.anyway):
                continue
            if self._end - time.monotonic() < self._seconds(cell):
                print(f"No time for {cell.name} (part {cell.part}). Run the same command again.", flush=True)
                return UNFINISHED
            result = self._measure(cell)
            if result is None:
                return 1
            self.results.add(cell.part, cell.name, result)
            print(f"{cell.part}  {summary(result)}  {cell.name}", flush=True)
            if cell.part == 1 and not result.get("ok"):
                for line in wrong(result):
                    print(line, flush=True)
                if not self._options.anyway:
                    print("What runs on this device is wrong. The plan ends here. To go on: --anyway", flush=True)
                    return 1
        return 0

    def _seconds(self, cell: Cell) -> int:
        """Return how long a cell can take."""
        starts = cell.needs_worker and not self._worker.is_running
        return cell.limit + self._start_limit if starts else cell.limit

    def _measure(self, cell: Cell) -> Result | None:
        """Return a cell's result with its seconds and versions; None if the machine cannot measure it."""
        if cell.needs_worker and not self._worker.is_running and not self._start():
            return None
        began = time.monotonic()
        result = self._measurement(cell)()
        seconds = {"cell_seconds": round(time.monotonic() - began, 1)}
        return {**self._versions(), **result, **seconds, "settings": cell.settings}

    def _measurement(self, cell: Cell) -> Callable[[], Result]:
        device = self._options.device
        if cell.needs_worker:
            return lambda: self._worker.measure(cell)
        folder = self._options.output / cell.name
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier try, which was cut off
        if cell.kind == "resume":
            return lambda: kill_and_resume(cell.name, device=device, folder=folder, seconds=cell.limit, **cell.settings)
        return lambda: train(cell.name, device=device, folder=folder, seconds=cell.limit, **cell.settings)

    def _versions(self) -> Result:
        versions = {name: self.results.machine.get(name) for name in MACHINE}
        return versions | {"commit": git_commit()}

    def _start(self) -> bool:
        """Start the process of the cells; return whether this is the machine of earlier results."""
        machine = self._worker.start()
        if "failed" in machine:
            print(f"The libraries cannot be imported: {machine['failed']}.", flush=True)
            return False
        earlier = self.results.machine
        if not earlier:
            self.results.add(0, "machine", machine)
            return True
        for name in MACHINE:
            if earlier[name] != machine[name]:
                print(
                    f"{self.results.folder} has results with {name} {earlier[name]}, and this is {machine[name]}. "
                    "Choose another --output.",
                    flush=True,
                )
                return False
        return True


def summary(result: Result) -> str:
    """Return a few words for the terminal."""
    if "failed" in result:
        return f"failed ({result['failed']})"
    if "out_of_memory" in result:
        return f"out of memory in {result['out_of_memory']}"
    if "ok" in result:
        return "ok" if result["ok"] else "WRONG"
    return f"done in {result['cell_seconds']:.0f} s"


def wrong(result: Result) -> list[str]:
    """Return the checks that failed."""
    if "failed" in result:
        return [result.get("log", "")]
    return [
        f"{each['check']}: {each['error']:.2e}, limit {each['limit']}" for each in result["checks"] if not each["ok"]
    ]


# ------------------------------------------------------------------------------------------- the page


def page(machine: Result, lines: list[Result]) -> str:
    """Return the Markdown page of all results so far."""
    facts = [f"{name} {machine.get(name)}" for name in ("torch", "transformers", "trl", "cuda", "commit")]
    text = [f"# {machine.get('device')}", "", "; ".join(facts), ""]
    for part, title in PARTS.items():
        of_part = [line for line in lines if line["part"] == part]
        if not of_part:
            continue
        text += [f"## {title}", ""]
        if part in (2, 3, 4, 5):
            text += table(of_part)
        else:
            for line in of_part:
                text += description(line)
        text.append("")
    return "\n".join(text)


def description(line: Result) -> Iterator[str]:
    """Yield the lines of a result that is not a row of a table."""
    yield f"- **{line['name']}**: {summary(line)}"
    for name in ("attention", "ended", "killed_after_step", "steps", "training_seconds"):
        if line.get(name) is not None:
            yield f"    - {name.replace('_', ' ')}: {line[name]}"
    if "checks" in line:
        worst = max(line["checks"], key=lambda each: each["error"] / (each["limit"] or 1))
        yield f"    - closest to its limit of {worst['limit']}: {worst['check']}, {worst['error']:.2e}"
        for text in wrong(line):
            yield f"    - wrong: {text}"
    for row in line.get("evaluations", []):
        yield f"    - after {row['seconds']:.0f} s, step {row['step']}: accuracy {row['accuracy']:.3f}"
    for warning in line.get("warnings", []):
        yield f"    - warning: {warning}"


COLUMNS = ("arm", "weights", "step, s (range)", "of TRL's", *PHASES, "allocated, GiB", "reserved, GiB", "attention")


def table(lines: list[Result]) -> list[str]:
    """Return the table of one part, with its warnings."""
    rows = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    warnings: list[str] = []
    for line in lines:
        rows.append("| " + " | ".join(row(line, base_of(line, lines))) + " |")
        warnings += line.get("warnings", [])
    rows.append("")
    rows += [f"- warning: {warning}" for warning in dict.fromkeys(warnings)]
    return rows


def base_of(line: Result, lines: list[Result]) -> Result | None:
    """Return the first result of TRL's trainer with the same weights and completions."""
    for other in lines:
        settings = other["settings"]
        same = all(settings[name] == line["settings"][name] for name in ("weights", "completion_tokens"))
        if settings["arm"] == "trl" and same and "steps" in other:
            return other
    return None


def row(line: Result, base: Result | None) -> list[str]:
    """Return a step's row of the table; its name says what ran, and not what was asked for."""
    settings = line["settings"]
    name = arm_name(line)
    if "steps" not in line:
        reason = f"out of memory in {line['out_of_memory']}" if "out_of_memory" in line else line["failed"]
        return [name, settings["weights"], reason.replace("|", "/"), *[""] * (len(COLUMNS) - 3)]
    timed = line["steps"][line["warm_up"] :]
    totals = [sum(step.values()) for step in timed]
    share = f"{statistics.median(totals) / median_step(base):.2f}" if base else ""
    phases = [f"{statistics.median(step[phase] for step in timed):.3g}" for phase in PHASES]
    memory = []
    for kind in ("allocated", "reserved"):
        sizes = [peak[kind] for peak in line["peaks"].values() if kind in peak]
        memory.append(f"{max(sizes) / GIB:.2f}" if sizes else "")
    return [name, settings["weights"], spread(totals, ".3g"), share, *phases, *memory, line["attention"]]


def median_step(line: Result) -> float:
    return statistics.median(sum(step.values()) for step in line["steps"][line["warm_up"] :])


def arm_name(line: Result) -> str:
    settings = line["settings"]
    size = f"{settings['completion_tokens']} tokens"
    if settings["arm"] == "trl":
        return f"TRL {settings['n']}, {size}"
    name = f"PODS {settings['n']} -> {settings['m']}, {size}"
    return name if line.get("trees") else f"{name}, rows"


# ------------------------------------------------------------------------------------------- the command line


def parse(words: list[str]) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu-day"), help="folder (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=COMMAND, help="of this command (default: %(default)s)")
    parser.add_argument("--parts", type=int, nargs="+", choices=list(PARTS), help="only these, and part 1")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--anyway", action="store_true", help="go on after a check that is wrong")
    parser.add_argument("--miniature", action="store_true", help="tiny sizes")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    return parser.parse_args(words)


def main() -> int:
    options = parse(sys.argv[1:])
    sizes = MINIATURE if options.miniature else DAY
    cells = plan(sizes)
    if options.parts:
        cells = [cell for cell in cells if cell.part in (1, *options.parts)]
    return Day(options, sizes).run(cells)


if __name__ == "__main__":
    sys.exit(main())
