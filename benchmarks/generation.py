"""Time generation over the tree of prefixes: python benchmarks/generation.py [--before CHECKOUT] [--trained FOLDER]

Arms: transformers' `generate`; with --before the loop of a checkout that computes each row (492ac7b); and the tree.
They alternate on one thread, with the same prompts and draws, and the table has the median ratio of their times with
the least and the greatest. Times are of the process.

Cases: word problems with the shipped policy and, with --trained, with one that was trained, one prompt at a time; and
random text, where rollouts share only the prompt: a policy with random weights whose rollouts never end.
Goals of before / tree: shipped policy 1.40 (64 rollouts) and 1.12 (16), trained policy 2.4 and 1.35, random text at
least 0.98. Peak memory of the tree at most that of `generate`.

    git worktree add /tmp/before 492ac7b
    pods train words-pods --max_seconds 45 --output /tmp/words
    python benchmarks/generation.py --before /tmp/before --trained /tmp/words/checkpoints/final
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, logging

from pods_rl.policies import tiny_policy_path
from pods_rl.prefix_tree import decoding
from pods_rl.tasks import load_task

WORDS, NEVER = tiny_policy_path("tiny-words"), 10**6
GOALS = {("shipped", 64): 1.40, ("shipped", 16): 1.12, ("trained", 64): 2.4, ("trained", 16): 1.35}
Arm = Callable[[Any, dict[str, Any], int], torch.Tensor]


def generate(model: Any, inputs: dict[str, Any], _: int) -> torch.Tensor:
    output: torch.Tensor = model.generate(**inputs)
    return output


def loop(complete: Any, draws: Any, model: Any, inputs: dict[str, Any], seed: int) -> torch.Tensor:
    keys = [(seed, row) for row in range(len(inputs["input_ids"]))]
    length = inputs["generation_config"].max_new_tokens
    output: torch.Tensor = complete(model.generate, inputs, draws(keys, length, strict=True))
    return output


def loop_of(checkout: Path) -> Arm:
    """Return the loop of another checkout, loaded under another name."""
    folder, name = checkout / "src/pods_rl/rollouts", "earlier_rollouts"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    generating = importlib.import_module(f"{name}.generating")
    return partial(loop, generating.complete, importlib.import_module(f"{name}.sampling").RowDraws)


def batch(prompts: list[list[int]], rollouts: int, length: int, end: int) -> dict[str, Any]:
    """Return the arguments of `generate`."""
    rows, width = [ids for ids in prompts for _ in range(rollouts)], max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (width - len(ids)) + ids for ids in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows]),
        "generation_config": GenerationConfig(
            max_new_tokens=length, do_sample=True, top_k=0, eos_token_id=end, pad_token_id=0, disable_compile=True
        ),
    }


def cases(trained: str | None) -> list[tuple[str, Any, list[dict[str, Any]], float]]:
    """Return the name, policy, batches and goal of each case."""
    rows = load_task({"task": "words", "task_difficulty": "mixed", "task_train_size": 8, "task_test_size": 1}).train
    problems = [AutoTokenizer.from_pretrained(WORDS)(row["prompt"])["input_ids"] for row in rows]
    found = []
    for name, path in {"shipped": WORDS, "trained": trained}.items():
        model = path and AutoModelForCausalLM.from_pretrained(path).eval()
        for n in (64, 16) if model else ():
            batches = [batch([ids], n, 48, 1) for ids in problems]
            found.append((f"word problems, {name}, {n} rollouts", model, batches, GOALS[name, n]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(WORDS)).eval()
    for count, n, width in [(1, n, width) for n in (64, 16) for width in (12, 60, 200)] + [(8, 16, 60)]:
        prompts = torch.randint(11, 700, (count, width)).tolist()
        name = f"random text, {n} rollouts of {count} prompt{'s' * (count > 1)}, {width} tokens"
        found.append((name, model, [batch(prompts, n, 30, NEVER)], 0.98))
    return found


def peak(work: Callable[[], Any]) -> int:
    """Return the bytes of tensors at the peak, above what was held: the highest sum of the allocator's events."""
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    held = highest = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--before", type=Path, help="a checkout of 492ac7b")
    parser.add_argument("--trained", help="a policy trained on word problems")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    arms: dict[str, Arm] = {"generate": generate, "tree": partial(loop, decoding.complete, decoding.RowDraws)}
    if options.before:
        arms["before"] = loop_of(options.before)
    others = [name for name in arms if name != "tree"]
    print(
        f"{'':<52}"
        + f"{'tree, s':>9}{'memory':>8}"
        + "".join(f"{name + ' / tree':>26}" for name in others)
        + "    goal"
    )
    for case, model, batches, goal in cases(options.trained):
        times: dict[str, list[float]] = {name: [] for name in arms}
        for repeat in range(options.repeats + 1):
            order = list(arms) if repeat % 2 else list(arms)[::-1]
            spent = dict.fromkeys(arms, 0.0)
            for inputs in batches:
                for name in order:
                    start = time.process_time()
                    arms[name](model, inputs, repeat)
                    spent[name] += time.process_time() - start
            for name in arms if repeat else ():  # the first is a warm-up
                times[name].append(spent[name] / len(batches))
        memory = [peak(partial(arms[name], model, batches[0], 0)) for name in ("tree", "generate")]
        line = f"{case:<52}{statistics.median(times['tree']):>9.4f}{memory[0] / memory[1]:>8.2f}"
        for name in others:
            ratios = [a / b for a, b in zip(times[name], times["tree"], strict=True)]
            line += f"{statistics.median(ratios):>12.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{line}{goal:>8}", flush=True)


if __name__ == "__main__":
    main()
