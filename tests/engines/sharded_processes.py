"""What each process of `test_fsdp.py` does; started as `python -m tests.engines.sharded_processes FOLDER`.

One run of the real trainer with rollouts that are the same in every layout, and a generation by the policy itself in
which the processes have unequally much to do. The libraries are imported once; the processes are forked, with the
variables that `accelerate launch` would set from the shipped fsdp2.yaml. Each leaves what it saw in FOLDER.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import accelerate.commands.launch as accelerate_launch
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pods_rl import PODSTrainer
from pods_rl.evaluation import GenerateSampler, Sampling
from pods_rl.recipe import find_accelerate_config
from pods_rl.training.trainer import save_policy

from . import many_processes
from .conftest import Gradients
from .many_processes import CASES, fork_all, make_trainer

CASE = "eight of one prompt over two"
PROMPTS_IDS = [[5, 6, 7], [8, 9], [10], [11, 12, 13, 14], [15, 16]]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def shares(trainer: PODSTrainer) -> dict[str, tuple[int, int]]:
    """Numbers of each parameter, here and in all; a parameter that is no DTensor is not told."""
    named = trainer.model.named_parameters()
    return {name: (p.to_local().numel(), p.numel()) for name, p in named if isinstance(p, DTensor)}


def resharding(trainer: PODSTrainer) -> list[bool]:
    """Whether each sharded module frees its parameters after a forward pass."""
    modules = [module for module in trainer.model.modules() if isinstance(module, FSDPModule)]
    return [group._reshard_after_forward for m in modules for group in m._get_fsdp_state()._fsdp_param_groups]


def train(folder: Path, processes: int) -> PODSTrainer:
    """Two steps on the case's rollouts; one process has all rows of the case's two."""
    settings = dict(CASES[CASE][1])
    settings["per_device_train_batch_size"] *= CASES[CASE][0] // processes
    trainer = make_trainer(folder, settings)
    watch = Gradients(trainer)
    many_processes.train(trainer)
    weights = {f"weight {key}": whole(p) for key, p in trainer.model.named_parameters()}
    gradients = {f"gradient {key}": whole(g) for key, g in watch.steps[0].items()}
    save_file(weights | gradients, folder / f"{processes}-{trainer.accelerator.process_index}.safetensors")
    return trainer


def sample(trainer: PODSTrainer, rows: list[int]) -> list[str]:
    """The policy's own completions of some of the prompts, one row in a batch."""
    how = Sampling(temperature=1.0, max_completion_length=8, batch_size=1, seed=4)
    sampler = GenerateSampler(trainer.model, trainer.processing_class)
    with trainer.whole_weights():
        done = sampler.sample([PROMPTS_IDS[row] for row in rows], rows, how, lambda *_: None)
    return [completion.text for completion in done]


def process(folder: Path, rank: int, world: int, port: int) -> None:
    meeting = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= launch_variables() | {name: str(value) for name, value in meeting.items()}
    trainer = train(folder, processes=world)
    report: dict[str, Any] = {"layout": trainer.layout, "parameters": len(list(trainer.model.parameters()))}
    report |= {"before": shares(trainer), "resharding before": resharding(trainer)}
    with trainer.whole_weights():
        report["inside"] = shares(trainer)
    report["texts"] = sample(trainer, [[0, 1, 2, 3], [4]][rank])  # four batches here, one there
    report |= {"after": shares(trainer), "resharding after": resharding(trainer)}
    save_policy(trainer, folder / "final")
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def launch_variables() -> dict[str, str]:
    """What `accelerate launch --config_file fsdp2.yaml` tells its processes of the layout."""
    words = ["--config_file", str(find_accelerate_config("fsdp2")), "script.py"]
    given, *_ = accelerate_launch._validate_launch_command(accelerate_launch.launch_command_parser().parse_args(words))
    told = accelerate_launch.prepare_multi_gpu_env(given)
    return {name: value for name, value in told.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def main(folder: Path) -> int:
    gc.freeze()  # no process looks for garbage in what was imported
    return int(any(fork_all(process, folder, 2)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
