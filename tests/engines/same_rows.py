"""Groups that every engine must decide on in the same way: rewards, which rollouts have a trained token, what is kept.

`tests/engines/test_same_rows.py` gives them to TRL, `tests/verl` and `tests/skyrl` to these libraries.
"""

import math

N = 16
M = 4

# Of each group: the reward and the trained tokens of each rollout, by hand: 3 unless its number is in `masked`.
_REWARDS = {
    "six failed with reward 0, ten are right": [0.0] * 6 + [1.0] * 10,
    "the best and the worst are masked": [-9.0, 0.0, 1.0, 9.0, 0.5, 0.25, 0.5, 0.75, 0.0, 1.0, 0.5, 9.0, *[0.5] * 4],
    "no masks": [0.0, 1.0] * 8,
    "not numbers, or too large": [
        math.nan,
        math.inf,
        None,
        1e20,
        0.0,
        -math.inf,
        1.0,
        0.5,
        0.25,
        *[math.nan] * 7,
    ],
    "as many as are kept": [0.1, 0.2, 0.3, 0.4, *[1.0] * 12],
    "three usable": [0.0, 1.0, 0.5, *[0.0] * 13],
    "one usable": [1.0, *[0.0] * 15],
    "none usable": [0.0, 1.0] * 8,
}
_MASKED = {
    "six failed with reward 0, ten are right": range(6),
    "the best and the worst are masked": (0, 3, 11),
    "as many as are kept": range(4, 16),
    "three usable": range(3, 16),
    "one usable": range(1, 16),
    "none usable": range(16),
}
NAMES = list(_REWARDS)
REWARDS = list(_REWARDS.values())
TOKENS = [[0 if i in _MASKED.get(name, ()) else 3 for i in range(N)] for name in NAMES]

# The usable rollouts that max_variance keeps: the two highest and the two lowest, the lower number first.
KEPT = [
    [6, 7, 8, 9],
    [1, 2, 8, 9],
    [0, 1, 2, 3],
    [4, 6, 7, 8],
    [0, 1, 2, 3],
    [0, 1, 2],
    [0],
    [],
]

# What max_variance keeps over the batch, 4 x 8 of the 40 rollouts that are usable and whose group is not constant.
KEPT_OF_BATCH = [
    [],
    [1, 2, 5, 7, 8, 9],
    list(range(16)),
    [4, 6, 7, 8],
    [0, 1, 2, 3],
    [0, 1],
    [],
    [],
]


def usable(group: int, rollout: int) -> bool:
    """Whether a rollout can be trained on, written out as no engine does."""
    reward = REWARDS[group][rollout]
    return TOKENS[group][rollout] > 0 and reward is not None and -1e15 <= reward <= 1e15
