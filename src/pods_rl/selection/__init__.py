"""Which rollouts to train on, and their advantages: pure functions of rewards that need only torch."""

from .batch import BATCH_RULES, get_batch_rule, select_batch
from .objective import advantages, is_constant, pods_objective, spread
from .rules import RULES, get_rule, select
from .types import REWARD_LIMIT, BatchRule, BatchSelection, RolloutBatch, Rule, RuleOrName, Selection

__all__ = [
    "BATCH_RULES",
    "REWARD_LIMIT",
    "RULES",
    "BatchRule",
    "BatchSelection",
    "RolloutBatch",
    "Rule",
    "RuleOrName",
    "Selection",
    "advantages",
    "get_batch_rule",
    "get_rule",
    "is_constant",
    "pods_objective",
    "select",
    "select_batch",
    "spread",
]
