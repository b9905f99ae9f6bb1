"""What PODSTrainer does with n rollouts: scores each once, trains on m, skips empty steps, and says so."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig

from pods_rl import PODSConfig, PODSTrainer
from pods_rl.engines.trl.compat import refuse_unsupported
from pods_rl.errors import UserError
from tests.numeric import FLOAT32, assert_near

from .conftest import letter_reward


def count_forward_rows(trainer):
    """Rows of every pass that computes log-probabilities, by model: policy without and with gradient, reference."""
    rows = Counter()

    def hook(kind):
        def count(module, args, kwargs):
            if kwargs.get("labels") is None:  # generation passes no labels
                return
            key = kind if kind == "reference" else f"{kind}{' update' if torch.is_grad_enabled() else ' old'}"
            rows[key] += kwargs["input_ids"].size(0)

        return count

    trainer.model.register_forward_pre_hook(hook("policy"), with_kwargs=True)
    if trainer.ref_model is not None:
        trainer.ref_model.register_forward_pre_hook(hook("reference"), with_kwargs=True)
    return rows


def test_only_kept_rows_reach_a_forward_pass(make_trainer):
    trainer = make_trainer(
        num_rollouts=16,
        prompt_once=False,
        beta=0.04,
        num_iterations=2,
        steps_per_generation=2,
        gradient_accumulation_steps=4,
        per_device_train_batch_size=4,
        max_steps=2,
    )
    # a generation: 2 micro-batches x 4 rows = 2 groups of m = 4; it feeds 2 x 2 micro-batches, one optimizer step
    rows = count_forward_rows(trainer)
    trainer.train()
    assert rows["policy update"] == 2 * 4 * 4
    assert rows["reference"] == 2 * 8
    assert rows["policy old"] == 0  # four micro-batches per step, generated every four: on-policy


def test_old_log_probabilities_see_kept_rows_only(make_trainer):
    trainer = make_trainer(
        num_rollouts=16, steps_per_generation=4, gradient_accumulation_steps=2, per_device_train_batch_size=4,
        max_steps=4, prompt_once=False,
    )  # fmt: skip
    rows = count_forward_rows(trainer)
    trainer.train()
    assert rows["policy old"] == 2 * 16
    assert rows["policy update"] == 4 * 2 * 4


def test_each_rollout_is_scored_once(make_trainer):
    seen = []

    def reward(prompts, completions, answer, **kwargs):
        assert len(prompts) == len(completions) == len(answer) == 2 * 16
        seen.append(list(prompts))
        return letter_reward(completions)

    make_trainer(reward=reward, num_rollouts=16, max_steps=3).train()
    assert len(seen) == 3
    assert all(prompts[:16] == [prompts[0]] * 16 for prompts in seen)


async def async_reward(completions, **_):
    return letter_reward(completions)


def test_async_rewards_and_several_functions(make_trainer):
    trainer = make_trainer(reward=[letter_reward, async_reward], num_rollouts=8, reward_weights=[1.0, 0.5], max_steps=1)
    trainer.train()
    rollouts = trainer.rollouts
    assert_near(rollouts.rewards.flatten(), rollouts.rewards_per_func @ torch.tensor([1.0, 0.5]), FLOAT32)


def test_the_kept_rows_have_maximal_variance_and_the_paper_s_advantages(make_trainer):
    trainer = make_trainer(num_rollouts=12, max_steps=1)
    trainer.train()
    r = trainer.rollouts
    for rewards, kept, advantages in zip(r.rewards, r.kept, r.advantages, strict=True):
        chosen = rewards[kept]
        best = max(torch.cat([rewards.sort().values[: 4 - k], rewards.sort().values[12 - k :]]).var() for k in range(5))
        assert_near(chosen.var(), best, FLOAT32)
        assert_near(advantages, (chosen - chosen.mean()) / (chosen.std() + 1e-4), FLOAT32)


def last_first(rewards, m, *, generator=None):
    """A rule of a user's own, whose indices descend."""
    return torch.arange(rewards.shape[1] - 1, rewards.shape[1] - 1 - m, -1).repeat(len(rewards), 1)


