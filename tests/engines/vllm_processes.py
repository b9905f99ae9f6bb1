"""What each of two processes of `test_vllm.py` does; started as `python -m tests.engines.vllm_processes FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from .many_processes import fork_all, make_trainer
from .vllm_stand_in import LLM, Client, stand_ins

SETTINGS = {"num_generations": 4, "num_rollouts": 8, "per_device_train_batch_size": 2, "use_vllm": True}


def train(folder: Path, mode: str, rank: int) -> None:
    trainer = make_trainer(folder, SETTINGS | {"vllm_mode": mode})
    rows, build = [], trainer._generate_and_score_completions

    def keep(inputs: list[dict]) -> dict:
        batch = build(inputs)
        lengths = batch["completion_mask"].sum(dim=1).tolist()
        for ids, logprobs, length in zip(
            batch["completion_ids"], batch["sampling_per_token_logps"], lengths, strict=True
        ):
            rows.append((ids[:length].tolist(), logprobs[:length].tolist()))
        return batch

    trainer._generate_and_score_completions = keep
    trainer.train()
    report = {
        "requests": [
            [len(sent["prompts"]), sent["n"]] if mode == "server" else [len(sent[0]), sent[1].n]
            for made in (Client if mode == "server" else LLM).made
            for sent in made.sent("generate")
        ],
        "given": [item for made in Client.made + LLM.made for item in made.sampler.given.items()],
        "rows": rows,
        "moved": sum(row.get("pods/rows_moved", 0.0) for row in trainer.state.log_history),
    }
    (folder / f"{mode}-{rank}.json").write_text(json.dumps(report))


def process(folder: Path, rank: int, world: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for mode in ("server", "colocate"):
        with stand_ins():
            train(folder, mode, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(any(fork_all(process, Path(sys.argv[1]), world=2)))
