"""What TRL's methods fill, log, read and return, compared with what we know: an upgrade that adds a name fails here.

`test_contract` finds what we use and TRL no longer has. These sets are compared both ways, since a new list of rows
would stay n long where m rows are kept, and a new metric of the loss would depend on which rows share a micro-batch.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from trl import GRPOTrainer

from pods_rl.engines.trl.compat import IMAGE_INPUTS, LOSS_METRICS, ROW_LISTS, Generated
from pods_rl.engines.trl.step.update import LOSS_METHODS

MUTATORS = {"add", "append", "appendleft", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}


def parsed(method: Callable[..., Any]) -> ast.Module:
    """The syntax tree of a method, without its decorators."""
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))


def cut_at_call(tree: ast.Module, called: str) -> tuple[ast.Module, ast.Module]:
    """The statements of a method before the one that calls `self.<called>`, and those after it."""
    (function,) = tree.body
    calls = [called in {name for name, _ in _own_calls(statement)} for statement in function.body]
    assert calls.count(True) == 1
    at = calls.index(True)
    return ast.Module(function.body[:at], []), ast.Module(function.body[at + 1 :], [])


def changed_attributes(tree: ast.AST) -> set[str]:
    """The attributes of the trainer that are assigned, or changed by a method of a list or a dictionary."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found.add(_own_attribute(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            found.add(_own_attribute(node.func.value))
    return found - {None}


def names(tree: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """The local names that are stored or loaded."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def keys_of(tree: ast.AST, dictionary: str) -> set[str]:
    """The constant keys of a dictionary: of its display, of its items and of its method `get`.

    A key with a name in it has `{}` in its place; a name alone is `{}`.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == dictionary:
            found.add(_text(node.slice))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == f"{dictionary}.get":
            found.add(_text(node.args[0]))
        elif isinstance(node, ast.Compare) and [ast.unparse(part) for part in node.comparators] == [dictionary]:
            found.add(_text(node.left))
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Dict)
            and [ast.unparse(target) for target in node.targets] == [dictionary]
        ):
            found |= {_text(key) for key in node.value.keys if key is not None}
    return found


def compared_with(tree: ast.AST, expression: str) -> set[str]:
    """The texts that an expression is compared with, one by one or in a list."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == expression:
            found |= {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return found


def _own_calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_self(node.func.value):
            yield node.func.attr, node


def _own_attribute(node: ast.AST) -> str | None:
    """The attribute of the trainer in an expression such as `self._logs["rewards"][name]`; None if there is none."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        if isinstance(node, ast.Attribute) and _is_self(node.value):
            return node.attr
        node = node.value
    return None


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _text(key: ast.expr) -> str:
    if isinstance(key, ast.Constant):
        return str(key.value)
    if isinstance(key, ast.JoinedStr):
        return "".join("{}" if isinstance(part, ast.FormattedValue) else str(part.value) for part in key.values)
    return "{}"


SCORE = parsed(GRPOTrainer._generate_and_score_completions)
LOSS = parsed(GRPOTrainer._compute_loss)
SAMPLING = ("_generate", "_tokenize_prompts", "_generate_single_turn", "_tool_call_loop", "_get_tool_suffix_ids")

# Logged with a term that is a mean over a micro-batch: its rows then stay where TRL put them.
OF_UNGROUPED_ROWS = {"policy_loss", "entropy_coef", "aux_loss"}
# `log_generation` replaces these by those of all n rollouts.
OF_ALL_ROLLOUTS = {"reward", "reward_std", "frac_reward_zero_std", "rewards/{}/mean", "rewards/{}/std"}
OF_KEPT_ROWS = {
    "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
}  # fmt: skip
OF_REWARD_FUNCTIONS = "{}"  # what they log themselves
# How dynamic sampling pads these, and how they follow their rows: `_joined_column`, `micro_batches.regroup`.
BATCH = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages", "num_items_in_batch",
    "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio",
}  # fmt: skip
# What a term of the loss can depend on; `Update` knows which of these give a row without advantage a gradient, or
# compare the rows of a micro-batch.
SETTINGS_OF_LOSS = {
    "loss_type", "importance_sampling_level", "beta", "epsilon_low", "epsilon_high", "off_policy_mask_threshold",
    "top_entropy_quantile", "_entropy_bonus_enabled", "use_adaptive_entropy", "entropy_coef", "aux_loss_enabled",
    "router_aux_loss_coef", "use_vllm", "vllm_importance_sampling_correction", "max_completion_length",
    "current_gradient_accumulation_steps",
}  # fmt: skip
STATE_OF_LOSS = {"_last_world_entropy", "_entropy_window_stats"}  # TRL saves the first, and ends the second in a step


