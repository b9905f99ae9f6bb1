"""Rewards, methods and rules of a user's own: called as TRL calls them, and each rollout scored once."""

from __future__ import annotations

import json

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler

from pods_rl import PODSConfig, PODSTrainer
from pods_rl.errors import UserError
from pods_rl.selection import RULES

from .conftest import PROMPTS
from .test_losses import OFTEN, train
from .test_parity import TEMPLATE, chat_reward, chats, none_and_nan

# -- what a reward is given ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 8])
def test_a_reward_may_change_what_it_is_given(make_trainer, tokenizer, monkeypatch, n):
    """Each row has objects of its own, as in TRL, and no change reaches the ledger, the tokens or another rollout."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    seen = []

    def vandal(prompts, completions, completion_ids, meta, tags, **_):
        scores = chat_reward(completions)
        seen.append([])
        for prompt, completion, ids, fact, tag in zip(prompts, completions, completion_ids, meta, tags, strict=True):
            prompt.append({"role": "user", "content": "more"})
            prompt[0]["content"] += "!"
            completion[0]["content"] = "gone"
            completion.append(None)
            ids.append(7)
            fact["list"].append(1)
            tag.append("x")
            seen[-1].append((len(prompt), prompt[0]["content"].count("!"), len(fact["list"]), len(tag)))
        return scores

    plain = chats().add_column("meta", [{"list": [0]}] * 32).add_column("tags", [["a"]] * 32)
    settings = {"train_dataset": plain, "num_rollouts": n, "log_completions": True, "max_steps": 2}
    (trainer, changed), (other, expected) = (
        (made := make_trainer(reward=reward, **settings), train(made)[0]) for reward in (vandal, chat_reward)
    )
    assert all(torch.equal(weight, expected[key]) for key, weight in changed.items())
    assert [set(rows) for rows in seen] == [{(2, 1, 2, 2)}] * 2
    for column in ("prompt", "completion", "completion_tokens", "reward"):
        assert trainer.rollouts.columns()[column] == other.rollouts.columns()[column], column
    assert list(trainer._logs["completion"]) == list(other._logs["completion"])


# -- methods that users override -----------------------------------------------------------------------------------


def test_an_overridden_calculate_rewards_shapes_what_is_selected_and_what_is_trained(make_trainer):
    calls = []

    class Shaped(PODSTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            calls.append(len(completions))
            return 2 * super()._calculate_rewards(inputs, prompts, completions, completion_ids_list) + 1

    plain = make_trainer(num_rollouts=12, max_steps=1)
    plain.train()
    shaped = make_trainer(Shaped, num_rollouts=12, max_steps=1)
    shaped.train()
    assert calls == [24, 8]  # all rollouts, then the kept ones, whose scores are known
    assert torch.equal(shaped.rollouts.rewards, 2 * plain.rollouts.rewards + 1)
    assert torch.equal(shaped.rollouts.kept, plain.rollouts.kept)
    kept = shaped.rollouts.rewards.gather(1, shaped.rollouts.kept)
    assert list(shaped._logs["rewards"]["letter_reward"]) == kept.flatten().tolist()


def test_methods_that_users_override_are_called_as_trl_calls_them(make_trainer):
    """By name, how often and with what sizes; with n = m the same as TRL's."""

    def recorded(base):
        class Mine(base):
            calls: list = []  # noqa: RUF012

            def _generate(self, prompts):
                output = super()._generate(prompts)
                self.calls.append(("_generate", len(prompts), len(output[1]), self.num_generations))
                return output

            def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, *more):
                self.calls.append(("_generate_single_turn", len(prompt_ids), num_generations))
                return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, *more)

            def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
                self.calls.append(("_calculate_rewards", len(inputs), len(prompts), len(completions)))
                return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

            def _generate_and_score_completions(self, inputs):
                self.calls.append(("_generate_and_score_completions", len(inputs)))
                return super()._generate_and_score_completions(inputs)

            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                self.calls.append(("compute_loss", len(inputs["advantages"])))
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

            def _compute_loss(self, model, inputs):
                self.calls.append(("_compute_loss", len(inputs["advantages"])))
                return super()._compute_loss(model, inputs)

            def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
                self.calls.append(("_get_per_token_logps_and_entropies", len(input_ids)))
                return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)

            def get_train_dataloader(self):
                self.calls.append(("get_train_dataloader",))
                return super().get_train_dataloader()

            def _get_train_sampler(self, dataset=None):
                self.calls.append(("_get_train_sampler",))
                return super()._get_train_sampler(dataset)

            def training_step(self, model, inputs, num_items_in_batch=None):
                self.calls.append(("training_step",))
                return super().training_step(model, inputs, num_items_in_batch)

            def log(self, logs, start_time=None):
                self.calls.append(("log", "loss" in logs))
                return super().log(logs, start_time)

        return Mine

    def calls(base, config, **settings):
        trainer = make_trainer(recorded(base), config, **{**OFTEN, **settings})
        trainer.train()
        return type(trainer).calls

    theirs, ours = calls(GRPOTrainer, GRPOConfig), calls(PODSTrainer, PODSConfig)
    scored = [call for call in theirs if call[0] == "_calculate_rewards"]
    assert sorted(ours) == sorted(theirs + scored)  # before the selection, and where TRL asks for the kept rows' scores
    assert len({name for name, *_ in theirs}) == 11
    of_n = calls(PODSTrainer, PODSConfig, num_rollouts=12)
    sizes = {"_generate_single_turn": (48, 4)}
    expected = [(name, *sizes.get(name, size)) for name, *size in theirs]
    assert sorted(of_n) == sorted(expected + [("_calculate_rewards", 48, 48, 48)] * len(scored))


