"""What `PODSTrainer` and the commands do with a real vLLM; started as `python -m tests.real_vllm.cases FOLDER SERVER`.

The libraries are imported once. An engine cannot start twice in a process, so each case is forked from here and leaves
what it saw in FOLDER as JSON. SERVER is the address of a `vllm serve`. Names of cases may follow: only these are run.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from vllm.v1.core.sched.scheduler import Scheduler

from pods_rl import PODSTrainer
from pods_rl.cli import main as pods
from pods_rl.loading.prepare import prepare
from pods_rl.recipe import build_recipe
from pods_rl.training import trainer as build
from pods_rl.yaml_files import Origin
from tests import DEADLINE
from tests.engines.conftest import letter_reward
from tests.engines.many_processes import fork_all

from . import TINY

# The shipped policy, moved far in each step.
RECIPE = {
    "model_name_or_path": "tiny", "task": "arithmetic", "task_difficulty": "mixed", "num_rollouts": 64,
    "num_generations": 16, "per_device_train_batch_size": 16, "max_completion_length": 24, "loss_type": "grpo",
    "learning_rate": 2e-3, "use_cpu": True, "bf16": False, "threads": 1, "gradient_checkpointing": False,
    "use_vllm": True, "vllm_mode": "colocate", "save_strategy": "no", "max_steps": 4, "seed": 3,
}  # fmt: skip


class Watched:
    """A trainer, and what each of its generations asked of vLLM and got."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        """Rewards are by `letter_reward`, so that every group has a gradient."""
        recipe = build_recipe(RECIPE | keys, Origin("test"))
        build.reward_functions = lambda recipe, task, turns: [letters_as(name) for name in task.rewards]
        self.trainer: PODSTrainer = build.build_trainer(recipe, prepare(recipe), folder / "out")
        self.initial = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
        self.asked: list[int] = []  # rollouts of each request since the last generation began
        self.steps: list[dict[str, Any]] = []
        self.build = self.trainer._generate_and_score_completions
        self.trainer._generate_and_score_completions = self.generation
        if engine := getattr(self.trainer.vllm_generation, "llm", None):
            self.generate, engine.generate = engine.generate, self.ask
            self.at_once = 0  # rollouts that the engine worked on in one of its steps, at most
            self.schedule = Scheduler.schedule
            Scheduler.schedule = lambda scheduler, *args, **kwargs: self.count(scheduler, *args, **kwargs)

    def ask(self, prompts: list[Any], sampling_params: Any, **how: Any) -> list[Any]:
        self.asked.append(len(prompts) * sampling_params.n)
        return self.generate(prompts, sampling_params=sampling_params, **how)

    def count(self, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled = self.schedule(scheduler, *args, **kwargs)
        self.at_once = max(self.at_once, len(scheduled.num_scheduled_tokens))
        return scheduled

    def generation(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.asked.clear()
        batch = self.build(inputs)
        mask, sampled = batch["completion_mask"].bool(), batch["sampling_per_token_logps"]
        record = self.trainer.rollouts
        self.steps.append(
            {
                "asked": list(self.asked),
                "prompts": sorted(set(record.prompts)),
                "rollouts": len(record.completions),
                "rows": len(mask),
                "shapes": [list(batch[name].shape) for name in ("completion_ids", "sampling_per_token_logps")],
                "to_trainer": (sampled - batch["old_per_token_logps"])[mask].abs().mean().item(),
                "to_initial": (sampled - self.initial_logps(batch))[mask].abs().mean().item(),
            }
        )
        return batch

    @torch.no_grad()
    def initial_logps(self, batch: dict[str, Any]) -> torch.Tensor:
        ids, mask = (
            torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], dim=1) for part in ("ids", "mask")
        )
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = self.initial(ids, attention_mask=mask, position_ids=positions).logits[:, :-1]
        logps = logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
        return logps[:, -batch["completion_ids"].shape[1] :]

    def report(self) -> dict[str, Any]:
        return {"steps": self.steps}


def letters_as(name: str) -> Callable[..., list[float]]:
    """`letter_reward` by another name."""

    def reward(completions: list[str], **_: Any) -> list[float]:
        return letter_reward(completions)

    reward.__name__ = reward.__qualname__ = name
    return reward


def colocate(folder: Path) -> dict[str, Any]:
    """With a checkpoint after the second step."""
    watched = Watched(folder, rollout_batch_size=24, save_strategy="steps", save_steps=2)
    watched.trainer.train()
    return watched.report() | {"at_once": watched.at_once}


def resumed(folder: Path) -> dict[str, Any]:
    """The third step again, from the checkpoint of `colocate`."""
    watched = Watched(folder, max_steps=3, rollout_batch_size=24)
    watched.trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    return watched.report()


def lora(folder: Path) -> dict[str, Any]:
    """Without the adapter's dropout, which is in the trainer's log-probabilities and not in vLLM's."""
    watched = Watched(folder, use_peft=True, lora_r=8, lora_alpha=32, lora_dropout=0.0, learning_rate=4e-2)
    watched.trainer.train()
    return watched.report()


