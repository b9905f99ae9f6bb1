"""Time the pass of the update over prefix trees: python benchmarks/update.py [--before CHECKOUT] [--trained FOLDER]

Arms: TRL's rows; with --before the packs of a checkout that shares only the prompt (492ac7b); and the tree. They
alternate on one thread over the same rows: log-probabilities and entropies, a loss, and its gradients. The table has
medians of processor time, the tree's as a share of the others' with the least and the greatest, and the share of the
rows' peak memory. Group of 16 rows of a prompt unless said otherwise.

Cases: random text, where rows share only the prompt; sixteen prompts of four rows; half of the rows without a
gradient; and the 16 of 64 rollouts with the most variance on word problems, with the shipped policy and, with
--trained, with one that was trained.
Goals: tree / before at most 1 for random text and 1 / 1.3 for the trained policy; memory of the tree at most that of
rows, with completions of 2,000 tokens too.

    git worktree add /tmp/before 492ac7b
    pods train words-pods --max_seconds 45 --output /tmp/words
    python benchmarks/update.py --before /tmp/before --trained /tmp/words/checkpoints/final
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, logging
from trl.trainer.utils import add_fused_lm_head

from pods_rl import select
from pods_rl.policies import tiny_policy_path
from pods_rl.prefix_tree.decoding import RowDraws, complete_prompts
from pods_rl.prefix_tree.packing import TreePass, why_rows
from pods_rl.tasks import load_task

M = 16
Arm = Callable[..., Any]


class Rows(NamedTuple):
    """A batch as TRL lays it out: prompts padded on the left, completions on the right; which rows have a gradient."""

    ids: Tensor
    mask: Tensor
    keep: int
    live: Tensor


def random_rows(prompt: int, completion: int, prompts: int = 1, rows: int = M, dead: bool = False) -> Rows:
    draw = torch.Generator().manual_seed(0)
    texts = torch.randint(20, 220, (prompts, 1, prompt), generator=draw).expand(-1, rows, -1).flatten(0, 1)
    ids = torch.cat([texts, torch.randint(20, 220, (prompts * rows, completion), generator=draw)], dim=1)
    live = torch.arange(len(ids)) % 2 == 0 if dead else torch.ones(len(ids), dtype=torch.bool)
    return Rows(ids, torch.ones_like(ids), completion, live)


def word_problems(policy: str, count: int = 8) -> list[Rows]:
    """Return the kept rows of some word problems: the 16 of 64 rollouts with the most variance."""
    task = load_task({"task": "words", "task_difficulty": "mixed", "task_train_size": 64, "task_test_size": 1})
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy).eval(), AutoTokenizer.from_pretrained(policy)
    end, pad, found = tokenizer.eos_token_id, tokenizer.pad_token_id, []
    for i, row in enumerate(task.train):
        prompt = tokenizer(row["prompt"])["input_ids"]
        draws = RowDraws([(i, k) for k in range(64)], 48)
        out = complete_prompts(model, [prompt] * 64, draws, length=48, ends=[end], pad=pad)
        texts = tokenizer.batch_decode(out, skip_special_tokens=True)
        rewards = sum(
            weight * torch.tensor(task.scores(name, texts, [row["answer"]] * 64))
            for name, weight in task.rewards.items()
        )
        if rewards.std() > 0:
            kept = out[select(rewards[None], M).indices[0]]
            mask = torch.cat([torch.ones(M, len(prompt), dtype=torch.long), (kept != pad).long()], dim=1)
            ids = torch.cat([torch.tensor([prompt] * M), kept], dim=1)
            found.append(Rows(ids, mask, kept.size(1), torch.ones(M, dtype=torch.bool)))
    return found[:count]


def arms(model: Any, before: Any) -> Iterator[tuple[str, Callable[[Rows], Arm]]]:
    yield "rows", lambda rows: model
    if before:
        yield "before", lambda rows: before.ChosenRows(model, rows.keep, merge=True, packed=True, live=rows.live)
    yield "tree", lambda rows: TreePass(model, rows.keep, tree=True, live=rows.live)


def one_pass(arm: Arm, rows: Rows) -> None:
    labels = rows.ids.masked_fill(rows.mask == 0, -100)
    labels[:, : -rows.keep] = -100
    scores = arm(input_ids=rows.ids, attention_mask=rows.mask, labels=labels, fused_lm_head=True)
    weights = torch.linspace(-1, 1, rows.keep) * rows.live.unsqueeze(1) * rows.mask[:, -rows.keep :]
    (scores.log_probs[:, -rows.keep :] * weights).sum().backward()


def seconds(arm: Callable[[Rows], Arm], batches: list[Rows]) -> float:
    started = time.process_time()
    for rows in batches:
        one_pass(arm(rows), rows)
    return time.process_time() - started


def peak(work: Callable[[], Any]) -> int:
    """Return the bytes of tensors at the peak, above what was held: the highest sum of the allocator's events."""
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    held = highest = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def packing_of(checkout: Path) -> Any:
    """Return the packs of another checkout, loaded under another name."""
    for package in ("rollouts", "engines", "engines.trl"):
        folder, name = checkout / "src/pods_rl" / package.replace(".", "/"), f"earlier.{package}"
        spec = importlib.util.spec_from_loader(name, None, is_package=True)
        assert spec is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.modules[name].__path__ = [str(folder)]
    sys.modules["earlier"] = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("earlier", None))
    return importlib.import_module("earlier.engines.trl.packing")


