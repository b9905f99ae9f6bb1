"""PODS in NeMo-RL: of the n rollouts of each prompt, m are trained.

Needs NeMo-RL with its GPUs, and `pip install --no-deps .` of this repository in its environment. In the configuration
of its `examples/run_grpo_single_controller.py`, with this folder in PYTHONPATH:

    grpo:
      num_generations_per_prompt: 16      # n; policy.train_global_batch_size stays prompts of a step x n
    async_rl:
      sampler:
        name: custom
        target: nemo_rl_pods:PODSSampler
        m: 4
        selection: prompt                 # or batch: m in the mean, over all prompts of a step
        max_lookahead_versions: 1
      min_groups_for_streaming_train: ${grpo.num_prompts_per_step}   # a step at a time, which `batch` needs

NeMo-RL computes log-probabilities and advantages of the kept rollouts only, and `rewards` in its metrics are theirs.

- The number of kept rollouts, prompts x m, is a multiple of the data-parallel size.
- NeMo-RL compares rollouts with equal prompts: two groups of one prompt in a step are one group to it.
- The single controller has no validation, so there is none that could be down-sampled.
- `_call_dp` is the one call here that NeMo-RL does not document for samplers.
"""

from itertools import groupby

import torch
from nemo_rl.algorithms.async_utils.staleness_sampler import InOrderSampler
from tensordict import TensorDict

from pods_rl import select, select_batch
from pods_rl.engines.measuring import pad_rewards


class PODSSampler(InOrderSampler):
    """Take groups in the order of their steps, and return of them the rollouts with maximal reward variance.

    Each call returns m rollouts for each of its prompts. One without a usable reward or a trained token is only kept
    to fill up a call that has too few others. Nothing of it is trained, and no other is compared with it.
    """

    def __init__(self, buffer, *, m, selection="prompt", max_lookahead_versions=1):
        super().__init__(buffer, max_lookahead_versions=max_lookahead_versions)
        if selection not in ("prompt", "batch"):
            raise ValueError(f"selection must be prompt or batch; got {selection!r}.")
        self.m = m
        self.selection = selection

    async def select(self, **limits):
        """Return the metadata of the kept rollouts, and the number of groups that they are from."""
        meta, num_groups = await super().select(**limits)
        if meta is None:
            return meta, num_groups
        data = await self.call("get_samples", meta, select_fields=["total_reward", "token_mask", "prompt_ids_for_adv"])
        groups = groups_of(meta)
        rewards_PN = usable_rewards(groups, data)
        kept_PN = self.kept_rollouts(rewards_PN) & ~rewards_PN.isnan()
        kept = []
        others = []
        for p, rows in enumerate(groups):
            for i, row in enumerate(rows):
                (kept if kept_PN[p, i] else others).append(row)
        fillers = others[: self.m * num_groups - len(kept)]
        for row in fillers:
            await self.leave_out(meta.subset([row]), data["prompt_ids_for_adv"][row])
        rest = meta.drop([*kept, *fillers])
        if rest is not None:
            await self.call("clear_samples", rest)
        return meta.subset(sorted([*kept, *fillers])), num_groups

    def kept_rollouts(self, rewards_PN):
        """Return which rollouts the rule keeps, bool `[P, N]`; over a batch there may be fewer than m times P."""
        if self.selection == "batch":
            return select_batch(rewards_PN, self.m * len(rewards_PN)).mask()
        return select(rewards_PN, self.m).mask(rewards_PN.shape[1])

    async def leave_out(self, row, prompt_ids):
        """Have NeMo-RL train nothing of a rollout, and compare no other with it: its prompt becomes another one."""
        fields = {
            "total_reward": torch.zeros(1),
            "sample_mask": torch.zeros(1),
            "prompt_ids_for_adv": -1 - prompt_ids[None],
        }
        await self.call("put_samples", row, fields=TensorDict(fields, batch_size=[1]))

    async def call(self, method, meta, **more):
        """Call NeMo-RL's storage of rollouts for the rows of `meta`."""
        return await self._buffer._call_dp(method, sample_ids=meta.sample_ids, partition_id=meta.partition_id, **more)


def groups_of(meta):
    """Return the rows of each group: NeMo-RL names a rollout GROUP_gNUMBER."""
    rows = range(meta.size)
    return [list(group) for _, group in groupby(rows, key=lambda row: meta.sample_ids[row].rpartition("_g")[0])]


def usable_rewards(groups, data):
    """Return the rewards of groups of rows, `[P, N]`, NaN where a rollout cannot be trained on."""
    rewards = data["total_reward"].flatten().tolist()
    # the first token is of the prompt: NeMo-RL's loss leaves out its place
    trained = [bool(mask[1:].any()) for mask in data["token_mask"].unbind()]
    return pad_rewards(
        [[rewards[row] for row in rows] for rows in groups],
        [[trained[row] for row in rows] for rows in groups],
    )
