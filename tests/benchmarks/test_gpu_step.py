"""The GPU benchmark's small form on a CPU: both trainers on one clock, and what happens to a cell that dies."""

from __future__ import annotations

import pytest
import torch

from pods_rl.errors import UserError

from .. import DEADLINE
from . import module

gpu_step = module("gpu_step")
SHORT = {"size": "tiny", "device": "cpu", "m": 4, "micro-batch": 2, "prompt-tokens": 16, "completion-tokens": 12}
WORDS = [word for key, value in (SHORT | {"steps": 2, "threads": 1}).items() for word in (f"--{key}", str(value))]


@pytest.mark.slow
def test_both_trainers_in_one_table(tmp_path, capfd):
    options = gpu_step.parse([*WORDS, "--n", "8"])
    results = gpu_step.start(options)
    assert gpu_step.cells(options) == [("trl", 4), ("tree", 8), ("rows", 8), ("trl", 8)]
    pods = gpu_step.in_a_process("tree", 8, WORDS, limit=DEADLINE)
    trl = gpu_step.run_cell(gpu_step.parse([*WORDS, "--arm", "trl", "--n", "8"]))
    assert "{" not in capfd.readouterr().out  # of the metrics that transformers prints
    for cell in (pods, trl):
        assert len(cell["steps"]) == 1  # the first is not counted
        assert set(cell["steps"][0]) == set(gpu_step.PHASES)
        assert all(cell["steps"][0][phase] > 0 for phase in ("rollout", "reward", "update"))
        assert cell["peaks"]["update"] > 50 * 2**20
    assert pods["steps"][0]["selection"] > 0 == trl["steps"][0]["selection"]
    results["cells"] = [{"arm": arm, "n": 8, "m": 4, **cell} for arm, cell in (("tree", pods), ("trl", trl))]
    written = gpu_step.table(results).splitlines()
    assert "resident in the process" in written[1]
    assert [line.split("|")[1].strip() for line in written[-2:]] == ["PODS 8 -> 4", "TRL 8"]
    assert len({line.count("|") for line in written[3:]}) == 1


@pytest.mark.slow
def test_a_cell_that_is_killed_or_out_of_memory_is_a_row():
    late = gpu_step.in_a_process("tree", 8, WORDS, limit=0.01)
    assert late == {"failed": "not done after 0.01 s"}
    wrong = gpu_step.in_a_process("tree", 8, ["--size", "no such"], limit=DEADLINE)
    assert wrong["failed"].startswith("exit code 2: ")
    cell = {"arm": "trl", "n": 256, "m": 16}
    assert gpu_step.row(cell | {"out_of_memory": "update", "message": "CUDA"})[:2] == [
        "TRL 256",
        "out of memory in update",
    ]
    assert gpu_step.row(cell | late)[1] == "not done after 0.01 s"


@pytest.mark.parametrize("told", [False, True])
def test_out_of_memory_is_a_result(monkeypatch, told):
    """As torch raises it, and as PODSTrainer raises it again."""

    def build(_):
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")
        if told:
            raise UserError("Out of memory in update: lower this") from error
        raise error

    monkeypatch.setattr(gpu_step, "build", build)
    assert gpu_step.run_cell(gpu_step.parse(["--n", "8"])) == {
        "out_of_memory": "loading",
        "message": "CUDA out of memory. Tried to allocate 2.00 GiB",
    }


def test_the_shape_is_qwen_s():
    """3.09 billion parameters, as published; 2.77 billion of them are not the embedding."""
    shape = gpu_step.QWEN_3B
    hidden, wide, layers = (shape[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + hidden + 2 * kv + 3 * hidden * wide + 2 * hidden
    without = layers * layer + hidden
    assert without == pytest.approx(2.77e9, rel=0.005)
    assert without + shape["vocab_size"] * hidden == pytest.approx(3.09e9, rel=0.005)