def test_kept_rows_ascend_whatever_order_a_rule_gives(make_trainer):
    trainer = make_trainer(
        num_rollouts=8, num_generations=4, per_device_train_batch_size=4, rule=f"{__name__}:last_first"
    )
    trainer.train()
    assert trainer.rollouts.kept.tolist() == [[4, 5, 6, 7]]


def test_advantages_before_selection(make_trainer):
    trainer = make_trainer(num_rollouts=12, advantages="before", max_steps=1)
    trainer.train()
    r = trainer.rollouts
    for rewards, kept, advantages in zip(r.rewards, r.kept, r.advantages, strict=True):
        expected = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[kept]
        assert_near(advantages, expected, FLOAT32)
    assert list(trainer._logs["advantages"]) == pytest.approx(r.advantages.flatten().tolist())


def test_metrics_cover_all_n_and_the_kept_apart(make_trainer):
    trainer = make_trainer(num_rollouts=12, max_steps=1)
    trainer.train()
    logs, r = trainer.state.log_history[0], trainer.rollouts
    assert logs["reward"] == pytest.approx(r.rewards.mean().item())
    assert logs["rewards/letter_reward/mean"] == pytest.approx(r.rewards.mean().item())
    kept = r.rewards.gather(1, r.kept)
    assert logs["pods/selected/reward_mean"] == pytest.approx(kept.mean().item())
    assert logs["pods/selected/reward_std"] == pytest.approx(kept.std(dim=1).mean().item())
    assert logs["pods/tokens/generated"] == sum(r.completion_tokens)
    kept_tokens = sum(r.completion_tokens[p * 12 + i] for p, row in enumerate(r.kept.tolist()) for i in row)
    assert logs["pods/tokens/trained"] == kept_tokens
    assert logs["completions/mean_length"] == pytest.approx(sum(r.completion_tokens) / 24)
    for phase in ("rollout", "reward", "selection", "update"):
        assert logs[f"pods/seconds/{phase}"] > 0


def test_the_ledger_s_columns(make_trainer):
    trainer = make_trainer(num_rollouts=6, max_steps=1)
    trainer.train()
    columns = trainer.rollouts.columns()
    assert {len(values) for values in columns.values()} == {12}
    assert sum(columns["selected"]) == 8
    assert [a is not None for a in columns["advantage"]] == columns["selected"]
    assert columns["reward"] == columns["reward/letter_reward"]
    assert columns["answer"] == ["3"] * 12


def test_rollout_batch_size_bounds_a_generation(make_trainer, monkeypatch):
    trainer = make_trainer(num_rollouts=12, rollout_batch_size=5, max_steps=1)
    rows = []
    generate = trainer.model.generate
    monkeypatch.setattr(trainer.model, "generate", lambda **kw: (rows.append(len(kw["input_ids"])), generate(**kw))[1])
    trainer.train()
    assert rows == [5, 5, 5, 5, 4]
    assert len(trainer.rollouts.completions) == 24


def test_evaluation_is_not_down_sampled(make_trainer, dataset):
    trainer = make_trainer(
        num_rollouts=12, trainer_arguments={"eval_dataset": dataset.select(range(2))},
        per_device_eval_batch_size=4, num_generations_eval=4,
    )  # fmt: skip
    metrics = trainer.evaluate()
    assert trainer.rollouts is None
    assert "eval_reward" in metrics


# -- steps without signal ------------------------------------------------------------------------------------------


def constant(completions, **_):
    return [1.0] * len(completions)


def test_a_step_without_signal_moves_nothing(make_trainer):
    """Even after a step that filled the momentum, and with weight decay."""
    calls = []

    def first_then_constant(completions, **_):
        calls.append(1)
        return letter_reward(completions) if len(calls) == 1 else constant(completions)

    trainer = make_trainer(reward=first_then_constant, num_rollouts=8, max_steps=1, weight_decay=0.1)
    trainer.train()
    calls.clear()
    after_one = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    more = make_trainer(reward=first_then_constant, num_rollouts=8, max_steps=3, weight_decay=0.1)
    more.train()
    assert all(torch.equal(after_one[n], p) for n, p in more.model.named_parameters())
    history = more.state.log_history
    assert [row.get("pods/skipped_step", 0.0) for row in history[:3]] == [0.0, 1.0, 1.0]
    assert [row["pods/zero_variance_share"] for row in history[:3]] == [0.0, 1.0, 1.0]
    assert [row["pods/tokens/trained"] for row in history[1:3]] == [0.0, 0.0]


