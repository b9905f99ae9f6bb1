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
from typing import Any

from pods_rl.distributed.processes import versions
from pods_rl.distributed.signals import stop_on_signals
from pods_rl.errors import Interrupted
from pods_rl.policies import tiny_policy_path
from pods_rl.runs import Run, RunWriter, write_parquet
from pods_rl.tasks import load_task

TASK = {"task": "arithmetic", "task_difficulty": "mixed"}
TEST_PROMPTS = 256
PHASES = {"gen": "rollout", "old_log_prob": "logprob", "update_actor": "update", "update_weights": "weights"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", type=arm, default=[(64, 16)], help="n:m, generated and trained per prompt")
    parser.add_argument("--steps", type=int, default=75)
    parser.add_argument("--evals", type=int, default=5, help="evaluations after the first")
    given, overrides = parser.parse_known_args()
    runs = [given.output.resolve() / (f"pods-{n}-{m}" if n > m else f"grpo-{n}") for n, m in given.arms]
    for output, (n, m) in zip(runs, given.arms, strict=True):
        train(output, n, m, steps=given.steps, evals=given.evals, overrides=overrides)
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
        log = output / "verl.jsonl"
        command = [sys.executable, "-m", "verl.trainer.main_ppo"]
        command += ["--config-path", "pkg://verl_on_cpu", "--config-name", "cpu"]
        command += [f"data.{split}_files={file}" for split, file in write_data(output / "data").items()]
        command += [f"actor_rollout_ref.model.path={tiny_policy_path()}", f"actor_rollout_ref.rollout.n={m}"]
        command += [
            f"trainer.v1.sampler.sampler_kwargs.{key}" for key in (f"num_rollouts={n}", f"ledger={output}/rollouts")
        ]
        command += [f"trainer.total_training_steps={steps}", f"trainer.test_freq={max(1, steps // evals)}", *overrides]
        plugins = {"VERL_USE_EXTERNAL_MODULES": "verl_on_cpu.platform", "VERL_PLATFORM": "cpu"}
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        print(f"{output.name}: verl's output is in {output}/log.txt", flush=True)
        with (output / "log.txt").open("wb") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **plugins, "PYTHONPATH": path, "VERL_FILE_LOGGER_PATH": str(log)},
            )
            try:
                with stop_on_signals():
                    record(writer, output.name, follow(log, process))
            except Interrupted as interrupt:
                writer.write_status("stopped", reason=str(interrupt))
                raise SystemExit(interrupt.code) from None
            finally:
                process.terminate()
                process.wait()
        if process.returncode:
            writer.write_status("failed", reason=f"verl ended with exit code {process.returncode}: see log.txt")
            raise SystemExit(f"{output.name}: verl ended with exit code {process.returncode}: see {output}/log.txt")
        writer.write_status("finished", reason="all steps done")


def write_data(folder: Path) -> dict[str, Path]:
    """Write the task's prompts as verl reads them."""
    task = load_task(TASK)
    files = {}
    for name, split in (("train", task.train), ("val", task.test.select(range(TEST_PROMPTS)))):
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


def record(writer: RunWriter, name: str, lines: Iterator[Mapping[str, Any]]) -> None:
    """Write metrics and evaluations under the names of `pods train`; the clock is the sum of verl's steps."""
    seconds, started = 0.0, time.perf_counter()
    for line in lines:
        step, data = line["step"], line["data"]
        generation, total = data.get("timing_s/gen", 0.0), data.get("timing_s/step", 0.0)
        seconds += total
        clock = {"step": step, "seconds": seconds, "elapsed": time.perf_counter() - started}
        if step:
            ours = {
                "reward": data["pods/all/reward_mean"],
                "reward_std": data["pods/all/reward_std"],
                "pods/seconds/rollout": generation,
                "pods/seconds/update": total - generation,
            }
            writer.append_metrics({**clock, **ours, **data})
        if (accuracy := data.get(f"val-core/{TASK['task']}/acc/mean@1")) is not None:
            error = math.sqrt(accuracy * (1 - accuracy) / TEST_PROMPTS)
            row = {"due": seconds, "accuracy": accuracy, "accuracy_se": error, "prompts": TEST_PROMPTS, "repeats": 1}
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
