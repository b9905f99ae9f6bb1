"""Stand-ins for vLLM at its outermost boundary, and what they were sent.

`Client` replaces `trl.generation.vllm_client.VLLMClient` (the HTTP and NCCL connection to a server); `LLM` and
`SamplingParams` replace vLLM's own (the colocated generator). TRL's `VLLMGeneration` above them is the real one. Both
write completions of letters, no two of a run alike, and give each token a log-probability of its own.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from trl.generation import vllm_generation

END = 1  # the end token of the tests' tokenizer


class Sampler:
    """Completions and log-probabilities by number: what both stand-ins generate."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.given: dict[tuple[int, ...], list[float]] = {}  # completion -> log-probability of each token

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
        self.sampler = Sampler()
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
        drawn = [self.sampler.completion() for _ in prompts for _ in range(n)]
        return {
            "prompt_ids": prompts,
            "completion_ids": [ids for ids, _ in drawn],
            "logprobs": [[[None if x != x else x] for x in logprobs] for _, logprobs in drawn],
            "logprob_token_ids": [[[token] for token in ids] for ids, _ in drawn],
        }

    def sent(self, name: str) -> list[Any]:
        """The arguments of every call of a method."""
        return [arguments for called, arguments in self.calls if called == name]


class SamplingParams(SimpleNamespace):
    """Stands in for vllm.SamplingParams."""


class LLM:
    """Stands in for vllm.LLM, as far as TRL's colocate mode reaches into it."""

    made: list[LLM] = []  # noqa: RUF012

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.calls: list[tuple[str, Any]] = []
        self.sampler = Sampler(settings["seed"])
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load))
        driver = SimpleNamespace(model_runner=runner)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=driver), model_config=SimpleNamespace(dtype=torch.bfloat16)
        )
        self.weights: dict[str, torch.Tensor] = {}
        self.made.append(self)

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.weights[name] = weight.detach().clone()
            self.calls.append(("load_weights", name))

    def reset_prefix_cache(self) -> None:
        self.calls.append(("reset_prefix_cache", None))

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", tags))

    def generate(self, prompts: list[Any], sampling_params: SamplingParams, use_tqdm: bool) -> list[Any]:
        self.calls.append(("generate", (prompts, sampling_params)))
        outputs = []
        for prompt in prompts:
            drawn = [self.sampler.completion() for _ in range(sampling_params.n)]
            found = [
                SimpleNamespace(
                    token_ids=ids,
                    logprobs=[
                        {token: SimpleNamespace(rank=1, logprob=value)}
                        for token, value in zip(ids, logprobs, strict=True)
                    ],
                )
                for ids, logprobs in drawn
            ]
            outputs.append(SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=found))
        return outputs

    def sent(self, name: str) -> list[Any]:
        return [arguments for called, arguments in self.calls if called == name]


@contextmanager
def stand_ins() -> Iterator[None]:
    """Inside, TRL finds vLLM installed, and it is these."""
    Client.made, LLM.made = [], []
    replaced = {
        "is_vllm_available": lambda: True, "VLLMClient": Client, "LLM": LLM, "SamplingParams": SamplingParams,
    }  # fmt: skip
    before = {name: vars(vllm_generation).get(name) for name in replaced}
    environment = dict(os.environ)  # TRL sets the launcher's variables for vLLM
    vars(vllm_generation).update(replaced)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        for name, value in before.items():
            if value is None:
                vars(vllm_generation).pop(name)
            else:
                setattr(vllm_generation, name, value)
