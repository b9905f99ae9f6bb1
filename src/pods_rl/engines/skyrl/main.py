"""SkyRL's entry point with PODS (docs/engines.md): a command of its own, or SkyRL's `trainer.override_entrypoint`.

python -m pods_rl.engines.skyrl.main pods.num_rollouts=16 ...
python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=pods_rl.engines.skyrl.main ...
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from ...errors import UserError
from .generator import PODSGenerator
from .settings import read_settings

# by which SkyRL's own entry point finds this module; its configuration of older versions has no such key
_OVERRIDE = "trainer.override_entrypoint="


@dataclass
class PODSTrainConfig(SkyRLTrainConfig):
    """SkyRL's configuration plus `pods.num_rollouts`, `pods.rule`, `pods.seed`, `pods.ledger`, `pods.ledger_every`."""

    pods: Any = field(default_factory=dict)  # `settings` refuses anything but a group of keys


class PODSExp(BasePPOExp):
    """SkyRL's experiment with `PODSGenerator` around its generator. Override `get_trainer` for another trainer."""

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> PODSGenerator:
        """Return SkyRL's generator, wrapped."""
        generator = super().get_generator(cfg, tokenizer, inference_engine_client)
        return PODSGenerator(generator, cfg, tokenizer=tokenizer, **cfg.pods)


@ray.remote(num_cpus=1)
def train(config: PODSTrainConfig) -> None:
    """Train, in a process of its own as SkyRL does."""
    PODSExp(config).run()


def read_config(arguments: list[str]) -> PODSTrainConfig:
    """Return the configuration of a command line, checked before any process starts.

    Raises:
        UserError: see `settings.read_settings`.
        ValueError: SkyRL's own for its keys.
    """
    config = PODSTrainConfig.from_cli_overrides([word for word in arguments if not word.startswith(_OVERRIDE)])
    read_settings(config, config.pods)
    validate_cfg(config)
    return config


def main() -> None:
    """Train with the settings of the command line; a mistake in them is one line and the exit code 2."""
    try:
        config = read_config(sys.argv[1:])
        initialize_ray(config)
        ray.get(train.remote(config))
    except UserError as error:
        # One of another process has that process's traceback as its text. Ray holds the error itself as `cause`.
        print(f"Error: {getattr(error, 'cause', error)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
