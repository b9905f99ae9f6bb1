"""The types `Rule` and `Selection`, and shared checks of rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..errors import UserError

# Engines treat larger rewards as unscored: their float32 variance would overflow in a group of 1024.
REWARD_LIMIT = 1e15


class Rule(Protocol):
    """Which m of n rollouts to keep: rewards `[P, N]` to int64 indices `[P, M]`, distinct within a row."""

    def __call__(self, rewards_PN: Tensor, m: int, /, *, generator: torch.Generator | None = None) -> Tensor: ...


class RuleError(UserError, TypeError):
    """A rule that cannot be called, raises, or does not return m different rollouts of each prompt."""


if TYPE_CHECKING:
    RuleOrName = str | Rule
else:
    RuleOrName = str  # the type of a configuration's field: a command line can give a name alone


@dataclass(frozen=True, eq=False)
class Selection:
    """The rollouts kept of each prompt.

    Args:
        indices: int64 `[P, M]`, rollouts of the prompt's own group, 0 to n - 1, distinct within a row.

    Raises:
        TypeError: not a dense int64 tensor with values.
        ValueError: another shape, a negative index, or one that is repeated within a row.

    >>> Selection(torch.tensor([[0, 2]])).mask(4)
    tensor([[ True, False,  True, False]])
    """

    indices: Tensor

    def __post_init__(self) -> None:
        check_tensor("Selection.indices", self.indices)
        if self.indices.dtype != torch.int64:
            raise TypeError(f"Selection.indices must be an int64 tensor [P, M]; got {describe(self.indices)}.")
        if self.indices.ndim != 2 or self.indices.shape[1] == 0:
            raise ValueError(f"Selection.indices must have shape [P, M], M >= 1; got {describe(self.indices)}.")
        ascending_PM = self.indices.sort(dim=1).values
        bad_P = (ascending_PM[:, 0] < 0) | (ascending_PM.diff(dim=1) == 0).any(dim=1)
        if bad_P.any():
            group = int(bad_P.nonzero()[0])
            raise ValueError(
                "Selection.indices must be different rollouts of each prompt, counted from 0; for group "
                f"{group} they are {self.indices[group].tolist()}."
            )

    def mask(self, n: int) -> Tensor:
        """Return bool `[P, N]`, true where a rollout is kept.

        Args:
            n: rollouts generated per prompt; an index of n or more is a ValueError.
        """
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"n, the rollouts generated of each prompt, must be an int; got {n!r} ({describe(n)}).")
        self._check_range(n)
        mask_PN = torch.zeros(self.indices.shape[0], n, dtype=torch.bool, device=self.indices.device)
        return mask_PN.scatter_(1, self.indices, True)

    def take(self, values_PN: Tensor) -> Tensor:
        """Return the kept rollouts' values, `[P, M]`, of any values `[P, N]`.

        Raises:
            TypeError: values that are not a dense tensor with values.
            ValueError: values with a different number of prompts or on another device, or an index out of their range.

        >>> Selection(torch.tensor([[2, 0]])).take(torch.tensor([[5.0, 6.0, 7.0]]))
        tensor([[7., 5.]])
        """
        check_tensor("values", values_PN)
        if values_PN.ndim != 2 or values_PN.shape[0] != self.indices.shape[0]:
            raise ValueError(
                f"a selection of {self.indices.shape[0]} prompts needs values [{self.indices.shape[0]}, N]; "
                f"got {describe(values_PN)}."
            )
        check_device("values", values_PN, "the selection", self.indices)
        self._check_range(values_PN.shape[1])
        return values_PN.gather(1, self.indices)

    def _check_range(self, n: int) -> None:
        if (self.indices >= n).any():
            low = int(self.indices.min())
            high = int(self.indices.max())
            raise ValueError(f"indices must lie between 0 and n - 1 = {n - 1}; got {low} to {high}.")


def describe(value: Any) -> str:
    """Describe a value for an error message.

    >>> describe(torch.zeros(2, 3)), describe([1.0, 2.0])
    ('a torch.float32 tensor of shape [2, 3]', 'a list')
    """
    if isinstance(value, Tensor):
        if value.is_nested:  # it has no shape
            return f"a nested {value.dtype} tensor"
        kind = f"{value.dtype} tensor of shape {list(value.shape)}"
        if value.layout != torch.strided:
            return f"a {_layout(value)} {kind}"
        if value.is_meta:
            return f"a {kind} without values (on the device meta)"
        return f"a {kind}"
    if value is None:
        return "None"
    name = type(value).__name__
    article = "an" if name[0].lower() in "aeiou" else "a"
    return f"{article} {name}"


def _layout(value: Tensor) -> str:
    return str(value.layout).removeprefix("torch.").removeprefix("_")


def check_tensor(name: str, value: Any) -> None:
    """Raise TypeError unless an argument is a dense tensor with values: not sparse, nested, quantised or on "meta".

    >>> check_tensor("mask", [[1, 0]])
    Traceback (most recent call last):
    TypeError: mask must be a tensor; got a list. Pass torch.tensor(mask).
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor; got {describe(value)}. Pass torch.tensor({name}).")
    if value.is_nested:
        raise TypeError(f"{name} must be a dense tensor; got {describe(value)}. Pass {name}.to_padded_tensor(padding).")
    if value.is_quantized:
        raise TypeError(f"{name} must not be quantised; got {describe(value)}. Pass {name}.dequantize().")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor; got {describe(value)}. Pass {name}.to_dense().")
    if value.is_meta:
        raise TypeError(f"{name} must have values; got {describe(value)}. Compute it on a CPU or an accelerator.")


