"""A file that is too large for the memory is reported as such, and not as a damaged one."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pods_rl.cli.select import read_rollouts
from pods_rl.errors import UserError
from pods_rl.tasks import load_task


@pytest.mark.parametrize("error", [MemoryError("std::bad_alloc"), pa.ArrowMemoryError("malloc of size 9 failed")])
def test_out_of_memory_is_not_a_damaged_file(tmp_path: Path, monkeypatch, error: Exception) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"question": ["1+1?"] * 100, "answer": ["2"] * 100}), path)

    def no_memory(*_, **__):
        raise error

    monkeypatch.setattr("pods_rl.tasks.sources.load_dataset", no_memory)
    with pytest.raises(UserError, match="memory"):
        load_task({"dataset_name": str(path)})
    monkeypatch.setattr("pods_rl.cli.select.parquet_rows", no_memory)
    with pytest.raises(UserError, match="memory"):
        read_rollouts(str(path), "question", "reward")
