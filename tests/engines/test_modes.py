"""One mode at a time: which one TRL's methods find, and that it is left however they end."""

from __future__ import annotations

import pytest

from pods_rl import PODSTrainer

from .conftest import half_dead

ONE_STEP = {"max_steps": 1, "num_rollouts": 8}


class Watched(PODSTrainer):
    """Notes the mode in which each of TRL's methods is called."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)
        self.seen.clear()  # the constructor has tokenized prompts

    def _note(self, method):
        self.seen.append((method, self._mode))

    def _generate_and_score_completions(self, inputs):
        self._note("score")
        return super()._generate_and_score_completions(inputs)

    def _tokenize_prompts(self, prompts):
        self._note("tokenize")
        return super()._tokenize_prompts(prompts)

    def _generate_single_turn(self, *args, **kwargs):
        self._note("turn")
        return super()._generate_single_turn(*args, **kwargs)

    def _calculate_rewards(self, *columns):
        self._note("reward")
        return super()._calculate_rewards(*columns)


def of_a_generation(mode):
    """What a generation shows that begins in a mode."""
    return [("score", mode), *((name, "generating") for name in ("tokenize", "turn", "reward"))]


def test_a_step_generates_and_an_evaluation_has_a_mode_of_its_own(make_trainer):
    trainer = make_trainer(Watched, **ONE_STEP)
    trainer.train()
    assert trainer.seen == of_a_generation("resting")
    trainer.seen.clear()
    trainer.evaluate(trainer.train_dataset.select(range(1)))
    inside = [(name, "evaluating") for name in ("tokenize", "turn", "reward")]
    assert trainer.seen == [("score", "resting"), *inside]


def test_measuring_stays_for_the_next_generations(make_trainer):
    trainer = make_trainer(Watched, **ONE_STEP | {"max_steps": 2})
    trainer.measure(num_rollouts=6, num_generations=2)
    trainer.train()
    assert trainer.seen == 2 * of_a_generation("resting")
    assert trainer.rollouts.rewards.shape == (4, 6)


def test_new_prompts_of_dynamic_sampling_pass_through_a_subclass_s_method(make_trainer):
    settings = {"dynamic_sampling": True, "dynamic_sampling_rounds": 8, "per_device_train_batch_size": 16}
    trainer = make_trainer(Watched, reward=half_dead, **settings, **ONE_STEP)
    trainer.train()
    rounds = trainer.seen[4:]
    assert rounds
    assert trainer.seen[:4] == of_a_generation("resting")
    assert rounds == len(rounds) // 4 * of_a_generation("adding")


@pytest.mark.parametrize("method", ["_tokenize_prompts", "_calculate_rewards"])
def test_a_mode_is_left_when_a_method_raises(make_trainer, method):
    def raising(*_):
        raise KeyError(method)

    trainer = make_trainer(**ONE_STEP)
    setattr(trainer, method, raising)
    with pytest.raises(KeyError):
        trainer.train()
    assert trainer._mode == "resting"
