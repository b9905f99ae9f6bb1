"""What an accelerate configuration shares out, read without torch, and what it needs."""

from __future__ import annotations

import json

import pytest
import yaml

from pods_rl.errors import UserError
from pods_rl.recipe import accelerate, accelerate_configs, accelerate_sharding, check_accelerate

ALL = "weights, gradients and optimizer states"


def written(folder, **values):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_shipped_configurations():
    known = {name: accelerate_sharding(path)[:2] for name, path in accelerate_configs().items()}
    assert known == {
        "ddp": ("DDP", "nothing"),
        "fsdp2": ("FSDP2", ALL),
        "zero2": ("ZeRO-2", "gradients and optimizer states"),
        "zero3": ("ZeRO-3", ALL),
    }


def test_deepspeed_s_own_file_gives_the_stage(tmp_path):
    own = tmp_path / "ds.json"
    path = written(tmp_path, distributed_type="DEEPSPEED", deepspeed_config={"deepspeed_config_file": str(own)})
    own.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    assert accelerate_sharding(path)[:2] == ("ZeRO-1", "optimizer states")
    for text in ("{}", "no json", "[1]"):
        own.write_text(text)
        with pytest.raises(UserError, match=r"ds\.json gives no zero_optimization\.stage"):
            accelerate_sharding(path)
    own.unlink()
    with pytest.raises(UserError, match=r"ds\.json gives no zero_optimization\.stage"):
        accelerate_sharding(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, "fsdp_version: got 1, expected 2"),
        ({"distributed_type": "FSDP"}, "fsdp_version: got 1, expected 2"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 4}}, "zero_stage: got 4, expected one"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, values, message):
    with pytest.raises(UserError, match=message):
        accelerate_sharding(written(tmp_path, **values))


def test_a_layout_that_cannot_run_here_is_refused(monkeypatch):
    shipped = accelerate_configs()
    monkeypatch.setattr(accelerate, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"zero2: ZeRO-2 needs deepspeed, .*: pip install '.\[deepspeed\]'"):
        check_accelerate(shipped["zero2"], on_cpu=False)
    monkeypatch.setattr(accelerate, "find_spec", lambda name: name)
    check_accelerate(shipped["zero2"], on_cpu=False)
    with pytest.raises(UserError, match=r"zero3: ZeRO-3 runs on GPUs only, and use_cpu is true: .*fsdp2 or ddp"):
        check_accelerate(shipped["zero3"], on_cpu=True)
    for name in ("ddp", "fsdp2"):
        check_accelerate(shipped[name], on_cpu=True)
