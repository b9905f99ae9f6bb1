"""`examples/async_script.py` on a CPU with a real vLLM, and what stands in for a GPU there.

What needs a GPU is replaced, and nothing else: the attention kernel (`attention`, with torch's own), the name of the
GPU (`get_peak_flops_per_device`), NCCL's transfer of weights and the pause before it (`Transfer`, with a file that the
server reads).
"""

import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import requests
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import async_grpo_trainer, packing
from trl.experimental.async_grpo.vllm_client import VLLMClient

from pods_rl.policies import tiny_policy_path
from tests import DEADLINE

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "per_device_train_batch_size": 16, "max_completion_length": 24, "learning_rate": 2e-4, "use_cpu": True,
    "bf16": False, "gradient_checkpointing": False, "save_steps": 10, "disable_tqdm": True,
}  # fmt: skip


def start(folder: Path, url: str, changes: dict[str, Any], *words: str, environment: Any = os.environ) -> Any:
    """Start the example; `changes` are settings, and `prompts` and `reward`."""
    paths = [str(ROOT / "examples"), str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "tests.real_vllm.asynchronous", str(folder), url, json.dumps(changes), *words]
    environment = {**environment, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def logged(folder: Path) -> list[dict[str, Any]]:
    """The lines of the steps so far, with the process of the worker. The run may be writing its last line: it waits."""
    path = folder / "log.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def main(folder: Path, url: str, changes: dict[str, Any]) -> None:
    import async_script

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    prompts, train = async_script.sums(changes.pop("prompts", 1000)), async_script.AsyncPODSTrainer
    if changes.pop("broken", False):
        async_script.reward = broken
    async_script.SETTINGS |= SETTINGS | {"output_dir": str(folder / "out"), "vllm_server_base_url": url} | changes

    def build(model: str, train_dataset: Any, **named: Any) -> Any:
        trainer = train(
            str(tiny_policy_path()), train_dataset=prompts, processing_class=chat_tokenizer(), **named,
            weight_transfer=Transfer(VLLMClient(url), folder / "weights"),
        )  # fmt: skip
        trainer.add_callback(Lines(folder / "log.jsonl", trainer))
        return trainer

    async_script.AsyncPODSTrainer = build
    async_script.main()


class Lines(TrainerCallback):
    def __init__(self, path: Path, trainer: Any) -> None:
        self.path, self.trainer = path, trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:
            more = {"step": state.global_step, "worker": self.trainer.rollout_worker._process.pid}
            more["passed"] = self.trainer._groups_before_resume + len(self.trainer._trained_groups)
            with self.path.open("a") as file:
                file.write(json.dumps(logs | more) + "\n")


def attention(query, key, value, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size):
    """Each segment of queries sees its own keys; with more keys than queries, the last query sees the last key."""
    parts = []
    ends = zip(cu_q.tolist()[1:], cu_k.tolist()[1:], strict=True)
    for (q0, k0), (q1, k1) in pairwise([(0, 0), *ends]):
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(diagonal=(k1 - k0) - (q1 - q0))
        heads = (x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        attend = torch.nn.functional.scaled_dot_product_attention
        parts.append(attend(*heads, attn_mask=seen, scale=softmax_scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(parts)


def chat_tokenizer() -> Any:
    """The shipped policy's tokenizer with a chat template that is the bare text."""
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_policy_path()))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.response_template = {}  # none: a response is its text
    return tokenizer


class Transfer:
    """TRL's weight transfer, with a file instead of NCCL."""

    def __init__(self, client: VLLMClient, folder: Path) -> None:
        self.client, self.folder, self.resume = client, folder, client.resume

    def init_weight_transfer(self) -> None:
        self.client.wait_for_server_ready()
        shutil.copytree(tiny_policy_path(), self.folder, dirs_exist_ok=True)

    def pause(self) -> None:
        """TRL freezes the requests in flight; on a CPU vLLM 0.31 cannot continue one that has a seed, so they end."""
        requests.post(f"{self.client.server_url}/pause", params={"mode": "wait"}, timeout=DEADLINE).raise_for_status()

    def send_weights(self, iterator: Any) -> None:
        save_file({name: value.contiguous() for name, value in iterator}, self.folder / "model.safetensors")
        ask = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
        requests.post(f"{self.client.server_url}/collective_rpc", json=ask, timeout=DEADLINE).raise_for_status()

    def destroy(self) -> None: ...


def broken(completions, **_):
    raise ValueError("the reward is\nbroken")


if __name__ == "__main__":
    from tests.real_vllm import asynchronous  # so that what is sent to the worker's process has this module's name

    asynchronous.main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