@pytest.mark.parametrize("n", [6, 12])
def test_equal_rewards_whose_mean_is_rounded_teach_nothing(make_trainer, random_model, n):
    """In float32 the mean of six times 0.975 is not 0.975: without care, noise of 1e-3 would pass for an advantage."""
    rewards = torch.full((6,), 0.975)
    assert (rewards.nanmean() != rewards).all()
    trainer = make_trainer(
        reward=lambda completions, **_: [0.975] * len(completions),
        num_generations=6, num_rollouts=n, per_device_train_batch_size=6, max_steps=2, skip_zero_advantage_steps=True,
    )  # fmt: skip
    trainer.train()
    assert [row.get("pods/skipped_step", 0.0) for row in trainer.state.log_history[:2]] == [1.0, 1.0]
    for p, q in zip(trainer.model.parameters(), random_model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_option_restores_trl_s_behaviour(make_trainer, random_model):
    trainer = make_trainer(
        reward=constant, num_rollouts=8, skip_zero_advantage_steps=False, weight_decay=0.1, max_steps=1
    )
    trainer.train()
    moved = [not torch.equal(p, q) for p, q in zip(trainer.model.parameters(), random_model.parameters(), strict=True)]
    assert any(moved)


def test_a_step_of_several_generations_is_skipped_only_if_none_has_signal(make_trainer):
    calls = []

    def second_only(completions, **_):
        calls.append(1)
        return letter_reward(completions) if len(calls) == 2 else constant(completions)

    def train(max_steps):
        calls.clear()
        schedule = {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "weight_decay": 0.1}
        trainer = make_trainer(
            reward=second_only, num_rollouts=8, max_steps=max_steps, lr_scheduler_type="constant", **schedule
        )
        trainer.train()
        return trainer

    one, two = train(1), train(2)
    assert [row.get("pods/skipped_step", 0.0) for row in two.state.log_history[:2]] == [0.0, 1.0]
    assert all(torch.equal(p, q) for p, q in zip(one.model.parameters(), two.model.parameters(), strict=True))


def test_a_micro_batch_without_signal_is_passed_where_its_step_has_some(make_trainer):
    """Only a step without any signal is left out."""
    schedule = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "per_device_train_batch_size": 4}
    trainer = make_trainer(num_rollouts=8, **schedule)
    signals = [True, False, False, False]
    mask = torch.ones(4, 2, dtype=torch.int64)
    micro_batches = [{"advantages": torch.full((4,), float(on)), "completion_mask": mask} for on in signals]
    arranged = trainer._update.arrange(micro_batches)
    assert [batch["has_signal"] for batch in arranged] == signals
    assert [batch["skip"] for batch in arranged] == [False, False, True, True]


# -- bad rewards ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 1e38, None])
def test_bad_rewards_never_reach_the_loss(make_trainer, scale, bad):
    def reward(completions, **_):
        return [bad if i % 3 == 0 else v for i, v in enumerate(letter_reward(completions))]

    trainer = make_trainer(reward=reward, num_rollouts=12, scale_rewards=scale, max_steps=2)
    trainer.train()
    r = trainer.rollouts
    assert torch.isfinite(r.advantages).all()
    assert not any(i % 3 == 0 for i in r.kept.flatten().tolist())
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    first = trainer.state.log_history[0]
    assert first.get("pods/unusable_rewards", 0.0) == (0.0 if bad is None or bad != bad else 8.0)
    assert first.get("pods/unscored_rollouts", 0.0) == 8.0


