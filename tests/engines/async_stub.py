"""`examples/async_script.py` on a CPU with a stub server or a real vLLM, and what stands in for a GPU there.

What needs a GPU is replaced, and nothing else: the attention kernel (`attention`, with torch's own), the name of the
GPU (`get_peak_flops_per_device`), NCCL's transfer of weights and the pause before it (`Transfer`, with a file that the
server reads). With the stub server, whose text is random, the loop's requests go through urllib, because vLLM and
aiohttp are missing.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import requests
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, packing
from trl.experimental.async_grpo.vllm_client import VLLMClient

from pods_rl.engines.trl_async.loop import PODSRolloutLoop
from pods_rl.engines.trl_async.worker import PODSRolloutWorker
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
    command = [sys.executable, "-m", "tests.engines.async_stub", str(folder), url, json.dumps(changes), *words]
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
    if reward := changes.pop("reward", None):
        PODSRolloutWorker._loop_cls = StubLoop
        async_script.reward = globals()[reward]
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


class StubServer(ThreadingHTTPServer):
    """The endpoints of vLLM that are asked: a completion is of random digits."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Completions)
        tokenizer = chat_tokenizer()
        self.digits, self.eos = tokenizer.convert_tokens_to_ids(list("0123456789")), tokenizer.eos_token_id
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def kill(self) -> None:
        self.shutdown()
        self.server_close()


class Completions(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        draw = random.Random(asked.get("seed"))
        ids = [*draw.choices(self.server.digits, k=draw.randint(2, 8)), self.server.eos]
        time.sleep(len(ids) / 500)
        self.answer({"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [-2.0] * len(ids)}}]})

    def answer(self, value: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_: Any) -> None: ...


class StubLoop(PODSRolloutLoop):
    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        await asyncio.gather(self._generate_loop(stop_event), self._score_loop(stop_event))

    async def _post(self, path: str, payload: dict, timeout: float, max_retries: int = 3) -> dict:
        def send() -> dict:
            request = urllib.request.Request(self.vllm_server_url + path, json.dumps(payload).encode())
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return json.load(response)

        return await self._retry(lambda: asyncio.to_thread(send), label=path, max_attempts=max_retries)


def has_seven(completions, **_):
    return [float("7" in completion[0]["content"]) for completion in completions]


def broken(completions, **_):
    raise ValueError("the reward is\nbroken")


if not async_rollout_worker.is_aiohttp_available():
    async_rollout_worker._RETRYABLE_HTTP_ERRORS = (OSError,)
    async_rollout_worker.is_aiohttp_available = async_rollout_worker.is_vllm_available = lambda: True

if __name__ == "__main__":
    from tests.engines import async_stub  # so that what is sent to the worker's process has this module's name

    async_stub.main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
