"""PODS in ROLL: of the n responses to each prompt, m are trained.

Needs ROLL with its GPUs, and `pip install --no-deps .` of this repository. In the configuration of an RLVR pipeline:

    user_defined_rollout_loop_cls: roll_pods.PODSRolloutLoop   # with this folder in PYTHONPATH
    num_return_sequences_in_group: 4                           # m: batches and groups are derived from it

NUM_ROLLOUTS below is n. ROLL normalises advantages over the m responses that this class returns, and its query filters
see all n. Without the test of `is_val` evaluations would be down-sampled too: they would score the best and the worst.
"""

import torch
from roll.distributed.scheduler.user_defined_rollout_loop import UserDefinedRolloutLoop

from pods_rl import select

NUM_ROLLOUTS = 16


class PODSRolloutLoop(UserDefinedRolloutLoop):
    """Generate n responses to a prompt, and return the m with maximal reward variance."""

    async def process_new_prompt(self, context):
        """Return m of n responses; None, as ROLL's own loop returns it, if the prompt is dropped."""
        sampling = context.meta_info["generation_config"]  # a copy of this prompt's own
        m = sampling["num_return_sequences"]
        if not context.is_val:
            sampling["num_return_sequences"] = NUM_ROLLOUTS
        responses = await super().process_new_prompt(context)
        if responses is None or context.is_val:
            return responses
        rewards = torch.cat([response.batch["response_level_rewards"] for response in responses])
        kept = select(rewards.double().unsqueeze(0), m).indices[0].tolist()
        return [responses[number] for number in kept]
