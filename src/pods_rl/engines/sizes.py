"""n and m, the rollouts generated and trained of each prompt, as every engine checks them. Does not import torch."""

from __future__ import annotations

from typing import Any

from ..errors import UserError


def check_sizes(
    n: Any, m: Any, *, n_key: str = "num_rollouts", m_key: str = "num_generations", least: int = 1
) -> tuple[int, int]:
    """Return n and m, under the names that the user has for them.

    Raises:
        UserError: a number that is not whole, m below `least` (2 where the kept rows are compared), or n below m.

    >>> check_sizes(2, 4, m_key="generator.n")
    Traceback (most recent call last):
    pods_rl.errors.UserError: num_rollouts = 2 is less than generator.n = 4: cannot keep 4 of 2 rollouts. ...
    """
    m = whole_number(m_key, m, least, why="a single row has no advantage" if least == 2 else "")
    n = whole_number(n_key, n)
    if n < m:
        raise UserError(
            f"{n_key} = {n} is less than {m_key} = {m}: cannot keep {m} of {n} rollouts. {n_key} is n, generated per "
            f"prompt; {m_key} is m, trained on. Raise {n_key} to {m} or more, or lower {m_key} to {max(n, least)} or "
            "less."
        )
    return n, m


def whole_number(key: str, value: Any, least: int = 1, *, why: str = "") -> int:
    """Return the value; raise UserError, with the reason `why`, unless it is a whole number of at least `least`.

    >>> whole_number("pods.seed", 3)
    3
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        reason = f" ({why})" if why else ""
        raise UserError(f"{key} = {value!r}: expected a whole number of at least {least}{reason}.")
    return value
