"""`AsyncPODSTrainer` without vLLM: what it uses of TRL's experimental module, and the loop."""

import asyncio
import importlib
import math
import queue
import time
from collections import defaultdict
from itertools import count, islice
from statistics import fmean
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trl
from accelerate import PartialState
from datasets import Dataset
from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker

import pods_rl
from pods_rl.engines import trl_async
from pods_rl.engines.trl.guarded.rewards import refuse_unusable
from pods_rl.engines.trl.selecting.record import total_reward
from pods_rl.engines.trl_async import AsyncPODSConfig, loop, worker
from pods_rl.errors import UserError
from pods_rl.selection import RULES, advantages, select

from ..real_vllm import asynchronous

CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}


# -- TRL's experimental module ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def worker_process(monkeypatch) -> None:
    """What TRL's worker has before its loop begins; vLLM and aiohttp, which may be missing, are not called here."""
    PartialState()
    for library in ("aiohttp", "vllm"):
        monkeypatch.setattr(async_rollout_worker, f"is_{library}_available", lambda: True)
    monkeypatch.setattr(async_rollout_worker, "_RETRYABLE_HTTP_ERRORS", (OSError,), raising=False)


def test_another_version_of_trl_is_refused_in_one_sentence(monkeypatch):
    message = r"of TRL 1\.16, and trl 1\.17\.0 is installed: pip install 'trl==1\.16\.\*'"
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    with pytest.raises(UserError, match=message):
        importlib.reload(trl_async)


def test_mistakes_in_the_config_are_refused(tmp_path):
    assert AsyncPODSConfig(str(tmp_path), **CPU).num_rollouts == 8
    for wrong, message in [
        ({"num_rollouts": 4}, "num_rollouts = 4"),
        ({"num_generations": 1}, "at least 2"),
        ({"rule": "max_varience"}, "max_variance"),
        ({"rule": lambda rewards, m, *, generator=None: rewards}, "at the top of a module"),
        ({"advantages": "later"}, "later"),
        ({"selection": "batch"}, "selection"),
        ({"dynamic_sampling": "accuracy"}, "dynamic_sampling"),
        ({"num_rollouts": "16"}, "num_rollouts"),
        ({"rule": None}, "rule"),
    ]:
        with pytest.raises(UserError, match=message):
            AsyncPODSConfig(str(tmp_path), **CPU | wrong)


# -- the loop, in this process ----------------------------------------------------------------------------------------


class Watched(loop.PODSRolloutLoop):
    """A loop of one group for each prompt; `write` gives a rollout its text and its duration.

    A duration is a number of turns of the event loop, so the order in which rollouts end is the same on every machine.
    """

    def __init__(self, prompts: int, write: Any, **changes: Any) -> None:
        self.write, self.version = write, SimpleNamespace(value=0)
        self.asked = {f"<{i}>": count() for i in range(prompts)}
        settings = {
            "model_name": "", "processing_class": asynchronous.chat_tokenizer(), "eos_token_ids": [0],
            "dataset": Dataset.from_dict({"prompt": [[{"role": "user", "content": name}] for name in self.asked]}),
            "reward_funcs": [digit], "rollout_buffer": queue.Queue(), "model_version_value": self.version,
            "heartbeat_value": SimpleNamespace(value=0.0), "failed_event": Event(), "metrics_queue": queue.Queue(),
            "exception_info_queue": queue.Queue(), "num_generations": 16, "num_kept": 4, "rule": "max_variance",
            "advantages": "after", "dynamic_sampling": False, "seed": 3, "max_inflight_tasks": 64,
            "score_queue_maxsize": 0,
        }  # fmt: skip
        super().__init__(**settings | changes)

    async def _generate_one_turn(self, prompt_ids):
        name = self.tokenizer.decode(prompt_ids)
        number = next(self.asked[name])
        text, duration = self.write(int(name[1:-1]), number)
        for _ in range(duration):
            await asyncio.sleep(0)
        ids = self.tokenizer(text)["input_ids"]
        return ids, [-1.0] * len(ids)

    def _repeat_iterator(self):
        rollouts = len(self.asked) * self.num_generations
        for number, request in enumerate(super()._repeat_iterator(), 1):
            if number == rollouts:
                self._stop_event.set()
            yield request

    async def _run_loops(self, stop_event):
        await self._generate_loop(stop_event)
        stop_event.clear()
        await self._score_loop(stop_event)

    def samples(self) -> list[Any]:
        self.run()
        return list(self.rollout_buffer.queue)

    def counted(self, name: str) -> float:
        return sum(one.get(f"pods/{name}_total", 0) for one in self._metrics_queue.queue)


