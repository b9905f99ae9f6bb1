"""Memory of the update: python benchmarks/update_memory.py [EXPERIMENT.yaml] [--csv FILE]

Records the peak of the tensors in each pass forward and backward, above what was held before it. Generation is outside.
The first pass, before which the trainer checks its pass over the tree, and those that are skipped do not count.

With an experiment: trains some steps of each arm's recipe, with the first seed. Prints the median and the greatest
peak, for the experiment's own policy and with --trained for another one, whose rollouts share more.

    python benchmarks/update_memory.py benchmarks/equal_memory_4.yaml --trained FOLDER

Without one: packed passes next to the micro-batches of TRL's GRPO 16, 64 rows a step. PODS 64 -> 16 on word problems,
and on random text, where rollouts share only the prompt; with the default budget and with one of 16,000 tokens.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from trl import GRPOTrainer

from measuring import command_line, peak_of, quiet, set_up_torch, write_csv
from pods_rl.distributed.processes import quiet_libraries
from pods_rl.errors import UserError
from pods_rl.experiment import PlannedRun, load_experiment
from pods_rl.loading.prepare import prepare
from pods_rl.policies import tiny_policy_path
from pods_rl.training.trainer import build_trainer
from step import Arm, M, N, divided, random_text, trainer_of, word_problems

SKIPPED = 1e5  # bytes: a micro-batch below has no pass, since the gradients of the weights alone take 4 MB
PACKED_STEPS = 4
BUDGET = {"max_tokens_per_microbatch": 16_000}
PACKED_ARMS = (Arm("TRL's GRPO 16", M), Arm(f"PODS {N} -> {M}", N, {}), Arm("16,000 tokens", N, BUDGET))


@contextmanager
def measured_passes() -> Iterator[list[int]]:
    """Inside, append the peak of each pass in bytes."""
    peaks: list[int] = []
    compute_loss = GRPOTrainer.compute_loss
    backward = Accelerator.backward
    running: list[Any] = []

    def begin(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        profile = torch.profiler.profile(profile_memory=True)
        profile.start()
        running.append(profile)
        return compute_loss(trainer, *args, **kwargs)

    def end(accelerator: Any, *args: Any, **kwargs: Any) -> None:
        backward(accelerator, *args, **kwargs)
        profile = running.pop()
        profile.stop()
        peaks.append(peak_of(profile))

    # Of the classes, because a method that an object replaces counts as a user's.
    with patch.object(GRPOTrainer, "compute_loss", begin), patch.object(Accelerator, "backward", end):
        yield peaks


def peaks(run: PlannedRun, steps: int) -> list[int]:
    """Train some steps of a run; return the peak of each micro-batch in bytes."""
    with tempfile.TemporaryDirectory(prefix="pods-memory-") as folder, measured_passes() as measured:
        trainer = quiet(build_trainer(run.recipe, prepare(run.recipe), Path(folder)))
        trainer.args.max_steps = steps
        trainer.train()
    return measured


def packed(path: Path | None) -> None:
    """Compare packed passes with TRL's micro-batches."""
    words = word_problems("shipped", tiny_policy_path("tiny-words"))
    cases = {
        "words, 8 of 8": divided(words, prompts=4, micro_batches=8),
        "words, 64 of 1": divided(words, prompts=4, micro_batches=64),
        "60 + 24, 8 of 8": divided(random_text("embedded", 60, 24), prompts=4, micro_batches=8),
        "60 + 300, 8 of 8": divided(random_text("embedded", 60, 300), prompts=4, micro_batches=8),
    }
    rows = []
    print(f"{'case':<18}{'arm':<16}{'passes a step':>14}{'tokens a step':>14}{'greatest MB':>12}")
    for name, case in cases.items():
        # Long rows are more than 16,000 tokens, and take minutes.
        for arm in PACKED_ARMS[:2] if "300" in name else PACKED_ARMS:
            with tempfile.TemporaryDirectory(prefix="pods-memory-") as folder, measured_passes() as measured:
                trainer = trainer_of(arm, case, PACKED_STEPS, folder)
                trainer.args.logging_steps = 1
                trainer.train()
            computed = [peak / 1e6 for peak in measured[1:] if peak > SKIPPED]
            passes = sum(peak > SKIPPED for peak in measured) / PACKED_STEPS
            tokens = statistics.mean(row.get("pods/tokens/computed", 0) for row in trainer.state.log_history[:-1])
            shown = f"{tokens:.0f}" if tokens else ""  # TRL does not count them
            print(f"{name:<18}{arm.name:<16}{passes:>14.2f}{shown:>14}{max(computed):>12.1f}", flush=True)
            rows.append([name, arm.name, f"{passes:.2f}", shown, f"{max(computed):.1f}"])
    write_csv(path, ["case", "arm", "passes", "tokens", "greatest_mb"], rows)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("experiment", type=Path, nargs="?")
    parser.add_argument("--trained", type=Path, help="the folder of another policy")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    set_up_torch(1)
    quiet_libraries()
    if options.experiment is None:
        packed(options.csv)
        return
    policies: dict[str, dict[str, str]] = {"shipped": {}}
    if options.trained:
        policies["trained"] = {"model_name_or_path": str(options.trained)}
    try:
        runs = {policy: load_experiment(options.experiment, keys).first_runs() for policy, keys in policies.items()}
    except UserError as error:
        raise SystemExit(str(error)) from error
    rows = []
    print(f"{'arm':<24}{'policy':<10}{'median MB':>10}{'greatest MB':>12}")
    for policy, runs_of_policy in runs.items():
        for run in runs_of_policy:
            of_run = [peak / 1e6 for peak in peaks(run, options.steps)[1:] if peak > SKIPPED]
            median = statistics.median(of_run)
            print(f"{run.arm:<24}{policy:<10}{median:>10.1f}{max(of_run):>12.1f}", flush=True)
            rows.append([run.arm, policy, len(of_run), f"{median:.1f}", f"{max(of_run):.1f}"])
    write_csv(options.csv, ["arm", "policy", "micro_batches", "median_mb", "greatest_mb"], rows)


if __name__ == "__main__":
    main()
