"""From a recipe to a trainer: what a library refuses is one line, before weights load where that can be known."""

from __future__ import annotations

import pytest

from pods_rl.errors import UserError
from pods_rl.recipe import Origin, build_recipe
from pods_rl.tasks import load_task
from pods_rl.training import trainer as build

RECIPE = {
    "max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False,
    "task_train_size": 4, "task_test_size": 2, "task_rewards": {"format": 1.0},
}  # fmt: skip


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """What a recipe with these keys is refused with, and its cause; no policy may load."""
    monkeypatch.setattr(build, "RunTrainer", None)

    def refusal(**keys):
        recipe = build_recipe({**RECIPE, **keys}, Origin("r.yaml"))
        with pytest.raises(UserError) as raised:
            build.build_trainer(recipe, load_task(recipe.task_settings()), tmp_path)
        return str(raised.value), raised.value.__cause__

    return refusal


def test_what_a_library_refuses_is_one_line_with_its_key_and_its_cause(refused):
    message, cause = refused(fsdp="x")
    assert message == "r.yaml: the trainer rejects this recipe: Unknown `fsdp` option: x Check fsdp."
    assert isinstance(cause, ValueError)
    message, cause = refused(accelerator_config={"nope": 1})
    assert "nope" in message
    assert isinstance(cause, TypeError)
    assert "\n" not in message
