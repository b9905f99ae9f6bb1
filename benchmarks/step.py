"""Cost of a step next to TRL's GRPO: python benchmarks/step.py [--parts text,words,divided] [--repeats 5] [--steps 8]

In each repeat all arms take their turn: TRL's GRPO with 16 and with 64 rollouts, PODS 64 -> 16 without and with
`prefix_tree`, and PODS 16 -> 16 with it. One prompt a step, real generation. The tables show seconds of processor time
on one thread (medians), and each arm's step as a multiple of TRL's GRPO 16 of the same repeat: the median and, in
brackets, the least and the greatest.

1. `text`: random text, where rollouts share only the prompt. Every completion has 30 tokens, and rewards differ. The
   embedded policy, and one of Qwen3.5's shape with a million random weights, whose layers are recurrent but for one in
   four.
2. `words`: word problems with their own rewards and lengths. The shipped policy and, with --trained, a trained one.
3. `divided`: the step in micro-batches, as people train. Word problems, 4 prompts a step, in one micro-batch of 64 rows
   and in eight of 8. Next to the times: the tokens that the update computes, and the peak of the tensors in two steps.

The command fails if a median on word problems with the shipped policy is above its limit (`LIMITS`).

    pods train words-pods --max_seconds 45 --output /tmp/words
    python benchmarks/step.py --trained /tmp/words/checkpoints/final
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from measuring import alternate, command_line, quiet, ratios, set_up_torch, spread, tensor_peak
from pods_rl import PODSConfig, PODSTrainer
from pods_rl.policies import tiny_policy_path
from pods_rl.prefix_tree import decoding
from pods_rl.tasks import load_task

M = 16
N = 64
WARM_UP = 1  # steps of each arm that are not timed
PHASES = {"generate": 9, "rest": 8, "step": 8}  # and the width of its column


@dataclass(frozen=True)
class Arm:
    """A trainer: TRL's if it has no settings, else ours with these.

    Args:
        n: the rollouts of a prompt; TRL's trains all of them, and ours `M`.
        modules: whether the model's modules compute the single tokens of a generation, which a plain decoder does
            with fewer operations.
    """

    name: str
    n: int
    settings: dict[str, Any] | None = None
    modules: bool = False

    @property
    def is_trl(self) -> bool:
        return self.settings is None


BASE = "TRL's GRPO 16"
EXACT = "PODS 64 -> 16 as TRL computes"
ALL = "PODS 64 -> 16"
EQUAL = "PODS 16 -> 16"
MODULES = "PODS 64 -> 16 by modules"
ARMS = (
    Arm(BASE, M),
    Arm("TRL's GRPO 64", N),
    Arm(EXACT, N, {"exact_trl": True}),
    Arm(ALL, N, {}),
    Arm(EQUAL, M, {}),
    Arm(MODULES, N, {}, modules=True),
)
# Of the step as a multiple of TRL's GRPO 16, on word problems with the shipped policy: a little above the greatest of
# nine repeats on a machine whose speed varied (docs/results/step/costs.csv).
LIMITS = {EXACT: 2.4, ALL: 0.55, EQUAL: 0.4}


def embedded() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_policy_path(), dtype=torch.float32)


def qwen3_5() -> PreTrainedModel:
    """Return a policy of Qwen3.5's shape: three recurrent layers and one of attention."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_path())
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=len(tokenizer), hidden_size=128, intermediate_size=352, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, linear_num_key_heads=4, linear_num_value_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=32, layer_types=["linear_attention"] * 3 + ["full_attention"],
        max_position_embeddings=2048, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


POLICIES: dict[str, Callable[[], PreTrainedModel]] = {"embedded": embedded, "qwen3.5": qwen3_5}
TEXTS = (("embedded", 12), ("embedded", 200), ("qwen3.5", 60), ("qwen3.5", 200))  # tokens of a prompt


