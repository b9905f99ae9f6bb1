"""PODS in slime: of the n rollouts of each prompt, m are trained.

Needs slime with its GPUs, and `pip install --no-deps .` of this repository. Add to the arguments of its `train.py`:

    --n-samples-per-prompt 16                                      # n
    --global-batch-size 32                                         # prompts of an optimizer step x m
    --rollout-sample-filter-path slime_pods.keep                   # m of n
    --custom-reward-post-process-path slime_pods.normalize         # advantages over those m
    --lr-decay-iters 1000                                          # optimizer steps, if the rate decays

with this folder in PYTHONPATH. Without `normalize` slime sees fewer rows than it generated and normalises the rewards
over the whole batch instead of each group: training goes on, with wrong advantages. Without `--lr-decay-iters` it
counts n rows a prompt, and a learning rate decays n / m times too slowly. Evaluations are not down-sampled.
"""

import torch

from pods_rl import Selection, advantages, select

M = 4


def keep(args, groups):
    """Shorten each group in place to the M rollouts with maximal reward variance."""
    for group in groups:
        rewards_1N = torch.tensor([[sample.get_reward_value(args) for sample in group]], dtype=torch.float64)
        kept = select(rewards_1N, M).indices[0].tolist()
        group[:] = [group[number] for number in kept]


def normalize(args, samples):
    """Return the rewards of the kept rollouts, prompt by prompt, and their advantages."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    rewards_PM = torch.tensor(rewards, dtype=torch.float64).view(-1, M)
    all_kept = Selection(torch.arange(M).repeat(len(rewards_PM), 1))
    return rewards, advantages(rewards_PM, all_kept).flatten().tolist()
