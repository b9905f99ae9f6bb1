"""Groups that stop in verl's agent loop: real workers, client, router and queue; only the LLM server is scripted."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
import ray
import transfer_queue as tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from pods_rl.engines.verl import PODSAgentLoopManager
from pods_rl.engines.verl.agent_loop import PODSAgentLoopWorker
from pods_rl.engines.verl.servers import cancellable

from .. import DEADLINE
from .conftest import REWARDS
from .scripted_server import ScriptedSGLang, ScriptedVLLM
from .trainers import kept_sessions, left_in_queue

KWARGS = "trainer.v1.sampler.sampler_kwargs"
WAVES = [f"{KWARGS}.rollout_waves=[8]", f"{KWARGS}.reward_range=[0,1]"]
# with m = 4, decided after the fourth session, or never
QUICK, SLOW = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0], [1.0] * 8

pytestmark = pytest.mark.usefixtures("empty_queue")


@pytest.fixture
def loops(tmp_path):
    path = tmp_path / "loops.yaml"
    path.write_text("- name: scripted\n  _target_: tests.verl.scripted.AskingLoop\n")
    return path


@pytest.fixture(scope="module")
def servers(queue):
    """A router and a scripted server of each engine."""
    actors = {"vllm": ScriptedVLLM.remote(), "sglang": ScriptedSGLang.remote()}
    yield ray.remote(GlobalRequestLoadBalancer).remote(servers={}), actors
    for actor in actors.values():
        ray.kill(actor)


@pytest.fixture
def serve(make_config, servers):
    """A worker in this process, whose requests go through verl's client and router to a scripted server."""
    router, actors = servers

    def make(*overrides: str, engine: str = "vllm", client=LLMServerClient):
        config = make_config(*WAVES, f"actor_rollout_ref.rollout.name={engine}", *overrides)
        server = actors[engine]
        ray.get([server.forget.remote(), router.remove_servers.remote(list(actors))])
        ray.get([router.clear_sticky_cache.remote(), router.add_servers.remote({engine: server})])
        return PODSAgentLoopWorker(config, client(config, router), None, []), server, router

    return make


def submit(worker, rewards: list[list[float]], *, validate: bool = False, sessions: int | None = 8):
    """Give a worker one prompt for each list, as verl's trainer and our manager do; uids are p0, p1, ..."""
    uids = [f"p{number}" for number in range(len(rewards))]
    columns = {
        "uid": np.array(uids, dtype=object),
        "index": np.array(range(len(rewards)), dtype=object),
        "raw_prompt": np.array([[{"role": "user", "content": "?"}]] * len(rewards), dtype=object),
        "extra_info": np.array([{"rewards": values} for values in rewards], dtype=object),
    }
    batch = tu.get_tensordict(columns)
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    if validate:
        tu.assign_non_tensor_data(batch, "validate", True)
    if sessions is not None:
        tu.assign_non_tensor_data(batch, "__rollout_n__", sessions)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 1} for _ in uids]
    tq.kv_batch_put(keys=uids, partition_id="val" if validate else "train", tags=tags)
    return worker.generate_sequences(batch)


async def until(condition) -> None:
    deadline = time.monotonic() + DEADLINE
    while not await condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        await asyncio.sleep(0.02)


async def finish(worker) -> None:
    await asyncio.wait_for(asyncio.gather(*worker.background_tasks), DEADLINE)


def sessions_of(prompt: int, *numbers: int) -> list[tuple[int, int]]:
    return [(prompt, number) for number in numbers]


def status_of(uid: str, partition: str = "train") -> str:
    return tq.kv_list(partition)[partition][uid]["status"]


@pytest.mark.parametrize("client", [LLMServerClient, FullyAsyncLLMServerClient])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_requests_beyond_the_decision_end_on_the_server(serve, engine, client):
    worker, server, router = serve(engine=engine, client=client)

    async def play():
        await submit(worker, [QUICK])

        async def all_run():
            return len((await server.state.remote())["running"]) == 8

        await until(all_run)
        await server.answer.remote(*sessions_of(0, 0, 1, 2, 3))
        await finish(worker)

        async def none_runs():
            return not (await server.state.remote())["running"]

        await until(none_runs)
        assert (await server.state.remote())["aborted"] == sessions_of(0, 4, 5, 6, 7)
        assert await router.get_total_inflight.remote() == 0

    asyncio.run(play())
    assert left_in_queue() == {"p0", *(f"p0_{number}_0" for number in range(4))}
    assert status_of("p0") == "finished"


