"""FSDP2 on two real CPU processes: what is shared, that it trains as one process does, and that it goes on exactly."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pods_rl.runs import Run
from tests.numeric import FLOAT32, assert_near

from ..reliability.commands import server
from ..test_evaluation_processes import RECIPE, of_one_process
from . import sharded_processes

pytestmark = pytest.mark.slow


# -- the trainer ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(run_processes):
    """The folder that two processes with the shipped configuration, and a single one, left."""
    return run_processes("sharded_processes")


@pytest.fixture(scope="module")
def single(sharded):
    """The trainer of one process, after the same two steps."""
    return sharded_processes.train(sharded, processes=1)


def reports(folder):
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(2)]


def test_each_process_holds_half_of_every_parameter_before_and_after_generating(sharded):
    first, second = reports(sharded)
    for report in (first, second):
        assert report["layout"] == "FSDP2"
        assert len(report["before"]) == report["parameters"] > 10
        assert report["after"] == report["before"]
        assert report["inside"] == {}  # complete tensors
        assert report["resharding after"] == report["resharding before"]
        assert set(report["resharding before"]) == {True, False}
    for name, (here, total) in first["before"].items():
        assert here + second["before"][name][0] == total, name
        assert here == total // 2, name


def test_the_update_is_the_single_process_s(sharded, single):
    expected = load_file(sharded / "1-0.safetensors")
    assert any(key.startswith("gradient") and value.abs().max() > 1e-3 for key, value in expected.items())
    for rank in range(2):
        assert_near(load_file(sharded / f"2-{rank}.safetensors"), expected, FLOAT32)


def test_processes_with_unequally_much_to_generate_do_not_wait_for_each_other(sharded, single):
    first, second = reports(sharded)
    assert first["texts"] + second["texts"] == sharded_processes.sample(single, [0, 1, 2, 3, 4])


def test_the_final_policy_is_plain_and_whole(sharded):
    assert {path.suffix for path in (sharded / "final").iterdir()} == {".json", ".safetensors"}
    trained = load_file(sharded / "2-0.safetensors")
    saved = load_file(sharded / "final" / "model.safetensors")
    assert {f"weight {name}" for name in saved} == {name for name in trained if name.startswith("weight")}  # tied: once
    for name, parameter in AutoModelForCausalLM.from_pretrained(sharded / "final").named_parameters():
        assert torch.equal(parameter, trained[f"weight {name}"]), name


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of four steps, and one that was cut off after two and went on; tests/test_ranks.py has the launcher."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = RECIPE | {
        "num_generations": 4, "num_rollouts": 8, "max_steps": 4, "save_steps": 2, "learning_rate": 1e-3,
        "eval_seconds": 1e6, "eval_prompts": 5, "eval_temperature": 0.0, "ledger_every": 1,
    }  # fmt: skip
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    variables = sharded_processes.launch_variables()
    server().run_ranks("train", "--config", "r.yaml", "--output", "whole", cwd=folder, environment=variables)
    shutil.copytree(folder / "whole", folder / "resumed")
    for lost in ("checkpoint-4", "final"):
        shutil.rmtree(folder / "resumed" / "checkpoints" / lost)
    server().run_ranks("train", "--output", "resumed", "--resume", cwd=folder, environment=variables)
    return Run.open(folder / "whole"), Run.open(folder / "resumed"), recipe


def test_a_resumed_run_ends_where_the_whole_one_did(runs):
    whole, resumed, _ = runs
    assert whole.state == resumed.state == "finished"
    assert any(row["grad_norm"] > 0 for row in whole.metrics[2:])
    for folder in ("checkpoint-4", "final"):
        one, other = (load_file(run.path / "checkpoints" / folder / "model.safetensors") for run in (whole, resumed))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), folder
    files = [run.path / "checkpoints" / "checkpoint-4" / "optimizer.bin" for run in (whole, resumed)]
    states = [torch.load(file, weights_only=True)["state"] for file in files]
    for (number, one), other in zip(sorted(states[0].items()), (states[1][n] for n in sorted(states[1])), strict=True):
        assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one), number
    for step in (3, 4):
        tables = [pq.read_table(run.path / "rollouts" / f"step-{step:06d}.parquet") for run in (whole, resumed)]
        assert tables[0].equals(tables[1])


def test_a_checkpoint_loads_without_pickle_and_by_from_pretrained(runs):
    folder = runs[0].path / "checkpoints" / "checkpoint-2"
    torches = {path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")}
    assert torches == {
        "pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth",
    }  # fmt: skip
    from transformers.trainer import safe_globals  # numpy's random state

    for name in torches:
        with safe_globals():
            torch.load(folder / name, weights_only=True)
    saved = load_file(folder / "model.safetensors")
    for name, parameter in AutoModelForCausalLM.from_pretrained(folder).named_parameters():
        assert torch.equal(parameter, saved[name])


def test_the_run_says_how_it_was_laid_out_and_evaluates_as_one_process(runs):
    whole, _, recipe = runs
    assert whole.environment["layout"] == "FSDP2"
    assert whole.environment["processes"] == 2
    assert [row["step"] for row in whole.evals] == [0, 4]
    one, _ = of_one_process(recipe | {"per_device_train_batch_size": 4}, seed=42)
    assert pq.read_table(whole.evaluation_files()[0]).to_pydict() == one.columns()
    assert one.scores["accuracy"] > 0
    for row in whole.metrics:  # a group over both processes
        ledger = pq.read_table(whole.path / "rollouts" / f"step-{row['step']:06d}.parquet").to_pydict()
        assert ledger["rollout"][:8] == list(range(8))
        assert len(set(ledger["prompt"][:8])) == 1
        assert row["reward"] == pytest.approx(sum(ledger["reward"]) / len(ledger["reward"]))
        assert row["pods/tokens/generated"] == sum(ledger["completion_tokens"])