def test_every_list_of_rows_that_trl_fills_before_it_generates_is_shortened():
    before, _ = cut_at_call(SCORE, "_generate")
    assert changed_attributes(before) == set(ROW_LISTS)


def test_nothing_else_of_all_rows_is_read_once_they_are_selected():
    """`prompts` is shortened in place; `dataset_images` is not read, since our `_generate` always returns images."""
    before, after = cut_at_call(SCORE, "_generate")
    kept = names(before, ast.Store) & names(after, ast.Load) - names(after, ast.Store)
    assert kept == {"device", "mode", "prompts", "dataset_images"}
    logs = {"_logs", "_metrics", "_pending_extra_logs", "_pending_metrics"}
    assert changed_attributes(after) == logs
    changed_while_sampling = set()
    for name in SAMPLING:
        changed_while_sampling |= changed_attributes(parsed(getattr(GRPOTrainer, name)))
    assert changed_while_sampling == {"_last_loaded_step", "_metrics", "state"}
    assert changed_attributes(parsed(GRPOTrainer._calculate_rewards)) == set()


def test_the_results_of_a_generation_are_those_that_are_shortened():
    (returned,) = [node for node in ast.walk(parsed(GRPOTrainer._generate)) if isinstance(node, ast.Return)]
    assert isinstance(returned.value, ast.Tuple)
    assert tuple(ast.unparse(part) for part in returned.value.elts) == Generated._fields


def test_metrics_of_the_loss_are_those_that_become_values_of_the_step():
    assert keys_of(LOSS, "self._metrics[mode]") == LOSS_METRICS | OF_UNGROUPED_ROWS


def test_metrics_of_a_generation_are_of_all_rollouts_or_of_the_kept_rows():
    logged = keys_of(SCORE, "self._metrics[mode]")
    assert logged == OF_ALL_ROLLOUTS | OF_KEPT_ROWS | {OF_REWARD_FUNCTIONS}


def test_the_table_of_completions_has_the_columns_that_we_correct_and_escape():
    assert keys_of(SCORE, "self._logs") == {"prompt", "completion", "rewards", "advantages", "extra", "images"}


def test_the_batch_has_the_names_that_we_join_and_group():
    assert keys_of(SCORE, "output") == BATCH | set(IMAGE_INPUTS)
    assert keys_of(LOSS, "inputs") == BATCH | set(IMAGE_INPUTS)


def test_the_loss_has_the_terms_that_decide_which_rows_have_a_gradient():
    methods = {name for name, _ in _own_calls(LOSS)}
    assert methods == set(LOSS_METHODS) - {"compute_loss", "_compute_loss"}
    named = {node.attr for node in ast.walk(LOSS) if isinstance(node, ast.Attribute) and _is_self(node.value)}
    assert named - methods - STATE_OF_LOSS - {"accelerator", "args", "model", "_metrics"} == SETTINGS_OF_LOSS
    losses = {"grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"}
    assert compared_with(LOSS, "self.loss_type") == losses


def test_counters_of_a_training_are_saved_by_us_or_trl_or_end_in_a_step():
    """`_step` is in our checkpoints, and the buffer is while its rows are still trained."""
    step = changed_attributes(parsed(GRPOTrainer.training_step))
    assert step == {"_step", "_current_train_step_time", "_metrics"}
    assert changed_attributes(parsed(GRPOTrainer._prepare_inputs)) == {"_buffered_inputs"}
    assert changed_attributes(LOSS) == STATE_OF_LOSS | {"entropy_coef", "_metrics"}