def check_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless two tensors are on the same device."""
    if value.device != other.device:
        raise ValueError(
            f"{name} must be on the device of {other_name}, {other.device}; got {value.device}. Move one of them with "
            ".to(device)."
        )


def check_not_negative(name: str, value: Any) -> None:
    """Raise unless an argument is a finite number of at least 0.

    >>> check_not_negative("epsilon", -1)
    Traceback (most recent call last):
    ValueError: epsilon must be a finite number of at least 0; got -1.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number; got {value!r} ({describe(value)}).")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0; got {value!r}.")


def check_generator(generator: Any) -> None:
    """Raise TypeError unless a source of random draws is a torch.Generator or None.

    >>> check_generator(3)
    Traceback (most recent call last):
    TypeError: generator must be a torch.Generator or None; got 3. Pass torch.Generator().manual_seed(seed).
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator or None; got {generator!r}. Pass torch.Generator().manual_seed(seed)."
        )


def check_rewards(rewards_PN: Tensor) -> tuple[Tensor, bool]:
    """Return the rewards detached, in float32 or float64, and whether all are scored (not NaN).

    Args:
        rewards_PN: `[P, N]`, any real dtype. float64 stays; float32 and half precision become float32,
            integers and booleans float64, so no order or tie changes (integers up to 2^53).

    Raises:
        TypeError: not a dense tensor with values (`check_tensor`), or complex numbers.
        ValueError: not two axes, no rollouts, or an infinite reward (one device synchronisation finds it).

    >>> check_rewards(torch.tensor([[True, False]]))
    (tensor([[1., 0.]], dtype=torch.float64), True)
    """
    check_tensor("rewards", rewards_PN)
    if rewards_PN.is_complex():
        raise TypeError(f"rewards must be real numbers; got {describe(rewards_PN)}. Pass rewards.real.")
    if rewards_PN.ndim != 2 or rewards_PN.shape[1] == 0:
        raise ValueError(
            f"rewards must have shape [prompts, rollouts], at least one rollout; got {describe(rewards_PN)}. "
            "For one group pass rewards[None]; for a flat list of rows pass rewards.view(-1, num_rollouts)."
        )
    fits_float32 = rewards_PN.is_floating_point() and rewards_PN.dtype != torch.float64
    rewards_PN = rewards_PN.detach().float() if fits_float32 else rewards_PN.detach().double()
    # One sum is far cheaper than a check of each reward; it is finite only if all rewards are.
    if rewards_PN.sum().isfinite():
        return rewards_PN, True
    infinite = rewards_PN.isinf().nonzero().tolist()
    if infinite:
        group, rollout = infinite[0]
        raise ValueError(
            f"{len(infinite)} of {rewards_PN.numel()} rewards are infinite, the first in group {group} at rollout "
            f"{rollout}. Rewards must be finite: clamp them, or return NaN for a rollout that cannot be scored."
        )
    return rewards_PN, not bool(rewards_PN.isnan().any())


def check_size(m: int, n: int) -> None:
    """Raise unless m is an int from 1 to n.

    >>> check_size(9, 8)
    Traceback (most recent call last):
    ValueError: m must be between 1 and the 8 rollouts of each prompt; got m = 9. Keep fewer or generate more.
    """
    if isinstance(m, bool) or not isinstance(m, int):
        raise TypeError(f"m, the rollouts to keep of each prompt, must be an int; got {m!r} ({describe(m)}).")
    if not 1 <= m <= n:
        raise ValueError(
            f"m must be between 1 and the {n} rollouts of each prompt; got m = {m}. Keep fewer or generate more."
        )
