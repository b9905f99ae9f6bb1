"""What PODSTrainer does with n rollouts: scores each once, trains on m, skips empty steps, and says so."""

import math
from collections import Counter

import pytest
import torch
from trl import GRPOConfig

from pods_rl import PODSConfig
from pods_rl.engines.trl.compat import refuse_unsupported
from pods_rl.errors import UserError
from tests.numeric import FLOAT32, assert_near

from .conftest import around, assert_equal_weights, constant, kept_of, letter_reward, update_of


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
    """Log-probabilities of the reference and of the old policy included."""
    trainer = make_trainer(
        num_rollouts=16, prefix_tree=False, beta=0.04, steps_per_generation=4, gradient_accumulation_steps=2,
        per_device_train_batch_size=4, max_steps=4,
    )  # fmt: skip
    # a generation: 4 micro-batches x 4 rows = 4 groups of m = 4; two optimizer steps
    rows = count_forward_rows(trainer)
    trainer.train()
    assert rows == {"policy update": 4 * 2 * 4, "reference": 2 * 16, "policy old": 2 * 16}


async def late_letters(completions, **_):
    """An async reward function."""
    return letter_reward(completions)


def test_metrics_and_the_ledger_cover_all_n_and_the_kept_apart(make_trainer):
    """With a second, async reward function."""
    trainer = make_trainer(
        reward=[letter_reward, late_letters], reward_weights=[0.5, 0.5], num_rollouts=12, max_steps=1
    )
    trainer.train()
    logs, r = trainer.state.log_history[0], trainer.rollouts
    assert_near(r.rewards.flatten(), r.rewards_per_func @ torch.tensor([0.5, 0.5]), FLOAT32)
    assert logs["reward"] == pytest.approx(r.rewards.mean().item())
    assert logs["rewards/letter_reward/mean"] == pytest.approx(r.rewards.mean().item())
    kept = r.rewards.gather(1, kept_of(r))
    assert logs["pods/selected/reward_mean"] == pytest.approx(kept.mean().item())
    assert logs["pods/selected/reward_std"] == pytest.approx(kept.std(dim=1).mean().item())
    assert logs["pods/tokens/generated"] == sum(r.completion_tokens)
    kept_tokens = sum(r.completion_tokens[p * 12 + i] for p, row in enumerate(kept_of(r).tolist()) for i in row)
    assert logs["pods/tokens/trained"] == kept_tokens
    assert logs["completions/mean_length"] == pytest.approx(sum(r.completion_tokens) / 24)
    for phase in ("rollout", "reward", "selection", "update"):
        assert logs[f"pods/seconds/{phase}"] > 0
    columns = r.columns()
    assert {len(values) for values in columns.values()} == {24}
    assert sum(columns["selected"]) == 8
    assert [a is not None for a in columns["advantage"]] == columns["selected"]
    assert columns["reward"] == columns["reward/letter_reward"]
    assert columns["answer"] == ["3"] * 24


# -- steps without signal ------------------------------------------------------------------------------------------


def test_a_step_without_signal_moves_nothing(make_trainer):
    """Even after a step that filled the momentum, and with weight decay."""
    calls = []

    def first_then_constant(completions, **_):
        calls.append(1)
        return letter_reward(completions) if len(calls) == 1 else constant(completions)

    trainer = make_trainer(reward=first_then_constant, num_rollouts=8, max_steps=1, weight_decay=0.1)
    trainer.train()
    calls.clear()
    more = make_trainer(reward=first_then_constant, num_rollouts=8, max_steps=3, weight_decay=0.1)
    more.train()
    assert_equal_weights(more, trainer)
    history = more.state.log_history
    assert [row.get("pods/skipped_step", 0.0) for row in history[:3]] == [0.0, 1.0, 1.0]
    assert [row["pods/zero_variance_share"] for row in history[:3]] == [0.0, 1.0, 1.0]
    assert [row["pods/tokens/trained"] for row in history[1:3]] == [0.0, 0.0]


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
    assert_equal_weights(one, two)