def cases(trained: str | None) -> Iterator[tuple[str, str, list[Rows], float | None]]:
    """Yield the name, policy, batches and goal (of the tree beside the packs before) of each case."""
    for prompt, completion in ((12, 30), (60, 30), (200, 30), (60, 120)):
        yield f"random, {prompt} + {completion}", tiny_policy_path(), [random_rows(prompt, completion)], 1.0
    yield "random, 16 prompts of 4, 40 + 30", tiny_policy_path(), [random_rows(40, 30, 16, 4)], 1.0
    yield "random, 60 + 30, half without", tiny_policy_path(), [random_rows(60, 30, dead=True)], 1.0
    words = tiny_policy_path("tiny-words")
    yield "word problems, shipped", words, word_problems(words), None
    if trained:
        yield "word problems, trained", trained, word_problems(trained), 1 / 1.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--before", type=Path, help="a checkout of 492ac7b")
    parser.add_argument("--trained", help="a policy trained on word problems")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    before = packing_of(options.before) if options.before else None
    heads = f"{'rows ms':>8}{'before':>8}{'tree':>8}  {'tree / before':<19}{'goal':>5} {'/ rows':>7}{'memory':>8}"
    print(f"{'':<34}{heads}")
    long = ("random, 200 + 2000 (memory)", tiny_policy_path(), [random_rows(200, 2000)], None)
    for name, policy, batches, goal in [*cases(options.trained), long]:
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).train()
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        assert why_rows(model, model) is None
        found = dict(arms(model, before))
        if before:
            assert before.why_rows(model, model) is None
        times: dict[str, list[float]] = {arm: [] for arm in found}
        for _ in range(1 if "memory" in name else options.repeats):
            for arm, make in found.items():
                times[arm].append(seconds(make, batches))
        memory = {arm: peak(partial(seconds, found[arm], batches[:1])) for arm in ("rows", "tree")}
        show(name, times, goal, memory["tree"] / memory["rows"])


def show(name: str, times: dict[str, list[float]], goal: float | None, memory: float) -> None:
    medians = {arm: f"{1000 * statistics.median(values):.1f}" for arm, values in times.items()}
    pairs = zip(times["tree"], times.get("before", times["rows"]), strict=True)
    ratios = [tree / other for tree, other in pairs]
    spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
    rows = statistics.median(tree / other for tree, other in zip(times["tree"], times["rows"], strict=True))
    numbers = "".join(f"{medians.get(arm, ''):>8}" for arm in ("rows", "before", "tree"))
    print(f"{name:<34}{numbers}  {spread:<19}{goal or '':>5.3} {rows:>7.2f}{memory:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
