"""A local Ray with verl's queue, and verl's configuration for the tiny policy."""

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import ray
import transfer_queue as tq
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import pods_rl

from .trainers import make_trainer

ROOT = Path(__file__).parents[2]
TINY = Path(pods_rl.__file__).parent / "policies" / "tiny"
REWARDS = [0.0, 1.0, 0.0, 0.3, 0.0, 1.0, 0.1, 0.0]


def start_ray(attempts: int = 5) -> None:
    """Start one local cluster; its 16 processors are a promise to Ray's scheduler, not a number of processes.

    Ray waits 15 seconds for the port of its agent, and no setting extends that: on a loaded machine it is tried again.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    for attempt in range(1, attempts + 1):
        try:
            ray.init(
                num_cpus=16,
                include_dashboard=False,
                log_to_driver=False,
                runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
            )
            return
        except Exception:
            ray.shutdown()
            if attempt == attempts:
                raise


@pytest.fixture(scope="session")
def queue():
    """A local cluster with verl's queue."""
    start_ray()
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()
    ray.shutdown()


@pytest.fixture
def empty_queue(queue):
    """Nothing of one test is left for the next."""
    yield
    for partition, keys in (tq.kv_list() or {}).items():
        if keys:
            tq.kv_clear(keys=list(keys), partition_id=partition)


def write_prompts(path: Path, scripts: list[dict[str, list]]) -> None:
    """Write prompts with their sessions' scripts; of each: rewards, turns (0: the session fails)."""
    rows = [
        {
            "data_source": "scripted",
            "prompt": [{"role": "user", "content": f"prompt {number}"}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"index": number, "rewards": REWARDS, "turns": [1], **script},
        }
        for number, script in enumerate(scripts)
    ]
    pd.DataFrame(rows).to_parquet(path)


@pytest.fixture(scope="session")
def workers(queue):
    """Agent-loop workers, which take long to start: the first trainer starts them, the others find them here."""
    return []


@pytest.fixture(scope="session")
def loops(tmp_path_factory):
    """verl's configuration of the scripted agent loop."""
    path = tmp_path_factory.mktemp("loops") / "loops.yaml"
    path.write_text("- name: scripted\n  _target_: tests.verl.scripted.ScriptedLoop\n")
    return path


@pytest.fixture
def make_config(tmp_path, loops):
    """The shipped configuration, cut to two prompts of 8 -> 4 on the tiny policy; overrides as on a command line."""

    def make(*overrides: str, scripts: list[dict[str, list]] | None = None) -> Any:
        prompts = tmp_path / "train.parquet"
        write_prompts(prompts, scripts or [{}] * 4)
        values = [
            f"data.train_files={prompts}",
            f"data.val_files={prompts}",
            f"+data.cache_dir={tmp_path}/cache",
            "data.train_batch_size=2",
            "data.filter_overlong_prompts=false",
            "data.dataloader_num_workers=0",
            "data.shuffle=false",
            f"actor_rollout_ref.model.path={TINY}",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.val_kwargs.n=3",
            "actor_rollout_ref.rollout.agent.num_workers=1",
            "actor_rollout_ref.rollout.agent.default_agent_loop=scripted",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "critic.ppo_mini_batch_size=1",
            "trainer.v1.sampler.sampler_kwargs.num_rollouts=8",
            "trainer.total_training_steps=2",
            *overrides,
        ]
        with initialize_config_module("pods_rl.recipes.verl", version_base=None):
            return compose("gsm8k", values)

    return make


@pytest.fixture
def trainer(make_config, workers, empty_queue):
    """Builds verl's trainer; overrides and scripts as of `make_config`."""

    def make(*overrides: str, scripts: list[dict[str, list]] | None = None, processes: int = 2) -> Any:
        return make_trainer(make_config(*overrides, scripts=scripts), workers, processes)

    return make
