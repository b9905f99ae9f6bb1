"""PODS in ROLL: of the n responses to each prompt, m are trained.

Needs ROLL with its GPUs, and `pip install --no-deps .` of this repository. In the configuration of an RLVR pipeline:

    user_defined_rollout_loop_cls: roll_pods.PODSRolloutLoop   # with this folder in PYTHONPATH
    num_return_sequences_in_group: 4                           # m: batches and groups are derived from it

NUM_ROLLOUTS below is n. ROLL normalises advantages over the m responses that this class returns, and its query filters
see all n. Without the test of `is_val` evaluations would be down-sampled too: they would score the best and the worst.
A prompt with fewer than m usable responses is dropped, and ROLL takes another one: ROLL needs m of each prompt.

With `max_len_mask` ROLL masks responses of full length out of the loss after they are returned, so they count as
unusable here. Leave `error_max_len_clip` and `difficulty_mask` off: they mask kept responses too.
"""

import torch
from roll.distributed.scheduler.user_defined_rollout_loop import UserDefinedRolloutLoop

from pods_rl import select
from pods_rl.engines.measuring import pad_rewards

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
        rewards = torch.cat([response.batch["response_level_rewards"] for response in responses]).tolist()
        masks_full_length = context.pipeline_config.max_len_mask
        rewards_1N = pad_rewards([rewards], [[is_trained(response, masks_full_length) for response in responses]])
        selection = select(rewards_1N, m)
        if selection.take(rewards_1N).isnan().any():
            return None
        return [responses[number] for number in selection.indices[0].tolist()]


def is_trained(response, masks_full_length):
    """Return whether a token of a response is in ROLL's loss: response masks leave out the first token's place."""
    tokens = int(response.batch["response_mask"][:, 1:].sum())
    is_full = tokens == response.batch["responses"].shape[-1]
    return tokens > 0 and not (masks_full_length and is_full)
