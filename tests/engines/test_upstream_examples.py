"""The examples for tinker-cookbook, prime-rl, OpenRLHF and NeMo-RL, run against the engines' own code.

None of them is among our dependencies. A test is skipped, with the name of what is missing, unless its engine can be
imported. `CHECKOUTS="path path"` names checkouts, which are searched first. docs/engines.md has the commits that the
examples were written for. Sampling is replaced. Strategies, environments, rewards and advantages are the engine's.
"""

import asyncio
import importlib
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pods_rl import Selection, advantages

from . import same_rows
from .same_rows import KEPT, N

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCES = ("", "src", "packages/prime-rl-configs/src")  # the folders of a checkout that hold packages


@pytest.fixture
def upstream(monkeypatch):
    """Imports a module of an engine, or skips the test; examples/ and the checkouts can be imported from."""
    folders = [EXAMPLES]
    for checkout in os.environ.get("CHECKOUTS", "").split():
        folders += [Path(checkout, source).resolve() for source in SOURCES]
    for folder in reversed(folders):
        if folder.is_dir():
            monkeypatch.syspath_prepend(str(folder))

    def load(name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name}: {error}. Install the engine, or name its checkout in CHECKOUTS.")

    return load


def expected_advantages(rewards: list[float]) -> list[float]:
    """The rewards less their mean, as our reference has them."""
    all_kept = Selection(torch.arange(len(rewards))[None])
    return advantages(torch.tensor([rewards], dtype=torch.float64), all_kept, scale="none")[0].tolist()


# -- tinker-cookbook ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tinker(upstream, example):
    """tinker-cookbook's modules by their last name, and the example."""
    modules = {"tinker": upstream("tinker")}
    for name in ("rl.types", "rl.rollouts", "rl.data_processing", "completers", "exceptions"):
        modules[name.rpartition(".")[2]] = upstream(f"tinker_cookbook.{name}")
    return SimpleNamespace(**modules, pods=example("tinker_pods"))


def tinkers_builder(tinker, rewards, tokens):
    """A builder of tinker-cookbook's environments, one for each reward.

    An environment without trained tokens has a prompt that is too long, or a turn that could not be parsed.
    """

    class Env(tinker.types.Env):
        def __init__(self, number):
            self.number = number
            self.reward = rewards[number]
            self.metrics = {"number": float(number)}

        async def initial_observation(self):
            if tokens[self.number] == 0 and self.number % 2:
                return tinker.types.InitialObservationOverflow(reward=self.reward, metrics=self.metrics)
            return tinker.tinker.ModelInput.from_ints([1, 2, 3]), [0]

        async def step(self, action, *, extra=None):
            masked = {tinker.types.PARSE_ERROR_MASKED_METRIC_KEY: 1.0} if tokens[self.number] == 0 else {}
            return tinker.types.StepResult(
                reward=self.reward,
                episode_done=True,
                next_observation=tinker.tinker.ModelInput.empty(),
                next_stop_condition=[0],
                metrics=self.metrics | masked,
            )

    class Builder(tinker.types.EnvGroupBuilder):
        async def make_envs(self):
            return [Env(number) for number in range(len(rewards))]

        async def compute_group_rewards(self, trajectory_group, env_group):
            return [(0.0, {}) for _ in env_group]

    return Builder()


def tinkers_group(tinker, builder, strategy):
    """The group of trajectories that tinker-cookbook would train, by its own loop."""

    class Policy(tinker.completers.TokenCompleter):
        async def __call__(self, model_input, stop, *, max_tokens=None):
            return tinker.completers.TokensWithLogprobs(tokens=[4, 5, 6], maybe_logprobs=[-0.1] * 3)

    return asyncio.run(tinker.rollouts.do_group_rollout(builder, Policy(), strategy))


