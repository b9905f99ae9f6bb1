"""What a checkpoint holds of a process: written and read without loss, and refused where it does not fit."""

from __future__ import annotations

import random

import pytest
import torch

from pods_rl.engines.trl.guarded.checkpoints import read_state, write_state
from pods_rl.errors import UserError


def test_a_buffer_survives_a_checkpoint_to_the_last_bit(tmp_path):
    whole = torch.arange(12, dtype=torch.float32).reshape(4, 3) / 7
    buffer = {
        "ids": whole[:2].long(),  # rows of one tensor, as TRL splits a generation
        "logps": whole[:2].bfloat16(),
        "mask": whole[2:, ::2] > 1,  # not contiguous
        "advantages": torch.tensor([float("nan"), -float("inf")]),
        "count": torch.tensor(7),
        "nothing": torch.empty(0, 3),
        "reference": None,
        "has_signal": True,
        "ratio": whole[2:],
    }
    write_state(tmp_path, 0, {"processes": 1, "buffer": [{}, buffer]})
    empty, found = read_state(tmp_path, 0, 1)["buffer"]
    assert empty == {}
    assert list(found) == list(buffer)
    for name, value in buffer.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name].nan_to_num(99), value.nan_to_num(99))
        else:
            assert found[name] is value


def test_numbers_keep_their_kind_and_every_bit(tmp_path):
    draw = random.Random(5)
    numbers = [7, 7.0, float("nan"), float("inf"), 5e-324, *(draw.uniform(-1e9, 1e9) for _ in range(100))]
    text = "\ud800 \x1b[2J </script> \u2028"
    write_state(tmp_path, 0, {"processes": 1, "metrics": {"b": numbers, "a": [text]}})
    found = read_state(tmp_path, 0, 1)["metrics"]
    assert list(found) == ["b", "a"]
    assert [repr(x) for x in found["b"]] == [repr(x) for x in numbers]
    assert found["a"] == [text]


@pytest.mark.parametrize(("made_by", "now"), [(1, 2), (4, 2)])
def test_another_number_of_processes_is_refused_on_each_of_them(tmp_path, made_by, now):
    assert read_state(tmp_path, 0, now) == {}  # a checkpoint of TRL's trainer
    for process in range(made_by):
        write_state(tmp_path, process, {"processes": made_by})
    for process in range(now):
        with pytest.raises(UserError, match=rf"\b{now} process"):
            read_state(tmp_path, process, now)
    assert read_state(tmp_path, made_by - 1, made_by) == {"processes": made_by}
    if made_by > 1:  # another node's folder
        (tmp_path / "pods_state_0.json").unlink()
        with pytest.raises(UserError, match=r"pods_state_0\.json"):
            read_state(tmp_path, 0, made_by)
