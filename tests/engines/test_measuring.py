"""Steps that a plan measures: each with its own prompts and rollouts, real work, and a policy that does not move."""

import torch

from pods_rl.planning.measure import Meter
from pods_rl.planning.plan import Setting

SETTINGS = [
    Setting(2, 4, 4, "none"),
    Setting(2, 16, 4, "prompt"),
    Setting(1, 8, 8, "none"),
    Setting(4, 4, 4, "batch"),
]


def test_each_step_does_the_work_of_its_own_setting(make_trainer) -> None:
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = make_trainer(learning_rate=0.0, max_steps=99, **accumulated)
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    progress: list[str] = []
    seen: list[tuple[Setting, tuple[int, ...], int]] = []

    class Watched(Meter):
        def on_log(self, *args, logs=None, **others) -> None:
            if self._setting is not None and logs and "train_runtime" not in logs:
                record = trainer.rollouts
                seen.append((self._setting, tuple(record.rewards.shape), len(record.kept)))
            super().on_log(*args, logs=logs, **others)

    meter = Watched(trainer, passes=1, show=progress.append)
    meter.run(SETTINGS, seconds=0)
    assert len(progress) == len(seen) == 3 * len(SETTINGS)  # a round that warms up, and two
    for setting, shape, kept in seen:
        assert shape == (setting.prompts, setting.n)
        assert kept == 8
    assert {setting: len(steps) for setting, steps in meter.steps.items()} == dict.fromkeys(SETTINGS, 2)
    assert all(step.seconds > 0 and 0 <= step.without_signal <= 1 for steps in meter.steps.values() for step in steps)
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert meter.facts()["rewards"].endswith(f"of {3 * (8 + 32 + 8 + 16)} rollouts")