def test_tinker_cookbook_trains_the_rows_of_every_engine(tinker):
    strategy = tinker.pods.PODSStrategy(m=4)
    for rewards, tokens, kept in zip(same_rows.REWARDS, same_rows.TOKENS, KEPT, strict=True):
        values = [math.nan if reward is None else reward for reward in rewards]
        builder = tinkers_builder(tinker, values, tokens)
        if not kept:
            with pytest.raises(tinker.exceptions.AllTrajectoriesFailedError):
                tinkers_group(tinker, builder, strategy)
            continue
        group = tinkers_group(tinker, builder, strategy)
        numbers = [int(trajectory.transitions[-1].metrics["number"]) for trajectory in group.trajectories_G]
        assert numbers == kept
        (found,) = tinker.data_processing.compute_advantages([group])
        assert found.tolist() == pytest.approx(expected_advantages([values[i] for i in kept]), abs=1e-6)
        data, _ = tinker.data_processing.assemble_training_data([group], [found])
        assert len(data) == len(kept)


# -- prime-rl and verifiers --------------------------------------------------------------------------------------------


@pytest.fixture
def verifiers(upstream):
    """verifiers' package and its resolver of environments."""
    return SimpleNamespace(vf=upstream("verifiers.v1"), loaders=upstream("verifiers.v1.utils.loaders"))


def verifiers_episode(vf, rewards, tokens=(3,) * N, *, has_token_ids=True):
    """An episode with one attempt for each reward; None is an attempt that failed."""
    traces = []
    for reward, count in zip(rewards, tokens, strict=True):
        length = 3 if has_token_ids else 0
        sampled = [i < count for i in range(length)]
        question = vf.MessageNode(message=vf.UserMessage(content="q"), token_ids=[1] * length, mask=[False] * length)
        answer = vf.MessageNode(
            parent=0,
            sampled=True,
            message=vf.AssistantMessage(content="a"),
            token_ids=[2] * length,
            mask=sampled,
            logprobs=[-0.1] * sum(sampled),
        )
        trace = vf.Trace[vf.TaskData](
            task=vf.TraceTask(type="Task", data=vf.TaskData(idx=0, prompt=None)),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=[question, answer],
            rewards={"reward": None if reward is None else vf.Reward(score=reward)},
            ok=reward is not None,
        )
        traces.append(trace)
    return vf.Episode(task=traces[0].task, traces=traces)


def finalized(verifiers, episode):
    """The episode after the environment's judgement, as it arrives at a trainer.

    The environment is the one that verifiers finds by its id, without a taskset, which only its start needs.
    """
    environment = object.__new__(verifiers.loaders.environment_class("", "prime-pods"))
    environment.config = verifiers.loaders.resolve_env_config({"id": "prime-pods", "n": N, "m": 4})
    asyncio.run(environment.finalize(None, episode))
    return verifiers.vf.WireEpisode.model_validate(episode.model_dump(mode="python"))


def marked(episode):
    return [i for i, trace in enumerate(episode.traces) if trace.agent.trainable]


def test_verifiers_marks_the_rows_of_every_engine(verifiers):
    for rewards, tokens, kept in zip(same_rows.REWARDS, same_rows.TOKENS, KEPT, strict=True):
        episode = finalized(verifiers, verifiers_episode(verifiers.vf, rewards, tokens))
        # an episode without any token is that of an evaluation
        assert marked(episode) == (kept if any(tokens) else list(range(N)))


def test_verifiers_marks_nothing_of_an_evaluation(verifiers):
    episode = finalized(verifiers, verifiers_episode(verifiers.vf, [0.0, 1.0] * 8, has_token_ids=False))
    assert marked(episode) == list(range(N))
    assert [trace.metrics["best"] for trace in episode.traces] == [0.0, 1.0] * 8


def test_prime_rl_trains_the_marked_attempts_with_advantages_over_them(verifiers, upstream):
    base = upstream("prime_rl.orchestrator.algo.base")
    grpo = upstream("prime_rl.orchestrator.algo.grpo")
    config = upstream("prime_rl.configs.algorithm").GRPOAlgoConfig()
    for rewards, tokens in zip(same_rows.REWARDS, same_rows.TOKENS, strict=True):
        episode = finalized(verifiers, verifiers_episode(verifiers.vf, rewards, tokens))
        trained = [trace for _, trace in base.iter_trainable_traces([episode])]
        if not any(tokens):
            assert trained == []
            continue
        kept = marked(episode)
        assert [trace.id for trace in trained] == [episode.traces[i].id for i in kept]
        asyncio.run(grpo.GRPOAlgorithm(config, policy_pool=None).finalize_group([episode]))
        expected = expected_advantages([rewards[i] for i in kept])
        for trace, advantage in zip(trained, expected, strict=True):
            assert trace.nodes[1].advantages == pytest.approx([advantage] * 3, abs=1e-6)


