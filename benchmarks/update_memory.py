"""Memory of the update in each arm of an experiment: python benchmarks/update_memory.py EXPERIMENT.yaml [--csv FILE]

Trains some steps of each arm's recipe, with the first seed, and records the peak of the tensors in each pass forward
and backward, above what was held before it. Generation is outside. The first micro-batch, in which the trainer checks
its pass over the tree, and those that are skipped do not count. Prints the median and the greatest peak, for the
experiment's own policy and with --trained for another one, whose rollouts share more.

    python benchmarks/update_memory.py benchmarks/equal_memory_4.yaml --trained FOLDER
"""

from __future__ import annotations

import csv
import statistics
import tempfile
from pathlib import Path
from typing import Any

from measuring import command_line, quiet, set_up_torch, tensor_peak
from pods_rl.distributed.processes import quiet_libraries
from pods_rl.errors import UserError
from pods_rl.experiment import PlannedRun, load_experiment
from pods_rl.loading.prepare import prepare
from pods_rl.training.trainer import build_trainer

SKIPPED = 1e5  # bytes: a micro-batch below has no pass, since the gradients of the weights alone take 4 MB


def peaks(run: PlannedRun, steps: int) -> list[int]:
    """Train some steps of a run; return the peak of each micro-batch in bytes."""
    with tempfile.TemporaryDirectory(prefix="pods-memory-") as folder:
        trainer = quiet(build_trainer(run.recipe, prepare(run.recipe), Path(folder)))
        trainer.args.max_steps = steps
        prepare_inputs = trainer._prepare_inputs
        training_step = trainer.training_step
        measured = []

        def measure(model: Any, inputs: Any, *rest: Any) -> Any:
            prepared = prepare_inputs(inputs)  # generates, if this micro-batch is the first of its step
            trainer._prepare_inputs = lambda _: prepared
            results = []
            measured.append(tensor_peak(lambda: results.append(training_step(model, inputs, *rest))))
            trainer._prepare_inputs = prepare_inputs
            return results[0]

        trainer.training_step = measure
        trainer.train()
    return measured


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--trained", type=Path, help="the folder of another policy")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    set_up_torch(1)
    quiet_libraries()
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
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["arm", "policy", "micro_batches", "median_mb", "greatest_mb"])
            writer.writerows(rows)


if __name__ == "__main__":
    main()
