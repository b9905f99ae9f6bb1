"""PODS in tinker-cookbook: of the n trajectories of each prompt, m are trained.

Needs tinker-cookbook with its key, and `pip install --no-deps .` of this repository. In your recipe, with this folder
in PYTHONPATH:

    config = train.Config(
        dataset_builder=...,                              # its group_size is n
        rollout_error_tolerance=PODSStrategy(m=4),        # m of n
        remove_constant_reward_groups=True,               # else groups of equal rewards stay, with advantages of 0
        ...,
    )

tinker-cookbook subtracts from each reward the mean of the m. `env/all/*` are metrics of the m too.

- Evaluations use the same strategy. It changes nothing of a group of at most m trajectories, and the cookbook's own
  test sets have groups of one. Give yours at most m, or the best and the worst of them are scored.
- A reward that the builder computes for the complete group is computed twice: of the n to select, of the m to train.
- `termination` lowers rewards after the selection, which does not see it.
- The strategy sees one group at a time, so it cannot select over the batch.
"""

from dataclasses import dataclass, field

from tinker_cookbook.exceptions import AllTrajectoriesFailedError
from tinker_cookbook.rl.rollout_strategy import FailFast, RolloutResult, RolloutStrategy
from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, TrajectoryGroup

from pods_rl import select
from pods_rl.engines.measuring import pad_rewards


@dataclass(frozen=True)
class PODSStrategy(RolloutStrategy):
    """Collect n trajectories as another strategy does, and return the m with maximal reward variance.

    A trajectory whose reward is NaN or infinite, or of which no token is trained, is never returned: a group may be
    smaller than m. Without any other the group is dropped, as tinker-cookbook drops one whose trajectories all failed.
    """

    m: int
    collect: RolloutStrategy = field(default_factory=FailFast)  # or RetryOnFailure(), MinViableGroup()

    @property
    def catches_group_errors(self):
        return self.collect.catches_group_errors

    async def execute(self, env_group_builder, policy):
        result = await self.collect.execute(env_group_builder, policy)
        if len(result.trajectories) <= self.m:
            return result
        graded = await env_group_builder.compute_group_rewards(result.trajectories, result.envs)
        group_rewards = [reward for reward, _ in graded]
        group = TrajectoryGroup(result.trajectories, group_rewards, [metrics for _, metrics in graded])
        trained = [is_trained(trajectory) for trajectory in result.trajectories]
        rewards_1N = pad_rewards([group.get_total_rewards()], [trained])
        kept = [i for i in select(rewards_1N, self.m).indices[0].tolist() if not rewards_1N[0, i].isnan()]
        if not kept:
            raise AllTrajectoriesFailedError(f"none of {len(trained)} trajectories has a usable reward and a token")
        return RolloutResult([result.trajectories[i] for i in kept], [result.envs[i] for i in kept], result.errors)


def is_trained(trajectory):
    """Return whether a token of a trajectory is in the loss: tinker-cookbook masks turns that it could not parse."""
    for transition in trajectory.transitions:
        is_masked = transition.metrics.get(PARSE_ERROR_MASKED_METRIC_KEY, 0.0) >= 1.0
        if transition.ac.tokens and not is_masked:
            return True
    return False
