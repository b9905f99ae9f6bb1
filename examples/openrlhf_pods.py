"""PODS in OpenRLHF: of the n responses to each prompt, m are trained.

Needs OpenRLHF with its GPUs, and `pip install --no-deps .` of this repository. Set the constants below, and add to the
arguments of `python -m openrlhf.cli.train_ppo_ray`:

    --train.agent_func_path openrlhf_pods.py
    --rollout.n_samples_per_prompt 4          # M
    --rollout.temperature 1.0                 # TEMPERATURE
    --eval.temperature 0.6                    # another value, by which evaluations are recognized and not down-sampled

OpenRLHF computes its advantages over the m, and its metrics and dynamic filtering are of the m. Penalties of length
come after the selection. It sees one prompt at a time, so it cannot select over the batch.

OpenRLHF needs m rewards of each prompt. If fewer are usable, others get the mean of the usable ones, which is an
advantage of 0 with every estimator that compares the responses to a prompt.
"""

import asyncio

from openrlhf.utils.agent import SingleTurnAgentExecutor

from pods_rl import select
from pods_rl.engines.measuring import pad_rewards

NUM_ROLLOUTS = 16
M = 4
TEMPERATURE = 1.0
REWARD = "reward_func.py"  # a file with a reward_func, or an address, as in --reward.remote_url


class AgentExecutor(SingleTurnAgentExecutor):
    """Generate n responses to a prompt, and return the m with maximal reward variance, one from each call."""

    def __init__(self):
        super().__init__(REWARD)
        self.groups = {}

    async def execute(self, **request):
        generate = super().execute
        sampling = request["sampling_params"]
        if sampling.temperature != TEMPERATURE:
            return await generate(**request)
        # OpenRLHF calls this m times for a prompt, at once and with one object, which is not that of another prompt.
        if id(sampling) not in self.groups:
            generations = [generate(**request) for _ in range(NUM_ROLLOUTS)]
            self.groups[id(sampling)] = asyncio.ensure_future(keep(generations))
        kept = await self.groups[id(sampling)]
        response = kept.pop()
        if not kept:
            del self.groups[id(sampling)]
        return response


async def keep(generations):
    """Return M of the responses; those without a usable reward only if there are too few others."""
    responses = await asyncio.gather(*generations)
    trained = [any(end > start for start, end in response["action_ranges"]) for response in responses]
    rewards_1N = pad_rewards([[response["reward"] for response in responses]], [trained])
    selection = select(rewards_1N, M)
    kept_rewards_M = selection.take(rewards_1N)[0]
    mean = kept_rewards_M.nanmean().nan_to_num(0.0).item()  # 0 without a usable reward
    kept = [responses[i] for i in selection.indices[0].tolist()]
    for response, is_unusable in zip(kept, kept_rewards_M.isnan().tolist(), strict=True):
        if is_unusable:
            response.update(reward=mean, scores=mean)
    return kept
