"""Which rollouts to train on, and with what signal: pure functions of rewards that need torch alone."""

from .advantages import advantages, is_constant, spread
from .objective import pods_objective
from .registry import get_rule, select
from .rules import RULES
from .types import REWARD_LIMIT, Rule, Selection

__all__ = [
    "REWARD_LIMIT",
    "RULES",
    "Rule",
    "Selection",
    "advantages",
    "get_rule",
    "is_constant",
    "pods_objective",
    "select",
    "spread",
]
