"""Measure PODS on one GPU in two commands of ten minutes: PYTHONPATH=src python benchmarks/gpu_day.py

For a GPU that is lent for a quarter of an hour and may be taken away: what matters most comes first, each result is a
line of `results.jsonl` as soon as it is known, and the same command continues where the last one stopped. On another
machine, put `results.jsonl` into its `--output` first.

1. Correctness: attention, trees and generation against slower references. If one is wrong, the plan ends. With
   `--anyway` it goes on: an error just above its limit may be rounding.
2. The update of 8 prompts x 8 ragged rows in micro-batches of 4, with the shape of Qwen2.5-3B, random weights and LoRA:
   TRL's, and ours by the tokens that a pass may have.
3. Generation of 64 rows with the same model, in each way.
4. A step of PODS 64 -> 16 next to TRL's GRPO 16.
5. Learning: SmolLM2-135M on the largest of four numbers (`chat.yaml`), GRPO 8 against PODS 32 -> 8 of each prompt and
   over the batch; seeds take turns.
6. If there is time: longer completions, rows, a static cache, a run that is killed and resumed.

The first line of `results.jsonl` names the device and the versions; results of another device are refused. Each other
line has the attention that ran, whether prefix trees ran, and warnings. Every cell has a limit, after which it is
ended. Remove a line to measure its cell again. Exit code 0: the plan is done; 3: cells are left; 1: something is wrong.

The machine needs torch and transformers. `python tools/pack_wheels.py runs/wheels --pieces runs/pieces` gathers the
rest: the wheels, and the chat model in two pieces, since 64 MiB can be carried at a time. With them on its PYTHONPATH:

    python benchmarks/gpu_day.py --parts 1 2 3 4    # with runs/wheels and runs/pieces/1
    python benchmarks/gpu_day.py --parts 5 6        # with runs/wheels and runs/pieces/2

Some minutes on a CPU, with tiny sizes:

    PYTHONPATH=src python benchmarks/gpu_day.py --miniature --device cpu --seconds 10000 --output /tmp/gpu-day
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from gpu_runs import kill_and_resume, learn
from measuring import command_line, spread
from pods_rl.engines import PHASES
from pods_rl.runs.environment import git_commit

PARTS = range(1, 7)
MACHINE = ("device", "torch", "transformers", "trl")  # on which every figure depends
START = 60  # seconds in which the process of the cells must import its libraries
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
        kind: `checks`, `step`, `generation`, `learn` or `resume`: what measures it.
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
        return self.kind in ("checks", "step", "generation")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the plan; the miniature has smaller ones.

    Args:
        shape: of the model.
        n: rollouts of a prompt in a step of one prompt, of PODS.
        m: rows trained of it.
        prompt, completion: its tokens.
        ragged_prompts: prompts of 8 rows in the update and in generation.
        longest: tokens of the longest ragged completion, and of a longer one.
        generated: tokens of a row in part 3.
        budget: `max_tokens_per_microbatch`.
        steps: timed steps of a cell at most.
        learning: a recipe, without what the arms differ in.
        killed: the recipe of the run that is killed, with options, and its steps.
        patience: what all limits are multiplied by.
    """

    shape: str
    n: int
    m: int
    prompt: int
    completion: int
    ragged_prompts: int
    longest: tuple[int, int]
    generated: int
    budget: int
    steps: int
    learning: dict[str, Any]
    killed: tuple[tuple[str, ...], int]
    patience: int = 1


def chat_recipe() -> dict[str, Any]:
    """Return the recipe of `chat.yaml` for a minute on a GPU."""
    experiment = yaml.safe_load(Path(__file__).with_name("chat.yaml").read_text(encoding="utf-8"))
    recipe: dict[str, Any] = experiment["base"]
    del recipe["threads"]
    return recipe | {"bf16": True, "clock": "wall", "max_seconds": 60, "eval_seconds": 20}


DAY = Sizes(
    shape="qwen2.5-3b", n=64, m=16, prompt=256, completion=128, ragged_prompts=8,
    longest=(500, 2000), generated=64, budget=16_000, steps=4, learning=chat_recipe(),
    killed=(("tiny-pods", "--eval_prompts", "16"), 12),
)  # fmt: skip
SMALL = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 12, "eval_prompts": 4}
MINIATURE = Sizes(
    shape="tiny", n=8, m=4, prompt=16, completion=8, ragged_prompts=2, longest=(12, 16), generated=8, budget=100,
    steps=1,
    learning={"model_name_or_path": "tiny", "task": "arithmetic", "max_steps": 2, "bf16": False, **SMALL},
    killed=(("tiny-pods", "--num_rollouts", "8", *(f"--{key}={value}" for key, value in SMALL.items())), 6),
    patience=20,
)  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "GRPO 8": {"num_rollouts": 8},
    "PODS 32 -> 8, prompt": {"num_rollouts": 32},
    "PODS 32 -> 8, batch": {"num_rollouts": 32, "selection": "batch"},
}
SEEDS = (1, 2)


