"""What rules take and return, and shared checks of rewards."""

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
    """A rule that cannot be called, raises, or does not return different rollouts, as many as it may."""


if TYPE_CHECKING:
    RuleOrName = str | Rule
else:
    RuleOrName = str  # the type of a configuration's field: a command line can give a name alone


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """What a rule over the batch chooses from: the rollouts of all prompts of an optimizer step.

    Args:
        rewards: `[P, N]`, float32 or float64, finite or NaN (unscored).
        rows: R, the number of rollouts to keep.
        generator: source of random draws. If None, PyTorch's global one.
    """

    rewards: Tensor
    rows: int
    generator: torch.Generator | None = None


class BatchRule(Protocol):
    """Which rollouts of a batch to keep: a `BatchSelection`, or the flat numbers p * N + i, int64 `[R]`."""

    def __call__(self, batch: RolloutBatch, /) -> BatchSelection | Tensor: ...


@dataclass(frozen=True, eq=False)
class BatchSelection:
    """The rollouts kept of a batch, where prompts may keep different numbers of rollouts.

    Args:
        indices: int64 `[R]`, ascending: the flat number p * N + i of each kept rollout i of prompt p. A prompt keeps
            none or at least two, because a single rollout has nothing to be compared with.
        num_prompts: P.
        num_rollouts: N, generated of each prompt.

    Raises:
        TypeError: indices that are not a dense int64 tensor, or sizes that are not ints.
        ValueError: another shape, indices that do not ascend or are out of range, or a prompt with one rollout.

    >>> kept = BatchSelection(torch.tensor([0, 3, 8, 9, 11]), num_prompts=3, num_rollouts=4)
    >>> kept.sizes, kept.groups
    (tensor([2, 0, 3]), tensor([0, 0, 2, 2, 2]))
    """

    indices: Tensor
    num_prompts: int
    num_rollouts: int

    def __post_init__(self) -> None:
        check_tensor("BatchSelection.indices", self.indices)
        if self.indices.dtype != torch.int64:
            raise TypeError(f"BatchSelection.indices must be an int64 tensor [R]; got {kind_of(self.indices)}.")
        if self.indices.ndim != 1:
            raise ValueError(f"BatchSelection.indices must have shape [R]; got {kind_of(self.indices)}.")
        for name in ("num_prompts", "num_rollouts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"BatchSelection.{name} must be an int; got {value!r} ({kind_of(value)}).")
            if value < 0:
                raise ValueError(f"BatchSelection.{name} must be at least 0; got {value}.")
        count = self.num_prompts * self.num_rollouts
        # One comparison for all: ascending numbers between two ends.
        ends = self.indices.new_tensor([-1, count])
        if (torch.cat([ends[:1], self.indices, ends[1:]]).diff() <= 0).any():
            raise ValueError(
                f"BatchSelection.indices must be different numbers p * {self.num_rollouts} + i from 0 to {count - 1}, "
                f"ascending; got {self.indices.tolist()[:20]}{'...' if len(self.indices) > 20 else ''}."
            )
        alone_P = self.sizes == 1
        if alone_P.any():
            raise ValueError(
                f"BatchSelection.indices keep a single rollout of prompt {int(alone_P.nonzero()[0])}; keep none of a "
                "prompt, or at least two."
            )

    @property
    def groups(self) -> Tensor:
        """The prompt of each kept rollout, int64 `[R]`."""
        return self.indices // max(self.num_rollouts, 1)  # a batch without rollouts has no indices

    @property
    def sizes(self) -> Tensor:
        """The number of rollouts kept of each prompt, int64 `[P]`: 0, or at least 2."""
        return self.mask().sum(dim=1)

    @property
    def slots(self) -> Tensor:
        """The position of each kept rollout among those of its prompt, from 0, int64 `[R]`."""
        sizes_P = self.sizes
        first_P = sizes_P.cumsum(0) - sizes_P
        return torch.arange(len(self.indices), device=self.indices.device) - first_P[self.groups]

    def mask(self) -> Tensor:
        """Return bool `[P, N]`, true where a rollout is kept."""
        mask = torch.zeros(self.num_prompts * self.num_rollouts, dtype=torch.bool, device=self.indices.device)
        mask[self.indices] = True
        return mask.view(self.num_prompts, self.num_rollouts)

    def take(self, values_PN: Tensor) -> Tensor:
        """Return the kept rollouts' values, `[R]`, of any values `[P, N]`.

        Raises:
            TypeError: values that are not a dense tensor with values.
            ValueError: values of another shape or on another device.

        >>> BatchSelection(torch.tensor([0, 2]), 1, 3).take(torch.tensor([[5.0, 6.0, 7.0]]))
        tensor([5., 7.])
        """
        check_tensor("values", values_PN)
        if values_PN.shape != (self.num_prompts, self.num_rollouts):
            raise ValueError(
                f"this selection needs values {[self.num_prompts, self.num_rollouts]}; got {kind_of(values_PN)}."
            )
        check_device("values", values_PN, "the selection", self.indices)
        return values_PN.reshape(-1)[self.indices]

    def by_prompt(self, values_R: Tensor) -> Tensor:
        """Return values of the kept rollouts as rows of their prompts, `[P, M]`: M is the largest size, at least 1.

        Places without a rollout are NaN.

        >>> BatchSelection(torch.tensor([0, 2, 6, 7, 8]), 3, 3).by_prompt(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
        tensor([[1., 2., nan],
                [nan, nan, nan],
                [3., 4., 5.]])
        """
        largest = max(self.sizes.tolist(), default=1)
        values_PM = values_R.new_full((self.num_prompts, max(largest, 1)), math.nan)
        values_PM[self.groups, self.slots] = values_R
        return values_PM


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
            raise TypeError(f"Selection.indices must be an int64 tensor [P, M]; got {kind_of(self.indices)}.")
        if self.indices.ndim != 2 or self.indices.shape[1] == 0:
            raise ValueError(f"Selection.indices must have shape [P, M], M >= 1; got {kind_of(self.indices)}.")
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
            raise TypeError(f"n, the rollouts generated of each prompt, must be an int; got {n!r} ({kind_of(n)}).")
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
                f"got {kind_of(values_PN)}."
            )
        check_device("values", values_PN, "the selection", self.indices)
        self._check_range(values_PN.shape[1])
        return values_PN.gather(1, self.indices)

    def _check_range(self, n: int) -> None:
        if (self.indices >= n).any():
            low = int(self.indices.min())
            high = int(self.indices.max())
            raise ValueError(f"indices must lie between 0 and n - 1 = {n - 1}; got {low} to {high}.")


