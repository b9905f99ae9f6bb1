"""Which rollouts of a generation are trained, and with which advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...rollouts.allocating import distinct_first, keep_ends, row_weights, rows_auto, select_rows, share_rows
from ...selection import Selection, advantages, select
from .config import PODSConfig


@dataclass(frozen=True)
class KeptRows:
    """The rows of a generation batch, in TRL's order: P x M places, each with a rollout of some group.

    Every loss of TRL is linear in the size of an advantage (besides, it reads the sign), so a factor of a row's
    advantage is a factor of its policy loss. It does not weight KL terms and entropy bonuses, nor the tokens by which
    dapo, bnpo, cispo and vespo divide: there, prompts with shared places count by their tokens.

    Args:
        slots: `[P]`, the group whose places they are: its prompt in TRL's batch, or the one drawn for it.
        groups: `[P, M]`, the group of each row, the slot's own unless places were shared.
        numbers: `[P, M]`, the number of its rollout in the group.
        weights: `[P, M]`, the factor of its advantage; 0: the row only fills its place.
        whole: every group has exactly M rows, all of weight above 0.
    """

    slots: Tensor
    groups: Tensor
    numbers: Tensor
    weights: Tensor
    whole: bool = True

    def flat(self, n: int) -> Tensor:
        """Return each row's rollout, numbered over all groups, `[P * M]`."""
        return (self.groups * n + self.numbers).flatten()

    def only(self, values_GN: Tensor) -> Tensor:
        """Return values of all groups with NaN for all but the rollouts of rows with a weight."""
        used = self.flat(values_GN.size(1))[self.weights.flatten() != 0]
        only_GN = torch.full_like(values_GN, torch.nan)
        only_GN.view(-1)[used] = values_GN.reshape(-1)[used]
        return only_GN

    def by_slot(self, values_GN: Tensor) -> Tensor:
        """Return the values of each slot's rows, `[P, M]`; where groups are not whole, `[P, N]` with NaN elsewhere."""
        return values_GN[self.slots].gather(1, self.numbers) if self.whole else self.only(values_GN)[self.slots]


def keep_rows(
    args: PODSConfig,
    rewards_GN: Tensor,
    answers_GN: Tensor,
    slots_P: Tensor,
    *,
    order_GN: Tensor | None = None,
    weights_G: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> KeptRows:
    """Choose the rows of a batch as the settings say: by the rule, in an order, with the places of dead groups shared.

    Args:
        rewards_GN: total rewards, by which the rule selects; NaN where not scored or not generated.
        answers_GN: rewards that tell right from wrong and live groups from dead ones.
        slots_P: the group of each slot.
        order_GN: the order in which the rule sees rollouts; None: by number.
        weights_G: of the groups' advantages; None: 1.
        generator: for rules that draw.
    """
    m, n, P = args.num_generations, rewards_GN.size(1), len(slots_P)
    order_PN = torch.arange(n).repeat(P, 1) if order_GN is None else order_GN[slots_P]
    own_PN = rewards_GN[slots_P].gather(1, order_PN)
    weights_P = torch.ones(P, dtype=torch.float64) if weights_G is None else weights_G[slots_P].double()
    if args.dead_groups == "share":
        rows_P = share_rows(answers_GN[slots_P], m)
        found = select_rows(own_PN, rows_P, args.rule, generator)
        kept = [order[chosen].sort().values for order, chosen in zip(order_PN, found, strict=True)]
        groups = slots_P.repeat_interleave(rows_P).view(P, m)
        weights = (weights_P * row_weights(rows_P, m)).repeat_interleave(rows_P).view(P, m)
        return KeptRows(slots_P, groups, torch.cat(kept).view(P, m), weights, whole=bool((rows_P == m).all()))
    if n == m:
        kept_PM = torch.arange(n).repeat(P, 1)
    else:
        chosen_PM = select(own_PN, m, args.rule, generator=generator).indices
        kept_PM = order_PN.gather(1, chosen_PM).sort(dim=1).values
    weights_PM = weights_P.unsqueeze(1).repeat(1, m)
    if args.rows_per_group == "auto":
        answers_PN = answers_GN[slots_P]
        rows_P, high_P = rows_auto(answers_PN, m, args.majority_rows)
        trained_PN = keep_ends(answers_PN, rows_P, high_P)
        # The rule's other rows fill the places that are left, without a weight.
        rank_PN = torch.zeros(P, n).scatter_(1, kept_PM, 1.0) + 2 * trained_PN
        kept_PM = rank_PN.argsort(dim=1, descending=True, stable=True)[:, :m].sort(dim=1).values
        weights_PM *= trained_PN.gather(1, kept_PM) * row_weights(rows_P, m).unsqueeze(1)
    whole = bool((weights_PM != 0).all())
    return KeptRows(slots_P, slots_P.unsqueeze(1).repeat(1, m), kept_PM, weights_PM, whole)


def distinct_order(labels_GN: Tensor, generated_G: Tensor) -> Tensor:
    """Return the order `[G, N]` that puts different completions first, and rollouts that do not exist last.

    >>> distinct_order(torch.tensor([[5, 5, 6, 0, 0]]), torch.tensor([3]))
    tensor([[0, 2, 1, 3, 4]])
    """
    order_GN = distinct_first(labels_GN)
    return order_GN.gather(1, (order_GN >= generated_G.unsqueeze(1)).byte().argsort(dim=1, stable=True))


def row_advantages(rewards_GN: Tensor, rows: KeptRows, args: PODSConfig, scale: Any) -> Tensor | None:
    """Return the advantages of all rows, `[P * M]`, without their weights; None where TRL's own are right.

    Args:
        rewards_GN: total rewards.
        scale: TRL's `scale_rewards`.
    """
    how: dict[str, Any] = {"baseline": args.advantage_baseline, "scale": scale}
    if not rows.whole:
        only_GN = rows.only(rewards_GN)
        everything = Selection(torch.arange(rewards_GN.size(1)).repeat(len(rewards_GN), 1))
        return advantages(only_GN, everything, when="after", **how).float().view(-1)[rows.flat(rewards_GN.size(1))]
    before = args.advantages == "before" and rewards_GN.size(1) != rows.numbers.size(1)
    if not before and args.advantage_baseline == "mean":
        return None
    selection = Selection(rows.numbers)
    return advantages(rewards_GN[rows.slots], selection, when=args.advantages, **how).float().flatten()  # type: ignore[arg-type]