def test_an_overridden_generate_calls_the_trainer_s_own(make_trainer):
    class Scripted(PODSTrainer):
        def _generate(self, prompts):
            ids = [[20 + i % 7] * (1 + i % 3) for i in range(len(prompts))]
            texts = self.processing_class.batch_decode(ids)
            return [[5]] * len(prompts), ids, None, texts, None, {}, None, []

    with pytest.raises(UserError, match=r"Scripted._generate returned 24 rows without a selection"):
        make_trainer(Scripted, num_rollouts=12, max_steps=1).train()


def test_a_sampler_of_the_user_s_own_is_used(make_trainer):
    class FirstOnly(PODSTrainer):
        def _get_train_sampler(self, dataset=None):
            return RepeatSampler([0, 1], mini_repeat_count=4, batch_size=2, repeat_count=1, shuffle=False)

    trainer = make_trainer(FirstOnly, num_rollouts=8, max_steps=3)
    trainer.train()
    assert set(trainer.rollouts.prompts) == set(PROMPTS[:2])


# -- a rule that is a function -------------------------------------------------------------------------------------


def last_ones(rewards, m, *, generator=None):
    return torch.arange(rewards.shape[1] - m, rewards.shape[1]).repeat(len(rewards), 1)


class Strange:
    def __call__(self, rewards, m, *, generator=None):
        return last_ones(rewards, m)


@pytest.mark.parametrize("rule", [last_ones, lambda r, m, generator=None: last_ones(r, m), Strange(), RULES["random"]])
def test_a_rule_may_be_a_function(make_trainer, rule):
    trainer = make_trainer(num_rollouts=8, rule=rule, max_steps=1, save_strategy="steps")
    trainer.train()
    if rule is not RULES["random"]:
        assert trainer.rollouts.kept.tolist() == [[4, 5, 6, 7]] * 2
    written = json.loads(trainer.args.to_json_string())["rule"]
    assert written == "random" if rule is RULES["random"] else written.startswith(f"{__name__}:")
    assert written in json.dumps(trainer.args.to_sanitized_dict())
    assert "rule=" in repr(trainer.args)
    if rule is last_ones:
        assert make_trainer(num_rollouts=8, rule=written).args.rule == written  # an import path is taken back


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda rewards: rewards, r"takes \(rewards\); expected a function of \(rewards, m, \*, generator=None\)"),
        (f"{none_and_nan.__module__}:none_and_nan", r"takes \(completions, \*\*_\); expected a function of"),
        (3, "a rule must be the name of one; got 3"),
        (Strange, "a rule must be the name of one; got <class"),
        ("max_varianse", "did you mean 'max_variance'"),
    ],
)
def test_what_cannot_be_a_rule_is_refused_at_once(tmp_path, rule, words):
    with pytest.raises(UserError, match=words):
        PODSConfig(str(tmp_path), use_cpu=True, bf16=False, rule=rule)
