"""Subclasses as people write them on TRL's GRPOTrainer: on ours they train what they train there.

Each is made once on TRL's trainer and once on ours, and gets the same rollouts.
"""

import pandas
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from pods_rl import PODSTrainer
from pods_rl.errors import UserError
from tests.numeric import FLOAT32, assert_near

from .conftest import Gradients, assert_equal_weights, constant, half_dead, kept_of, letter_reward, texts_of, weights
from .test_dynamic_sampling import dead_for_half
from .test_losses import fed, kept_rows, train
from .test_parity import WEIGHTS

# -- losses and advantages -------------------------------------------------------------------------------------------


def spread_out(batch):
    """A curriculum: other advantages, also for rows that have none."""
    weights = torch.linspace(-1, 1, len(batch["advantages"]))
    return {**batch, "advantages": 0.5 * batch["advantages"] + weights}


def loss_without_super(base):
    class Reinforce(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            mask = inputs["completion_mask"]
            logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, attention, mask.size(1))
            loss = -(logps * mask).sum(1) * (inputs["advantages"] + 0.1)
            return loss.mean() / self.current_gradient_accumulation_steps

    return Reinforce


def inner_loss_without_super(base):
    class Logits(base):
        def _compute_loss(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
            logps = logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
            rows = (logps * attention[:, 1:]).sum(1) * inputs["advantages"]
            return -rows.mean() / self.current_gradient_accumulation_steps

    return Logits


def auxiliary_loss(base):
    class Decayed(base):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss + 0.1 * next(model.parameters()).square().mean()

    return Decayed


def second_backward(base):
    class Decayed(base):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.accelerator.backward(0.1 * next(self.model.parameters()).square().mean())
            return loss

    return Decayed


def own_training_step(base):
    class Manual(base):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            self._step += 1
            return loss.detach()

    return Manual


def advantages_in_prepare_inputs(base):
    class Curriculum(base):
        def _prepare_inputs(self, inputs):
            return spread_out(super()._prepare_inputs(inputs))

    return Curriculum


def advantages_after_generation(base):
    class Shaped(base):
        def _generate_and_score_completions(self, inputs):
            return spread_out(super()._generate_and_score_completions(inputs))

    return Shaped


def advantages_of_each_token(base):
    class Tokens(base):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            places = torch.arange(batch["completion_ids"].size(1)) % 3 == 0
            return {**batch, "advantages": batch["advantages"].unsqueeze(1) + 0.2 * places}

    return Tokens


def on_the_instance(base):
    class Patched(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            compute = self._compute_loss
            self._compute_loss = lambda model, inputs: compute(model, spread_out(inputs))

    return Patched


SUBCLASSES = [
    loss_without_super, inner_loss_without_super, auxiliary_loss, second_backward, own_training_step,
    advantages_in_prepare_inputs, advantages_after_generation, advantages_of_each_token, on_the_instance,
]  # fmt: skip
QUICK = (auxiliary_loss, advantages_in_prepare_inputs)
every_subclass = pytest.mark.parametrize(
    "subclass", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in SUBCLASSES]
)
ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 2, "reward": half_dead}


@every_subclass
@pytest.mark.usefixtures("trl_draws")
def test_a_subclass_at_n_equal_m_is_that_of_trl(make_trainer, subclass):
    settings = ACCUMULATED | {"optim": "adamw_torch"}
    theirs, their_logs = train(make_trainer(subclass(GRPOTrainer), GRPOConfig, **settings))
    exact, our_logs = train(make_trainer(subclass(PODSTrainer), exact_trl=True, **settings))
    assert_equal_weights(exact, theirs)
    assert [row["grad_norm"] for row in our_logs] == [row["grad_norm"] for row in their_logs]
    assert their_logs[0]["grad_norm"] > 0
    rounded, _ = train(make_trainer(subclass(PODSTrainer), **settings))
    assert max((weight - rounded[key]).abs().max().item() for key, weight in theirs.items()) <= WEIGHTS * 1e-3


@pytest.mark.parametrize("reward", [half_dead, constant])
@every_subclass
def test_a_subclass_at_n_above_m_has_the_gradient_of_trl_s_on_those_m(make_trainer, subclass, reward):
    """The weights do not move, so that steps do not add up their rounding; a skipped step has no gradients."""
    settings = ACCUMULATED | {"optim": "sgd", "learning_rate": 0.0, "max_grad_norm": 0.0, "reward": reward}
    trainer = make_trainer(subclass(PODSTrainer), num_rollouts=8, **settings)
    rows = kept_rows(trainer)
    ours = Gradients(trainer)
    _, our_logs = train(trainer)
    trainer = fed(make_trainer(subclass(GRPOTrainer), GRPOConfig, **settings), rows)
    theirs = Gradients(trainer)
    _, their_logs = train(trainer)
    assert any(row["grad_norm"] > 0 for row in their_logs) or reward is constant
    for our_step, their_step, our_row, their_row in zip(ours.steps, theirs.steps, our_logs, their_logs, strict=True):
        is_zero = their_row["grad_norm"] == 0.0
        assert our_row.get("pods/skipped_step", 0.0) == float(is_zero)
        if is_zero:
            assert our_row["grad_norm"] == 0.0
        else:
            assert_near(our_step, their_step, FLOAT32)


