"""Steps that a plan measures: each with its own n and m, real work, and a policy that does not move."""

from __future__ import annotations

import pytest
import torch

from pods_rl.errors import UserError
from pods_rl.planning.measure import Meter
from pods_rl.planning.prices import Setting

from .vllm_stand_in import LLM, Client, stand_ins

SETTINGS = [Setting(4, 4), Setting(16, 4), Setting(8, 8)]


def test_each_step_does_the_work_of_its_own_setting(make_trainer) -> None:
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = make_trainer(learning_rate=0.0, max_steps=99, **accumulated)
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    progress: list[str] = []
    meter = Meter(trainer, show=progress.append)
    meter.run(meter.rounds(SETTINGS, seconds=0))
    assert len(progress) == 9
    assert all(" s of " not in line for line in progress)  # its time was over before the first step
    works = {setting: [step.work for step in steps] for setting, steps in meter.steps.items()}
    assert {setting: [(w.prompts, w.rollouts) for w in some] for setting, some in works.items()} == {
        Setting(4, 4): [(2, 8)] * 2, Setting(16, 4): [(2, 32)] * 2, Setting(8, 8): [(1, 8)] * 2,
    }  # fmt: skip
    assert all(0 < work.rows <= 8 for some in works.values() for work in some)
    assert all(step.generation > 0 and step.update > 0 for steps in meter.steps.values() for step in steps)
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert trainer.state.global_step == 9  # a round that warms up, and two
    assert sum(map(len, meter.rewards.values())) == 3 * (8 + 32 + 8)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [((4, 8), "num_rollouts = 4 .*num_generations = 8"), ((8, 3), "num_generations = 3")],
)
def test_group_sizes_that_the_batch_cannot_hold_are_refused(make_trainer, sizes, problem) -> None:
    trainer = make_trainer()
    with pytest.raises(UserError, match=problem):
        trainer.measure(*sizes)


@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_vllm_generates_as_many_rollouts_as_each_setting_has(make_trainer, mode) -> None:
    with stand_ins():
        trainer = make_trainer(use_vllm=True, vllm_mode=mode, num_rollouts=16, learning_rate=0.0, max_steps=9)
        Meter(trainer).run(iter(SETTINGS))
        (generator,) = Client.made + LLM.made
        sent = generator.sent("generate")
    counts = [s["n"] * len(s["prompts"]) if mode == "server" else len(s[0]) for s in sent]
    assert counts == [8, 32, 8]
