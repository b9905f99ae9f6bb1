"""Rewards, methods and rules of a user's own: called as TRL calls them, and each rollout scored once."""

import json

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from pods_rl import PODSConfig, PODSTrainer
from pods_rl.errors import UserError
from pods_rl.selection import RULES

from .conftest import assert_equal_weights, kept_of, texts_of
from .test_losses import OFTEN, train
from .test_parity import TEMPLATE, chat_reward, chats

# -- what a reward is given ----------------------------------------------------------------------------------------


def test_a_reward_may_change_what_it_is_given(make_trainer, tokenizer, monkeypatch):
    """Each row has objects of its own, as in TRL, and no change reaches the ledger, the tokens or another rollout."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    seen = []

    def vandal(prompts, completions, completion_ids, meta, **_):
        scores = chat_reward(completions)
        seen.append([])
        for prompt, completion, ids, fact in zip(prompts, completions, completion_ids, meta, strict=True):
            prompt.append({"role": "user", "content": "more"})
            prompt[0]["content"] += "!"
            completion[0]["content"] = "gone"
            completion.append(None)
            ids.append(7)
            fact["list"].append(1)
            seen[-1].append((len(prompt), prompt[0]["content"].count("!"), len(fact["list"])))
        return scores

    plain = chats().add_column("meta", [{"list": [0]}] * 32)
    settings = {"train_dataset": plain, "num_rollouts": 8, "log_completions": True, "max_steps": 2}
    (trainer, changed), (other, expected) = (
        (made := make_trainer(reward=reward, **settings), train(made)[0]) for reward in (vandal, chat_reward)
    )
    assert_equal_weights(changed, expected)
    assert [set(rows) for rows in seen] == [{(2, 1, 2)}] * 2
    for column in ("prompt", "completion", "completion_tokens", "reward"):
        assert trainer.rollouts.columns()[column] == other.rollouts.columns()[column], column
    assert list(texts_of(trainer)["completion"]) == list(texts_of(other)["completion"])


# -- methods that users override -----------------------------------------------------------------------------------


SIZES = {  # of the arguments of each method that users override
    "_generate": lambda self, prompts: (len(prompts), self.num_generations),
    "_generate_single_turn": lambda self, ids, images, fields, n, *_: (len(ids), n),
    "_calculate_rewards": lambda self, *columns: tuple(map(len, columns[:3])),
    "_generate_and_score_completions": lambda self, inputs: (len(inputs),),
    "compute_loss": lambda self, model, inputs, *_: (len(inputs["advantages"]),),
    "_compute_loss": lambda self, model, inputs: (len(inputs["advantages"]),),
    "_get_per_token_logps_and_entropies": lambda self, model, ids, *_: (len(ids),),
    "get_train_dataloader": lambda self: (),
    "_get_train_sampler": lambda self, *_: (),
    "training_step": lambda self, *_: (),
    "log": lambda self, logs, *_: ("loss" in logs,),
}


def test_methods_that_users_override_are_called_as_trl_calls_them(make_trainer):
    """By name, how often and with what sizes; with n = m the same as TRL's."""

    def recorded(base):
        seen = []

        def recording(name, size):
            original = getattr(base, name)

            def method(self, *args, **kwargs):
                seen.append((name, *size(self, *args)))
                return original(self, *args, **kwargs)

            return method

        methods = {name: recording(name, size) for name, size in SIZES.items()}
        return type("Mine", (base,), methods), seen

    def calls(base, config, **settings):
        recording, seen = recorded(base)
        make_trainer(recording, config, **{**OFTEN, **settings}).train()
        return seen

    theirs, ours = calls(GRPOTrainer, GRPOConfig), calls(PODSTrainer, PODSConfig)
    assert sorted(ours) == sorted(theirs)
    assert {name for name, *_ in theirs} == set(SIZES)
    of_n = calls(PODSTrainer, PODSConfig, num_rollouts=12)
    sizes = {"_generate": (48, 4), "_generate_single_turn": (48, 4), "_calculate_rewards": (48, 48, 48)}
    assert sorted(of_n) == sorted((name, *sizes.get(name, size)) for name, *size in theirs)


def test_an_overridden_generate_calls_the_trainer_s_own(make_trainer):
    class Scripted(PODSTrainer):
        def _generate(self, prompts):
            ids = [[20 + i % 7] * (1 + i % 3) for i in range(len(prompts))]
            texts = self.processing_class.batch_decode(ids)
            return [[5]] * len(prompts), ids, None, texts, None, {}, None, []

    with pytest.raises(UserError, match=r"Scripted\._generate .*\b24 rows"):
        make_trainer(Scripted, num_rollouts=12, max_steps=1).train()


# -- a rule that is a function -------------------------------------------------------------------------------------


def last_ones(rewards, m, *, generator=None):
    """Indices that descend; the trainer keeps them in ascending order."""
    return torch.arange(rewards.shape[1] - 1, rewards.shape[1] - 1 - m, -1).repeat(len(rewards), 1)


class Strange:
    def __call__(self, rewards, m, *, generator=None):
        return last_ones(rewards, m)


@pytest.mark.parametrize("rule", [last_ones, lambda r, m, generator=None: last_ones(r, m), Strange(), RULES["random"]])
def test_a_rule_may_be_a_function(make_trainer, rule):
    trainer = make_trainer(num_rollouts=8, rule=rule, max_steps=1, save_strategy="steps")
    trainer.train()
    if rule is not RULES["random"]:
        assert kept_of(trainer.rollouts).tolist() == [[4, 5, 6, 7]] * 2
    written = json.loads(trainer.args.to_json_string())["rule"]
    assert written == "random" if rule is RULES["random"] else written.startswith(f"{__name__}:")
    assert written in json.dumps(trainer.args.to_sanitized_dict())
    assert "rule=" in repr(trainer.args)
    if rule is last_ones:
        assert make_trainer(num_rollouts=8, rule=written).args.rule == written  # an import path is taken back
