"""Do large inputs stay cheap? python benchmarks/sizes.py [--prompts 1000000] [--rollouts 100000]

Runs the real commands: `pods train` with one step on that many questions, as JSONL and as Parquet, and `pods report` on
a run with that many logged rollouts. Prints the wall seconds of each command, and the greatest memory of its processes
together. Goal: at most 60 s and 1,000 MB each. Nothing else may run on the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pyarrow as arrow
import pyarrow.parquet as parquet

from measuring import command_line, write_csv
from pods_rl.recipe import shipped_recipes
from pods_rl.yaml_files import dump_yaml, read_yaml

SECONDS = 60
MEGABYTES = 1000
POLL = 0.1  # seconds between two looks at the memory
FEW = ("--max_steps", "1", "--eval_prompts", "4", "--ledger_every", "1")


def measured(words: list[str]) -> tuple[float, float]:
    """Run a command; return its seconds, and the greatest memory of its processes in megabytes.

    Raises:
        SystemExit: it failed.
    """
    began = time.perf_counter()
    words = [sys.executable, "-m", "pods_rl", *words]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = psutil.Process(command.pid)
    greatest = 0
    while command.poll() is None:
        held = 0
        for member in [process, *process.children(recursive=True)]:
            try:
                # Memory that forks share is counted once.
                held += member.memory_full_info().pss
            except psutil.Error:
                continue
        greatest = max(greatest, held)
        time.sleep(POLL)
    seconds = time.perf_counter() - began
    if command.returncode:
        assert command.stdout is not None
        raise SystemExit(command.stdout.read().decode())
    return seconds, greatest / 1e6


def write_questions(folder: Path, count: int) -> dict[str, Path]:
    """Write questions and answers as JSONL and as Parquet; return the files."""
    questions = [f"{number}+{number % 97}=" for number in range(count)]
    answers = [str(number + number % 97) for number in range(count)]
    files = {"JSONL": folder / "train.jsonl", "Parquet": folder / "train.parquet"}
    with files["JSONL"].open("w", encoding="utf-8") as file:
        for question, answer in zip(questions, answers, strict=True):
            file.write(json.dumps({"question": question, "answer": answer}) + "\n")
    parquet.write_table(arrow.table({"question": questions, "answer": answers}), files["Parquet"])
    (folder / "test.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n", encoding="utf-8")
    return files


def write_recipe(folder: Path) -> Path:
    """Write the recipe tiny-pods with a data set of its own."""
    values, _ = read_yaml(shipped_recipes()["tiny-pods"])
    values.pop("task_difficulty", None)
    values |= {
        "task": "dataset",
        "dataset_test_name": str(folder / "test.jsonl"),
        "task_rewards": {"accuracy": 1.0},
        "prompt_style": "plain",
        "system_prompt": "",
    }
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_yaml(values), encoding="utf-8")
    return recipe


def copy_rollouts(run: Path, count: int) -> None:
    """Copy the rollouts of a run's first step as later steps, until the run has `count` rollouts."""
    table = parquet.read_table(run / "rollouts" / "step-000001.parquet")
    place = table.column_names.index("step")
    for step in range(2, count // len(table) + 1):
        steps = arrow.array([step] * len(table), table.schema.field(place).type)
        parquet.write_table(table.set_column(place, "step", steps), run / "rollouts" / f"step-{step:06d}.parquet")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="pods-sizes-") as name:
        folder = Path(name)
        recipe = write_recipe(folder)
        commands = {}
        for kind, file in write_questions(folder, options.prompts).items():
            words = ["train", str(recipe), "--dataset_name", str(file), *FEW, "--output", str(folder / kind)]
            commands[f"train, {options.prompts:,} prompts as {kind}"] = words
        commands[f"report, {options.rollouts:,} rollouts"] = ["report", str(folder / "JSONL")]
        for what, words in commands.items():
            if words[0] == "report":
                copy_rollouts(folder / "JSONL", options.rollouts)
            seconds, megabytes = measured(words)
            verdict = "met" if seconds <= SECONDS and megabytes <= MEGABYTES else "missed"
            print(f"{what:<40}{seconds:>8.1f} s{megabytes:>8.0f} MB  {verdict}", flush=True)
            rows.append([what, f"{seconds:.1f}", f"{megabytes:.0f}"])
    write_csv(options.csv, ["what", "seconds", "memory_mb"], rows)


if __name__ == "__main__":
    main()
