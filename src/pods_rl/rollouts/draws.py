"""Random numbers that depend on a key alone, so that a rollout does not depend on its batch, wave or process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def uniforms(key: Sequence[int], count: int) -> np.ndarray:
    """Return `count` draws in [0, 1), float32, that depend on `key` alone; a longer call begins with the same draws.

    Args:
        key: whole numbers of at least 0: seed, generation, prompt, number.

    >>> bool((uniforms((0, 1), 8)[:3] == uniforms((0, 1), 3)).all())
    True
    """
    return np.random.default_rng(tuple(key)).random(count, dtype=np.float32)
