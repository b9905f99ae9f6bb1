"""Time generation over the tree of prefixes: python benchmarks/generation.py [--trained FOLDER]

Arms: transformers' `generate`; the tree; and "modules", the tree whose single tokens the model's own modules compute.
They alternate on one thread, with the same prompts and draws, and the table has the median ratio of their times with
the least and the greatest. Times are of the process.

Cases: word problems with the shipped policy and, with --trained, with one that was trained, one prompt at a time; and
random text, where rollouts share only the prompt: a policy with random weights whose rollouts never end.

    pods train words-pods --max_seconds 45 --output /tmp/words
    python benchmarks/generation.py --trained /tmp/words/checkpoints/final
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from measuring import alternate, command_line, ratios, set_up_torch, spread, tensor_peak
from pods_rl.policies import tiny_policy_path
from pods_rl.prefix_tree import decoding
from pods_rl.tasks import load_task

WORDS = tiny_policy_path("tiny-words")
NEVER = 10**6  # an end token that no policy has
Arm = Callable[[PreTrainedModel, dict[str, Any], int], torch.Tensor]


def generate(model: Any, inputs: dict[str, Any], seed: int) -> torch.Tensor:
    """Generate with transformers, whose draws take no seed."""
    output: torch.Tensor = model.generate(**inputs)
    return output


def tree(model: Any, inputs: dict[str, Any], seed: int) -> torch.Tensor:
    """Generate over the tree."""
    keys = [(seed, row) for row in range(len(inputs["input_ids"]))]
    draws = decoding.RowDraws(keys, inputs["generation_config"].max_new_tokens, strict=True)
    return decoding.complete(model.generate, inputs, draws)


def modules(model: Any, inputs: dict[str, Any], seed: int) -> torch.Tensor:
    """Generate over the tree; the modules of the model compute its single tokens."""
    with patch.object(decoding, "plain_decoder", lambda model, length: None):
        return tree(model, inputs, seed)


ARMS: dict[str, Arm] = {"generate": generate, "tree": tree, "modules": modules}


def batch(prompts: list[list[int]], rollouts: int, length: int, end: int) -> dict[str, Any]:
    """Return the arguments of `generate` for some rollouts of each prompt, which all have the same length."""
    input_ids = torch.tensor(prompts).repeat_interleave(rollouts, dim=0)  # [prompts * rollouts, width]
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "generation_config": GenerationConfig(
            max_new_tokens=length, do_sample=True, top_k=0, eos_token_id=end, pad_token_id=0, disable_compile=True
        ),
    }


class Case(NamedTuple):
    """A policy and what it completes."""

    name: str
    model: PreTrainedModel
    batches: list[dict[str, Any]]


def word_problems(policy_name: str, path: str) -> Iterator[Case]:
    """Yield 64 and 16 rollouts of eight word problems, one problem at a time."""
    task = load_task({"task": "words", "task_difficulty": "mixed", "task_train_size": 8, "task_test_size": 1})
    tokenizer = AutoTokenizer.from_pretrained(WORDS)
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in task.train]
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    for rollouts in (64, 16):
        batches = [batch([prompt_ids], rollouts, 48, end=1) for prompt_ids in prompts]
        name = f"word problems, {policy_name}, {rollouts} rollouts"
        yield Case(name, model, batches)


def random_text() -> Iterator[Case]:
    """Yield random prompts for random weights, whose rollouts share nothing else and never end."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(WORDS)).eval()
    sizes = [(1, 64, 12), (1, 64, 60), (1, 64, 200), (1, 16, 12), (1, 16, 60), (1, 16, 200), (8, 16, 60)]
    for count, rollouts, width in sizes:
        prompts = torch.randint(11, 700, (count, width)).tolist()
        noun = "prompt" if count == 1 else "prompts"
        name = f"random text, {rollouts} rollouts of {count} {noun}, {width} tokens"
        yield Case(name, model, [batch(prompts, rollouts, 30, NEVER)])


def cases(trained: str | None) -> Iterator[Case]:
    yield from word_problems("shipped", WORDS)
    if trained:
        yield from word_problems("trained", trained)
    yield from random_text()


def seconds(arm: Arm, case: Case, seed: int) -> float:
    """Return the mean processor time of a batch."""
    started = time.process_time()
    for inputs in case.batches:
        arm(case.model, inputs, seed)
    return (time.process_time() - started) / len(case.batches)


def measure(case: Case, repeats: int) -> str:
    """Time a case; return its row of the table."""
    with_warm_up = alternate(ARMS, repeats + 1, lambda arm, repeat: seconds(arm, case, repeat))
    times = {name: arm_seconds[1:] for name, arm_seconds in with_warm_up.items()}
    tree_peak, generate_peak = (
        tensor_peak(partial(ARMS[name], case.model, case.batches[0], 0)) for name in ("tree", "generate")
    )
    row = f"{case.name:<52}{statistics.median(times['tree']):>9.4f}{tree_peak / generate_peak:>8.2f}"
    for name in ("generate", "modules"):
        row += f"{spread(ratios(times[name], times['tree'])):>26}"
    return row


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--trained", help="a policy trained on word problems")
    options = parser.parse_args()
    set_up_torch(threads=1)
    print(f"{'':<52}{'tree, s':>9}{'memory':>8}{'generate / tree':>26}{'modules / tree':>26}")
    for case in cases(options.trained):
        print(measure(case, options.repeats), flush=True)


if __name__ == "__main__":
    main()
