"""The part of verl's configuration that PODS reads, and its checks before a model is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from ...errors import UserError
from ...text import find
from ..settings import SelectionSettings, read_selection

if TYPE_CHECKING:
    from omegaconf import DictConfig

_KWARGS = "trainer.v1.sampler.sampler_kwargs"
_SAMPLER = "trainer.v1.sampler.custom_sampler"
_M = "actor_rollout_ref.rollout.n"
_MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
_MODEL = "reward.reward_model"
_ESTIMATOR = "algorithm.adv_estimator"

# verl's estimators whose baseline is the group's other rows. The others use a critic or the complete batch.
GROUP_ESTIMATORS = (
    "grpo",
    "grpo_vectorized",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
    "gdpo",
)


@dataclass(frozen=True, kw_only=True)
class VerlSettings(SelectionSettings):
    """The settings of a run under verl: those of `sampler_kwargs`, with m from `actor_rollout_ref.rollout.n`.

    Args:
        filter_arguments: arguments of verl's own replay buffer for DAPO's dynamic sampling (`algorithm.filter_groups`).
        poll_interval: seconds between two looks at the queue while a batch is generated; verl's default is 2.
    """

    filter_arguments: Mapping[str, Any]
    poll_interval: float = 2.0


def read_settings(config: DictConfig) -> VerlSettings:
    """Read the settings from verl's full configuration.

    Raises:
        UserError: see `engines.settings.read_selection`; a time that is none, a plug-in that is missing or does not do
            its part, a mode or an estimator that selection does not support, or data that `sampler_kwargs.check_data`
            refuses.
    """
    keys = _get(config, _KWARGS)
    if keys is None:
        keys = {}
    own = ("poll_interval", "check_data")  # of verl alone
    selection = read_selection(keys, _get(config, _M), prefix=_KWARGS, m_key=_M, more=own)
    interval = keys.get("poll_interval", 2.0)
    if isinstance(interval, bool) or not isinstance(interval, Real) or not 0 < float(interval) < math.inf:
        raise UserError(f"{_KWARGS}.poll_interval must be a number of seconds above 0; got {interval!r}.")
    _check_plugins(config)
    if not _get(config, "trainer.use_v1", True):
        raise UserError(
            "trainer.use_v1 is false: verl's legacy trainer has no replay buffer to select in. Set it to true."
        )
    if _get(config, f"{_MODEL}.enable") and not _get(config, f"{_MODEL}.enable_resource_pool"):
        raise UserError(
            "a colocated reward model scores after the batch is sampled, too late to select by its scores. Set "
            f"{_MODEL}.enable_resource_pool=True and give it GPUs of its own, or use a rule-based reward."
        )
    _check_estimator(config, selection["num_generations"], over_batch=selection["batch_rule"] is not None)
    # The user's function refuses the data: this module knows no reward function, and so not what it can score.
    path = keys.get("check_data")
    if path is not None:
        check: Callable[..., Any] = find("data check", path, {})
        files = [_get(config, f"data.{split}_files") for split in ("train", "val")]
        check(files, _get(config, "data.reward_fn_key", "data_source"))
    mode = _get(config, "trainer.v1.trainer_mode")
    batches_per_step = _get(config, f"trainer.v1.{mode}.parameter_sync_step", 1)
    prompts = _get(config, "data.train_batch_size")
    if selection["batch_rule"] is not None and prompts // batches_per_step < 2:
        raise UserError(
            f"{_KWARGS}.selection = batch, and verl samples {prompts // batches_per_step} prompt at a time "
            f"(data.train_batch_size = {prompts}, parameter_sync_step = {batches_per_step}): no prompts to choose "
            "between. Raise data.train_batch_size, or set selection to prompt."
        )
    return VerlSettings(
        **selection,
        filter_arguments=_filter_arguments(config),
        poll_interval=float(interval),
    )


def _check_plugins(config: DictConfig) -> None:
    """Require both plug-ins: with one, verl would silently train on all n, or generate only m."""
    from verl.utils.import_utils import load_class_from_fqn, load_extern_object

    manager = _get(config, _MANAGER)
    if not manager or not getattr(load_class_from_fqn(manager, "AgentLoopManager"), "requests_num_rollouts", False):
        raise UserError(
            f"{_MANAGER} is {manager}, which does not request {_KWARGS}.num_rollouts sessions of a prompt: verl would "
            "generate only rollout.n and drop none. Set it to pods_rl.engines.verl.agent_loop.PODSAgentLoopManager, or "
            "derive yours from it."
        )
    name = _get(config, f"{_SAMPLER}.name")
    path = _get(config, f"{_SAMPLER}.path")
    is_given = bool(name and path)
    # A file would be executed a second time here. A package's module is imported once.
    is_in_package = is_given and path.startswith("pkg://")
    keeps_m = getattr(load_extern_object(path, name), "keeps_num_generations", False) if is_in_package else is_given
    if not keeps_m:
        raise UserError(
            f"{_SAMPLER} is {name} of {path}, which does not keep rollout.n of the sessions: verl would train on all. "
            "Set path to pkg://pods_rl.engines.verl.replay_buffer and name to replay_buffer, or derive yours "
            "from PODSReplayBuffer."
        )


def _check_estimator(config: DictConfig, m: int, *, over_batch: bool) -> None:
    """Refuse estimators that would have no signal on the kept m, or the wrong one."""
    estimator = _get(config, _ESTIMATOR)
    if estimator == "grpo_passk":
        raise UserError(
            f"{_ESTIMATOR}=grpo_passk trains the best kept session by its distance to the second best. Rules keep "
            "several of the best, so this distance is mostly 0 and nothing is trained. Use grpo, rloo or another of "
            "the estimators in docs/engines.md."
        )
    # Over a batch m is a mean: each prompt keeps none or at least two.
    if m == 1 and not over_batch and estimator in GROUP_ESTIMATORS:
        raise UserError(
            f"actor_rollout_ref.rollout.n (m, trained per prompt) is 1, and {_ESTIMATOR}={estimator} compares the kept "
            "sessions of a prompt with each other: verl would train a single one with its raw reward. Set rollout.n to "
            "at least 2."
        )


def _filter_arguments(config: DictConfig) -> dict[str, Any]:
    """Return the arguments that verl passes to its own replay buffer but not to a custom one."""
    from verl.trainer.ppo.v1 import replay_buffer

    filter_groups = _get(config, "algorithm.filter_groups") or {}
    metric: str | None = None
    max_batches = 1
    if filter_groups.get("enable"):
        if not filter_groups.get("metric"):
            raise UserError(
                "algorithm.filter_groups.enable needs algorithm.filter_groups.metric; got none. Example: reward"
            )
        metric = str(filter_groups.get("metric"))
        max_batches = filter_groups.get("max_inflight_gen_batches", 1)
    if metric == "reward" and not hasattr(replay_buffer, "FILTER_GROUPS_REWARD_METRIC"):
        raise UserError(
            "algorithm.filter_groups.metric = reward: this version of verl filters only by numbers that the reward "
            "function returns (0.9.1 filters by the reward too). Set the metric to one of them, for example acc or "
            "score."
        )
    refill = bool(_get(config, "trainer.v1.sampler.sync_refill_failed_groups"))
    train_batch = _get(config, "data.train_batch_size")
    # as verl does
    generation_batch = 1 if metric or refill else _get(config, "data.gen_batch_size") or train_batch
    return {
        "filter_groups_metric": metric,
        "sync_refill_failed_groups": refill,
        "train_batch_size": train_batch,
        "gen_batch_size": generation_batch,
        "max_inflight_gen_batches": max_batches,
    }


def _get(config: DictConfig, key: str, default: Any = None) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.select(config, key, default=default)
