"""Time generation over the tree of prefixes: python benchmarks/generation.py [--trained FOLDER]

64 rollouts of each of eight word problems, one problem at a time, by transformers' `generate` and over the tree, with
the shipped policy and, with --trained, with one that was trained. The two alternate on one thread. The table has the
median ratio of their times with the least and the greatest. Times are of the process.

    pods train words-pods --max_seconds 45 --output /tmp/words
    python benchmarks/generation.py --trained /tmp/words/checkpoints/final
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from measuring import alternate, command_line, ratios, set_up_torch, spread
from pods_rl.policies import tiny_policy_path
from pods_rl.prefix_tree.decoding import RowDraws, complete
from pods_rl.tasks import load_task

WORDS = tiny_policy_path("tiny-words")
ROLLOUTS = 64
LENGTH = 48  # tokens of a completion
Arm = Callable[[Any, dict[str, Any], int], torch.Tensor]


def generate(model: Any, inputs: dict[str, Any], seed: int) -> torch.Tensor:
    """Generate with transformers, whose draws take no seed."""
    output: torch.Tensor = model.generate(**inputs)
    return output


def tree(model: Any, inputs: dict[str, Any], seed: int) -> torch.Tensor:
    """Generate over the tree."""
    draws = RowDraws([(seed, row) for row in range(ROLLOUTS)], LENGTH, strict=True)
    return complete(model.generate, inputs, draws)


ARMS: dict[str, Arm] = {"generate": generate, "tree": tree}


def batches() -> list[dict[str, Any]]:
    """Return the arguments of `generate` for each word problem."""
    task = load_task({"task": "words", "task_difficulty": "mixed", "task_train_size": 8, "task_test_size": 1})
    tokenizer = AutoTokenizer.from_pretrained(WORDS)
    config = GenerationConfig(
        max_new_tokens=LENGTH, do_sample=True, top_k=0, eos_token_id=1, pad_token_id=0, disable_compile=True
    )
    found = []
    for row in task.train:
        input_ids = torch.tensor([tokenizer(row["prompt"])["input_ids"]] * ROLLOUTS)  # [rollouts, width]
        mask = torch.ones_like(input_ids)
        found.append({"input_ids": input_ids, "attention_mask": mask, "generation_config": config})
    return found


def seconds(arm: Arm, model: Any, inputs_of_problems: list[dict[str, Any]], seed: int) -> float:
    """Return the mean processor time of a problem."""
    started = time.process_time()
    for inputs in inputs_of_problems:
        arm(model, inputs, seed)
    return (time.process_time() - started) / len(inputs_of_problems)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--trained", help="a policy trained on word problems")
    options = parser.parse_args()
    set_up_torch(threads=1)
    policies = {"shipped": WORDS}
    if options.trained:
        policies["trained"] = options.trained
    problems = batches()
    print(f"{'policy':<10}{'tree, s':>9}{'generate / tree':>22}")
    for name, path in policies.items():
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        with_warm_up = alternate(
            ARMS, options.repeats + 1, lambda arm, repeat, model=model: seconds(arm, model, problems, repeat)
        )
        times = {arm: arm_seconds[1:] for arm, arm_seconds in with_warm_up.items()}
        shares = spread(ratios(times["generate"], times["tree"]))
        print(f"{name:<10}{statistics.median(times['tree']):>9.4f}{shares:>22}", flush=True)


if __name__ == "__main__":
    main()
