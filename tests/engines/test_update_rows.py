"""The update with `prefix_tree` has TRL's gradient in float64 and logs TRL's metrics, by the real trainer."""

import pytest
import torch
from peft import LoraConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3_5 import modeling_qwen3_5
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils

from pods_rl.engines.trl.step.update import Update
from pods_rl.errors import UserError
from pods_rl.prefix_tree.packing import TreePass
from tests.numeric import FLOAT64, assert_near

from .conftest import Gradients, around, constant, half_dead, letter_reward, update_of
from .families import FAMILIES, build
from .test_losses import LOSSES, OFTEN, OTHERS

pytestmark = pytest.mark.usefixtures("trl_draws")


class ExactHead:
    """TRL's head in the model's own precision; TRL's computes in float32."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, *_):
        logps = (hidden @ weight.T / temperature).log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1)
        return logps.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy, None, None, None


def exact_norm(norm, x):
    """Qwen2's norm in the model's own precision; transformers computes it in float32."""
    return norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", ExactHead)
    monkeypatch.setattr(Qwen2RMSNorm, "forward", exact_norm)


def run(make_trainer, *trainer_classes, prepare=lambda trainer: None, **config):
    """Gradients of each step, and logs. The weights do not move, so that steps do not add up their rounding."""
    settings = {"max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 0.0, "max_steps": 2, "shuffle_dataset": False}
    trainer = make_trainer(*trainer_classes, dtype=torch.float64, **settings | {"reward": half_dead} | config)
    prepare(trainer)
    watch = Gradients(trainer)
    trainer.train()
    return watch.steps, [row for row in trainer.state.log_history if "loss" in row]


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert_near(one, other, FLOAT64)


def checkpointing(reentrant):
    def prepare(trainer):
        trainer.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        trainer.args.gradient_checkpointing_kwargs = {"use_reentrant": reentrant}
        trainer.model.enable_input_require_grads()

    return {"prepare": prepare}


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
MOVING = {"learning_rate": 0.05, **OFTEN}  # ratios leave 1, and some are clipped
SETTINGS = {
    **{name: {**settings, **MOVING} for name, settings in (LOSSES | OTHERS).items()},
    "LoRA, KL": {"trainer_arguments": {"peft_config": LORA}, "beta": 0.04, **MOVING},
    "eight micro-batches, n = m": {
        "gradient_accumulation_steps": 8,
        "per_device_train_batch_size": 2,
        "num_rollouts": 4,
    },
    "sixteen micro-batches in one pass": {
        "gradient_accumulation_steps": 16,
        "per_device_train_batch_size": 1,
        "max_tokens_per_microbatch": 10_000,
    },
    "checkpointing": checkpointing(False),
    "reentrant checkpointing": checkpointing(True),
}


# What is skipped row by row follows from advantages and masks, so one loss of each kind is enough.
ROW_BY_ROW = ("grpo", "DAPO", "GSPO", "vespo", "KL", "entropy bonus", "eight micro-batches, n = m")
QUICK = (
    "grpo", "DAPO", "entropy bonus", "eight micro-batches, n = m", "LoRA, KL", "sixteen micro-batches in one pass",
    "checkpointing",
)  # fmt: skip


@pytest.mark.numeric
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS]
)
def test_each_prefix_once_and_only_rows_with_an_advantage_have_trl_s_gradient(make_trainer, monkeypatch, name):
    """As trees; for some settings also row by row, as for a model that computes no trees."""
    config = {"num_rollouts": 8, "skip_zero_advantage_steps": False, **SETTINGS[name], "max_steps": 2}
    theirs, expected = run(make_trainer, **config, prefix_tree=False)
    assert any(theirs)  # DAPO's first step has no gradient: every completion is truncated
    reads_all = name in {*OTHERS} - {"two-sided clipping"} or name == "vespo" or "KL" in name
    ways = [Update._takes_trees]
    if name in ROW_BY_ROW:
        ways.append(lambda *_: False)
    for takes_trees in ways:
        monkeypatch.setattr(Update, "_takes_trees", takes_trees)
        ours, logs = run(make_trainer, **config)
        assert_same(ours, theirs)
        assert (sum(row.get("pods/rows/left_out", 0) for row in logs) == 0) == reads_all
        assert [row["pods/tokens/trained"] for row in logs] == [row["pods/tokens/trained"] for row in expected]


ONE_BY_ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 8}
COMPARED = {name: LOSSES[name] for name in ("grpo", "GSPO", "CISPO", "vespo")}
COMPARED |= {**OTHERS, "mostly clipped": {"epsilon": 1e-4, **ONE_BY_ONE}}


def in_one_micro_batch(config):
    """The same steps with all rows of a step in one micro-batch."""
    accumulated = config["gradient_accumulation_steps"]
    return {
        **config,
        "per_device_train_batch_size": config["per_device_train_batch_size"] * accumulated,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": config["steps_per_generation"] // accumulated,
    }


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("name", "reward"),
    [
        ("grpo", half_dead),
        pytest.param("grpo", letter_reward, marks=pytest.mark.slow),
        pytest.param("grpo", constant, marks=pytest.mark.slow),
        *(pytest.param(name, half_dead, marks=pytest.mark.slow) for name in COMPARED if name != "grpo"),
    ],
)
def test_every_metric_is_trl_s_in_one_micro_batch(make_trainer, name, reward):
    """At n = m, however the rows of a step are divided; docs/metrics.md names the exception."""
    config = {"reward": reward, **MOVING, "max_steps": 3, **COMPARED[name]}
    together = in_one_micro_batch(config)
    _, theirs = run(make_trainer, GRPOTrainer, GRPOConfig, **together)
    # With a quantile of the entropies of a micro-batch, or their mean, the gradient depends on the division.
    divisions = [together] if name in ("the most uncertain tokens", "entropy bonus") else [together, config]
    for division in divisions:
        _, ours = run(make_trainer, **division)
        for got, expected in zip(ours, theirs, strict=True):
            dead = got.get("pods/rows/left_out", 0) > 0
            names = {key for key in expected if "time" not in key} - ({"entropy"} if dead else set())
            assert {key: got[key] for key in names} == pytest.approx({key: expected[key] for key in names}, rel=1e-6)
            assert ("entropy" in got) == (not dead or reward is not constant)


@pytest.mark.numeric
def test_entropy_is_that_of_the_computed_rows(make_trainer):
    """By hand, from TRL's own pass over every row; tokens of tools do not count."""
    config = {"max_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    entropies, batches = [], []

    def with_tools(trainer):
        @around(trainer, "_generate_and_score_completions")
        def masked(generate, inputs):
            batch = generate(inputs)
            batch["tool_mask"] = batch["completion_mask"].clone()
            batch["tool_mask"][:, 1::3] = 0
            return batch

    def watch(trainer):
        with_tools(trainer)

        @around(trainer, "_get_per_token_logps_and_entropies")
        def scored(scores, *args, **kwargs):
            entropies.append(scores(*args, **kwargs))
            return entropies[-1]

        @around(trainer, "_compute_loss")
        def counted(loss, model, inputs):
            batches.append(inputs)
            return loss(model, inputs)

    run(make_trainer, prepare=watch, **config, prefix_tree=False)
    total, live_tokens, of_all, tokens = 0.0, 0, 0.0, 0
    for (_, entropy, _), batch in zip(entropies, batches, strict=True):
        live = batch["tool_mask"] * (batch["advantages"] != 0).unsqueeze(1)
        tokens += int(batch["tool_mask"].sum())
        live_tokens += int(live.sum())
        total += (entropy * live).sum().item()
        of_all += (entropy * batch["tool_mask"]).sum().item()
    _, (row,) = run(make_trainer, prepare=with_tools, **config)
    assert row["entropy"] == pytest.approx(total / live_tokens, rel=1e-6)
    assert row["pods/tokens/trained"] == tokens
    assert total / live_tokens != pytest.approx(of_all / tokens, rel=1e-6)


def test_a_recurrent_model_trains_over_trees_and_leaves_transformers_as_it_was(make_trainer):
    """With checkpointing, whose backward pass computes each layer again; its gradient is in test_recurrence."""
    model, _ = build(FAMILIES["Qwen3.5"])
    function = modeling_qwen3_5.causal_conv1d_fn
    trainer = make_trainer(model=model, num_rollouts=8, max_steps=1)
    trainer.model.gradient_checkpointing_enable()
    trainer.train()
    assert "trees" in update_of(trainer).attention
    assert modeling_qwen3_5.causal_conv1d_fn is function


def test_a_micro_batch_without_a_row_to_compute_has_no_pass(make_trainer):
    """The last before the optimizer step has one: it sends the gradients to the other processes."""
    passes = []

    def watch(trainer):
        update_of(trainer)._takes_trees(trainer.model)
        trainer.model.register_forward_pre_hook(
            lambda module, given, named: passes.append(1) if "shift_labels" in named or "labels" in named else None,
            with_kwargs=True,
        )

    config = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "reward": constant, "max_steps": 1}
    _, (row,) = run(make_trainer, prepare=watch, **config)
    assert len(passes) == 1
    assert "entropy" not in row
    assert row["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize(("budget", "passes"), [(10_000, 1), (1, 16)])
def test_old_and_reference_log_probabilities_are_packed(make_trainer, monkeypatch, budget, passes):
    rows_of_pass = []
    call = TreePass.__call__

    def counting(self, input_ids, *args, **options):
        if not torch.is_grad_enabled():
            rows_of_pass.append(len(input_ids))
        return call(self, input_ids, *args, **options)

    monkeypatch.setattr(TreePass, "__call__", counting)
    config = SETTINGS["eight micro-batches, n = m"] | {"beta": 0.04, "max_steps": 1}
    run(make_trainer, **config, max_tokens_per_microbatch=budget)
    assert len(rows_of_pass) == passes
    assert sum(rows_of_pass) == 16


class SmallDevice:
    """Stands in for a device that runs out of memory: passes of more than `room` nodes raise, at the end of backward.

    By then most weights have the gradient of the failed pass. With `room` None no pass raises.
    """

    def __init__(self, trainer, room):
        self.nodes = []
        self._room = room
        trainer.model.get_input_embeddings().register_forward_hook(self._watch)

    def _watch(self, module, inputs, output):
        if not module.training or not torch.is_grad_enabled():
            return
        nodes = inputs[0].numel()
        self.nodes.append(nodes)
        if self._room is not None and nodes > self._room:
            output.register_hook(self._raise)

    def _raise(self, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def run_on(make_trainer, room, **config):
    """Train on a device with room for this many nodes; return the gradients, the logs, the nodes and the trainer."""
    found = []

    def prepare(trainer):
        update_of(trainer)._takes_trees(trainer.model)  # before, because the probe has a gradient too
        found.append(trainer)
        found.append(SmallDevice(trainer, room))

    gradients, logs = run(make_trainer, prepare=prepare, **config)
    trainer, device = found
    return gradients, logs, device.nodes, trainer


WINDOWS = {
    "one micro-batch": {"per_device_train_batch_size": 16},
    "four micro-batches": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "a step of two windows": {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 6,
        "num_generations": 4,
    },
    "two iterations, KL": {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_iterations": 2, "beta": 0.04,
    },
    "DAPO": {"loss_type": "dapo", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
}  # fmt: skip


QUICK_WINDOWS = ("a step of two windows", "DAPO")


@pytest.mark.parametrize(
    "name", [name if name in QUICK_WINDOWS else pytest.param(name, marks=pytest.mark.slow) for name in WINDOWS]
)
def test_auto_starts_a_step_again_in_smaller_passes_if_one_runs_out_of_memory(make_trainer, caplog, name):
    config = {"reward": letter_reward, "max_tokens_per_microbatch": "auto", "max_steps": 3, **WINDOWS[name]}
    theirs, expected, nodes, _ = run_on(make_trainer, None, **config)
    room = max(nodes) - 1
    caplog.clear()
    ours, logs, tried, trainer = run_on(make_trainer, room, **config)
    assert max(tried) > room
    assert_same(ours, theirs)
    assert trainer._step == len(logs) * trainer.args.gradient_accumulation_steps
    assert update_of(trainer).budget.tokens <= room / 2
    assert "starts again" in caplog.text
    for got, row in zip(logs, expected, strict=True):
        names = {key for key in row if "time" not in key and "seconds" not in key} - {"pods/tokens/computed"}
        assert {key: got[key] for key in names} == pytest.approx({key: row[key] for key in names}, rel=1e-6, abs=1e-7)
        assert ("step_time" in got) == ("step_time" in row)


def test_a_step_starts_again_after_passes_that_had_room(make_trainer):
    config = {"reward": letter_reward, "max_steps": 1, **WINDOWS["four micro-batches"]}
    theirs, (expected,), nodes, _ = run_on(make_trainer, None, **config, max_tokens_per_microbatch=60)
    assert len(nodes) > 2
    assert nodes[-1] > nodes[-2]
    room = nodes[-1] - 1

    def lower(trainer):
        update_of(trainer).budget.tokens = 60
        update_of(trainer)._takes_trees(trainer.model)
        SmallDevice(trainer, room)

    ours, (row,) = run(make_trainer, prepare=lower, **config, max_tokens_per_microbatch="auto")
    assert_same(ours, theirs)
    assert row["loss"] == pytest.approx(expected["loss"], abs=1e-7)
    assert row["pods/tokens/computed"] >= expected["pods/tokens/computed"]


def test_a_fixed_budget_without_room_ends_the_run_with_one_that_has(make_trainer):
    config = {"reward": letter_reward, "per_device_train_batch_size": 16, "max_steps": 1}
    _, _, (nodes,), _ = run_on(make_trainer, None, **config)
    with pytest.raises(UserError, match=f"max_tokens_per_microbatch: {nodes // 2}"):
        run_on(make_trainer, nodes - 1, **config, max_tokens_per_microbatch=10_000)
    run_on(make_trainer, nodes - 1, **config, max_tokens_per_microbatch=nodes // 2)


def test_an_engine_that_keeps_its_gradients_ends_the_run_with_a_smaller_budget(make_trainer, monkeypatch):
    """DeepSpeed, which is replaced by its flag from the moment at which memory runs out."""

    def run_out(self, gradient):
        trainer.is_deepspeed_enabled = True
        raise torch.OutOfMemoryError

    monkeypatch.setattr(SmallDevice, "_raise", run_out)
    trainer = make_trainer(num_rollouts=4, max_tokens_per_microbatch="auto")
    update_of(trainer)._takes_trees(trainer.model)
    SmallDevice(trainer, 10)
    with pytest.raises(UserError, match=r"max_tokens_per_microbatch: \d"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("setting", [None, "auto"])
def test_out_of_memory_that_no_division_helps_is_reported(make_trainer, setting):
    """By default, because nothing says that passes may differ from TRL's; with auto, if a row alone has no room."""
    with pytest.raises(UserError, match="gradient_accumulation_steps"):
        run_on(make_trainer, 1, max_steps=1, reward=letter_reward, max_tokens_per_microbatch=setting)
