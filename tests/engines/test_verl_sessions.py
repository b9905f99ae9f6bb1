"""Sessions of a prompt in waves, with asyncio alone: who starts, who is committed, who is cancelled."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from pods_rl.engines.verl.sessions import Sessions
from pods_rl.rollouts.stopping import Stopping, wave_sizes

from .. import DEADLINE


class Play:
    """A prompt whose sessions end when the test sets their event, and what each session did, by number."""

    def __init__(self, waves, stops, rewards):
        self.group = Sessions(waves, stops)
        self.rewards = rewards
        self.ends = [asyncio.Event() for _ in rewards]
        self.started: list[int] = []
        self.stored: list[int] = []
        self.cancelled: list[int] = []
        self.tasks = [asyncio.create_task(self.group.run(i, lambda i=i: self.session(i))) for i in range(len(rewards))]

    async def session(self, number: int) -> None:
        self.started.append(number)
        try:
            await self.ends[number].wait()
            reward = self.rewards[number]
            if isinstance(reward, Exception):
                raise reward
            if reward is not None:  # an agent that returns no trajectory is never scored
                await self.group.commit(number, reward)
                self.stored.append(number)
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise

    async def end(self, *numbers: int) -> None:
        for number in numbers:
            self.ends[number].set()
            await settle()

    async def results(self) -> list[object]:
        return await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), DEADLINE)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def two_ones(rewards) -> bool:
    return rewards.count(1.0) >= 2


def test_a_wave_starts_once_the_one_before_is_committed():
    async def play():
        group = Play((3, 2, 2), lambda rewards: False, [0.0] * 7)
        await settle()
        assert group.started == [0, 1, 2]
        await group.end(2, 1)
        assert (group.started, group.stored) == ([0, 1, 2], [])
        await group.end(0)
        assert (group.started, group.stored) == ([0, 1, 2, 3, 4], [0, 1, 2])
        await group.end(3, 4, 5, 6)
        await group.results()
        assert group.stored == list(range(7))
        assert group.cancelled == []

    asyncio.run(play())


def test_later_sessions_that_finish_first_are_not_committed_before_their_turn():
    async def play():
        group = Play((6,), two_ones, [0.0, 1.0, 1.0, 1.0, 1.0, 0.0])
        await settle()
        await group.end(4, 3)  # two ones, but the first sessions still run
        assert group.stored == []
        await group.end(0, 1)
        assert group.stored == [0, 1]
        await group.end(2)
        assert await group.results() == [None] * 6
        assert sorted(group.stored) == [0, 1, 2]
        assert sorted(group.cancelled) == [3, 4, 5]  # those that waited with a reward, and the one that still ran
        assert group.group.committed == [0.0, 1.0, 1.0]

    asyncio.run(play())


def test_what_is_committed_does_not_depend_on_the_order_of_finishing():
    draw = random.Random(0)

    async def play(rewards, waves, stops, expected):
        group = Play(waves, stops, rewards)
        left = set(range(len(rewards)))
        while left and not all(task.done() for task in group.tasks):
            await settle()
            ready = sorted(left & set(group.started) - set(group.cancelled))
            left.remove(number := draw.choice(ready))
            await group.end(number)
        await group.results()
        assert sorted(group.stored) == list(range(expected))
        assert not set(group.stored) & set(group.cancelled)
        assert set(group.started) == set(group.stored) | set(group.cancelled)

    for _ in range(150):
        n, m = draw.randint(4, 14), draw.randint(2, 4)
        waves = wave_sizes([draw.randint(m, n), draw.randint(1, 4)], n, m)
        rewards = [draw.choice([0.0, 1.0, 1.0, 0.5]) for _ in range(n)]
        stopping = Stopping(m=m, n=n, low=0.0, high=1.0, give_up_after=m)

        def stops(given, stopping=stopping):
            return bool(stopping.statuses(torch.tensor([list(given)])))

        expected = next((t for t in range(1, n) if stops(rewards[:t])), n)
        asyncio.run(play(rewards, waves, stops, expected))


def test_a_group_stops_while_another_waits():
    async def play():
        slow, quick = (Play((4, 4), two_ones, [1.0] * 8) for _ in range(2))
        await settle()
        await quick.end(0, 1)
        assert await quick.results() == [None] * 8
        assert (quick.stored, sorted(quick.cancelled), quick.started) == ([0, 1], [2, 3], [0, 1, 2, 3])
        assert not any(task.done() for task in slow.tasks)
        await slow.end(0, 1)
        assert await slow.results() == [None] * 8

    asyncio.run(play())


def test_a_session_that_fails_or_is_never_scored_holds_nobody_up():
    async def play():
        group = Play((4, 2), two_ones, [ValueError("of a tool"), None, 1.0, 1.0, 1.0, 1.0])
        await settle()
        await group.end(3, 2, 1, 0)
        results = await group.results()
        assert isinstance(results[0], ValueError)  # verl then marks the group as failed, as without waves
        assert results[1:] == [None] * 5
        assert sorted(group.stored) == [2, 3]
        assert group.started == [0, 1, 2, 3]

    asyncio.run(play())


def test_the_error_of_a_session_beyond_the_decision_is_dropped_with_it():
    async def play():
        group = Play((4,), two_ones, [1.0, 1.0, 1.0, ValueError("of a tool")])
        await settle()
        await group.end(3, 0, 1)
        assert await group.results() == [None] * 4
        assert group.stored == [0, 1]

    asyncio.run(play())


@pytest.mark.parametrize("number", [0, 2])
def test_a_session_cancelled_from_outside_holds_nobody_up(number):
    async def play():
        group = Play((3, 1), lambda rewards: False, [0.0] * 4)
        await settle()
        await group.end(1)
        group.tasks[number].cancel()
        await group.end(0, 2, 3)
        results = await group.results()
        assert isinstance(results[number], asyncio.CancelledError)
        assert sorted(group.stored) == sorted({0, 1, 2, 3} - {number})

    asyncio.run(play())
