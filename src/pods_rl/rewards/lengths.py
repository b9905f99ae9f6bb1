"""A penalty for completions that nearly run out of tokens."""

from __future__ import annotations


def overlong(tokens: int, limit: int, buffer: int | None = None) -> float:
    """Give 0.0 for a completion of up to `limit - buffer` tokens, falling evenly to -1.0 at `limit`.

    Source: DAPO (arXiv 2503.14476), equation 13. Range [-1, 0].

    `tokens` is the length of a completion, `limit` the most it can have, `buffer` the tokens before that over which the
    penalty grows: a fifth of the limit where it is None (DAPO: 4096 before 20480). A buffer beyond the limit is
    cut to it. Raises ValueError where a limit or buffer is below 1.

    >>> overlong(80, 100), overlong(90, 100), overlong(100, 100), overlong(90, 100, buffer=40)
    (0.0, -0.5, -1.0, -0.75)
    """
    buffer = max(1, limit // 5) if buffer is None else min(buffer, limit)
    if limit < 1 or buffer < 1:
        raise ValueError(f"overlong came with limit {limit} and buffer {buffer} tokens; give at least 1 of each")
    return max(-1.0, min(0.0, (limit - buffer - tokens) / buffer))
