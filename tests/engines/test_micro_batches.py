"""Which rows of an optimizer step share a micro-batch, and what of TRL must not notice."""

from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from pods_rl import PODSTrainer
from pods_rl.engines.trl.step.budget import Budget
from pods_rl.engines.trl.step.micro_batches import LOSS_SHARE, REPEATED_ROWS, pack_rows

from .conftest import around, constant, half_dead, update_of

pytestmark = pytest.mark.usefixtures("trl_draws")
# 8 prompts of 4 rows, in two optimizer steps of eight micro-batches of 2 rows.
DIVIDED = {
    "num_rollouts": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "steps_per_generation": 16,
    "max_steps": 2,
}  # fmt: skip


def rows_of(batch):
    """Each row of a micro-batch as one value, with its prompt first."""
    columns = [batch[name] for name in ("prompt_ids", "completion_ids", "completion_mask", "advantages")]
    return [tuple(tuple(column[row].flatten().tolist()) for column in columns) for row in range(len(columns[0]))]


def trained(make_trainer, *trainer_class, **config):
    """Train; return the rows of each micro-batch, and the trainer."""
    trainer = make_trainer(*trainer_class, **{**DIVIDED, **config})
    batches = []

    @around(update_of(trainer), "begin_micro_batch")
    def keep(begin, micro_batch):
        passes = micro_batch if isinstance(micro_batch, list) else [micro_batch]
        batches.append([row for batch in passes for row in rows_of(batch)])
        begin(micro_batch)

    trainer.train()
    return batches, trainer


def prompts_of(batches):
    return [{prompt for prompt, *_ in rows} for rows in batches]


def test_rows_of_a_prompt_share_micro_batches_and_stay_in_their_step(make_trainer):
    theirs, _ = trained(make_trainer, exact_trl=True)
    ours, trainer = trained(make_trainer)
    for step in (slice(0, 8), slice(8, 16)):
        assert sorted(chain(*ours[step])) == sorted(chain(*theirs[step]))
        assert sum(map(len, prompts_of(ours[step]))) < sum(map(len, prompts_of(theirs[step])))
    computed = [row["pods/tokens/computed"] for row in trainer.state.log_history if "loss" in row]
    _, shuffled = trained(make_trainer, loss_type="bnpo")
    of_shuffled = [row["pods/tokens/computed"] for row in shuffled.state.log_history if "loss" in row]
    assert sum(computed) < 0.9 * sum(of_shuffled)


def test_a_pass_without_a_gradient_may_precede_an_empty_micro_batch(make_trainer):
    """A step takes two windows of two micro-batches here, and each is packed into its last one."""
    schedule = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 6}
    batches, trainer = trained(make_trainer, reward=constant, skip_zero_advantage_steps=True, **schedule)
    assert [len(rows) for rows in batches] == [0, 4] * 4
    assert [row["pods/skipped_step"] for row in trainer.state.log_history if "loss" in row] == [1.0, 1.0]


def test_rows_without_a_gradient_share_micro_batches_without_a_pass(make_trainer):
    batches, trainer = trained(make_trainer, reward=half_dead)
    dead = [[advantages == (0.0,) for *_, advantages in rows] for rows in batches]
    assert any(all(rows) for rows in dead)
    for step in (dead[:8], dead[8:]):
        mixed = [any(rows) and not all(rows) for rows in step]
        assert sum(mixed) <= 1
        without_pass = [all(rows) for rows in step]
        assert without_pass == sorted(without_pass, reverse=True)  # the last of a step has a pass
    assert sum(row["pods/rows/left_out"] for row in trainer.state.log_history if "loss" in row) == sum(map(sum, dead))


class OwnLoss(PODSTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs)


class OwnInputs(PODSTrainer):
    def _prepare_inputs(self, generation_batch):
        return super()._prepare_inputs(generation_batch)


@pytest.mark.slow
def test_rows_stay_where_trl_put_them_if_the_loss_depends_on_it_or_a_subclass_sees_them(make_trainer):
    theirs, _ = trained(make_trainer, exact_trl=True, max_steps=1)
    for subclass in (OwnLoss, OwnInputs):
        ours, _ = trained(make_trainer, subclass, max_steps=1)
        assert ours == theirs
    for settings in (
        {"prefix_tree": False},
        {"loss_type": "bnpo"},
        {"entropy_coef": 0.01},
        {"top_entropy_quantile": 0.5},
    ):
        ours, _ = trained(make_trainer, **settings, max_steps=1)
        assert [[row[:3] for row in rows] for rows in ours] == [[row[:3] for row in rows] for rows in theirs]


def packed(batches, tokens=None, *, trees=True, passes=None):
    """Pack as one process."""

    def gather(numbers):
        return [numbers]

    trainer = SimpleNamespace(
        args=SimpleNamespace(max_tokens_per_microbatch=tokens),
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )
    budget = Budget(trainer, log=lambda *_: None)
    return pack_rows(batches, None, partial(budget.divide, trees=trees, passes=passes, gather=gather), gather)


def two_micro_batches():
    """Rows 0 to 3 of one prompt, two tokens each."""
    batches = []
    for first in (0, 2):
        ids = torch.tensor([[first], [first + 1]])
        mask = torch.ones_like(ids)
        prompt = torch.tensor([[7], [7]])
        batches.append({
            "prompt_ids": prompt, "prompt_mask": mask, "completion_ids": ids, "completion_mask": mask.clone(),
        })  # fmt: skip
    return batches


def rows_in(batch):
    return batch["completion_ids"].flatten().tolist()


@pytest.mark.parametrize(
    ("budget", "how", "passes"),
    [
        (4, {}, [[0, 1, 2, 3]]),
        (1, {}, [[0], [1], [2], [3]]),
        (None, {}, [[0, 1, 2, 3]]),  # TRL's micro-batch: 2 rows x 2 columns; the tree of all rows has 4 nodes
        (1, {"passes": 2}, [[0, 1], [2, 3]]),  # of an engine that counts passes
        (4, {"passes": 2}, [[0, 1], [2, 3]]),
        # without trees every row counts with its padding
        (2, {"trees": False}, [[0], [1], [2], [3]]),
        (4, {"trees": False}, [[0, 1], [2, 3]]),
        (7, {"trees": False}, [[0, 1], [2, 3]]),
        (8, {"trees": False}, [[0, 1, 2, 3]]),
        (None, {"trees": False}, [[0, 1], [2, 3]]),
    ],
)
def test_rows_are_packed_into_passes_of_a_budget(budget, how, passes):
    batches = packed(two_micro_batches(), budget, **how)
    assert sorted(map(len, map(rows_in, batches))) == sorted(map(len, passes))
    assert sorted(row for batch in batches for row in rows_in(batch)) == [0, 1, 2, 3]
    if not how:
        assert [rows_in(batch) for batch in batches] == passes
        assert [batch[LOSS_SHARE] for batch in batches] == [len(rows) / 2 for rows in passes]
        assert [batch[REPEATED_ROWS] for batch in batches] == [0] * len(passes)


@pytest.mark.parametrize("column", [torch.zeros(3), [1, 2, 3], "a text of its own", {"rows": 2}])
def test_rows_with_a_column_that_is_not_understood_are_not_packed(column):
    def batch(value):
        ids = torch.tensor([[5], [8]])
        mask = torch.ones_like(ids)
        return {
            "prompt_ids": ids, "prompt_mask": mask, "completion_ids": ids, "completion_mask": mask, "extra": value,
        }  # fmt: skip

    other = f"{column}!" if isinstance(column, str) else type(column)(column)
    assert packed([batch(column), batch(other)]) is None
