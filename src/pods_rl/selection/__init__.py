"""Which rollouts to train on, and their advantages: pure functions of rewards that need only torch."""

from .objective import advantages, is_constant, pods_objective, spread
from .rules import RULES, get_rule, select
from .types import REWARD_LIMIT, Rule, RuleOrName, Selection

__all__ = [
    "REWARD_LIMIT",
    "RULES",
    "Rule",
    "RuleOrName",
    "Selection",
    "advantages",
    "get_rule",
    "is_constant",
    "pods_objective",
    "select",
    "spread",
]
