"""A stand-in for vLLM at its outermost boundary, and what it was sent.

`Client` replaces `trl.generation.vllm_client.VLLMClient` (the HTTP and NCCL connection to a server). TRL's
`VLLMGeneration` above it is the real one. It writes completions of letters, no two of a run alike, and gives each token
a log-probability of its own. The colocated generator is tested with a real vLLM (tests/real_vllm).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from trl.generation import vllm_generation

END = 1  # the end token of the tests' tokenizer


class Client:
    """Stands in for VLLMClient: keeps every call in `calls`; one is made by the main process."""

    made: list[Client] = []  # noqa: RUF012  (what the test looks at)

    def __init__(
        self,
        base_url: str | None = None,
        host: str = "0.0.0.0",
        server_port: int = 8000,
        group_port: int = 51216,
        connection_timeout: float = 0.0,
    ) -> None:
        self.base_url = base_url
        self.calls: list[tuple[str, Any]] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.random = random.Random(0)
        self.given: dict[tuple[int, ...], list[float]] = {}  # completion -> log-probability of each token
        self.made.append(self)

    def init_communicator(self, device: Any = 0) -> None:
        self.calls.append(("init_communicator", device))

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.weights = {name: weight.detach().clone() for name, weight in named_params}
        self.calls.append(("update_named_params", [name for name, _, _ in metadata]))

    def reset_prefix_cache(self) -> None:
        self.calls.append(("reset_prefix_cache", None))

    def generate(
        self,
        prompts: list[list[int]],
        features: Any = None,
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        sent = dict(locals())
        sent.pop("self")
        self.calls.append(("generate", sent))
        drawn = [self.completion() for _ in prompts for _ in range(n)]
        return {
            "prompt_ids": prompts,
            "completion_ids": [ids for ids, _ in drawn],
            "logprobs": [[[None if x != x else x] for x in logprobs] for _, logprobs in drawn],
            "logprob_token_ids": [[[token] for token in ids] for ids, _ in drawn],
        }

    def completion(self) -> tuple[list[int], list[float]]:
        while True:
            ids = [self.random.randint(32, 90) for _ in range(self.random.randint(4, 11))] + [END]
            if tuple(ids) not in self.given:
                break
        logprobs = [-self.random.random() * 8 for _ in ids]
        if len(ids) % 3 == 0:
            logprobs[1] = float("nan")  # vLLM has none for some tokens
        self.given[tuple(ids)] = logprobs
        return ids, logprobs

    def sent(self, name: str) -> list[Any]:
        """The arguments of every call of a method."""
        return [arguments for called, arguments in self.calls if called == name]


def put_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TRL find vLLM installed, with this client."""
    Client.made = []
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "VLLMClient", Client)