def plan(sizes: Sizes) -> list[Cell]:
    """Return all cells in their order."""
    shorter, longer = sizes.longest
    cells = [
        Cell(1, "attention", "checks", 30),
        Cell(1, "tree", "checks", 30),
        Cell(1, "generation", "checks", 30),
        Cell(1, "families", "checks", 60),
        ragged_cell(2, sizes, "trl", shorter),
        ragged_cell(2, sizes, "tree", shorter),
        ragged_cell(2, sizes, "tree", shorter, sizes.budget),
        ragged_cell(2, sizes, "tree", shorter, "auto"),
        generation_cell(3, sizes, "captured rows"),
        generation_cell(3, sizes, "rows"),
        generation_cell(3, sizes, "generate"),
        generation_cell(3, sizes, "tree"),
        generation_cell(3, sizes, "continuous batching"),
        step_cell(sizes, "trl", sizes.m),
        step_cell(sizes, "tree", sizes.n),
    ]
    for seed in SEEDS:
        for arm, keys in ARMS.items():
            recipe = sizes.learning | keys | {"seed": seed}
            cells.append(Cell(5, f"{arm}, seed {seed}", "learn", 120, {"keys": recipe}))
    words, steps = sizes.killed
    cells += [
        ragged_cell(6, sizes, "trl", longer),
        ragged_cell(6, sizes, "tree", longer, sizes.budget),
        ragged_cell(6, sizes, "rows", shorter),
        generation_cell(6, sizes, "tree, modules"),
        generation_cell(6, sizes, "generate, static cache", 120),
        Cell(6, "killed and resumed", "resume", 120, {"words": list(words), "steps": steps}),
    ]
    return [replace(cell, limit=cell.limit * sizes.patience) for cell in cells]


def step_cell(sizes: Sizes, arm: str, rollouts: int) -> Cell:
    """Return a cell of one prompt a step, whose completions the policy generates."""
    settings = {
        "arm": arm, "n": rollouts, "m": sizes.m, "prompts": 1, "micro_batch": min(8, sizes.m),
        "prompt_tokens": sizes.prompt, "completion_tokens": sizes.completion, "shape": sizes.shape,
    }  # fmt: skip
    return timed(4, 70, f"{arm} {rollouts} -> {sizes.m}", sizes, settings)


def ragged_cell(part: int, sizes: Sizes, arm: str, longest: int, budget: int | str | None = None) -> Cell:
    """Return a cell of the update alone: prepared rows, in micro-batches of 4."""
    settings = {
        "arm": arm, "n": 8, "m": 8, "prompts": sizes.ragged_prompts, "micro_batch": 4,
        "prompt_tokens": min(200, sizes.prompt), "completion_tokens": longest, "shape": sizes.shape, "ragged": True,
        "budget": budget,
    }  # fmt: skip
    name = f"{arm}, up to {longest} tokens"
    if budget is not None:
        name += f", passes of {budget}"
    return timed(part, 36, name, sizes, settings)


def timed(part: int, limit: int, name: str, sizes: Sizes, settings: dict[str, Any]) -> Cell:
    """Return a cell that times steps; it begins no step after half of its limit."""
    return Cell(part, name, "step", limit, {"steps": sizes.steps, "seconds": limit / 2, **settings})


def generation_cell(part: int, sizes: Sizes, way: str, limit: int = 36) -> Cell:
    settings = {
        "way": way, "shape": sizes.shape, "prompts": sizes.ragged_prompts, "rows": 8,
        "prompt_tokens": min(200, sizes.prompt), "completion_tokens": sizes.generated, "seconds": 10,
    }  # fmt: skip
    return Cell(part, way, "generation", limit, settings)


# ------------------------------------------------------------------------------------------- measuring a cell


def measure(cell: Cell, device: Any) -> Result:
    """Measure a cell that needs torch, with its warnings; an error is its result.

    Args:
        cell: of a kind that needs the process of the cells.
        device: a `gpu_device.Device`.
    """
    from gpu_checks import run_checks
    from gpu_device import noted_warnings
    from gpu_generation import GenerationCell, run_generation
    from gpu_step import StepCell, run_cell

    texts: list[str] = []
    try:
        with noted_warnings(texts):
            if cell.kind == "checks":
                result = run_checks(cell.name, device)
            elif cell.kind == "generation":
                result = run_generation(GenerationCell(**cell.settings), device)
            else:
                result = run_cell(StepCell(**cell.settings), device)
    except Exception as error:
        text = traceback.format_exc().splitlines()
        result = {"failed": f"{type(error).__name__}: {error}"[:500], "log": "\n".join(text[-12:])}
    return {**result, "warnings": texts}


