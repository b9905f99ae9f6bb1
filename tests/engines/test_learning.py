"""PODS learns: a reward that a random policy seldom gets rises within a few steps."""

from __future__ import annotations

import statistics

import pytest


def vowels(completions, **_):
    """Share of characters that are vowels."""
    return [sum(c in "aeiouAEIOU" for c in text) / max(1, len(text)) for text in completions]


@pytest.mark.slow
def test_the_reward_rises(make_trainer):
    trainer = make_trainer(reward=vowels, num_rollouts=16, max_steps=40, learning_rate=1e-2, max_completion_length=8)
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert statistics.mean(rewards[-5:]) > statistics.mean(rewards[:5]) + 0.3