def kind_of(value: Any) -> str:
    """Return what a value is, for an error message: its type, of a tensor also its shape."""
    if isinstance(value, Tensor):
        if value.is_nested:  # it has no shape
            return f"a nested {value.dtype} tensor"
        kind = f"a {value.dtype} tensor of shape {list(value.shape)}"
        has_values = value.layout == torch.strided and not value.is_meta
        return kind if has_values else f"{kind} ({value.layout}, on {value.device})"
    if value is None:
        return "None"
    name = type(value).__name__
    article = "an" if name[0].lower() in "aeiou" else "a"
    return f"{article} {name}"


def check_tensor(name: str, value: Any) -> None:
    """Raise TypeError unless an argument is a dense tensor with values."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor; got {kind_of(value)}. Pass torch.tensor({name}).")
    if value.is_nested or value.is_quantized or value.is_meta or value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor with values; got {kind_of(value)}.")


def check_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless two tensors are on the same device."""
    if value.device != other.device:
        raise ValueError(
            f"{name} must be on the device of {other_name}, {other.device}; got {value.device}. Move one of them with "
            ".to(device)."
        )


def check_not_negative(name: str, value: Any) -> None:
    """Raise unless an argument is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number; got {value!r} ({kind_of(value)}).")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0; got {value!r}.")


def check_generator(generator: Any) -> None:
    """Raise TypeError unless a source of random draws is a torch.Generator or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator or None; got {generator!r}. Pass torch.Generator().manual_seed(seed)."
        )


def checked_rewards(rewards_PN: Tensor) -> tuple[Tensor, bool]:
    """Return the rewards detached, in float32 or float64, and whether all are scored; raise if one is infinite."""
    check_tensor("rewards", rewards_PN)
    if rewards_PN.is_complex():
        raise TypeError(f"rewards must be real numbers; got {kind_of(rewards_PN)}. Pass rewards.real.")
    if rewards_PN.ndim != 2 or rewards_PN.shape[1] == 0:
        raise ValueError(
            f"rewards must have shape [prompts, rollouts], at least one rollout; got {kind_of(rewards_PN)}. "
            "For one group pass rewards[None]; for a flat list of rows pass rewards.view(-1, num_rollouts)."
        )
    # Half precision becomes float32, and integers float64, so no order or tie changes (integers up to 2^53).
    fits_float32 = rewards_PN.is_floating_point() and rewards_PN.dtype != torch.float64
    rewards_PN = rewards_PN.detach().float() if fits_float32 else rewards_PN.detach().double()
    # One sum is far cheaper than a check of each reward, and the only wait for a device; it is finite only if all are.
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


def check_rows(rows: int, prompts: int, n: int) -> None:
    """Raise unless the rows to keep of a batch are an int from 2 to P * N."""
    if isinstance(rows, bool) or not isinstance(rows, int):
        raise TypeError(f"rows, the rollouts to keep of the batch, must be an int; got {rows!r} ({kind_of(rows)}).")
    if not 2 <= rows <= prompts * n:
        raise ValueError(
            f"rows must be between 2 and the {prompts * n} rollouts of the batch ({prompts} prompts x {n}); got rows = "
            f"{rows}. Keep another number or generate more."
        )


def check_size(m: int, n: int) -> None:
    """Raise unless m is an int from 1 to n."""
    if isinstance(m, bool) or not isinstance(m, int):
        raise TypeError(f"m, the rollouts to keep of each prompt, must be an int; got {m!r} ({kind_of(m)}).")
    if not 1 <= m <= n:
        raise ValueError(
            f"m must be between 1 and the {n} rollouts of each prompt; got m = {m}. Keep fewer or generate more."
        )