def work(connection: Any, kind: str) -> None:
    """Describe the machine, then measure the cells that are received."""
    from transformers.utils import logging

    from gpu_device import Device

    logging.disable_progress_bar()
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

    def __init__(self, kind: str, start: int) -> None:
        self._kind = kind
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
        self._process = context.Process(target=work, args=(other_end, self._kind))
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
        """Write a line."""
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

    def is_done(self, cell: Cell, anyway: bool = False) -> bool:
        """Return whether a cell needs no other try: a check needs one until it is right, unless `anyway`."""
        result = self._lines.get((cell.part, cell.name))
        if result is None:
            return False
        return cell.kind != "checks" or anyway or bool(result.get("ok"))


# ------------------------------------------------------------------------------------------- running the plan


class Day:
    """Works through the plan."""

    def __init__(self, options: argparse.Namespace, sizes: Sizes) -> None:
        self._options = options
        self._end = time.monotonic() + options.seconds
        self._start_limit = START * sizes.patience
        self.results = Results(options.output)
        self._worker = Worker(options.device, self._start_limit)

    def run(self, cells: list[Cell]) -> int:
        """Measure the cells that have no result, while there is time; return the exit code."""
        try:
            return self._run(cells)
        finally:
            self._worker.stop()

    def _run(self, cells: list[Cell]) -> int:
        for cell in cells:
            if self.results.is_done(cell, self._options.anyway):
                continue
            if self._end - time.monotonic() < self._seconds(cell):
                print(f"No time for {cell.name} (part {cell.part}). Run the same command again.", flush=True)
                return UNFINISHED
            result = self._measure(cell)
            if result is None:
                return 1
            self.results.add(cell.part, cell.name, result)
            print(f"{cell.part}  {cell.name}: {summary(result)}", flush=True)
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
        if cell.needs_worker:
            result = self._worker.measure(cell)
        else:
            run = learn if cell.kind == "learn" else kill_and_resume
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place, "run")
                result = run(device=self._options.device, folder=folder, seconds=cell.limit, **cell.settings)
        seconds = {"cell_seconds": round(time.monotonic() - began, 1)}
        return {"commit": git_commit(), **result, **seconds, "settings": cell.settings}

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
        others = [f"{name} {earlier[name]}" for name in MACHINE if earlier[name] != machine[name]]
        if others:
            print(f"{self.results.folder} has results of {', '.join(others)}. Choose another --output.", flush=True)
        return not others


def wrong(result: Result) -> list[str]:
    """Return the checks that failed."""
    if "failed" in result:
        return [result.get("log", "")]
    return [
        f"{each['check']}: {each['error']:.2e}, limit {each['limit']}" for each in result["checks"] if not each["ok"]
    ]


def summary(result: Result) -> str:
    """Return the result in a line."""
    if "failed" in result:
        return f"failed ({result['failed']})"
    if "out_of_memory" in result:
        return f"out of memory in {result['out_of_memory']}"
    if "ok" in result:
        return "ok" if result["ok"] else "WRONG"
    if "evaluations" in result:
        accuracies = [f"{row['accuracy']:.3f}" for row in result["evaluations"]]
        return f"{result['steps']} steps, accuracy {' '.join(accuracies)}"
    if "milliseconds_a_token" in result:
        return f"{result['milliseconds_a_token']:.3g} ms a token{memory(result)}"
    if "passes" in result:
        timed_steps = result["steps"][result["warm_up"] :]
        phases = [f"{name} {statistics.median(step[name] for step in timed_steps):.3g}" for name in PHASES]
        step = spread([sum(step.values()) for step in timed_steps], ".3g")
        return f"step {step} s: {', '.join(phases)}; {result['passes']} passes{memory(result)}"
    return f"done in {result['cell_seconds']:.0f} s"


def memory(result: Result) -> str:
    """Return the peak above what was held before, if the device has its own memory."""
    peaks = [peak["allocated"] for peak in result["peaks"].values() if "allocated" in peak]
    if not peaks:
        return ""
    return f"; {(max(peaks) - result['held']['allocated']) / GIB:.2f} GiB"


# ------------------------------------------------------------------------------------------- the command line


def parse(words: list[str]) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu-day"), help="folder (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=COMMAND, help="of this command (default: %(default)s)")
    parser.add_argument("--parts", type=int, nargs="+", choices=list(PARTS), help="only these, and part 1")
    parser.add_argument("--anyway", action="store_true", help="go on after a check that is wrong")
    parser.add_argument("--miniature", action="store_true", help="tiny sizes")
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
