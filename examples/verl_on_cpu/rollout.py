"""The rollout backend `pods_cpu`: a server that completes prompts with `model.generate`, on a CPU, to try things out.

It completes requests that arrive at about the same time as one batch. For training at any scale use vLLM or SGLang.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray  # type: ignore[import-not-found]
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

_PAUSE = 0.02  # a batch starts once no request has arrived for this many seconds


class CPUServer:
    """The server of one training process, a Ray actor.

    Args:
        path: the policy's folder.
        config: verl's `RolloutConfig`: its dtype, seed, response_length and max_num_seqs are read.
        number: of the server, which seeds its draws.
    """

    def __init__(self, path: str, config: Any, number: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, config.dtype)).eval()
        ends = self._model.generation_config.eos_token_id
        self._ends: list[int] = ends if isinstance(ends, list) else [ends] if ends is not None else []
        self._config, self._version = config, 0
        self._waiting: list[_Request] = []
        self._serving: asyncio.Task[None] | None = None
        self._generating = asyncio.Lock()
        torch.manual_seed(config.seed + number)

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **_: Any
    ) -> TokenOutput:
        """Return a completion, with its log-probabilities if `logprobs`, and the version of the weights."""
        request = _Request(list(prompt_ids), sampling_params)
        self._waiting.append(request)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.ensure_future(self._serve())
        return await request.answer

    async def load(self, weights: Mapping[str, Tensor], version: int | None) -> None:
        """Replace all weights. A batch that is being completed keeps the old ones."""
        async with self._generating:
            self._model.load_state_dict(weights)
            self._version = version or 0

    async def idle(self, **_: Any) -> None:
        """Do nothing: there is no device memory to free, and requests end by themselves."""

    sleep = wake_up = abort_all_requests = resume_generation = idle
    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = idle

    async def _serve(self) -> None:
        while self._waiting:
            seen = -1
            while seen != len(self._waiting):
                seen = len(self._waiting)
                await asyncio.sleep(_PAUSE)
            like = [request for request in self._waiting if request.sampling == self._waiting[0].sampling]
            batch = like[: self._config.max_num_seqs]
            self._waiting = [request for request in self._waiting if request not in batch]
            async with self._generating:
                try:
                    outputs = await asyncio.to_thread(self._complete, batch)
                except Exception as error:
                    for request in batch:
                        if not request.answer.done():  # it may be cancelled
                            request.answer.set_exception(error)
                    continue
            for request, output in zip(batch, outputs, strict=True):
                if not request.answer.done():
                    request.answer.set_result(output)

    def _complete(self, batch: Sequence[_Request]) -> list[TokenOutput]:
        how = batch[0].sampling
        width = max(len(request.prompt) for request in batch)
        pad = self._ends[0] if self._ends else 0
        ids = torch.tensor([[pad] * (width - len(request.prompt)) + request.prompt for request in batch])
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
        sampled = {"temperature": how["temperature"], "top_p": how["top_p"], "top_k": max(0, how["top_k"])}
        with torch.no_grad():
            made = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=how.get("max_tokens") or self._config.response_length,
                pad_token_id=pad,
                do_sample=bool(how["temperature"]),
                **(sampled if how["temperature"] else {}),
                output_scores=bool(how.get("logprobs")),
                return_dict_in_generate=True,
            )
        rows = made.sequences[:, width:]
        outputs = []
        logps = None
        if made.scores:
            # the scores are those that were sampled from: after temperature, top_k and top_p
            stacked = torch.stack(made.scores, dim=1).float().log_softmax(dim=-1)
            logps = stacked.gather(2, rows.unsqueeze(2)).squeeze(2)
        for row, tokens in enumerate(rows.tolist()):
            end = next((i + 1 for i, token in enumerate(tokens) if token in self._ends), len(tokens))
            log_probs = None if logps is None else logps[row, :end].tolist()
            version = {"global_steps": self._version}
            outputs.append(TokenOutput(token_ids=tokens[:end], log_probs=log_probs, extra_fields=version))
        return outputs


@dataclass(eq=False)
class _Request:
    prompt: list[int]
    sampling: Mapping[str, Any]
    answer: asyncio.Future[TokenOutput] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class CPUReplica(RolloutReplica):
    """In verl's driver: starts the server of a training process."""

    async def launch_servers(self) -> None:
        name = _server_name(self.replica_rank)
        actor = ray.remote(CPUServer).options(name=name, max_concurrency=self.max_concurrency)
        server = actor.remote(self.model_config.path, self.config, self.replica_rank)
        await server.idle.remote()
        self.servers, self._server_handle, self._server_address = [server], server, name


class CPURollout(BaseRollout):
    """In a training process: sends its weights to its server."""

    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], wire_format: str = "named_tensors", **fields: Any
    ) -> None:
        """Send all weights, and wait until the server uses them."""
        tensors = {name: tensor.detach().cpu() for name, tensor in weights}
        server = ray.get_actor(_server_name(torch.distributed.get_rank()))
        await server.load.remote(tensors, fields.get("global_steps"))

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the server keeps its weights."""

    async def release(self) -> None:
        """Do nothing: the server keeps its weights."""


def _server_name(number: int) -> str:
    return f"pods_cpu_server_{number}"