def digit(completions, **_):
    """The first digit of the text."""
    return [float(completion[0]["content"][0]) for completion in completions]


def slow_if_long(group: int, number: int) -> tuple[str, int]:
    """Every length once in every place of a group. The reward is of the place alone, and a token takes ten turns."""
    length = (group + number) % 16 + 1
    return str(number % 2) * length, 10 * length


def test_ties_do_not_prefer_short_answers(monkeypatch):
    def kept_over_true_length() -> float:
        samples = Watched(16, slow_if_long).samples()
        assert len(samples) == 16 * 4
        return fmean(sample.completion_mask.sum() for sample in samples) / fmean(range(1, 17))

    assert kept_over_true_length() == pytest.approx(1.0, abs=0.02)
    monkeypatch.setattr(loop.PODSRolloutLoop, "_in_order_of_request", lambda self, group: [0] * 16)
    assert kept_over_true_length() < 0.9, "in the order in which they end"


def some_digit(group: int, number: int) -> tuple[str, int]:
    return f"{(7 * group + 5 * number * number) % 10}x{number}", 10 * (number % 3)


@pytest.mark.parametrize("error", [RecursionError, ValueError])
def test_a_turn_that_no_parser_reads_is_plain_text_and_does_not_end_the_worker(monkeypatch, error):
    tokenizer = asynchronous.chat_tokenizer()
    parse = tokenizer.parse_response

    def parse_others(ids, **options):
        if "x1" in tokenizer.decode(ids):
            raise error("nested too deeply")
        return parse(ids, **options)

    monkeypatch.setattr(tokenizer, "parse_response", parse_others)
    watched = Watched(1, some_digit, processing_class=tokenizer, num_generations=4)
    texts = sorted(sample.completion[0]["content"] for sample in watched.samples())
    assert texts == sorted(some_digit(0, number)[0] for number in range(4))


def last(rewards_PN, m, *, generator=None):
    return torch.arange(m).flip(0).add(rewards_PN.shape[1] - m).expand(len(rewards_PN), m)


@pytest.mark.parametrize("when", ["after", "before"])
@pytest.mark.parametrize("rule", [*RULES, last])
def test_only_the_m_that_a_rule_keeps_are_queued_with_the_advantages_of_pods(rule, when):
    watched = Watched(4, some_digit, rule=rule, advantages=when)
    samples = watched.samples()
    for index in range(4):
        texts = [some_digit(index, number)[0] for number in range(16)]  # in the order of their requests
        rewards = torch.tensor([[float(text[0]) for text in texts]], dtype=torch.float64)
        kept = [sample for sample in samples if sample.group_id == index]
        chosen = [texts.index(sample.completion[0]["content"]) for sample in kept]
        selection = pods_rl.Selection(torch.tensor([chosen]))
        if rule != "random":
            assert torch.equal(select(rewards, 4, rule).indices, selection.indices)
        expected = advantages(rewards, selection, when=when)[0].tolist()
        assert [sample.advantage for sample in kept] == pytest.approx(expected, abs=1e-12)
        assert kept[0].group_metrics["reward"] == pytest.approx(float(rewards.mean()))
    assert (watched.counted("rollouts"), watched.counted("kept_rollouts"), len(samples)) == (64, 16, 16)
    again = Watched(4, some_digit, rule=rule, advantages=when).samples()
    assert sorted(s.completion[0]["content"] for s in again) == sorted(s.completion[0]["content"] for s in samples)


