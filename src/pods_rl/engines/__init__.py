"""The engines that train: TRL's trainer, TRL's asynchronous trainer, verl and SkyRL."""

PHASES = ("rollout", "reward", "selection", "update")  # of a step, each with a metric pods/seconds/<phase>
TESTED = {"trl": "1.16.0", "transformers": "5.23.0"}  # the versions that the engines are written for
