"""The paper's recipes on a machine without vLLM and bitsandbytes: shown, and refused only where one trains."""

import re

import pytest

from pods_rl.errors import UserError
from pods_rl.recipe import recipe as checks

from .test_cli import pods

NEEDS = "This recipe needs vllm and bitsandbytes, not installed here: pip install '.[vllm,quant]' in a checkout."


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    find = checks.find_spec
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name in ("vllm", "bitsandbytes") else find(name))


@pytest.mark.slow
def test_a_dry_run_shows_what_is_missing_and_training_is_refused_before_anything_is_written(tmp_path):
    command = ("train", "--recipe", "gsm8k-qwen2.5-3b-pods")
    output = " ".join(pods(*command, "--dry-run").output.split())
    assert "rollouts" in output
    assert f"Note: {NEEDS}" in output
    with pytest.raises(UserError, match=re.escape(NEEDS)):
        pods(*command, "--output", tmp_path / "new")
    assert not (tmp_path / "new").exists()
