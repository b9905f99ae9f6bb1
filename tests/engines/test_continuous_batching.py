"""transformers' continuous batching under PODSTrainer: it runs on a CPU, for real."""

import warnings

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from pods_rl.engines.trl.guarded.tools import check_completions

from .conftest import assert_equal_weights, batches_of
from .test_losses import PLAIN

# Without them it takes 60 % of the machine's free memory for its cache.
SMALL = {"num_blocks": 64, "max_batch_tokens": 64}


@pytest.fixture
def make(make_trainer):
    """Trainers with this generator: 2 prompts a generation, 12 rollouts each, 4 kept."""
    settings = {
        "use_transformers_continuous_batching": True, "transformers_continuous_batching_config": SMALL,
        "max_completion_length": 6, "max_steps": 1,
    }  # fmt: skip
    return lambda *classes, **config: make_trainer(
        *classes, **settings | ({} if classes else {"num_rollouts": 12}) | config
    )


def test_n_of_each_prompt_are_generated_in_calls_of_rollout_batch_size_and_m_trained(make):
    trainer = make(rollout_batch_size=10)
    requests, generate, batches = [], trainer.model.generate_batch, batches_of(trainer)

    def record(prompts, **kwargs):
        outputs = generate(prompts, **kwargs)
        requests.append((prompts, [list(output.generated_tokens) for output in outputs.values()]))
        return outputs

    trainer.model.generate_batch = record
    trainer.train()
    assert [len(prompts) for prompts, _ in requests] == [10, 10, 4]
    prompts, completions = ([row for request in requests for row in request[i]] for i in range(2))
    assert prompts == [prompts[0]] * 12 + [prompts[12]] * 12
    assert len({tuple(ids) for ids in completions}) > 12
    r, (batch,) = trainer.rollouts, batches
    assert r.completion_tokens == [len(ids) for ids in completions]
    pairs = zip(batch["completion_ids"], batch["completion_mask"].bool(), strict=True)
    assert [ids[mask].tolist() for ids, mask in pairs] == [completions[i] for i in r.kept.tolist()]


@pytest.mark.slow
def test_n_equal_to_m_is_trl_to_the_last_bit(make):
    theirs = make(GRPOTrainer, GRPOConfig)
    theirs.train()
    ours = make(num_rollouts=4, **PLAIN)
    ours.train()
    assert_equal_weights(ours, theirs)


def test_a_failed_request_ends_the_run(make):
    """The generator logs it and skips it: later completions would be paired with the wrong prompts."""
    trainer = make()
    generate = trainer.model.generate_batch
    trainer.model.generate_batch = lambda *args, **kwargs: dict(list(generate(*args, **kwargs).items())[1:])
    with pytest.raises(RuntimeError, match=r"\b23 .*\b24 "):
        trainer.train()
    with pytest.raises(RuntimeError, match=r"\b1 of .*token"):
        check_completions(2, [[3], []])
    check_completions(2, [[3], [4, 5]])


ROUNDS = r"turns the trained float32 weights into bfloat16.*Set bf16: false"


def test_weights_that_would_be_rounded_for_good_are_a_warning(make):
    """Under bf16 TRL's `generate` path leaves float32 weights alone; this one casts them in place."""
    with pytest.warns(UserWarning, match=ROUNDS):
        make(bf16=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(bf16=True, dtype=torch.bfloat16)