# -- OpenRLHF ----------------------------------------------------------------------------------------------------------

# A response of OpenRLHF has at least one token.
WITHOUT_MASKS = [(same_rows.REWARDS[i], KEPT[i]) for i in range(len(KEPT)) if all(same_rows.TOKENS[i])]


@pytest.fixture
def openrlhf(upstream, example, tmp_path):
    """The example, with rewards by the number of the response, and OpenRLHF's own reader of reward functions."""
    upstream("openrlhf.utils.agent")
    module = example("openrlhf_pods")

    def load(rewards: list[float | None]) -> Any:
        # another name each time: Python keeps the compiled file of one that changes within a second
        file = tmp_path / f"reward_{len(list(tmp_path.glob('*.py')))}.py"
        file.write_text(
            f"from math import inf, nan\nREWARDS = {rewards}\n"
            "def reward_func(queries, prompts, labels):\n"
            "    reward = REWARDS[int(queries[0])]\n"
            '    return {"rewards": reward, "scores": reward}\n',
            encoding="utf-8",
        )
        module.REWARD = str(file)
        return module.AgentExecutor()

    return load


class Engine:
    """In place of vLLM: each response is one token, the number of the response to its prompt."""

    def __init__(self) -> None:
        self.responses = 0

    async def generate(self, prompt_ids, sampling_params, multi_modal_data=None):
        self.responses += 1
        output = SimpleNamespace(token_ids=[self.responses - 1], finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[output])


class Tokenizer:
    """In place of a tokenizer: a prompt is three tokens, and a text is its last token."""

    def __call__(self, **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[7, 8, 9]])}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return str(tokens[-1])


async def openrlhfs_responses(executor, *, prompts=1):
    """The responses to prompts at a time, by the calls of OpenRLHF's `generate_responses`."""
    calls = []
    for number in range(prompts):
        # One object for each prompt: OpenRLHF sends it to a worker with the prompt.
        sampling = SimpleNamespace(temperature=1.0, max_tokens=4, logprobs=None)
        engine = Engine()
        request = {"prompt": f"prompt {number}", "label": "", "sampling_params": sampling, "max_length": 16}
        request |= {"hf_tokenizer": Tokenizer(), "llm_engine": engine, "images": None}
        calls.append(asyncio.gather(*(executor.execute(**request) for _ in range(4))))
    return await asyncio.gather(*calls)


@pytest.mark.parametrize(("rewards", "kept"), WITHOUT_MASKS)
def test_openrlhf_receives_the_rows_of_every_engine(openrlhf, rewards, kept):
    executor = openrlhf(rewards)
    for number, responses in enumerate(asyncio.run(openrlhfs_responses(executor, prompts=3))):
        assert sorted(response["observation_tokens"][-1] for response in responses) == kept
        assert {response["prompt"] for response in responses} == {f"prompt {number}"}
    assert executor.groups == {}


def test_openrlhf_receives_the_mean_for_responses_without_a_usable_reward(openrlhf):
    (responses,) = asyncio.run(openrlhfs_responses(openrlhf([0.0, None, 1.0, math.nan, *[math.inf] * 12])))
    assert sorted(response["reward"] for response in responses) == [0.0, 0.5, 0.5, 1.0]
    (responses,) = asyncio.run(openrlhfs_responses(openrlhf([None] * N)))
    assert [response["reward"] for response in responses] == [0.0] * 4


# -- NeMo-RL -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def nemo(upstream):
    """NeMo-RL's modules by their last name; imported with the example's folder in the path."""
    names = (
        "algorithms.advantage_estimator",
        "algorithms.async_utils.replay_buffer",
        "algorithms.async_utils.staleness_sampler",
        "data_plane.adapters.noop",
        "experience.interfaces",
    )
    return SimpleNamespace(**{name.rpartition(".")[2]: upstream(f"nemo_rl.{name}") for name in names})