def test_with_n_equal_to_m_the_rows_are_trl_s():
    samples = Watched(2, some_digit, num_generations=4).samples()
    for index in (0, 1):
        rows = [sample for sample in samples if sample.group_id == index]
        rewards = torch.tensor([row.metrics["reward"] for row in rows], dtype=torch.float64)
        expected = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-8)  # the population's, as TRL's
        assert [row.advantage for row in rows] == pytest.approx(expected.tolist(), abs=1e-9)


def in_two_orders(completions, **_):
    """Sums of equal parts."""
    return [0.1 + 0.2 + 0.05 if i % 2 else 0.05 + 0.2 + 0.1 for i in range(len(completions))]


@pytest.mark.parametrize("n", [4, 16])
def test_rounding_of_a_sum_is_not_a_signal(n):
    changes = {"reward_funcs": [in_two_orders], "num_generations": n, "num_kept": 4}
    samples = Watched(2, some_digit, **changes).samples()
    assert [sample.advantage for sample in samples] == [0.0] * 8
    assert len({sample.metrics["reward"] for sample in Watched(2, some_digit, **changes).samples()}) == 2
    dropping = Watched(2, some_digit, dynamic_sampling=True, **changes)
    assert dropping.samples() == []
    assert dropping.counted("dropped_groups") == 2


def test_groups_without_variance_never_enter_the_queue(monkeypatch):
    def write(group: int, number: int) -> tuple[str, int]:
        return ("5" if group % 2 else some_digit(group, number)[0]), 0

    watched = Watched(6, write, dynamic_sampling=True)
    samples = watched.samples()
    assert {sample.group_id for sample in samples} == {0, 2, 4}
    dropped = {sample.dropped_groups for sample in samples} - {()}
    reported = [*sum(dropped, ()), *watched._dropped_groups]
    assert sorted(reported) == [1, 3, 5], "each is reported once, with the next kept group"
    assert (watched.counted("groups"), watched.counted("dropped_groups")) == (6, 3)
    assert len(Watched(6, write).samples()) == 24, "without dynamic sampling they are trained"
    monkeypatch.setattr(loop, "GIVE_UP_AFTER", 5)
    with pytest.raises(RuntimeError, match="last 9 groups"):
        Watched(9, lambda group, number: ("5", 0), dynamic_sampling=True).run()


def first(rewards_PN, m, *, generator=None):
    return torch.arange(m).expand(len(rewards_PN), m)


def ends(rewards_PN, m, *, generator=None):
    n = rewards_PN.shape[1]
    return torch.tensor([0, 1, n - 2, n - 1]).expand(len(rewards_PN), m)


@pytest.mark.parametrize(("rule", "version"), [(first, 0), (ends, 0), (last, 5)])
def test_a_group_carries_the_policy_of_its_oldest_kept_rollout(rule, version):
    """24 are in flight: half of the second group is requested before the first policy is replaced."""

    def write(group: int, number: int) -> tuple[str, int]:
        if (group, number) == (1, 7):
            watched.version.value = 5
        return some_digit(group, number)

    watched = Watched(2, write, max_inflight_tasks=24, rule=rule)
    samples = watched.samples()
    assert [sample.model_version for sample in samples if sample.group_id == 0] == [0] * 4
    assert [sample.model_version for sample in samples if sample.group_id == 1] == [version] * 4


def test_a_group_is_trained_or_dropped_as_a_whole():
    """With TRL's own data set: the policy is updated while a group is read, and its version becomes too old."""
    side = worker.PODSRolloutWorker.__new__(worker.PODSRolloutWorker)
    side._next_check = math.inf  # there is no process to check
    side._model_version_value = SimpleNamespace(value=4)
    side.rollout_buffer = queue.Queue()
    side.finished_groups = set()
    for group, version in enumerate((0, 0, 3, 5)):
        for _ in range(4):
            side.rollout_buffer.put(row_of(group, version))
    metrics = defaultdict(list)

    def check(stale_after_s: float) -> None:
        pytest.fail(f"the queue is empty after groups {groups}")

    data = async_grpo_trainer.RolloutQueueDataset(
        side, lambda: side._model_version_value.value, check, 300.0, metrics, max_staleness=4, poll_interval_s=0.01
    )
    groups = []
    for sample in islice(data, 12):
        groups.append(sample["group_id"])
        if len(groups) == 2:
            side._model_version_value.value = 5
    assert groups == [0] * 4 + [2] * 4 + [3] * 4
    assert sum(metrics["sample/dropped_stale_total"]) == 4
    assert metrics["sample/staleness_mean"] == [4.0] * 4 + [2.0] * 4 + [0.0] * 4
    assert side.finished_groups == {0, 1, 2, 3}


