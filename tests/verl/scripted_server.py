"""Actors in place of verl's LLM servers. They import no verl, which would take long."""

from __future__ import annotations

import asyncio
import uuid
from types import SimpleNamespace
from typing import Any

import ray


class _Server:
    """A server that answers a request when the test says so, and records running and aborted requests."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[int, int]] = {}  # id -> prompt, session
        self.aborted: list[tuple[int, int]] = []
        self.answers: dict[tuple[int, int], asyncio.Event] = {}

    def forget(self) -> None:
        """Begin a test: what runs is left alone, and nothing was aborted."""
        self.running, self.aborted, self.answers = {}, [], {}

    def answer(self, *requests: tuple[int, int]) -> None:
        """Answer these prompts' sessions, now or when they ask."""
        for request in requests:
            self._answer(request).set()

    def state(self) -> dict[str, list[tuple[int, int]]]:
        return {"running": sorted(self.running.values()), "aborted": sorted(self.aborted)}

    def _answer(self, request: tuple[int, int]) -> asyncio.Event:
        return self.answers.setdefault(request, asyncio.Event())

    async def _run(self, known_as: str, request: tuple[int, int]) -> Any:
        running = self.running
        running[known_as] = request
        try:
            await self._answer(request).wait()
        finally:
            running.pop(known_as, None)
        return SimpleNamespace(  # the fields of verl's TokenOutput
            token_ids=[6] * (2 + request[1]),
            log_probs=None,
            routed_experts=None,
            num_preempted=None,
            stop_reason="completed",
            extra_fields={"global_steps": 1},
        )


@ray.remote
class ScriptedVLLM(_Server):
    """In place of verl's `vLLMHttpServer` over vLLM 0.24.

    vLLM gives each request an id of its own. It aborts a request whose `generate` is cancelled; verl's `abort_request`
    knows vLLM's ids only, and says nothing of others but False.
    """

    async def generate(self, request_id: str, prompt_ids: list[int], **_: Any) -> Any:
        own = f"{request_id}-{uuid.uuid4().hex[:8]}"
        try:
            return await self._run(own, tuple(prompt_ids))
        except asyncio.CancelledError:
            self.aborted.append(tuple(prompt_ids))
            raise

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        return {"aborted": request_id in self.running}


@ray.remote
class ScriptedSGLang(_Server):
    """In place of verl's `SGLangHttpServer`: SGLang keeps the given id, and goes on if `generate` is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer_manager = SimpleNamespace(abort_request=self._abort)

    async def generate(self, request_id: str, prompt_ids: list[int], **_: Any) -> Any:
        return await asyncio.shield(asyncio.ensure_future(self._run(request_id, tuple(prompt_ids))))

    def _abort(self, rid: str = "", abort_all: bool = False) -> None:
        if rid not in self.running:
            return
        self.aborted.append(self.running[rid])
        self._answer(self.running[rid]).set()
