"""What each process of `test_processes.py` does; started as `python -m tests.engines.many_processes FOLDER`.

The libraries are imported once; then the processes of each case are forked from here, with the variables that torchrun
sets, and join a real gloo group. Every process leaves what it saw in FOLDER.
"""

import gc
import json
import logging
import multiprocessing
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from pods_rl import PODSConfig, PODSTrainer
from pods_rl.engines.trl.transcript import as_text
from tests import DEADLINE, free_port

from .conftest import PROMPTS, Gradients, around, batches_of, letter_reward, texts_of, weights
from .test_images import pictures
from .test_tools import Closing, Counter, Scripted, byte_tokenizer, chat_policy, chats, count_up
from .vision import make_vlm

# processes, settings; the single process that it must equal has `processes` times the rows per device.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "eight of one prompt over two": (2, {"num_generations": 4, "num_rollouts": 8, "per_device_train_batch_size": 2}),
    "random, before, dapo, reference": (
        2,
        {
            "num_generations": 4, "num_rollouts": 10, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2, "rule": "random", "advantages": "before",
            "loss_type": "dapo", "beta": 0.04, "rollout_batch_size": 4,
        },
    ),
    "several passes, two iterations, reference, over two": (
        2,
        {
            "num_generations": 4, "num_rollouts": 6, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4, "num_iterations": 2, "beta": 0.04, "max_tokens_per_microbatch": 30,
        },
    ),
    "over the batch": (
        2,
        {
            "num_generations": 4, "num_rollouts": 6, "per_device_train_batch_size": 4, "selection": "batch",
            "num_prompts": 8,
        },
    ),
    "dead groups over two": (
        2,
        {"num_generations": 4, "num_rollouts": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    ),
    "dead groups, masked, over two": (
        2,
        {
            "num_generations": 4, "num_rollouts": 6, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4, "mask_constant_groups": True, "beta": 0.04,
        },
    ),
    # A subclass with other advantages, with which one process has a gradient where the other has none.
    "dead groups, shaped, over two": (
        2,
        {"num_generations": 4, "num_rollouts": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    ),
    # Three prompts over two processes: groups move when they are generated, and again when batches are joined. A third
    # of the rollouts has no end token. Groups that stay dead have no advantage, although they have a KL term.
    "truncated ones and dead groups over two": (
        2,
        {
            "num_generations": 4, "num_rollouts": 6, "per_device_train_batch_size": 6, "beta": 0.04,
            "dynamic_sampling": True, "dynamic_sampling_rounds": 1, "mask_truncated_completions": True,
        },
    ),
    # Without the stand-in: a rollout is the same text whichever process draws it, in whatever batch.
    "sampled by the policy, three prompts over four": (
        4,
        {"num_generations": 4, "num_rollouts": 8, "per_device_train_batch_size": 3, "rollout_batch_size": 5},
    ),
    # Prompts with images: rows are generated on one process and trained on another.
    "images over two": (2, {"num_generations": 4, "num_rollouts": 6, "per_device_train_batch_size": 6}),
}  # fmt: skip
FAULTS = CASES["eight of one prompt over two"][1]
STEPS = 2


def numbered_rollouts(trainer: PODSTrainer) -> Any:
    """Stands for the policy's sampling: tokens that depend on the prompt, the step and the rollout's number alone."""
    done: dict[str, Any] = {"drawn": None, "rollouts": 0}

    def generate(prompt_ids: list[list[int]], images: Any, fields: Any, n: int, *_: Any) -> Any:
        drawn, total = trainer._turns.keys, trainer.args.num_rollouts
        if done["drawn"] is not drawn:
            done.update(drawn=drawn, rollouts=0)
        asked = drawn[done["rollouts"] :][: len(prompt_ids)] or drawn[-1:]
        done["rollouts"] += len(prompt_ids)
        completions = []
        for (*_, group, rollout), ids in zip(asked, prompt_ids, strict=True):
            number = group * total + rollout
            draw = random.Random(f"{ids} {trainer.state.global_step} {number}")
            text = "".join(draw.choice("0123456789+-=") for _ in range(draw.randint(1, 11)))
            end = draw.random() < 0.7
            completions.append(trainer._tokenizer(text)["input_ids"] + [trainer.eos_token_ids[0]] * end)
        return completions, None

    return generate


def train(trainer: PODSTrainer, *, numbered: bool = True) -> None:
    """Train, with numbered rollouts in place of the policy's."""
    original = GRPOTrainer._generate_single_turn
    if numbered:
        stand_in = numbered_rollouts(trainer)
        GRPOTrainer._generate_single_turn = lambda self, *args, **kwargs: stand_in(*args, **kwargs)
    try:
        trainer.train()
    finally:
        GRPOTrainer._generate_single_turn = original


def graded(completions: list[Any], log_extra: Any, **_: Any) -> list[float]:
    """Logs a column about every rollout, and scores the letters."""
    texts = [as_text(completion) for completion in completions]
    log_extra("characters", [len(text) for text in texts])
    return letter_reward(texts)


def half_dead(prompts: list[str], completions: list[str], log_extra: Any, **_: Any) -> list[float]:
    """Constant for every second prompt, so that some processes and micro-batches have no row to train."""
    scores = graded(completions, log_extra)
    return [0.3 if PROMPTS.index(p) % 2 else score for p, score in zip(prompts, scores, strict=True)]


class Shaped(PODSTrainer):
    """Advantages of its own for a few rows, none for the others; they depend on the row alone."""

    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
        batch = super()._prepare_inputs(inputs)
        chosen = batch["completion_ids"].sum(1) * batch["completion_mask"].sum(1) % 5 == 0
        return {**batch, "advantages": chosen * (batch["completion_mask"].sum(1) - 5.5)}


def make_trainer(
    folder: Path,
    settings: dict[str, Any],
    reward: Any = graded,
    family: str | None = None,
    trainer_class: type[PODSTrainer] = PODSTrainer,
) -> PODSTrainer:
    """The trainer of the policy in the folder, or of a family of those that see images."""
    if family:
        model, processor = make_vlm(family)
        data = pictures()
    else:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        processor = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
        data = Dataset.from_dict({"prompt": PROMPTS * 4, "answer": ["3"] * 32})
    steps = STEPS * settings.get("num_iterations", 1)
    return trainer_class(
        model=model,
        reward_funcs=reward,
        args=PODSConfig(
            str(folder / "out"), use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, seed=3,
            report_to="none", save_strategy="no", logging_steps=1, max_steps=steps, max_completion_length=12,
            learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, **settings,
        ),
        train_dataset=data,
        processing_class=processor,
    )  # fmt: skip


def train_case(folder: Path, name: str, settings: dict[str, Any]) -> None:
    reward = half_dead if "dead" in name else graded
    family = "Qwen2_5_VL" if "images" in name else None
    trainer = make_trainer(folder, settings, reward, family, Shaped if "shaped" in name else PODSTrainer)
    watch = Gradients(trainer)
    seen: list[dict[str, Any]] = []

    @around(trainer, "_generate_and_score_completions")
    def keep(score: Callable[..., Any], inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if trainer._generation is not None:  # a round of dynamic sampling
            return score(inputs)
        seen.append({"asked": [row["prompt"] for row in inputs]})
        batch = score(inputs)
        masks = {part: batch[f"{part}_mask"].bool() for part in ("prompt", "completion")}
        for part, mask in masks.items():
            pairs = zip(batch[f"{part}_ids"], mask, strict=True)
            seen[-1][part] = [ids[real].tolist() for ids, real in pairs]
        seen[-1]["advantages"] = batch["advantages"].tolist()
        if "pixel_values" in batch:
            rows = grpo_trainer.split_pixel_values_by_grid(batch)["pixel_values"]
            seen[-1]["pixels"] = [[len(pixels), *pixels.flatten()[:9].tolist()] for pixels in rows]
        seen[-1]["kept"] = trainer.rollouts.kept.tolist()
        seen[-1]["ledger"] = trainer.rollouts.columns()
        return batch

    train(trainer, numbered=not name.startswith("sampled"))
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    tables = {
        "extra": list(texts_of(trainer)["extra"]["characters"]),
        "completion": list(map(as_text, texts_of(trainer)["completion"])),
    }
    report = {"rounds": seen, "logs": trainer.state.log_history[:STEPS], "tables": tables}
    (folder / f"{name}-{world}-{rank}.json").write_text(json.dumps(report))
    tensors = {f"weight {key}": weight for key, weight in weights(trainer).items()}
    tensors |= {f"gradient {key}": gradient for key, gradient in watch.steps[0].items()}
    save_file(tensors, folder / f"{name}-{world}-{rank}.safetensors")


def faults_case(folder: Path, rank: int) -> None:
    """The second process alone has a reward that raises for some rows, and in the first step an infinite loss."""
    raised = []

    def picky(completions: list[str], **_: Any) -> list[float]:
        odd = [text for text in completions if len(text) % 2]
        if rank == 1 and odd:
            raised.extend(odd if len(completions) == 1 else [])
            raise ArithmeticError("odd")
        return letter_reward(completions)

    trainer = make_trainer(folder, FAULTS | {"reward_errors": "zero"}, picky)
    compute_loss = trainer.compute_loss

    def odd_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        return compute_loss(*args, **kwargs) + (torch.inf if rank == 1 and trainer.state.global_step == 0 else 0.0)

    trainer.compute_loss = odd_loss
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pods_rl").addHandler(handler)
    seen, step = [], trainer.training_step
    trainer.training_step = lambda *args, **kwargs: seen.append(weights(trainer)) or step(*args, **kwargs)
    trainer.train()
    logging.getLogger("pods_rl").removeHandler(handler)
    first, *later = [*seen, weights(trainer)]  # before each step, and at the end
    moved = [any(not torch.equal(first[name], weight) for name, weight in now.items()) for now in later]
    steps = trainer.state.log_history[:STEPS]
    report = {"logs": steps, "raised": len(raised), "said": said, "moved": moved}
    (folder / f"faults-{rank}.json").write_text(json.dumps(report))


def tools_case(folder: Path, rank: int) -> None:
    """A group over two processes, each rollout with its environment; rollout i of process r counts twice 10 r + i."""
    tokenizer = byte_tokenizer()
    trainer = PODSTrainer(
        model=chat_policy(tokenizer),
        args=PODSConfig(
            str(folder / "out"), use_cpu=True, bf16=False, disable_tqdm=True, report_to="none", save_strategy="no",
            logging_steps=1, max_steps=1, max_completion_length=200, num_generations=4, num_rollouts=8,
            per_device_train_batch_size=2,
        ),
        train_dataset=chats(start=list(range(100, 900, 100))),
        processing_class=tokenizer,
        environment_factory=Closing,
    )  # fmt: skip
    Scripted(trainer.model, tokenizer, lambda row, turn: count_up(10 * rank + row, turn))
    batches = batches_of(trainer)
    trainer.train()
    (batch,), found = batches, trainer.rollouts
    masks = zip(batch["completion_ids"], batch["tool_mask"], batch["completion_mask"], strict=True)
    report = {
        "alive": len(Counter.alive),
        "prompts": [prompt[-1]["content"] for prompt in found.prompts],
        "rewards": found.rewards.tolist(),
        "kept": found.kept.tolist(),
        "told": [tokenizer.decode(ids[(own == 0) & (real == 1)]) for ids, own, real in masks],
        "trained": tokenizer.batch_decode(batch["prompt_ids"]),
        "calls": trainer.state.log_history[0]["tools/call_frequency"],
    }
    (folder / f"tools-{rank}.json").write_text(json.dumps(report))


def process(folder: Path, rank: int, world: int, port: int) -> None:
    """All cases of so many processes, and for one process all cases that have several."""
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, (processes, settings) in CASES.items():
        if world == processes:
            train_case(folder, name, settings)
        elif world == 1:
            rows = settings["per_device_train_batch_size"] * processes
            train_case(folder, name, settings | {"per_device_train_batch_size": rows})
    if world == 2:
        faults_case(folder, rank)
        tools_case(folder, rank)
    if world > 1:
        dist.destroy_process_group()


def fork_all(target: Callable[[Path, int, int, int], None], folder: Path, world: int) -> list[int | None]:
    """Run `target(folder, rank, world, port)` in so many processes; their exit codes, -9 for one that hung."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=target, args=(folder, rank, world, port)) for rank in range(world)]
    for one in started:
        one.start()
    for one in started:
        one.join(DEADLINE)
        one.kill()
    for one in started:
        one.join()
    return [one.exitcode for one in started]


def main(folder: Path) -> int:
    gc.freeze()  # no process looks for garbage in what was imported
    return int(any(any(fork_all(process, folder, world)) for world in (1, 2, 4)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