def row_of(group: int, version: int) -> loop.KeptSample:
    ids = np.zeros(2, dtype=np.int64)
    return loop.KeptSample([], [], ids, ids, ids.astype(np.float32), 0.5, version, group, {"reward": 1.0})


def below_float32(completions, **_):
    """Of the first 12, three values that are one in float32."""
    return [0.375 + (2 - i % 3) * 2**-28 if i < 12 else 1.0 for i in range(len(completions))]


def cancels(completions, **_):
    """Each of two functions is beyond the limit, and their sum is not."""
    return [1e16 if i == 3 else float(i) for i in range(len(completions))]


def cancels_too(completions, **_):
    return [-1e16 if i == 3 else 0.0 for i in range(len(completions))]


@pytest.mark.parametrize("functions", [[below_float32], [cancels, cancels_too]])
def test_ties_are_decided_as_in_the_synchronous_trainer(functions):
    samples = Watched(1, some_digit, reward_funcs=functions).samples()
    texts = [some_digit(0, number)[0] for number in range(16)]
    chosen = [texts.index(sample.completion[0]["content"]) for sample in samples]
    # TRL's synchronous trainer holds what each function returned in float32.
    columns = torch.tensor([function([None] * 16) for function in functions], dtype=torch.float32).T
    weights = torch.ones(len(functions))
    usable, _ = refuse_unusable(columns, weights)
    expected = total_reward(usable, weights, 16, "sum_then_normalize")
    assert chosen == select(expected, 4).indices[0].tolist()


def test_a_frozen_server_ends_the_worker_at_the_first_request_that_waits_in_vain(monkeypatch):
    watched = Watched(1, some_digit, request_timeout=600, vllm_server_url="http://frozen:1")
    asked = count()

    async def waits() -> None:
        next(asked)
        raise TimeoutError

    async def twice(request: Any) -> None:
        """As TRL's `_generate_one_turn` and `_post`."""
        await watched._retry(lambda: watched._retry(request, label="inner", max_attempts=3), label="outer")

    with pytest.raises(loop.FrozenServerError, match=r"http://frozen:1 .*\b600 "):
        asyncio.run(twice(waits))
    assert next(asked) == 1

    # Another request was answered in the meantime: the server is slow, and TRL tries again.
    answers = count()

    async def answers_another_first() -> int:
        if next(answers) < 2:
            watched._answered_at = time.monotonic() + 1000
            raise TimeoutError
        return 7

    async def at_once(seconds: float) -> None: ...

    monkeypatch.setattr(async_rollout_worker.asyncio, "sleep", at_once)
    assert asyncio.run(watched._retry(answers_another_first, label="inner", max_attempts=3)) == 7


def test_limits_grow_by_n_over_m_and_the_trainer_s_counts_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda accelerator, dtype: None)
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": "1+1="}]] * 6})
    args = AsyncPODSConfig(str(tmp_path), num_generations=4, num_rollouts=10, max_staleness=3, **CPU)
    model = str(asynchronous.tiny_policy_path())
    trainer = pods_rl.AsyncPODSTrainer(model, digit, args, data, weight_transfer=SimpleNamespace())
    settings = trainer.rollout_worker._loop_kwargs
    assert (settings["num_generations"], settings["num_kept"]) == (10, trainer.args.num_generations) == (10, 4)
    assert settings["max_inflight_tasks"] == trainer.args.max_inflight_tasks == 3 * 8 * 10 // 4
    assert trainer._epoch_stop_groups == 18
    mine = SimpleNamespace(rollout_buffer=None)
    with pytest.raises(UserError, match="rollout_worker"):
        pods_rl.AsyncPODSTrainer(model, digit, args, data, weight_transfer=mine, rollout_worker=mine)
