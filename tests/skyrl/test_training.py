"""SkyRL's own training loop with the wrapper: a policy generates, is trained and learns, on a CPU.

Real: `RayPPOTrainer.train`, SkyRL's generator with an environment of its gym, its data set, evaluation, advantages,
mini-batches and policy loss. Replaced: the vLLM servers (`parts.Engine`), and the workers with Ray and FSDP
(`parts.Dispatch`), which need a CUDA device.
"""

import asyncio
import json

import pyarrow.parquet as pq
import pytest
import skyrl_gym
import torch
from skyrl.train.dataset import PromptDataset

from pods_rl.engines.skyrl.main import PODSExp
from pods_rl.selection import advantages, select

from .conftest import TINY
from .parts import Dispatch, Engine

STEPS = 6
PROMPTS = 2
N = 8
M = 4
EVALUATED = 2  # completions of each prompt


@pytest.fixture
def data(tmp_path, tokenizer):
    """Prompts as SkyRL reads them, two batches of them."""
    path = tmp_path / "prompts.jsonl"
    lines = []
    for number in range(2 * PROMPTS):
        row = {"prompt": [{"role": "user", "content": f"{number}+7="}], "env_class": "digits"}
        lines.append(json.dumps({**row, "reward_spec": {"method": "rule", "ground_truth": "7777"}}))
    path.write_text("\n".join(lines))
    return PromptDataset(str(path), tokenizer, max_prompt_length=64, num_workers=1)


@pytest.fixture
def environment():
    skyrl_gym.register(id="digits", entry_point="tests.skyrl.parts:DigitsEnv")
    yield
    skyrl_gym.envs.registration.deregister("digits")


def test_a_policy_learns_in_skyrls_own_loop(make_config, make_trainer, tokenizer, data, environment, tmp_path):
    config = make_config(
        f"trainer.train_batch_size={PROMPTS}",
        f"trainer.policy_mini_batch_size={PROMPTS // 2}",
        f"trainer.epochs={STEPS}",
        f"trainer.max_training_steps={STEPS}",
        f"trainer.eval_interval={STEPS}",
        "trainer.eval_before_train=true",
        "trainer.algorithm.use_kl_loss=false",
        f"generator.n_samples_per_prompt={M}",
        f"generator.eval_n_samples_per_prompt={EVALUATED}",
        f"pods.num_rollouts={N}",
        f"pods.ledger={tmp_path}/rollouts",
        "pods.ledger_every=1",
    )
    engine = Engine(str(TINY), tokenizer)
    dispatch = Dispatch(config, engine, lr=2e-3)
    experiment = PODSExp.__new__(PODSExp)  # its constructor starts Ray's placement groups
    generator = experiment.get_generator(config, tokenizer, engine)
    trainer = make_trainer(config, generator, dispatch=dispatch, engine=engine, train=data, evaluation=data)
    asyncio.run(trainer.train())

    logged = [row for row in trainer.tracker.logged if "pods/all/rows" in row]
    assert [row["step"] for row in logged] == list(range(1, STEPS + 1))
    for row in logged:
        assert row["pods/all/rows"] == PROMPTS * N
        assert row["pods/selected/rows"] == PROMPTS * M
    means = [row["pods/all/reward_mean"] for row in logged]
    assert sum(means[-2:]) / 2 > sum(means[:2]) / 2 + 0.2, means

    # Evaluation asked for its own number, before and after training.
    evaluations = [row for row in trainer.tracker.logged if "eval/all/avg_score" in row]
    assert len(evaluations) == 2
    assert evaluations[1]["eval/all/avg_score"] > evaluations[0]["eval/all/avg_score"] + 0.2
    assert engine.requests == STEPS * PROMPTS * N + 2 * len(data) * EVALUATED

    # The rows of each update are the selected ones of the ledger, with advantages of the kept rewards.
    mini_batches = iter(dispatch.trained)
    for step in range(1, STEPS + 1):
        rows = pq.read_table(tmp_path / "rollouts" / f"step-{step:06d}.parquet").to_pylist()
        rewards = torch.tensor([row["reward"] for row in rows], dtype=torch.float64).view(PROMPTS, N)
        kept = select(rewards, M)
        assert [row["selected"] for row in rows] == kept.mask(N).flatten().tolist()
        expected = advantages(rewards, kept, epsilon=1e-6).flatten()
        completions = [row["completion"] for row in rows if row["selected"]]
        start = 0
        for batch in (next(mini_batches), next(mini_batches)):
            end = start + PROMPTS // 2 * M
            lengths = batch["loss_mask"].sum(1).int().tolist()
            responses = [ids[-length:] for ids, length in zip(batch["sequences"], lengths, strict=True)]
            assert tokenizer.batch_decode(responses, skip_special_tokens=True) == completions[start:end]
            per_token = expected[start:end, None] * batch["response_mask"] / batch["loss_mask"].sum()
            torch.testing.assert_close(batch["advantages"].double(), per_token, atol=1e-6, rtol=1e-5)
            start = end
    assert next(mini_batches, None) is None
