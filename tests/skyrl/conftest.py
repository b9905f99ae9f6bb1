"""SkyRL's configuration for the tiny policy, and its trainer without workers."""

import sys
import typing
from pathlib import Path

import pytest
import typing_extensions

import pods_rl

# SkyRL 0.3 says that it runs on Python 3.11, where pydantic refuses its TypedDict: it is replaced for the import.
TYPED_DICT = typing.TypedDict
if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402

typing.TypedDict = TYPED_DICT

from skyrl.utils.tok import get_tokenizer  # noqa: E402

from pods_rl.engines.skyrl.main import PODSTrainConfig  # noqa: E402

from .parts import Dispatch, Tracker  # noqa: E402

TINY = Path(pods_rl.__file__).parent / "policies" / "tiny"


@pytest.fixture(scope="session")
def tokenizer():
    tokenizer = get_tokenizer(str(TINY))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


@pytest.fixture
def make_config(tmp_path):
    """Reads the command line of a run with the tiny policy: by default 2 prompts of m = 4."""

    def make(*overrides: str) -> PODSTrainConfig:
        values = [
            f"trainer.policy.model.path={TINY}",
            "trainer.train_batch_size=2",
            "trainer.policy_mini_batch_size=1",
            "trainer.micro_train_batch_size_per_gpu=1",
            "trainer.placement.colocate_all=false",
            "trainer.placement.policy_num_gpus_per_node=1",
            "trainer.logger=console",
            "trainer.eval_interval=0",
            "trainer.eval_before_train=false",
            "trainer.ckpt_interval=0",
            "trainer.hf_save_interval=0",
            "trainer.resume_mode=none",
            "trainer.max_prompt_length=64",
            f"trainer.ckpt_path={tmp_path}/checkpoints",
            f"trainer.export_path={tmp_path}/export",
            f"trainer.log_path={tmp_path}/logs",
            "generator.inference_engine.enable_ray_prometheus_stats=false",
            "generator.n_samples_per_prompt=4",
            "generator.sampling_params.max_generate_length=4",
            "generator.eval_sampling_params.max_generate_length=4",
            "data.dataloader.num_workers=0",
            *overrides,
        ]
        return PODSTrainConfig.from_cli_overrides(values)

    return make


@pytest.fixture
def make_trainer(tokenizer):
    """Builds SkyRL's trainer; `Dispatch` replaces its workers, which need GPUs."""

    def make(config, generator, *, trainer=RayPPOTrainer, dispatch=None, engine=None, train=None, evaluation=None):
        made = trainer(
            cfg=config,
            tracker=Tracker(),
            tokenizer=tokenizer,
            train_dataset=train,
            eval_dataset=evaluation,
            inference_engine_client=engine,
            generator=generator,
        )
        made.dispatch = dispatch or Dispatch()
        return made

    return make