@pytest.mark.parametrize(("sent_at", "counts_as"), [(0, 1), (-1, -1)])
def test_after_a_skipped_step_vllm_needs_no_weights_unless_it_has_older_ones(make_trainer, sent_at, counts_as):
    """The step at which TRL has sent it weights. vLLM itself is not there."""
    trainer = make_trainer(reward=constant, num_rollouts=8, max_steps=1)

    @around(update_of(trainer), "on_step_end")
    def with_vllm(end, *given, **named):
        trainer.use_vllm = True
        trainer._last_loaded_step = sent_at
        end(*given, **named)
        trainer.use_vllm = False

    trainer.train()
    assert trainer._last_loaded_step == counts_as


# -- bad rewards ---------------------------------------------------------------------------------------------------


def test_a_weight_that_makes_a_reward_infinite_is_seen(make_trainer):
    trainer = make_trainer(
        reward=lambda completions, **_: [1e10 if i == 1 else 0.0 for i in range(len(completions))],
        reward_weights=[1e30], num_rollouts=12, max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.rollouts.rewards.isnan().sum() == 1
    assert torch.isfinite(trainer.rollouts.advantages).all()


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tools", "environment_factory"])
def test_tools_and_environments_are_refused_with_zero_3_where_each_turn_gathers_the_weights(monkeypatch, name):
    monkeypatch.setattr("pods_rl.engines.trl.compat.is_deepspeed_zero3_enabled", lambda: True)
    given = {"args": PODSConfig("out", use_cpu=True, bf16=False)}
    refuse_unsupported(given)
    with pytest.raises(UserError, match=rf"^{name} .*ZeRO-3"):
        refuse_unsupported(given | {name: [print]})


def test_a_plain_grpo_config_is_refused(make_trainer):
    with pytest.raises(TypeError, match="PODSConfig"):
        make_trainer(config_class=GRPOConfig)


def test_processor_time_is_of_one_process_on_a_cpu(monkeypatch):
    assert PODSConfig("out", clock="cpu", use_cpu=True, bf16=False).clock == "cpu"
    monkeypatch.setattr(PODSConfig, "world_size", property(lambda self: 2))
    with pytest.raises(UserError, match=r"\b2 process.*cpu"):
        PODSConfig("out", clock="cpu", use_cpu=True, bf16=False)


@pytest.mark.parametrize(
    ("loss", "norm", "scaled", "skipped", "counts"),
    [
        (0.5, None, False, False, (0.0, 0.0)),  # DeepSpeed may know none
        (0.5, math.inf, False, True, (0.0, 1.0)),
        (0.5, math.inf, True, False, (0.0, 1.0)),  # how the scaler of fp16 finds its scale: it skips by itself
        (math.nan, math.nan, True, True, (1.0, 1.0)),
    ],
)
def test_which_bad_steps_are_skipped_and_counted(make_trainer, monkeypatch, loss, norm, scaled, skipped, counts):
    trainer = make_trainer()
    trainer.model_wrapped = trainer.model
    monkeypatch.setattr(trainer.accelerator, "scaler", object() if scaled else None)
    parameter = next(trainer.model.parameters())
    parameter.grad = torch.ones_like(parameter)
    stability = trainer._stability
    stability.step_loss = torch.tensor(loss)
    stability.gradient_norm = None if norm is None else torch.tensor(norm)
    stability.on_pre_optimizer_step()
    assert (parameter.grad is None) == skipped
    metrics = trainer._metrics["train"]
    assert (metrics["pods/bad_loss"], metrics["pods/bad_gradient"]) == tuple([count] for count in counts)
    assert len(stability.bad_steps) == skipped


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=repr)
def test_out_of_memory_in_a_generation_names_what_lowers_it(make_trainer, error):
    trainer = make_trainer(num_rollouts=8)

    @around(trainer, "_generate_single_turn")
    def run_out(generate, *_):
        raise error

    with pytest.raises(UserError, match="rollout_batch_size"):
        trainer.train()


def test_fewer_prompts_than_a_step_needs_are_refused_with_both_numbers(make_trainer, dataset):
    trainer = make_trainer(train_dataset=dataset.select(range(1)))  # 8 rows of 4 a prompt
    with pytest.raises(UserError, match=r"\b1 .*\b2 "):
        trainer.train()
