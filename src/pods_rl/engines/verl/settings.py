"""The part of verl's configuration that PODS reads, and its checks before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...errors import UserError
from ...selection import Rule, get_rule
from ...text import suggest

if TYPE_CHECKING:
    from omegaconf import DictConfig

BEFORE = "pods_before"  # name of the estimator with advantages over all n
_KEYS = ("num_rollouts", "rule", "seed", "ledger", "ledger_every", "poll_interval")
_KWARGS = "trainer.v1.sampler.sampler_kwargs"
_SAMPLER = "trainer.v1.sampler.custom_sampler"
_MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
_MODEL = "reward.reward_model"
_FUNCTION = "reward.custom_reward_function"


@dataclass(frozen=True)
class PODSSettings:
    """n, m and the rule of a run under verl.

    Args:
        num_rollouts: n, sessions generated per training prompt (`sampler_kwargs.num_rollouts`).
        num_generations: m, sessions trained per prompt (`actor_rollout_ref.rollout.n`).
        rule: the rule function (`sampler_kwargs.rule`: a name or an import path; default max_variance).
        seed: of rules that draw (`sampler_kwargs.seed`; default 0).
        before: whether advantages are computed over all n (`algorithm.adv_estimator: pods_before`).
        filter_arguments: arguments of verl's own replay buffer for DAPO's dynamic sampling (`algorithm.filter_groups`).
        ledger: the folder of the rollout ledger (`sampler_kwargs.ledger`). If None, no ledger is written.
        ledger_every: the ledger is written at step 1 and at every multiple of this number.
        poll_interval: seconds between two looks at the queue while a batch is generated; verl's default is 2.
    """

    num_rollouts: int
    num_generations: int
    rule: Rule
    seed: int
    before: bool
    filter_arguments: Mapping[str, Any]
    ledger: str | None = None
    ledger_every: int = 10
    poll_interval: float = 2.0


def read_settings(config: DictConfig) -> PODSSettings:
    """Read the settings from verl's full configuration.

    Raises:
        UserError: an unknown key or rule, n below m, only one of the two plug-ins, a mode that selection does not
            support (a colocated reward model, verl's legacy trainer, `pods_before` with a KL term in the reward), or
            rows that our reward function cannot score.
    """
    keys = _get(config, _KWARGS) or {}
    for key in keys:
        if key not in _KEYS:
            raise UserError(f"{_KWARGS}: unknown key {key!r}, expected {', '.join(_KEYS)}.{suggest(str(key), _KEYS)}")
    kept = _count("actor_rollout_ref.rollout.n", _get(config, "actor_rollout_ref.rollout.n"))
    generated = _count(f"{_KWARGS}.num_rollouts", keys.get("num_rollouts"))
    if generated < kept:
        raise UserError(
            f"{_KWARGS}.num_rollouts (n, generated per prompt) must be at least actor_rollout_ref.rollout.n (m, "
            f"trained per prompt); got n = {generated} and m = {kept}. Generate more or keep fewer."
        )
    _check_plugins(config)
    _check_modes(config)
    _check_sources(config)
    return PODSSettings(
        num_rollouts=generated,
        num_generations=kept,
        rule=get_rule(keys.get("rule", "max_variance")),
        seed=_count(f"{_KWARGS}.seed", keys.get("seed", 0), least=0),
        before=_get(config, "algorithm.adv_estimator") == BEFORE,
        filter_arguments=_filter_arguments(config),
        ledger=keys.get("ledger"),
        ledger_every=_count(f"{_KWARGS}.ledger_every", keys.get("ledger_every", 10)),
        poll_interval=keys.get("poll_interval", 2.0),
    )


def _count(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name} must be a whole number of at least {least}; got {value!r}.")
    return value


def _check_plugins(config: DictConfig) -> None:
    """Require both plug-ins: with one, verl would silently train on all n, or generate only m."""
    if not _get(config, _MANAGER):
        raise UserError(
            f"{_MANAGER} is not set, so verl would generate only rollout.n sessions and drop none. "
            "Set it to pods_rl.engines.verl.agent_loop.PODSAgentLoopManager."
        )
    if not _get(config, f"{_SAMPLER}.name") or not _get(config, f"{_SAMPLER}.path"):
        raise UserError(
            f"{_SAMPLER} is not set, so verl would train on all {_get(config, f'{_KWARGS}.num_rollouts')} sessions of "
            "a prompt. Set path to pkg://pods_rl.engines.verl.replay_buffer and name to replay_buffer."
        )


def _check_modes(config: DictConfig) -> None:
    if not _get(config, "trainer.use_v1", True):
        raise UserError(
            "trainer.use_v1 is false: verl's legacy trainer has no replay buffer to select in. Set it to true."
        )
    if _get(config, f"{_MODEL}.enable") and not _get(config, f"{_MODEL}.enable_resource_pool"):
        raise UserError(
            "a colocated reward model scores after the batch is sampled, too late to select by its scores. Set "
            f"{_MODEL}.enable_resource_pool=True and give it GPUs of its own, or use a rule-based reward."
        )
    if _get(config, "algorithm.adv_estimator") == BEFORE and _get(config, "algorithm.use_kl_in_reward"):
        raise UserError(
            f"algorithm.adv_estimator={BEFORE} needs algorithm.use_kl_in_reward=False: only the kept sessions have a "
            "KL term. Use actor_rollout_ref.actor.use_kl_loss=True instead."
        )


def _check_sources(config: DictConfig) -> None:
    """Check the data's sources if the reward function is ours: its module has `check_sources`."""
    module = str(_get(config, f"{_FUNCTION}.path")).removeprefix("pkg://")
    if module.startswith("pods_rl."):
        files = [_get(config, f"data.{split}_files") for split in ("train", "val")]
        import_module(module).check_sources(files, _get(config, "data.reward_fn_key", "data_source"))


def _filter_arguments(config: DictConfig) -> dict[str, Any]:
    """Return the arguments that verl passes to its own replay buffer but not to a custom one."""
    from verl.trainer.ppo.v1 import replay_buffer

    filter_groups = _get(config, "algorithm.filter_groups") or {}
    metric = None
    max_batches = 1
    if filter_groups.get("enable"):
        metric = filter_groups.get("metric")
        max_batches = filter_groups.get("max_inflight_gen_batches", 1)
        if not metric:
            raise UserError(
                "algorithm.filter_groups.enable needs algorithm.filter_groups.metric; got none. Example: reward"
            )
    if metric == "reward" and not hasattr(replay_buffer, "FILTER_GROUPS_REWARD_METRIC"):
        raise UserError(
            "algorithm.filter_groups.metric = reward: this version of verl filters only by numbers that the reward "
            "function returns (0.9.1 filters by the reward too). Set the metric to one of them, for example acc or "
            "score."
        )
    refill = bool(_get(config, "trainer.v1.sampler.sync_refill_failed_groups"))
    train_batch = _get(config, "data.train_batch_size")
    generation_batch = _get(config, "data.gen_batch_size") or train_batch
    if metric or refill:  # as verl does
        generation_batch = 1
    return {
        "filter_groups_metric": str(metric) if metric else None,
        "sync_refill_failed_groups": refill,
        "train_batch_size": train_batch,
        "gen_batch_size": generation_batch,
        "max_inflight_gen_batches": max_batches,
    }


def _get(config: DictConfig, key: str, default: Any = None) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.select(config, key, default=default)
