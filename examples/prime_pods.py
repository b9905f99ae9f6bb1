"""PODS in prime-rl: an environment of verifiers that makes n attempts at each task, of which m are trained.

Needs prime-rl with its GPUs, and `pip install --no-deps .` of this repository in its environment. In the configuration
of its `rl` command, with this folder in PYTHONPATH:

    [orchestrator]
    batch_size = 128                    # trained attempts: tasks of a step x m
    group_size = 1                      # episodes of a task; an episode has all n attempts

    [[orchestrator.train.source]]
    [orchestrator.train.source.env]
    id = "prime-pods"
    n = 16
    m = 4
    max_concurrent_agents = 16          # 1 by default: the attempts of an episode would wait for each other
    agent.retries.max_retries = 2       # if one attempt fails, prime-rl trains nothing of its episode
    taskset.id = "reverse-text"         # and the rest as for one agent

prime-rl subtracts from each reward the mean of the m. Its `effective` metrics and its difficulty pools are of the m,
and its `all` metrics of the n.

- A task of equal rewards fills m places of a batch with advantages of 0, unless a gate `advantage_range` rejects it.
- Evaluations carry no token ids. They are recognized by that, and all n of their attempts count.
- `finalize` sees one task at a time, so it cannot select over the batch.
"""

import verifiers.v1 as vf
from pydantic import Field, model_validator
from verifiers.v1.envs.best_of_n import BestOfNEnv, BestOfNEnvConfig

from pods_rl import select
from pods_rl.engines.measuring import pad_rewards

__all__ = ["PODSEnv"]  # verifiers looks for the environment here


class PODSEnvConfig(BestOfNEnvConfig):
    n: int = Field(16, ge=1)
    m: int = Field(4, ge=1)

    @model_validator(mode="after")
    def check_sizes(self):
        if self.m > self.n:
            raise ValueError(f"m must be at most n: got {self.m} and {self.n}.")
        return self


class PODSEnv(BestOfNEnv, vf.Env[PODSEnvConfig]):
    """Make n attempts at a task, and mark the m with maximal reward variance as those to train.

    An attempt whose reward is NaN or infinite, or without a sampled token, is never marked: a task may have fewer.
    """

    async def finalize(self, task, episode):
        await super().finalize(task, episode)
        trained = [is_trained(trace) for trace in episode.traces]
        if not any(trained):  # an evaluation
            return
        rewards_1N = pad_rewards([[trace.reward for trace in episode.traces]], [trained])
        kept_1N = select(rewards_1N, self.config.m).mask(len(trained)) & ~rewards_1N.isnan()
        for trace, is_kept in zip(episode.traces, kept_1N[0].tolist(), strict=True):
            trace.agent.trainable = is_kept


def is_trained(trace):
    """Return whether prime-rl trains a token of an attempt."""
    return not trace.has_error and any(any(node.mask) for node in trace.nodes)
