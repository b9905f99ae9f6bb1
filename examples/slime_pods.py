"""PODS in slime: of the n rollouts of each prompt, m are trained.

Needs slime with its GPUs, and `pip install --no-deps .` of this repository. Add to the arguments of its `train.py`:

    --n-samples-per-prompt 16                                      # n
    --global-batch-size 32                                         # prompts of an optimizer step x m
    --rollout-sample-filter-path slime_pods.keep                   # m of n
    --custom-reward-post-process-path slime_pods.normalize         # advantages over those m
    --lr-decay-iters 1000                                          # optimizer steps, if the rate decays

with this folder in PYTHONPATH. Without `normalize` slime sees fewer rows than it generated and normalises the rewards
over the complete batch instead of each group: training continues with wrong advantages. Without `--lr-decay-iters` it
counts n rows a prompt, and a learning rate decays n / m times too slowly. Evaluations are not down-sampled.

`normalize` replaces slime's own function and follows the same options: `--advantage-estimator`,
`--disable-rewards-normalization` and `--disable-grpo-std-normalization`. `--log-passrate` is refused: slime computes it
from n rows of each prompt, and has m.

With SELECTION = "batch" the same number of rows is chosen among all rollouts of a generation: more of some prompts, and
none of those whose rewards are all equal.
"""

import math
from itertools import groupby

import torch

from pods_rl import Selection, advantages, select, select_batch
from pods_rl.engines.measuring import pad_rewards

M = 4
SELECTION = "prompt"  # M of each prompt; "batch": M times the prompts among all

# slime's estimators that compare the rewards of a group; the others train with the rewards as they are.
SCALED = ("grpo", "gspo", "cispo")
CENTRED = (*SCALED, "reinforce_plus_plus_baseline")


def keep(args, groups):
    """Replace each group by the rollouts with maximal reward variance: M of it, or over the batch any number.

    A rollout without a usable reward (None, NaN or infinite) or without a trained token is kept only to fill a group,
    or the batch, that has too few others. Nothing of it is trained then.
    """
    if args.log_passrate:
        raise ValueError(f"--log-passrate expects n rows of each prompt, and {M} are kept. Leave it out.")
    if any(isinstance(sample, list) for group in groups for sample in group):
        raise ValueError("a rollout has several samples (a custom generate function), and PODS keeps single ones.")
    rewards_PN = usable_rewards(args, groups)
    kept_PN = kept_rollouts(rewards_PN)
    fillers = M * len(groups) - int(kept_PN.sum())
    for number, samples in enumerate(groups):
        kept = []
        for place, sample in enumerate(samples):
            is_filler = fillers > 0 and not kept_PN[number, place]
            if is_filler:
                fillers -= 1
            if is_filler or (kept_PN[number, place] and rewards_PN[number, place].isnan()):
                leave_out(args, sample)
            if is_filler or kept_PN[number, place]:
                kept.append(sample)
        # a new list: slime also holds the complete group, for --rollout-all-samples-process-path
        groups[number] = kept


def kept_rollouts(rewards_PN):
    """Return which rollouts the rule keeps, bool `[P, N]`; over a batch there may be fewer than M times P."""
    if SELECTION == "batch":
        return select_batch(rewards_PN, M * len(rewards_PN)).mask()
    return select(rewards_PN, M).mask(rewards_PN.shape[1])


def normalize(args, samples):
    """Return the rewards of the kept rollouts, prompt by prompt, and what slime makes of them: their advantages."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    if args.advantage_estimator not in CENTRED or not args.rewards_normalization:
        return rewards, rewards
    groups = [list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)]
    rewards_PM = usable_rewards(args, groups)  # NaN where a group has fewer rows than another
    all_kept = Selection(torch.arange(rewards_PM.shape[1]).repeat(len(groups), 1))
    is_scaled = args.advantage_estimator in SCALED and args.grpo_std_normalization
    scale = "group" if is_scaled else "none"
    advantages_PM = advantages(rewards_PM, all_kept, scale=scale).tolist()
    return rewards, [advantages_PM[p][place] for p, group in enumerate(groups) for place in range(len(group))]


def usable_rewards(args, groups):
    """Return the rewards of groups of samples, `[P, N]`, NaN where a sample cannot be trained on."""
    rewards = []
    trained = []
    for group in groups:
        rewards.append([None if sample.reward is None else sample.get_reward_value(args) for sample in group])
        trained.append([trained_tokens(sample) > 0 for sample in group])
    return pad_rewards(rewards, trained)


def trained_tokens(sample):
    """Return how many tokens of a sample slime trains."""
    if sample.remove_sample:
        return 0
    if sample.loss_mask is None:
        return sample.response_length
    return sum(sample.loss_mask)


def leave_out(args, sample):
    """Have slime train no token of a sample, and give it a reward that slime can log."""
    sample.remove_sample = True
    reward = None if sample.reward is None else sample.get_reward_value(args)
    if reward is None or not math.isfinite(reward):
        sample.reward = {**(sample.reward or {}), args.reward_key: 0.0} if args.reward_key else 0.0
