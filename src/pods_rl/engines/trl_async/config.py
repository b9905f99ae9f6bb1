"""AsyncPODSConfig: TRL's AsyncGRPOConfig with the fields that PODS adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl.experimental.async_grpo import AsyncGRPOConfig

from ...errors import UserError
from ...selection import Rule
from ...selection.rules import check_rule, rule_name
from . import check_version

if TYPE_CHECKING:
    RuleOrName = str | Rule
else:
    RuleOrName = str  # a command line can give a name alone


@dataclass
class AsyncPODSConfig(AsyncGRPOConfig):
    """AsyncGRPOConfig plus down-sampling: every field of TRL's has TRL's default and meaning.

    An automatic `max_inflight_tasks` (-1) is n / m times TRL's. A number that you set stays.

    Args:
        num_rollouts: n, the rollouts requested for each prompt; at least m = num_generations, the rollouts trained of
            each prompt. None: n = m, with TRL's advantages.
        rule: which m of the n rollouts are kept: max_variance (the paper, section 3.1), max_reward, random,
            percentile, or your own as a function of a module or as package.module:function.
        advantages: normalise advantages over the m kept rollouts (after; the paper, section 3.2) or over all n
            (before).
        dynamic_sampling: drop groups whose advantages are all zero (DAPO, arXiv 2503.14476). Another prompt takes the
            place of a dropped one, which counts as passed where prompts are counted: epochs and checkpoints.

    Raises:
        UserError: n < m, m < 2, an unknown choice, a rule without an importable name, or another version of TRL.

    Example:
        >>> config = AsyncPODSConfig("out", num_generations=4, num_rollouts=16, use_cpu=True, bf16=False)
        >>> config.num_rollouts, config.rule, config.advantages
        (16, 'max_variance', 'after')
    """

    num_rollouts: int | None = None
    rule: RuleOrName = "max_variance"
    advantages: str = "after"
    dynamic_sampling: bool = False

    def __post_init__(self) -> None:
        check_version()
        super().__post_init__()
        if self.num_rollouts is None:
            self.num_rollouts = self.num_generations
        if not 2 <= self.num_generations <= self.num_rollouts:
            raise UserError(
                "num_generations (m) must be at least 2 and at most num_rollouts (n): got "
                f"{self.num_generations} and {self.num_rollouts}."
            )
        if self.advantages not in ("after", "before"):
            raise UserError(f"advantages must be after or before: got {self.advantages!r}.")
        check_rule(self.rule)
        if "<" in (name := rule_name(self.rule)):  # a lambda, or a function within another
            raise UserError(f"the rule {name!r} is sent to another process: define it with def at the top of a module.")

    def to_dict(self) -> dict[str, Any]:
        """Return TRL's dictionary, with a rule function replaced by its import path, so that it is plain data."""
        return super().to_dict() | {"rule": rule_name(self.rule)}
