"""Which rollouts to train on, and with what signal: pure functions of rewards that need torch alone."""

from .advantages import advantages
from .objective import pods_objective
from .registry import get_rule, select
from .rules import RULES
from .types import Rule, Selection

__all__ = ["RULES", "Rule", "Selection", "advantages", "get_rule", "pods_objective", "select"]
