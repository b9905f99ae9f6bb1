"""Time the pass of the update over prefix trees: python benchmarks/update.py [--trained FOLDER]

Arms: TRL's rows, and the tree. They alternate on one thread over the same rows: log-probabilities and entropies, a
loss, and its gradients. The table has medians of processor time, the tree's as a share of the rows' (with the least and
the greatest), and the share of the rows' peak memory. 16 rows of a prompt unless said otherwise.

Cases: random text, where rows share only the prompt, with completions of 120 and of 2,000 tokens; and the 16 of 64
rollouts with the most variance on word problems, with the shipped policy and, with --trained, with a trained one.

    pods train words-pods --max_seconds 45 --output /tmp/words
    python benchmarks/update.py --trained /tmp/words/checkpoints/final
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from measuring import alternate, command_line, ratios, set_up_torch, spread, tensor_peak
from pods_rl import select
from pods_rl.policies import tiny_policy_path
from pods_rl.prefix_tree.decoding import RowDraws, complete_prompts
from pods_rl.prefix_tree.packing import TreePass, probe_trees
from pods_rl.tasks import load_task

M = 16
N = 64
LENGTH = 48  # tokens of a completion of word problems
Forward = Callable[..., Any]


class Rows(NamedTuple):
    """A batch as TRL lays it out: prompts padded on the left, completions on the right."""

    ids: Tensor
    mask: Tensor
    completion_length: int


def random_rows(prompt: int, completion: int, rows: int = M) -> Rows:
    """Return random completions of a random prompt, with their numbers of tokens."""
    generator = torch.Generator().manual_seed(0)
    prompt_ids = torch.randint(20, 220, (1, prompt), generator=generator).expand(rows, -1)  # [rows, prompt]
    completion_ids = torch.randint(20, 220, (rows, completion), generator=generator)
    ids = torch.cat([prompt_ids, completion_ids], dim=1)
    return Rows(ids, torch.ones_like(ids), completion)


def word_problems(policy: str, count: int = 8) -> list[Rows]:
    """Return the kept rows of some word problems: the 16 of 64 rollouts with the most variance."""
    task = load_task({"task": "words", "task_difficulty": "mixed", "task_train_size": 64, "task_test_size": 1})
    model = AutoModelForCausalLM.from_pretrained(policy).eval()
    tokenizer = AutoTokenizer.from_pretrained(policy)
    pad = tokenizer.pad_token_id
    batches: list[Rows] = []
    for i, problem in enumerate(task.train):
        if len(batches) == count:
            break
        prompt_ids = tokenizer(problem["prompt"])["input_ids"]
        draws = RowDraws([(i, k) for k in range(N)], LENGTH)
        completion_ids = complete_prompts(
            model, [prompt_ids] * N, draws, length=LENGTH, ends=[tokenizer.eos_token_id], pad=pad
        )
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        rewards = torch.zeros(N)
        for name, weight in task.rewards.items():
            rewards += weight * torch.tensor(task.scores(name, texts, [problem["answer"]] * N))
        if rewards.std() == 0:
            continue
        kept_ids = completion_ids[select(rewards[None], M).indices[0]]  # [M, T]
        prompt_mask = torch.ones(M, len(prompt_ids), dtype=torch.long)
        batches.append(
            Rows(
                ids=torch.cat([torch.tensor([prompt_ids] * M), kept_ids], dim=1),
                mask=torch.cat([prompt_mask, (kept_ids != pad).long()], dim=1),
                completion_length=kept_ids.size(1),
            )
        )
    return batches


class Case(NamedTuple):
    """What is computed with which policy."""

    name: str
    policy: str
    batches: list[Rows]
    repeats: int | None = None


def cases(trained: str | None) -> Iterator[Case]:
    tiny = tiny_policy_path()
    for prompt in (6, 60):
        yield Case(f"random, {prompt} + 120", tiny, [random_rows(prompt, 120)])
    shipped = tiny_policy_path("tiny-words")
    yield Case("word problems, shipped", shipped, word_problems(shipped))
    if trained:
        yield Case("word problems, trained", trained, word_problems(trained))
    yield Case("random, 60 + 2000, 4 rows", tiny, [random_rows(60, 2000, rows=4)], repeats=3)


def arms_of(model: PreTrainedModel) -> dict[str, Callable[[Rows], Forward]]:
    """Return what makes each arm's forward pass for a batch."""
    return {
        "rows": lambda rows: model,
        "tree": lambda rows: TreePass(model, rows.completion_length, tree=True),
    }


def one_pass(forward: Forward, rows: Rows) -> None:
    labels = rows.ids.masked_fill(rows.mask == 0, -100)
    labels[:, : -rows.completion_length] = -100
    scores = forward(input_ids=rows.ids, attention_mask=rows.mask, labels=labels, fused_lm_head=True)
    weights = torch.linspace(-1, 1, rows.completion_length)  # [T]
    weights = weights * rows.mask[:, -rows.completion_length :]  # [rows, T]
    (scores.log_probs[:, -rows.completion_length :] * weights).sum().backward()


def seconds(make_forward: Callable[[Rows], Forward], batches: list[Rows]) -> float:
    started = time.process_time()
    for rows in batches:
        one_pass(make_forward(rows), rows)
    return time.process_time() - started


def measure(case: Case, repeats: int) -> str:
    """Time a case; return its row of the table."""
    model = AutoModelForCausalLM.from_pretrained(case.policy, dtype=torch.float32).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    assert probe_trees(model, model).why_rows is None
    arms = arms_of(model)
    times = alternate(arms, case.repeats or repeats, lambda make_forward, _: seconds(make_forward, case.batches))
    tree_peak, rows_peak = (tensor_peak(partial(seconds, arms[name], case.batches[:1])) for name in ("tree", "rows"))
    milliseconds = [f"{1000 * statistics.median(times[name]):>10.1f}" for name in ("rows", "tree")]
    shares = spread(ratios(times["tree"], times["rows"]))
    return f"{case.name:<36}{''.join(milliseconds)}  {shares:<19}{tree_peak / rows_peak:>6.2f}"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="of short cases; the long one has 3")
    parser.add_argument("--trained", help="a policy trained on word problems")
    options = parser.parse_args()
    set_up_torch(threads=1)
    print(f"{'':<36}{'rows ms':>10}{'tree ms':>10}  {'tree / rows':<19}{'memory':>6}")
    for case in cases(options.trained):
        print(measure(case, options.repeats), flush=True)


if __name__ == "__main__":
    main()
