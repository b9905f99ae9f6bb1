"""The state of a process in a checkpoint is refused by another number of processes."""

from __future__ import annotations

import pytest

from pods_rl.engines.trl.guarded.checkpoints import read_state, write_state
from pods_rl.errors import UserError


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
