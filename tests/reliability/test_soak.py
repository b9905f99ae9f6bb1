"""The soak's arithmetic, and all of its steps every night."""

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


@pytest.mark.reliability
@pytest.mark.timeout(3 * 3600)
def test_five_thousand_steps():
    subprocess.run([sys.executable, str(BENCHMARKS / "soak.py"), "--steps", "5000"], check=True, timeout=3 * 3600)
