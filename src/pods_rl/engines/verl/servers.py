"""Requests to verl's LLM servers that end on the server when the coroutine that awaits them is cancelled.

verl's client drops a cancelled call, and the server generates to the end. verl's `abort_request` needs the id of the
request: not the one that an agent loop gives, but one that the client draws for each call, and that vLLM from 0.16 on
replaces by its own. An unknown id aborts nothing and raises nothing. So the server's call itself is cancelled here.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from types import SimpleNamespace
from typing import Any

import ray  # type: ignore[import-not-found]

logger = logging.getLogger(__name__)

_ENDS_WITH_ITS_CALL = ("vllm", "pods_cpu")  # engines in which a request ends once its call is cancelled


def cancellable(client: Any) -> Any:
    """Return a copy of verl's `LLMServerClient` whose `generate` passes its cancellation on to the server.

    vLLM and our CPU server drop a request whose call is cancelled. SGLang does not: it gets an abort with the id of the
    request. In verl's other engines the request runs to its end, and its answer is dropped.
    """
    engine = client.config.actor_rollout_ref.rollout.name
    if engine not in (*_ENDS_WITH_ITS_CALL, "sglang"):
        logger.warning(
            "rollout_waves: %s cannot cancel a request, so rollouts that a stopped group no longer needs are generated "
            "to their end and dropped. With vllm and sglang they are cancelled.",
            engine,
        )
    client = copy.copy(client)
    acquire = client._acquire_server

    async def acquire_cancellable(request_id: str, **fields: Any) -> tuple[str, _Server]:
        def release(acquired: asyncio.Future[tuple[str, Any]]) -> None:
            if not acquired.cancelled() and acquired.exception() is None:
                client._release_server(acquired.result()[0], request_id)

        acquired = asyncio.ensure_future(acquire(request_id, **fields))
        try:
            server_id, handle = await asyncio.shield(acquired)
        except asyncio.CancelledError:  # nothing was sent: else verl's router would count the request for ever
            acquired.add_done_callback(release)
            raise
        return server_id, _Server(handle, engine)

    client._acquire_server = acquire_cancellable
    return client


class _Server:
    """A server's handle; a `generate` call that is cancelled while it is awaited also ends on the server."""

    def __init__(self, handle: Any, engine: str) -> None:
        self._handle = handle
        self._engine = engine
        self.generate = SimpleNamespace(remote=self._generate)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    async def _generate(self, **request: Any) -> Any:
        call = self._handle.generate.remote(**request)
        try:
            return await call
        except asyncio.CancelledError:
            if self._engine in _ENDS_WITH_ITS_CALL:
                ray.cancel(call)
            elif self._engine == "sglang":
                self._handle.__ray_call__.remote(_abort_in_sglang, request["request_id"])
            raise


def _abort_in_sglang(server: Any, request_id: str) -> None:
    """Runs in the process of verl's SGLang server, which has no method for it."""
    server.tokenizer_manager.abort_request(rid=request_id)