def reward(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ within every group, so that every kept row has an advantage."""
    return [i % 7 + len(text) / 1000 for i, text in enumerate(completions)]


@dataclass
class Stopwatch(TrainerCallback):
    """The processor time of each step, in total and in generation."""

    generating: float = 0.0
    started: float = 0.0
    steps: list[dict[str, float]] = field(default_factory=list)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.generating = 0.0
        self.started = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        total = time.process_time() - self.started
        self.steps.append({"generate": self.generating, "rest": total - self.generating, "step": total})

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.generating += time.process_time() - before

        return timed


def prompt_of(tokens: int) -> str:
    """Return a prompt of this many tokens: the embedded tokenizer has one for each byte."""
    return ("12+34-56+78-9=" * (tokens // 14 + 1))[-tokens:]


@dataclass(frozen=True)
class Case:
    """A case to measure: the policy, tokenizer, prompts, rewards and trainer settings of a step.

    Args:
        prompts: of an optimizer step.
        micro_batch_rows: rows of a pass; None: those of one prompt.
        arms: the names of those that are measured.
    """

    name: str
    policy: Callable[[], PreTrainedModel]
    tokenizer: str
    rows: Dataset
    rewards: list[Callable[..., list[float]]]
    settings: dict[str, Any]
    prompts: int = 1
    micro_batch_rows: int | None = None
    arms: tuple[str, ...] = tuple(arm.name for arm in ARMS)


def random_text(policy: str, prompt: int, completion: int) -> Case:
    return Case(
        name=f"{policy} policy, prompt of {prompt} tokens, completions of {completion}",
        policy=POLICIES[policy],
        tokenizer=tiny_policy_path(),
        rows=Dataset.from_dict({"prompt": [prompt_of(prompt)] * 256}),
        rewards=[reward],
        settings={"max_completion_length": completion, "generation_kwargs": {"min_new_tokens": completion}},
    )


def word_problems(name: str, policy: str) -> Case:
    task = load_task({"task": "words", "task_difficulty": "mixed", "task_train_size": 256, "task_test_size": 1})

    def graded(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        totals = [0.0] * len(completions)
        for name, weight in task.rewards.items():
            scores = task.scores(name, completions, answer)
            totals = [total + weight * score for total, score in zip(totals, scores, strict=True)]
        return totals

    return Case(
        name=f"word problems, {name} policy",
        policy=lambda: AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        tokenizer=policy,
        rows=task.train,
        rewards=[graded],
        settings={"max_completion_length": 48},
    )


def divided(case: Case, prompts: int, micro_batches: int) -> Case:
    """Return a case with several prompts a step, in micro-batches."""
    rows = prompts * M // micro_batches
    return replace(
        case,
        name=f"{case.name}, {prompts} prompts, {micro_batches} micro-batches of {rows} rows",
        prompts=prompts,
        micro_batch_rows=rows,
        arms=(BASE, EXACT, ALL, EQUAL),
    )


def trainer_of(arm: Arm, case: Case, steps: int, folder: str) -> GRPOTrainer:
    """Return a trainer of some steps."""
    rows = arm.n if arm.is_trl else M
    micro_batch_rows = case.micro_batch_rows or M
    settings: dict[str, Any] = case.settings | {
        "num_generations": rows, "per_device_train_batch_size": micro_batch_rows,
        "gradient_accumulation_steps": rows * case.prompts // micro_batch_rows, "max_steps": steps,
        "loss_type": "grpo", "learning_rate": 1e-6, "gradient_checkpointing": False, "bf16": False, "use_cpu": True,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1000,
    }  # fmt: skip
    trainer_class: type[GRPOTrainer] = GRPOTrainer
    config_class: type[GRPOConfig] = GRPOConfig
    if arm.settings is not None:
        settings |= {"num_rollouts": arm.n} | arm.settings
        trainer_class = PODSTrainer
        config_class = PODSConfig
    trainer = trainer_class(
        model=case.policy(),
        reward_funcs=case.rewards,
        args=config_class(folder, **settings),
        train_dataset=case.rows,
        processing_class=AutoTokenizer.from_pretrained(case.tokenizer),
    )
    return quiet(trainer)


def steps_of(arm: Arm, case: Case, steps: int) -> dict[str, float]:
    """Train a few steps; return the mean seconds of the parts of a step."""
    with tempfile.TemporaryDirectory(prefix="pods-bench-") as folder:
        trainer = trainer_of(arm, case, WARM_UP + steps, folder)
        watch = Stopwatch()
        trainer._generate_single_turn = watch.around(trainer._generate_single_turn)
        trainer.add_callback(watch)
        with patch.object(decoding, "plain_decoder", lambda model, length: None) if arm.modules else nullcontext():
            trainer.train()
    timed = watch.steps[WARM_UP:]
    return {part: statistics.mean(step[part] for step in timed) for part in timed[0]}


def memory_and_tokens(arm: Arm, case: Case) -> dict[str, float]:
    """Train two steps; return the peak of their tensors, and the tokens that the update of a step computes."""
    with tempfile.TemporaryDirectory(prefix="pods-bench-") as folder:
        trainer = trainer_of(arm, case, 2, folder)
        peak = tensor_peak(trainer.train)
    tokens = [row["pods/tokens/computed"] for row in trainer.state.log_history if "pods/tokens/computed" in row]
    figures = {"peak MB": peak / 1e6}
    if tokens:  # TRL does not count them
        figures["computed tokens"] = statistics.mean(tokens)
    return figures


def measure(case: Case, repeats: int, steps: int) -> dict[str, float]:
    """Measure and print all arms; return the median of each arm's step as a multiple of the base's."""
    arms = {arm.name: arm for arm in ARMS if arm.name in case.arms}
    timed = alternate(arms, repeats, lambda arm, _: steps_of(arm, case, steps))
    step_seconds = {name: [row["step"] for row in rows] for name, rows in timed.items()}
    print(f"\n{case.name}")
    header = f"{'seconds':<30}"
    for phase, width in PHASES.items():
        header += f"{phase:>{width}}"
    print(f"{header}   step / {BASE}")
    medians: dict[str, float] = {}
    for name, rows in timed.items():
        multiples = ratios(step_seconds[name], step_seconds[BASE])
        medians[name] = statistics.median(multiples)
        line = f"{name:<30}"
        for phase, width in PHASES.items():
            median = statistics.median(row[phase] for row in rows)
            line += f"{median:>{width}.3f}"
        line += f"   {spread(multiples)}"
        print(line, flush=True)
    print(f"{ALL} / {EQUAL}: {spread(ratios(step_seconds[ALL], step_seconds[EQUAL]))}", flush=True)
    if MODULES in step_seconds:
        print(f"{ALL} / the same by modules: {spread(ratios(step_seconds[ALL], step_seconds[MODULES]))}")
    if case.micro_batch_rows is not None:
        for arm in arms.values():
            figures = memory_and_tokens(arm, case)
            print(f"{arm.name:<30}" + "".join(f"  {name} {value:,.0f}" for name, value in figures.items()), flush=True)
    return medians


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--parts", default="text,words,divided", help="default: %(default)s")
    parser.add_argument("--trained", help="a policy trained on word problems")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each arm in a repeat")
    options = parser.parse_args()
    set_up_torch(threads=1)
    print(f"m = {M}, n = {N}; one CPU thread; {options.repeats} alternating repeats")
    parts = options.parts.split(",")
    words = [word_problems("shipped", tiny_policy_path("tiny-words"))]
    if options.trained:
        words.append(word_problems("trained", options.trained))
    cases = []
    if "text" in parts:
        cases += [random_text(policy, prompt, 30) for policy, prompt in TEXTS]
    if "words" in parts:
        cases += words
    if "divided" in parts:
        for case in words:
            cases += [divided(case, prompts=4, micro_batches=count) for count in (1, 8)]
    too_slow: list[str] = []
    for case in cases:
        medians = measure(case, options.repeats, options.steps)
        if case is words[0]:
            too_slow = [
                f"{name}: {medians[name]:.2f}, limit {limit}" for name, limit in LIMITS.items() if medians[name] > limit
            ]
    if too_slow:
        raise SystemExit("A step takes longer than its limit allows.\n" + "\n".join(too_slow))


if __name__ == "__main__":
    main()
