"""The settings of a selection in engines other than TRL: read and checked in one way, under each engine's own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..selection import BatchRule, Rule, get_rule
from ..selection.batch import as_batch_function
from ..selection.rules import check_rule
from ..text import suggest
from .bounds import CHOICES
from .sizes import check_sizes, whole_number

KEYS = ("num_rollouts", "selection", "rule", "seed", "ledger", "ledger_every")


@dataclass(frozen=True, kw_only=True)
class SelectionSettings:
    """n, m, the rule and the ledger of a run.

    Args:
        num_rollouts: n, rollouts generated per training prompt.
        num_generations: m, rollouts trained per prompt; with `batch_rule` their mean over the prompts of a batch.
        rule: the rule function, of a prompt.
        batch_rule: the rule over a batch, which decides instead of `rule` (`selection: batch`). If None, each prompt
            keeps m.
        seed: of rules that draw.
        ledger: the folder of the rollout ledger. If None, no ledger is written.
        ledger_every: the ledger is written at step 1 and at every multiple of this number.
    """

    num_rollouts: int
    num_generations: int
    rule: Rule
    batch_rule: BatchRule | None = None
    seed: int = 0
    ledger: str | None = None
    ledger_every: int = 10


def read_selection(
    options: Any, m: Any, *, prefix: str, m_key: str, more: Sequence[str] = (), no_batch: str = ""
) -> dict[str, Any]:
    """Return the fields of `SelectionSettings` from an engine's options.

    Args:
        options: by the names of `KEYS`, of which only `num_rollouts` is required.
        m: rollouts trained per prompt, which the engine itself holds.
        prefix: how the user addresses the options, for messages.
        m_key: how the user addresses m.
        more: names of further options, which the engine reads itself.
        no_batch: why the engine cannot select over a batch; empty if it can.

    Raises:
        UserError: options that are not a mapping, an unknown key or rule, a value of a wrong type, n below m, or
            `selection: batch` where the engine cannot do it.

    >>> read_selection({"num_rollouts": 16}, 4, prefix="pods", m_key="generator.n")["num_rollouts"]
    16
    >>> read_selection({"num_rollouts": 2}, 4, prefix="pods", m_key="generator.n")
    Traceback (most recent call last):
    pods_rl.errors.UserError: pods.num_rollouts = 2 is less than generator.n = 4: cannot keep 4 of 2 rollouts. ...
    """
    if not isinstance(options, Mapping):
        raise UserError(
            f"{prefix} must be a group of keys; got {options!r}. Set the keys, for example {prefix}.num_rollouts=16."
        )
    known = (*KEYS, *more)
    for key in options:
        if key not in known:
            raise UserError(f"{prefix}: unknown key {key!r}, expected {', '.join(known)}.{suggest(str(key), known)}")
    n, m = check_sizes(options.get("num_rollouts"), m, n_key=f"{prefix}.num_rollouts", m_key=m_key)
    selection = options.get("selection", "prompt")  # m of each prompt, or as many rows among all rollouts of a batch
    if selection not in CHOICES["selection"]:
        raise UserError(f"{prefix}.selection = {selection!r}: expected {' or '.join(CHOICES['selection'])}.")
    if selection == "batch" and no_batch:
        raise UserError(f"{prefix}.selection = batch: {no_batch} Set it to prompt.")
    rule = options.get("rule", "max_variance")
    batch_rule = as_batch_function(rule) if selection == "batch" else None
    # A rule over the batch decides alone; the rule of a prompt is then the one for batches without a live prompt.
    prompt_rule = get_rule(rule if batch_rule is None else "max_variance")
    check_rule(prompt_rule)
    ledger = options.get("ledger")
    if ledger is not None and not (isinstance(ledger, str) and ledger.strip()):
        raise UserError(f"{prefix}.ledger must be the path of a folder; got {ledger!r}.")
    return {
        "num_rollouts": n,
        "num_generations": m,
        "rule": prompt_rule,
        "batch_rule": batch_rule,
        "seed": whole_number(f"{prefix}.seed", options.get("seed", 0), 0),
        "ledger": ledger,
        "ledger_every": whole_number(f"{prefix}.ledger_every", options.get("ledger_every", 10)),
    }