@pytest.mark.parametrize("subclass", [advantages_after_generation, advantages_in_prepare_inputs])
def test_a_subclass_that_only_changes_advantages_still_leaves_out_rows_without_one(make_trainer, subclass, monkeypatch):
    """Dead rows of the changed advantages, and not of those that the trainer computed."""

    def halved(batch):
        return {**batch, "advantages": 1.0 - batch["advantages"].sign().abs()}

    monkeypatch.setattr(f"{__name__}.spread_out", halved)
    trainer = make_trainer(subclass(PODSTrainer), num_rollouts=8, reward=half_dead, max_steps=3)
    trainer.train()
    for row in trainer.state.log_history[:3]:
        live = round(8 * (1 - row["pods/zero_variance_share"]))
        assert row.get("pods/rows/left_out", 0) >= live / 2
    assert any(row.get("pods/rows/left_out", 0) for row in trainer.state.log_history)
    assert not all(row.get("pods/skipped_step", 0) for row in trainer.state.log_history[:3])


def test_a_training_step_that_trains_one_weight_moves_no_other(make_trainer, random_model):
    class OneWeight(PODSTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            self._prepare_inputs(inputs)
            loss = next(model.parameters()).square().mean()
            self.accelerator.backward(loss)
            self._step += 1
            return loss.detach()

    trainer = make_trainer(OneWeight, optim="adamw_torch", weight_decay=0.1)
    trainer.train()
    before = dict(random_model.named_parameters())
    moved = [name for name, weight in weights(trainer).items() if not torch.equal(weight, before[name])]
    assert moved == [next(iter(before))]


def test_a_loss_without_super_trains_where_steps_are_skipped(make_trainer, random_model):
    """The optimizer moves the weights, and a gradient of 0 does not."""
    settings = {"num_rollouts": 8, "max_steps": 2, "optim": "adamw_torch", "weight_decay": 0.1}
    moved = weights(make_trainer())
    trainer = make_trainer(loss_without_super(PODSTrainer), reward=constant, **settings)
    trainer.train()
    assert [row.get("pods/skipped_step", 0.0) for row in trainer.state.log_history[:2]] == [0.0, 0.0]
    assert all(not torch.equal(moved[name], weight) for name, weight in weights(trainer).items())
    assert min(row["pods/tokens/computed"] for row in trainer.state.log_history[:2]) > 0
    trainer = make_trainer(inner_loss_without_super(PODSTrainer), reward=constant, **settings)
    trainer.train()
    assert [row.get("pods/skipped_step", 0.0) for row in trainer.state.log_history[:2]] == [1.0, 1.0]
    assert_equal_weights(trainer, random_model)


# -- rewards -----------------------------------------------------------------------------------------------------------


def noisy(base):
    class Noisy(base):
        calls = 0

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            self.calls += 1
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            draw = torch.Generator().manual_seed(self.calls)
            return rewards + self.calls * torch.rand(rewards.shape, generator=draw)

    return Noisy


def by_group(base):
    """Rewards relative to the other rollouts of the prompt."""

    class Relative(base):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            groups = rewards.view(-1, self.num_generations)
            assert len(groups) == len({tuple(prompt) for prompt in prompts})
            return (groups - groups.max(dim=1, keepdim=True).values).view_as(rewards)

    return Relative


TWO = {"reward": [letter_reward, constant], "reward_weights": [1.0, 0.5]}


@pytest.mark.parametrize(
    ("subclass", "settings"),
    [(noisy, TWO), pytest.param(by_group, {"reward": letter_reward}, marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("trl_draws")
def test_overridden_rewards_at_n_equal_m_are_trl_s(make_trainer, subclass, settings):
    settings = settings | {"max_steps": 3, "optim": "adamw_torch"}
    theirs, their_logs = train(make_trainer(subclass(GRPOTrainer), GRPOConfig, **settings))
    ours, our_logs = train(make_trainer(subclass(PODSTrainer), exact_trl=True, **settings))
    assert_equal_weights(ours, theirs)
    names = [name for name in their_logs[0] if "reward" in name]
    assert [[row[name] for name in names] for row in our_logs] == [[row[name] for name in names] for row in their_logs]


@pytest.mark.parametrize("subclass", [noisy, by_group])
def test_overridden_rewards_select_train_and_are_logged(make_trainer, subclass):
    returned = []

    class Recorded(subclass(PODSTrainer)):
        def _calculate_rewards(self, *columns):
            returned.append(super()._calculate_rewards(*columns))
            return returned[-1]

    settings = {"reward": letter_reward} if subclass is by_group else TWO
    trainer = make_trainer(Recorded, num_rollouts=12, max_steps=2, **settings)
    trainer.train()
    assert len(returned) == 2  # one generation a step
    total = (returned[1].double() * torch.tensor(settings.get("reward_weights", [1.0]))).sum(1).view(2, 12)
    record = trainer.rollouts
    torch.testing.assert_close(record.rewards.double(), total)
    torch.testing.assert_close(record.rewards_per_func.double(), returned[1].double())
    row = trainer.state.log_history[1]
    assert row["reward"] == pytest.approx(total.mean().item())
    assert row["rewards/letter_reward/mean"] == pytest.approx(returned[1][:, 0].double().mean().item())
    kept = total.gather(1, kept_of(record))
    expected = (kept - kept.mean(1, keepdim=True)) / (kept.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(record.advantages.double(), expected.flatten(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("returned", [None, torch.zeros(24), torch.zeros(8, 1)])
def test_rewards_of_another_shape_are_refused(make_trainer, returned):
    class Wrong(PODSTrainer):
        def _calculate_rewards(self, *columns):
            return returned

    with pytest.raises(UserError, match=r"Wrong\._calculate_rewards .*\[24, 1\]"):
        make_trainer(Wrong, num_rollouts=12, max_steps=1).train()


# -- generation --------------------------------------------------------------------------------------------------------


def test_prompts_of_dynamic_sampling_pass_through_an_overridden_generation(make_trainer):
    """Once each, with the column that it adds; what it does with the batch happens once, on the joined one."""
    lengths = []

    def reward(prompts, completions, length, **_):
        lengths.extend(length)
        assert [len(prompt) for prompt in prompts] == length
        return dead_for_half(prompts, completions)

    class Columns(PODSTrainer):
        def _generate_and_score_completions(self, inputs):
            for row in inputs:
                row["length"] = len(row["prompt"])
            batch = super()._generate_and_score_completions(inputs)
            batch["advantages"] *= 2.0
            batch["length"] = torch.tensor([row["length"] for row in inputs])
            batches.append(batch)
            return batch

    batches = []
    settings = {"num_rollouts": 8, "dynamic_sampling": True, "per_device_train_batch_size": 16, "max_steps": 1}
    trainer = make_trainer(Columns, reward=reward, dynamic_sampling_rounds=8, **settings)
    trainer.train()
    record, joined = trainer.rollouts, batches[-1]
    assert trainer.state.log_history[0]["pods/dynamic_sampling/live_share"] == 1.0
    assert len(lengths) == record.rewards.numel() > 4 * 8
    kept = record.kept_rewards()
    expected = (kept - kept.mean(1, keepdim=True)) / (kept.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(joined["advantages"].view(4, 4).double(), 2 * expected.double(), rtol=1e-4, atol=1e-5)
    assert joined["length"].tolist() == joined["prompt_mask"].sum(1).tolist()


def test_a_subclass_that_generates_nothing_for_drawn_prompts_is_refused(make_trainer):
    class Cached(PODSTrainer):
        batch = None

        def _generate_and_score_completions(self, inputs):
            if self._generation is not None:
                return {}
            return super()._generate_and_score_completions(inputs)

    settings = {"num_rollouts": 8, "dynamic_sampling": True, "max_steps": 1}
    with pytest.raises(UserError, match=r"super\(\).*dynamic_sampling"):
        make_trainer(Cached, reward=constant, **settings).train()


# -- logs --------------------------------------------------------------------------------------------------------------


def test_saved_completions_are_the_true_text_and_printed_ones_are_escaped(make_trainer, capsys, tmp_path):
    trainer = make_trainer(log_completions=True)
    hostile = "\x1b]0;owned\x07 [/red] \x9b2J \ud800"
    texts_of(trainer)["prompt"].append([{"role": "user", "content": hostile}])
    texts_of(trainer)["completion"].append(hostile)
    texts_of(trainer)["extra"]["note"] = [hostile]
    texts_of(trainer)["rewards"]["mine"] = [1.0]
    texts_of(trainer)["advantages"].append(0.0)
    (tmp_path / "out/completions").mkdir(parents=True, exist_ok=True)
    trainer.log({})
    printed = capsys.readouterr().out
    assert printed.count("owned") >= 3
    assert not {"\x1b", "\x07", "\x9b"} & set(printed)
    (row,) = pandas.read_parquet(tmp_path / "out/completions/completions_00000.parquet").to_dict("records")
    true = hostile.replace("\ud800", "\\ud800")  # which UTF-8 cannot hold
    assert (row["completion"], row["note"], row["prompt"][0]["content"]) == (true, true, true)