def processes(folder: Path) -> dict[str, Any]:
    """One of two: each generates a half of the rollouts and trains a half of the rows."""
    watched = Watched(folder, per_device_train_batch_size=8)
    watched.trainer.train()
    return watched.report()


class Client(VLLMClient):
    """TRL's client with another transport, since TRL's is NCCL: the server reads the weights from a file."""

    weights = Path()
    requests: list[tuple[int, int]] = []  # noqa: RUF012  (prompts and n of each)

    def init_communicator(self, device: Any = 0) -> None:
        for file in TINY.glob("*.json"):
            (self.weights / file.name).write_bytes(file.read_bytes())

    def update_named_params(self, metadata: Any, params: Any) -> None:
        save_file({name: value.detach().contiguous() for name, value in params}, self.weights / "model.safetensors")
        path = {"weights_path": str(self.weights)}
        sent = self.session.post(f"{self.base_url}/collective_rpc", json={"method": "reload_weights", "kwargs": path})
        assert sent.status_code == 200, sent.text

    def generate(self, prompts: Any, features: Any = None, n: int = 1, **how: Any) -> Any:
        self.requests.append((len(prompts), n))
        return super().generate(prompts, features, n, **how)


def served(folder: Path) -> dict[str, Any]:
    """As `colocate`, with the server; its first step finds a server that has the initial policy."""
    Client.weights = folder / "weights"
    Client.weights.mkdir()
    vllm_generation.VLLMClient = Client
    watched = Watched(folder, vllm_mode="server", vllm_server_base_url=sys.argv[2], vllm_server_timeout=DEADLINE)
    watched.trainer.train()
    return watched.report() | {"requests": Client.requests}


def command(name: str, **keys: str) -> None:
    """A command of pods, as a user types it."""
    sys.argv = ["pods", name, *(word for key, value in keys.items() for word in (f"--{key}", value))]
    with suppress(SystemExit):
        pods()


def evaluated(folder: Path) -> dict[str, Any]:
    """The same evaluation with each backend, of 512 completions."""
    keys = {"task": "arithmetic", "task_difficulty": "mixed", "max_completion_length": "56", "use_cpu": "true"}
    keys |= {"model": "tiny", "output": str(folder / "evaluated"), "eval_prompts": "256", "eval_repeats": "2"}
    for backend in ("generate", "vllm"):
        command("eval", **keys, backend=backend)
    lines = (folder / "evaluated" / "results.jsonl").read_text().splitlines()
    return {line["config"]["backend"]: line for line in map(json.loads, lines)}


CASES: dict[str, tuple[int, Callable[[Path], dict[str, Any]]]] = {
    "colocate": (1, colocate),
    "resumed": (1, resumed),
    "lora": (1, lora),
    "processes": (2, processes),
    "evaluated": (1, evaluated),
    "served": (1, served),
}


def process(folder: Path, rank: int, world: int, port: int, name: str = "") -> None:
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(CASES[name][1](folder)))


def main(folder: Path, names: list[str]) -> int:
    codes = [fork_all(partial(process, name=name), folder, CASES[name][0]) for name in names or CASES]
    return int(any(code for of_case in codes for code in of_case))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[3:]))