def test_groups_stop_alone_and_commit_by_number(serve):
    worker, server, _ = serve()

    async def play():
        await submit(worker, [SLOW, QUICK, QUICK])
        # of the third prompt the later sessions, which are scored and could decide, finish first
        await server.answer.remote(*sessions_of(2, 7, 6, 5, 4), *sessions_of(1, *range(8)))

        async def second_is_done():
            return status_of("p1") == "finished"

        await until(second_is_done)
        assert status_of("p0") == status_of("p2") == "running"
        assert kept_sessions(left_in_queue() - {"p0", "p1", "p2"}) == {"p1": [0, 1, 2, 3]}
        await server.answer.remote(*sessions_of(2, 0, 1, 2, 3), *sessions_of(0, *range(8)))
        await finish(worker)

    asyncio.run(play())
    kept = kept_sessions(left_in_queue() - {"p0", "p1", "p2"})
    assert kept == {"p0": list(range(8)), "p1": [0, 1, 2, 3], "p2": [0, 1, 2, 3]}
    assert {status_of(uid) for uid in ("p0", "p1", "p2")} == {"finished"}


def test_a_wave_is_requested_once_the_one_before_is_scored(serve):
    worker, server, _ = serve(f"{KWARGS}.rollout_waves=[4,2]")

    async def play():
        await submit(worker, [REWARDS])

        async def running(*numbers):
            return (await server.state.remote())["running"] == sessions_of(0, *numbers)

        await until(lambda: running(0, 1, 2, 3))
        await server.answer.remote(*sessions_of(0, 0, 1, 2, 3))
        await until(lambda: running(4, 5))
        await server.answer.remote(*sessions_of(0, 4, 5))
        await finish(worker)
        assert await server.state.remote() == {"running": [], "aborted": []}

    asyncio.run(play())
    assert kept_sessions(left_in_queue() - {"p0"}) == {"p0": [0, 1, 2, 3, 4, 5]}


@pytest.mark.parametrize(("given", "expected"), [({"validate": True, "sessions": None}, 8), ({"sessions": 6}, 6)])
def test_validation_and_other_numbers_of_sessions_run_as_in_verl(serve, given, expected):
    worker, server, _ = serve("actor_rollout_ref.rollout.val_kwargs.n=8")  # QUICK is decided after four

    async def play():
        await submit(worker, [QUICK], **given)
        await server.answer.remote(*sessions_of(0, *range(8)))
        await finish(worker)

    asyncio.run(play())
    partition = "val" if given.get("validate") else "train"
    assert kept_sessions(left_in_queue(partition) - {"p0"}) == {"p0": list(range(expected))}


def test_a_request_cancelled_before_it_is_sent_is_taken_back_from_the_router(make_config):
    released = []

    class Client:
        """The part of verl's client that asks the router."""

        config = make_config("actor_rollout_ref.rollout.name=vllm")

        async def _acquire_server(self, request_id, **_):
            await asyncio.sleep(0.01)
            return "only", None

        def _release_server(self, server_id, request_id=None):
            released.append((server_id, request_id))

    async def play():
        asking = asyncio.create_task(cancellable(Client())._acquire_server("a request"))
        await asyncio.sleep(0)
        asking.cancel()

        async def is_released():
            return bool(released)

        await until(is_released)
        assert asking.cancelled()
        assert released == [("only", "a request")]

    asyncio.run(play())


def test_other_engines_are_said_not_to_cancel(make_config, caplog):
    config = make_config("actor_rollout_ref.rollout.name=trtllm")
    cancellable(LLMServerClient(config, None))
    assert "trtllm cannot cancel a request" in caplog.text


def test_without_waves_the_workers_are_verls_own(make_config):
    assert PODSAgentLoopManager(make_config(), llm_client=None).agent_loop_workers_class is AgentLoopWorkerTQ
    in_waves = PODSAgentLoopManager(make_config(*WAVES), llm_client=None).agent_loop_workers_class
    assert in_waves.__ray_metadata__.modified_class.__ray_actor_class__ is PODSAgentLoopWorker
