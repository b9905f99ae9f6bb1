"""verl's own trainer on a CPU: Ray, TransferQueue, agent loop, FSDP2 and a rollout server, on the tiny policy.

    .venv-verl/bin/python examples/verl_cpu.py --output runs/verl-demo        # 75 steps of 64 -> 16
    .venv-verl/bin/python examples/verl_cpu.py --output runs/verl-arms --arms 16:16 64:16 64:64 --steps 30

Each arm is a run directory that `pods report` reads. Further arguments are verl's own, as key=value.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from pods_rl.distributed.processes import versions
from pods_rl.distributed.signals import stop_on_signals
from pods_rl.errors import Interrupted, UserError
from pods_rl.policies import tiny_policy_path
from pods_rl.runs import Run, RunWriter, write_parquet
from pods_rl.tasks import load_task

TASK = {"task": "arithmetic", "task_difficulty": "mixed"}
TEST_PROMPTS = 256
PHASES = {"gen": "rollout", "old_log_prob": "logprob", "update_actor": "update", "update_weights": "weights"}
RAY_STARTS = 3
RAY_TIMED_OUT = "The current node timed out during startup"


class Validation(NamedTuple):
    """What an evaluation consists of: the prompts, and the completions drawn of each."""

    prompts: int
    repeats: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", type=arm, default=[(64, 16)], help="n:m, generated and trained per prompt")
    parser.add_argument("--steps", type=int, default=75)
    parser.add_argument("--evals", type=int, default=5, help="evaluations after the first")
    given, overrides = parser.parse_known_args()
    runs = [given.output.resolve() / (f"pods-{n}-{m}" if n > m else f"grpo-{n}") for n, m in given.arms]
    try:
        for output, (n, m) in zip(runs, given.arms, strict=True):
            train(output, n, m, steps=given.steps, evals=given.evals, overrides=overrides)
    except UserError as error:  # such as a directory that holds a run
        sys.exit(str(error))
    print(table([Run.open(output) for output in runs]))


def arm(text: str) -> tuple[int, int]:
    """Read n:m."""
    n, m = map(int, text.split(":"))
    return n, m


def train(output: Path, n: int, m: int, *, steps: int, evals: int, overrides: list[str]) -> None:
    """Train one arm with `python -m verl.trainer.main_ppo`, and record what it logs as a run directory."""
    with RunWriter(output) as writer:
        writer.write_config(json.dumps({**TASK, "num_rollouts": n, "num_generations": m, "rule": "max_variance"}))
        writer.write_environment({"versions": versions(), "device": "cpu", "command": sys.argv})
        writer.write_status("running")
        files = write_data(output / "data")
        settings = [
            f"data.train_files={files['train']}",
            f"data.val_files={files['val']}",
            f"actor_rollout_ref.model.path={tiny_policy_path()}",
            f"actor_rollout_ref.rollout.n={m}",
            f"trainer.v1.sampler.sampler_kwargs.num_rollouts={n}",
            f"trainer.v1.sampler.sampler_kwargs.ledger={output}/rollouts",
            f"trainer.total_training_steps={steps}",
            f"trainer.test_freq={max(1, steps // evals)}",
            *overrides,
        ]
        with initialize_config_module("verl_on_cpu", version_base=None):
            validation = read_validation(compose("cpu", settings))
        print(f"{output.name}: verl's output is in {output}/log.txt", flush=True)
        for attempt in range(1, RAY_STARTS + 1):
            code = run_verl(writer, output, settings, validation)
            if code == 0 or RAY_TIMED_OUT not in (output / "log.txt").read_text(errors="replace"):
                break
            # Ray waits 15 seconds for its agent, which may need longer on a loaded machine.
            print(f"{output.name}: Ray did not start in time (attempt {attempt} of {RAY_STARTS})", flush=True)
        if code != 0:
            writer.write_status("failed", reason=f"verl ended with exit code {code}: see log.txt")
            raise SystemExit(f"{output.name}: verl ended with exit code {code}: see {output}/log.txt")
        writer.write_status("finished", reason="all steps done")


def run_verl(writer: RunWriter, output: Path, settings: list[str], validation: Validation) -> int:
    """Run verl to its end, record what it logs, and return its exit code."""
    log = output / "verl.jsonl"
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += ["--config-path", "pkg://verl_on_cpu", "--config-name", "cpu", *settings]
    path = str(Path(__file__).parent)
    if os.environ.get("PYTHONPATH"):
        path += os.pathsep + os.environ["PYTHONPATH"]
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu.platform",
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(log),
        "RAY_agent_register_timeout_ms": "600000",  # a loaded machine needs more than Ray's 30 seconds
    }
    with (output / "log.txt").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            with stop_on_signals():
                record(writer, output.name, follow(log, process), validation)
        except Interrupted as interrupt:
            writer.write_status("stopped", reason=str(interrupt))
            raise SystemExit(interrupt.code) from None
        finally:
            process.terminate()
            process.wait()
    return process.returncode


def read_validation(config: DictConfig) -> Validation:
    """Read from verl's configuration what an evaluation will consist of."""
    files = config.data.val_files
    if isinstance(files, str):
        files = [files]
    prompts = 0
    for file in files:
        prompts += pq.read_metadata(file).num_rows
    if config.data.val_max_samples > 0:
        prompts = min(prompts, config.data.val_max_samples)
    return Validation(prompts, config.actor_rollout_ref.rollout.val_kwargs.n)