def test_a_weight_that_makes_a_reward_infinite_is_seen(make_trainer):
    trainer = make_trainer(
        reward=lambda completions, **_: [1e10 if i == 1 else 0.0 for i in range(len(completions))],
        reward_weights=[1e30], num_rollouts=12, max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.rollouts.rewards.isnan().sum() == 1
    assert torch.isfinite(trainer.rollouts.advantages).all()


def test_a_group_with_too_few_scores_fills_up_with_zero_advantage(make_trainer):
    def reward(completions, **_):
        return [float(i) if i % 12 < 2 else None for i in range(len(completions))]

    trainer = make_trainer(reward=reward, num_rollouts=12, max_steps=1)
    trainer.train()
    r = trainer.rollouts
    kept = r.rewards.gather(1, r.kept)
    assert (~kept.isnan()).sum(dim=1).tolist() == [2, 2]
    assert (r.advantages[kept.isnan()] == 0).all()


# -- refusals ------------------------------------------------------------------------------------------------------


def test_deepspeed_on_the_cpu_is_refused_where_accelerate_would_use_ddp(make_trainer, monkeypatch):
    args = PODSConfig("out", use_cpu=True, bf16=False)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UserError, match=r"asks for DeepSpeed, and this runs on the CPU.*fsdp2 or ddp"):
        refuse_unsupported({"args": args})


@pytest.mark.parametrize("name", ["tools", "environment_factory"])
def test_turns_are_refused_where_each_gathers_the_weights(monkeypatch, name):
    monkeypatch.setattr("pods_rl.engines.trl.compat.is_deepspeed_zero3_enabled", lambda: True)
    given = {"args": PODSConfig("out", use_cpu=True, bf16=False)}
    refuse_unsupported(given)
    with pytest.raises(UserError, match=f"{name} cannot be used with DeepSpeed's ZeRO-3 without vLLM"):
        refuse_unsupported(given | {name: [print]})


def test_a_plain_grpo_config_is_refused(make_trainer):
    with pytest.raises(TypeError, match="PODSConfig"):
        make_trainer(config_class=GRPOConfig)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_rollouts": 2, "num_generations": 4}, "num_rollouts"),
        ({"rule": "max_varianse"}, "max_variance"),
        ({"advantages": "sideways"}, "after"),
        ({"reward_errors": "ignore"}, "drop"),
        ({"rollout_batch_size": 0}, "rollout_batch_size"),
    ],
)
def test_impossible_configurations_are_refused(tmp_path, config, words):
    with pytest.raises((UserError, ValueError), match=words):
        PODSConfig(str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=8, **config)


def test_trl_s_own_call_works(tokenizer, random_model, tmp_path):
    """Positional arguments, a LoRA adapter and a conversational-free dataset, as TRL's documentation writes it."""
    from peft import LoraConfig

    trainer = PODSTrainer(
        copy.deepcopy(random_model),  # LoRA is put into the model it is given
        letter_reward,
        PODSConfig(
            str(tmp_path), num_generations=2, num_rollouts=4, per_device_train_batch_size=2, max_steps=1,
            use_cpu=True, bf16=False, max_completion_length=4, report_to="none", disable_tqdm=True, beta=0.01,
        ),
        Dataset.from_dict({"prompt": ["1+1="] * 4}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )  # fmt: skip
    trainer.train()
    assert trainer.rollouts.kept.shape == (1, 2)


def test_the_table_of_completions_cannot_steer_a_terminal(make_trainer, capsys):
    trainer = make_trainer(log_completions=True)
    hostile = "\x1b]0;owned\x07 [/red] \x9b2J"
    trainer._logs["prompt"].append([{"role": "user", "content": hostile}])
    trainer._logs["completion"].append(hostile)
    trainer._logs["extra"]["note"] = [hostile]
    trainer._logs["rewards"]["mine"] = [1.0]
    trainer._logs["advantages"].append(0.0)
    trainer.log({})
    printed = capsys.readouterr().out
    assert printed.count("owned") >= 3
    assert not {"\x1b", "\x07", "\x9b"} & set(printed)


def test_processor_time_is_of_one_process_on_a_cpu(monkeypatch):
    assert PODSConfig("out", clock="cpu", use_cpu=True, bf16=False).clock == "cpu"
    monkeypatch.setattr(PODSConfig, "world_size", property(lambda self: 2))
    with pytest.raises(UserError, match=r"got 2 process\(es\) on cpu"):
        PODSConfig("out", clock="cpu", use_cpu=True, bf16=False)
    with pytest.raises(UserError, match="clock = 'sun': expected wall or cpu"):
        PODSConfig("out", clock="sun", use_cpu=True, bf16=False)
