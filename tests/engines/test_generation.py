"""Each prompt once while the trainer generates: the same rollouts in every batch, and what goes to TRL's own way."""

import pytest

from pods_rl.engines.trl.step.turns import over_prefix_tree

from .conftest import around

pytestmark = pytest.mark.numeric
QUIET = {"max_steps": 1, "learning_rate": 0.0}


def texts(trainer):
    """What each prompt's rollouts say, by number."""
    trainer.train()
    record = trainer.rollouts
    n = record.rewards.size(1)
    groups = [tuple(record.completions[i : i + n]) for i in range(0, len(record.completions), n)]
    return dict(zip(record.prompts[::n], groups, strict=True))


def test_a_rollout_is_the_same_whatever_n_and_rows_at_once(make_trainer):
    sixteen = texts(make_trainer(num_rollouts=16, **QUIET))
    assert len(sixteen) == 2
    assert all(len(set(group)) > 8 for group in sixteen.values())
    for settings in ({"num_rollouts": 9, "rollout_batch_size": 5}, {"num_rollouts": 4}):
        fewer = texts(make_trainer(**settings, **QUIET))
        assert fewer == {prompt: group[: len(fewer[prompt])] for prompt, group in sixteen.items()}
    assert texts(make_trainer(num_rollouts=16, **QUIET, seed=4)) != sixteen


def test_keys_of_generation_reach_the_loop(make_trainer):
    settings = {"max_new_tokens": 2, "do_sample": False}
    for group in texts(make_trainer(num_rollouts=8, generation_kwargs=settings, **QUIET)).values():
        assert len(set(group)) == 1
        assert len(group[0]) <= 2 * 8


def test_generations_of_a_run_draw_anew(make_trainer):
    """Steps, and generations within a step: the weights and one of the prompts stay."""
    one = {"num_generations": 2, "num_rollouts": 4, "per_device_train_batch_size": 2, "max_completion_length": 6}
    trainer = make_trainer(**QUIET | one | {"max_steps": 2}, gradient_accumulation_steps=2, steps_per_generation=1)
    seen = []

    @around(trainer, "_generate_single_turn")
    def same_prompt(generate, prompt_ids, *args):
        seen.append(tuple(map(tuple, generate([[5, 6, 7]] * len(prompt_ids), *args)[0])))
        return [list(ids) for ids in seen[-1]], None

    trainer.train()
    assert len(seen) == len(set(seen)) == 4


@pytest.mark.parametrize(
    "settings",
    [{"prefix_tree": False}, {"exact_trl": True}, {"ds3_gather_for_generation": False}],
    ids=lambda settings: next(iter(settings)),
)
def test_with_the_lever_off_generate_is_untouched(make_trainer, monkeypatch, settings):
    trainer = make_trainer(num_rollouts=8, **settings)
    monkeypatch.setattr(trainer, "_dist", type("Dist", (), {"is_zero3": True, "is_fsdp": False})())
    with over_prefix_tree(trainer, [(0,)]):
        assert "generate" not in vars(trainer.model)
    with over_prefix_tree(make_trainer(num_rollouts=8), []):
        assert "generate" not in vars(trainer.model)