class NemoBuffer:
    """NeMo-RL's buffer over its storage in memory, with groups of rewards as its rollouts commit them."""

    def __init__(self, nemo, groups):
        self.nemo = nemo
        self.storage = nemo.noop.NoOpDataPlaneClient()
        self.storage.register_partition("rollouts", [], 0, [])
        self.buffer = nemo.replay_buffer.TQReplayBuffer(self.storage, "rollouts", pad_value_dict={"token_ids": 0})
        for number, (rewards, tokens) in enumerate(groups):
            asyncio.run(self.commit(number, rewards, tokens))

    async def commit(self, number, rewards, tokens):
        prompt = [{"role": "user", "content": "q", "token_ids": torch.arange(3 + number) + 1}]
        completions = []
        for reward, count in zip(rewards, tokens, strict=True):
            answer = {"role": "assistant", "content": "a", "token_ids": torch.tensor([4, 5, 6])}
            if count:
                answer["generation_logprobs"] = torch.full((3,), -0.1)  # NeMo-RL trains messages that have these
            value = math.nan if reward is None else reward
            log = [dict(message) for message in prompt] + [answer]
            completions.append(self.nemo.interfaces.Completion(log, None, False, value))
        group = self.buffer.reserve(weight_version=0, target_step=0, group_id=f"group{number}")
        record = self.nemo.interfaces.PromptGroupRecord(number, prompt, None, {}, completions, {})
        await self.buffer.commit(group, record, start_weight_version=0, end_weight_version=0)

    def select(self, **settings):
        """The rows that a step trains, as numbers by group, and their advantages; the other rows of the step."""
        config = {"name": "custom", "target": "nemo_rl_pods:PODSSampler", "m": 4, **settings}
        config = self.nemo.staleness_sampler.CustomSamplerConfig(**config)
        sampler = self.nemo.staleness_sampler.create_sampler(self.buffer, config)
        groups = self.buffer.size()
        limits = {"min_prompt_groups": groups, "max_prompt_groups": groups}
        meta, count = asyncio.run(sampler.select(current_train_weight=0, **limits))
        assert count == groups
        assert meta.size == 4 * groups
        assert set(self.storage._partitions["rollouts"].rows) == set(meta.sample_ids)  # the others are cleared
        fields = ["prompt_ids_for_adv", "total_reward", "token_mask", "sample_mask"]
        data = self.storage.get_samples(meta.sample_ids, "rollouts", fields)
        dense = {}
        for name, values in data.items():
            dense[name] = torch.nested.to_padded_tensor(values, padding=0) if values.is_nested else values
        mask = dense["token_mask"].float() * dense["sample_mask"].reshape(-1, 1)
        config = self.nemo.advantage_estimator.AdvEstimatorConfig(
            normalize_rewards=False, use_leave_one_out_baseline=False
        )
        estimator = self.nemo.advantage_estimator.GRPOAdvantageEstimator(config, None)
        found = estimator.compute_advantage(dense["prompt_ids_for_adv"], dense["total_reward"].flatten(), mask)
        trained = {}
        for name, values, tokens in zip(meta.sample_ids, found, mask, strict=True):
            group, _, row = name.partition("_g")
            if tokens[1:].any():
                trained.setdefault(int(group.removeprefix("group")), {})[int(row)] = float(values[-1])
        assert found.isfinite().all()
        return [trained.get(number, {}) for number in range(groups)]


def assert_trained(trained, groups, kept):
    for values, (rewards, _), rows in zip(trained, groups, kept, strict=True):
        assert list(values) == rows
        expected = expected_advantages([rewards[i] for i in rows]) if rows else []
        assert list(values.values()) == pytest.approx(expected, abs=1e-6)


def test_nemo_rl_trains_the_rows_of_every_engine_with_advantages_over_them(nemo):
    groups = list(zip(same_rows.REWARDS, same_rows.TOKENS, strict=True))
    assert_trained(NemoBuffer(nemo, groups).select(), groups, KEPT)


def test_nemo_rl_trains_the_rows_of_every_engine_over_the_batch(nemo):
    groups = list(zip(same_rows.REWARDS, same_rows.TOKENS, strict=True))
    assert_trained(NemoBuffer(nemo, groups).select(selection="batch"), groups, same_rows.KEPT_OF_BATCH)
