"""The soak's arithmetic, and a few steps of it through the real command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ..benchmarks import BENCHMARKS, module

soak = module("soak")
HELD = {"memory": 1000, "workers": 0, "files": 20}


def samples(**growth):
    """A sample a step; a name of HELD may grow by so much a step."""
    steps = range(1, 101)
    return [
        soak.Sample(step, **{name: size + step * growth.get(name, 0) for name, size in HELD.items()}) for step in steps
    ]


def held(seen):
    return {name for name, row in soak.judge(seen, [0.2, 0.3] * 50).items() if row["holds"]}


def test_what_is_flat_holds_and_what_grows_fails():
    everything = {*HELD, "step time"}
    assert held(samples()) == everything
    for what in HELD:
        assert held(samples(**{what: 1})) == everything - {what}


@pytest.mark.slow
def test_a_few_steps_of_the_real_command(tmp_path):
    samples, path = soak.watch(tmp_path, steps=8, every=0.05)
    ran = soak.Run.open(path)
    assert len(ran.metrics) == 8
    assert len(ran.checkpoints()) == soak.KEPT
    assert max(sample.memory for sample in samples) > 100 * 2**20
    assert max(sample.files for sample in samples) > 3
    assert 0 < max(sample.step for sample in samples) <= 8
    state = json.loads((ran.checkpoints()[-1] / "trainer_state.json").read_text())
    assert len(state["log_history"]) == 1  # a checkpoint does not grow with the steps


@pytest.mark.reliability
@pytest.mark.timeout(3 * 3600)
def test_five_thousand_steps():
    subprocess.run([sys.executable, str(BENCHMARKS / "soak.py"), "--steps", "5000"], check=True, timeout=3 * 3600)