def write_data(folder: Path) -> dict[str, Path]:
    """Write the task's prompts as verl reads them."""
    task = load_task(TASK)
    splits = {"train": task.train, "val": task.test.select(range(TEST_PROMPTS))}
    files = {}
    for name, split in splits.items():
        columns = {
            "data_source": [task.name] * len(split),
            "prompt": [[{"role": "user", "content": prompt}] for prompt in split["prompt"]],
            "reward_model": [{"style": "rule", "ground_truth": answer} for answer in split["answer"]],
            "extra_info": [{"index": number} for number in range(len(split))],
        }
        files[name] = write_parquet(folder / f"{name}.parquet", columns)
    return files


def follow(log: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Yield verl's logged lines until it ends."""
    read = 0
    while True:
        ended = process.poll() is not None
        lines = log.read_bytes().split(b"\n")[:-1] if log.is_file() else []
        yield from (json.loads(line) for line in lines[read:])
        read = len(lines)
        if ended:
            return
        time.sleep(0.5)


def record(writer: RunWriter, name: str, lines: Iterator[Mapping[str, Any]], validation: Validation) -> None:
    """Write metrics and evaluations under the names of `pods train`; the clock is the sum of verl's steps."""
    seconds = 0.0
    started = time.perf_counter()
    for line in lines:
        step = line["step"]
        data = line["data"]
        generation = data.get("timing_s/gen", 0.0)
        total = data.get("timing_s/step", 0.0)
        seconds += total
        clock = {"step": step, "seconds": seconds, "elapsed": time.perf_counter() - started}
        if "pods/all/reward_mean" in data:  # not in a validation before the first step
            ours = {
                "reward": data["pods/all/reward_mean"],
                "reward_std": data["pods/all/reward_std"],
                "pods/seconds/rollout": generation,
                "pods/seconds/update": total - generation,
            }
            writer.append_metrics({**clock, **ours, **data})
        accuracy = data.get(f"val-core/{TASK['task']}/acc/mean@{validation.repeats}")
        if accuracy is not None:
            # Of independent prompts. Completions of one prompt are not independent, so repeats do not count.
            error = math.sqrt(accuracy * (1 - accuracy) / validation.prompts)
            row = {"due": seconds, "accuracy": accuracy, "accuracy_se": error, **validation._asdict()}
            writer.append_eval({**clock, **row})
            print(f"{name:<10} {seconds:6.0f} s  step {step:>4}  accuracy {accuracy:.3f}", flush=True)
        writer.write_status("running", **clock)


def table(runs: list[Run]) -> str:
    """Return rows generated and trained and seconds a step by phase, a line for each run."""
    phases = list(PHASES.values())
    lines = [f"{'':10}{'generated':>10}{'trained':>8}{'s/step':>8}" + "".join(f"{p:>9}" for p in phases) + "  accuracy"]
    for run in runs:
        rows = [sum(row[f"pods/{what}/rows"] for row in run.metrics) for what in ("all", "selected")]
        seconds = "".join(f"{mean(run, f'timing_s/{phase}'):9.2f}" for phase in PHASES)
        scores = f"{run.evals[0]['accuracy']:.2f}->{run.evals[-1]['accuracy']:.2f}"
        step = mean(run, "timing_s/step")
        lines.append(f"{run.path.name:10}{rows[0]:10.0f}{rows[1]:8.0f}{step:8.2f}{seconds} {scores}")
    return "\n".join(lines)


def mean(run: Run, name: str) -> float:
    """Return a metric's mean over the steps after the first, which is slower."""
    rows = run.metrics[1:] or run.metrics
    return sum(row.get(name, 0.0) for row in rows) / len(rows)


if __name__ == "__main__":
    main()
